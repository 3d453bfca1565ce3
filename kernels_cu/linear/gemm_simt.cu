// gemm_simt: a GEMM by fused multiply-adds: for float32, and for every type on devices without matrix units.
//
//     accum[m, n] = sum_k a[m, k] * b[n, k], in float32; int8 operands in int32
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to accum[m, n]
//
// SCALE_BLOCK: blockwise scaling. accum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * partial[j], where
// partial[j] sums over the j-th SCALE_BLOCK elements of K.
//
// A block takes an output tile of TILE_M x TILE_N, and a thread 4 x 4 elements of it. For every k-tile of STEP elements
// the block copies a and b to shared memory, converted to sum_t and transposed; with GATED also a second tile of b, the
// ups.
//
// Constants
//     scalar_t      element type of a and b
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    the epilogue (gemm_epilogue.cuh)
//     SCALE_BLOCK   elements that share a block scale, or 0
//     TILE_M, TILE_N    multiples of 4

#include "gemm_epilogue.cuh"
#include "simt_tile.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
gemm_simt(out_t* out,                 // [M, N]
          const scalar_t* a,          // [M, K]
          const scalar_t* b,          // [N, K]; GATED: [2 N, K]
          const a_scale_t* a_scales,  // [M] or [1]; SCALE_BLOCK: [M, K / SCALE_BLOCK]
          const b_scale_t* b_scales,  // [N] or [1]; SCALE_BLOCK: [K / SCALE_BLOCK, N / SCALE_BLOCK]
          const int32_t* azp_adj,     // [N]
          const int32_t* azp,         // [M]
          const out_t* bias,          // [N] or [M, N]
          int64_t m, int64_t n, int64_t k, int64_t a_stride, int64_t b_stride, int64_t a_step, int64_t b_step,
          int64_t out_stride, int64_t bias_stride, int64_t a_scale_step, int64_t b_scale_step,
          int64_t a_scale_block_step, int64_t b_scale_block_step) {
    await_previous_kernel();
    __shared__ a_tile_t a_tile;
    __shared__ b_tile_t b_tile;
    const int64_t row_tiles = (m + TILE_M - 1) / TILE_M;
    const int64_t first_row = blockIdx.x % row_tiles * TILE_M, first_column = blockIdx.x / row_tiles * TILE_N;
    const int thread_row = threadIdx.x / (TILE_N / 4) * 4, thread_column = threadIdx.x % (TILE_N / 4) * 4;

    sum_t sums[HALVES][4][4] = {};
    float scaled[HALVES][4][4] = {};
    // Promotes the accumulators of K block `block` to `scaled`, multiplied by the block scales, and clears them.
    const auto scale = [&](int64_t block) {
#pragma unroll
        for (int i = 0; i < HALVES * 16; ++i) {
            const int64_t row = min(first_row + thread_row + i / 4 % 4, m - 1);
            const int64_t column = min(first_column + thread_column + i % 4, n - 1) + i / 16 * n;
            const float factor = to_float(a_scales[row * a_scale_step + block * a_scale_block_step]) *
                                 to_float(b_scales[block * b_scale_block_step + column / BLOCK * b_scale_step]);
            sum_t& sum = sums[i / 16][i / 4 % 4][i % 4];
            scaled[i / 16][i / 4 % 4][i % 4] = fmaf(factor, float(sum), scaled[i / 16][i / 4 % 4][i % 4]);
            sum = 0;
        }
    };

    for (int64_t start = 0; start < k; start += STEP) {
        if (SCALE_BLOCK > 0 && start > 0 && start % BLOCK == 0) {
            scale(start / BLOCK - 1);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TILE_M * STEP; i += NUM_THREADS) {
            const int64_t row = first_row + i / STEP, at = start + i % STEP;
            a_tile[i % STEP][i / STEP] = row < m && at < k ? element(a[row * a_stride + at * a_step]) : sum_t(0);
        }
        for (int i = threadIdx.x; i < HALVES * TILE_N * STEP; i += NUM_THREADS) {
            const int half = i / (TILE_N * STEP), local = i / STEP % TILE_N;
            const int64_t column = first_column + local, at = start + i % STEP;
            b_tile[half][i % STEP][local] =
                column < n && at < k ? element(b[(half * n + column) * b_stride + at * b_step]) : sum_t(0);
        }
        __syncthreads();
        multiply(sums, a_tile, b_tile, thread_row, thread_column);
    }
    if (SCALE_BLOCK > 0 && k > 0) scale((k - 1) / BLOCK);

    const Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS, SCALE_EXPONENT> epilogue{
        a_scales, b_scales, azp_adj, azp, bias, a_scale_step, b_scale_step, bias_stride};
    for (int j = 0; j < 4; ++j) {
        const int64_t column = first_column + thread_column + j;
        if (column >= n) break;
        const auto column_terms = epilogue.column(column);
        const auto up_terms = epilogue.column(GATED ? n + column : column);
        for (int i = 0; i < 4; ++i) {
            const int64_t row = first_row + thread_row + i;
            if (row >= m) break;
            const auto row_terms = epilogue.row(row);
            const auto value = [&](int half, const auto& terms) {
                if constexpr (SCALE_BLOCK > 0) return epilogue.value(row_terms, terms, scaled[half][i][j]);
                else return epilogue.value(row_terms, terms, sums[half][i][j]);
            };
            float x = ACTIVATION<out_t>(value(0, column_terms));
            if constexpr (GATED) x *= value(HALVES - 1, up_terms);
            out[row * out_stride + column] = from_float<out_t>(x);
        }
    }
}
