// attention_varlen_hopper: what attention_varlen.cu computes, on Hopper's tensor cores: prompts.
//
//     l_ij = softcap(scale * q_i . k_j) + slope * (j - limit_i)       limit_i - window < j <= limit_i
//     out_i = sum_j exp(l_ij - m_i) v_j / (sum_j exp(l_ij - m_i) + 1e-6),   m_i = max_j l_ij
//
// with limit_i = length - num_queries + i if CAUSAL, else length - 1. After FlashAttention-3 (arXiv:2407.08608).
//
// Work: items of query tokens and a key-value head (prefill_work.cuh). There are as many blocks as multiprocessors,
// and each has items one after another, from a counter. Items are taken from the last to the first: under CAUSAL the
// later ones of a sequence take longer, and should not be the tail.
//
// Warpgroups: one warp of the last produces: it loads queries, keys and values; another finds work (prefill_tiles.cuh). The
// others consume, 64 rows each: each goes through the keys in tiles of TOKENS, from the last tile, where the causal
// limits are, to the first. It starts S = Q K^T of a tile and O += P V of the tile before together, and looks for the
// largest logits of the new tile, or computes some of its probabilities P, while the product with V goes on. Consumers
// take turns at starting products, so that the softmax of one runs beside the products of the others.
//
// Constants
//     scalar_t       T: element type of queries and out: half_t or bf16_t
//     cache_t        element type of the caches: T or fp8_e4m3_t
//     table_t, length_t, starts_t    element types of block_tables, seq_lens and cu_seqlens_q
//     HEAD_SIZE      a multiple of 16, at most 256
//     BOX_TOKENS     a multiple of 8 that divides BLOCK_SIZE and TOKENS
//     WHOLE_HEADS    a box has all panels of its tokens, else one panel; codes: false, and a box has whole heads of codes
//     GROUP          query heads of one key-value head, at most ITEM_ROWS
//     TOKENS         keys of a tile; a multiple of 16
//     STAGES         tiles of keys, and of values, in shared memory
//     QUERY_STAGES   work items whose queries are in shared memory
//     CONSUMERS      warpgroups with rows: 2 or 3
//     CAUSAL         a query token sees the keys up to its own position, else all keys
//     HEAD_SCALES    each key-value head of codes has its own scales; logits are then products, up to a factor
//     HAS_SPLITS     an item may have several splits, which attention_varlen_join.cu joins

#include "attention.cuh"
#include "prefill_results.cuh"
#include "prefill_tiles.cuh"
#include "wgmma.cuh"

constexpr int NUM_THREADS = 128 * (CONSUMERS + 1), STEPS = HEAD_SIZE / 16;
// A thread's registers: what the producer gives up, the consumers take.
constexpr int PRODUCER_REGISTERS = HEAD_SIZE <= 192 || IS_FP8 || !WHOLE_HEADS || HAS_SPLITS ? 56 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 152 : PRODUCER_REGISTERS == 56 ? 224 : 232;
// Whether a polynomial of two terms serves small products under a soft cap.
constexpr bool SHORT_SERIES = BY_MAGNITUDE && !HAS_ALIBI && !HAS_LSE;
// The first tile of an item is computed in chunks of so many keys, of which those that no row sees are left out.
constexpr int FIRST_CHUNK = TOKENS % 32 == 0 ? 32 : 16;
template <bool VALUE> struct IsFirst { static constexpr bool value = VALUE; };
// Probabilities are up to 2^SLACK: a row's largest logit is looked for again when a logit is further above the last one,
// in units of log 2. Sums of the largest values there are stay finite up to 2^(32 - SLACK) tokens.
constexpr float SLACK = 8.0f;
// Large heads lack registers for what saves instructions of a tile: docs/performance/prefill.md, "Instructions of a tile".
constexpr bool HAS_REGISTERS = HEAD_SIZE <= 128 && !HAS_SPLITS;
// Whether rounded probabilities are summed, by products with ones beside those with values. Else each lane sums its own
// before they are rounded, as a log-sum-exp needs them.
constexpr bool SUMS_BY_PRODUCTS = HAS_REGISTERS && !HAS_LSE && (!HAS_SOFTCAP || SHORT_SERIES);
// Elements of a thread whose exponentials come before the wait for the product before: docs/performance/prefill.md, "The
// wait for the product before".
constexpr int BEFORE_WAIT = SUMS_BY_PRODUCTS ? 0 : HAS_SOFTCAP ? TOKENS / 2 : HAS_REGISTERS ? 0 : TOKENS / 4;
constexpr int TURNS = 1;  // the named barrier of the first consumer's turns; the others follow
static_assert(HEAD_SIZE % 16 == 0 && TOKENS % 16 == 0 && TOKENS % BOX_TOKENS == 0);
static_assert(BOX_TOKENS % 8 == 0 && BLOCK_SIZE % BOX_TOKENS == 0 && BOXES <= WARP_SIZE);
static_assert(!IS_FP8 || (is_same<cache_t, fp8_e4m3_t> && !WHOLE_HEADS));
static_assert(!HEAD_SCALES || !(HAS_SOFTCAP || HAS_ALIBI));

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
attention_varlen_hopper(const __grid_constant__ TensorMap query_map,  // [num_tokens, num_heads, HEAD_SIZE]; boxes of
                                                                      // ITEM_TOKENS x GROUP x a panel
                        const __grid_constant__ TensorMap key_map,    // [num_blocks, BLOCK_SIZE, num_kv_heads,
                                                                      // HEAD_SIZE]; 1 x BOX_TOKENS x 1 x a panel.
                                                                      // WHOLE_HEADS: [num_blocks, BLOCK_SIZE / 8,
                                                                      // num_kv_heads * PANELS, 8, a panel]; 1 x
                                                                      // BOX_TOKENS / 8 x PANELS x 8 x a panel
                        const __grid_constant__ TensorMap value_map,  // likewise
                        scalar_t* out,                                // [num_tokens, num_heads, HEAD_SIZE]
                        float* lse,                                   // [num_heads, num_tokens]
                        const table_t* block_tables,                  // [num_seqs, max_tokens / BLOCK_SIZE]
                        const length_t* seq_lens,                     // [num_seqs]
                        const starts_t* cu_seqlens_q,                 // [num_seqs + 1]
                        const float* alibi_slopes,                    // [num_heads]
                        const float* sinks,                           // [num_heads]
                        const float* k_scale, const float* v_scale,   // [1] or [num_kv_heads]
                        float* tmp_out,                               // [num_tokens, num_heads, max_splits, HEAD_SIZE]
                        float* max_logits,                            // [num_tokens, num_heads, max_splits]
                        float* exp_sums,                              // [num_tokens, num_heads, max_splits]
                        uint32_t* items_taken,                        // [1], zero before and after
                        int64_t num_tokens, int64_t num_seqs, int64_t num_blocks, int64_t num_kv_heads,
                        int64_t section_heads, int64_t num_items, int64_t max_tokens, int64_t sliding_window,
                        int64_t max_splits, int64_t out_stride, int64_t table_stride, int64_t table_step,
                        int64_t length_step, int64_t starts_step, float scale, float logits_soft_cap) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ Work works[QUERY_STAGES];
    __shared__ Codes kinds[CODE_STAGES];
    __shared__ uint32_t holes[STAGES];
    __shared__ Found found;
    Tiles tiles(shared, works, holes, kinds, &found);
    tiles.init<NUM_THREADS>();
    // Ones of 8 rows of 8 elements: both halves of an operand of 8 columns that runs along 16 keys.
    __shared__ __align__(128) uint32_t ones[SUMS_BY_PRODUCTS ? 32 : 1];
    if (SUMS_BY_PRODUCTS && threadIdx.x < 32) {
        ones[threadIdx.x] = PAIR_OF_ONES<scalar_t>;
        fence_proxy_async();
    }
    __syncthreads();
    const Window window(sliding_window);
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;

    if (warpgroup == CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (warp <= HAS_FINDER) {
            const Sequences sequences{cu_seqlens_q, seq_lens,   starts_step,  length_step,   num_seqs,
                                      num_tokens,   max_tokens, num_kv_heads, section_heads, max_splits};
            Finder finder{sequences,  window,     block_tables, table_stride,
                          table_step, num_blocks, items_taken,  int(num_items)};
            if (warp == 1) return finder.run(tiles);
            Producer producer{tiles, finder, window, &query_map, &key_map, &value_map, lane, lane % BOXES};
            producer.run();
        } else if constexpr (IS_FP8) {
            widen_tiles(tiles);
        }
        return;
    }

    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    const int g = lane / 4, t = lane % 4;
    const int first_row = warpgroup * 64, own_row = first_row + warp * 16 + g;  // own_row and own_row + 8
    const float product_unit = scale * (IS_FP8 ? *k_scale : 1.0f);
    float unit = logit_unit<HAS_SOFTCAP>(product_unit, logits_soft_cap);
    const CapSeries<2> short_series(product_unit, logits_soft_cap);
    const CapSeries<3> series(product_unit, logits_soft_cap);
    const CapSeries<5> long_series(product_unit, logits_soft_cap);
    const float unit_limit = BY_MAGNITUDE || unit > 0.0f ? MAX_MAGNITUDE / fabsf(product_unit * LOG2_E) : 0.0f;
    const float series_limit = fminf(series.limit, unit_limit), short_limit = fminf(short_series.limit, unit_limit);
    const auto release = [&](const auto& ring) {
        sync_warp();
        ring.release(ring.stage);
    };
    // Turns: products are started by one consumer after another.
    const auto await_turn = [&] { named_barrier_sync(TURNS + warpgroup, 256); };
    const auto end_turn = [&] { named_barrier_arrive(TURNS + (warpgroup + 1) % CONSUMERS, 256); };
    if (warpgroup == CONSUMERS - 1) end_turn();

    const Results results{out,        lse,        tmp_out,    max_logits,          exp_sums, sinks, v_scale,
                          num_tokens, max_splits, out_stride, num_kv_heads * GROUP};
    float s[TOKENS / 2], o[HEAD_SIZE / 2];
    uint32_t p[TOKENS / 16][4];
    float row_sums[4];               // by products, of the lane's two rows: elements 0 and 2
    const auto start_logits = [&] {  // S = Q K^T
        const uint64_t a = make_smem_desc(tiles.queries + tiles.query.stage * QUERY_BYTES + first_row * ROW_BYTES);
        const uint64_t b = make_smem_desc(tiles.keys + tiles.key.stage * TILE_BYTES, TOKEN_STRIDE);
        tiles.key.wait();
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            wgmma<scalar_t, TOKENS>(s, advance_smem_desc(a, i / 4 * QUERY_PANEL + i % 4 * 32),
                                    advance_smem_desc(b, i / 4 * PANEL_STRIDE + i % 4 * 32), i > 0);
        }
        warpgroup_commit_batch();
    };
    const auto start_output = [&](bool accumulate) {  // O += P V, and sums of rows of P
        const uint64_t b = make_smem_desc(tiles.values + tiles.value.stage * TILE_BYTES, TOKEN_STRIDE, PANEL_STRIDE);
        tiles.value.wait();
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < TOKENS / 16; ++i) {
            wgmma<scalar_t, HEAD_SIZE, true>(o, p[i], advance_smem_desc(b, i * 2 * TOKEN_STRIDE), accumulate || i > 0);
            if constexpr (SUMS_BY_PRODUCTS) {
                wgmma<scalar_t, 8>(row_sums, p[i], make_smem_desc<SWIZZLE_NONE>(ones, 128, 0), accumulate || i > 0);
            }
        }
        warpgroup_commit_batch();
    };
    const auto end_output = [&] {
        warpgroup_wait<0>();
        warpgroup_fence_operand(o);
        if constexpr (SUMS_BY_PRODUCTS) warpgroup_fence_operand(row_sums);
        release(tiles.value);
        tiles.value.advance();
    };

    tiles.query.wait();
    start_logits();
    while (works[tiles.query.stage].tokens > 0) {
        const Work work = works[tiles.query.stage];
        if (IS_FP8 && HEAD_SCALES) unit = logit_unit<false>(scale * k_scale[work.kv_head], 0.0f);
        const int limits[2] = {work.limit_of(own_row), work.limit_of(own_row + 8)};
        int firsts[2];
        float slopes[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = work.kv_head * GROUP + (own_row + half * 8) % GROUP;
            firsts[half] = window.first_seen(limits[half]);
            slopes[half] = HAS_ALIBI ? alibi_slopes[head] * LOG2_E : 0.0f;
        }
        // Keys that all rows of the warpgroup see.
        const int whole_end = work.limit_of(first_row), whole_begin = window.first_seen(work.limit_of(first_row + 63));
        float max_logit[2] = {minus_infinity(), minus_infinity()}, exp_sum[2] = {0.0f, 0.0f}, shrink[2];
        bool rises = false, huge = false, plain = false, by_short_series = false;
        // `is_small`: a tile's logits are small, under a soft cap, and all rows see them, whose bases are `settled`: not too
        // far below for small logits. `ordered`: logits that make a row's largest one rise are positive in every row.
        bool is_small = false, settled = false, ordered = false;
        float exact_factor = 1.0f;
        // f(c) for each chunk of the first tile's keys that some row of the warpgroup sees; c is the thread's first
        // element of the chunk.
        const int seen = work.limit_of(first_row + 63) + 1 - work.last_tile * TOKENS;
        const auto each_seen_chunk = [&](auto f) {
#pragma unroll
            for (int c = 0; c < TOKENS / 2; c += FIRST_CHUNK / 2) {
                if (2 * c < seen) f(c);
            }
        };
        // Products of a tile become logits, or stay products where exponentials make logits of them. Probabilities are
        // relative to max_logit, a row's largest logit when it was last looked for: max_logit `rises` with a logit that
        // is more than SLACK above it. What was computed relative to the one before is then multiplied by `shrink`.
        const auto find_base = [&](auto is_first, int tile, uint32_t missing) {
            constexpr bool IS_FIRST = decltype(is_first)::value;
            constexpr int CHUNK = IS_FIRST ? FIRST_CHUNK : TOKENS;
            const int start = tile * TOKENS;
            const bool whole = start + TOKENS - 1 <= whole_end && start >= whole_begin && !missing;
            const auto each_chunk = [&](auto f) {
                if constexpr (IS_FIRST) each_seen_chunk(f);
                else f(0);
            };
            // Where all products of a warp are small, a series takes the place of tanh.
            float magnitude[2] = {0.0f, 0.0f};
            bool by_series = false;
            if (HAS_SOFTCAP) {
                each_chunk([&](int c) {
#pragma unroll
                    for (int i = c; i < c + CHUNK / 2; ++i) {
                        magnitude[i / 2 % 2] = fmaxf(magnitude[i / 2 % 2], fabsf(s[i]));
                    }
                });
                by_short_series = SHORT_SERIES && !any_lane(!(fmaxf(magnitude[0], magnitude[1]) < short_limit));
                is_small = SUMS_BY_PRODUCTS && !IS_FIRST && by_short_series && whole && settled;
                if (is_small) {
                    plain = true;
                    rises = false;
                    return;
                }
                by_series =
                    !HAS_ALIBI && (by_short_series || !any_lane(!(fmaxf(magnitude[0], magnitude[1]) < series_limit)));
            }
            // In the plain case products take the place of logits, up to the factor `unit` or the series.
            plain = !HAS_ALIBI && (HAS_SOFTCAP ? whole && by_series : unit > 0.0f);
            const bool by_long_series =
                HAS_SOFTCAP && !any_lane(!(fmaxf(magnitude[0], magnitude[1]) < long_series.limit));
            float largest[2] = {minus_infinity(), minus_infinity()};
            each_chunk([&](int c) {
                const int end = c + CHUNK / 2;
                if (!plain) {
#pragma unroll
                    for (int i = c; i < end; ++i) {
                        if (!HAS_SOFTCAP) s[i] *= unit;
                        else if (by_series) s[i] = series.logit(s[i]);
                        else if (by_long_series) s[i] = long_series.logit(s[i]);
                        else s[i] = logit_of<true>(s[i], unit, logits_soft_cap);
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
                mask(start + 2 * end - 1 > whole_end,
                     [&](int column, int half) { return column > limits[half] - before; });
                mask(start < whole_begin, [&](int column, int half) { return column < firsts[half] - before; });
                mask(missing, [&](int column, int half) { return missing >> column / BOX_TOKENS & 1; });
                if (BY_MAGNITUDE && plain) return;
                if (HAS_REGISTERS && !HAS_SOFTCAP && !IS_FIRST && ordered) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        largest[half] = s[2 * half];
#pragma unroll
                        for (int i = 2 * half; i < end; i += 4) {
                            largest[half] = largest_if_positive(largest[half], s[i], s[i + 1]);
                        }
                    }
                    return;
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int i = c + 2 * half; i < end; i += 4) {
                        const float larger = fmaxf(s[i], s[i + 1]);
                        largest[half] = !IS_FIRST && i < 4 ? larger : fmaxf(largest[half], larger);
                    }
                }
            });
            const float factor = plain && !HAS_SOFTCAP ? unit : 1.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (HAS_SOFTCAP && plain) largest[half] = BY_MAGNITUDE ? MAX_MAGNITUDE : series.logit(largest[half]);
            }
            const auto is_above = [&](int half) { return largest[half] * factor > max_logit[half] + SLACK; };
            rises = IS_FIRST || any_lane(is_above(0) || is_above(1));
            if (rises) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float larger = largest[half];
                    larger = fmaxf(larger, shfl_xor(larger, 1));
                    larger = fmaxf(larger, shfl_xor(larger, 2));
                    larger = fmaxf(max_logit[half], larger * factor);
                    shrink[half] = relative_exp2(max_logit[half], larger);
                    exp_sum[half] *= shrink[half];
                    max_logit[half] = larger;
                }
                const float least = fminf(max_logit[0], max_logit[1]) + SLACK;
                settled = SUMS_BY_PRODUCTS && !any_lane(!(least >= MAX_MAGNITUDE));
                ordered = HAS_REGISTERS && !HAS_SOFTCAP && !any_lane(!(least >= 0.0f));
                huge = !HAS_SOFTCAP && any_lane(fmaxf(fabsf(probability_base<scalar_t>(max_logit[0])),
                                                      fabsf(probability_base<scalar_t>(max_logit[1]))) > 0x1p24f);
            }
            // An exact product differs from the base by the rounding error of the base, too. All probabilities of a row
            // have that factor; but beyond 2^24 the factor may be 0 or infinite, and products are rounded first.
            exact_factor = factor;
            if (huge) {
#pragma unroll
                for (int i = 0; i < TOKENS / 2; ++i) s[i] *= factor;
                exact_factor = 1.0f;
            }
        };
        // Elements of the thread from `begin` to `end` become probabilities of logit_above(element, base).
        const auto each_exponential = [&](int begin, int end, auto logit_above) {
            const float base[2] = {probability_base<scalar_t>(max_logit[0]), probability_base<scalar_t>(max_logit[1])};
            float sums[2] = {0.0f, 0.0f};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = begin / 2; i < end / 2; ++i) {
                    float& x = s[i / 2 * 4 + 2 * half + i % 2];
                    x = estimate_exp2(logit_above(x, base[half]));
                    if (!SUMS_BY_PRODUCTS) sums[half] += x;
                }
                exp_sum[half] += sums[half];
            }
        };
        // A series is computed while the unit of exponentials, which starts one of a warp in 8 cycles, is busy.
        const auto small_exponentials = [&](int begin, int end) {
            each_exponential(begin, end, [&](float y, float from) { return short_series.logit(y, from); });
        };
        const auto exponentials = [&](int begin, int end) {
            if (HAS_SOFTCAP && plain && by_short_series) {
                small_exponentials(begin, end);
            } else if (HAS_SOFTCAP && plain) {
                each_exponential(begin, end, [&](float y, float from) { return series.logit(y, from); });
            } else {
                each_exponential(begin, end, [&](float x, float from) { return fmaf(x, exact_factor, -from); });
            }
        };
        const auto round_probabilities = [&](int begin, int end) {
#pragma unroll
            for (int i = begin / 2; i < end / 2; ++i) p[i / 4][i % 4] = pack_pair<scalar_t>(s[2 * i], s[2 * i + 1]);
        };
        const auto release_keys = [&](int tile) {
            release(tiles.key);
            tiles.key.advance();
            if (EARLY_QUERIES && tile == work.first_tile) tiles.query.release(tiles.query.stage);
        };

        uint32_t missing = holes[tiles.key.stage];
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
        release_keys(work.last_tile);
        find_base(IsFirst<true>(), work.last_tile, missing);
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i) p[i / 4][i % 4] = 0;
        each_seen_chunk([&](int c) {
            exponentials(c, c + FIRST_CHUNK / 2);
            round_probabilities(c, c + FIRST_CHUNK / 2);
        });

        bool accumulate = false;
        for (int tile = work.last_tile - 1; tile >= work.first_tile; --tile) {
            await_turn();
            start_logits();
            missing = holes[tiles.key.stage];
            start_output(accumulate);
            accumulate = true;
            end_turn();
            warpgroup_wait<1>();
            warpgroup_fence_operand(s);
            release_keys(tile);
            find_base(IsFirst<false>(), tile, missing);
            const auto finish = [&](auto become_probabilities) {
                if constexpr (BEFORE_WAIT > 0) {
                    become_probabilities(0, BEFORE_WAIT);
                    warpgroup_fence_operand(s);
                    hold_next_wait(fminf(exp_sum[0], exp_sum[1]));
                }
                end_output();
                if (rises) {
#pragma unroll
                    for (int i = 0; i < HEAD_SIZE / 2; ++i) o[i] *= shrink[i / 2 % 2];
#pragma unroll
                    for (int i = 0; i < 4; ++i) row_sums[i] *= shrink[i / 2];
                }
                // Probabilities are rounded beside the exponentials that follow the wait.
                become_probabilities(BEFORE_WAIT, TOKENS / 2);
                round_probabilities(0, TOKENS / 2);
            };
            if (is_small) finish(small_exponentials);
            else finish(exponentials);
        }
        if (!EARLY_QUERIES) release(tiles.query);
        start_output(accumulate);
        end_output();
        if (SUMS_BY_PRODUCTS) {  // all lanes of a row have its sum: a quarter of it to each
            exp_sum[0] = 0.25f * row_sums[0];
            exp_sum[1] = 0.25f * row_sums[2];
        }

        results.store(work, o, max_logit, exp_sum);
        // Results are stored first: the next item's queries come later than this one's last product ends.
        tiles.query.advance();
        tiles.query.wait();
        start_logits();
    }
    warpgroup_wait<0>();
}
