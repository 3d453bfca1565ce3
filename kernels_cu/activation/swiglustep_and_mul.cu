// swiglustep_and_mul: SwiGLU with both factors clamped.
//
//     out[r, i] = T(min(silu(g), limit) * min(max(u, -limit), limit))
//     where g, u = input[r, i], input[r, hidden_size + i]
//
// T is the element type of out and input. Computed in float32 and rounded once; NaN stays NaN.
//
// Threads: one vector of each half per thread (elementwise.cuh).

#include "elementwise.cuh"
#include "gated.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
swiglustep_and_mul(scalar_t* out,          // [num_rows, hidden_size]
                   const scalar_t* input,  // [num_rows, 2 * hidden_size]
                   int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride, float limit) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const auto [g, u] = Gated<scalar_t, VEC_SIZE>::load(input, at, hidden_size, input_stride);
    swiglustep(g, u, limit).store(out + at.row * out_stride + at.column);
}
