// prefill_combine: combines the partial results of prefill_sm90's splits (split-KV, combine_splits.cuh). prefill_sm90
// has already written the rows of items with one split.
//
// Thread mapping: blockIdx.x counts work items (prefill_scheduler.cuh) with all their splits; blockIdx.y counts groups
// of WARPS rows of an item. A warp has a row, and a lane has four of each 128 elements of the row.
//
// Constants, as in prefill_sm90.cu
//     scalar_t               element type of out
//     length_t, starts_t     element types of seq_lens and cu_seqlens_q
//     VALUE_SIZE             elements of a value
//     GROUP, PACKED_HEADS    query heads per KV head, and of a work item
//     TOKENS, CONSUMERS      keys of a KV tile, and consumer warpgroups, of the prefill_sm90 that computed the splits
//     CAUSAL, RAGGED, HAS_SPLITS, HAS_STARTS    likewise

#include "combine_splits.cuh"
#include "prefill_scheduler.cuh"

constexpr int WARPS = 8;

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
    const int row = blockIdx.y * WARPS + threadIdx.x / WARP_SIZE;
    if (work.splits <= 1 || row >= USED_ROWS || row / PACKED_HEADS >= work.tokens) return;

    const PartialRows<false> rows{out,   lse,        tmp_out,    max_logits, exp_sums,
                                  sinks, num_tokens, max_splits, out_stride, num_kv_heads * GROUP};
    rows.combine(int64_t(work.token) + row / PACKED_HEADS, work.head + row % PACKED_HEADS, work.splits);
}
