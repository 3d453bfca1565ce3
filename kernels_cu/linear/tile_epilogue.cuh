// tile_epilogue.cuh: the epilogue of gemm_sm90: the operands of a tile's rows and columns, and the store of the tile.
// Reads the constants of the kernel that includes it: those of gemm_epilogue.cuh, TILE_N and STORE_COLUMNS.
//
// GATED: the first half of the tile's rows of b are gates, the second half the ups of the same columns.
#pragma once
#include "gemm_epilogue.cuh"
#include "tile_store.cuh"

constexpr int OUT_N = GATED ? TILE_N / 2 : TILE_N;  // columns of out of a tile
// Per-column epilogue operands (scale, bias, zero point): each is an array of TILE_N elements in shared memory.
constexpr int COLUMN_PARAMS = B_SCALES + BIAS + (AZP > 0), COLUMN_PARAM_BYTES = COLUMN_PARAMS * TILE_N * 4;
using epilogue_t = Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS, SCALE_EXPONENT>;

// Epilogue operands of a tile's columns. A warpgroup loads them before its main loop and keeps them in registers, then
// writes them to shared memory for its epilogue.
struct ColumnParams {
    static constexpr int COLUMNS = ceil_div(TILE_N, 128);  // columns that a thread loads
    typename epilogue_t::Column loaded[COLUMNS];
    float* memory;

    DEVICE void load(const epilogue_t& epilogue, int64_t first_column, int64_t n) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const int row = threadIdx.x % 128 + i * 128, is_up = GATED && row >= OUT_N;
            loaded[i] = epilogue.column(min(first_column + row - is_up * OUT_N, n - 1) + is_up * n);
        }
    }
    // Writes them to shared memory. All threads of the warpgroup call; `barrier` is its named barrier.
    DEVICE void share(int barrier) {
        if constexpr (COLUMN_PARAMS == 0) return;
        named_barrier_sync(barrier, 128);  // all have read the previous tile's operands
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const int column = threadIdx.x % 128 + i * 128;
            if (TILE_N % 128 != 0 && column >= TILE_N) continue;
            if constexpr (B_SCALES) memory[column] = loaded[i].scale;
            if constexpr (BIAS) memory[B_SCALES * TILE_N + column] = loaded[i].bias;
            if constexpr (AZP > 0) zero_points()[column] = loaded[i].azp;
        }
        named_barrier_sync(barrier, 128);
    }
    // The operands of `column` and the next.
    DEVICE void get(int column, typename epilogue_t::Column (&pair)[2]) const {
        Vec<float, 2> scale, bias;
        Vec<int32_t, 2> azp;
        if constexpr (B_SCALES) scale = Vec<float, 2>::load(memory + column);
        if constexpr (BIAS) bias = Vec<float, 2>::load(memory + B_SCALES * TILE_N + column);
        if constexpr (AZP > 0) azp = Vec<int32_t, 2>::load(zero_points() + column);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            pair[i] = {0, B_SCALES ? scale.data[i] : 1.0f, BIAS ? bias.data[i] : 0.0f, AZP > 0 ? azp.data[i] : 0};
        }
    }
    DEVICE int32_t* zero_points() const { return reinterpret_cast<int32_t*>(memory) + (B_SCALES + BIAS) * TILE_N; }
};

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
    const ColumnParams& column_params;
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
