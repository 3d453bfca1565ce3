// gemm_tile.cuh: the end of a GEMM tile by product.cuh: the split-K reduction, and the epilogue that writes the tile.
//
// The kernel defines before the include: the constants of tile_shape.cuh and gemm_epilogue.cuh.
#pragma once
#include "gemm_epilogue.cuh"
#include "tile_shape.cuh"

// The row tile and the column tile of tile `tile`: GROUP_ROWS row tiles come before the next column tile.
struct TileIndex { int64_t row, column; };

template <int GROUP_ROWS>
DEVICE TileIndex index_of_tile(int64_t tile, int64_t m, int64_t b_rows) {
    const int64_t row_tiles = (m + TILE_M - 1) / TILE_M, column_tiles = (b_rows + TILE_N - 1) / TILE_N;
    const int64_t group = tile / (GROUP_ROWS * column_tiles), within = tile % (GROUP_ROWS * column_tiles);
    const int64_t group_rows = min(int64_t(GROUP_ROWS), row_tiles - group * GROUP_ROWS);
    return {group * GROUP_ROWS + within % group_rows, within / group_rows};
}

// Split-K: reduces, in the order of the splits, the accumulators of the SPLITS blocks along y that share tile
// blockIdx.x, and returns true in the last block to arrive. `partial` has shape [tiles, SPLITS,
// OUT_SUMS / 4, NUM_THREADS, 4]; `arrived` has one counter per tile, 0 before and after the kernel; `is_last` is in
// shared memory.
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
// GATED: a gate and its up map to the same column. An access to out has OUT_ACCESS elements, 1, 2 or, where a thread has
// enough of them, 8: four lanes then exchange theirs. `Terms` is an Epilogue, or has its members; they are loaded for
// all rows and columns before the first element is stored, because the compiler moves no load to before a store.
template <int OUT_ACCESS, typename Terms, typename Sum, typename RowOf, typename Exists, typename ColumnOf>
DEVICE void
write_tile(out_t* out, int64_t out_stride, int64_t n, const Terms& epilogue, const Sum (&result)[OUT_SUMS], int own_row,
           int own_column, const RowOf& row_of, const Exists& exists, const ColumnOf& column_of) {
    // MMA tiles per gate / up pair: 2 if one MMA tile holds the gates and the next their ups, else 1.
    constexpr int HALVES = GATED && RUNS == 1 ? 2 : 1;
    static_assert(OUT_TILES % HALVES == 0);
    // Column of out of accumulator l of MMA tile j: first + offset_of(j) + l, and for an up less the run of its gate.
    const int64_t first = column_of(own_column);
    const int left = int(min(n - first, int64_t(TILE_N)));
    const auto offset_of = [](int j) { return j / HALVES * HALVES * PRODUCT_COLUMNS / (GATED ? 2 : 1); };
    constexpr int RUN_PAIRS = ROW_RUN / 2,
                  PAIRS = OUT_TILES / HALVES * RUN_PAIRS;  // pairs of adjacent elements of a row
    constexpr int QUADS = OUT_ACCESS == 8 && PRODUCT_COLUMNS == 8 && sizeof(out_t) == 2 ? PAIRS / 4 : 0;
    typename Terms::Row rows[ROWS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int64_t row = row_of(own_row, i * ROW_STEP);
        if (exists(row)) rows[i] = epilogue.row(row);
    }
    typename Terms::Column columns[OUT_TILES][ROW_SUMS];
#pragma unroll
    for (int j = 0; j < OUT_TILES; ++j) {
#pragma unroll
        for (int l = 0; l < ROW_SUMS; ++l) {
            const bool is_up = RUNS == 2 ? l >= ROW_RUN : j % HALVES == 1;
            const int64_t column = min(first + offset_of(j) + l % ROW_RUN, n - 1);
            columns[j][l] = epilogue.column(is_up ? n + column : column);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int64_t row = row_of(own_row, i * ROW_STEP);
        const bool is_stored = exists(row);
        out_t* const of_row = out + row * out_stride + first;
        Vec<out_t, 2> pairs[PAIRS];
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const int j = p / RUN_PAIRS * HALVES, l = p % RUN_PAIRS * 2;
            const int at = (i / LANE_ROWS * OUT_TILES + j) * PRODUCT_SUMS + i % LANE_ROWS * ROW_SUMS + l;
            float pair[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                pair[h] = ACTIVATION<out_t>(epilogue.value(rows[i], columns[j][l + h], result[at + h]));
                if constexpr (GATED) {
                    constexpr int RUN = RUNS == 2 ? ROW_RUN : 0, UP = RUNS == 2 ? ROW_RUN : PRODUCT_SUMS;
                    pair[h] *= epilogue.value(rows[i], columns[j + HALVES - 1][l + h + RUN], result[at + UP + h]);
                }
            }
            pairs[p] = Vec<out_t, 2>::from_floats(pair);
        }
        if constexpr (QUADS > 0) {
            const int own = threadIdx.x % 4;
#pragma unroll
            for (int quad = 0; quad < QUADS; ++quad) {
                Vec<uint32_t, 4> words;  // of four runs of eight elements, two of each; then of one run
#pragma unroll
                for (int p = 0; p < 4; ++p) words.data[p] = reinterpret_cast<const uint32_t&>(pairs[quad * 4 + p]);
                transpose_4x4(words.data);
                const int offset = offset_of((quad * 4 + own) * HALVES) - own * 2;
                if (is_stored && offset < left) words.store(reinterpret_cast<uint32_t*>(of_row + offset));
            }
        }
#pragma unroll
        for (int p = QUADS * 4; p < PAIRS; ++p) {
            const int offset = offset_of(p / RUN_PAIRS * HALVES) + p % RUN_PAIRS * 2;
            if (!is_stored || offset >= left) continue;
            if constexpr (OUT_ACCESS >= 2) {
                pairs[p].store(of_row + offset);
            } else {
                of_row[offset] = pairs[p].data[0];
                if (offset + 1 < left) of_row[offset + 1] = pairs[p].data[1];
            }
        }
    }
}
