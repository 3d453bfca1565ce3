// tile_shape.cuh: the tile of a block of a GEMM by product.cuh, and the accumulators that each thread holds.
//
// A team of WARPS_M x WARPS_N warps divides an output tile of TILE_M x TILE_N. A thread holds SUMS accumulators: those of
// the ROW_TILES x COLUMN_TILES MMA tiles of its warp, one MMA tile after another. A block has WARPS_K teams, which share
// a tile and split K. When their accumulators have been added up, a team has OUT_TILES of the columns of MMA tiles of
// each of its warps, and a thread OUT_SUMS accumulators.
//
// The kernel defines before the include: TILE_M, TILE_N, WARPS_M, WARPS_N, WARPS_K, GATED (1: columns alternate,
// GATE_COLUMNS gates and then their ups), and the constants of gemm_step.cuh.
#pragma once
#include "gemm_step.cuh"

constexpr int TEAM_THREADS = WARPS_M * WARPS_N * WARP_SIZE, NUM_THREADS = WARPS_K * TEAM_THREADS;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
constexpr int ROW_TILES = WARP_M / 16, COLUMN_TILES = WARP_N / PRODUCT_COLUMNS;     // MMA tiles of a warp
constexpr int ROWS = ROW_TILES * LANE_ROWS, SUMS = ROWS * COLUMN_TILES * ROW_SUMS;  // rows and accumulators of a thread
constexpr int OUT_TILES = COLUMN_TILES / WARPS_K, OUT_SUMS = SUMS / WARPS_K;
static_assert(COLUMN_TILES % WARPS_K == 0);
// A thread's columns in a row of an MMA tile: RUNS runs of ROW_RUN; 2 runs if one is gates and the other their ups.
constexpr int RUNS = GATED == 1 && GATE_COLUMNS < ROW_SUMS ? 2 : 1, ROW_RUN = ROW_SUMS / RUNS;
constexpr int STAGE_BYTES = tile_t::bytes(TILE_M + TILE_N);  // rows of a, then rows of b

DEVICE int team() { return WARPS_K == 1 ? 0 : threadIdx.x / TEAM_THREADS; }
DEVICE int thread_of_team() { return WARPS_K == 1 ? threadIdx.x : threadIdx.x % TEAM_THREADS; }
