// mhc_post: the output of a layer to the streams of manifold-constrained hyper-connections (mHC), which are mixed.
//
//     out[t, j] = T(post_layer_mix[t, j] * x[t] + sum_i comb_res_mix[t, i, j] * residual[t, i]), in float32
//
// Products and additions are rounded one by one, in the order of the formula, so that `mhc_fused_post_pre` gives the
// streams of its reference to the layer after.
//
// A thread has a vector of each stream.
//
// Constants
//     HC            streams of a token
//     HIDDEN_SIZE   elements of a stream; a multiple of VEC_SIZE

#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int VECS = HIDDEN_SIZE / VEC_SIZE;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
mhc_post(scalar_t* out,                // [num_tokens, HC, HIDDEN_SIZE]
         const scalar_t* x,            // [num_tokens, HIDDEN_SIZE]
         const scalar_t* residual,     // [num_tokens, HC, HIDDEN_SIZE]
         const float* post_layer_mix,  // [num_tokens, HC]
         const float* comb_res_mix,    // [num_tokens, HC, HC]
         int64_t num_tokens, int64_t out_token_stride, int64_t out_stream_stride, int64_t x_stride,
         int64_t token_stride, int64_t stream_stride, int64_t comb_token_stride, int64_t comb_row_stride) {
    await_previous_kernel();
    const int64_t thread = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x, token = thread / VECS;
    if (token >= num_tokens) return;
    const int64_t column = thread % VECS * VEC_SIZE;
    const scalar_t* of_token = residual + token * token_stride + column;
    vec_t streams[HC];
#pragma unroll
    for (int i = 0; i < HC; ++i) streams[i] = vec_t::load(of_token + i * stream_stride);
    const vec_t added = vec_t::load(x + token * x_stride + column);
#pragma unroll
    for (int j = 0; j < HC; ++j) {
        const float post = post_layer_mix[token * HC + j];
        float y[VEC_SIZE];
#pragma unroll
        for (int k = 0; k < VEC_SIZE; ++k) y[k] = ieee_multiply(post, added[k]);
#pragma unroll
        for (int i = 0; i < HC; ++i) {
            const float comb = comb_res_mix[token * comb_token_stride + i * comb_row_stride + j];
#pragma unroll
            for (int k = 0; k < VEC_SIZE; ++k) y[k] = ieee_add(y[k], ieee_multiply(comb, streams[i][k]));
        }
        vec_t::from_floats(y).store(out + token * out_token_stride + j * out_stream_stride + column);
    }
}
