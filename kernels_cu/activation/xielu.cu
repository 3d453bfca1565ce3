// xielu: an activation with a quadratic and an exponential side, each with a learned strength.
//
//     out[r, i] = a_p * x * x + beta * x                              for x = input[r, i] > 0
//               = (expm1(min(x, eps)) - x) * a_n + beta * x           else
//     a_p = softplus(alpha_p), a_n = beta + softplus(alpha_n)
//
// Every operation rounds to T, the dtype of the tensors, as in eager tensor arithmetic; beta and eps are rounded to T
// first. One vector per thread (elementwise.cuh).

#include "elementwise.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

// log(1 + exp(x)), which for x above 20 equals x in float32.
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
xielu(scalar_t* out,            // [num_rows, hidden_size]
      const scalar_t* input,    // [num_rows, hidden_size]
      const scalar_t* alpha_p,  // [1]
      const scalar_t* alpha_n,  // [1]
      int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride, float beta, float eps) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    vec_t x = vec_t::full(0.0f);
    if (at.inside) x = vec_t::load(input + at.row * input_stride + at.column);
    beta = round_to<scalar_t>(beta);
    eps = round_to<scalar_t>(eps);

    // Computed before the barrier: after it, the compiler would interleave the exponentials with the code below and
    // spill registers.
    const vec_t exponential = map(x, [=](float value) { return expm1f(fminf(value, eps)); });

    // Logarithms are slow: two threads compute them for the block.
    __shared__ float alphas[2];
    if (threadIdx.x < 2) {
        const float alpha = round_to<scalar_t>(softplus(to_float(threadIdx.x == 0 ? *alpha_p : *alpha_n)));
        alphas[threadIdx.x] = threadIdx.x == 0 ? alpha : round_to<scalar_t>(beta + alpha);
    }
    __syncthreads();
    if (!at.inside) return;

    float v[VEC_SIZE], a[VEC_SIZE], b[VEC_SIZE];
    x.to_floats(v);
    exponential.to_floats(a);
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) {
        const bool negative = ieee_less_equal(v[j], 0.0f);
        a[j] = negative ? a[j] - v[j] : ieee_multiply(alphas[0], v[j]);
        b[j] = negative ? alphas[1] : v[j];
    }
    const vec_t curve = vec_t::from_floats(a) * vec_t::from_floats(b);
    (curve + vec_t::full(beta) * x).store(out + at.row * out_stride + at.column);
}
