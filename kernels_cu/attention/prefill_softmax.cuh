// prefill_softmax.cuh: what a consumer of prefill_sm90, whose constants it reads, makes of products of queries
// and keys: probabilities, tile by tile.
//
//     p = exp2(logit(q . k) - base)        logit: the scale, a soft cap, slopes and masks, in units of log 2
//
// The base of a row is its largest logit when that was last looked for. Lane 4g + t of warp w has of rows 16w + g and
// 16w + g + 8 of its warpgroup, in each 8 keys, pair t.
#pragma once
#include "attention.cuh"
#include "memory.cuh"
#include "prefill_epilogue.cuh"
#include "prefill_scheduler.cuh"

// Whether a polynomial of two terms serves small products under a soft cap.
constexpr bool SHORT_SERIES = BY_MAGNITUDE && !HAS_ALIBI && !HAS_LSE;
// The first tile of an item is computed in chunks of so many keys, of which those that no row sees are left out.
constexpr int FIRST_CHUNK = TOKENS % 32 == 0 ? 32 : 16;
// Probabilities are up to 2^SLACK: a row's largest logit is looked for again when a logit is further above the last one,
// in units of log 2. Sums of the largest values there are stay finite up to 2^(32 - SLACK) tokens.
// Probabilities of e4m3 are scaled up by 2^8 already, and 448 is the largest e4m3.
constexpr float SLACK = sizeof(product_t) == 1 ? 0.8f : 8.0f;
// Whether queries became product_t, each row relative to a power of two: a row's products then have a unit of their own.
constexpr bool CONVERTS_QUERIES = is_same<product_t, half_t> && !is_same<scalar_t, half_t>;
constexpr int UNITS = CONVERTS_QUERIES ? 2 : 1;  // of a thread's rows
// Values of more than 128 elements leave no registers for row sums by WGMMA: docs/performance/prefill.md,
// "Instructions per KV tile".
constexpr bool HAS_REGISTERS = VALUE_SIZE <= 128 && !HAS_SPLITS;
// Whether rounded probabilities are summed, by products with ones beside those with values. Else each lane sums its own
// before they are rounded, as a log-sum-exp needs them.
constexpr bool SUMS_BY_PRODUCTS = HAS_REGISTERS && !HAS_LSE && (!HAS_SOFTCAP || SHORT_SERIES);
// Whether interior tiles take a path of their own: docs/performance/prefill.md, "Fast path for interior tiles". Under a
// soft cap these are the tiles that the short series serves. E4m3 loses by it: "E4m3 has no fast path".
constexpr bool OF_E4M3 = is_same<product_t, fp8_e4m3_t>;
constexpr bool HAS_USUAL = HAS_REGISTERS && !OF_E4M3 && !HAS_ALIBI && (!HAS_SOFTCAP || SUMS_BY_PRODUCTS);

// The softmax of the 64 rows of a warpgroup. What has two elements belongs to the thread's rows own_row and own_row + 8.
struct Softmax {
    // Of the call: the logit of a product is logit_of(product, unit, soft_cap), for which a series serves up to its limit.
    const Window& window;
    const float soft_cap;
    float unit;
    const CapSeries<2> short_series;
    const CapSeries<3> series;
    const CapSeries<5> long_series;
    float series_limit, short_limit;
    const int first_row;  // of the warpgroup, in the block
    // Of the work item. A row sees keys up to `limits`, as far back as the window goes. All rows of the warpgroup see keys
    // whole_begin ... whole_end, and some row sees the first `seen` keys of the tile that comes first.
    int limits[2], whole_begin, whole_end, seen;
    float slopes[2];
    float row_powers[2];  // of two, to which queries are relative, if CONVERTS_QUERIES
    float units[UNITS];   // what makes logits of products
    float max_logit[2], exp_sum[2];
    // Of the tile. `whole`: all rows see all keys of the tile. `rises`: max_logit has risen, and sums so far are to shrink.
    // `huge`: max_logit is beyond 2^24. `plain`: s are products when they become probabilities, and by_short_series says
    // which series serves them. `settled`: bases are such that tiles may be usual.
    bool whole, rises, huge, plain, by_short_series, settled;
    float square;  // of the largest magnitude of products, under a soft cap
    float shrink[2];
    float s[TOKENS / 2];                             // products, then logits unless `plain`, then probabilities
    uint32_t p[TOKENS * sizeof(product_t) / 32][4];  // probabilities, rounded

    // product_unit: the scale of logits and of keys. warpgroup: the number of the consumer.
    DEVICE Softmax(const Window& window, float product_unit, float soft_cap, int warpgroup)
        : window(window),
          soft_cap(soft_cap),
          unit(logit_unit<HAS_SOFTCAP>(product_unit, soft_cap)),
          short_series(product_unit, soft_cap),
          series(product_unit, soft_cap),
          long_series(product_unit, soft_cap),
          first_row(warpgroup * 64) {
        const float unit_limit = BY_MAGNITUDE || unit > 0.0f ? MAX_MAGNITUDE / fabsf(product_unit * LOG2_E) : 0.0f;
        series_limit = fminf(series.limit, unit_limit);
        short_limit = fminf(short_series.limit, unit_limit);
    }

    // Begins a work item, whose row_powers are known.
    DEVICE void begin(const Work& work, const float* alibi_slopes) {
        const int own_row = first_row + made_anew(threadIdx.x) % 128 / 32 * 16 + made_anew(threadIdx.x) % 32 / 4;
        limits[0] = work.limit_of(own_row);
        limits[1] = work.limit_of(own_row + 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = work.kv_head * GROUP + (own_row + half * 8) % GROUP;
            slopes[half] = HAS_ALIBI ? alibi_slopes[head] * LOG2_E : 0.0f;
            max_logit[half] = minus_infinity();
            exp_sum[half] = 0.0f;
        }
        whole_end = work.limit_of(first_row);
        whole_begin = window.first_seen(work.limit_of(first_row + 63));
        seen = work.limit_of(first_row + 63) + 1 - work.last_tile * TOKENS;
        whole = rises = huge = plain = by_short_series = settled = false;
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            units[i] = CONVERTS_QUERIES && !HAS_SOFTCAP ? unit * row_powers[i] : unit;
            // Masked products are -inf, which 0 would make NaN, and 0 is a product, of which infinity would make NaN.
            if (CONVERTS_QUERIES && unit > 0.0f) units[i] = fminf(fmaxf(units[i], 0x1p-126f), FLOAT_MAX);
        }
    }

    // What products that are `plain` lack to be logits.
    DEVICE float factor_of(int half) const { return plain && !HAS_SOFTCAP ? units[half % UNITS] : 1.0f; }

    // f(c) for each chunk of the first tile's keys that some row of the warpgroup sees; c is the thread's first element of
    // the chunk.
    template <typename F>
    DEVICE void each_seen_chunk(F f) const {
#pragma unroll
        for (int c = 0; c < TOKENS / 2; c += FIRST_CHUNK / 2) {
            if (2 * c < seen) f(c);
        }
    }

    // Begins a tile, before its products are there. `missing`: a bit for each box of the tile that comes from no block of
    // the cache.
    DEVICE void begin_tile(int tile, uint32_t missing) {
        const int start = tile * TOKENS;
        whole = start + TOKENS - 1 <= whole_end && start >= whole_begin && !missing;
    }

    // Of the thread's products from `begin` to `end`.
    DEVICE float largest_magnitude(int begin, int end) const {
        float of_row[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = begin; i < end; ++i) of_row[i / 2 % 2] = fmaxf(of_row[i / 2 % 2], fabsf(s[i]));
        return fmaxf(of_row[0], of_row[1]);
    }

    // Whether the short series serves all products of the warp. Squares are compared: the assembler then computes the
    // series of an interior tile ahead of the wait for P V: docs/performance/prefill.md, "Fast path for interior tiles".
    DEVICE void find_square(float magnitude) {
        square = magnitude * magnitude;
        by_short_series = SHORT_SERIES && !any_lane(!(square < short_limit * short_limit));
    }

    // Whether the tile is as most tiles are: all rows see the tile whole, and no logit makes max_logit rise. Such a logit
    // would be positive, as rows are settled, so that the largest logit is found as an integer.
    DEVICE bool is_usual() {
        if constexpr (HAS_SOFTCAP) {
            find_square(largest_magnitude(0, TOKENS / 2));
            return by_short_series && whole && settled;
        }
        if (!(whole && settled)) return false;
        float largest[2];
        find_positive(largest);
        return !any_lane(is_above(largest[0] * units[0], 0) || is_above(largest[1] * units[1 % UNITS], 1));
    }

    // The thread's largest logit, or product, of each row; a lower one where none is positive.
    DEVICE void find_positive(float (&largest)[2]) const {
        largest[0] = s[0];
        largest[1] = s[2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i += 2) {
            largest[i / 2 % 2] = largest_if_positive(largest[i / 2 % 2], s[i], s[i + 1]);
        }
    }

    DEVICE bool is_above(float logit, int half) const { return logit > max_logit[half] + SLACK; }

    // Products of a tile become logits, or stay products where exponentials make logits of them. Probabilities are
    // relative to max_logit, a row's largest logit when it was last looked for: max_logit `rises` with a logit that
    // is more than SLACK above it. What was computed relative to the one before is then multiplied by `shrink`.
    template <bool IS_FIRST>
    DEVICE void find_base(int tile, uint32_t missing) {
        constexpr int CHUNK = IS_FIRST ? FIRST_CHUNK : TOKENS;
        const int start = tile * TOKENS, t = made_anew(threadIdx.x) % 4;
        if (CONVERTS_QUERIES && HAS_SOFTCAP) {  // whose series know one unit
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) s[i] *= row_powers[i / 2 % 2];
        }
        const auto each_chunk = [&](auto f) {
            if constexpr (IS_FIRST) each_seen_chunk(f);
            else f(0);
        };
        // Where all products of a warp are small, a series takes the place of tanh.
        if (HAS_SOFTCAP && (IS_FIRST || !HAS_USUAL)) {
            float magnitude = 0.0f;
            each_chunk([&](int c) { magnitude = fmaxf(magnitude, largest_magnitude(c, c + CHUNK / 2)); });
            find_square(magnitude);
        }
        const bool by_series =
            HAS_SOFTCAP && !HAS_ALIBI && (by_short_series || !any_lane(!(square < series_limit * series_limit)));
        // In the plain case products take the place of logits, up to the factor `unit` or the series.
        plain = !HAS_ALIBI && (HAS_SOFTCAP ? whole && by_series : unit > 0.0f);
        const bool by_long_series = HAS_SOFTCAP && !any_lane(!(square < long_series.limit * long_series.limit));
        float largest[2] = {minus_infinity(), minus_infinity()};
        each_chunk([&](int c) {
            const int end = c + CHUNK / 2;
            if (!plain) {
#pragma unroll
                for (int i = c; i < end; ++i) {
                    if (!HAS_SOFTCAP) s[i] *= units[i / 2 % UNITS];
                    else if (by_series) s[i] = series.logit(s[i]);
                    else if (by_long_series) s[i] = long_series.logit(s[i]);
                    else s[i] = logit_of<true>(s[i], unit, soft_cap);
                }
            }
            if (HAS_ALIBI) {
#pragma unroll
                for (int i = c; i < end; ++i) {
                    const int column = i / 4 * 8 + i % 2, half = i / 2 % 2;  // 2t columns before its own
                    const float distance = float(start + 2 * t - limits[half]);
                    s[i] = fmaf(slopes[half], distance + float(column), s[i]);
                }
            }
            // Masks of the limits, of the window and of blocks that do not exist, each where there are such keys.
            const auto mask = [&](bool any, auto is_masked) {
                if (!any) return;
#pragma unroll
                for (int i = c; i < end; ++i) {
                    if (is_masked(i / 4 * 8 + i % 2, i / 2 % 2)) s[i] = minus_infinity();
                }
            };
            const int before = start + 2 * t;  // columns before the lane's first
            mask(start + 2 * end - 1 > whole_end, [&](int column, int half) { return column > limits[half] - before; });
            mask(start < whole_begin,
                 [&](int column, int half) { return column < window.first_seen(limits[half]) - before; });
            mask(missing, [&](int column, int half) { return missing >> column / BOX_TOKENS & 1; });
            if (BY_MAGNITUDE && plain) return;
            if (OF_E4M3 && HAS_REGISTERS && !IS_FIRST && settled) return find_positive(largest);
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
            if (HAS_SOFTCAP && plain) largest[half] = BY_MAGNITUDE ? MAX_MAGNITUDE : series.logit(largest[half]);
        }
        rises = IS_FIRST || any_lane(is_above(largest[0] * factor_of(0), 0) || is_above(largest[1] * factor_of(1), 1));
        if (rises) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float larger = largest[half];
                larger = fmaxf(larger, shfl_xor(larger, 1));
                larger = fmaxf(larger, shfl_xor(larger, 2));
                larger = fmaxf(max_logit[half], larger * factor_of(half));
                shrink[half] = relative_exp2(max_logit[half], larger);
                exp_sum[half] *= shrink[half];
                max_logit[half] = larger;
            }
            huge = !HAS_SOFTCAP && any_lane(fmaxf(fabsf(probability_base<product_t>(max_logit[0])),
                                                  fabsf(probability_base<product_t>(max_logit[1]))) > 0x1p24f);
            // Under a soft cap small logits are then at most SLACK above the base. Else a logit that makes max_logit rise
            // is positive, and so is its product.
            const float least = fminf(max_logit[0], max_logit[1]) + SLACK;
            settled =
                !huge && (HAS_SOFTCAP || unit > 0.0f) && !any_lane(!(least >= (HAS_SOFTCAP ? MAX_MAGNITUDE : 0.0f)));
        }
        // An exact product differs from the base by the rounding error of the base, too. All probabilities of a row
        // have that factor; but beyond 2^24 the factor may be 0 or infinite, and products are rounded first.
        if (huge) {
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) s[i] *= factor_of(i / 2 % 2);
        }
    }

    // Elements of the thread from `begin` to `end` become probabilities of logit_above(element, base, half).
    template <typename LogitAbove>
    DEVICE void each_exponential(int begin, int end, LogitAbove logit_above) {
        const float base[2] = {probability_base<product_t>(max_logit[0]), probability_base<product_t>(max_logit[1])};
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = begin / 2; i < end / 2; ++i) {
                float& x = s[i / 2 * 4 + 2 * half + i % 2];
                x = estimate_exp2(logit_above(x, base[half], half));
                if (!SUMS_BY_PRODUCTS) sums[half] += x;
            }
            exp_sum[half] += sums[half];
        }
    }

    // Those of a usual tile. A series is computed while the unit of exponentials, which starts one of a warp in 8 cycles,
    // is busy.
    DEVICE void usual_exponentials(int begin, int end) {
        each_exponential(begin, end, [&](float y, float from, int half) {
            return HAS_SOFTCAP ? short_series.logit(y, from) : fmaf(y, units[half % UNITS], -from);
        });
    }

    DEVICE void exponentials(int begin, int end) {
        if (HAS_SOFTCAP && plain && by_short_series) {
            each_exponential(begin, end, [&](float y, float from, int) { return short_series.logit(y, from); });
        } else if (HAS_SOFTCAP && plain) {
            each_exponential(begin, end, [&](float y, float from, int) { return series.logit(y, from); });
        } else {
            each_exponential(begin, end, [&](float x, float from, int half) {
                return fmaf(x, huge ? 1.0f : factor_of(half), -from);
            });
        }
    }

    // Words of two 16-bit elements have neighbouring keys; those of four bytes two keys of 8 and two of the next 8.
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
            for (int i = begin / 2; i < end / 2; ++i) p[i / 4][i % 4] = pack_pair<product_t>(s[2 * i], s[2 * i + 1]);
        }
    }
};
