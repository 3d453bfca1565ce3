// swiglustep_and_mul: SwiGLU with both factors clamped.
//
//     out[r, i] = T(min(silu(g), limit) * max(min(u, limit), -limit))   where g, u = input[r, i], input[r, hidden_size + i]
//
// Computed in float32 and rounded once; NaN stays NaN. One vector of each half per thread (chunk.cuh).
//
// Constants
//     scalar_t      T: element type of out and input
//     VEC_SIZE      elements in one memory access; divides hidden_size
//     NUM_THREADS   threads in the block
//     ROW_THREADS   of them that share a row; divides NUM_THREADS
//     PLANES        whether the rows need the third dimension of the grid
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "chunk.cuh"
#include "math.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

// The comparison is false for NaN.
DEVICE float at_most(float x, float limit) { return x > limit ? limit : x; }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
swiglustep_and_mul(scalar_t* out,          // [num_rows, hidden_size]
                   const scalar_t* input,  // [num_rows, 2 * hidden_size]
                   int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride,
                   float limit) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const scalar_t* first = input + at.row * input_stride + at.column;
    const vec_t g = vec_t::load(first);
    const vec_t u = vec_t::load(first + hidden_size);
    float y[VEC_SIZE], v[VEC_SIZE];
    swish<false>(y, g, 1.0f);
    u.to_floats(v);
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) {
        y[j] = ieee_multiply(at_most(y[j], limit), -at_most(-at_most(v[j], limit), limit));
    }
    vec_t::from_floats(y).store(out + at.row * out_stride + at.column);
}
