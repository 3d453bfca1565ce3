// attention_decode: one query token of each sequence against its keys and values in a paged cache, by matrix products.
//
//     l_i = softcap(scale * q . k_i) + slope * (i - length + 1)        first <= i < length
//     out = sum_i exp(l_i - m) v_i / (sum_i exp(l_i - m) + 1e-6),      m = max_i l_i
//
// A block takes one split of a sequence's tokens and HEADS query heads that share a key-value head; its warps take turns at
// steps of STEP tokens. A warp multiplies keys by queries and values by weights, S^T = K Q^T and O^T = V^T P^T: tokens and
// head dimensions are rows, the few heads are columns, and what lies in the cache goes from memory to the fragments of
// mma.m16n8k16 without a detour. Which token is which row, and which dimension which term of a sum, is free: each lane's
// elements are neighbours in memory. A step's keys and values are requested while the step before is computed.
//
// Of few sequences, a split is a whole sequence and the blocks of a cluster share it: all their warps take turns at its steps,
// and what the blocks have found meets in their shared memory. Where a warp begins is then known before the length is.
//
// Weights are split into two parts of the product's type, so that they are good to 16 bits and more. Keys and values of 8
// bits become float16, which holds them all, and weights are rounded to it; queries then are scaled by a power of two that
// puts each into its range.
//
// Not constants, so that one kernel serves every batch size: a launch may have any number of warps up to MAX_WARPS, and
// memory for what each of them leaves. `slots` > 0 shares even splits out by the lengths of all sequences (Balance); else
// every sequence has most_splits.
//
// A token whose block number is out of range contributes nothing, nor does what lies in a slot beyond the sequence. Offsets
// within a block of the cache have 32 bits.
//
// Constants
//     scalar_t       T: type of the queries and of out: half_t or bf16_t
//     cache_t        type of the caches: T, fp8_e4m3_t or fp8_e5m2_t
//     partial_t      type of tmp_out: float or T
//     table_t, length_t    types of block_tables and seq_lens
//     starts_t, STARTS_STEP    type of query_start_loc, and elements from one entry to the next
//     HEAD_SIZE      a multiple of the elements in 16 bytes of cache
//     BLOCK_SIZE     slots of a block of the cache; PACKED: a multiple of 4 * TILES
//     PACKED         caches are [num_blocks, num_kv_heads, HEAD_SIZE / x, BLOCK_SIZE, x] and [.., HEAD_SIZE, BLOCK_SIZE]
//     NUM_KV_HEADS, GROUP    key-value heads, and query heads to each of them
//     HEADS          query heads of a block: 8 or 16
//     TILES          tiles of 16 tokens in a warp's step
//     CLUSTER        blocks that share a split and run together
//     ONE_AT_A_TIME  registers hold keys or values, not both
//     MIN_BLOCKS     blocks of 4 warps that a multiprocessor must hold: bounds the registers
//     PARTITION      tokens of a split, or 0 for even splits
//     DIRECT         a sequence of one split goes straight to out
//     HAS_ALIBI, HAS_SOFTCAP, HAS_SINKS, HAS_LSE, HAS_STARTS    which of the options are there

#include "attention.cuh"
#include "cluster.cuh"
#include "mma.cuh"

constexpr int MAX_WARPS = CLUSTER > 1 ? 8 : 4, MIN_THREADS = 128;  // a cluster's blocks have at least 4 warps
constexpr bool MAY_BALANCE = CLUSTER == 1 && DIRECT && PARTITION == 0;
static_assert(CLUSTER == 1 || DIRECT);
constexpr bool IS_FP8 = sizeof(cache_t) == 1;
template <bool FP8> struct product_type { using type = scalar_t; };
template <> struct product_type<true> { using type = half_t; };
using product_t = product_type<IS_FP8>::type;

constexpr int CHUNK = 16 / sizeof(cache_t);  // elements in 16 bytes
constexpr int CHUNKS = HEAD_SIZE / CHUNK;
constexpr int STEP = TILE_TOKENS * TILES;  // tokens that a warp takes at once
constexpr int COLUMNS = HEADS / 8;                          // tiles of 8 heads
constexpr int HEAD_BLOCKS = (GROUP + HEADS - 1) / HEADS;    // blocks for the heads that share a key-value head
constexpr int KEY_CHUNKS = ceil_div(CHUNKS, 4);             // of a row, for each of the 4 lanes that share it
constexpr int RUN = 4 * TILES;                              // PACKED: neighbouring tokens of a lane
constexpr int VALUE_CHUNKS = PACKED ? 1 : ceil_div(CHUNKS, 8);
constexpr int ROWS = PACKED ? ceil_div(HEAD_SIZE, 16) : VALUE_CHUNKS * CHUNK / 2;  // tiles of 16 head dimensions
constexpr int QUERY_SIZE = KEY_CHUNKS * 4 * CHUNK;
constexpr int QUERY_STRIDE = QUERY_SIZE + (IS_FP8 ? 4 : QUERY_SIZE % 64 == 0 ? 32 : 0);  // lanes on different banks
static_assert(HEAD_SIZE % CHUNK == 0 && (!PACKED || BLOCK_SIZE % RUN == 0));

// Tokens of a step that surely lie in one block of the cache (splits, and so steps, begin at any multiple of TILE_TOKENS): lanes
// hold the number of each such unit, or, where tokens have their own, lane i holds that of token i.
constexpr int UNIT = BLOCK_SIZE % TILE_TOKENS == 0 ? TILE_TOKENS : BLOCK_SIZE % 8 == 0 ? 8 : 1;
constexpr int UNITS = UNIT == 1 ? 1 : STEP / UNIT;
static_assert(UNIT > 1 || STEP <= 32);
struct Numbers {
    int of[UNITS];
};

// The token of a step that is row r of a tile of S^T.
DEVICE int token_of(int tile, int r) {
    return PACKED ? r % 8 / 2 * RUN + 4 * tile + r / 8 * 2 + r % 2 : tile * TILE_TOKENS + r;
}

using run_t = word_of<RUN * int(sizeof(cache_t))>::type;
struct Keys {
    uint4 rows[TILES][2][KEY_CHUNKS];
};
struct Values {
    // PACKED: RUN neighbouring tokens of dimensions g and g + 8 of each tile. Else chunks of tokens 2t, 2t + 1, 2t + 8, 2t + 9.
    run_t runs[PACKED ? ROWS : 1][2];
    uint4 rows[PACKED ? 1 : TILES][4][VALUE_CHUNKS];
};

// What the warps of the block leave in dynamic shared memory, a head after the other: so far apart that a warp's stores meet
// different banks.
constexpr int MOST_HEADS = HEADS < GROUP ? HEADS : GROUP;
constexpr int PART_STRIDE = HEAD_SIZE + (PACKED || IS_FP8 ? 4 : 8);

// Asks for what a block reads first, as far as that is known without reading.
DEVICE void prefetch_first(float slots, const scalar_t* query, const table_t* block_tables, const length_t* seq_lens, int64_t num_seqs, int64_t num_rows,
                           int64_t most_tokens, int64_t query_stride, int64_t table_stride, int64_t table_step, int64_t length_step) {
    const int64_t seq = MAY_BALANCE && slots > 0.0f ? threadIdx.x : blockIdx.x / (NUM_KV_HEADS * HEAD_BLOCKS);
    if (seq < num_seqs) prefetch_line(seq_lens + seq * length_step);
    if constexpr (CLUSTER > 1) {
        const int token = (blockIdx.y * blockDim.x + threadIdx.x) / 32 * STEP;
        if (token < most_tokens) prefetch_line(block_tables + seq * table_stride + token / BLOCK_SIZE * table_step);
        const int kv_head = blockIdx.x / HEAD_BLOCKS % NUM_KV_HEADS, element = threadIdx.x * int(128 / sizeof(scalar_t));
        if (element < GROUP * HEAD_SIZE && seq < num_rows) {
            prefetch_line(query + seq * query_stride + kv_head * GROUP * HEAD_SIZE + element);
        }
    }
}

DEVICE uint32_t word_at(const uint4& words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(128 * MIN_BLOCKS, 1)
attention_decode(scalar_t* out,              // [num_rows, NUM_KV_HEADS * GROUP, HEAD_SIZE]
                 partial_t* tmp_out,     // [num_seqs, NUM_KV_HEADS * GROUP, most_splits, HEAD_SIZE]
                 float* max_logits,         // [num_seqs, NUM_KV_HEADS * GROUP, most_splits]
                 float* exp_sums,         // [num_seqs, NUM_KV_HEADS * GROUP, most_splits]
                 float* lse,                 // [NUM_KV_HEADS * GROUP, num_rows]
                 const scalar_t* query,      // [num_rows, NUM_KV_HEADS * GROUP, HEAD_SIZE]
                 const cache_t* key_cache,   // [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE], or PACKED
                 const cache_t* value_cache,
                 const table_t* block_tables,    // [num_seqs, most_tokens / BLOCK_SIZE]
                 const length_t* seq_lens,       // [num_seqs]
                 const starts_t* query_start_loc,     // [num_seqs + 1]
                 const float* alibi_slopes,      // [NUM_KV_HEADS * GROUP]
                 const float* sinks,             // [NUM_KV_HEADS * GROUP]
                 const float* k_scale, const float* v_scale,  // [1]
                 int64_t num_seqs, int64_t num_rows, int64_t num_blocks, int64_t most_tokens, int64_t most_splits, int64_t sliding_window,
                 int64_t least_split, int64_t out_stride, int64_t query_stride, int64_t table_stride,
                 int64_t table_step, int64_t length_step, int64_t key_block_stride, int64_t key_token_stride,
                 int64_t key_head_stride, int64_t value_block_stride, int64_t value_token_stride,
                 int64_t value_head_stride, float slots, float scale, float logits_soft_cap) {
    prefetch_first(slots, query, block_tables, seq_lens, num_seqs, num_rows, most_tokens, query_stride, table_stride, table_step, length_step);
    await_previous_kernel();
    const bool balanced = MAY_BALANCE && slots > 0.0f;
    const int kv_head = blockIdx.x % (NUM_KV_HEADS * HEAD_BLOCKS) / HEAD_BLOCKS;
    const int first_head = kv_head * GROUP + blockIdx.x % HEAD_BLOCKS * HEADS;
    const int num_heads = min(HEADS, (kv_head + 1) * GROUP - first_head);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_warps = blockDim.x / 32;
    const int turn = (CLUSTER > 1 ? blockIdx.y * num_warps : 0) + warp;  // of the warps that share the split
    const int round = CLUSTER * num_warps * STEP;                        // a step of each of them
    int seq = blockIdx.x / (NUM_KV_HEADS * HEAD_BLOCKS), split = CLUSTER > 1 ? 0 : blockIdx.y, parts = CLUSTER > 1 ? 1 : int(most_splits);
    if (balanced) {
        const Balance<length_t> balance(seq_lens, length_step, num_seqs, most_tokens, sliding_window, slots, most_splits);
        split = seq;
        seq = balance.find(split);
        if (seq < 0) return;
        parts = balance.splits_of(seq);
    }

    // The number of the block in which a token lies, -1 if there is none.
    const auto block_of = [&](int token) {
        const int64_t number = block_tables[seq * table_stride + token / BLOCK_SIZE * table_step];
        return number >= 0 && number < num_blocks ? int(number) : -1;
    };
    // Those of the step that begins at `start`, as f finds them.
    const auto numbers_at = [&](int start, auto f) {
        Numbers numbers;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) numbers.of[u] = f(UNIT == 1 ? start + lane % STEP : start + u * UNIT);
        return numbers;
    };
    const length_t given = seq_lens[seq * length_step];
    // Those of a cluster's first steps do not wait for the length, and are right unless a window begins later.
    Numbers numbers;
    if constexpr (CLUSTER > 1) {
        numbers = numbers_at(turn * STEP, [&](int token) { return block_of(min(token, int(most_tokens) - 1)); });
    }

    const Splits splits(given, most_tokens, sliding_window, PARTITION, parts, int(least_split));
    const auto find_row = [&] { return HAS_STARTS ? row_of(query_start_loc + seq * STARTS_STEP, STARTS_STEP, num_rows) : int64_t(seq); };
    if (HAS_STARTS && find_row() < 0) return;
    const bool direct = CLUSTER > 1 || (DIRECT && splits.count <= 1);
    if (!(direct && split == 0) && !splits.exists(split)) return;

    // (Without blocks there is nothing to load.)
    const int begin = splits.begin(split), end = num_blocks > 0 ? splits.end(split) : begin;
    const auto block_before_end = [&](int token) { return token < end ? block_of(token) : -1; };
    const cache_t* const keys_from = key_cache + kv_head * key_head_stride;
    const cache_t* const values_from = value_cache + kv_head * value_head_stride;

    const auto number_of = [&](const Numbers& numbers, int i) {
        if constexpr (UNIT == 1) return shfl<32>(numbers.of[0], i);
        int number = numbers.of[0];
#pragma unroll
        for (int u = 1; u < UNITS; ++u) number ^= (numbers.of[0] ^ numbers.of[u]) & -int(i / UNIT == u);  // a choice in registers
        return number;
    };
    // Whether token i of a step counts, and whether they all do.
    const auto is_attended = [&](const Numbers& numbers, int start, int i) {
        const bool in_block = number_of(numbers, i) >= 0;
        return in_block && start + i < end && start + i >= splits.first;
    };
    const auto is_whole = [&](const Numbers& numbers, int start) {
        bool missing = start < splits.first || start + STEP > end;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) missing |= numbers.of[u] < 0;
        return UNIT == 1 ? !any_lane(missing) : !missing;
    };
    // Where token i of a step lies. Of a token that does not count, somewhere in the cache: what is read there is dropped.
    const auto place_of = [&](const cache_t* from, int64_t block_stride, int token_stride, const Numbers& numbers, int start, int i) {
        const uint32_t slot = UNIT == STEP ? uint32_t(start) % BLOCK_SIZE + i : uint32_t(start + i) % BLOCK_SIZE;
        return from + int64_t(max(number_of(numbers, i), 0)) * block_stride + int(slot) * token_stride;
    };

    const auto load_keys = [&](Keys& keys, int start, const Numbers& numbers) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = token_of(tile, g + half * 8);
                const cache_t* from =
                    place_of(keys_from, key_block_stride, PACKED ? CHUNK : int(key_token_stride), numbers, start, i);
#pragma unroll
                for (int c = 0; c < KEY_CHUNKS; ++c) {
                    const int chunk = 4 * c + t;
                    keys.rows[tile][half][c] = uint4{};
                    if (CHUNKS % 4 == 0 || chunk < CHUNKS) {
                        keys.rows[tile][half][c] =
                            load_streaming(reinterpret_cast<const uint4*>(from + chunk * (PACKED ? CHUNK * BLOCK_SIZE : CHUNK)));
                    }
                }
            }
        }
    };
    const auto load_values = [&](Values& values, int start, const Numbers& numbers) {
        if constexpr (PACKED) {
            const cache_t* from = place_of(values_from, value_block_stride, 1, numbers, start, RUN * t);
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int dim = m * 16 + half * 8 + g;
                    values.runs[m][half] = run_t{};
                    if (HEAD_SIZE % 16 == 0 || dim < HEAD_SIZE) {
                        values.runs[m][half] = load_streaming(reinterpret_cast<const run_t*>(from + dim * BLOCK_SIZE));
                    }
                }
            }
        } else {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int i = tile * TILE_TOKENS + 2 * t + k % 2 + k / 2 * 8;
                    const cache_t* from =
                        place_of(values_from, value_block_stride, int(value_token_stride), numbers, start, i);
#pragma unroll
                    for (int c = 0; c < VALUE_CHUNKS; ++c) {
                        const int chunk = 8 * c + g;
                        values.rows[tile][k][c] = uint4{};
                        if (CHUNKS % 8 == 0 || chunk < CHUNKS) {
                            values.rows[tile][k][c] = load_streaming(reinterpret_cast<const uint4*>(from + chunk * CHUNK));
                        }
                    }
                }
            }
        }
    };
    // What does not count may be NaN, which no weight of zero takes away.
    const auto drop_values = [&](Values& values, int start, const Numbers& numbers) {
        if constexpr (PACKED) {
            constexpr int EACH = 4 / sizeof(cache_t), WORDS = RUN / EACH;  // elements of a word, words of a run
            constexpr uint32_t ONES = uint32_t((uint64_t(1) << 8 * sizeof(cache_t)) - 1);
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                uint32_t kept = 0;
#pragma unroll
                for (int k = 0; k < EACH; ++k) {
                    if (is_attended(numbers, start, RUN * t + w * EACH + k)) kept |= ONES << k * (32 / EACH);
                }
#pragma unroll
                for (int i = 0; i < ROWS * 2; ++i) reinterpret_cast<uint32_t*>(&values.runs[i / 2][i % 2])[w] &= kept;
            }
        } else {
#pragma unroll
            for (int i = 0; i < TILES * 4; ++i) {
                const int tile = i / 4, k = i % 4;
                const bool there = is_attended(numbers, start, tile * TILE_TOKENS + 2 * t + k % 2 + k / 2 * 8);
#pragma unroll
                for (int c = 0; c < VALUE_CHUNKS; ++c) {
                    if (!there) values.rows[tile][k][c] = uint4{};
                }
            }
        }
    };

    // The first keys and values are on their way while the queries are prepared.
    int start = begin + turn * STEP;
    if (CLUSTER == 1 || begin > 0) numbers = numbers_at(start, block_before_end);
    Keys keys;
    Values values;
    if (start < end) {
        load_keys(keys, start, numbers);
        if (!ONE_AT_A_TIME) load_values(values, start, numbers);
    }
    Numbers next_numbers = numbers_at(start + round, block_before_end);

    // What warps find will be here. A warp that the launch does not have has found nothing.
    __shared__ float warp_most[MAX_WARPS * HEADS];
    __shared__ float warp_sum[MAX_WARPS * HEADS];
    for (int i = threadIdx.x; i < MAX_WARPS * HEADS; i += int(blockDim.x)) {
        warp_most[i] = minus_infinity();
        warp_sum[i] = 0.0f;
    }

    // Queries, and what turns a product into a logit.
    __shared__ alignas(16) product_t queries[HEADS * QUERY_STRIDE];
    __shared__ float units[HEADS];
    const float key_unit = logit_unit<HAS_SOFTCAP>(IS_FP8 ? scale * *k_scale : scale, logits_soft_cap);
    const float value_unit = IS_FP8 ? *v_scale : 1.0f;
    for (int head = warp; head < HEADS; head += num_warps) {
        const scalar_t* from = query + find_row() * query_stride + int64_t(first_head + head) * HEAD_SIZE;
        float factor = 1.0f;
        if (IS_FP8) {
            float most = 0.0f;
            for (int i = lane; i < HEAD_SIZE && head < num_heads; i += 32) most = fmaxf(most, fabsf(to_float(from[i])));
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) most = fmaxf(most, shfl_xor(most, mask));
            factor = inverse_power_of_two(most);
        }
        for (int i = lane; i < QUERY_SIZE; i += 32) {
            const bool inside = head < num_heads && i < HEAD_SIZE;
            const float x = inside ? to_float(from[i]) : 0.0f;
            queries[head * QUERY_STRIDE + i] = from_float<product_t>(IS_FP8 ? x * factor : x);
        }
        if (lane == 0) units[head] = key_unit * (IS_FP8 ? 1.0f / factor : 1.0f);
    }
    __syncthreads();

    float unit[COLUMNS][2], slope[COLUMNS][2];
#pragma unroll
    for (int i = 0; i < COLUMNS * 2; ++i) {
        const int head = i / 2 * 8 + 2 * t + i % 2;
        unit[i / 2][i % 2] = units[head];
        slope[i / 2][i % 2] = HAS_ALIBI && head < num_heads ? alibi_slopes[first_head + head] * LOG2_E : 0.0f;
    }

    float most[COLUMNS][2], sum[COLUMNS][2], o[COLUMNS][ROWS][4];
#pragma unroll
    for (int i = 0; i < COLUMNS * 2; ++i) {
        most[i / 2][i % 2] = minus_infinity();
        sum[i / 2][i % 2] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < COLUMNS * ROWS * 4; ++i) o[i / (ROWS * 4)][i / 4 % ROWS][i % 4] = 0.0f;

    for (; start < end; start += round) {
        const int next = start + round;

        float s[TILES][COLUMNS][4];
#pragma unroll
        for (int i = 0; i < TILES * COLUMNS * 4; ++i) s[i / (COLUMNS * 4)][i / 4 % COLUMNS][i % 4] = 0.0f;
#pragma unroll
        for (int i = 0; i < KEY_CHUNKS * COLUMNS; ++i) {
            const int c = i / COLUMNS, column = i % COLUMNS;
            const product_t* q = queries + (column * 8 + g) * QUERY_STRIDE + (4 * c + t) * CHUNK;
            if constexpr (IS_FP8) {
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const uint2 terms = *reinterpret_cast<const uint2*>(q + 4 * w);
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        uint32_t a[2], b[2];
                        fp8_to_half<cache_t>(word_at(keys.rows[tile][0][c], w), a);
                        fp8_to_half<cache_t>(word_at(keys.rows[tile][1][c], w), b);
                        mma_m16n8k16<product_t>(s[tile][column], {a[0], b[0], a[1], b[1]}, {terms.x, terms.y});
                    }
                }
            } else {
                const uint4 terms = *reinterpret_cast<const uint4*>(q);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const uint4 low = keys.rows[tile][0][c], high = keys.rows[tile][1][c];
                    mma_m16n8k16<product_t>(s[tile][column], {low.x, high.x, low.y, high.y}, {terms.x, terms.y});
                    mma_m16n8k16<product_t>(s[tile][column], {low.z, high.z, low.w, high.w}, {terms.z, terms.w});
                }
            }
        }
        const bool whole = is_whole(numbers, start);
        unsigned counted = ~0u;  // which of the lane's tokens count: bit 2 * tile + half
        if (!whole) {
            counted = 0;
#pragma unroll
            for (int i = 0; i < TILES * 2; ++i) {
                counted |= unsigned(is_attended(numbers, start, token_of(i / 2, g + i % 2 * 8))) << i;
            }
        }
        if constexpr (ONE_AT_A_TIME) {
            sync_warp();
            load_values(values, start, numbers);
        } else if (next < end) {
            load_keys(keys, next, next_numbers);
        }

        uint32_t weights[TILES][COLUMNS][2], rests[TILES][COLUMNS][2];
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            float larger[2] = {most[column][0], most[column][1]};
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& logit = s[tile][column][i];
                    logit = logit_of<HAS_SOFTCAP>(logit, unit[column][i % 2], logits_soft_cap);
                    if (HAS_ALIBI) {
                        const int token = start + token_of(tile, g + i / 2 * 8);
                        logit = fmaf(slope[column][i % 2], float(token + 1 - splits.length), logit);
                    }
                    if (!(counted >> (2 * tile + i / 2) & 1)) logit = minus_infinity();
                    larger[i % 2] = fmaxf(larger[i % 2], logit);
                }
            }
#pragma unroll
            for (int mask = 4; mask <= 16; mask *= 2) {
                larger[0] = fmaxf(larger[0], shfl_xor(larger[0], mask));
                larger[1] = fmaxf(larger[1], shfl_xor(larger[1], mask));
            }
            if (any_lane(larger[0] > most[column][0] || larger[1] > most[column][1])) {
                float shrink[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    shrink[i] = relative_exp2(most[column][i], larger[i]);
                    sum[column][i] *= shrink[i];
                    most[column][i] = larger[i];
                }
#pragma unroll
                for (int i = 0; i < ROWS * 4; ++i) o[column][i / 4][i % 4] *= shrink[i % 2];
            }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                float p[4], coarse[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    p[i] = relative_exp2(s[tile][column][i], most[column][i % 2]);
                    sum[column][i % 2] += p[i];
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t word = pack_pair<product_t>(p[2 * half], p[2 * half + 1]);
                    unpack_pair<product_t>(word, coarse[2 * half], coarse[2 * half + 1]);
                    weights[tile][column][half] = transpose_8x8(word);
                    if constexpr (!IS_FP8) {
                        rests[tile][column][half] = transpose_8x8(
                            pack_pair<product_t>(p[2 * half] - coarse[2 * half], p[2 * half + 1] - coarse[2 * half + 1]));
                    }
                }
            }
        }

        const auto accumulate = [&](int tile, int m, const uint32_t (&a)[4]) {
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column) {
                if constexpr (!IS_FP8) mma_m16n8k16<product_t>(o[column][m], a, rests[tile][column]);
                mma_m16n8k16<product_t>(o[column][m], a, weights[tile][column]);
            }
        };
        if (!whole) drop_values(values, start, numbers);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if constexpr (PACKED) {
#pragma unroll
                for (int m = 0; m < ROWS; ++m) {
                    uint32_t a[2][2];  // [half][pair of tokens]
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const auto* words = reinterpret_cast<const uint32_t*>(&values.runs[m][half]);
                        if constexpr (IS_FP8) {
                            fp8_to_half<cache_t>(words[tile], a[half]);
                        } else {
                            a[half][0] = words[2 * tile];
                            a[half][1] = words[2 * tile + 1];
                        }
                    }
                    accumulate(tile, m, {a[0][0], a[1][0], a[0][1], a[1][1]});
                }
            } else {
#pragma unroll
                for (int c = 0; c < VALUE_CHUNKS; ++c) {
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        const uint4(&rows)[4][VALUE_CHUNKS] = values.rows[tile];
                        // Tokens 2t and 2t + 1, then 2t + 8 and 2t + 9, of two dimensions each.
                        uint32_t a[IS_FP8 ? 2 : 1][4];
#pragma unroll
                        for (int k = 0; k < 2; ++k) {
                            const uint32_t even = word_at(rows[2 * k][c], w), odd = word_at(rows[2 * k + 1][c], w);
                            if constexpr (IS_FP8) {
                                uint32_t halves[2][2];
                                fp8_to_half<cache_t>(pack_bytes<false>(even, odd), halves[0]);
                                fp8_to_half<cache_t>(pack_bytes<true>(even, odd), halves[1]);
#pragma unroll
                                for (int i = 0; i < 4; ++i) a[i / 2][2 * k + i % 2] = halves[i / 2][i % 2];
                            } else {
                                a[0][2 * k] = pack_halves<false>(even, odd);
                                a[0][2 * k + 1] = pack_halves<true>(even, odd);
                            }
                        }
#pragma unroll
                        for (int pair = 0; pair < (IS_FP8 ? 2 : 1); ++pair) {
                            accumulate(tile, c * (CHUNK / 2) + w * (CHUNK / 8) + pair, a[pair]);
                        }
                    }
                }
            }
        }
        if constexpr (ONE_AT_A_TIME) sync_warp();
        if (next < end) {
            if constexpr (ONE_AT_A_TIME) load_keys(keys, next, next_numbers);
            else load_values(values, next, next_numbers);
        }
        numbers = next_numbers;
        next_numbers = numbers_at(next + round, block_before_end);
    }

    // The warps' results meet in shared memory.
    extern __shared__ uint4 memory[];  // [num_warps, MOST_HEADS, PART_STRIDE] floats
    const auto part_of = [&](int w, int head) { return reinterpret_cast<float*>(memory) + (w * MOST_HEADS + head) * PART_STRIDE; };
#pragma unroll
    for (int i = 0; i < COLUMNS * 2; ++i) {
        float& own = sum[i / 2][i % 2];
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) own += shfl_xor(own, mask);
        const int head = i / 2 * 8 + 2 * t + i % 2;
        if (g == 0) {
            warp_most[warp * HEADS + head] = most[i / 2][i % 2];
            warp_sum[warp * HEADS + head] = own;
        }
        if (head >= num_heads) continue;
        const auto element = [&](int m, int half) { return o[i / 2][m][half * 2 + i % 2]; };
        float* to = part_of(warp, head);
        if constexpr (PACKED) {
#pragma unroll
            for (int m = 0; m < ROWS * 2; ++m) {
                const int dim = m * 8 + g;
                if (HEAD_SIZE % 16 == 0 || dim < HEAD_SIZE) to[dim] = element(m / 2, m % 2);
            }
        } else {
#pragma unroll
            for (int m = 0; m < ROWS; m += 2) {
                const int chunk = m / (CHUNK / 2) * 8 + g;
                if (CHUNKS % 8 == 0 || chunk < CHUNKS) {
                    *reinterpret_cast<float4*>(to + chunk * CHUNK + m % (CHUNK / 2) * 2) =
                        float4{element(m, 0), element(m, 1), element(m + 1, 0), element(m + 1, 1)};
                }
            }
        }
    }
    __syncthreads();

    // A head is finished by a warp or, in a cluster, by a block's.
    constexpr int HEAD_THREADS = ceil_div(HEAD_SIZE, 32) * 32;
    constexpr int WRITERS = CLUSTER == 1 ? 32 : HEAD_THREADS < MIN_THREADS ? HEAD_THREADS : MIN_THREADS;
    const auto write = [&](int head, const auto& shares, auto total) {
        const int64_t own_head = first_head + head, at = (int64_t(seq) * NUM_KV_HEADS * GROUP + own_head) * most_splits + split;
        const int64_t row = find_row();
        write_result<WRITERS, HEAD_SIZE, PARTITION, HAS_SINKS, HAS_LSE>(
            total, shares.largest, shares.z, value_unit, direct, sinks + own_head, out + row * out_stride + own_head * HEAD_SIZE,
            lse + own_head * num_rows + row, tmp_out + at * HEAD_SIZE, max_logits + at, exp_sums + at);
    };
    __shared__ float block_most[HEADS];
    __shared__ float block_sum[HEADS];
    for (int head = warp; head < num_heads; head += num_warps) {
        const Shares<MAX_WARPS> shares([&](int w) { return warp_most[w * HEADS + head]; }, [&](int w) { return warp_sum[w * HEADS + head]; });
        const auto total = [&](int i, int) {
            return shares.sum([&](int w) { return shares.of[w] > 0.0f ? part_of(w, head)[i] : 0.0f; });
        };
        if constexpr (CLUSTER == 1) {
            write(head, shares, total);
        } else {
            for (int i = lane; i < HEAD_SIZE; i += 32) part_of(0, head)[i] = total(i, 0);
            if (lane == 0) {
                block_most[head] = shares.largest;
                block_sum[head] = shares.z;
            }
        }
    }
    if constexpr (CLUSTER > 1) {
        sync_cluster<CLUSTER>();
        for (int head = blockIdx.y; head < num_heads && threadIdx.x < WRITERS; head += CLUSTER) {
            // All that is read of the other blocks is on its way together.
            constexpr int EACH = ceil_div(HEAD_SIZE, WRITERS);
            float found[EACH][CLUSTER];
            const auto of_block = [&](const float* word) { return [=](int rank) { return load_of_block<CLUSTER>(word, rank); }; };
#pragma unroll
            for (int k = 0; k < EACH * CLUSTER; ++k) {
                const int e = k / CLUSTER, rank = k % CLUSTER, i = int(threadIdx.x) + e * WRITERS;
                if (i < HEAD_SIZE) found[e][rank] = load_of_block<CLUSTER>(part_of(0, head) + i, rank);
            }
            const Shares<CLUSTER> shares(of_block(block_most + head), of_block(block_sum + head));
            write(head, shares, [&](int, int e) { return shares.sum([&](int rank) { return found[e][rank]; }); });
        }
        leave_cluster<CLUSTER>();
    }
}
