// gated_delta_state.cuh: the rows of the state that a warp of the chunked gated delta rule holds, and how a tile of
// tokens changes them. The header of gated_delta_chunk.cu gives the formulas and the constants.
#pragma once
#include "gated_delta_tiles.cuh"

constexpr int ROWS = 16 * WARPS, TILES = VALUE_SIZE / ROWS;

using value_tile = SwizzledTile<scalar_t, ROWS / 8>;         // values: one row per token
using summed_tile = SummedTile<scalar_t, KEY_SIZE, TOKENS>;  // keys as operand b with tokens as the K dimension
constexpr int KEY_BYTES = key_tile::bytes(TOKENS), VALUE_BYTES = value_tile::bytes(TOKENS);
constexpr int SQUARE_BYTES = square_tile::bytes(TOKENS);

// A tile of tokens in shared memory.
struct StateTile {
    key_tile keys, queries;  // of the products with the state before the tile
    summed_tile summed;      // keys of the updates
    value_tile values;
    square_tile inverse, weights;  // (I + L)^-1 b and the weights of u in o: row l, column m
};

// 16 rows of the state of a head, those of the calling warp, in registers.
struct StateRows {
    int64_t head;
    int first_row;  // of the block
    Block s[STEPS];

    // Calls `visit` with each element of the thread's state and its offset in a state of all heads.
    template <typename Visit>
    DEVICE void each(int64_t row_stride, int64_t column_stride, Visit visit) {
        const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
#pragma unroll
        for (int i = 0; i < STEPS * BLOCK_PAIRS * 2; ++i) {
            const int n = i / (2 * BLOCK_PAIRS), pair = i / 2 % BLOCK_PAIRS;
            const int64_t row = first_row + warp * 16 + pair_row(pair) + lane_row(lane);
            const int64_t column = n * 16 + pair_column(pair) + lane_column(lane) + i % 2;
            visit(s[n].at(pair, i % 2), head * (VALUE_SIZE * KEY_SIZE) + row * row_stride + column * column_stride);
        }
    }

    // Loads the rows from a state of all heads, or stores them to one.
    template <typename T>
    DEVICE void load(const T* from, int64_t row_stride, int64_t column_stride) {
        each(row_stride, column_stride, [&](float& value, int64_t at) { value = to_float(from[at]); });
    }
    template <typename T>
    DEVICE void store(T* to, int64_t row_stride, int64_t column_stride) {
        each(row_stride, column_stride, [&](float& value, int64_t at) { to[at] = from_float<T>(value); });
    }

    // Writes the outputs of a tile of `count` tokens, from `o` on, and updates the state. `factors` gives the factors
    // that the tile's keys and queries do not include: of_key(l), of_query(l) and of_change(l) for token l, and
    // kept(column) for the state.
    template <typename TokenFactors>
    DEVICE void advance(const StateTile& tile, const TokenFactors& factors, scalar_t* o, int64_t o_stride, int count) {
        const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, t = lane_column(lane);
        Block r[BLOCKS] = {}, y[BLOCKS] = {}, u[BLOCKS] = {};  // rows by tokens: S k, then r; S q, then o; u
        // Multiplies each column of blocks by the factor of its token.
        const auto scale_tokens = [&](Block(&blocks)[BLOCKS], auto factor) {
#pragma unroll
            for (int i = 0; i < BLOCKS * BLOCK_PAIRS * 2; ++i) {
                const int n = i / (2 * BLOCK_PAIRS), pair = i / 2 % BLOCK_PAIRS;
                blocks[n].at(pair, i % 2) *= factor(n * 16 + pair_column(pair) + t + i % 2);
            }
        };
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            order_steps(step);
            uint32_t a[SHORT_WORDS], b[SHORT_WORDS];
            s[step].pack<scalar_t>(a);
#pragma unroll
            for (int n = 0; n < BLOCKS; ++n) {
                load_columns(b, tile.keys, n * 16, step, lane);
                r[n].add_product<scalar_t>(a, b);
                load_columns(b, tile.queries, n * 16, step, lane);
                y[n].add_product<scalar_t>(a, b);
            }
        }
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            uint32_t values[BLOCK_PAIRS];
            load_block(values, tile.values, k * 16, warp, lane);
#pragma unroll
            for (int i = 0; i < BLOCK_PAIRS; ++i) {
                const int l = k * 16 + pair_column(i) + t;
                float pair[2];
                unpack_pair<scalar_t>(values[i], pair[0], pair[1]);
#pragma unroll
                for (int j = 0; j < 2; ++j) r[k].at(i, j) = fmaf(-factors.of_key(l + j), r[k].at(i, j), pair[j]);
            }
        }
        const auto times_square = [&](Block(&d)[BLOCKS], const Block(&x)[BLOCKS], const square_tile& square) {
#pragma unroll
            for (int k = 0; k < BLOCKS; ++k) {
                uint32_t a[SHORT_WORDS], b[SHORT_WORDS];
                x[k].pack<scalar_t>(a);
#pragma unroll
                for (int n = k; n < BLOCKS; ++n) {
                    load_columns(b, square, n * 16, k, lane);
                    d[n].add_product<scalar_t>(a, b);
                }
            }
        };
        times_square(u, r, tile.inverse);
        scale_tokens(y, [&](int l) { return factors.of_query(l); });
        times_square(y, u, tile.weights);
#pragma unroll
        for (int n = 0; n < BLOCKS; ++n) {
            scalar_t* const to = o + int64_t(n * 16) * o_stride + head * VALUE_SIZE + first_row + warp * 16;
            y[n].store_transposed(to, o_stride, count - n * 16);
        }
#pragma unroll
        for (int i = 0; i < STEPS * BLOCK_PAIRS * 2; ++i) {
            const int n = i / (2 * BLOCK_PAIRS), pair = i / 2 % BLOCK_PAIRS;
            s[n].at(pair, i % 2) *= factors.kept(n * 16 + pair_column(pair) + t + i % 2);
        }
        scale_tokens(u, [&](int l) { return factors.of_change(l); });
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            uint32_t a[SHORT_WORDS], b[SHORT_WORDS];
            u[k].pack<scalar_t>(a);
#pragma unroll
            for (int n = 0; n < STEPS; ++n) {
                order_steps(n);
                tile.summed.load_elements(b, k * 16, n, lane);
                s[n].add_product<scalar_t>(a, b);
            }
        }
    }
};
