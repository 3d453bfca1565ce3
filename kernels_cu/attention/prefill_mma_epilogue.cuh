// prefill_mma_epilogue.cuh: the epilogue of prefill_mma: stores the accumulators of a row. Reads the constants of the
// kernel that includes it.
#pragma once
#include "combine_splits.cuh"
#include "prefill_mma_loader.cuh"

constexpr int OUT_TILES = WARP_STEPS * COLUMN_TILES;
constexpr int OUT_SUMS = OUT_TILES * PRODUCT_SUMS;  // accumulators of a thread per 16 rows

struct Results {
    PartialRows<true, SLICES> rows;
    float value_unit;  // the factor from accumulators to values

    // Stores row `half` of the lane's rows of a tile `o`, from column `t` on: the final result if splits == 1,
    // else that of split blockIdx.z. As in PartialRows, `head` counts slices.
    DEVICE void store(const float (&o)[OUT_TILES][PRODUCT_SUMS], int half, int t, float row_max, float row_sum,
                      float sink, int64_t token, int64_t head, int splits) const {
        if (HAS_SPLITS && splits > 1) {
            // The combine adds the formula's epsilon; 1e-20 only guards against 0 / 0.
            const float mean = value_unit / (row_sum + 1e-20f);
            const int64_t part = (token * rows.num_heads + head) * rows.max_splits + blockIdx.z;
            if (t == 0) {
                rows.max_logits[part] = row_max * LN_2;
                rows.exp_sums[part] = row_sum;
            }
#pragma unroll
            for (int l = 0; l < OUT_TILES * ROW_SUMS; l += 2) {
                const int m = l / ROW_SUMS, at = half * ROW_SUMS + l % ROW_SUMS;
                const int column = m * PRODUCT_COLUMNS + t + l % ROW_SUMS;
                if (!ALL_VALUE_CHUNKS && column >= VALUE_SIZE) continue;
                *reinterpret_cast<float2*>(rows.tmp_out + part * VALUE_SIZE + column) =
                    float2{o[m][at] * mean, o[m][at + 1] * mean};
            }
            return;
        }
        const float correction = HAS_SINKS ? count_sink(sink, row_max, row_sum) : 1.0f;
        const float factor = correction / (row_sum + 1e-6f) * value_unit;
        scalar_t* const to = rows.out + token * rows.out_stride + head * VALUE_SIZE + t;
#pragma unroll
        for (int l = 0; l < OUT_TILES * ROW_SUMS; l += 2) {
            const int m = l / ROW_SUMS, at = half * ROW_SUMS + l % ROW_SUMS;
            if (!ALL_VALUE_CHUNKS && m * PRODUCT_COLUMNS + t + l % ROW_SUMS >= VALUE_SIZE) continue;
            Vec<scalar_t, 2> pair;
            store_pair<scalar_t>(pair.data, o[m][at] * factor, o[m][at + 1] * factor);
            pair.template store<OUT_ACCESS>(to + m * PRODUCT_COLUMNS + l % ROW_SUMS);
        }
        if (HAS_LSE && t == 0) rows.store_lse(token, head, log_sum_exp(row_max, row_sum));
    }
};
