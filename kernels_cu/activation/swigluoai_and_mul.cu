// swigluoai_and_mul: clamped SwiGLU of gates and factors that alternate in a row.
//
//     out[r, i] = T((u + 1) * g / (1 + exp(-alpha * g)))    T: dtype of out and input
//     g = min(input[r, 2i], limit), u = max(min(input[r, 2i + 1], limit), -limit); NaN becomes limit
//
// One vector of results per thread (elementwise.cuh), computed in float32 and rounded once.

#include "elementwise.cuh"
#include "gated.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
swigluoai_and_mul(scalar_t* out,          // [num_rows, hidden_size]
                  const scalar_t* input,  // [num_rows, hidden_size, 2]
                  int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride, float alpha,
                  float limit) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const scalar_t* pairs = input + at.row * input_stride + 2 * at.column;
    swigluoai(vec_t::load(pairs), vec_t::load(pairs + VEC_SIZE), alpha, limit)
        .store(out + at.row * out_stride + at.column);
}
