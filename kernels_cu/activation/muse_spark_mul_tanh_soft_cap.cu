// muse_spark_mul_tanh_soft_cap: multiplies logits and caps them softly.
//
//     out[r, i] = soft_cap_temp * tanh(input[r, i] * multiplier / soft_cap_temp)    in float32
//
// One vector per thread (elementwise.cuh).
//
// Constants
//     scalar_t      element type of input

#include "elementwise.cuh"
#include "math.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
muse_spark_mul_tanh_soft_cap(float* out,             // [num_rows, hidden_size]
                             const scalar_t* input,  // [num_rows, hidden_size]
                             int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride,
                             float multiplier, float soft_cap_temp) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    float x[VEC_SIZE];
    vec_t::load(input + at.row * input_stride + at.column).to_floats(x);
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) {
        x[j] = ieee_multiply(soft_cap_temp, tanhf(ieee_divide(ieee_multiply(x[j], multiplier), soft_cap_temp)));
    }
    Vec<float, VEC_SIZE>::from_floats(x).store(out + at.row * out_stride + at.column);
}
