// fatrelu_and_mul: the first half of each row where it exceeds a threshold, times the second half.
//
//     out[r, i] = T((g <= T(threshold) ? 0 : g) * u)    where g, u = input[r, i], input[r, hidden_size + i]
//
// T is the element type of out and input. NaN in g stays NaN.
//
// Threads: one vector of each half per thread (elementwise.cuh).

#include "elementwise.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
fatrelu_and_mul(scalar_t* out,          // [num_rows, hidden_size]
                const scalar_t* input,  // [num_rows, 2 * hidden_size]
                int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride, float threshold) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const auto [g, u] = Gated<scalar_t, VEC_SIZE>::load(input, at, hidden_size, input_stride);
    const float bound = round_to<scalar_t>(threshold);
    const vec_t open = map(g, [=](float x) { return ieee_less_equal(x, bound) ? 0.0f : x; });
    (open * u).store(out + at.row * out_stride + at.column);
}
