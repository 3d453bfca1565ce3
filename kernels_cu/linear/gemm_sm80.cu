// gemm_sm80: a GEMM on tensor cores, by product.cuh: sm_80 and later, gfx90a and later, gfx11 and gfx12.
//
//     accum[m, n] = sum_k a[m, k] * b[n, k], in float32; int8 operands in int32
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to accum[m, n]
//
// SCALE_BLOCK: blockwise scaling. accum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * partial[j], where
// partial[j] sums over the j-th SCALE_BLOCK elements of K.
//
// Blocks: a block takes an output tile of TILE_M x TILE_N. blockIdx.x counts tiles: GROUP_ROWS row tiles come before
// the next column tile, so that concurrent blocks read the same rows of a and b. Split-K: SPLITS blocks along y share a
// tile, each takes a part of K and writes its accumulators to `partial`, and the last block to arrive reduces them in
// the order of the splits.
//
// A k-tile is 128 bytes of each row. Asynchronous copies (async.cuh) bring rows of a and b to shared memory, STAGES - 1
// k-tiles ahead. Rows and elements out of range are zeros.
//
// Warps: WARPS_M x WARPS_N warps divide the tile. GATED: columns of a tile alternate, GATE_COLUMNS gates and then their
// ups, so that one thread has both.
//
// On devices without fp8 MMA, fp8 operands are converted to float16, which represents every fp8 value exactly.
//
// Constants
//     scalar_t      element type of a and b: half_t, bf16_t, fp8 or int8_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    the epilogue (gemm_epilogue.cuh)
//     SCALE_BLOCK   elements that share a block scale: those of a k-tile, or 0
//     VEC_SIZE      elements of one access to a and b; divides K; 1 if the elements of a row are not contiguous
//     OUT_ACCESS    elements of one access to out: 1 or 2
//     TILE_M, TILE_N, WARPS_M, WARPS_N    the tile of a block, and its warps along both
//     STAGES        k-tiles in shared memory
//     SPLITS        split-K: blocks that share a tile
//     GROUP_ROWS    row tiles that the tile order takes before the next column tile

#include "gemm_tile.cuh"

using total_t = sum_of<IS_INTEGER && SCALE_BLOCK == 0>::type;
constexpr int BLOCK = SCALE_BLOCK > 0 ? SCALE_BLOCK : STEP;  // has no effect without block scales
static_assert(SCALE_BLOCK == 0 || SCALE_BLOCK == STEP);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemm_sm80(out_t* out,                 // [M, N]
          const scalar_t* a,          // [M, K]
          const scalar_t* b,          // [N, K]; GATED: [2 N, K]
          const a_scale_t* a_scales,  // [M] or [1]; SCALE_BLOCK: [M, K / SCALE_BLOCK]
          const b_scale_t* b_scales,  // [N] or [1]; SCALE_BLOCK: [K / SCALE_BLOCK, N / SCALE_BLOCK]
          const int32_t* azp_adj,     // [N]
          const int32_t* azp,         // [M]
          const out_t* bias,          // [N] or [M, N]
          total_t* partial,           // [tiles, SPLITS, SUMS / 4, NUM_THREADS, 4]
          uint32_t* arrived,          // [tiles]
          int64_t m, int64_t n, int64_t k, int64_t a_stride, int64_t b_stride, int64_t a_step, int64_t b_step,
          int64_t out_stride, int64_t bias_stride, int64_t a_scale_step, int64_t b_scale_step,
          int64_t a_scale_block_step, int64_t b_scale_block_step) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ uint32_t is_last;
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int g = lane_row(lane), t = lane_column(lane);
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;

    const int64_t b_rows = GATED ? 2 * n : n;
    const int64_t row_tiles = (m + TILE_M - 1) / TILE_M, column_tiles = (b_rows + TILE_N - 1) / TILE_N;
    const int64_t group = blockIdx.x / (GROUP_ROWS * column_tiles), within = blockIdx.x % (GROUP_ROWS * column_tiles);
    const int64_t group_rows = min(int64_t(GROUP_ROWS), row_tiles - group * GROUP_ROWS);
    const int64_t first_row = (group * GROUP_ROWS + within % group_rows) * TILE_M;
    const int64_t first_column = within / group_rows * (GATED ? TILE_N / 2 : TILE_N);  // column of out
    // Maps column `local` of the tile to its column of out. GATED: a gate and its up map to the same column.
    const auto column_of = [&](int local) {
        return first_column + (GATED ? local / (2 * GATE_COLUMNS) * GATE_COLUMNS + local % GATE_COLUMNS : local);
    };

    const int64_t all_steps = (k + STEP - 1) / STEP;
    const int64_t first_step = all_steps * blockIdx.y / SPLITS, end_step = all_steps * (blockIdx.y + 1) / SPLITS;
    const int steps = int(end_step - first_step);
    const auto stage_of = [&](int step) {
        return tile_t{reinterpret_cast<uint16_t*>(memory) + step % STAGES * (STAGE_BYTES / 2)};
    };
    // A stage holds the rows of a, then the rows of b. A thread copies the same chunk of several rows.
    HeldChunks<TILE_M, NUM_THREADS> held_a;
    HeldChunks<TILE_N, NUM_THREADS> held_b;
    const auto load = [&](int step) {
        if (step < steps) {
            const tile_t stage = stage_of(step);
            const int chunk = threadIdx.x % 8;
            const int64_t from = (first_step + step) * STEP + chunk * CHUNK;
#pragma unroll
            for (int row = threadIdx.x / 8; row < TILE_M; row += NUM_THREADS / 8) {
                const bool exists = first_row + row < m;
                copy_chunk<VEC_SIZE>(held_a.of(row), stage.at(row, chunk),
                                     a + (exists ? first_row + row : 0) * a_stride, a_step, from, exists ? k : 0);
            }
#pragma unroll
            for (int row = threadIdx.x / 8; row < TILE_N; row += NUM_THREADS / 8) {
                const int64_t column = column_of(row);
                const bool exists = column < n;
                const int64_t b_row = exists ? column + (GATED && row / GATE_COLUMNS % 2 ? n : 0) : 0;
                copy_chunk<VEC_SIZE>(held_b.of(row), stage.at(TILE_M + row, chunk), b + b_row * b_stride, b_step, from,
                                     exists ? k : 0);
            }
        }
        cp_async_commit();
    };
    const auto store_held = [&](int step) {
        if (!HOLDS_COPIES || step >= steps) return;
        held_a.store(stage_of(step), 0);
        held_b.store(stage_of(step), TILE_M);
    };

    sum_t sums[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS] = {};
    total_t totals[SCALE_BLOCK ? ROW_TILES : 1][SCALE_BLOCK ? COLUMN_TILES : 1][PRODUCT_SUMS] = {};
    for (int step = 0; step < STAGES - 1; ++step) {
        load(step);
        store_held(step);
    }
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
        const tile_t stage = stage_of(step);
        multiply_step(sums, stage, warp_row, TILE_M + warp_column);
        store_held(step + STAGES - 1);
        if constexpr (SCALE_BLOCK > 0) {
            const int64_t block = first_step + step;
            float row_scales[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int64_t row = min(first_row + warp_row + i * ROW_STEP + g, m - 1);
                row_scales[i] = to_float(a_scales[row * a_scale_step + block * a_scale_block_step]);
            }
#pragma unroll
            for (int j = 0; j < COLUMN_TILES * RUNS; ++j) {
                // All gate columns of one MMA share a block scale, and so do all its up columns.
                const int local = warp_column + j / RUNS * PRODUCT_COLUMNS;
                const int64_t column = min(column_of(local), n - 1) + (GATED && j % 2 ? n : 0);
                const float column_scale =
                    to_float(b_scales[block * b_scale_block_step + column / BLOCK * b_scale_step]);
#pragma unroll
                for (int i = 0; i < ROWS * ROW_RUN; ++i) {
                    const int row = i / ROW_RUN, at = row % LANE_ROWS * ROW_SUMS + j % RUNS * ROW_RUN + i % ROW_RUN;
                    sum_t& sum = sums[row / LANE_ROWS][j / RUNS][at];
                    total_t& total = totals[row / LANE_ROWS][j / RUNS][at];
                    total = fmaf(row_scales[row] * column_scale, float(sum), total);
                    sum = 0;
                }
            }
        }
    }

    total_t result[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        const int row = i / (COLUMN_TILES * PRODUCT_SUMS), column = i / PRODUCT_SUMS % COLUMN_TILES;
        if constexpr (SCALE_BLOCK > 0) result[i] = totals[row][column][i % PRODUCT_SUMS];
        else result[i] = sums[row][column][i % PRODUCT_SUMS];
    }
    if (!add_splits(result, partial, arrived, &is_last)) return;
    const Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS, SCALE_EXPONENT> epilogue{
        a_scales, b_scales, azp_adj, azp, bias, a_scale_step, b_scale_step, bias_stride};
    const auto row_of = [&](int local, int more) { return first_row + local + more; };
    const auto exists = [&](int64_t row) { return row < m; };
    write_tile(out, out_stride, n, epilogue, result, warp_row + g, warp_column + t, row_of, exists, column_of);
}
