// prefill_mma: attention prefill with warp-level MMAs, over a paged KV cache or ragged tensors (ragged.cuh). A sequence
// may have any number of query tokens.
//
//     l_ij = softcap(scale * q_i . k_j) + slope * (j - limit_i)       limit_i - window < j <= limit_i
//     out_i = sum_j exp(l_ij - m_i) v_j / (sum_j exp(l_ij - m_i) + 1e-6),   m_i = max_j l_ij
//
// with limit_i = length - num_queries + i if CAUSAL, else length - 1. After FlashAttention-2 (Dao 2023,
// arXiv:2307.08691).
//
// Rows: a sequence has one row for each query token and each of the GROUP query heads of a KV head (GQA packing), heads
// first.
//
// Grid: a CTA takes a tile of TILE_ROWS rows. blockIdx.x counts the tiles of all sequences: the tiles of sequence s
// begin at number cu_seqlens_q[s] * GROUP / TILE_ROWS + s, so each sequence has at most one number without rows. With one
// query token each (HAS_STARTS = 0), all sequences have equally many tiles.
// Sequences of fewer than min_tokens query tokens are skipped. blockIdx.y counts the slices of all KV heads: where the
// accumulators of whole values exceed the registers, a CTA has the columns of one slice, and all CTAs of a tile compute
// its scores.
//
// Thread mapping: COLUMN_WARPS warps take ROW_TILES tiles of 16 rows. They split the keys of Q K^T and the columns of
// P V, and exchange row max and P through shared memory (prefill_mma_exchange.cuh). The CTA goes through KV tiles of
// TOKENS keys. It computes the addresses of a tile two tiles ahead, and copies the next tile to shared memory while it
// computes the current one.
// With one stage, it copies the values of a tile during Q K^T, and the next keys during P V, as FlashAttention-2 does.
// Copies stand after the operands of the first MMAs. Tiles past the last one are zeros.
// Where copies are held (async.cuh), and to convert an fp8 cache, it copies the next tile to registers, stores keys
// after the scores are computed, and values after P V of the previous tile. MMAs are those of product.cuh;
// probabilities are rounded to T, which represents every fp8 value.
//
// Split-KV (HAS_SPLITS): blockIdx.z counts parts of a tile's keys; a tile of few keys has fewer. The last CTA of a tile
// to arrive combines its splits (combine_splits.cuh).
//
// A token with an invalid block number contributes nothing. A slot after the end of the sequence is not read.
//
// Constants
//     scalar_t       T: element type of the queries and of out: half_t or bf16_t
//     cache_t        element type of the caches: T, fp8_e4m3_t or fp8_e5m2_t
//     table_t, length_t, starts_t    element types of block_tables, seq_lens and cu_seqlens_q
//     HEAD_SIZE      a multiple of 8; PACKED: of 16
//     SLICES         slices of a value, one to a CTA
//     VALUE_SIZE     elements of a slice of a value of a head: likewise, at most HEAD_SIZE
//     RAGGED         keys and values are ragged tensors, read as blocks of one slot; else a paged cache
//     BLOCK_SIZE     slots of a cache block; PACKED: a multiple of 8; RAGGED: 1
//     HEAD_SCALES    as in attention_decode.cu
//     PACKED, X      the layout of the caches as in attention_decode.cu, and the innermost dimension of packed keys
//     GROUP          query heads per KV head
//     TOKENS         keys of a KV tile; a multiple of 16 * COLUMN_WARPS
//     NUM_WARPS      warps of a CTA
//     ROW_TILES      tiles of 16 rows per warp
//     COLUMN_WARPS   warps that share rows; 1 on matrix cores, if PACKED and with P_HI_LO
//     STAGES         tiles of keys, and of values, in shared memory: 1 or 2
//     OUT_ACCESS     elements of out in one memory access: 1 or 2
//     CAUSAL         a query token sees the keys up to its own position, else all keys
//     HAS_STARTS     cu_seqlens_q is given; else each sequence has one query token
//     P_HI_LO        probabilities are split into hi + lo of T, as in attention_decode.cu

#include "prefill_mma_epilogue.cuh"
#include "prefill_mma_exchange.cuh"
#include "ragged.cuh"
#include "sequence_search.cuh"

// MAX_TILE_SUM: largest sum of a lane's probabilities of a row and KV tile; where it is larger, the row max is updated.
// So probabilities reach 2^8. In bfloat16, accumulators of the largest values stay finite up to 2^24 tokens.
template <typename T> constexpr float MAX_TILE_SUM = 256.0f / FULL_SCALE<T>;

// COPY_STEP: the step of P V with the copies, after its operands. More than two CTAs of an SM leave few registers.
constexpr int COPY_STEP = NUM_THREADS * MIN_BLOCKS > 256 || WARP_STEPS < 3 ? 0 : 2;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
prefill_mma(scalar_t* out,                               // [num_tokens, num_heads, SLICES * VALUE_SIZE]
            float* lse,                                  // [num_heads, num_tokens]
            const scalar_t* query,                       // [num_tokens, num_heads, HEAD_SIZE]
            const cache_t* key_cache,                    // [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE], or PACKED
            const cache_t* value_cache,                  // likewise, with SLICES * VALUE_SIZE
            const table_t* block_tables,                 // [num_seqs, max_tokens / BLOCK_SIZE]
            const length_t* seq_lens,                    // [num_seqs]; RAGGED: cu_seqlens_k [num_seqs + 1]
            const starts_t* cu_seqlens_q,                // [num_seqs + 1]
            const float* alibi_slopes,                   // [num_heads]
            const float* sinks,                          // [num_heads]
            const float* k_scale, const float* v_scale,  // [1] or [num_kv_heads]
            int64_t num_tokens, int64_t num_seqs, int64_t min_tokens, int64_t num_blocks, int64_t max_tokens,
            int64_t sliding_window, int64_t out_stride, int64_t query_stride, int64_t table_stride, int64_t table_step,
            int64_t length_step, int64_t starts_step, int64_t key_block_stride, int64_t key_token_stride,
            int64_t key_head_stride, int64_t value_block_stride, int64_t value_token_stride, int64_t value_head_stride,
            float scale, float logits_soft_cap,
            float* tmp_out,     // [num_tokens, num_heads * SLICES, max_splits, VALUE_SIZE]
            float* max_logits,  // [num_tokens, num_heads * SLICES, max_splits]
            float* exp_sums,    // [num_tokens, num_heads * SLICES, max_splits]
            uint32_t* arrived,  // [gridDim.x, gridDim.y], zero before and after
            int64_t max_splits) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    unsigned char* const shared = reinterpret_cast<unsigned char*>(memory);
    __shared__ int64_t offsets[2][2 * TOKENS];
    __shared__ bool holes[2][NUM_WARPS];
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int g = lane_row(lane), t = lane_column(lane);
    // The first row of the warp, and its part of the keys of a KV tile and of the columns of values.
    const int warp_row = warp / COLUMN_WARPS * WARP_ROWS, part = warp % COLUMN_WARPS;

    // Tiles are taken from the last to the first: under CAUSAL the later tiles of a sequence take longer and should not
    // be the tail.
    const int64_t tile_number = int64_t(gridDim.x) - 1 - blockIdx.x;
    const auto start_of = [&](int64_t seq) { return HAS_STARTS ? int64_t(cu_seqlens_q[seq * starts_step]) : seq; };
    constexpr int TOKEN_TILES = ceil_div(GROUP, TILE_ROWS);  // tiles of a query token
    const auto first_tile = [&](int64_t seq) {
        return HAS_STARTS ? start_of(seq) * GROUP / TILE_ROWS + seq : seq * TOKEN_TILES;
    };
    // A short call waits mostly for loads that depend on each other. So lanes ask for the lengths of up to WARP_SIZE
    // sequences during the search, and threads for the block numbers of the first tokens before they know the length.
    // Loads stay in order with the copies of the queries, so scales, and sinks, are asked for before these.
    const int kv_head = blockIdx.y / SLICES, slice = blockIdx.y % SLICES;
    const float key_scale = IS_FP8 ? k_scale[HEAD_SCALES ? kv_head : 0] : 1.0f;
    const float value_scale = IS_FP8 ? v_scale[HEAD_SCALES ? kv_head : 0] : 1.0f;
    const RaggedKeys<length_t> ragged{seq_lens, length_step, max_tokens};
    const auto length_of = [&](int64_t seq) {
        return RAGGED ? ragged.length_of(seq)
                      : int(min(max(int64_t(seq_lens[seq * length_step]), int64_t(0)), max_tokens));
    };
    const bool lane_has_length = num_seqs <= WARP_SIZE;
    const int own_length = lane_has_length && lane < num_seqs ? length_of(lane) : 0;
    const int64_t seq = HAS_STARTS ? find_sequence(tile_number, int(num_seqs), first_tile) : tile_number / TOKEN_TILES;
    if (seq < 0) return;
    const int64_t first_row = RAGGED ? ragged.first_row(seq) : 0;
    const table_t* const blocks = RAGGED ? nullptr : block_tables + seq * table_stride;
    const auto block_of = [&](int token) {
        return RAGGED ? first_row + token : int64_t(blocks[token / BLOCK_SIZE * table_step]);
    };
    constexpr bool IS_EARLY = STAGES == 2 || IN_REGISTERS;  // otherwise CTAs are many, and registers few
    int64_t early_blocks[2] = {};                           // of the first two KV tiles
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int token = i * TOKENS + threadIdx.x % TOKENS;
        if (IS_EARLY && token < max_tokens) early_blocks[i] = block_of(token);
    }
    const int length = lane_has_length ? shfl<WARP_SIZE>(own_length, int(seq)) : length_of(seq);
    const int64_t first_token = start_of(seq), end_token = start_of(seq + 1);
    if (first_token < 0 || end_token > num_tokens || first_token >= end_token) return;
    if (end_token - first_token < min_tokens) return;
    const int64_t tile_row = (tile_number - first_tile(seq)) * TILE_ROWS, num_rows = (end_token - first_token) * GROUP;
    // If cu_seqlens_q does not ascend, the search may return a sequence that begins after the tile.
    if (tile_row < 0 || tile_row >= num_rows) return;

    const int64_t context = CAUSAL ? length - (end_token - first_token) : int64_t(length) - 1;
    // Row i of the tile: its token, counted from that of row 0, and its head. The main loop keeps 32-bit numbers,
    // because accumulators need most registers.
    const int first_head = int(tile_row % GROUP), tile_rows = int(min(num_rows - tile_row, int64_t(TILE_ROWS)));
    const int64_t tile_token = first_token + tile_row / GROUP;
    const auto token_of = [&](int i) { return (first_head + i) / GROUP; };
    const auto head_of = [&](int i) { return kv_head * GROUP + (first_head + i) % GROUP; };
    const auto slice_of = [&](int i) { return head_of(i) * SLICES + slice; };
    // The last key that a row sees, and the one before the first. A row beyond the last one is treated as the last one.
    const int oldest_limit = int(CAUSAL ? context + tile_row / GROUP : context);
    const auto limit_of = [&](int i) { return CAUSAL ? oldest_limit + token_of(min(i, tile_rows - 1)) : oldest_limit; };
    const auto before_window = [&](int limit) {
        const int64_t least = -(int64_t(1) << 31);
        return int(sliding_window > 0 ? max(limit - sliding_window, least) : least);
    };
    const int newest = limit_of(TILE_ROWS - 1), first = max(before_window(oldest_limit), -1) + 1;

    // The keys of the CTA's split: KV tiles from `start` on, up to key `last`.
    int start = first / TOKENS * TOKENS, last = newest, splits = 1;
    if constexpr (HAS_SPLITS) {
        int split_tile = first / TOKENS, last_tile = max(newest, 0) / TOKENS;
        splits = take_split(blockIdx.z, int(max_splits), split_tile, last_tile);
        if (blockIdx.z >= splits) return;
        start = split_tile * TOKENS;
        last = min(newest, last_tile * TOKENS + TOKENS - 1);
    }

    const rows_tile queries{reinterpret_cast<scalar_t*>(shared)};
    const Exchange exchange{shared + QUERY_BYTES + STAGES * (KEY_BYTES + VALUE_BYTES), warp_row + g, part};

    float sink[ROW_TILES * LANE_ROWS];
    const auto load_sinks = [&] {
#pragma unroll
        for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
            const int row = min(warp_row + i * ROW_STEP + g, tile_rows - 1);
            sink[i] = HAS_SINKS ? sinks[head_of(row)] : minus_infinity();
        }
    };
    constexpr bool EARLY_SINKS = IS_EARLY && ROW_TILES == 1;  // otherwise few registers are left
    if constexpr (EARLY_SINKS) load_sinks();

    // Copies the queries to shared memory. All copies of a thread are in flight together, and with those of the first
    // keys.
    for (int i = threadIdx.x; i < TILE_ROWS * CHUNKS; i += NUM_THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const scalar_t* const from =
            query + (tile_token + token_of(row)) * query_stride + int64_t(head_of(row)) * HEAD_SIZE + chunk * 8;
        cp_async<16>(queries.at(row, chunk), from, row < tile_rows && (ALL_KEY_CHUNKS || chunk * 8 < HEAD_SIZE));
    }
    cp_async_commit();

    // Each thread computes the offset of one key or value of a tile with offset_at, and stores it with note_offset when
    // the memory is free.
    const auto offset_of = [&](int start, auto find_block) {
        const bool is_key = threadIdx.x < TOKENS;
        const int token = start + threadIdx.x % TOKENS;
        if (threadIdx.x >= 2 * TOKENS || token > last || token < first) return UNSEEN;
        const int64_t block = find_block(token);
        if (block < 0 || block >= num_blocks) return NOWHERE;
        const int slot = token % BLOCK_SIZE;
        const int64_t offset = is_key ? block * key_block_stride + slot * (PACKED ? X : key_token_stride)
                                      : block * value_block_stride + slot * (PACKED ? 1 : value_token_stride);
        return offset * int64_t(sizeof(cache_t));
    };
    const auto offset_at = [&](int start) { return offset_of(start, block_of); };
    held_t held_keys, held_values;
    const Tiles tiles{shared, offsets, holes, key_cache + kv_head * key_head_stride,
                      value_cache + kv_head * value_head_stride + slice * VALUE_SIZE * (PACKED ? BLOCK_SIZE : 1)};

    float max_logit[ROW_TILES][LANE_ROWS], exp_sum[ROW_TILES][LANE_ROWS];
    float o[ROW_TILES][OUT_TILES][PRODUCT_SUMS];
#pragma unroll
    for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
        max_logit[i / LANE_ROWS][i % LANE_ROWS] = minus_infinity();
        exp_sum[i / LANE_ROWS][i % LANE_ROWS] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES * OUT_SUMS; ++i) {
        o[i / OUT_SUMS][i / PRODUCT_SUMS % OUT_TILES][i % PRODUCT_SUMS] = 0.0f;
    }
    const float unit = logit_unit<HAS_SOFTCAP>(scale * key_scale, logits_soft_cap);

    bool scale_first = false;  // |row max| exceeds 2^24
    int stage = 0;
    if (start <= last) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto early = [&](int token) { return IS_EARLY && start == 0 ? early_blocks[i] : block_of(token); };
            tiles.note_offset(i, offset_of(start + i * TOKENS, early));
        }
        __syncthreads();
        Tiles::offsets_t found;
        tiles.find_keys(0, found);
        tiles.load_keys(0, found, held_keys);
        if constexpr (IS_AHEAD) {
            tiles.find_values(0, found);
            tiles.load_values(0, found, held_values);
        }
        tiles.store_keys(held_keys);  // waits for keys in registers, so values are in flight, too
    }
    for (; start <= last; start += TOKENS, stage ^= 1) {
        const bool more = start + TOKENS <= last;
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        tiles.store_values(held_values);
        Tiles::offsets_t found;
        if constexpr (IS_AHEAD) tiles.find_keys(stage ^ 1, found);
        else tiles.find_values(stage, found);

        // S = Q K^T: ROW_TILES tiles of 16 rows, WARP_TOKENS columns.
        const rows_tile keys = tiles.keys_at(stage);
        constexpr int LOGITS = WARP_TOKENS / PRODUCT_COLUMNS * PRODUCT_SUMS;  // scores of a thread per 16 rows
        float s[ROW_TILES][WARP_TOKENS / PRODUCT_COLUMNS][PRODUCT_SUMS];
#pragma unroll
        for (int i = 0; i < ROW_TILES * LOGITS; ++i) {
            s[i / LOGITS][i / PRODUCT_SUMS % (WARP_TOKENS / PRODUCT_COLUMNS)][i % PRODUCT_SUMS] = 0.0f;
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            uint32_t a[ROW_TILES][SHORT_WORDS];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) load_rows(a[r], queries, warp_row + r * 16, step, lane);
#pragma unroll
            for (int n = 0; n < WARP_TOKENS / 16; ++n) {
                uint32_t b[SHORT_WORDS];
                load_columns(b, keys, part * WARP_TOKENS + n * 16, step, lane);
                if (step == 0 && n == WARP_TOKENS / 16 - 1) {
                    if constexpr (IS_AHEAD) tiles.load_keys(stage ^ 1, found, held_keys);
                    else tiles.load_values(stage, found, held_values);
                }
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    product<scalar_t>(s[r][COLUMN_TILES * n], a[r], b, 0);
                    if constexpr (COLUMN_TILES == 2) product<scalar_t>(s[r][2 * n + 1], a[r], b, 1);
                }
            }
        }

        // If plain, s keeps scores instead of logits; the exponential multiplies by `unit`.
        const bool plain = unit > 0.0f && !HAS_SOFTCAP && !HAS_ALIBI;
        const float factor = plain ? unit : 1.0f;
        // Calls f(logit, row tile, half, column) for the lane's elements of s.
        const auto each_score = [&](auto f) {
#pragma unroll
            for (int i = 0; i < ROW_TILES * LOGITS; ++i) {
                const int r = i / LOGITS, n = i / PRODUCT_SUMS % (WARP_TOKENS / PRODUCT_COLUMNS);
                f(s[r][n][i % PRODUCT_SUMS], r, i / ROW_SUMS % LANE_ROWS,
                  part * WARP_TOKENS + n * PRODUCT_COLUMNS + t + i % ROW_SUMS);
            }
        };
        const auto row_of = [&](int r, int half) { return warp_row + (r * LANE_ROWS + half) * ROW_STEP + g; };
        if (!plain) {
            each_score([&](float& logit, int r, int half, int column) {
                logit = logit_of<HAS_SOFTCAP>(logit, unit, logits_soft_cap);
                if constexpr (!HAS_ALIBI) return;
                const int row = row_of(r, half);
                const float distance = float(start + column - limit_of(row));
                logit = fmaf(alibi_slopes[head_of(row)] * LOG2_E, distance, logit);
            });
        }
        const auto hide = [&](auto is_hidden) {
            each_score([&](float& logit, int r, int half, int column) {
                if (is_hidden(r, half, column)) logit = minus_infinity();
            });
        };
        if (start + TOKENS - 1 > oldest_limit) {
            hide([&](int r, int half, int column) { return start + column > limit_of(row_of(r, half)); });
        }
        if (start <= before_window(newest)) {
            hide([&](int r, int half, int column) {
                return start + column <= before_window(limit_of(row_of(r, half)));
            });
        }
        if (!tiles.is_whole(stage)) hide([&](int, int, int column) { return offsets[stage][column] < 0; });
        uint32_t probabilities[ROW_TILES][WARP_TOKENS / 16][SHORT_WORDS];
        uint32_t p_lo[P_HI_LO ? ROW_TILES : 1][P_HI_LO ? TOKENS / 16 : 1][SHORT_WORDS];
        // The FMA of an exact score and the base also shows the rounding error of the base. It is a common factor of
        // all probabilities of a row and cancels. Beyond 2^24 that factor may be 0 or infinite, so scores are scaled,
        // and rounded, first.
        float exact_factor = factor;
        const auto scale_scores = [&] {
            each_score([&](float& score, int, int, int) { score *= exact_factor; });
            exact_factor = 1.0f;
        };
        if (scale_first) scale_scores();
        // Computes the probabilities relative to the row max, and for each row the lane's sum of them.
        float tile_sum[ROW_TILES][LANE_ROWS];
        const auto exponentials = [&] {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                float base[LANE_ROWS];
#pragma unroll
                for (int half = 0; half < LANE_ROWS; ++half) {
                    // Next to a row max of -inf, any logit gives infinity.
                    base[half] = probability_base<scalar_t>(fmaxf(max_logit[r][half], -FLOAT_MAX));
                    tile_sum[r][half] = 0.0f;
                }
#pragma unroll
                for (int i = 0; i < LOGITS / 2; ++i) {
                    const int n = i / (PRODUCT_SUMS / 2), pair = i % (PRODUCT_SUMS / 2), half = pair / (ROW_SUMS / 2);
                    const float low = estimate_exp2(fmaf(s[r][n][2 * pair], exact_factor, -base[half]));
                    const float high = estimate_exp2(fmaf(s[r][n][2 * pair + 1], exact_factor, -base[half]));
                    tile_sum[r][half] += low + high;
                    const int k = n / COLUMN_TILES, word = n % COLUMN_TILES * (PRODUCT_SUMS / 2) + pair;
                    probabilities[r][k][word] = pack_pair<scalar_t>(low, high);
                    if constexpr (P_HI_LO) {
                        float low_hi, high_hi;
                        unpack_pair<scalar_t>(probabilities[r][k][word], low_hi, high_hi);
                        p_lo[r][k][word] = pack_pair<scalar_t>(low - low_hi, high - high_hi);
                    }
                }
            }
        };
        // Lazy rescaling: a row sum shows whether a logit exceeds the row max by far. Then the row max is updated, and
        // the probabilities are computed again. Warps that share rows update it always, because they need the same one.
        bool exceeds = COLUMN_WARPS > 1;
        if constexpr (COLUMN_WARPS == 1) {
            exponentials();
#pragma unroll
            for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
                exceeds |= !(tile_sum[i / LANE_ROWS][i % LANE_ROWS] <= MAX_TILE_SUM<scalar_t>);
            }
        }
        if (any_lane(exceeds)) {
            float row_max[ROW_TILES][LANE_ROWS];
#pragma unroll
            for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) row_max[i / LANE_ROWS][i % LANE_ROWS] = minus_infinity();
            each_score([&](float score, int r, int half, int) { row_max[r][half] = fmaxf(row_max[r][half], score); });
#pragma unroll
            for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
                float& larger = row_max[i / LANE_ROWS][i % LANE_ROWS];
#pragma unroll
                for (int mask = FIRST_ROW_MASK; mask < END_ROW_MASK; mask *= 2) {
                    larger = fmaxf(larger, shfl_xor(larger, mask));
                }
                larger *= exact_factor;
            }
            exchange.reduce<Max>(row_max, t);
            float largest_base = 0.0f;
#pragma unroll
            for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
                const int r = i / LANE_ROWS, half = i % LANE_ROWS;
                const float larger = fmaxf(max_logit[r][half], row_max[r][half]);
                const float correction = relative_exp2(max_logit[r][half], larger);
                exp_sum[r][half] *= correction;
                max_logit[r][half] = larger;
                largest_base = fmaxf(largest_base, fabsf(probability_base<scalar_t>(larger)));
#pragma unroll
                for (int j = 0; j < OUT_SUMS / LANE_ROWS; ++j) {
                    o[r][j / ROW_SUMS][ROW_SUMS * half + j % ROW_SUMS] *= correction;
                }
            }
            if (!scale_first && any_lane(largest_base > 0x1p24f)) {
                scale_first = true;
                scale_scores();
            }
            exponentials();
        }
#pragma unroll
        for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
            const int r = i / LANE_ROWS, half = i % LANE_ROWS;
            exp_sum[r][half] += tile_sum[r][half];
        }
#pragma unroll
        for (int i = 0; i < ROW_TILES * (WARP_TOKENS / 16); ++i) {
            const int r = i / (WARP_TOKENS / 16), k = i % (WARP_TOKENS / 16);
            finish_operand(probabilities[r][k]);
            if constexpr (P_HI_LO) finish_operand(p_lo[r][k]);
        }
        exchange.store(probabilities, t);

        cp_async_wait<STAGES - 1>();
        __syncthreads();
        if (more) tiles.store_keys(held_keys);
        if constexpr (IS_AHEAD) tiles.find_values(stage ^ 1, found);
        else tiles.find_keys(stage ^ 1, found);
        const int64_t offset = offset_at(start + 2 * TOKENS);

        // O += P V.
        scalar_t* const values = tiles.values_at(stage);
#pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) {
            uint32_t p[ROW_TILES][SHORT_WORDS];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) exchange.load(p[r], probabilities[r], warp_row + r * 16, k, lane);
#pragma unroll
            for (int step = 0; step < WARP_STEPS; ++step) {
                uint32_t b[SHORT_WORDS];
                load_values_of<VALUES_BY_DIM>(b, values, k, part * WARP_STEPS + step, lane);
                if (k == 0 && step == COPY_STEP) {
                    if (PACKED && !more) cp_async_commit();  // without values, element by element
                    else if constexpr (IS_AHEAD) tiles.load_values(stage ^ 1, found, held_values);
                    else tiles.load_keys(stage ^ 1, found, held_keys);
                }
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    const auto multiply = [&](const uint32_t (&a)[SHORT_WORDS]) {
                        product<scalar_t>(o[r][COLUMN_TILES * step], a, b, 0);
                        if constexpr (COLUMN_TILES == 2) product<scalar_t>(o[r][2 * step + 1], a, b, 1);
                    };
                    multiply(p[r]);
                    if constexpr (P_HI_LO) multiply(p_lo[r][k]);
                }
            }
        }
        tiles.note_offset(stage, offset);
    }
    cp_async_wait<0>();

    const Results results{{out, lse, tmp_out, max_logits, exp_sums, sinks, num_tokens, max_splits, out_stride,
                           int64_t(gridDim.y) * GROUP},
                          FULL_SCALE<scalar_t> * value_scale};
    if constexpr (!EARLY_SINKS) load_sinks();  // no load moves above the store of a row
#pragma unroll
    for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
        float& row_sum = exp_sum[i / LANE_ROWS][i % LANE_ROWS];
#pragma unroll
        for (int mask = FIRST_ROW_MASK; mask < END_ROW_MASK; mask *= 2) row_sum += shfl_xor(row_sum, mask);
    }
    exchange.reduce<Sum>(exp_sum, t);
#pragma unroll
    for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
        const int r = i / LANE_ROWS, half = i % LANE_ROWS, row = warp_row + i * ROW_STEP + g;
        const float row_sum = exp_sum[r][half] * FULL_SCALE<scalar_t>;
        if (row >= tile_rows) continue;
        results.store(o[r], half, part * WARP_STEPS * 16 + t, max_logit[r][half], row_sum, sink[i],
                      tile_token + token_of(row), slice_of(row), splits);
    }
    if constexpr (HAS_SPLITS) {
        __shared__ uint32_t is_last;
        if (splits == 1 || !arrives_last(arrived + blockIdx.x * gridDim.y + blockIdx.y, splits, &is_last)) return;
        for (int row = warp; row < tile_rows; row += NUM_WARPS) {
            results.rows.combine(tile_token + token_of(row), slice_of(row), splits);
        }
    }
}
