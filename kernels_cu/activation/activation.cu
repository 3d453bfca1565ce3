// activation: applies an activation function to every element.
//
//     out[r, i] = T(ACT(input[r, i]))    T: dtype of out and input
//
// One vector per thread (elementwise.cuh).
//
// Constants:
//     ACT           activation of math.cuh: gelu, gelu_new, gelu_fast, gelu_quick, relu2 or silu

#include "elementwise.cuh"
#include "math.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
activation(scalar_t* out,          // [num_rows, hidden_size]
           const scalar_t* input,  // [num_rows, hidden_size]
           int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const vec_t x = vec_t::load(input + at.row * input_stride + at.column);
    ACT(x).store(out + at.row * out_stride + at.column);
}
