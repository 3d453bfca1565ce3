// absmax: the largest magnitude of a matrix, one partial maximum per block; NaN is left out.
//
//     partial[b] = max |input[r, i]| over the chunks b, b + gridDim.x, b + 2 gridDim.x, ... of the matrix
//
// A chunk is a piece of one row: NUM_THREADS * BATCH vectors, vector i of thread t at i * NUM_THREADS + t.
//
// Constants:
//     BATCH         vectors that a thread has in flight

#include "reduce.cuh"
#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 2)
absmax(const scalar_t* input,  // [num_rows, row_size]
       float* partial,         // [gridDim.x]
       int64_t num_chunks, int64_t row_chunks, int64_t row_size, int64_t input_stride) {
    await_previous_kernel();
    __shared__ float warp_max[NUM_THREADS / WARP_SIZE];
    float max_abs = 0.0f;
    for (unsigned chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        const unsigned row = chunk / unsigned(row_chunks);
        const int64_t first =
            (int64_t(chunk - row * unsigned(row_chunks)) * BATCH * NUM_THREADS + threadIdx.x) * VEC_SIZE;
        vec_t x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int64_t column = first + i * NUM_THREADS * VEC_SIZE;
            x[i] = vec_t::full(0.0f);
            if (column < row_size) x[i] = vec_t::load(input + row * input_stride + column);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) max_abs = ieee_max(max_abs, x[i].absmax());
    }
    max_abs = row_reduce<Max, NUM_THREADS>(max_abs, warp_max);
    if (threadIdx.x == 0) partial[blockIdx.x] = max_abs;
}
