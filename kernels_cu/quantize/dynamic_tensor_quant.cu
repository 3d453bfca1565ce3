// dynamic_tensor_quant: fp8 quantisation of a matrix with one scale, from the partial maxima that absmax.cu has
// written.
//
//     s = max(partial) / 448, written to scale[0]
//     result = fp8(clamp(x * r))    r = 1 / s, or 0 where that is not finite; NaN becomes the largest fp8
//
// A block has one chunk, a piece of one row: NUM_THREADS * BATCH vectors, vector i of thread t at i * NUM_THREADS + t.
// Blocks take the chunks last to first, because L2 still holds the last ones that absmax.cu has read.
//
// Constants:
//     code_t        fp8_e4m3_t or fp8_e4m3fnuz_t (224 instead of 448)
//     BATCH         vectors that a thread has in flight

#include "quant.cuh"
#include "reduce.cuh"
#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
dynamic_tensor_quant(code_t* result,         // [num_rows, row_size]
                     const scalar_t* input,  // [num_rows, row_size]
                     float* scale,           // one element
                     const float* partial,   // [num_partial]
                     int64_t num_partial, int64_t row_chunks, int64_t row_size, int64_t result_stride,
                     int64_t input_stride) {
    await_previous_kernel();
    __shared__ float warp_max[NUM_THREADS / WARP_SIZE];
    const unsigned chunk = gridDim.x - 1 - blockIdx.x, row = chunk / unsigned(row_chunks);
    const int64_t first = (int64_t(chunk - row * unsigned(row_chunks)) * BATCH * NUM_THREADS + threadIdx.x) * VEC_SIZE;
    vec_t x[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        const int64_t column = first + i * NUM_THREADS * VEC_SIZE;
        if (column < row_size) x[i] = vec_t::load(input + row * input_stride + column);
    }
    float s = 0.0f;
    for (int i = threadIdx.x; i < num_partial; i += NUM_THREADS) s = ieee_max(s, partial[i]);
    s = ieee_divide(row_reduce<Max, NUM_THREADS>(s, warp_max), Codes<code_t>::largest);
    if (threadIdx.x + blockIdx.x == 0) *scale = s;
    const float reciprocal = reciprocal_or_zero(s);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        const int64_t column = first + i * NUM_THREADS * VEC_SIZE;
        if (column >= row_size) break;
        float v[VEC_SIZE];
        x[i].to_floats(v);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[j] = scaled_fp8<code_t>(v[j], reciprocal);
        Vec<code_t, VEC_SIZE>::from_floats(v).store(result + row * result_stride + column);
    }
}
