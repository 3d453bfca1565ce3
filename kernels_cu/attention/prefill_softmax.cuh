// prefill_softmax.cuh: the online softmax of prefill_sm90 and prefill_sm90_fp8. It converts the scores S = Q K^T of a
// KV tile to the probabilities P that the second WGMMA takes. Reads the constants of the kernel that includes it.
//
//     p = exp2(logit(q . k) - row_max)     logit: scale, logits soft cap, ALiBi and masks, in units of log 2
//
// row_max is the row max of the last rescale, so it may lag the true row max by RESCALE_THRESHOLD.
//
// Thread mapping (WGMMA accumulator layout): lane 4g + t of warp w holds rows 16w + g and 16w + g + 8 of its warpgroup,
// and in each 8 keys of a row the pair 2t, 2t + 1.
#pragma once
#include "attention.cuh"
#include "memory.cuh"
#include "prefill_score_mods.cuh"

// FIRST_CHUNK: keys per chunk of a work item's first tile. Chunks that no row sees are skipped.
constexpr int FIRST_CHUNK = TOKENS % 32 == 0 ? 32 : 16;
// RESCALE_THRESHOLD, in units of log 2: row_max is updated only when a logit exceeds it by more, so probabilities reach
// 2^RESCALE_THRESHOLD. In bfloat16, accumulators of the largest values stay finite up to 2^(32 - RESCALE_THRESHOLD)
// tokens. The e4m3 probabilities are scaled up by 2^8 already, and the largest e4m3 is 448.
constexpr float RESCALE_THRESHOLD = sizeof(product_t) == 1 ? 0.8f : 8.0f;
// CONVERTS_QUERIES: queries of an fp8 cache are converted to product_t (float16). Each row is divided by a power of two
// of its own, so that scores of different rows have different scales.
constexpr bool CONVERTS_QUERIES = is_same<product_t, half_t> && !is_same<scalar_t, half_t>;
constexpr int NUM_ROW_SCALES = CONVERTS_QUERIES ? 2 : 1;  // scales per thread, one per row
// HAS_REGISTERS: the consumer has registers left for row sums by WGMMA. Values of more than 128 elements leave none, and
// neither does P_HI_LO: docs/performance/prefill.md, "Instructions per KV tile".
constexpr bool HAS_REGISTERS = VALUE_SIZE <= 128 && !P_HI_LO;
// ROW_SUMS_BY_WGMMA: row sums come from a WGMMA of the rounded probabilities with a matrix of ones, issued together
// with P V. Otherwise each lane adds its own probabilities before rounding, as a log-sum-exp needs them.
constexpr bool ROW_SUMS_BY_WGMMA = HAS_REGISTERS && !HAS_LSE && (!HAS_SOFTCAP || SHORT_SERIES);
// HAS_FAST_PATH: unmasked tiles without rescale take a separate path: docs/performance/prefill.md, "Fast path for
// interior tiles". Under a soft cap it takes only tiles that the short series serves. E4m3 is slower with it: "E4m3 has
// no fast path".
constexpr bool OF_E4M3 = is_same<product_t, fp8_e4m3_t>;
constexpr bool HAS_FAST_PATH = HAS_REGISTERS && !OF_E4M3 && !HAS_ALIBI && (!HAS_SOFTCAP || ROW_SUMS_BY_WGMMA);

// The online softmax of a warpgroup's 64 rows. Members with two elements belong to the thread's rows own_row and
// own_row + 8. In the names of FlashAttention-3: scale_log2 is softmax_scale_log2, update_row_max is max_get_scale, and
// correction is scores_scale.
//
// Compile-time flags. "launch": the plan passes the constant; prefill_sm90_fp8.cu itself sets those marked *.
//
//     flag               set by               read by                      if true
//     HAS_SOFTCAP *      launch               here, epilogue, sm90 kernel  logits are capped; scale_log2 is scale / cap
//     HAS_ALIBI *        launch               here, sm90 kernel            slopes are valid; scores_unscaled is false
//     HAS_SPLITS         launch               here, loader, epilogue       no BY_MAGNITUDE
//     P_HI_LO *          launch               here, sm90 kernel            p_lo is valid, no HAS_REGISTERS
//     HAS_LSE            launch               here, epilogue               row sums before rounding; no SHORT_SERIES
//     BY_MAGNITUDE       epilogue: soft cap   here, epilogue               row_max of small scores is MAX_MAGNITUDE
//     SHORT_SERIES       score mods           here, score mods             by_short_series may be true
//     CONVERTS_QUERIES   here: product_t      here, sm90 kernel            q_descale is valid; one scale per row
//     HAS_REGISTERS      here: VALUE_SIZE     here, sm90 kernel            registers are left for row sums by WGMMA
//     ROW_SUMS_BY_WGMMA  here: HAS_REGISTERS  here, both kernels           the kernel sets exp_sum after the last tile
//     OF_E4M3            here: product_t      here                         probabilities are scaled up by 2^8
//     HAS_FAST_PATH      here: HAS_REGISTERS  here, sm90 kernel            later tiles ask takes_fast_path()
struct Softmax {
    // Constant for the call. The logit of a score is logit_of(score, scale_log2, soft_cap.cap).
    const Window& window;
    float scale_log2;  // the kernels set it for each work item if scales differ between KV heads
    SoftCap soft_cap;
    const int first_row;  // first row of the warpgroup, among the rows of the block
    // Constant for a work item. limits: the last key that a row sees. Every row of the warpgroup sees all keys from
    // unmasked_begin to unmasked_end. Some row sees the first `visible` keys of the first tile.
    int limits[2], unmasked_begin, unmasked_end, visible;
    float slopes[2];
    float q_descale[2];                    // CONVERTS_QUERIES: powers of two by which the query rows were divided
    float row_scale_log2[NUM_ROW_SCALES];  // score * row_scale_log2 is the logit
    float row_max[2], exp_sum[2];
    // State of a tile.
    // unmasked: every row sees every key of the tile.
    // needs_rescale: row_max has risen; accumulators and row sums are to be multiplied by `correction`.
    // scale_first: |row_max| exceeds 2^24; scores are scaled before row_max is subtracted.
    // scores_unscaled: s still holds scores, which the exponentials convert to logits.
    // max_allows_fast_path: only a positive logit can raise row_max; with a soft cap: no logit of the short series.
    bool unmasked, needs_rescale, scale_first, scores_unscaled, max_allows_fast_path;
    float correction[2];
    float s[TOKENS / 2];                             // scores, then logits unless scores_unscaled, then probabilities
    uint32_t p[TOKENS * sizeof(product_t) / 32][4];  // rounded probabilities: A fragments of P V
    uint32_t p_lo[P_HI_LO ? TOKENS / 16 : 1][4];     // P_HI_LO: probabilities less `p`, rounded

    // qk_scale: the softmax scale times the descale of keys. warpgroup: index of the consumer.
    DEVICE Softmax(const Window& window, float qk_scale, float soft_cap, int warpgroup)
        : window(window),
          scale_log2(logit_unit<HAS_SOFTCAP>(qk_scale, soft_cap)),
          soft_cap(qk_scale, soft_cap),
          first_row(warpgroup * 64) {}

    // Begins a work item. The caller has set q_descale.
    DEVICE void begin(const Work& work, const float* alibi_slopes) {
        const int own_row = first_row + made_anew(threadIdx.x) % 128 / 32 * 16 + made_anew(threadIdx.x) % 32 / 4;
        limits[0] = work.limit_of(own_row);
        limits[1] = work.limit_of(own_row + 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = work.head + (own_row + half * 8) % PACKED_HEADS;
            slopes[half] = HAS_ALIBI ? alibi_slopes[head] * LOG2_E : 0.0f;
            row_max[half] = minus_infinity();
            exp_sum[half] = 0.0f;
        }
        unmasked_end = work.limit_of(first_row);
        unmasked_begin = window.first_seen(work.limit_of(first_row + 63));
        visible = work.limit_of(first_row + 63) + 1 - work.last_tile * TOKENS;
        unmasked = needs_rescale = scale_first = scores_unscaled = max_allows_fast_path = false;
        soft_cap.by_short_series = false;
#pragma unroll
        for (int i = 0; i < NUM_ROW_SCALES; ++i) {
            row_scale_log2[i] = CONVERTS_QUERIES && !HAS_SOFTCAP ? scale_log2 * q_descale[i] : scale_log2;
            // Masked scores are -inf, and -inf * 0 is NaN; a score may be 0, and 0 * infinity is NaN.
            if (CONVERTS_QUERIES && scale_log2 > 0.0f)
                row_scale_log2[i] = fminf(fmaxf(row_scale_log2[i], 0x1p-126f), FLOAT_MAX);
        }
    }

    // The factor from s to logits, if s holds unscaled scores.
    DEVICE float factor_of(int half) const {
        return scores_unscaled && !HAS_SOFTCAP ? row_scale_log2[half % NUM_ROW_SCALES] : 1.0f;
    }

    // Calls f(c) for each chunk of the first tile that has a key which some row of the warpgroup sees. c is the index
    // of the thread's first element of the chunk.
    template <typename F>
    DEVICE void each_visible_chunk(F f) const {
#pragma unroll
        for (int c = 0; c < TOKENS / 2; c += FIRST_CHUNK / 2) {
            if (2 * c < visible) f(c);
        }
    }

    // Begins a tile, before its scores are computed. invalid_boxes: a bit for each box without a valid page.
    DEVICE void begin_tile(int tile, uint32_t invalid_boxes) {
        const int start = tile * TOKENS;
        unmasked = start + TOKENS - 1 <= unmasked_end && start >= unmasked_begin && !invalid_boxes;
    }

    // The largest |score| of the thread's elements from `begin` to `end`.
    DEVICE float largest_magnitude(int begin, int end) const {
        float of_row[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = begin; i < end; ++i) of_row[i / 2 % 2] = fmaxf(of_row[i / 2 % 2], fabsf(s[i]));
        return fmaxf(of_row[0], of_row[1]);
    }

    // Whether the tile takes the fast path: every row sees every key, and no logit raises row_max. A logit that raised
    // it would be positive, because max_allows_fast_path holds, so an integer max of the float bits finds it.
    DEVICE bool takes_fast_path() {
        if constexpr (HAS_SOFTCAP) {
            soft_cap.begin_tile(largest_magnitude(0, TOKENS / 2));
            return soft_cap.by_short_series && unmasked && max_allows_fast_path;
        }
        if (!(unmasked && max_allows_fast_path)) return false;
        float largest[2];
        find_positive(largest);
        return !any_lane(is_above(largest[0] * row_scale_log2[0], 0) ||
                         is_above(largest[1] * row_scale_log2[1 % NUM_ROW_SCALES], 1));
    }

    // The thread's largest logit or score of each row. If none is positive, the result may be lower than the largest.
    DEVICE void find_positive(float (&largest)[2]) const {
        largest[0] = s[0];
        largest[1] = s[2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i += 2) {
            largest[i / 2 % 2] = largest_if_positive(largest[i / 2 % 2], s[i], s[i + 1]);
        }
    }

    DEVICE bool is_above(float logit, int half) const { return logit > row_max[half] + RESCALE_THRESHOLD; }

    // Calls f(c, end) for the chunks of a tile that some row sees: elements c to end - 1 of the thread.
    template <bool IS_FIRST, typename F>
    DEVICE void each_chunk(F f) const {
        if constexpr (IS_FIRST) each_visible_chunk([&](int c) { f(c, c + FIRST_CHUNK / 2); });
        else f(0, TOKENS / 2);
    }

    // Converts scores from `begin` to `end` to logits: scale or soft cap, then ALiBi. With scores_unscaled they stay.
    DEVICE void modify_scores(int begin, int end, int first_key, bool by_series, bool by_long_series) {
        if (!scores_unscaled) {
#pragma unroll
            for (int i = begin; i < end; ++i) {
                if (!HAS_SOFTCAP) s[i] *= row_scale_log2[i / 2 % NUM_ROW_SCALES];
                else if (by_series) s[i] = soft_cap.series.logit(s[i]);
                else if (by_long_series) s[i] = soft_cap.long_series.logit(s[i]);
                else s[i] = logit_of<true>(s[i], scale_log2, soft_cap.cap);
            }
        }
        if (HAS_ALIBI) {
            const Alibi alibi{{slopes[0], slopes[1]}, {float(first_key - limits[0]), float(first_key - limits[1])}};
#pragma unroll
            for (int i = begin; i < end; ++i) s[i] = alibi(s[i], i / 4 * 8 + i % 2, i / 2 % 2);
        }
    }

    template <typename Mask>
    DEVICE void apply_mask(int begin, int end, const Mask& mask) {
#pragma unroll
        for (int i = begin; i < end; ++i) {
            if (mask.hides(i / 4 * 8 + i % 2, i / 2 % 2)) s[i] = minus_infinity();
        }
    }

    // Applies each mask that hides keys of the tile. first_key: the key of the lane's column 0.
    DEVICE void apply_masks(int begin, int end, int start, int first_key, uint32_t invalid_boxes) {
        if (start + 2 * end - 1 > unmasked_end)
            apply_mask(begin, end, LimitMask{{limits[0] - first_key, limits[1] - first_key}});
        if (start < unmasked_begin) {
            const int first[2] = {window.first_seen(limits[0]), window.first_seen(limits[1])};
            apply_mask(begin, end, WindowMask{{first[0] - first_key, first[1] - first_key}});
        }
        if (invalid_boxes) apply_mask(begin, end, PageMask{invalid_boxes});
    }

    // Converts the scores of a tile to logits, or leaves them if the exponentials convert them, and updates row_max.
    // row_max is updated (needs_rescale) only when a logit exceeds it by more than RESCALE_THRESHOLD. What was computed
    // relative to the old row_max is then to be multiplied by `correction`.
    template <bool IS_FIRST>
    DEVICE void update_row_max(int tile, uint32_t invalid_boxes) {
        const int start = tile * TOKENS, first_key = start + 2 * (made_anew(threadIdx.x) & 3);
        if (CONVERTS_QUERIES && HAS_SOFTCAP) {  // the series has one scale for all rows
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) s[i] *= q_descale[i / 2 % 2];
        }
        if (HAS_SOFTCAP && (IS_FIRST || !HAS_FAST_PATH)) {
            float magnitude = 0.0f;
            each_chunk<IS_FIRST>([&](int c, int end) { magnitude = fmaxf(magnitude, largest_magnitude(c, end)); });
            soft_cap.begin_tile(magnitude);
        }
        // If scores_unscaled, s keeps scores, which differ from logits by scale_log2 or by the series.
        const bool by_series =
            HAS_SOFTCAP && !HAS_ALIBI && (soft_cap.by_short_series || soft_cap.is_below(soft_cap.series_limit));
        scores_unscaled = !HAS_ALIBI && (HAS_SOFTCAP ? unmasked && by_series : scale_log2 > 0.0f);
        const bool by_long_series = HAS_SOFTCAP && soft_cap.is_below(soft_cap.long_series.limit);
        float largest[2] = {minus_infinity(), minus_infinity()};
        each_chunk<IS_FIRST>([&](int c, int end) {
            modify_scores(c, end, first_key, by_series, by_long_series);
            apply_masks(c, end, start, first_key, invalid_boxes);
            if (BY_MAGNITUDE && scores_unscaled) return;
            if (OF_E4M3 && HAS_REGISTERS && !IS_FIRST && max_allows_fast_path) return find_positive(largest);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = c + 2 * half; i < end; i += 4) {
                    const float larger = fmaxf(s[i], s[i + 1]);
                    largest[half] = !IS_FIRST && i < 4 ? larger : fmaxf(largest[half], larger);
                }
            }
        });
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (HAS_SOFTCAP && scores_unscaled)
                largest[half] = BY_MAGNITUDE ? MAX_MAGNITUDE : soft_cap.series.logit(largest[half]);
        }
        needs_rescale =
            IS_FIRST || any_lane(is_above(largest[0] * factor_of(0), 0) || is_above(largest[1] * factor_of(1), 1));
        if (needs_rescale) raise_row_max(largest);
        // The FMA of an exact score and row_max also shows the rounding error of row_max. It is a common factor of all
        // probabilities of a row and cancels. Beyond 2^24 that factor may be 0 or infinite, so scores are scaled, and
        // rounded, first.
        if (scale_first) {
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) s[i] *= factor_of(i / 2 % 2);
        }
    }

    // Raises row_max to these logits, or scores, of the thread, and sets `correction`.
    DEVICE void raise_row_max(const float (&largest)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float larger = largest[half];
            larger = fmaxf(larger, shfl_xor(larger, 1));
            larger = fmaxf(larger, shfl_xor(larger, 2));
            larger = fmaxf(row_max[half], larger * factor_of(half));
            correction[half] = relative_exp2(row_max[half], larger);
            exp_sum[half] *= correction[half];
            row_max[half] = larger;
        }
        scale_first = !HAS_SOFTCAP && any_lane(fmaxf(fabsf(probability_base<product_t>(row_max[0])),
                                                     fabsf(probability_base<product_t>(row_max[1]))) > 0x1p24f);
        // Under a soft cap, logits that the short series serves then exceed row_max by at most RESCALE_THRESHOLD.
        // Otherwise a logit that raises row_max is positive, and so is its score.
        const float least = fminf(row_max[0], row_max[1]) + RESCALE_THRESHOLD;
        max_allows_fast_path = !scale_first && (HAS_SOFTCAP || scale_log2 > 0.0f) &&
                               !any_lane(!(least >= (HAS_SOFTCAP ? MAX_MAGNITUDE : 0.0f)));
    }

    // Rescales accumulators of the two rows after a tile that has raised row_max (needs_rescale).
    template <int N>
    DEVICE void rescale(float (&o)[N]) const {
#pragma unroll
        for (int i = 0; i < N; ++i) o[i] *= correction[i / 2 % 2];
    }

    // Elements of the thread from `begin` to `end` become probabilities: exp2 of logit_above(element, row_max, half).
    template <typename LogitAbove>
    DEVICE void each_exponential(int begin, int end, LogitAbove logit_above) {
        const float base[2] = {probability_base<product_t>(row_max[0]), probability_base<product_t>(row_max[1])};
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = begin / 2; i < end / 2; ++i) {
                float& x = s[i / 2 * 4 + 2 * half + i % 2];
                x = estimate_exp2(logit_above(x, base[half], half));
                if (!ROW_SUMS_BY_WGMMA) sums[half] += x;
            }
            exp_sum[half] += sums[half];
        }
    }

    // Probabilities of a tile on the fast path. The FMAs of a series overlap with the special function unit, which
    // starts one exp2 of a warp every 8 cycles.
    DEVICE void fast_path_exponentials(int begin, int end) {
        each_exponential(begin, end, [&](float y, float from, int half) {
            return HAS_SOFTCAP ? soft_cap.short_series.logit(y, from)
                               : fmaf(y, row_scale_log2[half % NUM_ROW_SCALES], -from);
        });
    }

    DEVICE void exponentials(int begin, int end) {
        if (HAS_SOFTCAP && scores_unscaled && soft_cap.by_short_series) {
            each_exponential(begin, end,
                             [&](float y, float from, int) { return soft_cap.short_series.logit(y, from); });
        } else if (HAS_SOFTCAP && scores_unscaled) {
            each_exponential(begin, end, [&](float y, float from, int) { return soft_cap.series.logit(y, from); });
        } else {
            each_exponential(begin, end, [&](float x, float from, int half) {
                return fmaf(x, scale_first ? 1.0f : factor_of(half), -from);
            });
        }
    }

    // Packs probabilities into A fragments. A word of 16-bit elements holds two adjacent keys. A word of 8-bit elements
    // holds two keys of one group of 8 and two of the next.
    DEVICE void round_probabilities(int begin, int end) {
        if constexpr (sizeof(product_t) == 1) {
#pragma unroll
            for (int i = begin / 4; i < end / 4; ++i) {
                const float* const x = s + i / 2 * 8 + i % 2 * 2;
                const float four[4] = {x[0], x[1], x[4], x[5]};
                p[i / 4][i % 4] = pack_four<product_t>(four);
            }
        } else {
#pragma unroll
            for (int i = begin / 2; i < end / 2; ++i) {
                p[i / 4][i % 4] = pack_pair<product_t>(s[2 * i], s[2 * i + 1]);
                if constexpr (P_HI_LO) {
                    float low, high;
                    unpack_pair<product_t>(p[i / 4][i % 4], low, high);
                    p_lo[i / 4][i % 4] = pack_pair<product_t>(s[2 * i] - low, s[2 * i + 1] - high);
                }
            }
        }
    }
};
