// gemm_tile.cuh: the tile of a block of a matrix product by product.cuh: who has which of its sums, how blocks that share
// the tile add theirs up, and how sums become elements of out.
//
// WARPS_M x WARPS_N warps divide a tile of TILE_M x TILE_N sums. A thread has SUMS of them: those of the ROW_TILES x
// COLUMN_TILES products of its warp, one product after another.
//
// A kernel defines before: TILE_M, TILE_N, WARPS_M, WARPS_N, SPLITS, OUT_ACCESS, and the constants of gemm_step.cuh and
// gemm_epilogue.cuh.
#pragma once
#include "gemm_epilogue.cuh"
#include "gemm_step.cuh"

constexpr int NUM_THREADS = WARPS_M * WARPS_N * WARP_SIZE;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
constexpr int ROW_TILES = WARP_M / 16, COLUMN_TILES = WARP_N / PRODUCT_COLUMNS;     // products of a warp
constexpr int ROWS = ROW_TILES * LANE_ROWS, SUMS = ROWS * COLUMN_TILES * ROW_SUMS;  // of a thread
// Runs of ROW_RUN columns of a thread in a row of a product: gates, or gates and their ups.
constexpr int RUNS = GATED && GATE_COLUMNS < ROW_SUMS ? 2 : 1, ROW_RUN = ROW_SUMS / RUNS;
constexpr int STAGE_BYTES = tile_t::bytes(TILE_M + TILE_N);  // rows of a, and below them rows of b

// Adds up, in order, the sums of the SPLITS blocks along y that share tile number blockIdx.x, and returns true in the last
// of them to arrive. `partial` has [tiles, SPLITS, SUMS / 4, NUM_THREADS, 4] sums, `arrived` a counter of each tile, 0
// before and after; `is_last` lies in shared memory.
template <typename Sum>
DEVICE bool add_splits(Sum (&result)[SUMS], Sum* partial, uint32_t* arrived, uint32_t* is_last) {
    if constexpr (SPLITS > 1) {
        using four_t = Vec<Sum, 4>;
        Sum* const of_thread = partial + (int64_t(blockIdx.x) * SPLITS * SUMS * NUM_THREADS + threadIdx.x * 4);
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            four_t four;
#pragma unroll
            for (int j = 0; j < 4; ++j) four.data[j] = result[i + j];
            *reinterpret_cast<four_t*>(of_thread + int64_t(blockIdx.y * SUMS + i) * NUM_THREADS) = four;
        }
        if (!arrives_last(arrived + blockIdx.x, SPLITS, is_last)) return false;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) result[i] = 0;
        for (int split = 0; split < SPLITS; ++split) {
#pragma unroll
            for (int i = 0; i < SUMS; i += 4) {
                const uint4 four =
                    load_fresh(reinterpret_cast<const uint4*>(of_thread + int64_t(split * SUMS + i) * NUM_THREADS));
                const auto& part = reinterpret_cast<const Sum(&)[4]>(four);
#pragma unroll
                for (int j = 0; j < 4; ++j) result[i + j] += part[j];
            }
        }
    }
    return true;
}

// Writes the tile to out, whose rows have n columns. The thread's first sum is in row own_row and column own_column of the
// tile. row_of(local, more) is the row of out that row `local + more` of the tile
// is, if it exists(); column_of(local) the column of out, GATED that of a gate or an up. `Terms` is an Epilogue, or has its parts.
template <typename Terms, typename Sum, typename RowOf, typename Exists, typename ColumnOf>
DEVICE void
write_tile(out_t* out, int64_t out_stride, int64_t n, const Terms& epilogue, const Sum (&result)[SUMS], int own_row,
           int own_column, const RowOf& row_of, const Exists& exists, const ColumnOf& column_of) {
    // Of products of a warp, or of pairs of columns in one: gates, and the ups behind them.
    constexpr int HALVES = GATED && RUNS == 1 ? 2 : 1;
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j += HALVES) {
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
                const int at = (i / LANE_ROWS * COLUMN_TILES + j) * PRODUCT_SUMS + i % LANE_ROWS * ROW_SUMS + l;
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
