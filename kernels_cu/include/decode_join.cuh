// decode_join.cuh: the join of the splits of a sequence by the last of their blocks, in attention_decode: what
// attention_combine.cu computes, without a launch of its own.
//
//     out = sum_s w_s o_s / (sum_s w_s + 1e-6),   w_s = z_s exp(m_s - m),   m = max_s m_s
//
// where split s has left its largest logit m_s, the sum of exponentials z_s relative to m_s, and the mean of values o_s.
//
// The constants in capitals that are not defined here are those of attention_decode.cu.
#pragma once
#include "decode_tile.cuh"

// Splits whose results a warp loads at once.
constexpr int JOIN_BATCH = HEAD_SIZE > 128 ? 4 : 8;

// The splits of one query head, joined by a warp in their order, whichever block was the last. partial_out [count,
// HEAD_SIZE], partial_max [count] and partial_sum [count] are of the first split on. max_logit, in units of log 2,
// exp_sum and total(i, e) are what write_result takes.
struct JoinedSplits {
    static constexpr int ELEMENTS = ceil_div(HEAD_SIZE, WARP_SIZE);  // of a lane: every WARP_SIZE-th
    float max_logit = minus_infinity(), exp_sum = 0.0f, sum[ELEMENTS] = {};

    DEVICE JoinedSplits(const float* partial_out, const float* partial_max, const float* partial_sum, int count) {
        const int lane = threadIdx.x % WARP_SIZE;
        for (int first = 0; first < count; first += JOIN_BATCH) {
            float logit[JOIN_BATCH], weight[JOIN_BATCH], x[JOIN_BATCH][ELEMENTS];
#pragma unroll
            for (int i = 0; i < JOIN_BATCH; ++i) {
                const int split = min(first + i, count - 1);  // a load under a condition would be issued late
                logit[i] = load_fresh(partial_max + split);
                weight[i] = load_fresh(partial_sum + split);
#pragma unroll
                for (int e = 0; e < ELEMENTS; ++e) {
                    const int element = min(lane + e * WARP_SIZE, HEAD_SIZE - 1);
                    x[i][e] = load_fresh(partial_out + int64_t(split) * HEAD_SIZE + element);
                }
            }
            float larger = max_logit;
#pragma unroll
            for (int i = 0; i < JOIN_BATCH; ++i) larger = fmaxf(larger, logit[i]);
            // Relative to `larger` before the product with LOG2_E: the floats next to a large logit are far apart.
            const float base = larger == minus_infinity() ? 0.0f : larger;
            const float shrink = estimate_exp2((max_logit - base) * LOG2_E);
            max_logit = larger;
            exp_sum *= shrink;
#pragma unroll
            for (int e = 0; e < ELEMENTS; ++e) sum[e] *= shrink;
#pragma unroll
            for (int i = 0; i < JOIN_BATCH; ++i) {
                if (first + i >= count) continue;
                const float factor = weight[i] * (1.0f / FULL_SCALE<float>)*estimate_exp2((logit[i] - base) * LOG2_E);
                exp_sum += factor;
#pragma unroll
                for (int e = 0; e < ELEMENTS; ++e) sum[e] = fmaf(factor, x[i][e], sum[e]);
            }
        }
        max_logit *= LOG2_E;
    }
};
