// gemm_sm100.cuh: a tile of a product in CUDA Tile C++ (tile.cuh), for gemm_sm100.cu and grouped_gemm_sm100.cu.
//
// SCALE_BLOCK: blockwise scaling. The products of a k-tile are multiplied by the scale of each row of a and by that of
// the tile's rows of b, before they are added. SWAP: tcgen05 multiplies at least 64 rows, so where a tile of a has
// fewer, the rows of b are the rows of the product, and the accumulators are transposed.
//
// Constants: scalar_t, sum_t, out_t, SCALE_BLOCK, SWAP, TILE_M, TILE_N, TILE_K of gemm_sm100.cu.
#pragma once
#include "number.cuh"
#include "tile.cuh"

constexpr int ALIGNED = 16 / sizeof(scalar_t), OUT_ALIGNED = 16 / sizeof(out_t);  // elements of 16 bytes

TILE_FUNCTION auto new_accumulators() {
    return full_tile<sum_t, SWAP ? TILE_N : TILE_M, SWAP ? TILE_M : TILE_N>(sum_t(0));
}
// accum + the product of a tile of a and a tile of b.
template <typename A, typename B, typename Accum>
TILE_FUNCTION auto multiply(A a, B b, Accum accum) {
    if constexpr (SWAP) return multiply_nt(b, a, accum);
    else return multiply_nt(a, b, accum);
}
// accum + the product, times block scales: one for each row of a, and that of b.
template <typename A, typename B, typename Accum, typename Scales>
TILE_FUNCTION auto multiply_blocks(A a, B b, Accum accum, Scales a_scales, float b_scale) {
    const auto scales = a_scales * full_tile<float, TILE_M, 1>(b_scale);
    const auto products = multiply(a, b, new_accumulators());
    if constexpr (SWAP) return accum + products * spread<TILE_N, TILE_M>(transpose(scales));
    else return accum + products * spread<TILE_M, TILE_N>(scales);
}
template <typename Accum>
TILE_FUNCTION auto unswapped(Accum accum) {
    if constexpr (SWAP) return transpose(accum);
    else return accum;
}
// The elements of a row of the epilogue's operands for a tile's columns.
template <typename T>
TILE_FUNCTION auto for_columns(const T* data, int64_t step, uint32_t n, uint32_t column) {
    return View<const T, 1, TILE_N, 0>{data, 1, n, 0, step}.load(0, column);
}
// numerator / (1 + exp(-x))
template <typename X> TILE_FUNCTION auto logistic_of(X numerator, X x) {
    const auto one = full_tile<float, TILE_M, TILE_N>(1.0f), zero = full_tile<float, TILE_M, TILE_N>(0.0f);
    return numerator / (one + exp_of(zero - x));
}
template <typename X> TILE_FUNCTION auto silu_of(X x) { return logistic_of(x, x); }

// The row tile and the column tile of a block: `group_rows` row tiles down M, then the next column tile. So concurrent
// tiles share rows and columns in the L2 cache.
struct TileIndex { uint32_t row, column; };
TILE_FUNCTION TileIndex tile_of(uint32_t block, uint32_t row_tiles, uint32_t column_tiles, uint32_t group_rows) {
    const uint32_t group = block / (group_rows * column_tiles), left = row_tiles - group * group_rows;
    const uint32_t size = left < group_rows ? left : group_rows, within = block - group * group_rows * column_tiles;
    return {group * group_rows + within % size, within / size};
}
