// simt_tile.cuh: a tile of a GEMM by fused multiply-adds, for gemm_simt and grouped_gemm_simt.
//
// A block takes a tile of TILE_M x TILE_N, and a thread 4 x 4 elements of it; with GATED, of two tiles of b. A k-tile has
// STEP elements, in shared memory as sum_t, transposed.
//
// The kernel defines before the include: scalar_t, SCALE_BLOCK, TILE_M, TILE_N, GATED.
#pragma once

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
    else sum = fmaf(x, y, sum);
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
