// grouped_tile.cuh: the tile of a grouped GEMM by product.cuh: the map from its columns to rows of the expert's weight,
// and the epilogue that writes the tile.
//
// The kernel defines before the include: the constants of tile_shape.cuh and of the epilogue (grouped.cuh).
#pragma once
#include "grouped.cuh"
#include "tile_shape.cuh"

// Maps column `local` of the tile that begins at weight row `first` to its row of b[e]; b_rows or more if out of range.
DEVICE int expert_row(int first, int local, int n, int b_rows) {
    if constexpr (GATED != 1) return first + local;
    const int column = first / 2 + local / (2 * GATE_COLUMNS) * GATE_COLUMNS + local % GATE_COLUMNS;
    return column >= n ? b_rows : column + (local / GATE_COLUMNS % 2 ? n : 0);
}

// Applies the epilogue and writes the tile to out, which has n columns. The thread's first accumulator is at row
// rows[0] of out and column own_column of the tile; a negative row is padding. b_row_of(column) maps a column of the
// tile to its row of b[e]. sum_at(i, j, l) is accumulator l of the thread's MMA tile (i, j).
template <typename Terms, typename RowOf, typename SumAt>
DEVICE void write_expert_tile(out_t* out, int64_t out_stride, int n, int b_rows, const Terms& epilogue, const int* rows,
                              int own_column, const RowOf& b_row_of, const SumAt& sum_at) {
    // HALVES: MMA tiles per gate / up pair, 2 if one holds the gates and the next their ups. WIDTH: columns of the tile
    // per column of out within an MMA tile, 2 if a gate and its up are adjacent.
    constexpr int HALVES = GATED == 1 && RUNS == 1 ? 2 : 1, WIDTH = GATED == 2 ? 2 : 1;
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j += HALVES) {
        const int local = own_column + j * PRODUCT_COLUMNS;
#pragma unroll
        for (int l = 0; l < ROW_RUN; l += WIDTH) {
            const int b_row = b_row_of(local + l);
            if (b_row >= b_rows) continue;
            const int column = GATED == 2 ? b_row / 2 : b_row;
            const auto gate = epilogue.column(b_row);
            const auto up = epilogue.column(GATED == 2 ? b_row + 1 : GATED == 1 ? b_row + n : b_row);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int row = rows[i * ROW_STEP];
                if (row < 0) continue;
                const auto row_terms = epilogue.row(row);
                const int at = i % LANE_ROWS * ROW_SUMS + l, of_up = GATED == 2  ? at + 1
                                                                     : RUNS == 2 ? at + ROW_RUN
                                                                                 : at;
                const float x = epilogue.value(row_terms, gate, sum_at(i / LANE_ROWS, j, at));
                const float y = epilogue.value(row_terms, up, sum_at(i / LANE_ROWS, j + HALVES - 1, of_up));
                out[row * out_stride + column] = from_float<out_t>(epilogue.activated(x, y));
            }
        }
    }
}
