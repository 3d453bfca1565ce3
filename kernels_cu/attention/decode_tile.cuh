// decode_tile.cuh: the tiles of a warp of attention_decode, and how they are loaded from a paged cache to registers.
//
// A warp computes a step of STEP tokens at a time: TILES tiles of 16 tokens. Keys and values are loaded from global
// memory directly into MMA operands. The order of tokens along M and the order of dimensions along K do not matter to
// an MMA: the orders here make each lane's elements contiguous in memory.
//
// The constants in capitals that are not defined here are those of attention_decode.cu.
#pragma once
#include "async.cuh"
#include "decode_operand.cuh"
#include "decode_tokens.cuh"

constexpr int MIN_CLUSTER_WARPS = 4;  // fewest warps of a CTA of a cluster
constexpr bool MAY_BALANCE = CLUSTER == 1 && DIRECT && PARTITION == 0;
static_assert(CLUSTER == 1 || DIRECT);
constexpr int CHUNK = 16 / sizeof(cache_t);  // elements in 16 bytes
constexpr int CHUNKS = HEAD_SIZE / CHUNK;
constexpr int STEP = TILE_TOKENS * TILES;
// SLICES warps share a step: each has a slice of the keys, of the values and of the accumulators O^T, and all have the
// same logits. So a large head takes no more registers, and no more loads one after the other, than a small one.
constexpr int MAX_STEPS = MAX_WARPS / SLICES;  // most steps that the warps of a CTA take at the same time
constexpr int PARTS = PIECES * SLICES;         // parts of a key or value; a lane has one of them in registers
constexpr int COLUMNS = HEADS / TILE_HEADS;
constexpr int HEAD_BLOCKS = (GROUP + HEADS - 1) / HEADS;  // CTAs of one KV head
constexpr int ROW_BLOCKS = NUM_KV_HEADS * HEAD_BLOCKS;    // CTAs of one split of a sequence

// Keys: KEY_LANES lanes share a part of a key, and take its chunks round-robin. An MMA takes KEY_WORDS words of 16-bit
// elements, from KEY_GROUP chunks.
constexpr int KEY_LANES = ON_MATRIX_CORES ? K_LANES : 4;
constexpr int KEY_WORDS = ON_MATRIX_CORES && RUN_WORDS < 4 ? 4 : RUN_WORDS;
constexpr int CHUNK_WORDS = CHUNK / 2;  // words of 16-bit elements
constexpr int KEY_GROUP = ceil_div(KEY_WORDS, CHUNK_WORDS);
constexpr int KEY_CHUNKS = ceil_div(CHUNKS, KEY_LANES * KEY_GROUP * PARTS) * KEY_GROUP;  // chunks of a part per lane

// Values: VALUE_LANES lanes share a part of a value. On matrix cores, chunks of small heads and of pieces have less
// than 16 bytes, so that every lane has a chunk.
constexpr int VALUE_LANES = 16 / CACHE_ROWS;
constexpr int LANE_DIMS = ceil_div(HEAD_SIZE, VALUE_LANES* PARTS);
constexpr int VALUE_CHUNK = !ON_MATRIX_CORES || LANE_DIMS > CHUNK / 2 ? CHUNK : LANE_DIMS > 4 ? CHUNK / 2 : 4;
constexpr int VALUE_COUNT = HEAD_SIZE / VALUE_CHUNK;
constexpr int VALUE_CHUNKS = PACKED ? 1 : ceil_div(VALUE_COUNT, VALUE_LANES* PARTS);  // chunks of a part per lane
constexpr bool ALL_HAVE_CHUNKS = VALUE_CHUNKS * PARTS * VALUE_LANES == VALUE_COUNT;
constexpr int VALUE_WORDS = VALUE_CHUNK * sizeof(cache_t) / 4;
constexpr int RUN = RUN_TOKENS * TILES;  // PACKED: adjacent tokens of a lane
// Tiles of 16 head dimensions: of a part, and of a warp.
constexpr int PART_ROWS = PACKED ? ceil_div(HEAD_SIZE, 16 * PARTS) : VALUE_CHUNKS * VALUE_CHUNK / CACHE_ROWS;
constexpr int ROWS = PART_ROWS * PIECES;
static_assert(!ONE_AT_A_TIME || !AHEAD);
static_assert(PIECES == 1 || ONE_AT_A_TIME);
static_assert(SLICES == 1 || (PIECES == 1 && !ON_MATRIX_CORES && MAX_WARPS % SLICES == 0));

// The row of a query in shared memory is padded with zeros. Its stride avoids bank conflicts.
constexpr int QUERY_SIZE = KEY_CHUNKS * PARTS * KEY_LANES * CHUNK;
constexpr int QUERY_PADDING = ON_MATRIX_CORES ? 8 : IS_FP8 ? 4 : QUERY_SIZE % 64 == 0 ? 32 : 0;
constexpr int QUERY_STRIDE = QUERY_SIZE + QUERY_PADDING;
static_assert(HEAD_SIZE % CHUNK == 0 && HEADS % TILE_HEADS == 0 && (!PACKED || BLOCK_SIZE % RUN == 0));

// UNIT: tokens that always lie in one block of the cache, because steps begin at multiples of TILE_TOKENS.
constexpr int UNIT = BLOCK_SIZE % TILE_TOKENS == 0 ? TILE_TOKENS : BLOCK_SIZE % 8 == 0 ? 8 : 1;
constexpr int UNITS = UNIT == 1 ? 1 : STEP / UNIT;
static_assert(UNIT > 1 || STEP <= 32);

// The block numbers of the tokens of a step; -1: invalid. Every lane has the number of each unit. If UNIT == 1, lane i
// has the number of token i only.
struct BlockNumbers { int of[UNITS]; };

// The entries of the block table of a step, as loaded: a comparison with num_blocks would wait for the load.
struct TableEntries { table_t of[UNITS]; };

// The entries of the step that begins at `start`; entry_of(token) is the entry of one token.
template <typename F>
DEVICE TableEntries load_entries(int start, int lane, F entry_of) {
    TableEntries entries;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) entries.of[u] = entry_of(UNIT == 1 ? start + lane % STEP : start + u * UNIT);
    return entries;
}

DEVICE BlockNumbers numbers_of(const TableEntries& entries, int64_t num_blocks) {
    BlockNumbers numbers;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        const int64_t number = entries.of[u];
        numbers.of[u] = number >= 0 && number < num_blocks ? int(number) : -1;
    }
    return numbers;
}

// The block number of token i of a step.
DEVICE int block_number(const BlockNumbers& numbers, int i) {
    if constexpr (UNIT == 1) return shfl<32>(numbers.of[0], i);
    int number = numbers.of[0];
#pragma unroll
    for (int u = 1; u < UNITS; ++u) {
        number ^= (numbers.of[0] ^ numbers.of[u]) & -int(i / UNIT == u);  // a select that keeps the array in registers
    }
    return number;
}

// The token of a step that is row `row` of matrix tile `tile`.
DEVICE int token_of(int tile, int row) {
    if constexpr (!PACKED) return tile * TILE_TOKENS + row;
    if constexpr (ON_MATRIX_CORES) return row / RUN_TOKENS * RUN + RUN_TOKENS * tile + row % RUN_TOKENS;
    return row % 8 / 2 * RUN + 4 * tile + row / 8 * 2 + row % 2;
}
// Not PACKED: the index within a step of the lane's token i in a tile of values.
DEVICE int value_token(int tile, int run, int i) {
    if constexpr (ON_MATRIX_CORES) return tile * TILE_TOKENS + run * RUN_TOKENS + i;
    return tile * TILE_TOKENS + 2 * run + i % 2 + i / 2 * 8;
}

// PACKED: a lane's tokens of a dimension, and the words that one access loads.
constexpr int RUN_MEMORY_WORDS = RUN * sizeof(cache_t) / 4;
constexpr int RUN_ACCESS = RUN_MEMORY_WORDS < 4 ? RUN_MEMORY_WORDS : 4;

// A lane's part of the keys of a step: its rows of each tile, every KEY_LANES-th chunk.
struct Keys { uint32_t rows[TILES][CACHE_ROWS][KEY_CHUNKS][4]; };

// A lane's part of the values of a step.
struct Values {
    // PACKED: RUN adjacent tokens of the lane's dimensions of each tile.
    uint32_t runs[PACKED ? PART_ROWS : 1][CACHE_ROWS][PACKED ? RUN_MEMORY_WORDS : 1];
    // Otherwise: every VALUE_LANES-th chunk of the lane's tokens of each tile.
    uint32_t rows[PACKED ? 1 : TILES][RUN_TOKENS][VALUE_CHUNKS][VALUE_WORDS];
};

// Loads words of the cache (streaming, or past the L1 cache). If they do not exist, returns zeros and reads nothing.
template <int WORDS>
DEVICE void load_cache(uint32_t* to, const cache_t* from, bool exists) {
    if constexpr (HOLDS_COPIES) {
        hold<WORDS * 4>(to, from, exists);
    } else {
        using words_t = Vec<uint32_t, WORDS>;
        words_t loaded{};
        if (exists && CONSTANT_PAST) {
            using word_t = typename words_t::template word_t<WORDS>;
            loaded.template word<WORDS>(0) = load_fresh(reinterpret_cast<const word_t*>(from));
        } else if (exists) {
            loaded = words_t::load_once(reinterpret_cast<const uint32_t*>(from));
        }
#pragma unroll
        for (int i = 0; i < WORDS; ++i) to[i] = loaded.data[i];
    }
}

// Dynamic shared memory holds O of each step, head by head. The stride avoids bank conflicts of a warp's stores.
constexpr int MAX_HEADS = HEADS < GROUP * QUERY_TOKENS ? HEADS : GROUP * QUERY_TOKENS;
constexpr int OUTPUT_STRIDE = HEAD_SIZE + (PACKED || IS_FP8 ? 4 : 8);

// Prefetches the first lines that the CTA reads, as far as addresses are known before the previous kernel has ended.
// The splits of balanced CTAs are not known yet: together they prefetch the first lines of every row of the block
// table.
DEVICE void prefetch_first(bool balanced, const scalar_t* query, const table_t* block_tables, const length_t* seq_lens,
                           int64_t num_seqs, int64_t num_rows, int64_t max_tokens, int64_t query_stride,
                           int64_t table_stride, int64_t table_step, int64_t length_step) {
    const int64_t seq = balanced ? threadIdx.x : blockIdx.x / ROW_BLOCKS;
    if (seq < num_seqs) prefetch_line(seq_lens + seq * length_step);
    if (balanced && threadIdx.x == 0) {
        const uint32_t row = blockIdx.x % uint32_t(num_seqs), line = blockIdx.x / uint32_t(num_seqs);
        prefetch_part(block_tables + row * table_stride, (max_tokens / BLOCK_SIZE - 1) * table_step, line);
    }
    if (HAS_TOKENS && seq >= num_seqs) return;
    if (balanced) return;
    const int token = (blockIdx.y * blockDim.x + threadIdx.x) / (32 * SLICES) * STEP;
    if ((CLUSTER > 1 || blockIdx.y == 0) && token < max_tokens) {
        prefetch_line(block_tables + seq * table_stride + token / BLOCK_SIZE * table_step);
    }
    const int kv_head = blockIdx.x / HEAD_BLOCKS % NUM_KV_HEADS;
    const int element = threadIdx.x * int(128 / sizeof(scalar_t));
    if (!HAS_TOKENS && element < GROUP * HEAD_SIZE && seq < num_rows) {
        prefetch_line(query + seq * query_stride + kv_head * GROUP * HEAD_SIZE + element);
    }
}

// Loads the steps of one split of a sequence, for one KV head.
struct StepLoader {
    const cache_t* keys;    // keys of the KV head in block 0
    const cache_t* values;  // likewise
    int64_t key_block_stride, value_block_stride, key_token_stride, value_token_stride;
    int first, end;  // the tokens first <= i < end are attended
    int row, run;    // cache_row and cache_run of the lane

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
    // The address of token i of the step at `start`. A token that is not attended also gets an address within the
    // cache, and what is loaded from there is ignored.
    static DEVICE const cache_t* address(const cache_t* base, int64_t block_stride, int token_stride,
                                         const BlockNumbers& numbers, int start, int i) {
        const uint32_t slot = UNIT == STEP ? uint32_t(start) % BLOCK_SIZE + i : uint32_t(start + i) % BLOCK_SIZE;
        return base + int64_t(max(block_number(numbers, i), 0)) * block_stride + int(slot) * token_stride;
    }

    DEVICE void load_keys(Keys& to, int start, const BlockNumbers& numbers, int part) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int half = 0; half < CACHE_ROWS; ++half) {
                const int i = token_of(tile, row + half * 8);
                const cache_t* from =
                    address(keys, key_block_stride, PACKED ? CHUNK : int(key_token_stride), numbers, start, i);
#pragma unroll
                for (int c = 0; c < KEY_CHUNKS; ++c) {
                    const int chunk = KEY_LANES * (part * KEY_CHUNKS + c) + run;
                    load_cache<4>(to.rows[tile][half][c], from + chunk * (PACKED ? CHUNK * BLOCK_SIZE : CHUNK),
                                  KEY_CHUNKS * PARTS * KEY_LANES == CHUNKS || chunk < CHUNKS);
                }
            }
        }
    }

    DEVICE void load_values(Values& to, int start, const BlockNumbers& numbers, int part) const {
        if constexpr (PACKED) {
            const cache_t* from = address(values, value_block_stride, 1, numbers, start, RUN * run);
#pragma unroll
            for (int m = 0; m < PART_ROWS; ++m) {
#pragma unroll
                for (int half = 0; half < CACHE_ROWS; ++half) {
                    const int dim = (part * PART_ROWS + m) * 16 + half * 8 + row;
#pragma unroll
                    for (int w = 0; w < RUN_MEMORY_WORDS; w += RUN_ACCESS) {
                        load_cache<RUN_ACCESS>(to.runs[m][half] + w, from + dim * BLOCK_SIZE + w * WORD_ELEMENTS,
                                               PART_ROWS * PARTS * 16 == HEAD_SIZE || dim < HEAD_SIZE);
                    }
                }
            }
        } else {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (int k = 0; k < RUN_TOKENS; ++k) {
                    const int i = value_token(tile, run, k);
                    const cache_t* from =
                        address(values, value_block_stride, int(value_token_stride), numbers, start, i);
#pragma unroll
                    for (int c = 0; c < VALUE_CHUNKS; ++c) {
                        const int chunk = VALUE_LANES * (part * VALUE_CHUNKS + c) + row;
                        load_cache<VALUE_WORDS>(to.rows[tile][k][c], from + chunk * VALUE_CHUNK,
                                                ALL_HAVE_CHUNKS || chunk < VALUE_COUNT);
                    }
                }
            }
        }
    }

    // Zeroes the values of tokens that are not attended. Their probability is 0, but 0 * NaN is NaN.
    DEVICE void clear_unattended(Values& of, int start, const BlockNumbers& numbers) const {
        if constexpr (PACKED) {
            constexpr uint32_t ELEMENT = uint32_t((uint64_t(1) << 8 * sizeof(cache_t)) - 1);  // the bits of one element
#pragma unroll
            for (int w = 0; w < RUN_MEMORY_WORDS; ++w) {
                uint32_t kept_bits = 0;
#pragma unroll
                for (int k = 0; k < WORD_ELEMENTS; ++k) {
                    if (is_attended(numbers, start, RUN * run + w * WORD_ELEMENTS + k)) {
                        kept_bits |= ELEMENT << k * (32 / WORD_ELEMENTS);
                    }
                }
#pragma unroll
                for (int i = 0; i < PART_ROWS * CACHE_ROWS; ++i)
                    of.runs[i / CACHE_ROWS][i % CACHE_ROWS][w] &= kept_bits;
            }
        } else {
#pragma unroll
            for (int i = 0; i < TILES * RUN_TOKENS; ++i) {
                const int tile = i / RUN_TOKENS, k = i % RUN_TOKENS;
                const bool attended = is_attended(numbers, start, value_token(tile, run, k));
#pragma unroll
                for (int j = 0; j < VALUE_CHUNKS * VALUE_WORDS; ++j) {
                    if (!attended) of.rows[tile][k][j / VALUE_WORDS][j % VALUE_WORDS] = 0;
                }
            }
        }
    }
};

// Stores the results of slice `slice` of step `step` of the CTA, for the heads that exist. output_of(step, head) is the
// address of a head's elements.
template <typename F>
DEVICE void store_results(const float (&max_logit)[COLUMNS][LANE_HEADS], float (&exp_sum)[COLUMNS][LANE_HEADS],
                          const float (&o)[COLUMNS][ROWS][PRODUCT_SUMS], int num_heads, int step, int slice, int lane,
                          float* step_max, float* step_sum, F output_of) {
#pragma unroll
    for (int i = 0; i < COLUMNS * LANE_HEADS; ++i) {
        const int column = i / LANE_HEADS, head = column * TILE_HEADS + sum_head(lane, i % LANE_HEADS);
        float& own_sum = exp_sum[column][i % LANE_HEADS];
#pragma unroll
        for (int mask = FIRST_HEAD_MASK; mask < WARP_SIZE; mask *= 2) own_sum += shfl_xor(own_sum, mask);
        if (lane < FIRST_HEAD_MASK && slice == 0) {
            step_max[step * HEADS + head] = max_logit[column][i % LANE_HEADS];
            step_sum[step * HEADS + head] = own_sum;
        }
        if (head >= num_heads) continue;
        const auto element = [&](int m, int row) { return o[column][m][row * LANE_HEADS + i % LANE_HEADS]; };
        float* to = output_of(step, head);
        if constexpr (PACKED) {
#pragma unroll
            for (int m = 0; m < ROWS * SUM_ROWS; ++m) {
                const int dim = (slice * PART_ROWS + m / SUM_ROWS) * 16 + sum_row(lane, m % SUM_ROWS);
                if (PART_ROWS * PARTS * 16 == HEAD_SIZE || dim < HEAD_SIZE)
                    to[dim] = element(m / SUM_ROWS, m % SUM_ROWS);
            }
        } else {
            constexpr int OWN_CHUNKS = SUM_ROWS / CACHE_ROWS, TILES_OF_CHUNK = VALUE_CHUNK / CACHE_ROWS;
#pragma unroll
            for (int j = 0; j < VALUE_CHUNKS * PIECES * OWN_CHUNKS * VALUE_CHUNK; j += 4) {
                const int c = j / VALUE_CHUNK / OWN_CHUNKS, own = j / VALUE_CHUNK % OWN_CHUNKS, first = j % VALUE_CHUNK;
                const int chunk = (slice * VALUE_CHUNKS + c) * VALUE_LANES + sum_row(lane, own);
                const auto at = [&](int e) {
                    return element(c * TILES_OF_CHUNK + e / CACHE_ROWS, own * CACHE_ROWS + e % CACHE_ROWS);
                };
                if (ALL_HAVE_CHUNKS || chunk < VALUE_COUNT) {
                    *reinterpret_cast<float4*>(to + chunk * VALUE_CHUNK + first) =
                        float4{at(first), at(first + 1), at(first + 2), at(first + 3)};
                }
            }
        }
    }
}
