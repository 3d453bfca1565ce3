// topk_gating: routing: the TOP_K best experts of each token, and their weights.
//
//     s = score(logit)                     SCORING of the token's logits, in float
//     key = logit, or s + e_score_correction_bias if HAS_BIAS
//     ids = the TOP_K experts with the largest keys, the largest first; of equal keys the lower id first
//     weight = s, divided by the sum of the token's weights if `renormalize`, times routed_scaling_factor
//     token_expert_indices[t, j] = j * num_tokens + t
//
// Without a bias the key may be the logit, because scores rise with it; so few scores are computed. A NaN logit has key
// -inf and score 0. If HAS_TABLE, ids[t] = hash_indices_table[input_tokens[t]]. There, an id that is no expert becomes
// -1 with weight 0; so do the ids of a token beyond the table, and, if HAS_PADDING, all ids of rows with is_padding[t].
//
// ROW_THREADS threads share a token; each has THREAD_EXPERTS adjacent experts. Thread i of the token writes choices i,
// i + ROW_THREADS, ...
//
// Constants:
//     expert_t         element type of topk_ids
//     token_t          element type of input_tokens
//     table_t          element type of hash_indices_table
//     SCORING          softmax, sigmoid or softplus_sqrt
//     NUM_EXPERTS      experts
//     TOP_K            experts of a token
//     THREAD_EXPERTS   experts of a thread; a multiple of VEC_SIZE
//     HAS_BIAS         false when e_score_correction_bias is null
//     HAS_TABLE        false when hash_indices_table is null
//     HAS_PADDING      false when is_padding is null

#include "experts.cuh"

constexpr int INDEX_BITS = !HAS_BIAS && NUM_EXPERTS <= 1 << SPARE_BITS<scalar_t> ? SPARE_BITS<scalar_t> : 0;
using ranking = Ranking<INDEX_BITS>;
using rank_t = ranking::rank_t;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
topk_gating(float* topk_weights,                   // [num_tokens, TOP_K]
            expert_t* topk_ids,                    // [num_tokens, TOP_K]
            int32_t* token_expert_indices,         // [num_tokens, TOP_K]
            const scalar_t* gating_output,         // [num_tokens, NUM_EXPERTS], rows of stride gating_stride
            const float* e_score_correction_bias,  // [NUM_EXPERTS]
            const token_t* input_tokens,           // [num_tokens]
            const table_t* hash_indices_table,     // [table_size, TOP_K]
            const bool* is_padding,                // [num_tokens]
            int64_t num_tokens, int64_t gating_stride, int64_t table_size, bool renormalize,
            float routed_scaling_factor) {
    prefetch_row(gating_output, num_tokens, gating_stride, NUM_EXPERTS);
    await_previous_kernel();
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_tokens);
    const int thread = threadIdx.x % ROW_THREADS;
    const scalar_t* const row = gating_output + at.row * gating_stride;
    __shared__ rank_t rank_partial[2][MAX_WARPS];
    __shared__ uint32_t max_partial[MAX_WARPS];
    __shared__ float sum_partial[2][MAX_WARPS];

    float logits[THREAD_EXPERTS];
    const int first = thread * THREAD_EXPERTS;
    load_share<VEC_SIZE>(row, first, NUM_EXPERTS, minus_infinity(), logits);
    const auto score = score_of_token<SCORING>(logits, HAS_BIAS || !renormalize, max_partial, sum_partial[0]);

    const bool is_token = !HAS_PADDING || !is_padding[at.row];
    float weight, sum = 0.0f;
    const auto write = [&](int slot, auto expert) {
        const bool exists = is_token && expert >= 0 && expert < NUM_EXPERTS;
        const float logit = logit_of(to_float(row[exists ? expert : 0]));
        weight = exists ? score(logit) : 0.0f;
        if (slot >= TOP_K) return;
        sum += weight;
        if (!at.active) return;
        topk_ids[at.row * TOP_K + slot] = exists ? expert_t(expert) : expert_t(-1);
        token_expert_indices[at.row * TOP_K + slot] = int32_t(slot * num_tokens + at.row);
        // A thread with several choices keeps their weights where they will be.
        if (TOP_K > ROW_THREADS) topk_weights[at.row * TOP_K + slot] = weight;
    };

    if constexpr (HAS_TABLE) {
        const int64_t token = input_tokens[at.row];
        for (int slot = thread; slot < TOP_K; slot += ROW_THREADS) {
            const bool is_known = token >= 0 && token < table_size;
            write(slot, is_known ? hash_indices_table[token * TOP_K + slot] : table_t(-1));
        }
    } else {
        rank_t ranks[THREAD_EXPERTS];
        float biases[THREAD_EXPERTS];
        if constexpr (HAS_BIAS) load_share<VEC_SIZE>(e_score_correction_bias, first, NUM_EXPERTS, 0.0f, biases);
#pragma unroll
        for (int i = 0; i < THREAD_EXPERTS; ++i) {
            float key = logits[i];
            if constexpr (HAS_BIAS) key = key == key ? ieee_add(score(logit_of(key)), biases[i]) : minus_infinity();
            ranks[i] = first + i < NUM_EXPERTS ? ranking::rank(ordered_key(key), first + i) : 0;
        }
        KWayMerge<rank_t, THREAD_EXPERTS> merge(ranks, rank_partial);
        for (int begin = 0; begin < TOP_K; begin += ROW_THREADS) {
            const rank_t mine = merge.take<TOP_K>(min(ROW_THREADS, TOP_K - begin), thread);
            write(begin + thread, ranking::index(mine));
        }
    }

    float divisor = 1.0f;
    if (renormalize) {
        sum = row_reduce<Sum, ROW_THREADS>(sum, sum_partial[1]);
        if (sum > 0.0f) divisor = sum;
    }
    if (!at.active) return;
    for (int slot = thread; slot < TOP_K; slot += ROW_THREADS) {
        float* const out = topk_weights + at.row * TOP_K + slot;
        *out = ieee_multiply(ieee_divide(TOP_K > ROW_THREADS ? *out : weight, divisor), routed_scaling_factor);
    }
}
