// prefill_mma_loader.cuh: loads tiles of keys and values to shared memory for prefill_mma. Reads the constants of the
// kernel that includes it.
//
// Keys have one row per token. So do values if ldmatrix can transpose them. Otherwise, and if the cache is laid out so,
// values have one row per head dimension (VALUES_BY_DIM). Copies go directly to shared memory, or to registers
// (IN_REGISTERS), from which store_keys and store_values write them to shared memory.
#pragma once
#include "async.cuh"
#include "attention.cuh"
#include "product.cuh"

constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int WARP_ROWS = ROW_TILES * 16, TILE_ROWS = NUM_WARPS / COLUMN_WARPS * WARP_ROWS;
constexpr bool IS_FP8 = !is_same<scalar_t, cache_t>;
// MMAs take 16 elements of K. If HEAD_SIZE % 16 == 8, the last 8 elements of a row are padded with zeros. So are values,
// to 16 columns of each warp.
constexpr int STEPS = ceil_div(HEAD_SIZE, 16);
constexpr int WARP_STEPS = ceil_div(VALUE_SIZE, 16 * COLUMN_WARPS), VALUE_STEPS = WARP_STEPS * COLUMN_WARPS;
constexpr int WARP_TOKENS = TOKENS / COLUMN_WARPS;                 // keys of a KV tile with scores of one warp
constexpr int CHUNKS = 2 * STEPS, VALUE_CHUNKS = 2 * VALUE_STEPS;  // chunks of 8 elements
// Most items of a thread of a tile of keys or values.
constexpr int THREAD_ITEMS = ceil_div(TOKENS * (VALUE_CHUNKS > CHUNKS ? VALUE_CHUNKS : CHUNKS), NUM_THREADS);
constexpr bool ALL_KEY_CHUNKS = HEAD_SIZE % 16 == 0, ALL_VALUE_CHUNKS = VALUE_SIZE == 16 * VALUE_STEPS;
constexpr int COLUMN_TILES = 16 / PRODUCT_COLUMNS;  // MMAs per 16 columns
// Whether tiles pass through registers: where copies are held (async.cuh), and to convert an fp8 cache.
constexpr bool IN_REGISTERS = HOLDS_COPIES || IS_FP8;
static_assert(STAGES == 1 || (STAGES == 2 && !IN_REGISTERS));
// With one stage and direct copies, the values of a tile are copied while its scores are computed, and the next keys
// after that. Otherwise keys and values are copied one tile ahead.
constexpr bool IS_AHEAD = STAGES == 2 || IN_REGISTERS;
// Invalid offsets, negative and aligned for any access: of a token with an invalid block number, and of one that no row
// of the CTA sees.
constexpr int64_t NOWHERE = int64_t(1) << 63, UNSEEN = NOWHERE / 2;

using rows_tile = SwizzledTile<scalar_t, CHUNKS>;  // queries and keys: a row for each token
using values_tile = SwizzledTile<scalar_t, VALUE_CHUNKS>;
// VALUES_BY_DIM: values have a row for each head dimension. A SwizzledTile of few tokens would be half empty.
template <bool FEW> struct dims_tile_of { using type = SwizzledTile<scalar_t, TOKENS / 8>; };
template <> struct dims_tile_of<true> { using type = PitchedTile<scalar_t, TOKENS + 8>; };
using dims_tile = dims_tile_of < ON_MATRIX_CORES&& TOKENS<64>::type;
// Only ldmatrix can load columns of a tile as rows of an operand.
constexpr bool VALUES_BY_DIM = PACKED || ON_MATRIX_CORES;
constexpr int QUERY_BYTES = rows_tile::bytes(TILE_ROWS);
constexpr int KEY_BYTES = rows_tile::bytes(TOKENS);
constexpr int VALUE_BYTES = VALUES_BY_DIM ? dims_tile::bytes(VALUE_CHUNKS * 8) : values_tile::bytes(TOKENS);
static_assert(HEAD_SIZE % 8 == 0 && VALUE_SIZE % 8 == 0 && VALUE_SIZE <= HEAD_SIZE);
static_assert(!PACKED || (HEAD_SIZE % 16 == 0 && VALUE_SIZE % 16 == 0));
static_assert(WARP_TOKENS % 16 == 0 && 2 * TOKENS <= NUM_THREADS && (!PACKED || BLOCK_SIZE % 8 == 0));

// Calls f(row, column, n) for the n-th item of a thread, of ROWS * COLUMNS items. n is a compile-time constant, and so
// is the distance between the items of a thread if COLUMNS divides NUM_THREADS.
template <int ROWS, int COLUMNS, typename F>
DEVICE void each_item(F f) {
    constexpr int ITEMS = ROWS * COLUMNS;
#pragma unroll
    for (int n = 0; n < ceil_div(ITEMS, NUM_THREADS); ++n) {
        const int thread = threadIdx.x, i = thread + n * NUM_THREADS;
        if (ITEMS % NUM_THREADS != 0 && i >= ITEMS) continue;
        if constexpr (NUM_THREADS % COLUMNS == 0)
            f(thread / COLUMNS + n * (NUM_THREADS / COLUMNS), thread % COLUMNS, n);
        else f(i / COLUMNS, i % COLUMNS, n);
    }
}

// The address of row `row` and chunk `column` of a tile, for item n of each_item<..., COLUMNS>. Swizzles repeat after 8
// rows, so every PERIOD-th of a thread's addresses has a constant stride, which the instructions take as immediates.
template <int COLUMNS, typename Tile>
DEVICE scalar_t* item_at(const Tile& tile, int row, int column, int n) {
    constexpr int ITEM_STRIDE = NUM_THREADS / COLUMNS, PERIOD = ITEM_STRIDE % 8 == 0 ? 1 : 2;
    if constexpr (NUM_THREADS % COLUMNS != 0 || ITEM_STRIDE * PERIOD % 8 != 0) return tile.at(row, column);
    const int thread = threadIdx.x;
    return tile.at(thread / COLUMNS + n % PERIOD * ITEM_STRIDE, thread % COLUMNS) +
           n / PERIOD * (Tile::bytes(ITEM_STRIDE * PERIOD) / int(sizeof(scalar_t)));
}

// Copies in registers: 8 elements of the cache each, not converted.
constexpr int CODE_WORDS = 2 * sizeof(cache_t), WORD_CODES = 4 / sizeof(cache_t);
using held_t = uint32_t[IN_REGISTERS ? THREAD_ITEMS : 1][CODE_WORDS];
DEVICE Vec<scalar_t, 8> elements_of(const uint32_t (&words)[CODE_WORDS]) {
    Vec<scalar_t, 8> elements;
#pragma unroll
    for (int i = 0; i < CODE_WORDS; ++i) {
        uint32_t pairs[2] = {words[i]};
        if constexpr (IS_FP8) fp8_to_pairs<scalar_t, cache_t>(words[i], pairs);
#pragma unroll
        for (int j = 0; j < WORD_CODES / 2; ++j) {
            elements.template word<2>((i * WORD_CODES / 2 + j) * 2) = pairs[j];
        }
    }
    return elements;
}

// B operand of O += P V: tokens 16 * k to 16 * k + 15, dimensions 16 * step to 16 * step + 15.
template <bool BY_DIM>
DEVICE void load_values_of(uint32_t (&b)[SHORT_WORDS], scalar_t* values, int k, int step, int lane) {
    if constexpr (BY_DIM) load_columns(b, dims_tile{values}, step * 16, k, lane);
    else load_transposed(b, values_tile{values}, k * 16, step, lane);
}

// The tiles of a CTA, and the caches of its KV head.
struct Tiles {
    unsigned char* shared;  // the queries, then STAGES tiles of keys, then STAGES tiles of values
    // offsets: for two tiles, the offset in bytes, in a head of the cache, of each token's key and then of each token's
    // value, or NOWHERE, or UNSEEN. holes: the warps that have met a NOWHERE.
    int64_t (*offsets)[2 * TOKENS];
    bool (*holes)[NUM_WARPS];
    const cache_t *key_cache, *value_cache;

    DEVICE rows_tile keys_at(int stage) const {
        return {reinterpret_cast<scalar_t*>(shared + QUERY_BYTES + (stage % STAGES) * KEY_BYTES)};
    }
    DEVICE scalar_t* values_at(int stage) const {
        return reinterpret_cast<scalar_t*>(shared + QUERY_BYTES + STAGES * KEY_BYTES + (stage % STAGES) * VALUE_BYTES);
    }

    // Stores the offset of the key of token i of a tile (thread i < TOKENS), or of its value (thread TOKENS + i).
    DEVICE void note_offset(int stage, int64_t offset) const {
        const bool is_hole = any_lane(threadIdx.x < 2 * TOKENS && offset == NOWHERE);
        if (threadIdx.x < 2 * TOKENS) offsets[stage][threadIdx.x] = offset;
        if (threadIdx.x % WARP_SIZE == 0) holes[stage][threadIdx.x / WARP_SIZE] = is_hole;
    }
    // Whether every token of a tile that a row sees has a valid offset.
    DEVICE bool is_whole(int stage) const {
        bool whole = true;
#pragma unroll
        for (int w = 0; w < NUM_WARPS; ++w) whole &= !holes[stage][w];
        return whole;
    }

    // The elements of a token at `offset`, from those of the first token.
    static DEVICE const cache_t* elements_at(const cache_t* first, int64_t offset) {
        return reinterpret_cast<const cache_t*>(reinterpret_cast<const char*>(first) + offset);
    }

    // The offsets of a thread's items of a tile. No load moves above a copy, so all are loaded before the first copy.
    using offsets_t = int64_t[THREAD_ITEMS];
    DEVICE void find_keys(int stage, offsets_t& found) const {
        each_item<TOKENS, CHUNKS>([&](int row, int, int n) { found[n] = offsets[stage][row]; });
    }
    DEVICE void find_values(int stage, offsets_t& found) const {
        if constexpr (!PACKED) each_value([&](int row, int, int n) { found[n] = offsets[stage][TOKENS + row]; });
    }

    // Copies a tile of keys, at the offsets of `stage`, to shared memory or `held`.
    DEVICE void load_keys(int stage, const offsets_t& found, held_t& held) const {
        const rows_tile keys = keys_at(stage);
        each_item<TOKENS, CHUNKS>([&](int row, int chunk, int n) {
            const int dim = chunk * 8;
            const int64_t offset = ALL_KEY_CHUNKS || chunk < HEAD_SIZE / 8 ? found[n] : NOWHERE;
            const cache_t* const from =
                elements_at(key_cache + (PACKED ? dim / X * (BLOCK_SIZE * X) + dim % X : dim), offset);
            if constexpr (IN_REGISTERS) hold<CODE_WORDS * 4>(held[n], from, offset >= 0);
            else cp_async<16>(item_at<CHUNKS>(keys, row, chunk, n), from, offset >= 0);
        });
        cp_async_commit();
    }
    DEVICE void store_keys(const held_t& held) const {
        if constexpr (IN_REGISTERS) {
            each_item<TOKENS, CHUNKS>([&](int row, int chunk, int n) {
                *reinterpret_cast<Vec<scalar_t, 8>*>(item_at<CHUNKS>(keys_at(0), row, chunk, n)) = elements_of(held[n]);
            });
        }
    }
    // Calls f(token, chunk, n) for the n-th item of values of a thread. Where values are transposed element by element,
    // adjacent threads have adjacent tokens.
    template <typename F>
    static DEVICE void each_value(F f) {
        if constexpr (VALUES_BY_DIM) {
            each_item<VALUE_CHUNKS / 2, 2 * TOKENS>([&](int pair, int i, int n) { f(i / 2, pair * 2 + i % 2, n); });
        } else {
            each_item<TOKENS, VALUE_CHUNKS>(f);
        }
    }
    DEVICE void load_values(int stage, const offsets_t& found, held_t& held) const {
        scalar_t* const to = values_at(stage);
        const int64_t* const value_offsets = offsets[stage] + TOKENS;
        if constexpr (PACKED) {
            each_item<VALUE_SIZE, TOKENS / 8>([&](int dim, int chunk, int n) {
                scalar_t* const run = item_at<TOKENS / 8>(dims_tile{to}, dim, chunk, n);
                const int64_t offset = value_offsets[chunk * 8];
                if (offset >= 0 && value_offsets[chunk * 8 + 7] >= 0) {
                    const cache_t* const from = elements_at(value_cache + dim * BLOCK_SIZE, offset);
                    if constexpr (IN_REGISTERS) hold<CODE_WORDS * 4>(held[n], from, true);
                    else cp_async<16>(run, from);
                } else {  // a value that no row sees may be NaN, and 0 * NaN is NaN
                    Vec<cache_t, 8> run_of = Vec<cache_t, 8>::full(0.0f);
                    for (int k = 0; k < 8; ++k) {
                        const int64_t at = value_offsets[chunk * 8 + k];
                        if (at >= 0) run_of.data[k] = *elements_at(value_cache + dim * BLOCK_SIZE, at);
                    }
                    if constexpr (IN_REGISTERS) {
#pragma unroll
                        for (int j = 0; j < CODE_WORDS; ++j)
                            held[n][j] = run_of.template word<WORD_CODES>(j * WORD_CODES);
                    } else {
                        *reinterpret_cast<Vec<cache_t, 8>*>(run) = run_of;
                    }
                }
            });
        } else {
            each_value([&](int row, int chunk, int n) {
                const int64_t offset = ALL_VALUE_CHUNKS || chunk < VALUE_SIZE / 8 ? found[n] : NOWHERE;
                const cache_t* const from = elements_at(value_cache + chunk * 8, offset);
                if constexpr (IN_REGISTERS) hold<CODE_WORDS * 4>(held[n], from, offset >= 0);
                else cp_async<16>(item_at<VALUE_CHUNKS>(values_tile{to}, row, chunk, n), from, offset >= 0);
            });
        }
        cp_async_commit();
    }
    DEVICE void store_values(const held_t& held) const {
        if constexpr (!IN_REGISTERS) return;
        const dims_tile by_dim{values_at(0)};
        if constexpr (PACKED) {
            each_item<VALUE_SIZE, TOKENS / 8>([&](int dim, int chunk, int n) {
                *reinterpret_cast<Vec<scalar_t, 8>*>(item_at<TOKENS / 8>(by_dim, dim, chunk, n)) = elements_of(held[n]);
            });
        } else {
            each_value([&](int row, int chunk, int n) {
                const Vec<scalar_t, 8> elements = elements_of(held[n]);
                if constexpr (!VALUES_BY_DIM) {
                    *reinterpret_cast<Vec<scalar_t, 8>*>(
                        item_at<VALUE_CHUNKS>(values_tile{values_at(0)}, row, chunk, n)) = elements;
                } else {
#pragma unroll
                    for (int k = 0; k < 8; ++k) by_dim.at(chunk * 8 + k, row / 8)[row % 8] = elements.data[k];
                }
            });
        }
    }
};
