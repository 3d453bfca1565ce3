// absmax: the largest magnitude of a matrix, in parts: one for each block, NaN left out.
//
//     partial[b] = max |input[r, i]| over the chunks b, b + gridDim.x, b + 2 gridDim.x, ... of the matrix
//
// A chunk is BATCH vectors of each thread, next to each other in a row. A maximum does not depend on the order.
//
// Constants
//     scalar_t      element type of input
//     VEC_SIZE      elements in one memory access; divides row_size
//     BATCH         vectors that a thread has in flight
//     NUM_THREADS   threads in the block

#include "reduce.cuh"
#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 2)
absmax(const scalar_t* input,  // [num_rows, row_size]
       float* partial,         // [gridDim.x]
       int64_t num_chunks, int64_t row_chunks, int64_t row_size, int64_t input_stride) {
    await_previous_kernel();
    __shared__ float most[NUM_THREADS / WARP_SIZE];
    float largest = 0.0f;
    for (unsigned chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        const unsigned row = chunk / unsigned(row_chunks);
        const int64_t first = (int64_t(chunk - row * unsigned(row_chunks)) * BATCH * NUM_THREADS + threadIdx.x) * VEC_SIZE;
        vec_t x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int64_t column = first + i * NUM_THREADS * VEC_SIZE;
            x[i] = vec_t::full(0.0f);
            if (column < row_size) x[i] = vec_t::load(input + row * input_stride + column);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) largest = ieee_max(largest, x[i].absmax());
    }
    largest = row_reduce<Max, NUM_THREADS>(largest, most);
    if (threadIdx.x == 0) partial[blockIdx.x] = largest;
}
