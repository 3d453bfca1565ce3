// gemm_sm100: the GEMM in CUDA Tile C++ (tile.cuh), for GPUs with tensor cores that mma.sync does not reach: tcgen05
// with tensor memory on sm_100 and sm_103.
//
//     accum[m, n] = sum_k a[m, k] * b[n, k], in float32; int8 operands in int32
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to accum[m, n]
//
// SCALE_BLOCK: blockwise scaling. accum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * partial[j], where
// partial[j] is the sum over the j-th SCALE_BLOCK elements of K: a k-tile.
//
// A block takes an output tile of TILE_M x TILE_N, or with WIDE two of adjacent columns, each with an epilogue of its
// own that fits into registers. GATED: b has 2 N rows, gates and then ups; the block has accumulators for a tile of
// each.
//
// Constants
//     scalar_t      element type of a and b: 16 bits, fp8 or int8
//     sum_t         float, or int32_t for int8 operands
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED, a_scale_t, b_scale_t, SCALE_EXPONENT    of
//                   gemm_epilogue.cuh; ACTIVATION is gemm_none or gemm_silu
//     SCALE_BLOCK   elements that share a block scale: TILE_K, or 0
//     SWAP          whether the rows of b are the rows of the products
//     WIDE          whether a block takes two tiles; not with GATED
//     TILE_M, TILE_N, TILE_K    powers of two; TILE_N divides SCALE_BLOCK if there are block scales

#include "gemm_sm100.cuh"

static_assert(!(WIDE && GATED));
constexpr int SCALE_TILES = SCALE_BLOCK == 0 ? 1 : SCALE_BLOCK / TILE_N;  // tiles of columns under one block scale

template <typename X> TILE_FUNCTION auto gemm_none(X x) { return x; }
template <typename X> TILE_FUNCTION auto gemm_silu(X x) { return silu_of(x); }

// The elements of a column of the epilogue's operands for a tile's rows.
template <typename T>
TILE_FUNCTION auto for_rows(const T* data, int64_t step, uint32_t m, uint32_t row) {
    return View<const T, TILE_M, 1>{data, m, 1, step}.load(row, 0);
}

extern "C" __tile_global__ void
gemm_sm100(out_t* out,                 // [M, N]
           const scalar_t* a,          // [M, K]
           const scalar_t* b,          // [N, K]; GATED: [2 N, K]
           const a_scale_t* a_scales,  // [M] or [1]; SCALE_BLOCK: [M, K / SCALE_BLOCK]
           const b_scale_t* b_scales,  // [N] or [1]; GATED [2 N]; SCALE_BLOCK: [K / SCALE_BLOCK, N / SCALE_BLOCK]
           const int32_t* azp_adj,     // [N]
           const int32_t* azp,         // [M]
           const out_t* bias,          // [N] or [M, N]; GATED [2 N]
           int64_t m, int64_t n, int64_t k, int64_t a_stride, int64_t b_stride, int64_t out_stride, int64_t bias_stride,
           int64_t a_scale_step, int64_t b_scale_step, int64_t a_scale_block_step, int64_t b_scale_block_step,
           int64_t group_rows) {
    const uint32_t rows = uint32_t(m), columns = assume_multiple<OUT_ALIGNED>(uint32_t(n));
    const uint32_t depth = assume_multiple<ALIGNED>(uint32_t(k));
    const int64_t a_pitch = assume_multiple<ALIGNED>(a_stride), b_pitch = assume_multiple<ALIGNED>(b_stride);
    const View<const scalar_t, TILE_M, TILE_K> a_view{assume_aligned(a), rows, depth, a_pitch};
    const View<const scalar_t, TILE_N, TILE_K> b_view{assume_aligned(b), columns, depth, b_pitch};
    const View<const scalar_t, TILE_N, TILE_K> up_view{assume_aligned(b + n * b_pitch), columns, depth, b_pitch};

    constexpr uint32_t BLOCK_COLUMNS = TILE_N * (WIDE + 1);
    const uint32_t row_tiles = (rows + TILE_M - 1) / TILE_M;
    const uint32_t column_tiles = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    const TileIndex tile = tile_of(block_index().x, row_tiles, column_tiles, uint32_t(group_rows));
    const uint32_t row = tile.row, column = tile.column * (WIDE + 1);

    // `accum` and the products of a k-tile of a and b.
    const auto step = [&](auto accum, auto a_tile, auto b_tile, uint32_t k_tile, uint32_t tile_column) {
        if constexpr (SCALE_BLOCK > 0) {
            const float b_scale = b_scales[k_tile * b_scale_block_step + tile_column / SCALE_TILES * b_scale_step];
            const auto a_scale = for_rows(a_scales + k_tile * a_scale_block_step, a_scale_step, rows, row);
            return multiply_blocks(a_tile, b_tile, accum, a_scale, b_scale);
        } else {
            return multiply(a_tile, b_tile, accum);
        }
    };
    auto accum = new_accumulators(), second = accum;  // the second: of the ups, or of the next columns
    for (uint32_t i = 0; i * TILE_K < depth; ++i) {
        const auto a_tile = a_view.load(row, i);
        accum = step(accum, a_tile, b_view.load(column, i), i, column);
        if constexpr (GATED) second = step(second, a_tile, up_view.load(column, i), i, column);
        if constexpr (WIDE) second = step(second, a_tile, b_view.load(column + 1, i), i, column + 1);
    }

    // x[m, n] of gemm_epilogue.cuh; `half`: 1 for ups.
    const auto value = [&](auto accum, int half, uint32_t column) {
        auto sum = unswapped(accum);
        if constexpr (AZP > 0) {
            auto z = spread<TILE_M, TILE_N>(for_columns(azp_adj, 1, columns, column));
            if constexpr (AZP == 2) z = z * spread<TILE_M, TILE_N>(for_rows(azp, 1, rows, row));
            sum = sum - z;
        }
        auto x = cast<float>(sum);
        constexpr float FACTOR = power_of_two(SCALE_EXPONENT);
        const auto factor = full_tile<float, TILE_M, TILE_N>(FACTOR);
        if constexpr (B_SCALES) {
            const auto scale = for_columns(b_scales + half * n * b_scale_step, b_scale_step, columns, column);
            x = spread<TILE_M, TILE_N>(cast<float>(scale)) * factor * x;
        }
        if constexpr (A_SCALES) {
            x = x * spread<TILE_M, TILE_N>(cast<float>(for_rows(a_scales, a_scale_step, rows, row)));
            if constexpr (!B_SCALES) x = x * factor;
        }
        if constexpr (BIAS == 1) {
            x = x + spread<TILE_M, TILE_N>(cast<float>(for_columns(bias + half * n, 1, columns, column)));
        }
        if constexpr (BIAS == 2) {
            x = x + cast<float>(View<const out_t, TILE_M, TILE_N>{bias, rows, columns, bias_stride}.load(row, column));
        }
        return x;
    };
    const int64_t out_pitch = assume_multiple<OUT_ALIGNED>(out_stride);
    const View<out_t, TILE_M, TILE_N> out_view{assume_aligned(out), rows, columns, out_pitch};
    auto x = ACTIVATION(value(accum, 0, column));
    if constexpr (GATED) x = x * value(second, 1, column);
    out_view.store(row, column, cast<out_t>(x));
    if constexpr (WIDE) out_view.store(row, column + 1, cast<out_t>(ACTIVATION(value(second, 0, column + 1))));
}
