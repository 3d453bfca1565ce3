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
// Weights are split into two parts of the product's type, so that they are good to 16 bits and more. Keys and values of 8
// bits become float16, which holds them all, and weights are rounded to it; queries then are scaled by a power of two that
// puts each into its range.
//
// A token whose block number is out of range contributes nothing, nor does what lies in a slot beyond the sequence. Offsets
// within a block of the cache have 32 bits.
//
// Constants
//     scalar_t       T: type of the queries and of out: half_t or bf16_t
//     cache_t        type of the caches: T, fp8_e4m3_t or fp8_e5m2_t
//     partial_t      type of tmp_out: float or T
//     table_t, length_t    types of block_tables and seq_lens
//     HEAD_SIZE      a multiple of the elements in 16 bytes of cache
//     BLOCK_SIZE     slots of a block of the cache; PACKED: a multiple of 4 * TILES
//     PACKED         caches are [num_blocks, num_kv_heads, HEAD_SIZE / x, BLOCK_SIZE, x] and [.., HEAD_SIZE, BLOCK_SIZE]
//     NUM_KV_HEADS, GROUP    key-value heads, and query heads to each of them
//     HEADS          query heads of a block: 8 or 16
//     TILES          tiles of 16 tokens in a warp's step
//     NUM_WARPS      warps of the block
//     ONE_AT_A_TIME  registers hold keys or values, not both
//     MIN_BLOCKS     blocks of 4 warps that a multiprocessor should hold: bounds the registers
//     PARTITION      tokens of a split, or 0 for even splits
//     BALANCED       even splits are as many as the lengths of all sequences suggest, else most_splits
//     DIRECT         a sequence of one split goes straight to out
//     HAS_ALIBI, HAS_SOFTCAP, HAS_SINKS, HAS_LSE, HAS_STARTS    which of the options are there

#include "attention.cuh"
#include "mma.cuh"

static_assert(NUM_WARPS <= 4);
constexpr bool IS_FP8 = sizeof(cache_t) == 1;
template <bool FP8> struct product_type { using type = scalar_t; };
template <> struct product_type<true> { using type = half_t; };
using product_t = product_type<IS_FP8>::type;

constexpr int CHUNK = 16 / sizeof(cache_t);  // elements in 16 bytes
constexpr int CHUNKS = HEAD_SIZE / CHUNK;
constexpr int STEP = TILE_TOKENS * TILES;
constexpr int COLUMNS = HEADS / 8;                          // tiles of 8 heads
constexpr int HEAD_BLOCKS = (GROUP + HEADS - 1) / HEADS;    // blocks for the heads that share a key-value head
constexpr int KEY_CHUNKS = ceil_div(CHUNKS, 4);             // of a row, for each of the 4 lanes that share it
constexpr int RUN = 4 * TILES;                              // PACKED: neighbouring tokens of a lane
constexpr int VALUE_CHUNKS = PACKED ? 1 : ceil_div(CHUNKS, 8);
constexpr int ROWS = PACKED ? ceil_div(HEAD_SIZE, 16) : VALUE_CHUNKS * CHUNK / 2;  // tiles of 16 head dimensions
constexpr int QUERY_SIZE = KEY_CHUNKS * 4 * CHUNK;
constexpr int QUERY_STRIDE = QUERY_SIZE + (IS_FP8 ? 4 : QUERY_SIZE % 64 == 0 ? 32 : 0);  // lanes on different banks
static_assert(HEAD_SIZE % CHUNK == 0 && (!PACKED || BLOCK_SIZE % RUN == 0));

// Tokens of a step that surely lie in one block of the cache: lanes hold the number of each such unit, or, where tokens have
// their own, lane i holds that of token i.
constexpr int UNIT = BLOCK_SIZE % STEP == 0 ? STEP : BLOCK_SIZE % 16 == 0 ? 16 : BLOCK_SIZE % 8 == 0 ? 8 : 1;
constexpr int UNITS = UNIT == 1 ? 1 : STEP / UNIT;
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

DEVICE uint32_t word_at(const uint4& words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

extern "C" __global__ void LAUNCH_BOUNDS(128, MIN_BLOCKS)
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
                 const int* query_start_loc,     // [num_seqs + 1]
                 const float* alibi_slopes,      // [NUM_KV_HEADS * GROUP]
                 const float* sinks,             // [NUM_KV_HEADS * GROUP]
                 const float* k_scale, const float* v_scale,  // [1]
                 int64_t num_seqs, int64_t num_rows, int64_t num_blocks, int64_t most_tokens, int64_t most_splits, int64_t sliding_window,
                 int64_t least_split, int64_t out_stride, int64_t query_stride, int64_t table_stride,
                 int64_t table_step, int64_t length_step, int64_t key_block_stride, int64_t key_token_stride,
                 int64_t key_head_stride, int64_t value_block_stride, int64_t value_token_stride,
                 int64_t value_head_stride, float slots, float scale, float logits_soft_cap) {
    await_previous_kernel();
    const int kv_head = blockIdx.x % (NUM_KV_HEADS * HEAD_BLOCKS) / HEAD_BLOCKS;
    const int first_head = kv_head * GROUP + blockIdx.x % HEAD_BLOCKS * HEADS;
    const int num_heads = min(HEADS, (kv_head + 1) * GROUP - first_head);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int seq = blockIdx.x / (NUM_KV_HEADS * HEAD_BLOCKS), split = blockIdx.y, parts = int(most_splits);
    if constexpr (BALANCED) {
        const Balance<length_t> balance(seq_lens, length_step, num_seqs, most_tokens, sliding_window, slots, most_splits);
        split = seq;
        seq = balance.find(split);
        if (seq < 0) return;
        parts = balance.splits_of(seq);
    }
    const Splits splits(seq_lens[seq * length_step], most_tokens, sliding_window, PARTITION, parts, int(least_split));
    const auto find_row = [&] { return HAS_STARTS ? row_of(query_start_loc + seq, num_rows) : int64_t(seq); };
    if (HAS_STARTS && find_row() < 0) return;
    const bool direct = DIRECT && splits.count <= 1;
    if (!splits.exists(split) && !(direct && split == 0)) return;

    // (Without blocks there is nothing to load.)
    const int begin = splits.begin(split), end = num_blocks > 0 ? splits.end(split) : begin;
    const cache_t* const keys_from = key_cache + kv_head * key_head_stride;
    const cache_t* const values_from = value_cache + kv_head * value_head_stride;

    // The numbers of the blocks of the step that begins at `start`, -1 if there is none.
    const auto numbers_at = [&](int start) {
        Numbers numbers;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const int token = UNIT == 1 ? start + lane % STEP : start + u * UNIT;
            numbers.of[u] = -1;
            if (token < end) {
                const int64_t number = block_tables[seq * table_stride + token / BLOCK_SIZE * table_step];
                if (number >= 0 && number < num_blocks) numbers.of[u] = int(number);
            }
        }
        return numbers;
    };
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
    int start = begin + warp * STEP;
    Numbers numbers = numbers_at(start), next_numbers = numbers_at(start + NUM_WARPS * STEP);
    Keys keys;
    Values values;
    if (start < end) {
        load_keys(keys, start, numbers);
        if (!ONE_AT_A_TIME) load_values(values, start, numbers);
    }

    // Queries, and what turns a product into a logit.
    __shared__ alignas(16) product_t queries[HEADS * QUERY_STRIDE];
    __shared__ float units[HEADS];
    const float key_unit = logit_unit<HAS_SOFTCAP>(IS_FP8 ? scale * *k_scale : scale, logits_soft_cap);
    for (int head = warp; head < HEADS; head += NUM_WARPS) {
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

    for (; start < end; start += NUM_WARPS * STEP) {
        const int next = start + NUM_WARPS * STEP;

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
        next_numbers = numbers_at(next + NUM_WARPS * STEP);
    }

    // The warps' results meet in shared memory, one warp after another.
    __shared__ float warp_most[NUM_WARPS * HEADS];
    __shared__ float warp_sum[NUM_WARPS * HEADS];
    __shared__ float total[HEADS * HEAD_SIZE];
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
    }
    __syncthreads();
    for (int turn = 0; turn < NUM_WARPS; ++turn) {
        if (warp == turn) {
#pragma unroll
            for (int i = 0; i < COLUMNS * 2; ++i) {
                const int head = i / 2 * 8 + 2 * t + i % 2;
                float largest = minus_infinity();
#pragma unroll
                for (int w = 0; w < NUM_WARPS; ++w) largest = fmaxf(largest, warp_most[w * HEADS + head]);
                const float share = relative_exp2(most[i / 2][i % 2], largest);
#pragma unroll
                for (int m = 0; m < ROWS; ++m) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        // The dimension that row g + 8 * half of tile m is.
                        const int dim = PACKED ? m * 16 + half * 8 + g
                                               : (m / (CHUNK / 2) * 8 + g) * CHUNK + m % (CHUNK / 2) * 2 + half;
                        if (dim < HEAD_SIZE) {
                            float& sum_of_warps = total[head * HEAD_SIZE + dim];
                            const float own = o[i / 2][m][half * 2 + i % 2] * share;
                            sum_of_warps = turn == 0 ? own : sum_of_warps + own;
                        }
                    }
                }
            }
        }
        __syncthreads();
    }

    for (int head = warp; head < num_heads; head += NUM_WARPS) {
        float largest = minus_infinity(), z = 0.0f;
#pragma unroll
        for (int w = 0; w < NUM_WARPS; ++w) largest = fmaxf(largest, warp_most[w * HEADS + head]);
#pragma unroll
        for (int w = 0; w < NUM_WARPS; ++w) {
            z += warp_sum[w * HEADS + head] * relative_exp2(warp_most[w * HEADS + head], largest);
        }
        const int64_t own_head = first_head + head, at = (int64_t(seq) * NUM_KV_HEADS * GROUP + own_head) * most_splits + split;
        const int64_t row = find_row();
        write_result<HEAD_SIZE, PARTITION, HAS_SINKS, HAS_LSE>(
            total + head * HEAD_SIZE, largest, z, IS_FP8 ? *v_scale : 1.0f, direct, sinks + own_head,
            out + row * out_stride + own_head * HEAD_SIZE, lse + own_head * num_rows + row,
            tmp_out + at * HEAD_SIZE, max_logits + at, exp_sums + at);
    }
}
