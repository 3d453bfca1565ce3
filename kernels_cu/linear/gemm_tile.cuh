// gemm_tile.cuh: the end of a GEMM tile by product.cuh: the split-K reduction, and the epilogue that writes the tile.
//
// The kernel defines before the include: the constants of tile_shape.cuh and gemm_epilogue.cuh.
#pragma once
#include "gemm_epilogue.cuh"
#include "tile_shape.cuh"

// The row tile and the column tile of blockIdx.x: GROUP_ROWS row tiles come before the next column tile.
struct TileIndex { int64_t row, column; };

template <int GROUP_ROWS>
DEVICE TileIndex index_of_tile(int64_t m, int64_t b_rows) {
    const int64_t row_tiles = (m + TILE_M - 1) / TILE_M, column_tiles = (b_rows + TILE_N - 1) / TILE_N;
    const int64_t group = blockIdx.x / (GROUP_ROWS * column_tiles), within = blockIdx.x % (GROUP_ROWS * column_tiles);
    const int64_t group_rows = min(int64_t(GROUP_ROWS), row_tiles - group * GROUP_ROWS);
    return {group * GROUP_ROWS + within % group_rows, within / group_rows};
}

// Split-K: reduces, in the order of the splits, the accumulators of the SPLITS blocks along y that share tile
// blockIdx.x, and returns true in the last block to arrive. `partial` has shape [tiles, SPLITS, OUT_SUMS / 4, NUM_THREADS,
// 4]; `arrived` has one counter per tile, 0 before and after the kernel; `is_last` is in shared memory.
template <int SPLITS, typename Sum>
DEVICE bool add_splits(Sum (&result)[OUT_SUMS], Sum* partial, uint32_t* arrived, uint32_t* is_last) {
    if constexpr (SPLITS > 1) {
        using four_t = Vec<Sum, 4>;
        Sum* const of_thread = partial + (int64_t(blockIdx.x) * SPLITS * OUT_SUMS * NUM_THREADS + threadIdx.x * 4);
#pragma unroll
        for (int i = 0; i < OUT_SUMS; i += 4) {
            four_t four;
#pragma unroll
            for (int j = 0; j < 4; ++j) four.data[j] = result[i + j];
            *reinterpret_cast<four_t*>(of_thread + int64_t(blockIdx.y * OUT_SUMS + i) * NUM_THREADS) = four;
        }
        if (!arrives_last(arrived + blockIdx.x, SPLITS, is_last)) return false;
#pragma unroll
        for (int i = 0; i < OUT_SUMS; ++i) result[i] = 0;
        for (int split = 0; split < SPLITS; ++split) {
#pragma unroll
            for (int i = 0; i < OUT_SUMS; i += 4) {
                const uint4 four =
                    load_fresh(reinterpret_cast<const uint4*>(of_thread + int64_t(split * OUT_SUMS + i) * NUM_THREADS));
                const auto& part = reinterpret_cast<const Sum(&)[4]>(four);
#pragma unroll
                for (int j = 0; j < 4; ++j) result[i + j] += part[j];
            }
        }
    }
    return true;
}

// Applies the epilogue and writes the tile to out, which has n columns. The thread's first accumulator is at row
// own_row and column own_column of the tile. row_of(local, more) maps row `local + more` of the tile to its row of out;
// exists(row) tells whether that row is in range. column_of(local) maps a column of the tile to its column of out;
// GATED: a gate and its up map to the same column. An access to out has OUT_ACCESS elements, 1 or 2. `Terms` is an
// Epilogue, or has its members.
template <int OUT_ACCESS, typename Terms, typename Sum, typename RowOf, typename Exists, typename ColumnOf>
DEVICE void
write_tile(out_t* out, int64_t out_stride, int64_t n, const Terms& epilogue, const Sum (&result)[OUT_SUMS], int own_row,
           int own_column, const RowOf& row_of, const Exists& exists, const ColumnOf& column_of) {
    // MMA tiles per gate / up pair: 2 if one MMA tile holds the gates and the next their ups, else 1.
    constexpr int HALVES = GATED && RUNS == 1 ? 2 : 1;
#pragma unroll
    for (int j = 0; j < OUT_TILES; j += HALVES) {
#pragma unroll
        for (int l = 0; l < ROW_RUN; l += 2) {
            const int64_t column = column_of(own_column + j * PRODUCT_COLUMNS + l);
            if (column >= n) continue;
            const int64_t next = min(column + 1, n - 1);
            const auto low = epilogue.column(column), high = epilogue.column(next);
            const auto low_up = epilogue.column(GATED ? n + column : column);
            const auto high_up = epilogue.column(GATED ? n + next : next);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int64_t row = row_of(own_row, i * ROW_STEP);
                if (!exists(row)) continue;
                const auto row_terms = epilogue.row(row);
                const int at = (i / LANE_ROWS * OUT_TILES + j) * PRODUCT_SUMS + i % LANE_ROWS * ROW_SUMS + l;
                const int up = at + (RUNS == 2 ? ROW_RUN : PRODUCT_SUMS);
                float x = ACTIVATION<out_t>(epilogue.value(row_terms, low, result[at]));
                float y = ACTIVATION<out_t>(epilogue.value(row_terms, high, result[at + 1]));
                if constexpr (GATED) {
                    x *= epilogue.value(row_terms, low_up, result[up]);
                    y *= epilogue.value(row_terms, high_up, result[up + 1]);
                }
                out_t* const to = out + row * out_stride + column;
                if constexpr (OUT_ACCESS == 2) {
                    const float pair[2] = {x, y};
                    Vec<out_t, 2>::from_floats(pair).store(to);
                } else {
                    to[0] = from_float<out_t>(x);
                    if (column + 1 < n) to[1] = from_float<out_t>(y);
                }
            }
        }
    }
}
