// silu_and_mul_with_clamp: SwiGLU of clamped halves.
//
//     out[r, i] = T(T(g / (1 + exp(-alpha * g))) * (u + beta))    T: dtype of out and input
//     g = min(input[r, i], T(limit)), u = max(min(input[r, hidden_size + i], T(limit)), -T(limit)); NaN stays NaN
//
// One vector of each half per thread (elementwise.cuh).

#include "elementwise.cuh"
#include "gated.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
silu_and_mul_with_clamp(scalar_t* result,       // [num_rows, hidden_size]
                        const scalar_t* input,  // [num_rows, 2 * hidden_size]
                        int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride, float limit,
                        float alpha, float beta) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const auto [g, u] = Gated<scalar_t, VEC_SIZE>::load(input, at, hidden_size, input_stride);
    // A u of -0 stays: -0 + 0 would be +0.
    const float addend = beta == 0.0f ? -0.0f : beta;
    clamped_swiglu(g, u, limit, alpha, addend).store(result + at.row * out_stride + at.column);
}
