// attention_decode_simt: attention_decode without tensor cores. It serves float32, any head size, block size and
// alignment, block-sparse attention, and wavefronts of 64 lanes. With VARLEN it serves attention_varlen, too.
//
// Formula: as in attention_decode.cu. VARLEN: every query token is treated as a sequence that ends with the last key
// that the token sees.
//
// Thread mapping: blockIdx.x counts sequences and query heads; blockIdx.y counts splits (split-KV, attention.cuh). The
// warps of a CTA take the tokens of the split round-robin. The lanes of a warp share the head dimensions and reduce
// their dot products.
//
// SPARSE: page j of a sequence, which begins at token j * BLOCK_SIZE, belongs to the sparse block kb = j * BLOCK_SIZE /
// blocksparse_block_size; the query belongs to the sparse block qb = (length - 1) / blocksparse_block_size. A page is
// attended if (kb + offset of the head) % blocksparse_vert_stride == 0 or kb > qb - blocksparse_local_blocks.
//
// Constants, in addition to those of attention_decode.cu
//     VALUE_SIZE        elements of a value of a head, at most HEAD_SIZE
//     SPARSE            attention is block-sparse
//     X                 PACKED: elements in the innermost dimension of the keys
//     VARLEN, CAUSAL    prefill_mma.cu explains CAUSAL; with VARLEN starts_t is the element type of cu_seqlens_q
//     RAGGED            VARLEN: as in prefill_mma.cu

#include "attention.cuh"
#include "paged.cuh"
#include "ragged.cuh"
#include "reduce.cuh"

constexpr int NUM_HEADS = NUM_KV_HEADS * GROUP;
constexpr int WARPS = NUM_WARPS * 32 / WARP_SIZE;
// Dimensions per lane: of queries and keys, and of values.
constexpr int DIMS = ceil_div(HEAD_SIZE, WARP_SIZE), VALUE_DIMS = ceil_div(VALUE_SIZE, WARP_SIZE);
constexpr bool IS_FP8 = !is_same<scalar_t, cache_t>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_WARPS * 32, 1)
attention_decode_simt(scalar_t* out,                    // [num_rows, NUM_HEADS, VALUE_SIZE]
                      partial_t* tmp_out,               // [num_seqs, NUM_HEADS, max_splits, VALUE_SIZE]
                      float* max_logits,                // [num_seqs, NUM_HEADS, max_splits]
                      float* exp_sums,                  // [num_seqs, NUM_HEADS, max_splits]
                      float* lse,                       // [NUM_HEADS, num_rows]
                      const scalar_t* query,            // [num_rows, NUM_HEADS, HEAD_SIZE]
                      const cache_t* key_cache,         // [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE], or PACKED
                      const cache_t* value_cache,       // likewise, with VALUE_SIZE
                      const table_t* block_tables,      // [num_seqs, max_tokens / BLOCK_SIZE]
                      const length_t* seq_lens,         // [num_seqs]
                      const starts_t* query_start_loc,  // [num_seqs + 1]
                      const starts_t* cu_seqlens_q,     // [num_seqs + 1]
                      const float* alibi_slopes,        // [NUM_HEADS]
                      const float* sinks,               // [NUM_HEADS]
                      const float* k_scale, const float* v_scale,  // [1] or [NUM_KV_HEADS]
                      int64_t num_rows, int64_t num_seqs, int64_t starts_step, int64_t num_blocks, int64_t max_tokens,
                      int64_t max_splits, int64_t sliding_window, int64_t min_split, int64_t out_stride,
                      int64_t query_stride, int64_t table_stride, int64_t table_step, int64_t length_step,
                      int64_t key_block_stride, int64_t key_token_stride, int64_t key_head_stride,
                      int64_t value_block_stride, int64_t value_token_stride, int64_t value_head_stride, float scale,
                      float logits_soft_cap, int64_t blocksparse_local_blocks, int64_t blocksparse_vert_stride,
                      int64_t blocksparse_block_size, int64_t blocksparse_head_sliding_step, int64_t first_step) {
    await_previous_kernel();
    int64_t row = blockIdx.x / NUM_HEADS, seq = row;
    const int head = blockIdx.x % NUM_HEADS, kv_head = head / GROUP;
    const int split = blockIdx.y, warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    if (VARLEN) {
        seq = count_up_to(cu_seqlens_q, num_seqs, starts_step, row) - 1;
        if (seq < 0) return;
    }
    const RaggedKeys<length_t> ragged{seq_lens, length_step, max_tokens};
    int64_t length = RAGGED ? int64_t(ragged.length_of(seq)) : min(int64_t(seq_lens[seq * length_step]), max_tokens);
    const int64_t first_key = RAGGED ? ragged.first_row(seq) : 0;
    if (VARLEN) {
        const int64_t first_row = cu_seqlens_q[seq * starts_step], end_row = cu_seqlens_q[(seq + 1) * starts_step];
        if (first_row < 0 || end_row > num_rows || row >= end_row) return;
        if (CAUSAL) length = max(length, int64_t(0)) - (end_row - first_row) + (row - first_row) + 1;
    }
    const Splits splits(length, max_tokens, sliding_window, PARTITION, int(max_splits), int(min_split));
    if (HAS_STARTS) row = row_of(query_start_loc + seq * STARTS_STEP, STARTS_STEP, num_rows);
    if (row < 0) return;
    const bool direct = DIRECT && splits.count <= 1;
    if (!splits.exists(split) && !(direct && split == 0)) return;

    const auto dim_of = [&](int i) { return i * WARP_SIZE + lane; };
    const auto exists = [&](int i) { return HEAD_SIZE % WARP_SIZE == 0 || dim_of(i) < HEAD_SIZE; };
    const auto has_value = [&](int i) { return VALUE_SIZE % WARP_SIZE == 0 || dim_of(i) < VALUE_SIZE; };
    float q[DIMS], o[VALUE_DIMS] = {};
#pragma unroll
    for (int i = 0; i < DIMS; ++i) {
        q[i] = exists(i) ? to_float(query[row * query_stride + int64_t(head) * HEAD_SIZE + dim_of(i)]) : 0.0f;
    }
    const float unit =
        logit_unit<HAS_SOFTCAP>(scale * (IS_FP8 ? k_scale[HEAD_SCALES ? kv_head : 0] : 1.0f), logits_soft_cap);
    const float slope = HAS_ALIBI ? alibi_slopes[head] * LOG2_E : 0.0f;
    const int64_t head_step = blocksparse_head_sliding_step >= 0 ? head * blocksparse_head_sliding_step
                                                                 : -kv_head * blocksparse_head_sliding_step;
    const int64_t offset = SPARSE ? first_step + head_step + 1 : 0;
    const int64_t query_block = SPARSE ? (int64_t(splits.length) - 1) / blocksparse_block_size : 0;

    float max_logit = minus_infinity(), exp_sum = 0.0f;
    const int end = splits.end(split);
    for (int token = max(splits.begin(split), splits.first) + warp; token < end; token += WARPS) {
        const int64_t number =
            RAGGED ? first_key + token : block_tables[seq * table_stride + token / BLOCK_SIZE * table_step];
        if (number < 0 || number >= num_blocks) continue;
        if (SPARSE) {
            const int64_t sparse_block = int64_t(token / BLOCK_SIZE) * BLOCK_SIZE / blocksparse_block_size;
            const bool is_vertical = (sparse_block + offset) % blocksparse_vert_stride == 0;
            if (!is_vertical && sparse_block <= query_block - blocksparse_local_blocks) continue;
        }
        const int slot = token % BLOCK_SIZE;
        const cache_t* keys = key_cache + number * key_block_stride + kv_head * key_head_stride;
        const cache_t* values = value_cache + number * value_block_stride + kv_head * value_head_stride;
        float logit = 0.0f;
#pragma unroll
        for (int i = 0; i < DIMS; ++i) {
            const int dim = dim_of(i);
            const int64_t at =
                PACKED ? int64_t(dim / X) * (BLOCK_SIZE * X) + slot * X + dim % X : slot * key_token_stride + dim;
            if (exists(i)) logit = fmaf(q[i], to_float(keys[at]), logit);
        }
        logit = logit_of<HAS_SOFTCAP>(lane_reduce<Sum, WARP_SIZE>(logit), unit, logits_soft_cap);
        if (HAS_ALIBI) logit = fmaf(slope, float(token + 1 - splits.length), logit);
        const float larger = fmaxf(max_logit, logit), correction = relative_exp2(max_logit, larger);
        const float probability = relative_exp2(logit, larger) * (1.0f / FULL_SCALE<float>);
        max_logit = larger;
        exp_sum = fmaf(exp_sum, correction, probability);
#pragma unroll
        for (int i = 0; i < VALUE_DIMS; ++i) {
            const int dim = dim_of(i);
            const int64_t at = PACKED ? int64_t(dim) * BLOCK_SIZE + slot : slot * value_token_stride + dim;
            if (has_value(i)) o[i] = fmaf(o[i], correction, probability * to_float(values[at]));
        }
    }

    __shared__ float warp_max[NUM_WARPS];
    __shared__ float warp_sum[NUM_WARPS];
    __shared__ float total[VALUE_SIZE];
    combine_warps<WARPS>(o, max_logit, exp_sum, warp_max, warp_sum, total,
                         [&](int i) { return has_value(i) ? dim_of(i) : -1; });
    if (warp == 0) {
        const int64_t part = (seq * NUM_HEADS + head) * max_splits + split;
        write_result<float, WARP_SIZE, VALUE_SIZE, PARTITION, HAS_SINKS, HAS_LSE>(
            [&](int i, int) { return total[i]; }, max_logit, exp_sum,
            IS_FP8 ? v_scale[HEAD_SCALES ? kv_head : 0] : 1.0f, direct, sinks + head,
            out + row * out_stride + int64_t(head) * VALUE_SIZE, lse + head * num_rows + row,
            tmp_out + part * VALUE_SIZE, max_logits + part, exp_sums + part);
    }
}
