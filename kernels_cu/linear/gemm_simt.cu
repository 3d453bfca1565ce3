// gemm_simt: a GEMM by fused multiply-adds: for float32, and for every type on devices without matrix units.
//
//     accum[m, n] = sum_k a[m, k] * b[n, k], in float32; int8 operands in int32
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to accum[m, n]
//
// grouped_gemm_simt: the same for MoE; e is the expert of row t.
//
//     accum[t, n] = sum_k a[t / top_k, k] * b[e, n, k]
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n], and to the gate or up that is paired with it
//
// SCALE_BLOCK: blockwise scaling. accum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * partial[j], where
// partial[j] sums over the j-th SCALE_BLOCK elements of K.
//
// A block takes an output tile of TILE_M x TILE_N, for MoE of the rows of one expert, and a thread 4 x 4 elements of
// it. For every k-tile of STEP elements the block copies a and b to shared memory, converted to sum_t and transposed;
// with GATED also a second tile of b, the ups.
//
// Constants
//     scalar_t      element type of a and b
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    the epilogue (gemm_epilogue.cuh)
//     ROUTED        whether rows have routing weights (grouped.cuh)
//     SCALE_BLOCK   elements that share a block scale, or 0
//     TILE_M, TILE_N    multiples of 4
//     GROUP         row tiles of one expert that the tile order takes before the next column

#include "block_scales.cuh"
#include "grouped.cuh"

constexpr int STEP = 16, NUM_THREADS = TILE_M * TILE_N / 16, HALVES = GATED ? 2 : 1;
constexpr bool IS_INTEGER = is_same<scalar_t, int8_t>;
template <bool INTEGER> struct sum_of { using type = float; };
template <> struct sum_of<true> { using type = int32_t; };
using sum_t = sum_of<IS_INTEGER>::type;
constexpr int BLOCK = SCALE_BLOCK > 0 ? SCALE_BLOCK : STEP;  // has no effect without block scales
static_assert(SCALE_BLOCK % STEP == 0);

template <typename T>
DEVICE sum_t element(T x) {
    if constexpr (IS_INTEGER) return x;
    else return to_float(x);
}
template <typename Sum>
DEVICE void multiply_add(Sum& sum, Sum x, Sum y) {
    if constexpr (IS_INTEGER) sum += x * y;
    else sum = ieee_fma(x, y, sum);  // subnormal elements count, as in a tensor core
}

// A k-tile of both operands. Rows are padded by 4 elements.
using a_tile_t = sum_t[STEP][TILE_M + 4];
using b_tile_t = sum_t[HALVES][STEP][TILE_N + 4];

// Adds the products of a k-tile to the thread's sums of the 4 x 4 elements from (row, column) of the tile on.
DEVICE void multiply(sum_t (&sums)[HALVES][4][4], const a_tile_t& a_tile, const b_tile_t& b_tile, int row, int column) {
#pragma unroll
    for (int step = 0; step < STEP; ++step) {
        sum_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = a_tile[step][row + i];
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const sum_t y = b_tile[half][step][column + j];
#pragma unroll
                for (int i = 0; i < 4; ++i) multiply_add(sums[half][i][j], x[i], y);
            }
        }
    }
}

// A tile of a dense GEMM. Rows of out and of a have the same indices, and if one is past the end, so are the next.
struct DenseTile {
    static constexpr bool ROWS_IN_ORDER = true;
    int64_t first_row, first_column, m, n;

    // The row of out for row `local + more` of the tile, whether it exists, and its row of a.
    DEVICE int64_t row(int local, int more = 0) const { return first_row + local + more; }
    DEVICE bool exists(int64_t row) const { return row < m; }
    DEVICE int64_t a_row(int64_t row) const { return row; }
    // The row of b that yields a column of out; GATED: half 0 is its gate, half 1 its up.
    DEVICE int64_t b_row(int half, int64_t column) const { return half * n + column; }
    // For block scales: a row or column that exists.
    DEVICE int64_t clamped_row(int local, int more) const { return min(row(local, more), m - 1); }
    DEVICE int64_t clamped_column(int local) const { return min(first_column + local, n - 1); }
};

// A tile of a grouped GEMM, likewise. Its rows are those of one expert, in any order, and b is the expert's.
struct ExpertTile {
    static constexpr bool ROWS_IN_ORDER = false;
    const int* rows;  // of out; -1: padding
    int first_column, top_k;
    int64_t n;

    DEVICE int row(int local, int more = 0) const { return rows[local + more]; }
    DEVICE bool exists(int row) const { return row >= 0; }
    DEVICE int a_row(int row) const { return row / top_k; }
    DEVICE int b_row(int half, int column) const { return GATED == 2 ? 2 * column + half : half * int(n) + column; }
    DEVICE int clamped_row(int local, int more) const { return max(row(local, more), 0); }
    DEVICE int clamped_column(int local) const { return min(first_column + local, int(n) - 1); }
};

// The operands: elements between rows, and between elements of a row.
struct Operands {
    const scalar_t *a, *b;
    int64_t k, a_stride, b_stride, a_step, b_step;
};

// Multiplies a tile, applies the epilogue and writes it to out.
template <typename Tile, typename Terms>
DEVICE void multiply_tile(out_t* out, int64_t out_stride, const Tile& tile, const Operands& operands,
                          const BlockScales& scales, const Terms& epilogue, a_tile_t& a_tile, b_tile_t& b_tile) {
    const auto [a, b, k, a_stride, b_stride, a_step, b_step] = operands;
    const int thread_row = threadIdx.x / (TILE_N / 4) * 4, thread_column = threadIdx.x % (TILE_N / 4) * 4;

    sum_t sums[HALVES][4][4] = {};
    float promoted[HALVES][4][4] = {};
    // Promotes the accumulators of K block `block`, multiplied by the block scales, and clears them.
    const auto promote = [&](int64_t block) {
#pragma unroll
        for (int i = 0; i < HALVES * 16; ++i) {
            const auto row = tile.clamped_row(thread_row, i / 4 % 4);
            const auto column = tile.clamped_column(thread_column + i % 4);
            const float factor =
                scales.of_row(tile.a_row(row), block) * scales.of_column(tile.b_row(i / 16, column), block);
            sum_t& sum = sums[i / 16][i / 4 % 4][i % 4];
            float& total = promoted[i / 16][i / 4 % 4][i % 4];
            total = fmaf(factor, float(sum), total);
            sum = 0;
        }
    };

    for (int64_t start = 0; start < k; start += STEP) {
        if (SCALE_BLOCK > 0 && start > 0 && start % BLOCK == 0) promote(start / BLOCK - 1);
        __syncthreads();
        for (int i = threadIdx.x; i < TILE_M * STEP; i += NUM_THREADS) {
            const auto row = tile.row(i / STEP);
            const int64_t at = start + i % STEP;
            a_tile[i % STEP][i / STEP] =
                tile.exists(row) && at < k ? element(a[tile.a_row(row) * a_stride + at * a_step]) : sum_t(0);
        }
        for (int i = threadIdx.x; i < HALVES * TILE_N * STEP; i += NUM_THREADS) {
            const int half = i / (TILE_N * STEP), local = i / STEP % TILE_N;
            const auto column = tile.first_column + local;
            const int64_t at = start + i % STEP;
            b_tile[half][i % STEP][local] =
                column < tile.n && at < k ? element(b[tile.b_row(half, column) * b_stride + at * b_step]) : sum_t(0);
        }
        __syncthreads();
        multiply(sums, a_tile, b_tile, thread_row, thread_column);
    }
    if (SCALE_BLOCK > 0 && k > 0) promote((k - 1) / BLOCK);

    for (int j = 0; j < 4; ++j) {
        const auto column = tile.first_column + thread_column + j;
        if (column >= tile.n) break;
        const auto gate = epilogue.column(tile.b_row(0, column)), up = epilogue.column(tile.b_row(HALVES - 1, column));
        for (int i = 0; i < 4; ++i) {
            const auto row = tile.row(thread_row, i);
            if (!tile.exists(row)) {
                if constexpr (Tile::ROWS_IN_ORDER) break;
                else continue;
            }
            const auto row_terms = epilogue.row(row);
            const auto value = [&](int half, const auto& terms) {
                if constexpr (SCALE_BLOCK > 0) return epilogue.value(row_terms, terms, promoted[half][i][j]);
                else return epilogue.value(row_terms, terms, sums[half][i][j]);
            };
            const float x = epilogue.activated(value(0, gate), value(HALVES - 1, up));
            out[row * out_stride + column] = from_float<out_t>(x);
        }
    }
}

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
    const DenseTile tile{blockIdx.x % row_tiles * TILE_M, blockIdx.x / row_tiles * TILE_N, m, n};
    const Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS, SCALE_EXPONENT> epilogue{
        a_scales, b_scales, azp_adj, azp, bias, a_scale_step, b_scale_step, bias_stride};
    multiply_tile(out, out_stride, tile, {a, b, k, a_stride, b_stride, a_step, b_step},
                  {a_scales, b_scales, a_scale_step, b_scale_step, a_scale_block_step, b_scale_block_step}, epilogue,
                  a_tile, b_tile);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1) grouped_gemm_simt(
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
    __shared__ a_tile_t a_tile;
    __shared__ b_tile_t b_tile;
    __shared__ int rows_of_tile[TILE_M];  // the row of out of each tile row; -1: padding
    const ExpertTiles<TILE_M> rows(sorted_token_ids, expert_ids, num_tokens_post_pad, num_rows, num_experts,
                                   block_tiles, max_tiles);
    const int columns = int((n + TILE_N - 1) / TILE_N), b_rows = int(GATED ? 2 * n : n);
    if (blockIdx.x >= int64_t(rows.tiles) * columns) return;
    int tile_row, tile_column;
    const int expert = rows.template locate<GROUP>(int(blockIdx.x), columns, int(gridDim.x), tile_row, tile_column);
    if (expert < 0) return;
    if (!rows.template load<NUM_THREADS>(tile_row, rows_of_tile)) return;

    const ExpertTile tile{rows_of_tile, tile_column * TILE_N, int(top_k), n};
    const b_scale_t* expert_scales = b_scales + expert * b_scale_expert_step;
    const ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED> epilogue{
        topk_weights, a_scales, expert_scales, bias + int64_t(expert) * b_rows, int(top_k), a_scale_step, b_scale_step};
    multiply_tile(out, out_stride, tile, {a, b + int64_t(expert) * b_rows * b_stride, k, a_stride, b_stride, 1, 1},
                  {a_scales, expert_scales, a_scale_step, b_scale_step, a_scale_block_step, b_scale_block_step},
                  epilogue, a_tile, b_tile);
}
