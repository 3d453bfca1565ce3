// tile_epilogue.cuh: the epilogue of gemm_sm90: the operands of a tile's rows and columns, and the store of the tile.
// Reads the constants of the kernel that includes it: those of gemm_epilogue.cuh, TILE_N and STORE_COLUMNS.
//
// GATED: the first half of the tile's rows of b are gates, the second half the ups of the same columns.
#pragma once
#include "column_params.cuh"
#include "gemm_epilogue.cuh"
#include "tile_store.cuh"

constexpr int OUT_N = GATED ? TILE_N / 2 : TILE_N;  // columns of out of a tile
using epilogue_t = Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS, SCALE_EXPONENT>;
using column_params_t = ColumnParams<epilogue_t::Column, TILE_N>;

// The rows of a thread's accumulators in SLICES slices of 64 rows, and their epilogue operands.
template <int SLICES>
struct RowParams {
    int64_t rows[SLICES][2];  // rows past M are clamped; the TMA store drops them
    typename epilogue_t::Row params[SLICES][2];

    // `warp_row`: the warp's first row of the first slice.
    DEVICE RowParams(const epilogue_t& epilogue, int64_t warp_row, int64_t m, int lane) {
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                rows[slice][i] = min(warp_row + slice * 64 + lane / 4 + i * 8, m - 1);
                params[slice][i] = epilogue.row(rows[slice][i]);
            }
        }
    }
};

// Applies the epilogue to a warp's accumulators of a tile and stores them.
struct TileEpilogue {
    const epilogue_t& epilogue;
    const column_params_t& column_params;
    TmaStore<out_t, STORE_COLUMNS>& tma_store;

    // (warp_row, first_column): the warp's first element of the first slice.
    template <typename Sum, int SLICES>
    DEVICE void store(const Sum (&accum)[SLICES][TILE_N / 2], const RowParams<SLICES>& row_params, int64_t warp_row,
                      int64_t first_column) const {
#pragma unroll
        for (int number = 0; number < SLICES * OUT_N / STORE_COLUMNS; ++number) {
            const int slice = number % SLICES, chunk = number / SLICES;
            const auto pairs_of = [&](int i, uint32_t (&pairs)[4]) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = chunk * STORE_COLUMNS + i * 16 + j / 2 * 8;
                    pairs[j] = pair(accum[slice], row_params.params[slice][j % 2], at, j % 2 * 2);
                }
            };
            tma_store.store(warp_row + slice * 64, first_column + chunk * STORE_COLUMNS, pairs_of);
        }
    }

private:
    // The lane's two elements of out in 8 columns of a row from column `at` of the tile on. `half`: 0 or 2, the first
    // of the lane's accumulators of that row among the four for these columns.
    template <typename Sum>
    DEVICE uint32_t pair(const Sum (&accum)[TILE_N / 2], const typename epilogue_t::Row& row, int at, int half) const {
        typename epilogue_t::Column params[2], up_params[2];
        column_params.get(at + tma_store.lane % 4 * 2, params);
        if constexpr (GATED) column_params.get(OUT_N + at + tma_store.lane % 4 * 2, up_params);
        float x[2];
#pragma unroll
        for (int l = 0; l < 2; ++l) {
            const int own = at / 2 + half + l;
            x[l] = ACTIVATION<out_t>(epilogue.value(row, params[l], accum[own]));
            if constexpr (GATED) x[l] *= epilogue.value(row, up_params[l], accum[OUT_N / 2 + own]);
        }
        return pack_pair<out_t>(x[0], x[1]);
    }
};
