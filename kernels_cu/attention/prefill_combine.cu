// prefill_combine: combines the partial results of prefill_sm90's splits (split-KV, combine_splits.cuh). prefill_sm90
// has already written the rows of items with one split.
//
// Thread mapping: a warp has a row, the result of a query token and a head, and a lane has four of each 128 elements of
// the row.
//
// Constants, as in prefill_sm90.cu
//     scalar_t      element type of out
//     VALUE_SIZE    elements of a value

#include "combine_splits.cuh"

constexpr int WARPS = 8, MIN_BLOCKS = VALUE_SIZE > 64 ? 4 : 5;

extern "C" __global__ void LAUNCH_BOUNDS(WARPS * 32, MIN_BLOCKS)
prefill_combine(scalar_t* out,            // [num_tokens, num_heads, VALUE_SIZE]
                float* lse,               // [num_heads, num_tokens]
                const float* tmp_out,     // [num_tokens, num_heads, max_splits, VALUE_SIZE]
                const float* max_logits,  // [num_tokens, num_heads, max_splits]
                const float* exp_sums,    // [num_tokens, num_heads, max_splits]
                int* split_counts,        // [num_tokens, num_heads]: splits of a row, 0: one or none; zeros afterwards
                const float* sinks,       // [num_heads]
                int64_t num_tokens, int64_t num_heads, int64_t max_splits, int64_t out_stride) {
    await_previous_kernel();
    const int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP_SIZE;
    if (row >= num_tokens * num_heads) return;
    const int splits = split_counts[row];
    const int64_t token = row / num_heads;  // a long division, meanwhile
    if (splits == 0) return;

    const PartialRows<false> rows{out,   lse,        tmp_out,    max_logits, exp_sums,
                                  sinks, num_tokens, max_splits, out_stride, num_heads};
    rows.combine(token, row - token * num_heads, splits);
    sync_warp();
    if (threadIdx.x % WARP_SIZE == 0) split_counts[row] = 0;
}
