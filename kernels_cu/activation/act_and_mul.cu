// act_and_mul: the activation of one half of each row, times the other half.
//
//     out[r, i] = T(T(ACT(g)) * u)    T: dtype of out and input
//     g, u = input[r, i], input[r, hidden_size + i] if ACT_FIRST, else the other way round
//
// One vector of each half per thread (elementwise.cuh).
//
// Constants:
//     ACT           activation of math.cuh: silu, gelu or gelu_tanh
//     ACT_FIRST     whether g is the first half

#include "elementwise.cuh"
#include "math.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
act_and_mul(scalar_t* out,          // [num_rows, hidden_size]
            const scalar_t* input,  // [num_rows, 2 * hidden_size]
            int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const scalar_t* first = input + at.row * input_stride + at.column;
    const vec_t g = vec_t::load(ACT_FIRST ? first : first + hidden_size);
    const vec_t u = vec_t::load(ACT_FIRST ? first + hidden_size : first);
    (ACT(g) * u).store(out + at.row * out_stride + at.column);
}
