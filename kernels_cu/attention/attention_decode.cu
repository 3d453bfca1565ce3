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
// bits become float16, which holds them all; queries then are scaled by a power of two that puts each into its range.
//
// A token whose block number is out of range contributes nothing. What lies in a slot beyond the sequence is not read.
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
//     MIN_BLOCKS     blocks a multiprocessor should hold: bounds the registers
//     PARTITION      tokens of a split, or 0 for even splits
//     DIRECT         a sequence of one split goes straight to out
//     HAS_ALIBI, HAS_SOFTCAP, HAS_SINKS, HAS_LSE, HAS_STARTS    which of the options are there

#include "attention.cuh"
#include "mma.cuh"

constexpr int NUM_THREADS = NUM_WARPS * 32;
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
constexpr bool ONE_BLOCK = BLOCK_SIZE % STEP == 0;          // a step's tokens lie in one block of the cache

// The row of S^T that token i of a tile is, turned round: the token of row r.
DEVICE int token_of(int tile, int r) {
    return PACKED ? r % 8 / 2 * RUN + 4 * tile + r / 8 * 2 + r % 2 : tile * TILE_TOKENS + r;
}

struct Keys {
    uint4 rows[TILES][2][KEY_CHUNKS];
};
struct Values {
    // PACKED: RUN neighbouring tokens of dimensions g and g + 8 of each tile. Else chunks of tokens 2t, 2t + 1, 2t + 8, 2t + 9.
    word_of<RUN * int(sizeof(cache_t))>::type runs[PACKED ? ROWS : 1][2];
    uint4 rows[PACKED ? 1 : TILES][4][VALUE_CHUNKS];
};

DEVICE uint32_t word_at(const uint4& words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
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
                 int64_t num_rows, int64_t num_blocks, int64_t most_tokens, int64_t most_splits, int64_t sliding_window,
                 int64_t least_split, int64_t out_stride, int64_t query_stride, int64_t table_stride,
                 int64_t table_step, int64_t length_step, int64_t key_block_stride, int64_t key_token_stride,
                 int64_t key_head_stride, int64_t value_block_stride, int64_t value_token_stride,
                 int64_t value_head_stride, float scale, float logits_soft_cap) {
    await_previous_kernel();
    const int kv_head = blockIdx.x % (NUM_KV_HEADS * HEAD_BLOCKS) / HEAD_BLOCKS;
    const int first_head = kv_head * GROUP + blockIdx.x % HEAD_BLOCKS * HEADS;
    const int num_heads = min(HEADS, (kv_head + 1) * GROUP - first_head);
    const int64_t seq = blockIdx.x / (NUM_KV_HEADS * HEAD_BLOCKS);
    const int split = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Splits splits(seq_lens[seq * length_step], most_tokens, sliding_window, PARTITION, int(most_splits), int(least_split));
    const int64_t row = HAS_STARTS ? row_of(query_start_loc + seq, num_rows) : seq;
    if (row < 0) return;
    const bool direct = DIRECT && splits.count <= 1;
    if (!splits.exists(split) && !(direct && split == 0)) return;

    const int end = splits.end(split);
    const cache_t* const keys_from = key_cache + kv_head * key_head_stride;
    const cache_t* const values_from = value_cache + kv_head * value_head_stride;

    // The number of the block that a token of the step beginning at `start` lies in, -1 if there is none: of token `lane`.
    const auto number_at = [&](int start) {
        const int token = ONE_BLOCK ? start : start + lane % STEP;
        if (token >= end) return -1;
        const int64_t number = block_tables[seq * table_stride + token / BLOCK_SIZE * table_step];
        return number >= 0 && number < num_blocks ? int(number) : -1;
    };
    const auto number_of = [&](int numbers, int i) { return ONE_BLOCK ? numbers : shfl<32>(numbers, i); };
    const auto is_attended = [&](int start, int i) { return start + i < end && start + i >= splits.first; };

    const auto load_keys = [&](Keys& keys, int start, int numbers) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = token_of(tile, g + half * 8);
                const int number = number_of(numbers, i);
                const bool there = number >= 0 && is_attended(start, i);
                const cache_t* from = keys_from + int64_t(number) * key_block_stride +
                                      (start + i) % BLOCK_SIZE * (PACKED ? int64_t(CHUNK) : key_token_stride);
#pragma unroll
                for (int c = 0; c < KEY_CHUNKS; ++c) {
                    const int chunk = 4 * c + t;
                    const bool inside = there && (CHUNKS % 4 == 0 || chunk < CHUNKS);
                    keys.rows[tile][half][c] = uint4{};
                    if (inside) {
                        keys.rows[tile][half][c] =
                            *reinterpret_cast<const uint4*>(from + int64_t(chunk) * (PACKED ? CHUNK * BLOCK_SIZE : CHUNK));
                    }
                }
            }
        }
    };
    const auto load_values = [&](Values& values, int start, int numbers) {
        if constexpr (PACKED) {
            const int i = RUN * t;
            const int number = number_of(numbers, i);
            const cache_t* from = values_from + int64_t(number) * value_block_stride + (start + i) % BLOCK_SIZE;
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    using run_t = word_of<RUN * int(sizeof(cache_t))>::type;
                    const int dim = m * 16 + half * 8 + g;
                    values.runs[m][half] = run_t{};
                    if (number >= 0 && (HEAD_SIZE % 16 == 0 || dim < HEAD_SIZE)) {
                        Vec<cache_t, RUN> run = Vec<cache_t, RUN>::load(from + int64_t(dim) * BLOCK_SIZE);
                        // What lies beyond the sequence may be NaN, which no weight of zero takes away.
                        if (start + i + RUN > end || start + i < splits.first) {
#pragma unroll
                            for (int k = 0; k < RUN; ++k) {
                                if (!is_attended(start, i + k)) run.data[k] = from_float<cache_t>(0.0f);
                            }
                        }
                        values.runs[m][half] = run.template word<RUN>(0);
                    }
                }
            }
        } else {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int i = tile * TILE_TOKENS + 2 * t + k % 2 + k / 2 * 8;
                    const int number = number_of(numbers, i);
                    const bool there = number >= 0 && is_attended(start, i);
                    const cache_t* from = values_from + int64_t(number) * value_block_stride +
                                          (start + i) % BLOCK_SIZE * value_token_stride;
#pragma unroll
                    for (int c = 0; c < VALUE_CHUNKS; ++c) {
                        const int chunk = 8 * c + g;
                        values.rows[tile][k][c] = uint4{};
                        if (there && (CHUNKS % 8 == 0 || chunk < CHUNKS)) {
                            values.rows[tile][k][c] = *reinterpret_cast<const uint4*>(from + chunk * CHUNK);
                        }
                    }
                }
            }
        }
    };

    // The first keys and values are on their way while the queries are prepared.
    int start = splits.begin(split) + warp * STEP;
    int numbers = number_at(start), next_numbers = number_at(start + NUM_WARPS * STEP);
    Keys keys;
    Values values;
    if (start < end) {
        load_keys(keys, start, numbers);
        load_values(values, start, numbers);
    }

    // Queries, and what turns a product into a logit.
    __shared__ alignas(16) product_t queries[HEADS * QUERY_STRIDE];
    __shared__ float units[HEADS];
    const float key_unit = logit_unit<HAS_SOFTCAP>(IS_FP8 ? scale * *k_scale : scale, logits_soft_cap);
    for (int head = warp; head < HEADS; head += NUM_WARPS) {
        const scalar_t* from = query + row * query_stride + int64_t(first_head + head) * HEAD_SIZE;
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
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < COLUMNS * 4; ++i) s[tile][i / 4][i % 4] = 0.0f;
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; ++c) {
                const uint4 low = keys.rows[tile][0][c], high = keys.rows[tile][1][c];
#pragma unroll
                for (int column = 0; column < COLUMNS; ++column) {
                    const product_t* q = queries + (column * 8 + g) * QUERY_STRIDE + (4 * c + t) * CHUNK;
                    if constexpr (IS_FP8) {
#pragma unroll
                        for (int w = 0; w < 4; ++w) {
                            uint32_t a[2], b[2];
                            fp8_to_half<cache_t>(word_at(low, w), a);
                            fp8_to_half<cache_t>(word_at(high, w), b);
                            const uint2 terms = *reinterpret_cast<const uint2*>(q + 4 * w);
                            mma_m16n8k16<product_t>(s[tile][column], {a[0], b[0], a[1], b[1]}, {terms.x, terms.y});
                        }
                    } else {
                        const uint4 terms = *reinterpret_cast<const uint4*>(q);
                        mma_m16n8k16<product_t>(s[tile][column], {low.x, high.x, low.y, high.y}, {terms.x, terms.y});
                        mma_m16n8k16<product_t>(s[tile][column], {low.z, high.z, low.w, high.w}, {terms.z, terms.w});
                    }
                }
            }
        }
        // Which of the lane's tokens count: bit 2 * tile + half.
        unsigned counted = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = token_of(tile, g + half * 8);
                const bool there = number_of(numbers, i) >= 0 && is_attended(start, i);
                counted |= unsigned(there) << (2 * tile + half);
            }
        }
        if (next < end) load_keys(keys, next, next_numbers);

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
                    rests[tile][column][half] = transpose_8x8(
                        pack_pair<product_t>(p[2 * half] - coarse[2 * half], p[2 * half + 1] - coarse[2 * half + 1]));
                }
            }
        }

        const auto accumulate = [&](int tile, int m, const uint32_t (&a)[4]) {
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column) {
                mma_m16n8k16<product_t>(o[column][m], a, rests[tile][column]);
                mma_m16n8k16<product_t>(o[column][m], a, weights[tile][column]);
            }
        };
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
                        uint32_t v[4][2];  // of token k, the pairs of dimensions
                        if constexpr (IS_FP8) {
#pragma unroll
                            for (int k = 0; k < 4; ++k) fp8_to_half<cache_t>(word_at(values.rows[tile][k][c], w), v[k]);
                        } else {
#pragma unroll
                            for (int k = 0; k < 4; ++k) v[k][0] = word_at(values.rows[tile][k][c], w);
                        }
#pragma unroll
                        for (int pair = 0; pair < (IS_FP8 ? 2 : 1); ++pair) {
                            const uint32_t a[4] = {pack_halves<false>(v[0][pair], v[1][pair]),
                                                   pack_halves<true>(v[0][pair], v[1][pair]),
                                                   pack_halves<false>(v[2][pair], v[3][pair]),
                                                   pack_halves<true>(v[2][pair], v[3][pair])};
                            accumulate(tile, c * (CHUNK / 2) + w * (CHUNK / 8) + pair, a);
                        }
                    }
                }
            }
        }
        if (next < end) load_values(values, next, next_numbers);
        numbers = next_numbers;
        next_numbers = number_at(next + NUM_WARPS * STEP);
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
        const int64_t own_head = first_head + head, at = (seq * NUM_KV_HEADS * GROUP + own_head) * most_splits + split;
        write_result<HEAD_SIZE, PARTITION, HAS_SINKS, HAS_LSE>(
            total + head * HEAD_SIZE, largest, z, IS_FP8 ? *v_scale : 1.0f, direct, sinks + own_head,
            out + row * out_stride + own_head * HEAD_SIZE, lse + own_head * num_rows + row,
            tmp_out + at * HEAD_SIZE, max_logits + at, exp_sums + at);
    }
}
