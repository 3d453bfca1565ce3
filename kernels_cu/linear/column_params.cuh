// column_params.cuh: the epilogue operands of a tile's columns in shared memory, for kernels with the constants of
// gemm_epilogue.cuh and TILE_N rows of b per tile.
//
// GATED: the first half of the tile's rows of b are gates, the second half the ups of the same columns.
#pragma once
#include "gemm_epilogue.cuh"

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
    DEVICE void store() {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const int column = threadIdx.x % 128 + i * 128;
            if (TILE_N % 128 != 0 && column >= TILE_N) continue;
            if constexpr (B_SCALES) memory[column] = loaded[i].scale;
            if constexpr (BIAS) memory[B_SCALES * TILE_N + column] = loaded[i].bias;
            if constexpr (AZP > 0) zero_points()[column] = loaded[i].azp;
        }
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
