// tile_shape.cuh: the tile of a block of a matrix product by product.cuh, and which of its sums a thread has.
//
// WARPS_M x WARPS_N warps divide a tile of TILE_M x TILE_N sums. A thread has SUMS of them: those of the ROW_TILES x
// COLUMN_TILES products of its warp, one product after another.
//
// A kernel defines before: TILE_M, TILE_N, WARPS_M, WARPS_N, GATED (1: GATE_COLUMNS gates, and then their ups), and the
// constants of gemm_step.cuh.
#pragma once
#include "gemm_step.cuh"

constexpr int NUM_THREADS = WARPS_M * WARPS_N * WARP_SIZE;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
constexpr int ROW_TILES = WARP_M / 16, COLUMN_TILES = WARP_N / PRODUCT_COLUMNS;     // products of a warp
constexpr int ROWS = ROW_TILES * LANE_ROWS, SUMS = ROWS * COLUMN_TILES * ROW_SUMS;  // of a thread
// Runs of ROW_RUN columns of a thread in a row of a product: gates, or gates and their ups.
constexpr int RUNS = GATED == 1 && GATE_COLUMNS < ROW_SUMS ? 2 : 1, ROW_RUN = ROW_SUMS / RUNS;
constexpr int STAGE_BYTES = tile_t::bytes(TILE_M + TILE_N);  // rows of a, and below them rows of b
