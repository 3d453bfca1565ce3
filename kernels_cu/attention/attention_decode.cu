// attention_decode: decode attention (one or a few query tokens per sequence) over a paged KV cache, with tensor core
// MMAs.
//
//     l_i = softcap(scale * q . k_i) + slope * (i - length + 1)        first <= i < length
//     out = sum_i exp(l_i - m) v_i / (sum_i exp(l_i - m) + 1e-6),      m = max_i l_i
//
// Grid (HAS_TOKENS: decode_tokens.cuh has more of it): blockIdx.x counts sequences, KV heads and groups of HEADS
// query heads; blockIdx.y counts the splits of a sequence (split-KV, attention.cuh). If wave_splits > 0, blockIdx.x
// counts the splits of all sequences instead, and Balance computes the number of splits of each sequence from the
// lengths of all. CLUSTER > 1: a sequence has one split, which the CLUSTER CTAs of blockIdx.y share; they combine their
// results through distributed shared memory. `arrived` counts the finished splits of a query head: a warp of the last
// one combines them (decode_combine.cuh). If `arrived` is null, decode_combine.cu combines the splits.
//
// Warps: the warps that share a split take steps of STEP tokens round-robin (decode_tile.cuh). A warp computes S^T = K
// Q^T, the online softmax and O^T += V^T P^T (decode_logits.cuh), and loads its next step meanwhile. SLICES warps share
// a step: each has a slice of the head's dimensions, and they add their S^T through shared memory. The warps of a CTA
// combine their results through shared memory. One kernel serves every batch size: a launch has any number of warps up
// to MAX_WARPS, and dynamic shared memory for the results of each.
//
// Precision: probabilities are split into hi + lo of the MMA's type. With an fp8 cache the MMAs are in float16, which
// represents every fp8 value; probabilities are rounded to float16, and queries are scaled by a power of two into its
// range.
//
// Bad input: a token with an invalid block number contributes nothing. A slot after the end of the sequence contributes
// nothing, even if it holds NaN. Offsets within a block of the cache have 32 bits.
//
// Constants
//     scalar_t       T: element type of the queries and of out: half_t or bf16_t
//     cache_t        element type of the caches: T, fp8_e4m3_t or fp8_e5m2_t
//     partial_t      element type of tmp_out: float or T
//     table_t, length_t, starts_t    element types of block_tables, seq_lens and query_start_loc
//     STARTS_STEP    stride of query_start_loc
//     HEAD_SIZE      a multiple of the elements in 16 bytes of cache
//     BLOCK_SIZE     slots of a cache block; PACKED: a multiple of 4 * TILES
//     PACKED         the caches are [num_blocks, num_kv_heads, HEAD_SIZE / x, BLOCK_SIZE, x] and
//                    [num_blocks, num_kv_heads, HEAD_SIZE, BLOCK_SIZE]
//     HEAD_SCALES    each KV head of an fp8 cache has its own scales
//     NUM_KV_HEADS   KV heads
//     GROUP          query heads per KV head
//     HEADS          query heads of a CTA: 8 or 16; with HAS_TOKENS, pairs of a query token and a head
//     HAS_TOKENS     sequences may have any number of query tokens; else those with another number than one are skipped
//     QUERY_TOKENS   query tokens of a CTA (decode_tokens.cuh)
//     QUERY_ACCESS   elements of an access to query
//     TILES          tiles of 16 tokens in a step
//     CLUSTER        CTAs of a cluster
//     MAX_WARPS      most warps of a CTA
//     ONE_AT_A_TIME  registers hold the keys or the values of a step, not both
//     AHEAD          a warp asks for all keys and values of its next step before the softmax of this one
//     PIECES         the keys, and the values, of a step are loaded in PIECES pieces; 1 unless ONE_AT_A_TIME
//     SLICES         warps that share a step, and slices of a head; 1, or without PIECES 2 or 4
//     MIN_BLOCKS     occupancy that bounds the registers: CTAs of 4 warps per SM
//     PARTITION      tokens of a split; 0: the splits of a sequence have equal sizes
//     DIRECT         the result of a sequence with one split is final
//     CONSTANT_PAST  the previous kernel writes no length, no block table, and nothing of the caches but the last token
//                    of each sequence: a step without that token is loaded while it runs, past the L1 cache

#include "attention.cuh"
#include "cluster.cuh"
#include "decode_combine.cuh"
#include "decode_logits.cuh"
#include "decode_tile.cuh"

static_assert(!CONSTANT_PAST || (CLUSTER > 1 && !HAS_STARTS));  // no CTA returns before it waits

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(4 * WARP_SIZE * MIN_BLOCKS, 1)
attention_decode(scalar_t* out,                    // [num_rows, NUM_KV_HEADS * GROUP, HEAD_SIZE]
                 partial_t* tmp_out,               // [num_seqs, NUM_KV_HEADS * GROUP, max_splits, HEAD_SIZE]
                 float* max_logits,                // [num_seqs, NUM_KV_HEADS * GROUP, max_splits]
                 float* exp_sums,                  // [num_seqs, NUM_KV_HEADS * GROUP, max_splits]
                 uint32_t* arrived,                // [num_seqs, ALL_COLUMNS] zeros, or null
                 result_t* results,                // [splits of all, ALL_COLUMNS, RESULT_PARTS] zeros, or null
                 float* lse,                       // [NUM_KV_HEADS * GROUP, num_rows]
                 const scalar_t* query,            // [num_rows, NUM_KV_HEADS * GROUP, HEAD_SIZE]
                 const cache_t* key_cache,         // [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE] or PACKED
                 const cache_t* value_cache,       // likewise
                 const table_t* block_tables,      // [num_seqs, max_tokens / BLOCK_SIZE]
                 const length_t* seq_lens,         // [num_seqs]
                 const starts_t* query_start_loc,  // [num_seqs + 1]
                 const float* alibi_slopes,        // [NUM_KV_HEADS * GROUP]
                 const float* sinks,               // [NUM_KV_HEADS * GROUP]
                 const float* k_scale, const float* v_scale,  // [1] or [NUM_KV_HEADS]
                 int64_t num_seqs, int64_t num_rows, int64_t num_blocks, int64_t max_tokens, int64_t max_splits,
                 int64_t sliding_window, int64_t min_split, int64_t out_stride, int64_t query_stride,
                 int64_t table_stride, int64_t table_step, int64_t length_step, int64_t key_block_stride,
                 int64_t key_token_stride, int64_t key_head_stride, int64_t value_block_stride,
                 int64_t value_token_stride, int64_t value_head_stride, float wave_splits, float two_waves,
                 float three_waves, float two_mixed_waves, float three_mixed_waves, float scale,
                 float logits_soft_cap) {
    prefetch_first(MAY_BALANCE && wave_splits > 0.0f, query, block_tables, seq_lens, num_seqs, num_rows, max_tokens,
                   query_stride, table_stride, table_step, length_step);
    if (HAS_TOKENS && int(threadIdx.x) <= num_seqs) prefetch_line(query_start_loc + threadIdx.x * STARTS_STEP);
    if constexpr (!CONSTANT_PAST) await_previous_kernel();
    // HAS_TOKENS: the number of a tile that is not the first one of its sequence; negative for a first tile.
    const int64_t other_tile =
        HAS_TOKENS ? blockIdx.x / ROW_BLOCKS - (gridDim.x / ROW_BLOCKS - other_tiles(num_rows)) : -1;
    const bool balanced = MAY_BALANCE && wave_splits > 0.0f && other_tile < 0;
    const int kv_head = blockIdx.x % ROW_BLOCKS / HEAD_BLOCKS;
    const int first_head = kv_head * GROUP + blockIdx.x % HEAD_BLOCKS * HEADS;
    int num_heads = min(HEADS, (kv_head + 1) * GROUP - first_head);
    // As a constant, one head would have loops without a count, whose loads ptxas moves to where registers are scarce.
    if (GROUP == 1) num_heads = made_anew(num_heads);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int num_warps = blockDim.x / WARP_SIZE;
    const int step = warp / SLICES, slice = warp % SLICES, num_steps = num_warps / SLICES;
    const int turn = (CLUSTER > 1 ? blockIdx.y * num_steps : 0) + step;  // index of the step among those of the split
    const int round = CLUSTER * num_steps * STEP;                        // tokens from one step of a warp to its next
    int seq = blockIdx.x / ROW_BLOCKS, split = CLUSTER > 1 ? 0 : blockIdx.y;
    int planned_splits = CLUSTER > 1 ? 1 : int(max_splits);
    if (balanced) {
        const Balance<length_t> balance(seq_lens, length_step, num_seqs, max_tokens, sliding_window,
                                        {wave_splits, {two_waves, three_waves}, {two_mixed_waves, three_mixed_waves}},
                                        max_splits, HEAD_SIZE);
        split = seq;
        seq = balance.find(split);
        if (seq < 0) return;
        planned_splits = balance.splits_of(seq);
    }
    QueryTile tile;
    if constexpr (HAS_TOKENS) {
        tile = other_tile < 0 ? QueryTile::of(query_start_loc, seq, 0, num_rows)
                              : QueryTile::other(query_start_loc, other_tile, num_seqs, num_rows);
        if (tile.seq < 0) return;
        seq = int(tile.seq);
        num_heads = tile.count * GROUP;
        if (other_tile >= 0) planned_splits = 1;
    }

    const auto entry_of = [&](int token) {
        return load_index<CONSTANT_PAST>(block_tables + seq * table_stride + token / BLOCK_SIZE * table_step);
    };
    // A short call waits mostly for loads that depend on each other, so the length, the first table entries, the scales
    // and the queries are loaded together. The first token of a warp is known before the length if it is in the first
    // split, unless there is a window.
    const length_t seq_len = load_index<CONSTANT_PAST>(seq_lens + seq * length_step);
    TableEntries entries{};
    const bool has_entries = split == 0 && max_tokens > 0;
    if (has_entries) {
        entries = load_entries(turn * STEP, lane, [&](int token) { return entry_of(min(token, int(max_tokens) - 1)); });
    }
    const float key_scale = IS_FP8 ? k_scale[HEAD_SCALES ? kv_head : 0] : 1.0f;
    const float value_unit = IS_FP8 ? v_scale[HEAD_SCALES ? kv_head : 0] : 1.0f;
    const auto find_row = [&] {
        if (HAS_TOKENS) return tile.row;
        return HAS_STARTS ? row_of(query_start_loc + seq * STARTS_STEP, STARTS_STEP, num_rows) : int64_t(seq);
    };
    if (HAS_STARTS && find_row() < 0) return;
    const auto query_of = [&](int head) {
        return query + (find_row() + token_of_column(head)) * query_stride +
               int64_t(first_head + head_of_column(head)) * HEAD_SIZE;
    };
    QueryBatch first_queries;
    if constexpr (!CONSTANT_PAST) first_queries.load(0, num_heads, query_of);

    // HAS_TOKENS: the CTA's tokens between them attend to the keys up to the last token, from the first one's window
    // on.
    const int first_length = HAS_TOKENS ? tile.first_length(seq_len, max_tokens) : 0;
    const int64_t window =
        HAS_TOKENS && sliding_window > 0 ? min(sliding_window, max_tokens) + tile.count - 1 : sliding_window;
    const Splits splits(HAS_TOKENS ? int64_t(first_length + tile.count - 1) : int64_t(seq_len), max_tokens, window,
                        PARTITION, planned_splits, int(min_split));
    const bool direct = CLUSTER > 1 || (DIRECT && splits.count <= 1);
    if (!(direct && split == 0) && !splits.exists(split)) return;

    const ColumnMask columns{first_length, sliding_window > 0 ? int(min(sliding_window, max_tokens)) : int(max_tokens)};
    const int begin = splits.begin(split);
    const int end = num_blocks > 0 ? splits.end(split) : begin;  // an empty cache has nothing to load
    const auto entry_before_end = [&](int token) { return token < end ? entry_of(token) : table_t(-1); };
    const StepLoader loader{key_cache + kv_head * key_head_stride,
                            value_cache + kv_head * value_head_stride,
                            key_block_stride,
                            value_block_stride,
                            key_token_stride,
                            value_token_stride,
                            splits.first,
                            end,
                            cache_row(lane),
                            cache_run(lane)};

    // The loads of the first keys and values are in flight while the queries are prepared.
    int start = begin + turn * STEP;
    // Whether the warp takes the step at token `at`. Slices meet at a barrier, so all warps of the CTA take equally many
    // steps, and the last step of some may have no tokens.
    const auto takes = [&](int at) { return (HAS_SLICES ? at - step * STEP : at) < end; };
    if (!has_entries || begin > 0) entries = load_entries(start, lane, entry_before_end);
    BlockNumbers numbers = numbers_of(entries, num_blocks);
    Keys keys;
    Values values;
    const auto load_first = [&] {
        loader.load_keys(keys, start, numbers, slice);
        if (!ONE_AT_A_TIME) loader.load_values(values, start, numbers, slice);
    };
    const bool is_past = start + STEP < end;
    if (takes(start) && (is_past || !CONSTANT_PAST)) load_first();
    entries = load_entries(start + round, lane, entry_before_end);
    if constexpr (CONSTANT_PAST) {
        await_previous_kernel();
        first_queries.load(0, num_heads, query_of);
        if (takes(start) && !is_past) load_first();
    }

    // The results of the warps. A warp that the launch does not have is treated as one without tokens.
    __shared__ float step_max[MAX_STEPS * HEADS];
    __shared__ float step_sum[MAX_STEPS * HEADS];
    for (int i = threadIdx.x; i < MAX_STEPS * HEADS; i += int(blockDim.x)) {
        step_max[i] = minus_infinity();
        step_sum[i] = 0.0f;
    }

    __shared__ alignas(16) product_t queries[HEADS * QUERY_STRIDE];
    __shared__ float units[HEADS];
    const float key_unit = logit_unit<HAS_SOFTCAP>(IS_FP8 ? scale * key_scale : scale, logits_soft_cap);
    prepare_queries(queries, units, num_heads, key_unit, first_queries, query_of);
    __syncthreads();

    float unit[COLUMNS][LANE_HEADS], slope[COLUMNS][LANE_HEADS];  // per head of the lane
#pragma unroll
    for (int i = 0; i < COLUMNS * LANE_HEADS; ++i) {
        const int column = i / LANE_HEADS, head = column * TILE_HEADS + sum_head(lane, i % LANE_HEADS);
        unit[column][i % LANE_HEADS] = units[head];
        slope[column][i % LANE_HEADS] =
            HAS_ALIBI && head < num_heads ? alibi_slopes[first_head + head_of_column(head)] * LOG2_E : 0.0f;
    }

    // For each head of the lane: the row max, the lane's part of the row sum, and the accumulators O^T.
    float max_logit[COLUMNS][LANE_HEADS], exp_sum[COLUMNS][LANE_HEADS], o[COLUMNS][ROWS][PRODUCT_SUMS];
#pragma unroll
    for (int i = 0; i < COLUMNS * LANE_HEADS; ++i) {
        max_logit[i / LANE_HEADS][i % LANE_HEADS] = minus_infinity();
        exp_sum[i / LANE_HEADS][i % LANE_HEADS] = 0.0f;
    }
    constexpr int OUT_SUMS = ROWS * PRODUCT_SUMS;  // accumulators of a column
#pragma unroll
    for (int i = 0; i < COLUMNS * OUT_SUMS; ++i) {
        o[i / OUT_SUMS][i / PRODUCT_SUMS % ROWS][i % PRODUCT_SUMS] = 0.0f;
    }

    // The scores of slices, later the results of steps. The scores have two buffers: a warp that has passed the barrier
    // leaves those of its next step while others still read.
    extern __shared__ uint4 memory[];
    int buffer = 0;
    const auto scores_of = [&](int of_slice) {
        return reinterpret_cast<float4*>(memory) + ((buffer * num_steps + step) * SLICES + of_slice) * SLICE_SCORES;
    };

    for (; takes(start); start += round) {
        const int next = start + round;

        // The masks are computed before the MMAs. The compiler would otherwise move the MMAs into the branches of the
        // masks, and keep their operands in registers.
        const bool whole = loader.all_attended(numbers, start);
        unsigned attended = ~0u;  // bit tile * SUM_ROWS + i: the lane's token i of the tile
        if (!whole || (HAS_TOKENS && !columns.all_attend(start, splits.length))) {
            attended = 0;
#pragma unroll
            for (int i = 0; i < TILES * SUM_ROWS; ++i) {
                const int token = token_of(i / SUM_ROWS, sum_row(lane, i % SUM_ROWS));
                const bool exists = loader.is_attended(numbers, start, token);
                attended |= (HAS_TOKENS ? columns.attending(start + token, lane) : 1u) * unsigned(exists) << i;
            }
        }
        logits_t s;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            if (piece > 0) {
                order_loads();
                loader.load_keys(keys, start, numbers, piece);
            }
            multiply_keys(s, keys, queries, lane, slice + piece, piece == 0);
        }
        if constexpr (HAS_SLICES) leave_scores(scores_of(slice), s, lane);
        // The assembler gives one scoreboard to all loads that cross the back edge of the loop. If the next values are
        // asked for after P V, the next step waits for them before it multiplies its keys. AHEAD asks for them here, so
        // that nothing is awaited before P V has ended, and holds the values of two steps.
        const BlockNumbers next_numbers = numbers_of(entries, num_blocks);
        Values held;
        if constexpr (ONE_AT_A_TIME) {
            sync_warp();
            loader.load_values(values, start, numbers, slice);
        } else if constexpr (AHEAD) {
            held = values;
            if (!whole) loader.clear_unattended(held, start, numbers);
        }
        if (!ONE_AT_A_TIME && takes(next)) {
            loader.load_keys(keys, next, next_numbers, slice);
            if (AHEAD) {
                loader.load_values(values, next, next_numbers, slice);
                entries = load_entries(next + round, lane, entry_before_end);
            }
        }
        Values& current = AHEAD ? held : values;
        if constexpr (HAS_SLICES) {
            __syncthreads();
            add_scores(s, scores_of(0), lane);
            buffer ^= 1;
        }

        // The online softmax.
        probabilities_t p_hi, p_lo;
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            float larger[LANE_HEADS];
#pragma unroll
            for (int i = 0; i < LANE_HEADS; ++i) larger[i] = max_logit[column][i];
            finish_logits(s, column, unit[column], slope[column], logits_soft_cap, attended, start,
                          HAS_TOKENS ? first_length : splits.length, lane, larger);
            take_probabilities(s, column, larger, max_logit[column], exp_sum[column], o[column], p_hi, p_lo);
        }

        // O^T += V^T P^T.
        const auto accumulate = [&](int tile, int m, const uint32_t (&a)[SHORT_WORDS]) {
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column) {
                if constexpr (!IS_FP8) multiply_cache<product_t>(o[column][m], a, p_lo[tile][column]);
                multiply_cache<product_t>(o[column][m], a, p_hi[tile][column]);
            }
        };
#pragma unroll
        for (int i = 0; i < PIECES * TILES; ++i) {
            const int piece = i / TILES, tile = i % TILES;
            if (tile == 0 && piece > 0) {
                order_loads();
                loader.load_values(values, start, numbers, piece);
            }
            if (!AHEAD && tile == 0 && !whole) loader.clear_unattended(values, start, numbers);
            if constexpr (PACKED) {
#pragma unroll
                for (int m = 0; m < PART_ROWS; ++m) {
                    uint32_t a[SHORT_WORDS];
                    operand_of_rows<RUN_WORDS>(a, [&](int row, int word) {
                        return current.runs[m][row][tile * (RUN_TOKENS / WORD_ELEMENTS) + word];
                    });
                    accumulate(tile, piece * PART_ROWS + m, a);
                }
            } else {
#pragma unroll
                for (int w = 0; w < VALUE_CHUNKS * VALUE_WORDS; ++w) {
                    uint32_t a[OPERANDS][SHORT_WORDS];
                    order_loads();
                    operands_of_tokens(
                        a, [&](int token) { return current.rows[tile][token][w / VALUE_WORDS][w % VALUE_WORDS]; });
#pragma unroll
                    for (int k = 0; k < OPERANDS; ++k) accumulate(tile, piece * PART_ROWS + w * OPERANDS + k, a[k]);
                }
            }
        }
        if constexpr (ONE_AT_A_TIME) sync_warp();
        if (!AHEAD && takes(next)) {
            if constexpr (ONE_AT_A_TIME) loader.load_keys(keys, next, next_numbers, slice);
            else loader.load_values(values, next, next_numbers, slice);
        }
        numbers = next_numbers;
        if (!AHEAD) entries = load_entries(next + round, lane, entry_before_end);
    }

    // Every warp writes its results to shared memory: [num_steps, MAX_HEADS, OUTPUT_STRIDE] floats.
    if constexpr (HAS_SLICES) __syncthreads();
    const auto output_of = [&](int of_step, int head) {
        return reinterpret_cast<float*>(memory) + (of_step * MAX_HEADS + head) * OUTPUT_STRIDE;
    };
    store_results(max_logit, exp_sum, o, num_heads, step, slice, lane, step_max, step_sum, output_of);
    __syncthreads();

    // A warp combines the results of a head and writes them. In a cluster, it leaves them in shared memory, and one CTA
    // of the cluster combines and writes the results of all CTAs for a head. A CTA combines its heads at the same time,
    // as far as it has warps for them: a head takes as long as three loads from other CTAs one after the other.
    constexpr int HEADS_OF_BLOCK = ceil_div(MAX_HEADS, CLUSTER);  // heads that a CTA of a cluster combines
    constexpr int WARPS_EACH = MIN_CLUSTER_WARPS / HEADS_OF_BLOCK, MOST_WARPS = ceil_div(HEAD_SIZE, 32);
    constexpr int HEAD_WARPS = WARPS_EACH < 1 ? 1 : WARPS_EACH < MOST_WARPS ? WARPS_EACH : MOST_WARPS;
    constexpr int WRITERS = CLUSTER == 1 ? WARP_SIZE : 32 * HEAD_WARPS;
    struct RowState { float max_logit, exp_sum; };
    const auto query_head_of = [&](int head) { return int64_t(first_head + head_of_column(head)); };
    const auto row_of_head = [&](int head) { return find_row() + token_of_column(head); };
    // Splits that the last CTA combines: of a head, the results of its splits, the counter of arrivals, and the result.
    const auto combine_of = [&](int head) {
        const int64_t column = HAS_TOKENS ? kv_head * GROUP * QUERY_TOKENS + head : query_head_of(head);
        const int64_t first_split = blockIdx.x / ROW_BLOCKS - split;
        return SplitCombine{results + (first_split * ALL_COLUMNS + column) * RESULT_PARTS,
                            arrived + int64_t(seq) * ALL_COLUMNS + column, splits.count};
    };
    const auto finish = [&](int head, const SplitCombine& of) {
        const int64_t query_head = query_head_of(head), row = row_of_head(head);
        write_result<float, WARP_SIZE, HEAD_SIZE, 0, HAS_SINKS, HAS_LSE>(
            [&](int, int e) { return of.sum[e]; }, of.max_logit, of.exp_sum, 1.0f, true, sinks + query_head,
            out + row * out_stride + query_head * HEAD_SIZE, lse + query_head * num_rows + row, tmp_out, max_logits,
            exp_sums);
    };
    unsigned last = 0;  // bit h: the warp combines the splits of head h, which are many
    // Writes the heads first + k * num_warps with the states rows[k] and the accumulators total(k, element, e).
    const auto write = [&](int first, const auto& rows, auto total) {
        constexpr int COUNT = sizeof(rows) / sizeof(rows[0]);
        const auto head_of = [&](int k) { return first + k * num_warps; };
        if constexpr (MAY_BALANCE) {
            if (!direct && arrived) {
                // What a warp waits for is in flight for all of its heads.
                uint32_t before[COUNT];
                SplitBatch<FEW_SPLITS> batch[COUNT];
#pragma unroll
                for (int k = 0; k < COUNT; ++k) {
                    if (head_of(k) >= num_heads) continue;
                    combine_of(head_of(k))
                        .leave(
                            split, [&](int i, int e) { return total(k, i, e); }, rows[k].max_logit, rows[k].exp_sum,
                            value_unit);
                }
                sync_warp();
#pragma unroll
                for (int k = 0; k < COUNT; ++k) {
                    if (head_of(k) < num_heads) combine_of(head_of(k)).arrive(before[k], batch[k]);
                }
#pragma unroll
                for (int k = 0; k < COUNT; ++k) {
                    if (head_of(k) >= num_heads) continue;
                    SplitCombine combine = combine_of(head_of(k));
                    if (!combine.is_last(before[k])) continue;
                    if (splits.count > FEW_SPLITS) {
                        last |= 1u << head_of(k);
                        continue;
                    }
                    combine.combine_few(batch[k]);
                    finish(head_of(k), combine);
                }
                return;
            }
        }
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            if (head_of(k) >= num_heads) continue;
            const int64_t query_head = query_head_of(head_of(k)), row = row_of_head(head_of(k));
            const int64_t part = (int64_t(seq) * NUM_KV_HEADS * GROUP + query_head) * max_splits + split;
            write_result<product_t, WRITERS, HEAD_SIZE, PARTITION, HAS_SINKS, HAS_LSE>(
                [&](int i, int e) { return total(k, i, e); }, rows[k].max_logit, rows[k].exp_sum, value_unit, direct,
                sinks + query_head, out + row * out_stride + query_head * HEAD_SIZE, lse + query_head * num_rows + row,
                tmp_out + part * HEAD_SIZE, max_logits + part, exp_sums + part);
        }
    };
    __shared__ float block_max[HEADS];
    __shared__ float block_sum[HEADS];
    constexpr int AT_ONCE = MIN_CLUSTER_WARPS / HEAD_WARPS;  // heads that a CTA of a cluster writes at the same time
    const int writer = threadIdx.x / WRITERS;
    // If the first step has had all tokens, there is nothing to combine.
    const bool has_one_step = end - begin <= STEP;
    if (has_one_step) {
        if (CLUSTER > 1 && blockIdx.y > 0) return;
        const int writers = CLUSTER == 1 ? num_warps : AT_ONCE;
        for (int head = writer < writers ? writer : num_heads; head < num_heads; head += writers) {
            const RowState row[1] = {{step_max[head], step_sum[head]}};
            const bool attends = row[0].max_logit > minus_infinity();
            write(head, row, [&](int, int i, int) { return attends ? output_of(0, head)[i] : 0.0f; });
        }
        if (CLUSTER > 1) return;
    }
    // A warp of a CTA of four combines all of its heads at the same time, as far as it has registers for them.
    constexpr int MOST_AT_ONCE = LANE_ELEMENTS > 32 ? 1 : 32 / LANE_ELEMENTS, ALL_OF_WARP = ceil_div(MAX_HEADS, 4);
    constexpr int BATCH = ALL_OF_WARP < MOST_AT_ONCE ? ALL_OF_WARP : MOST_AT_ONCE;
    for (int first = has_one_step ? num_heads : warp; first < num_heads; first += BATCH * num_warps) {
        float totals[BATCH][LANE_ELEMENTS];
        RowState rows[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int head = first + k * num_warps < num_heads ? first + k * num_warps : first;
            const Combine<MAX_STEPS> combine([&](int w) { return step_max[w * HEADS + head]; },
                                             [&](int w) { return step_sum[w * HEADS + head]; });
            rows[k] = {combine.max_logit, combine.exp_sum};
#pragma unroll
            for (int e = 0; e < LANE_ELEMENTS; ++e) {
                const int i = lane + e * WARP_SIZE;
                totals[k][e] = combine.weighted_sum(
                    [&](int w) { return combine.factor[w] > 0.0f && i < HEAD_SIZE ? output_of(w, head)[i] : 0.0f; });
            }
        }
        if constexpr (CLUSTER == 1) {
            write(first, rows, [&](int k, int, int e) { return totals[k][e]; });
            continue;
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int head = first + k * num_warps;
            if (head >= num_heads) continue;
#pragma unroll
            for (int e = 0; e < LANE_ELEMENTS; ++e) {
                if (lane + e * WARP_SIZE < HEAD_SIZE) output_of(0, head)[lane + e * WARP_SIZE] = totals[k][e];
            }
            if (lane == 0) {
                block_max[head] = rows[k].max_logit;
                block_sum[head] = rows[k].exp_sum;
            }
        }
    }
    if constexpr (CLUSTER > 1) {
        sync_cluster<CLUSTER>();
        const int first = writer < AT_ONCE ? writer * CLUSTER + blockIdx.y : num_heads;
        for (int head = first; head < num_heads; head += AT_ONCE * CLUSTER) {
            // The loads from all CTAs are in flight together.
            constexpr int ELEMENTS = ceil_div(HEAD_SIZE, WRITERS);
            float outputs[ELEMENTS][CLUSTER];
            const auto of_block = [&](const float* word) {
                return [=](int rank) { return load_of_block<CLUSTER>(word, rank); };
            };
#pragma unroll
            for (int k = 0; k < ELEMENTS * CLUSTER; ++k) {
                const int e = k / CLUSTER, rank = k % CLUSTER, i = int(threadIdx.x) % WRITERS + e * WRITERS;
                if (i < HEAD_SIZE) outputs[e][rank] = load_of_block<CLUSTER>(output_of(0, head) + i, rank);
            }
            const Combine<CLUSTER> combine(of_block(block_max + head), of_block(block_sum + head));
            const RowState row[1] = {{combine.max_logit, combine.exp_sum}};
            write(head, row,
                  [&](int, int, int e) { return combine.weighted_sum([&](int rank) { return outputs[e][rank]; }); });
        }
        leave_cluster<CLUSTER>();
    }
    if constexpr (MAY_BALANCE) {
        for (int head = warp; head < num_heads; head += num_warps) {
            if (!(last >> head & 1)) continue;
            SplitCombine combine = combine_of(head);
            combine.combine_many();
            finish(head, combine);
        }
    }
}
