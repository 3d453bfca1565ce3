// merge_attn_states: combines the attention over two parts of the keys, prefix and suffix, by their log-sum-exps.
//
//     p, s = prefix_lse, suffix_lse,   w = exp(-|p - s|)
//     output = T((prefix_output * a + suffix_output * b) / (1 + w)),   a, b = 1, w if p >= s else w, 1
//     output_lse = max(p, s) + log(1 + w)
//
// A part with an infinite lse, of either sign, is empty: the result is the other part. If both parts are empty, the
// result is the prefix, with an lse of -inf. Tokens from num_prefix_tokens on have no prefix: the suffix and its lse
// are copied.
//
// With an output_scale, output = fp8(result * (1 / output_scale)), from the float32 result.
//
// Thread mapping: LANES adjacent threads share one head of one token; a thread takes one vector at a time.
//
// Constants
//     scalar_t      T: element type of output, prefix_output and suffix_output
//     NUM_HEADS     heads of a token
//     HEAD_SIZE     elements of a head; a multiple of VEC_SIZE
//     output_t      element type of output: scalar_t, or an fp8 type with HAS_SCALE
//     HAS_SCALE     output_scale is given, and output is fp8

#include "quant.cuh"
#include "vec.cuh"

constexpr int LANES = HEAD_SIZE / VEC_SIZE < NUM_THREADS ? HEAD_SIZE / VEC_SIZE : NUM_THREADS;
constexpr int BLOCK_ROWS = NUM_THREADS / LANES;
using vec_t = Vec<scalar_t, VEC_SIZE>;

// An lse of +inf means an empty part, as -inf does.
DEVICE float without_infinity(float lse) { return fabsf(lse) > FLOAT_MAX ? -fabsf(lse) : lse; }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
merge_attn_states(output_t* output,               // [num_tokens, NUM_HEADS, HEAD_SIZE]
                  const scalar_t* prefix_output,  // [num_tokens, NUM_HEADS, HEAD_SIZE]
                  const float* prefix_lse,        // [NUM_HEADS, num_tokens]
                  const scalar_t* suffix_output,  // [num_tokens, NUM_HEADS, HEAD_SIZE]
                  const float* suffix_lse,        // [NUM_HEADS, num_tokens]
                  float* output_lse,              // [NUM_HEADS, num_tokens] or null
                  const float* output_scale,      // one element, or null
                  int64_t num_tokens, int64_t num_prefix_tokens, int64_t output_stride, int64_t output_head_stride,
                  int64_t prefix_stride, int64_t prefix_head_stride, int64_t suffix_stride, int64_t suffix_head_stride,
                  int64_t prefix_lse_stride, int64_t prefix_lse_head_stride, int64_t suffix_lse_stride,
                  int64_t suffix_lse_head_stride, int64_t output_lse_stride, int64_t output_lse_head_stride) {
    await_previous_kernel();
    const int slot = threadIdx.x / LANES;
    const int64_t row = int64_t(blockIdx.x) * BLOCK_ROWS + slot;
    if (slot >= BLOCK_ROWS || row >= num_tokens * NUM_HEADS) return;
    const int64_t token = uint64_t(row) / NUM_HEADS;
    const int head = row - token * NUM_HEADS;
    const float p = without_infinity(prefix_lse[token * prefix_lse_stride + head * prefix_lse_head_stride]);
    const float given_s = suffix_lse[token * suffix_lse_stride + head * suffix_lse_head_stride];
    const float s = without_infinity(given_s);
    prefix_output += token * prefix_stride + head * prefix_head_stride;
    suffix_output += token * suffix_stride + head * suffix_head_stride;
    output += token * output_stride + head * output_head_stride;

    const float smaller = expf(-fabsf(p - s));
    const float factor = reciprocal_of(1.0f + smaller);
    const float prefix_factor = p >= s ? factor : smaller * factor, suffix_factor = p >= s ? smaller * factor : factor;
    // A part with an lse of NaN is not empty.
    const bool no_prefix = token >= num_prefix_tokens, only_prefix = s < -FLOAT_MAX && p == p && !no_prefix;
    const bool only_suffix = no_prefix || (p < -FLOAT_MAX && s == s && !only_prefix);
    float reciprocal = 1.0f;
    if constexpr (HAS_SCALE) reciprocal = reciprocal_or_zero(*output_scale);
#pragma unroll
    for (int i = 0; i < ceil_div(HEAD_SIZE, LANES * VEC_SIZE); ++i) {
        const int element = (i * LANES + threadIdx.x % LANES) * VEC_SIZE;
        if (HEAD_SIZE % (LANES * VEC_SIZE) && element >= HEAD_SIZE) break;
        const vec_t prefix = vec_t::load(prefix_output + element), suffix = vec_t::load(suffix_output + element);
        float x[VEC_SIZE], y[VEC_SIZE];
        prefix.to_floats(x);
        suffix.to_floats(y);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            x[j] = fmaf(x[j], prefix_factor, y[j] * suffix_factor);  // an explicit fma: the same for all VEC_SIZE
        }
        if constexpr (HAS_SCALE) {
            float copied[VEC_SIZE];
            prefix.to_floats(copied);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                const float value = only_suffix ? y[j] : only_prefix ? copied[j] : x[j];
                x[j] = scaled_fp8<output_t>(value, reciprocal);
            }
            Vec<output_t, VEC_SIZE>::from_floats(x).store(output + element);
        } else {
            vec_t merged = vec_t::from_floats(x);
            if (only_prefix) merged = prefix;
            if (only_suffix) merged = suffix;
            merged.store(reinterpret_cast<scalar_t*>(output) + element);
        }
    }
    if (HAS_LSE && threadIdx.x % LANES == 0) {
        const float merged = fmaxf(p, s) + logf(1.0f + smaller);
        output_lse += token * output_lse_stride + head * output_lse_head_stride;
        *output_lse = no_prefix ? given_s : only_prefix ? p : only_suffix ? s : merged;
    }
}
