// situ_and_mul: SituGLU, a gated activation by the hyperbolic tangent, which bounds the gate and the factor.
//
//     out[r, i] = T(beta * tanh(g / beta) / (1 + exp(-g)) * y)    T: dtype of out and input
//     g, u = input[r, i], input[r, hidden_size + i];  y = linear_beta * tanh(u / linear_beta) if linear_beta > 0, else u
//
// One vector of each half per thread (elementwise.cuh), computed in float32 and rounded once.

#include "elementwise.cuh"
#include "gated.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
situ_and_mul(scalar_t* out,          // [num_rows, hidden_size]
             const scalar_t* input,  // [num_rows, 2 * hidden_size]
             int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride, float beta,
             float linear_beta) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const auto [g, u] = Gated<scalar_t, VEC_SIZE>::load(input, at, hidden_size, input_stride);
    situ(g, u, beta, linear_beta).store(out + at.row * out_stride + at.column);
}
