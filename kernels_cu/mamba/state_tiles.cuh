// state_tiles.cuh: for kernels that keep the SSM state in MMA accumulators (product.cuh): M = state rows, 16 per block,
// and N = tokens of the tile.
//
// A block is a 16 x 16 accumulator tile. A lane holds BLOCK_PAIRS pairs of adjacent columns of a row. Pair i is at
//
//     row        lane_row(lane) + pair_row(i)
//     columns    lane_column(lane) + pair_column(i) and the next

#pragma once
#include "async.cuh"
#include "product.cuh"

constexpr int BLOCK_PRODUCTS = 16 / PRODUCT_COLUMNS, PRODUCT_PAIRS = PRODUCT_SUMS / 2, ROW_PAIRS = ROW_SUMS / 2;
constexpr int BLOCK_PAIRS = BLOCK_PRODUCTS * PRODUCT_PAIRS;
DEVICE constexpr int pair_row(int i) { return i % PRODUCT_PAIRS / ROW_PAIRS * ROW_STEP; }
DEVICE constexpr int pair_column(int i) {
    return i / PRODUCT_PAIRS * PRODUCT_COLUMNS + i % PRODUCT_PAIRS % ROW_PAIRS * 2;
}

// Makes an A fragment from `pairs`, a block rounded to words of two elements.
DEVICE void make_operand(uint32_t (&a)[SHORT_WORDS], const uint32_t (&pairs)[BLOCK_PAIRS]) {
#pragma unroll
    for (int i = 0; i < BLOCK_PAIRS; ++i) a[i] = pairs[i];
    finish_operand(a);
}

struct Block {
    float sums[BLOCK_PRODUCTS][PRODUCT_SUMS];

    // Element i, 0 or 1, of a pair.
    DEVICE float& at(int pair, int i) { return sums[pair / PRODUCT_PAIRS][pair % PRODUCT_PAIRS * 2 + i]; }
    DEVICE float at(int pair, int i) const { return sums[pair / PRODUCT_PAIRS][pair % PRODUCT_PAIRS * 2 + i]; }

    // += a * b^T.
    template <typename T>
    DEVICE void add_product(const uint32_t (&a)[SHORT_WORDS], const uint32_t (&b)[SHORT_WORDS]) {
        product<T>(sums[0], a, b, 0);
        if constexpr (BLOCK_PRODUCTS == 2) product<T>(sums[BLOCK_PRODUCTS - 1], a, b, 1);
        keep_sums(sums[0]);
    }
    // The block as an A fragment, rounded to T, with the same rows.
    template <typename T>
    DEVICE void pack(uint32_t (&a)[SHORT_WORDS]) const {
        uint32_t pairs[BLOCK_PAIRS];
#pragma unroll
        for (int i = 0; i < BLOCK_PAIRS; ++i) pairs[i] = pack_pair<T>(at(i, 0), at(i, 1));
        make_operand(a, pairs);
    }
    // Stores the transposed block to a tile in shared memory with one row per token: at 16 tokens from `token` on and
    // 16 elements from chunk `chunk` on. `token` is a multiple of 8.
    template <typename T, typename Tile>
    DEVICE void store_to_tile(const Tile& tile, int token, int chunk) const {
        const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
        for (int i = 0; i < BLOCK_PAIRS; ++i) {
            if constexpr (ON_MATRIX_CORES) {
                const int row = lane_row(lane), from = token + lane_column(lane) + pair_column(i);
#pragma unroll
                for (int j = 0; j < 2; ++j) tile.at(from + j, chunk + row / 8)[row % 8] = from_float<T>(at(i, j));
            } else {
                const uint32_t word = transpose_8x8(pack_pair<T>(at(i, 0), at(i, 1)));
                T* const to = tile.at(token + pair_column(i) + lane / 4, chunk + pair_row(i) / 8);
                *reinterpret_cast<uint32_t*>(to + lane % 4 * 2) = word;
            }
        }
    }
    // Stores the transposed block to `out`, which points to its first row of its first token; `count` tokens exist.
    // With tensor cores a lane holds adjacent tokens of a row and must store adjacent rows of a token: four rows, after
    // an exchange with the next lane.
    template <typename T>
    DEVICE void store_transposed(T* out, int64_t stride, int count) const {
        const int lane = threadIdx.x % WARP_SIZE;
        if constexpr (ON_MATRIX_CORES) {
#pragma unroll
            for (int i = 0; i < 2 * BLOCK_PAIRS; ++i) {
                const int token = lane_column(lane) + pair_column(i / 2) + i % 2;
                if (token < count) out[token * stride + lane_row(lane)] = from_float<T>(at(i / 2, i % 2));
            }
        } else {
            const int g = lane / 4, t = lane % 4;
#pragma unroll
            for (int n = 0; n < BLOCK_PRODUCTS; ++n) {
                const uint32_t upper = transpose_8x8(pack_pair<T>(sums[n][0], sums[n][1]));
                const uint32_t lower = transpose_8x8(pack_pair<T>(sums[n][2], sums[n][3]));
                const bool odd = t % 2;
                const uint32_t received = shfl_xor(odd ? upper : lower, 1);
                Vec<T, 4> four;
                four.template word<4>(0) = odd ? uint2{received, lower} : uint2{upper, received};
                const int token = n * 8 + g;
                if (token < count) four.store(out + token * stride + (odd ? 8 + 2 * (t - 1) : 2 * t));
            }
        }
    }
};

// Loads the pairs of a block that is stored transposed in a tile: the rows of the block are the 16 tile columns from
// chunk 2 * step on, and its columns are the 16 tile rows from `origin` on.
template <typename Tile>
DEVICE void load_block(uint32_t (&pairs)[BLOCK_PAIRS], const Tile& tile, int origin, int step, int lane) {
    if constexpr (ON_MATRIX_CORES) {
        load_column_run(pairs, tile, origin + lane_column(lane), step * 16 + lane_row(lane));
    } else {
        ldmatrix<4, true>(pairs, tile.at(origin, lane / 16 * 8 + lane % 8, step, lane / 8 % 2));
    }
}

// Copies `count` rows of CHUNKS chunks of 8 elements to a tile of TOKENS rows and fills the other rows with zeros. All
// NUM_THREADS threads call it; a thread copies a chunk of several rows. `load` begins the copies. Where registers hold
// copies (async.cuh), `store` writes them to the tile; otherwise it does nothing.
template <int CHUNKS, int TOKENS, int NUM_THREADS>
struct TokenCopy {
    static constexpr int STEP = NUM_THREADS / CHUNKS < TOKENS ? NUM_THREADS / CHUNKS : TOKENS;
    uint32_t held[HOLDS_COPIES ? ceil_div(TOKENS, STEP) : 1][4];

    template <typename T, typename Tile>
    DEVICE void load(const Tile& to, const T* from, int64_t stride, int count) {
        const int thread = thread_of<NUM_THREADS>(), first = thread / CHUNKS, chunk = thread % CHUNKS;
        from += first * stride + chunk * 8;
        const auto own = to.at(first, chunk);
#pragma unroll
        for (int origin = 0; origin < TOKENS; origin += STEP, from += STEP * stride) {
            const int row = origin + first;
            const auto at = STEP % 8 == 0 ? own + origin * Tile::PITCH * 8 : to.at(row, chunk);
            if (first < STEP && (TOKENS % STEP == 0 || row < TOKENS)) {
                if constexpr (HOLDS_COPIES) hold<16>(held[origin / STEP], from, row < count);
                else cp_async<16>(at, from, row < count);
            }
        }
    }
    template <typename Tile>
    DEVICE void store(const Tile& to) const {
        if constexpr (HOLDS_COPIES) {
            const int thread = thread_of<NUM_THREADS>(), first = thread / CHUNKS, chunk = thread % CHUNKS;
#pragma unroll
            for (int origin = 0; origin < TOKENS; origin += STEP) {
                const int row = origin + first;
                if (first < STEP && (TOKENS % STEP == 0 || row < TOKENS))
                    store_held(to.at(row, chunk), held[origin / STEP]);
            }
        }
    }
};

// TokenCopy for a transposed tile, with one row per element, where registers hold the copies. A thread takes chunks of
// two adjacent tokens, which form words of the tile's rows; adjacent threads take adjacent chunks.
template <int CHUNKS, int TOKENS, int NUM_THREADS>
struct TransposedCopy {
    static constexpr int PAIRS = TOKENS / 2, ITEMS = PAIRS * CHUNKS;
    uint32_t held[ceil_div(ITEMS, NUM_THREADS)][2][4];

    // Calls visit(n, token, chunk) for the n-th chunk of the thread, which covers `token` and token + 1.
    template <typename Visit>
    static DEVICE void each(Visit visit) {
#pragma unroll
        for (int n = 0; n < ceil_div(ITEMS, NUM_THREADS); ++n) {
            const int i = threadIdx.x + n * NUM_THREADS;
            if (ITEMS % NUM_THREADS == 0 || i < ITEMS) visit(n, i / 2 % PAIRS * 2, i % 2 + i / (2 * PAIRS) * 2);
        }
    }
    template <typename T, typename Tile>
    DEVICE void load(const Tile&, const T* from, int64_t stride, int count) {
        each([&](int n, int token, int chunk) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                hold<16>(held[n][i], from + (token + i) * stride + chunk * 8, token + i < count);
            }
        });
    }
    template <typename Tile>
    DEVICE void store(const Tile& to) const {
        each([&](int n, int token, int chunk) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t low = held[n][0][i / 2], high = held[n][1][i / 2];
                const uint32_t word = i % 2 ? pack_halves<true>(low, high) : pack_halves<false>(low, high);
                *reinterpret_cast<uint32_t*>(to.at(chunk * 8 + i, token / 8) + token % 8) = word;
            }
        });
    }
};

// A matrix that relates tokens of a tile to each other: row l, column m.
template <typename T, int TOKENS>
using square_tile_t = conditional_t<ON_MATRIX_CORES, PitchedTile<T, TOKENS + 8>, SwizzledTile<T, TOKENS / 8>>;

// A tile of TOKENS tokens by SIZE elements that MMAs read as operand b with either dimension as K. On matrix cores it
// is stored transposed: one row per element.
template <typename T, int SIZE, int TOKENS>
struct SummedTile {
    using tile_t = conditional_t<ON_MATRIX_CORES, PitchedTile<T, TOKENS + 8>, SwizzledTile<T, SIZE / 8>>;
    template <int NUM_THREADS>
    using copy_t = conditional_t<ON_MATRIX_CORES, TransposedCopy<SIZE / 8, TOKENS, NUM_THREADS>,
                                 TokenCopy<SIZE / 8, TOKENS, NUM_THREADS>>;
    static constexpr int BYTES = tile_t::bytes(ON_MATRIX_CORES ? SIZE : TOKENS);
    tile_t tile;

    // B fragment with N = 16 tokens from `token` on, K = 16 elements from 16 * step on.
    DEVICE void load_tokens(uint32_t (&b)[SHORT_WORDS], int token, int step, int lane) const {
        if constexpr (ON_MATRIX_CORES) load_transposed(b, tile, step * 16, token / 16, lane);
        else load_columns(b, tile, token, step, lane);
    }
    // B fragment with N = 16 elements from 16 * step on, K = 16 tokens from `token` on.
    DEVICE void load_elements(uint32_t (&b)[SHORT_WORDS], int token, int step, int lane) const {
        if constexpr (ON_MATRIX_CORES) load_columns(b, tile, step * 16, token / 16, lane);
        else load_transposed(b, tile, token, step, lane);
    }
};
