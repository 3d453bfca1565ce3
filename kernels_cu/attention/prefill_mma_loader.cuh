// prefill_mma_loader.cuh: loads tiles of keys and values to shared memory for prefill_mma. Reads the constants of the
// kernel that includes it.
//
// Keys have one row per token. So do values if ldmatrix can transpose them. Otherwise, and if the cache is laid out so,
// values have one row per head dimension (VALUES_BY_DIM). Copies go directly to shared memory, or, where copies are
// held (async.cuh), to registers, from which store_keys and store_values write them to shared memory.
#pragma once
#include "async.cuh"
#include "attention.cuh"
#include "product.cuh"

constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int WARP_ROWS = ROW_TILES * 16, TILE_ROWS = NUM_WARPS * WARP_ROWS;
constexpr bool IS_FP8 = !is_same<scalar_t, cache_t>;
// MMAs take 16 elements of K. If HEAD_SIZE % 16 == 8, the last 8 elements of a row are padded with zeros.
constexpr int STEPS = ceil_div(HEAD_SIZE, 16), VALUE_STEPS = ceil_div(VALUE_SIZE, 16);
constexpr int CHUNKS = 2 * STEPS, VALUE_CHUNKS = 2 * VALUE_STEPS;  // chunks of 8 elements
constexpr bool ALL_KEY_CHUNKS = HEAD_SIZE % 16 == 0, ALL_VALUE_CHUNKS = VALUE_SIZE % 16 == 0;
constexpr int COLUMN_TILES = 16 / PRODUCT_COLUMNS;  // MMAs per 16 columns
constexpr int STAGES = HOLDS_COPIES ? 1 : 2;        // tiles of keys and of values in shared memory
constexpr int64_t NOWHERE = int64_t(1) << 63;       // invalid offset: negative, and aligned for any access

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
static_assert(TOKENS % 16 == 0 && 2 * TOKENS <= NUM_THREADS && (!PACKED || BLOCK_SIZE % 8 == 0));

// Copies 8 elements of a cache to shared memory, as T. If they do not exist, writes zeros and reads nothing.
DEVICE void copy_chunk(scalar_t* to, const cache_t* from, bool exists) {
    if constexpr (IS_FP8) {
        Vec<scalar_t, 8> chunk = Vec<scalar_t, 8>::full(0.0f);
        if (exists) {
            float x[8];
            Vec<cache_t, 8>::load(from).to_floats(x);
            chunk = Vec<scalar_t, 8>::from_floats(x);
        }
        *reinterpret_cast<uint4*>(to) = chunk.template word<8>(0);
    } else {
        cp_async<16>(to, from, exists);
    }
}

// Calls f(i, n) for the n-th item i < ITEMS of a thread. Held copies need n as a compile-time constant.
template <int ITEMS, typename F>
DEVICE void each_item(F f) {
    if constexpr (HOLDS_COPIES) {
#pragma unroll
        for (int n = 0; n < ceil_div(ITEMS, NUM_THREADS); ++n) {
            const int i = threadIdx.x + n * NUM_THREADS;
            if (ITEMS % NUM_THREADS == 0 || i < ITEMS) f(i, n);
        }
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < ITEMS; i += NUM_THREADS) f(i, 0);
    }
}

// Held copies: 8 elements of the cache each, not converted.
constexpr int CODE_WORDS = 2 * sizeof(cache_t), WORD_CODES = 4 / sizeof(cache_t);
using held_t = uint32_t[HOLDS_COPIES ? ceil_div(TOKENS * CHUNKS, NUM_THREADS) : 1][CODE_WORDS];
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
    // places: for two tiles, the cache offset of each token's key and then of each token's value, or NOWHERE. holes:
    // the warps that have met a NOWHERE.
    int64_t (*places)[2 * TOKENS];
    bool (*holes)[NUM_WARPS];
    const cache_t *key_cache, *value_cache;

    DEVICE rows_tile keys_at(int stage) const {
        return {reinterpret_cast<scalar_t*>(shared + QUERY_BYTES + (STAGES == 1 ? 0 : stage) * KEY_BYTES)};
    }
    DEVICE scalar_t* values_at(int stage) const {
        return reinterpret_cast<scalar_t*>(shared + QUERY_BYTES + STAGES * KEY_BYTES +
                                           (STAGES == 1 ? 0 : stage) * VALUE_BYTES);
    }

    // Stores the offset of the key of token i of a tile (thread i < TOKENS), or of its value (thread TOKENS + i).
    DEVICE void note_place(int stage, int64_t place) const {
        const bool is_hole = any_lane(threadIdx.x < 2 * TOKENS && place < 0);
        if (threadIdx.x < 2 * TOKENS) places[stage][threadIdx.x] = place;
        if (threadIdx.x % WARP_SIZE == 0) holes[stage][threadIdx.x / WARP_SIZE] = is_hole;
    }
    // Whether every token of a tile has a valid offset.
    DEVICE bool is_whole(int stage) const {
        bool whole = true;
#pragma unroll
        for (int w = 0; w < NUM_WARPS; ++w) whole &= !holes[stage][w];
        return whole;
    }

    // Copies a tile of keys, at the offsets of `stage`, to shared memory or `held`.
    DEVICE void load_keys(int stage, held_t& held) const {
        const rows_tile keys = keys_at(stage);
        each_item<TOKENS * CHUNKS>([&](int i, int n) {
            const int row = i / CHUNKS, chunk = i % CHUNKS, dim = chunk * 8;
            const int64_t place = ALL_KEY_CHUNKS || chunk < HEAD_SIZE / 8 ? places[stage][row] : NOWHERE;
            const cache_t* const from = key_cache + place + (PACKED ? dim / X * (BLOCK_SIZE * X) + dim % X : dim);
            if constexpr (HOLDS_COPIES) hold<CODE_WORDS * 4>(held[n], from, place >= 0);
            else copy_chunk(keys.at(row, chunk), from, place >= 0);
        });
        cp_async_commit();
    }
    DEVICE void store_keys(const held_t& held) const {
        if constexpr (HOLDS_COPIES) {
            each_item<TOKENS * CHUNKS>([&](int i, int n) {
                *reinterpret_cast<Vec<scalar_t, 8>*>(keys_at(0).at(i / CHUNKS, i % CHUNKS)) = elements_of(held[n]);
            });
        }
    }
    // The token and the chunk of item i of values. VALUES_BY_DIM: adjacent threads have adjacent tokens, and the
    // elements of a dimension are contiguous.
    static DEVICE int token_of(int i) { return VALUES_BY_DIM ? i / 2 % TOKENS : i / VALUE_CHUNKS; }
    static DEVICE int chunk_of(int i) { return VALUES_BY_DIM ? i % 2 + i / (2 * TOKENS) * 2 : i % VALUE_CHUNKS; }
    DEVICE void load_values(int stage, held_t& held) const {
        scalar_t* const to = values_at(stage);
        const int64_t* const value_places = places[stage] + TOKENS;
        if constexpr (PACKED) {
            each_item<VALUE_SIZE*(TOKENS / 8)>([&](int i, int n) {
                const int dim = i / (TOKENS / 8), chunk = i % (TOKENS / 8);
                scalar_t* const run = dims_tile{to}.at(dim, chunk);
                const int64_t place = value_places[chunk * 8];
                if (place >= 0 && value_places[chunk * 8 + 7] >= 0) {
                    if constexpr (HOLDS_COPIES) {
                        hold<CODE_WORDS * 4>(held[n], value_cache + place + dim * BLOCK_SIZE, true);
                    } else {
                        copy_chunk(run, value_cache + place + dim * BLOCK_SIZE, true);
                    }
                } else {  // a value that no row sees may be NaN, and 0 * NaN is NaN
                    Vec<cache_t, 8> codes = Vec<cache_t, 8>::full(0.0f);
                    for (int k = 0; k < 8; ++k) {
                        const int64_t at = value_places[chunk * 8 + k];
                        if constexpr (!HOLDS_COPIES) {
                            run[k] = from_float<scalar_t>(at < 0 ? 0.0f : to_float(value_cache[at + dim * BLOCK_SIZE]));
                        } else if (at >= 0) {
                            codes.data[k] = value_cache[at + dim * BLOCK_SIZE];
                        }
                    }
#pragma unroll
                    for (int j = 0; HOLDS_COPIES && j < CODE_WORDS; ++j) {
                        held[n][j] = codes.template word<WORD_CODES>(j * WORD_CODES);
                    }
                }
            });
        } else {
            each_item<TOKENS * VALUE_CHUNKS>([&](int i, int n) {
                const int row = token_of(i), chunk = chunk_of(i);
                const int64_t place = ALL_VALUE_CHUNKS || chunk < VALUE_SIZE / 8 ? value_places[row] : NOWHERE;
                const cache_t* const from = value_cache + place + chunk * 8;
                if constexpr (HOLDS_COPIES) hold<CODE_WORDS * 4>(held[n], from, place >= 0);
                else copy_chunk(values_tile{to}.at(row, chunk), from, place >= 0);
            });
        }
        cp_async_commit();
    }
    DEVICE void store_values(const held_t& held) const {
        if constexpr (HOLDS_COPIES) {
            const dims_tile values{values_at(0)};
            each_item<TOKENS * VALUE_CHUNKS>([&](int i, int n) {
                const Vec<scalar_t, 8> elements = elements_of(held[n]);
                if constexpr (PACKED) {
                    *reinterpret_cast<Vec<scalar_t, 8>*>(values.at(i / (TOKENS / 8), i % (TOKENS / 8))) = elements;
                } else if constexpr (!VALUES_BY_DIM) {
                    const values_tile rows{values_at(0)};
                    *reinterpret_cast<Vec<scalar_t, 8>*>(rows.at(token_of(i), chunk_of(i))) = elements;
                } else {
                    const int row = token_of(i), chunk = chunk_of(i);
#pragma unroll
                    for (int k = 0; k < 8; ++k) values.at(chunk * 8 + k, row / 8)[row % 8] = elements.data[k];
                }
            });
        }
    }
};
