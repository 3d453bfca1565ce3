// gemm_sm100_scaled: the GEMM of NVFP4, MXFP4 and MXFP8 matrices in CUDA Tile C++ (tile.cuh). tcgen05 applies the block
// scales as it multiplies. With GROUPED the rows of a belong to experts, each with a matrix of b.
//
//     x[m, k] = quant of a[m, k] * its scale, y[n, k] = quant of b[n, k] * its scale
//     out[m, n] = alpha * sum_k x[m, k] * y[n, k], in float32
//
// Rows of one expert are contiguous, as group_rows.cu lists them: block i of the lists has the rows from
// sorted_token_ids[i * TILE_M] on, of the expert expert_ids[i]. Lists that no valid offsets and sizes have made touch
// nothing outside of the tensors. Scales are in tiles (quantize/fp4.cuh), those of an expert in tiles of its own. A row
// is zeros if its scales would lie outside of a_scales.
//
// Constants
//     quant_t       e2m1_t, or fp8_e4m3_t
//     scale_t       fp8_e4m3_t, or e8m0_t for powers of two
//     offset_t      element type of expert_offsets
//     out_t         element type of out
//     QUANT_BITS    bits of a quant
//     SCALE_SIZE    elements under one scale
//     ALPHA         whether there is alpha
//     GROUPED       whether rows belong to experts
//     TILE_M, TILE_N    powers of two up to 128, the rows of a tile of scales; tcgen05 takes 128 rows of a
//     TILE_K        bytes of a k-tile

#include "number.cuh"
#include "tile.cuh"

constexpr int SCALE_ROWS = 128;  // rows of a tile of scales
static_assert(SCALE_ROWS % TILE_M == 0 && SCALE_ROWS % TILE_N == 0);
constexpr uint32_t COLUMN_TILES = SCALE_ROWS / TILE_N;        // column tiles under one tile of scales
constexpr int SCALES = TILE_K * 8 / QUANT_BITS / SCALE_SIZE;  // scales of a row in a k-tile
static_assert(SCALES % 4 == 0);

extern "C" __tile_global__ void
gemm_sm100_scaled(out_t* out,                       // [M, N]
                  const uint8_t* a,                 // [M, K] quants
                  const uint8_t* b,                 // [N, K] quants; GROUPED: [num_experts, N, K]
                  const uint8_t* a_scales,          // [a_scale_rows, scale_columns]
                  const uint8_t* b_scales,          // [N rounded up, scale_columns]; GROUPED: for each expert
                  const float* alpha,               // one; GROUPED: [num_experts]
                  const int32_t* sorted_token_ids,  // these six for GROUPED
                  const int32_t* expert_ids, const int32_t* num_tokens_post_pad, const int32_t* problem_sizes,
                  const offset_t* expert_offsets,
                  const int32_t* scale_rows,  // [M]: the row of a_scales of each row
                  int64_t m, int64_t n, int64_t row_bytes, int64_t a_stride, int64_t b_stride, int64_t out_stride,
                  int64_t a_scale_rows, int64_t scale_columns, int64_t row_tiles) {
    const uint32_t rows = uint32_t(m), columns = assume_multiple<8>(uint32_t(n));
    const uint32_t depth = assume_multiple<16>(uint32_t(row_bytes));
    const uint32_t block = block_index().x % uint32_t(row_tiles), column = block_index().x / uint32_t(row_tiles);
    int64_t expert = 0;
    uint32_t first = block * TILE_M, count = rows - first, scale_row = first;
    if constexpr (GROUPED) {
        if (int64_t(block) * TILE_M >= *num_tokens_post_pad) return;
        expert = expert_ids[block];
        first = uint32_t(sorted_token_ids[block * TILE_M]);
        if (first >= rows) return;
        const int32_t* const sizes = problem_sizes + expert * 3;
        const int64_t size = sizes[1] == n ? sizes[0] : sizes[1];
        const int64_t left = int64_t(expert_offsets[expert]) + size - first;  // rows of the expert from the first on
        count = uint32_t(left < int64_t(rows - first) ? left : int64_t(rows - first));
        scale_row = uint32_t(scale_rows[first]);
    }
    const View<const uint8_t, TILE_M, TILE_K> a_view{assume_aligned(a), rows, depth, assume_multiple<16>(a_stride)};
    const int64_t b_pitch = assume_multiple<16>(b_stride),
                  scale_pitch = assume_multiple<512>(scale_columns * SCALE_ROWS);
    const int64_t b_scale_tiles = (n + SCALE_ROWS - 1) / SCALE_ROWS;
    const View<const uint8_t, TILE_N, TILE_K> b_view{assume_aligned(b + expert * n * b_pitch), columns, depth, b_pitch};
    const uint32_t scale_bytes = assume_multiple<512>(uint32_t(scale_pitch));
    const View<const uint8_t, 1, SCALES * SCALE_ROWS> a_scale_view{
        assume_aligned(a_scales), uint32_t(a_scale_rows / SCALE_ROWS), scale_bytes, scale_pitch};
    const View<const uint8_t, 1, SCALES * SCALE_ROWS> b_scale_view{
        assume_aligned(b_scales + expert * b_scale_tiles * scale_pitch), uint32_t(b_scale_tiles), scale_bytes,
        scale_pitch};

    auto accum = full_tile<float, TILE_M, TILE_N>(0.0f);
    const uint32_t k_end = scale_row < uint32_t(a_scale_rows) ? depth : 0;
    for (uint32_t i = 0; i * TILE_K < k_end; ++i) {
        const auto x_scales = a_scale_view.load(scale_row / SCALE_ROWS, i);
        const auto y_scales = b_scale_view.load(column / COLUMN_TILES, i);
        accum =
            multiply_scaled_nt<quant_t, scale_t>(a_view.load_from(first, i), x_scales, scale_row % SCALE_ROWS / TILE_M,
                                                 b_view.load(column, i), y_scales, column % COLUMN_TILES, accum);
    }
    if constexpr (ALPHA) accum = accum * full_tile<float, TILE_M, TILE_N>(alpha[expert]);
    const int64_t out_pitch = assume_multiple<8>(out_stride);
    if constexpr (GROUPED) {  // TMA stores whole rows of a view; this one ends with the expert's rows
        const View<out_t, TILE_M, TILE_N> out_view{assume_aligned(out + first * out_pitch), count, columns, out_pitch};
        out_view.store(0, column, cast<out_t>(accum));
    } else {
        const View<out_t, TILE_M, TILE_N> out_view{assume_aligned(out), rows, columns, out_pitch};
        out_view.store(block, column, cast<out_t>(accum));
    }
}
