// silu_and_mul_quant: silu_and_mul, written as fp8 under one given scale.
//
//     y = T(T(silu(g)) * u)    where g, u = input[r, i], input[r, hidden_size + i]
//     result[r, i] = fp8(clamp(y * (1 / scale)))
//
// The value is multiplied by the float32 reciprocal. NaN becomes the largest fp8 value. T is the element type of input.
//
// Threads: one vector of each half per thread (elementwise.cuh).
//
// Constants
//     code_t        element type of result: fp8_e4m3_t or fp8_e4m3fnuz_t

#include "elementwise.cuh"
#include "math.cuh"
#include "quant.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
silu_and_mul_quant(code_t* result,         // [num_rows, hidden_size]
                   const scalar_t* input,  // [num_rows, 2 * hidden_size]
                   const float* scale,     // one element
                   int64_t num_rows, int64_t hidden_size, int64_t result_stride, int64_t input_stride) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const auto [g, u] = Gated<scalar_t, VEC_SIZE>::load(input, at, hidden_size, input_stride);
    const float reciprocal = reciprocal_or_zero(*scale);
    const vec_t y = silu(g) * u;
    float v[VEC_SIZE];
    y.to_floats(v);
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) v[j] = scaled_fp8<code_t>(v[j], reciprocal);
    Vec<code_t, VEC_SIZE>::from_floats(v).store(result + at.row * result_stride + at.column);
}
