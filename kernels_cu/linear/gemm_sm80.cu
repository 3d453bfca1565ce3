// gemm_sm80: a GEMM on tensor cores, by product.cuh: sm_80 and later, gfx90a and later, gfx11 and gfx12.
//
//     accum[m, n] = sum_k a[m, k] * b[n, k], in float32; int8 operands in int32
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to accum[m, n]
//
// grouped_gemm_sm80: the same for MoE; e is the expert of row t.
//
//     accum[t, n] = sum_k a[t / top_k, k] * b[e, n, k]
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n], and to the gate or up that is paired with it
//
// SCALE_BLOCK: blockwise scaling. accum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * partial[j], where
// partial[j] is the sum over the j-th SCALE_BLOCK elements of K. With experts the scales are
// b_scales[e, n / SCALE_BLOCK, j].
//
// Blocks: a block takes an output tile of TILE_M x TILE_N, with experts of TILE_M rows of one expert. blockIdx.x counts
// tiles: GROUP_ROWS row tiles come before the next column tile, so that concurrent blocks read the same rows of a and
// b; with experts in the order of grouped.cuh, where blocks past the last tile exit. PERSISTENT: a block takes every
// gridDim.x-th tile, and begins the copies of the next one before it stores a tile. Split-K: SPLITS blocks along y
// share a tile, each takes a part of K and writes its accumulators to `partial`, and the last block to arrive reduces
// them in the order of the splits.
//
// Warps: a team of WARPS_M x WARPS_N warps divides the tile. WARPS_K teams take every WARPS_K-th k-tile, and add up their
// accumulators in shared memory: more warps hide latency, and the k-tiles are read from shared memory as often as by one
// team. GATED: columns of a tile alternate, GATE_COLUMNS gates and then their ups; GATED 2, with experts: a gate and its
// up. Either way one thread has both.
//
// On devices without fp8 MMA, fp8 operands are converted to float16, which represents every fp8 value exactly.
//
// Constants
//     scalar_t      element type of a and b: half_t, bf16_t, fp8 or int8_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    the epilogue (gemm_epilogue.cuh)
//     SCALE_BLOCK   elements that share a block scale: those of a k-tile, or 0
//     VEC_SIZE      elements of one access to a and b; divides K; 1 if the elements of a row are not contiguous
//     TILE_M, TILE_N, WARPS_M, WARPS_N    the tile of a block, and the warps of a team along both
//     WARPS_K       teams; 1 with experts and with block scales
//     STAGES        k-tiles of a team in shared memory
//
// Constants without experts
//     OUT_ACCESS    elements of one access to out: 1, 2 or 8 (gemm_tile.cuh)
//     SPLITS        split-K: blocks that share a tile
//     PERSISTENT    whether a block takes several tiles; only without split-K
//     GROUP_ROWS    row tiles that the tile order takes before the next column tile
//
// Constants with experts
//     ROUTED        whether rows have routing weights (grouped.cuh)
//     GROUP         row tiles of one expert that the tile order takes before the next column

#include "block_scales.cuh"
#include "gemm_tile.cuh"
#include "grouped_tile.cuh"
#include "mainloop_sm80.cuh"

using total_t = sum_of<IS_INTEGER && SCALE_BLOCK == 0>::type;
static_assert(SCALE_BLOCK == 0 || SCALE_BLOCK == STEP);

// The block scales of a thread's accumulators for a k-tile: those of its rows, and of the columns of its MMA tiles.
struct TileScales { float rows[ROWS], columns[COLUMN_TILES][ROW_SUMS]; };

// The accumulators of a thread.
struct Accumulators {
    sum_t current[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS] = {};
    total_t totals[SCALE_BLOCK ? ROW_TILES : 1][SCALE_BLOCK ? COLUMN_TILES : 1][PRODUCT_SUMS] = {};  // promoted

    DEVICE total_t get(int i, int j, int l) const {
        if constexpr (SCALE_BLOCK > 0) return totals[i][j][l];
        else return current[i][j][l];
    }
    // Promotes the accumulators of a k-tile, multiplied by their block scales, and clears them.
    DEVICE void promote(const TileScales& scales) {
#pragma unroll
        for (int i = 0; i < ROWS * COLUMN_TILES * ROW_SUMS; ++i) {
            const int row = i / (COLUMN_TILES * ROW_SUMS), j = i / ROW_SUMS % COLUMN_TILES, column = i % ROW_SUMS;
            sum_t& sum = current[row / LANE_ROWS][j][row % LANE_ROWS * ROW_SUMS + column];
            total_t& total = totals[row / LANE_ROWS][j][row % LANE_ROWS * ROW_SUMS + column];
            total = fmaf(scales.rows[row] * scales.columns[j][column], float(sum), total);
            sum = 0;
        }
    }
};

// Runs of rows of b that alternate in a tile: gates and ups.
constexpr int RUNS_OF_B = GATED == 1 ? 2 : 1;
static_assert(ROWS_APART % (RUNS_OF_B * GATE_COLUMNS) == 0);

// Whether threads without a row of a read nothing. Tiles with more rows of a thread lack registers for it.
constexpr bool SKIPS_ROWS = !HOLDS_COPIES && TILE_M <= 64 && TILE_M + TILE_N <= 16 * ROWS_APART;

// A tile of a dense GEMM.
struct DenseTile {
    const scalar_t *a, *b;
    int64_t first_row, first_column, m, n, a_stride, b_stride, a_step, b_step;  // first_column: of out

    // Maps column `local` of the tile to its column of out. GATED: a gate and its up map to the same column.
    DEVICE int64_t column_of(int local) const {
        return first_column + (GATED ? local / (2 * GATE_COLUMNS) * GATE_COLUMNS + local % GATE_COLUMNS : local);
    }
    // The rows that a thread copies, from element `first` of each on.
    DEVICE auto copied_of_a(int64_t first) const {
        const int64_t row = first_row + made_anew(thread_of_team() / 8);
        return strided_rows<SKIPS_ROWS>(a + first * a_step, row, a_stride, ROWS_APART, m - row);
    }
    DEVICE StridedRows<> copied_of_b(int64_t first) const {
        const int local = made_anew(thread_of_team() / 8);
        const int64_t column = column_of(local), row = column + (GATED && local / GATE_COLUMNS % 2 ? n : 0);
        return strided_rows(b + first * b_step, row, b_stride, ROWS_APART / RUNS_OF_B, (n - column) * RUNS_OF_B);
    }
    // The scales of k-tile `block`. The thread's first accumulator is at row own_row, its warp's at warp_column.
    DEVICE TileScales scales_of(const BlockScales& scales, int own_row, int warp_column, int64_t block) const {
        TileScales found{};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            found.rows[i] = scales.of_row(min(first_row + own_row + i * ROW_STEP, m - 1), block);
        }
#pragma unroll
        for (int j = 0; j < COLUMN_TILES * RUNS; ++j) {
            // All gate columns of one MMA share a block scale, and so do all its up columns.
            const int local = warp_column + j / RUNS * PRODUCT_COLUMNS;
            const int64_t column = min(column_of(local), n - 1) + (GATED && j % 2 ? n : 0);
            const float scale = scales.of_column(column, block);
#pragma unroll
            for (int i = 0; i < ROW_RUN; ++i) found.columns[j / RUNS][j % RUNS * ROW_RUN + i] = scale;
        }
        return found;
    }
};

// A tile of a grouped GEMM: rows of one expert, which are scattered over out. b is the expert's.
struct ExpertTile {
    static constexpr int64_t a_step = 1, b_step = 1;
    const scalar_t *a, *b;
    const int* rows;  // of out; -1: padding
    int first_b_row, n, b_rows, top_k;
    int64_t a_stride, b_stride;

    DEVICE int b_row_of(int local) const { return expert_row(first_b_row, local, n, b_rows); }
    DEVICE auto copied_of_a(int64_t first) const {
        return scattered_rows<TILE_M>(a, a_stride, first, top_k, [&](int i) { return rows[i]; });
    }
    DEVICE StridedRows<> copied_of_b(int64_t first) const {
        const int row = b_row_of(threadIdx.x / 8), end = GATED == 1 && row < n ? n : b_rows;
        return strided_rows(b + first, row, b_stride, ROWS_APART / RUNS_OF_B, int64_t(end - row) * RUNS_OF_B);
    }
    // As above; the thread's first accumulator is at column own_column.
    DEVICE TileScales scales_of(const BlockScales& scales, int own_row, int own_column, int block) const {
        TileScales found{};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            found.rows[i] = scales.of_row(max(rows[own_row + i * ROW_STEP], 0) / top_k, block);
        }
#pragma unroll
        for (int j = 0; j < COLUMN_TILES * ROW_SUMS; ++j) {
            // A lane's rows of b in one MMA tile can have different block scales: gates and ups do.
            const int local = own_column + j / ROW_SUMS * PRODUCT_COLUMNS + j % ROW_SUMS;
            const int row = min(b_row_of(local), b_rows - 1);
            found.columns[j / ROW_SUMS][j % ROW_SUMS] = scales.of_column(row, block);
        }
        return found;
    }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemm_sm80(out_t* out,                 // [M, N]
          const scalar_t* a,          // [M, K]
          const scalar_t* b,          // [N, K]; GATED: [2 N, K]
          const a_scale_t* a_scales,  // [M] or [1]; SCALE_BLOCK: [M, K / SCALE_BLOCK]
          const b_scale_t* b_scales,  // [N] or [1]; SCALE_BLOCK: [K / SCALE_BLOCK, N / SCALE_BLOCK]
          const int32_t* azp_adj,     // [N]
          const int32_t* azp,         // [M]
          const out_t* bias,          // [N] or [M, N]
          total_t* partial,           // [tiles, SPLITS, OUT_SUMS / 4, NUM_THREADS, 4]
          uint32_t* arrived,          // [tiles]
          int64_t tiles, int64_t m, int64_t n, int64_t k, int64_t a_stride, int64_t b_stride, int64_t a_step,
          int64_t b_step, int64_t out_stride, int64_t bias_stride, int64_t a_scale_step, int64_t b_scale_step,
          int64_t a_scale_block_step, int64_t b_scale_block_step) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ uint32_t is_last;
    const int warp = thread_of_team() / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;

    const int64_t all_steps = (k + STEP - 1) / STEP;
    const int split = SPLITS == 1 ? 0 : blockIdx.y;
    const int64_t first_step = all_steps * split / SPLITS, end_step = all_steps * (split + 1) / SPLITS;
    const int steps = int(end_step - first_step);
    const BlockScales scales{a_scales, b_scales, a_scale_step, b_scale_step, a_scale_block_step, b_scale_block_step};
    const Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS, SCALE_EXPONENT> epilogue{
        a_scales, b_scales, azp_adj, azp, bias, a_scale_step, b_scale_step, bias_stride};
    const auto tile_of = [&](int64_t tile) {
        const TileIndex index = index_of_tile<GROUP_ROWS>(tile, m, GATED ? 2 * n : n);
        const int64_t first_column = index.column * (GATED ? TILE_N / 2 : TILE_N);
        return DenseTile{a, b, index.row * TILE_M, first_column, m, n, a_stride, b_stride, a_step, b_step};
    };
    static_assert(!PERSISTENT || SPLITS == 1);
    total_t result[OUT_SUMS] = {};
    const auto multiply = [&](auto& copies, int64_t index) {
        Accumulators accum;
        const auto scales_of = [&](int step) {
            return tile_of(index).scales_of(scales, warp_row + lane_row(lane), warp_column, first_step + step);
        };
        multiply_tile(accum.current, copies, memory, steps, warp_row, warp_column, scales_of,
                      [&](const TileScales& of_step) { accum.promote(of_step); });
        add_teams(result, memory, [&](int i, int j, int l) { return accum.get(i, j, l); });
    };
    const auto store = [&](int64_t index, int thread) {
        const DenseTile tile = tile_of(index);
        const int lane = thread % WARP_SIZE, warp = thread % TEAM_THREADS / WARP_SIZE;
        write_tile<OUT_ACCESS>(
            out, out_stride, n, epilogue, result, warp / WARPS_N * WARP_M + lane_row(lane),
            warp % WARPS_N * WARP_N + thread / TEAM_THREADS * OUT_TILES * PRODUCT_COLUMNS + lane_column(lane),
            [&](int local, int more) { return tile.first_row + local + more; }, [&](int64_t row) { return row < m; },
            [&](int local) { return tile.column_of(local); });
    };
    if constexpr (!PERSISTENT) {
        TileCopies<DenseTile> copies(tile_of(blockIdx.x), k, first_step, steps);
        copies.begin(memory);
        multiply(copies, blockIdx.x);
        if (add_splits<SPLITS>(result, partial, arrived, &is_last)) store(blockIdx.x, threadIdx.x);
    } else {
        for (uint32_t next = blockIdx.x;; next += gridDim.x) {
            const uint32_t index = made_anew(next);  // what follows from it has no registers during the main loop
            TileCopies<DenseTile> copies(tile_of(min(int64_t(index), tiles - 1)), k, first_step, steps);
            if (index < tiles) {
                __syncthreads();  // all warps have read the stages
                copies.begin(memory);
            }
            if (index >= gridDim.x) store(index - gridDim.x, made_anew(threadIdx.x));
            if (index >= tiles) break;
            multiply(copies, index);
        }
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS) grouped_gemm_sm80(
    out_t* out,                          // [num_rows, N]
    const scalar_t* a,                   // [num_rows / top_k, K]
    const scalar_t* b,                   // [E, B_ROWS, K]
    const int32_t* sorted_token_ids,     // [max_tiles * TILE_M] at least
    const int32_t* expert_ids,           // [max_tiles / block_tiles] at least
    const int32_t* num_tokens_post_pad,  // one element
    const float* topk_weights,           // [num_rows]
    const a_scale_t* a_scales,           // [num_rows / top_k] or [1]; SCALE_BLOCK: [num_rows / top_k, K / SCALE_BLOCK]
    const b_scale_t* b_scales,           // [E, B_ROWS] or [E]; SCALE_BLOCK: [E, B_ROWS / SCALE_BLOCK, K / SCALE_BLOCK]
    const out_t* bias,                   // [E, B_ROWS]
    int64_t num_rows, int64_t n, int64_t k, int64_t top_k, int64_t num_experts, int64_t block_tiles, int64_t max_tiles,
    int64_t a_stride, int64_t b_stride, int64_t out_stride, int64_t a_scale_step, int64_t a_scale_block_step,
    int64_t b_scale_expert_step, int64_t b_scale_step, int64_t b_scale_block_step) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ int rows_of_tile[TILE_M];  // the row of out of each tile row; -1: padding
    const ExpertTiles<TILE_M> rows(sorted_token_ids, expert_ids, num_tokens_post_pad, num_rows, num_experts,
                                   block_tiles, max_tiles);
    const int b_rows = int(GATED ? 2 * n : n), columns = (b_rows + TILE_N - 1) / TILE_N;
    if (blockIdx.x >= int64_t(rows.tiles) * columns) return;
    int tile_row, tile_column;
    const int expert = rows.template locate<GROUP>(int(blockIdx.x), columns, int(gridDim.x), tile_row, tile_column);
    if (expert < 0) return;
    if (!rows.template load<NUM_THREADS>(tile_row, rows_of_tile)) return;

    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int g = lane_row(lane), t = lane_column(lane);
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;
    const ExpertTile tile{a,
                          b + int64_t(expert) * b_rows * b_stride,
                          rows_of_tile,
                          tile_column * TILE_N,
                          int(n),
                          b_rows,
                          int(top_k),
                          a_stride,
                          b_stride};
    const b_scale_t* expert_scales = b_scales + expert * b_scale_expert_step;
    const BlockScales scales{a_scales,     expert_scales,      a_scale_step,
                             b_scale_step, a_scale_block_step, b_scale_block_step};
    Accumulators accum;
    const int steps = int((k + STEP - 1) / STEP);
    TileCopies<ExpertTile> copies(tile, k, 0, steps);
    copies.begin(memory);
    multiply_tile(
        accum.current, copies, memory, steps, warp_row, warp_column,
        [&](int step) { return tile.scales_of(scales, warp_row + g, warp_column + t, step); },
        [&](const TileScales& of_step) { accum.promote(of_step); });

    const ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED> epilogue{
        topk_weights, a_scales, expert_scales, bias + int64_t(expert) * b_rows, int(top_k), a_scale_step, b_scale_step};
    write_expert_tile(
        out, out_stride, int(n), b_rows, epilogue, rows_of_tile + warp_row + g, warp_column + t,
        [&](int local) { return tile.b_row_of(local); }, [&](int i, int j, int l) { return accum.get(i, j, l); });
}
