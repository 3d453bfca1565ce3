// prefill_combine: combines the partial results of prefill_sm90's splits (split-KV).
//
//     out = sum_s w_s o_s / (sum_s w_s + 1e-6),   w_s = z_s exp(m_s - m),   m = max_s m_s
//
// Split s has stored the row max m_s, the row sum z_s relative to m_s, and the mean of values o_s. A sink is one more
// logit without a value. prefill_sm90 has already written the rows of items with one split.
//
// Thread mapping: blockIdx.x counts work items (prefill_scheduler.cuh) with all their splits; blockIdx.y counts groups
// of WARPS rows of an item. A warp has a row, and a lane has four of each 128 elements of the row.
//
// Constants, as in prefill_sm90.cu
//     scalar_t               element type of out
//     length_t, starts_t     element types of seq_lens and cu_seqlens_q
//     VALUE_SIZE, GROUP      elements of a value; query heads per KV head
//     TOKENS, CONSUMERS      keys of a KV tile, and consumer warpgroups, of the prefill_sm90 that computed the splits
//     CAUSAL, RAGGED, HAS_SPLITS    likewise

#include "attention.cuh"
#include "prefill_scheduler.cuh"
#include "vec.cuh"

constexpr int WARPS = 8, ACCESS = 4;

extern "C" __global__ void LAUNCH_BOUNDS(WARPS * 32, 1)
prefill_combine(scalar_t* out,                 // [num_tokens, num_heads, VALUE_SIZE]
                float* lse,                    // [num_heads, num_tokens]
                const float* tmp_out,          // [num_tokens, num_heads, max_splits, VALUE_SIZE]
                const float* max_logits,       // [num_tokens, num_heads, max_splits]
                const float* exp_sums,         // [num_tokens, num_heads, max_splits]
                const length_t* seq_lens,      // [num_seqs]; RAGGED: cu_seqlens_k [num_seqs + 1]
                const starts_t* cu_seqlens_q,  // [num_seqs + 1]
                const float* sinks,            // [num_heads]
                int64_t num_tokens, int64_t num_seqs, int64_t min_tokens, int64_t num_kv_heads, int64_t section_heads,
                int64_t max_tokens, int64_t sliding_window, int64_t max_splits, int64_t out_stride, int64_t length_step,
                int64_t starts_step) {
    await_previous_kernel();
    const Sequences sequences{cu_seqlens_q, seq_lens,   starts_step,  length_step,   num_seqs,  num_tokens,
                              min_tokens,   max_tokens, num_kv_heads, section_heads, max_splits};
    Work work;
    int origin, length;
    if (!sequences.find(int(blockIdx.x * max_splits), Window{int(sliding_window)}, work, origin, length)) return;
    const int row = blockIdx.y * WARPS + threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    if (work.splits <= 1 || row >= USED_ROWS || row / GROUP >= work.tokens) return;

    const int64_t token = int64_t(work.token) + row / GROUP, head = work.kv_head * GROUP + row % GROUP;
    const int64_t first_part = (token * num_kv_heads * GROUP + head) * max_splits;
    float max_logit = HAS_SINKS ? sinks[head] : minus_infinity(), exp_sum = 0.0f;
    for (int split = 0; split < work.splits; ++split) max_logit = fmaxf(max_logit, max_logits[first_part + split]);
    // exp(x - max_logit); 0 for x = -inf, also where max_logit is -inf.
    const auto relative_exp = [&](float x) { return expf(x - (max_logit == minus_infinity() ? 0.0f : max_logit)); };
    for (int split = 0; split < work.splits; ++split) {
        exp_sum += exp_sums[first_part + split] * relative_exp(max_logits[first_part + split]);
    }
    if (HAS_SINKS) exp_sum += relative_exp(sinks[head]);
    if (HAS_LSE && lane == 0) {
        lse[head * num_tokens + token] = exp_sum == 0.0f ? minus_infinity() : max_logit + logf(exp_sum);
    }
    const float scale = 1.0f / (exp_sum + 1e-6f);
    for (int column = lane * ACCESS; column < VALUE_SIZE; column += WARP_SIZE * ACCESS) {
        float sum[ACCESS] = {};
        for (int split = 0; split < work.splits; ++split) {
            // part <= 1, so that part * x cannot overflow.
            const float part = exp_sums[first_part + split] * relative_exp(max_logits[first_part + split]) * scale;
            float x[ACCESS];
            Vec<float, ACCESS>::load(tmp_out + (first_part + split) * VALUE_SIZE + column).to_floats(x);
#pragma unroll
            for (int i = 0; i < ACCESS; ++i) sum[i] = fmaf(part, x[i], sum[i]);
        }
        Vec<scalar_t, ACCESS>::from_floats(sum).store(out + token * out_stride + head * VALUE_SIZE + column);
    }
}
