// decode_tile.cuh: the tiles that a warp of attention_decode multiplies, and how they get from a paged cache to
// registers.
//
// A warp computes a step of STEP tokens at a time: TILES tiles of 16 tokens. Keys and values go from memory to the
// registers of mma.m16n8k16 directly. A matrix product allows any order of the tokens among its rows, and any order of
// the dimensions among the terms of its sums: the orders here make each lane's elements neighbours in memory. In
// comments g = lane / 4 and t = lane % 4, as in mma.cuh.
//
// The constants in capitals that are not defined here are those of attention_decode.cu.
#pragma once
#include "attention.cuh"
#include "mma.cuh"

constexpr int MAX_WARPS = CLUSTER > 1 ? 8 : 4;
constexpr int MIN_CLUSTER_THREADS = 128;  // a block of a cluster has at least 4 warps
constexpr bool MAY_BALANCE = CLUSTER == 1 && DIRECT && PARTITION == 0;
static_assert(CLUSTER == 1 || DIRECT);
constexpr bool IS_FP8 = sizeof(cache_t) == 1;
template <bool FP8> struct product_type { using type = scalar_t; };
template <> struct product_type<true> { using type = half_t; };
using product_t = product_type<IS_FP8>::type;  // of the factors of matrix products

constexpr int CHUNK = 16 / sizeof(cache_t);  // elements in 16 bytes
constexpr int CHUNKS = HEAD_SIZE / CHUNK;
constexpr int STEP = TILE_TOKENS * TILES;
constexpr int COLUMNS = HEADS / 8;                              // tiles of 8 heads
constexpr int HEAD_BLOCKS = (GROUP + HEADS - 1) / HEADS;        // blocks of one key-value head
constexpr int KEY_CHUNKS = ceil_div(CHUNKS, 4);                 // chunks of a key in a lane; 4 lanes share a key
constexpr int RUN = 4 * TILES;                                  // PACKED: neighbouring tokens of a lane
constexpr int VALUE_CHUNKS = PACKED ? 1 : ceil_div(CHUNKS, 8);  // chunks of a value in a lane
constexpr int ROWS = PACKED ? ceil_div(HEAD_SIZE, 16) : VALUE_CHUNKS * CHUNK / 2;  // tiles of 16 head dimensions

// Queries in shared memory end with zeros. The stride lets lanes meet different banks.
constexpr int QUERY_SIZE = KEY_CHUNKS * 4 * CHUNK;
constexpr int QUERY_STRIDE = QUERY_SIZE + (IS_FP8 ? 4 : QUERY_SIZE % 64 == 0 ? 32 : 0);
static_assert(HEAD_SIZE % CHUNK == 0 && (!PACKED || BLOCK_SIZE % RUN == 0));

// A unit is a group of tokens that lies in one block of the cache wherever a step begins (at a multiple of
// TILE_TOKENS).
constexpr int UNIT = BLOCK_SIZE % TILE_TOKENS == 0 ? TILE_TOKENS : BLOCK_SIZE % 8 == 0 ? 8 : 1;
constexpr int UNITS = UNIT == 1 ? 1 : STEP / UNIT;
static_assert(UNIT > 1 || STEP <= 32);

// The numbers of the cache blocks that hold the tokens of a step; -1: no block. Every lane has the number of each unit.
// With units of one token, lane i has the number of token i alone.
struct BlockNumbers { int of[UNITS]; };

// The block numbers of the step that begins at `start`; block_of(token) is the block number of one token.
template <typename F>
DEVICE BlockNumbers find_blocks(int start, int lane, F block_of) {
    BlockNumbers numbers;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) numbers.of[u] = block_of(UNIT == 1 ? start + lane % STEP : start + u * UNIT);
    return numbers;
}

// The block number of token i of a step.
DEVICE int block_number(const BlockNumbers& numbers, int i) {
    if constexpr (UNIT == 1) return shfl<32>(numbers.of[0], i);
    int number = numbers.of[0];
#pragma unroll
    for (int u = 1; u < UNITS; ++u) {
        number ^= (numbers.of[0] ^ numbers.of[u]) & -int(i / UNIT == u);  // a choice that stays in registers
    }
    return number;
}

// The token of a step that is row `row` of matrix tile `tile`.
DEVICE int token_of(int tile, int row) {
    return PACKED ? row % 8 / 2 * RUN + 4 * tile + row / 8 * 2 + row % 2 : tile * TILE_TOKENS + row;
}

using run_t = word_of<int(sizeof(cache_t)) * RUN>::type;

// Keys of a step in a lane: rows g and g + 8 of each tile, chunks t, t + 4 and so on.
struct Keys { uint4 rows[TILES][2][KEY_CHUNKS]; };

// Values of a step in a lane.
struct Values {
    // PACKED: RUN neighbouring tokens of dimensions g and g + 8 of each tile.
    run_t runs[PACKED ? ROWS : 1][2];
    // Otherwise: chunks g, g + 8 and so on of tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of each tile.
    uint4 rows[PACKED ? 1 : TILES][4][VALUE_CHUNKS];
};

// Dynamic shared memory has O of each warp, one head after the other. The stride lets the stores of a warp meet different
// banks.
constexpr int MAX_HEADS = HEADS < GROUP ? HEADS : GROUP;
constexpr int OUTPUT_STRIDE = HEAD_SIZE + (PACKED || IS_FP8 ? 4 : 8);

// Prefetches what the block reads first: as far as addresses are known before the previous kernel has ended.
DEVICE void prefetch_first(bool balanced, const scalar_t* query, const table_t* block_tables, const length_t* seq_lens,
                           int64_t num_seqs, int64_t num_rows, int64_t max_tokens, int64_t query_stride,
                           int64_t table_stride, int64_t table_step, int64_t length_step) {
    const int64_t seq = balanced ? threadIdx.x : blockIdx.x / (NUM_KV_HEADS * HEAD_BLOCKS);
    if (seq < num_seqs) prefetch_line(seq_lens + seq * length_step);
    if constexpr (CLUSTER > 1) {
        const int token = (blockIdx.y * blockDim.x + threadIdx.x) / 32 * STEP;
        if (token < max_tokens) prefetch_line(block_tables + seq * table_stride + token / BLOCK_SIZE * table_step);
        const int kv_head = blockIdx.x / HEAD_BLOCKS % NUM_KV_HEADS;
        const int element = threadIdx.x * int(128 / sizeof(scalar_t));
        if (element < GROUP * HEAD_SIZE && seq < num_rows) {
            prefetch_line(query + seq * query_stride + kv_head * GROUP * HEAD_SIZE + element);
        }
    }
}

DEVICE uint32_t component(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Loads steps of one split of a sequence, for one key-value head.
struct StepLoader {
    const cache_t* keys;    // of the key-value head, in block 0
    const cache_t* values;  // likewise
    int64_t key_block_stride, value_block_stride, key_token_stride, value_token_stride;
    int first, end;  // the tokens first <= i < end are attended
    int g, t;

    // Whether token i of the step at `start` is attended and has a block.
    DEVICE bool is_attended(const BlockNumbers& numbers, int start, int i) const {
        const bool in_block = block_number(numbers, i) >= 0;
        return in_block && start + i < end && start + i >= first;
    }
    // Whether is_attended holds for every token of the step.
    DEVICE bool all_attended(const BlockNumbers& numbers, int start) const {
        bool missing = start < first || start + STEP > end;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) missing |= numbers.of[u] < 0;
        return UNIT == 1 ? !any_lane(missing) : !missing;
    }
    // The address of token i of the step at `start`. A token that is not attended gets an address within the cache,
    // too: what is loaded from there is ignored.
    static DEVICE const cache_t* address(const cache_t* base, int64_t block_stride, int token_stride,
                                         const BlockNumbers& numbers, int start, int i) {
        const uint32_t slot = UNIT == STEP ? uint32_t(start) % BLOCK_SIZE + i : uint32_t(start + i) % BLOCK_SIZE;
        return base + int64_t(max(block_number(numbers, i), 0)) * block_stride + int(slot) * token_stride;
    }

    DEVICE void load_keys(Keys& to, int start, const BlockNumbers& numbers) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = token_of(tile, g + half * 8);
                const cache_t* from =
                    address(keys, key_block_stride, PACKED ? CHUNK : int(key_token_stride), numbers, start, i);
#pragma unroll
                for (int c = 0; c < KEY_CHUNKS; ++c) {
                    const int chunk = 4 * c + t;
                    to.rows[tile][half][c] = uint4{};
                    if (CHUNKS % 4 == 0 || chunk < CHUNKS) {
                        to.rows[tile][half][c] = load_streaming(
                            reinterpret_cast<const uint4*>(from + chunk * (PACKED ? CHUNK * BLOCK_SIZE : CHUNK)));
                    }
                }
            }
        }
    }

    DEVICE void load_values(Values& to, int start, const BlockNumbers& numbers) const {
        if constexpr (PACKED) {
            const cache_t* from = address(values, value_block_stride, 1, numbers, start, RUN * t);
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int dim = m * 16 + half * 8 + g;
                    to.runs[m][half] = run_t{};
                    if (HEAD_SIZE % 16 == 0 || dim < HEAD_SIZE) {
                        to.runs[m][half] = load_streaming(reinterpret_cast<const run_t*>(from + dim * BLOCK_SIZE));
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
                        address(values, value_block_stride, int(value_token_stride), numbers, start, i);
#pragma unroll
                    for (int c = 0; c < VALUE_CHUNKS; ++c) {
                        const int chunk = 8 * c + g;
                        to.rows[tile][k][c] = uint4{};
                        if (CHUNKS % 8 == 0 || chunk < CHUNKS) {
                            to.rows[tile][k][c] = load_streaming(reinterpret_cast<const uint4*>(from + chunk * CHUNK));
                        }
                    }
                }
            }
        }
    }

    // Zeroes the values of tokens that are not attended. Their probability is 0, but 0 times NaN is NaN.
    DEVICE void clear_unattended(Values& of, int start, const BlockNumbers& numbers) const {
        if constexpr (PACKED) {
            constexpr int WORD_TOKENS = 4 / sizeof(cache_t), WORDS = RUN / WORD_TOKENS;
            constexpr uint32_t ELEMENT = uint32_t((uint64_t(1) << 8 * sizeof(cache_t)) - 1);  // the bits of one element
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                uint32_t kept_bits = 0;
#pragma unroll
                for (int k = 0; k < WORD_TOKENS; ++k) {
                    if (is_attended(numbers, start, RUN * t + w * WORD_TOKENS + k)) {
                        kept_bits |= ELEMENT << k * (32 / WORD_TOKENS);
                    }
                }
#pragma unroll
                for (int i = 0; i < ROWS * 2; ++i) {
                    reinterpret_cast<uint32_t*>(&of.runs[i / 2][i % 2])[w] &= kept_bits;
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < TILES * 4; ++i) {
                const int tile = i / 4, k = i % 4;
                const bool attended = is_attended(numbers, start, tile * TILE_TOKENS + 2 * t + k % 2 + k / 2 * 8);
#pragma unroll
                for (int c = 0; c < VALUE_CHUNKS; ++c) {
                    if (!attended) of.rows[tile][k][c] = uint4{};
                }
            }
        }
    }
};

// Stores the results of a warp for the heads that exist: output_of(warp, head) is where the elements of a head go.
template <typename F>
DEVICE void
store_results(const float (&max_logit)[COLUMNS][2], float (&exp_sum)[COLUMNS][2], const float (&o)[COLUMNS][ROWS][4],
              int num_heads, int warp, int g, int t, float* warp_max, float* warp_sum, F output_of) {
#pragma unroll
    for (int i = 0; i < COLUMNS * 2; ++i) {
        float& own_sum = exp_sum[i / 2][i % 2];
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) own_sum += shfl_xor(own_sum, mask);
        const int head = i / 2 * 8 + 2 * t + i % 2;
        if (g == 0) {
            warp_max[warp * HEADS + head] = max_logit[i / 2][i % 2];
            warp_sum[warp * HEADS + head] = own_sum;
        }
        if (head >= num_heads) continue;
        const auto element = [&](int m, int half) { return o[i / 2][m][half * 2 + i % 2]; };
        float* to = output_of(warp, head);
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
}
