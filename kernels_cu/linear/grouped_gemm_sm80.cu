// grouped_gemm_sm80: the grouped GEMM for MoE on tensor cores, by product.cuh: sm_80 and later, and AMD.
//
//     accum[t, n] = sum_k a[t / top_k, k] * b[e, n, k], in float32; int8 operands in int32; e is the expert of row t
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n], and to the gate or up that is paired with it
//
// SCALE_BLOCK: blockwise scaling. accum[t, n] = sum_j a_scales[t / top_k, j] * b_scales[e, n / SCALE_BLOCK, j] *
// partial[j], where partial[j] sums over the j-th SCALE_BLOCK elements of K.
//
// A block takes a tile of TILE_M rows of one expert and TILE_N rows of its weight. blockIdx.x counts tiles in the order
// of grouped.cuh, down the rows of an expert first; blocks past the last tile exit.
//
// A k-tile is 128 bytes of each row. Asynchronous copies (async.cuh) gather the rows of a and bring those of b to
// shared memory, STAGES - 1 k-tiles ahead. Rows and elements out of range are zeros.
//
// Warps: WARPS_M x WARPS_N warps divide the tile. GATED 1: its columns alternate, GATE_COLUMNS gates and then their
// ups; GATED 2: a gate and its up. Either way one thread has both.
//
// Constants
//     scalar_t      element type of a and b: half_t, bf16_t, fp8 or int8_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER, ROUTED    the epilogue (grouped.cuh)
//     SCALE_BLOCK   elements that share a block scale: those of a k-tile, or 0
//     VEC_SIZE      elements of one access to a and b; divides K
//     TILE_M, TILE_N, WARPS_M, WARPS_N    the tile of a block, and its warps along both
//     STAGES        k-tiles in shared memory
//     GROUP         row tiles of one expert that the tile order takes before the next column

#include "grouped_tile.cuh"

using total_t = sum_of<IS_INTEGER && SCALE_BLOCK == 0>::type;
constexpr int BLOCK = SCALE_BLOCK > 0 ? SCALE_BLOCK : STEP;  // has no effect without block scales
static_assert(SCALE_BLOCK == 0 || SCALE_BLOCK == STEP);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
grouped_gemm_sm80(out_t* out,                          // [num_rows, N]
                  const scalar_t* a,                   // [num_rows / top_k, K]
                  const scalar_t* b,                   // [E, B_ROWS, K]
                  const int32_t* sorted_token_ids,     // [max_tiles * TILE_M] at least
                  const int32_t* expert_ids,           // [max_tiles / block_tiles] at least
                  const int32_t* num_tokens_post_pad,  // one element
                  const float* topk_weights,           // [num_rows]
                  const float* a_scales,  // [num_rows / top_k] or [1]; SCALE_BLOCK: [num_rows / top_k, K / SCALE_BLOCK]
                  const float* b_scales,  // [E, B_ROWS] or [E]; SCALE_BLOCK: [E, B_ROWS / SCALE_BLOCK, K / SCALE_BLOCK]
                  const out_t* bias,      // [E, B_ROWS]
                  int64_t num_rows, int64_t n, int64_t k, int64_t top_k, int64_t num_experts, int64_t block_tiles,
                  int64_t max_tiles, int64_t a_stride, int64_t b_stride, int64_t out_stride, int64_t a_scale_step,
                  int64_t a_scale_block_step, int64_t b_scale_expert_step, int64_t b_scale_step,
                  int64_t b_scale_block_step) {
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
    const int first_row_of_b = tile_column * TILE_N;
    const auto b_row_of = [&](int local) { return expert_row(first_row_of_b, local, int(n), b_rows); };
    const scalar_t* expert_b = b + int64_t(expert) * b_rows * b_stride;
    const int steps = int((k + STEP - 1) / STEP);
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
            const int64_t from = int64_t(step) * STEP + chunk * CHUNK;
#pragma unroll
            for (int i = threadIdx.x / 8; i < TILE_M; i += NUM_THREADS / 8) {
                const int row = rows_of_tile[i];
                copy_chunk<VEC_SIZE>(held_a.of(i), stage.at(i, chunk), a + (row < 0 ? 0 : row / int(top_k) * a_stride),
                                     1, from, row < 0 ? 0 : k);
            }
#pragma unroll
            for (int i = threadIdx.x / 8; i < TILE_N; i += NUM_THREADS / 8) {
                const int row = b_row_of(i);
                copy_chunk<VEC_SIZE>(held_b.of(i), stage.at(TILE_M + i, chunk),
                                     expert_b + (row < b_rows ? row * b_stride : 0), 1, from, row < b_rows ? k : 0);
            }
        }
        cp_async_commit();
    };
    const auto store_held = [&](int step) {
        if (!HOLDS_COPIES || step >= steps) return;
        held_a.store(stage_of(step), 0);
        held_b.store(stage_of(step), TILE_M);
    };

    const float* expert_scales = b_scales + expert * b_scale_expert_step;
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
        multiply_step(sums, stage_of(step), warp_row, TILE_M + warp_column);
        store_held(step + STAGES - 1);
        if constexpr (SCALE_BLOCK > 0) {
            float row_scales[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int row = max(rows_of_tile[warp_row + i * ROW_STEP + g], 0) / int(top_k);
                row_scales[i] = a_scales[row * a_scale_step + step * a_scale_block_step];
            }
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j) {
                // A lane's rows of b in one MMA tile can have different block scales: gates and ups do.
                float column_scales[ROW_SUMS];
#pragma unroll
                for (int i = 0; i < ROW_SUMS; ++i) {
                    const int row = min(b_row_of(warp_column + j * PRODUCT_COLUMNS + t + i), b_rows - 1);
                    column_scales[i] = expert_scales[row / BLOCK * b_scale_step + step * b_scale_block_step];
                }
#pragma unroll
                for (int i = 0; i < ROWS * ROW_SUMS; ++i) {
                    const int row = i / ROW_SUMS, at = i % PRODUCT_SUMS;
                    sum_t& sum = sums[row / LANE_ROWS][j][at];
                    total_t& total = totals[row / LANE_ROWS][j][at];
                    total = fmaf(row_scales[row] * column_scales[i % ROW_SUMS], float(sum), total);
                    sum = 0;
                }
            }
        }
    }
    const auto sum_at = [&](int i, int j, int l) {
        if constexpr (SCALE_BLOCK > 0) return totals[i][j][l];
        else return sums[i][j][l];
    };

    const ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED> epilogue{
        topk_weights, a_scales, expert_scales, bias + int64_t(expert) * b_rows, int(top_k), a_scale_step, b_scale_step};
    write_expert_tile(out, out_stride, int(n), b_rows, epilogue, rows_of_tile + warp_row + g, warp_column + t, b_row_of,
                      sum_at);
}
