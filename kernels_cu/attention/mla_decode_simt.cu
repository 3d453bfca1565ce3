// mla_decode_simt: mla_decode without tensor cores. It serves float32, caches of any alignment, and wavefronts of 64
// lanes.
//
// Thread mapping: blockIdx.x counts sequences and heads; blockIdx.y counts splits (split-KV, attention.cuh). The warps
// of a CTA take the tokens of the split round-robin. The lanes of a warp share the elements of an entry, which is read
// once, and reduce their dot products.
//
// Constants
//     query_t, cache_t, out_t    element types of the queries, the cache and out
//     table_t, length_t          element types of page_table and seq_lens
//     PAGE_SIZE                  slots of a page of the cache
//     LISTS_SLOTS                page_table lists the slot of each token (mla_tokens.cuh)
//     QUERY_TOKENS               query tokens of a sequence; its heads are those of each token (mla_tokens.cuh)
//     HAS_LENGTHS                seq_lens is given; otherwise every sequence has max_tokens tokens
//     NUM_WARPS                  warps (of 32 lanes) of a CTA
//     IS_DS_MLA                  the cache has the format "fp8_ds_mla" (mla_entry.cuh)

#include "attention.cuh"
#include "cache.cuh"
#include "mla_entry.cuh"
#include "mla_tokens.cuh"
#include "reduce.cuh"

constexpr int WARPS = NUM_WARPS * 32 / WARP_SIZE;
constexpr int DIMS = LATENT_SIZE / WARP_SIZE, ROPE_DIMS = ROPE_SIZE / WARP_SIZE;  // elements of a lane

// An element of an entry. Entries in bytes may have any alignment.
template <bool OF_DS_MLA>
DEVICE float element_at(const cache_t* entry, int element) {
    if constexpr (OF_DS_MLA) {
        const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(entry);
        if (element >= LATENT_SIZE) {
            const Vec<uint8_t, 2> two = Vec<uint8_t, 2>::load<1>(bytes + ROPE_AT + (element - LATENT_SIZE) * 2);
            Vec<query_t, 1> rotated;
            rotated.template word<1>(0) = two.word<2>(0);
            return rotated[0];
        }
        const float scale = load_float<1>(bytes + SCALES_AT + element / SCALED_SIZE * 4);
        return round_to<query_t>(to_float(entry[element]) * scale);
    } else {
        return to_float(entry[element]);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_WARPS * 32, 1)
mla_decode_simt(out_t* out,                          // [num_seqs, num_heads, LATENT_SIZE]
                float* lse,                          // [num_seqs, num_heads]
                float* tmp_out,                      // [num_seqs, num_heads, max_splits, LATENT_SIZE]
                float* max_logits,                   // [num_seqs, num_heads, max_splits]
                float* exp_sums,                     // [num_seqs, num_heads, max_splits]
                const query_t* q_nope,               // [num_seqs, num_heads, LATENT_SIZE]
                const query_t* q_pe,                 // [num_seqs, num_heads, ROPE_SIZE]
                const cache_t* kv_c_and_k_pe_cache,  // [num_pages, PAGE_SIZE, an entry]
                const length_t* seq_lens,            // [num_seqs]
                const table_t* page_table,           // [num_seqs, max_pages]
                int64_t num_heads, int64_t num_pages, int64_t max_tokens, int64_t max_splits, int64_t min_split,
                int64_t out_stride, int64_t nope_stride, int64_t nope_head_stride, int64_t pe_stride,
                int64_t pe_head_stride, int64_t page_stride, int64_t slot_stride, int64_t table_stride,
                int64_t table_step, int64_t length_step, float scale) {
    await_previous_kernel();
    const int64_t seq = blockIdx.x / uint32_t(num_heads), head = blockIdx.x % uint32_t(num_heads);
    const int split = blockIdx.y, warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int64_t length = HAS_LENGTHS ? int64_t(seq_lens[seq * length_step]) : max_tokens;
    const Splits splits(length, max_tokens, 0, 0, int(max_splits), int(min_split));
    const bool direct = splits.count <= 1;
    if (!splits.exists(split) && !(direct && split == 0)) return;

    const auto element_of = [&](int i) { return i * WARP_SIZE + lane; };
    float q[DIMS + ROPE_DIMS], o[DIMS];
#pragma unroll
    for (int i = 0; i < DIMS; ++i) {
        q[i] = to_float(q_nope[seq * nope_stride + head * nope_head_stride + element_of(i)]);
        o[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < ROPE_DIMS; ++i) {
        q[DIMS + i] = to_float(q_pe[seq * pe_stride + head * pe_head_stride + element_of(i)]);
    }

    const TokenTable table{page_table + seq * table_stride, table_step, num_pages, page_stride, slot_stride};
    float max_logit = minus_infinity(), exp_sum = 0.0f;
    int end = splits.end(split);
    if (QUERY_TOKENS > 1) end = min(end, attended_tokens(splits.length, int(head), num_heads));
    for (int token = splits.begin(split) + warp; token < end; token += WARPS) {
        const int64_t at = table.find(table.at(token), token);
        if (at == NOWHERE) continue;
        float entry[DIMS + ROPE_DIMS], logit = 0.0f;
#pragma unroll
        for (int i = 0; i < DIMS + ROPE_DIMS; ++i) {
            entry[i] = element_at<IS_DS_MLA>(kv_c_and_k_pe_cache + at, element_of(i));
            logit = fmaf(q[i], entry[i], logit);
        }
        logit = lane_reduce<Sum, WARP_SIZE>(logit) * (scale * LOG2_E);
        const float larger = fmaxf(max_logit, logit), correction = relative_exp2(max_logit, larger);
        const float probability = relative_exp2(logit, larger) * (1.0f / FULL_SCALE<float>);
        max_logit = larger;
        exp_sum = fmaf(exp_sum, correction, probability);
#pragma unroll
        for (int i = 0; i < DIMS; ++i) o[i] = fmaf(o[i], correction, probability * entry[i]);
    }

    __shared__ float warp_max[NUM_WARPS];
    __shared__ float warp_sum[NUM_WARPS];
    __shared__ float total[LATENT_SIZE];
    combine_warps<WARPS>(o, max_logit, exp_sum, warp_max, warp_sum, total, [&](int i) { return element_of(i); });
    if (warp == 0) {
        const int64_t row = seq * num_heads + head, part = row * max_splits + split;
        write_result<float, WARP_SIZE, LATENT_SIZE, 0, false, HAS_LSE>(
            [&](int i, int) { return total[i]; }, max_logit, exp_sum, 1.0f, direct, nullptr,
            out + seq * out_stride + head * LATENT_SIZE, lse + row, tmp_out + part * LATENT_SIZE, max_logits + part,
            exp_sums + part);
    }
}
