// grouped_gemm_simt: the grouped GEMM for MoE by fused multiply-adds: for float32, and for every type on devices
// without matrix units.
//
//     accum[t, n] = sum_k a[t / top_k, k] * b[e, n, k], in float32; int8 operands in int32; e is the expert of row t
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n], and to the gate or up that is paired with it
//
// SCALE_BLOCK: blockwise scaling. accum[t, n] = sum_j a_scales[t / top_k, j] * b_scales[e, n / SCALE_BLOCK, j] *
// partial[j], where partial[j] sums over the j-th SCALE_BLOCK elements of K.
//
// A block takes a tile of TILE_M rows of one expert and TILE_N columns of out, and a thread 4 x 4 elements of it. For
// every k-tile of STEP elements the block copies a and b to shared memory, converted to sum_t and transposed; with
// GATED also a second tile of b, the ups.
//
// Constants
//     scalar_t      element type of a and b
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER, ROUTED    the epilogue (grouped.cuh)
//     SCALE_BLOCK   elements that share a block scale, or 0
//     TILE_M, TILE_N    multiples of 4
//     GROUP         row tiles of one expert that the tile order takes before the next column

#include "grouped.cuh"
#include "simt_tile.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
grouped_gemm_simt(out_t* out,                          // [num_rows, N]
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
    __shared__ a_tile_t a_tile;
    __shared__ b_tile_t b_tile;
    __shared__ int rows_of_tile[TILE_M];  // the row of out of each tile row; -1: padding
    const ExpertTiles<TILE_M> rows(sorted_token_ids, expert_ids, num_tokens_post_pad, num_rows, num_experts,
                                   block_tiles, max_tiles);
    const int columns = int((n + TILE_N - 1) / TILE_N);
    if (blockIdx.x >= int64_t(rows.tiles) * columns) return;
    int tile_row, tile_column;
    const int expert = rows.template locate<GROUP>(int(blockIdx.x), columns, int(gridDim.x), tile_row, tile_column);
    if (expert < 0) return;
    if (!rows.template load<NUM_THREADS>(tile_row, rows_of_tile)) return;

    const int first_column = tile_column * TILE_N, b_rows = int(GATED ? 2 * n : n);
    const int thread_row = threadIdx.x / (TILE_N / 4) * 4, thread_column = threadIdx.x % (TILE_N / 4) * 4;
    const scalar_t* expert_b = b + int64_t(expert) * b_rows * b_stride;
    const float* expert_scales = b_scales + expert * b_scale_expert_step;
    // The row of b[e] that yields a column of out; GATED: half 0 is its gate, half 1 its up.
    const auto b_row_of = [&](int half, int column) { return GATED == 2 ? 2 * column + half : half * int(n) + column; };

    sum_t sums[HALVES][4][4] = {};
    float scaled[HALVES][4][4] = {};
    // Promotes the accumulators of K block `block` to `scaled`, multiplied by the block scales, and clears them.
    const auto scale = [&](int64_t block) {
#pragma unroll
        for (int i = 0; i < HALVES * 16; ++i) {
            const int row = max(rows_of_tile[thread_row + i / 4 % 4], 0) / int(top_k);
            const int b_row = b_row_of(i / 16, min(first_column + thread_column + i % 4, int(n) - 1));
            const float factor = a_scales[row * a_scale_step + block * a_scale_block_step] *
                                 expert_scales[b_row / BLOCK * b_scale_step + block * b_scale_block_step];
            sum_t& sum = sums[i / 16][i / 4 % 4][i % 4];
            scaled[i / 16][i / 4 % 4][i % 4] = fmaf(factor, float(sum), scaled[i / 16][i / 4 % 4][i % 4]);
            sum = 0;
        }
    };

    for (int64_t start = 0; start < k; start += STEP) {
        if (SCALE_BLOCK > 0 && start > 0 && start % BLOCK == 0) scale(start / BLOCK - 1);
        __syncthreads();
        for (int i = threadIdx.x; i < TILE_M * STEP; i += NUM_THREADS) {
            const int row = rows_of_tile[i / STEP];
            const int64_t at = start + i % STEP;
            a_tile[i % STEP][i / STEP] = row >= 0 && at < k ? element(a[row / int(top_k) * a_stride + at]) : sum_t(0);
        }
        for (int i = threadIdx.x; i < HALVES * TILE_N * STEP; i += NUM_THREADS) {
            const int half = i / (TILE_N * STEP), local = i / STEP % TILE_N, column = first_column + local;
            const int64_t at = start + i % STEP;
            b_tile[half][i % STEP][local] =
                column < n && at < k ? element(expert_b[b_row_of(half, column) * b_stride + at]) : sum_t(0);
        }
        __syncthreads();
        multiply(sums, a_tile, b_tile, thread_row, thread_column);
    }
    if (SCALE_BLOCK > 0 && k > 0) scale((k - 1) / BLOCK);

    const ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED> epilogue{
        topk_weights, a_scales, expert_scales, bias + int64_t(expert) * b_rows, int(top_k), a_scale_step, b_scale_step};
    for (int j = 0; j < 4; ++j) {
        const int column = first_column + thread_column + j;
        if (column >= n) break;
        const auto gate = epilogue.column(b_row_of(0, column)), up = epilogue.column(b_row_of(HALVES - 1, column));
        for (int i = 0; i < 4; ++i) {
            const int row = rows_of_tile[thread_row + i];
            if (row < 0) continue;
            const auto row_terms = epilogue.row(row);
            const auto value = [&](int half, const auto& terms) {
                if constexpr (SCALE_BLOCK > 0) return epilogue.value(row_terms, terms, scaled[half][i][j]);
                else return epilogue.value(row_terms, terms, sums[half][i][j]);
            };
            const float x = ACTIVATION<out_t>(value(0, gate), value(HALVES - 1, up));
            out[row * out_stride + column] = from_float<out_t>(x);
        }
    }
}
