// prefill_epilogue.cuh: the epilogue of prefill_sm90: stores a consumer's accumulators of a work item. Reads the
// constants of the kernel that includes it.
//
//     out = o / (row_sum + EPSILON), row_sum includes a sink; or a split's o / row_sum, row max and row sum, for
//     prefill_combine.cu
//
// Thread mapping: lane 4g + t of a warp holds rows g and g + 8, and in each 8 elements of a row the pair 2t, 2t + 1.
// Four lanes exchange pairs, so that each lane stores 16 bytes.
#pragma once
#include "attention.cuh"
#include "mma.cuh"
#include "prefill_panels.cuh"
#include "prefill_scheduler.cuh"

// BY_MAGNITUDE: small scores under a soft cap have logits of at most MAX_MAGNITUDE (in units of log 2). Probabilities
// of tiles of such scores are relative to MAX_MAGNITUDE instead of their row max, and so may be smaller by a factor of
// 2^(2 * MAX_MAGNITUDE). float16 cannot represent them. EPSILON, which is relative to the largest probability, is
// smaller for the same reason; in split-KV the combine adds the formula's epsilon.
constexpr bool BY_MAGNITUDE = HAS_SOFTCAP && HEADROOM<product_t> > 0 && !HAS_SPLITS;
constexpr float MAX_MAGNITUDE = 20.0f, EPSILON = BY_MAGNITUDE ? 0x1p-60f : 1e-6f;

// Two ones of type T in a word.
template <typename T> constexpr uint32_t PAIR_OF_ONES = is_same<T, half_t> ? 0x3c003c00u : 0x3f803f80u;

// Where results go. Members are the kernel's arguments of the same names.
struct Results {
    scalar_t* out;
    float *lse, *tmp_out, *max_logits, *exp_sums;
    int* split_counts;
    const float *sinks, *v_scale;
    int64_t num_tokens, max_splits, out_stride, num_heads;

    // Stores the accumulators `o` of the warpgroup's rows. `max_logit` is in units of log 2. Each of the four lanes of
    // a row has a part of exp_sum.
    DEVICE void store(const Work& work, const float (&o)[VALUE_COLUMNS / 2], const float (&max_logit)[2],
                      const float (&exp_sum)[2]) const {
        // The thread's row is recomputed here: the main loop has no register to keep it in.
        const int thread = made_anew(threadIdx.x), t = thread % 4, own_row = thread / 32 * 16 + thread % 32 / 4;
        const float unit =
            FULL_SCALE<product_t> * (!is_same<cache_t, scalar_t> ? v_scale[HEAD_SCALES ? work.kv_head : 0] : 1.0f);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float row_max = max_logit[half], row_sum = exp_sum[half];
            row_sum += shfl_xor(row_sum, 1);
            row_sum += shfl_xor(row_sum, 2);
            row_sum *= FULL_SCALE<product_t>;
            const int row = own_row + half * 8;
            const bool exists = row < USED_ROWS && row / PACKED_HEADS < work.tokens;
            const int64_t token = int64_t(work.token) + row / PACKED_HEADS, head = work.head + row % PACKED_HEADS;
            if (HAS_SPLITS && work.splits > 1) {
                // The combine adds the formula's epsilon; 1e-20 only guards against 0 / 0.
                const float mean = unit / (row_sum + 1e-20f);
                const int64_t part = (token * num_heads + head) * max_splits + work.split;
                if (exists && t == 0) {
                    if (work.split == 0) split_counts[token * num_heads + head] = work.splits;
                    max_logits[part] = row_max * LN_2;
                    exp_sums[part] = row_sum;
                }
#pragma unroll
                for (int i = 0; i < VALUE_SIZE / 8; ++i) {
                    const int at = ValueTile::column_of(i * 8) / 2 + 2 * half;
                    const float2 pair{o[at] * mean, o[at + 1] * mean};
                    if (exists) *reinterpret_cast<float2*>(tmp_out + part * VALUE_SIZE + i * 8 + 2 * t) = pair;
                }
                continue;
            }
            const float correction = HAS_SINKS ? count_sink(sinks[head], row_max, row_sum) : 1.0f;
            if (HAS_LSE && exists && t == 0) lse[head * num_tokens + token] = log_sum_exp(row_max, row_sum);
            const float share = correction / (row_sum + EPSILON) * unit;
            scalar_t* const to = out + token * out_stride + head * VALUE_SIZE;
#pragma unroll
            for (int i = 0; i < VALUE_SIZE / 8; i += 4) {
                Vec<uint32_t, 4> pairs;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = ValueTile::column_of((i + j) * 8) / 2 + 2 * half;
                    const bool is_value = i + j < VALUE_SIZE / 8;
                    pairs.data[j] = is_value ? pack_pair<scalar_t>(o[at] * share, o[at + 1] * share) : 0;
                }
                transpose_4x4(pairs.data);
                if (exists && i + t < VALUE_SIZE / 8) {
                    pairs.store(reinterpret_cast<uint32_t*>(to + (i + t) * 8));
                }
            }
        }
    }
};
