// swap_ab_tile.cuh: a tile of a grouped GEMM for few rows of a by mma.sync, with swapped operands (swap-AB): 16 rows of
// b are the M of an MMA, 8 rows of a its N. The warps of a block share K.
//
// A block has TILE_M slots of the lists and ROWS rows of b. blockIdx.x counts such tiles, down the slots for the same
// rows of b first. Each of the FRAGMENTS fragments of a warp has 16 rows of b. GATED: rows g of a fragment are gates and
// rows g + 8 their ups, so that one thread has both.
//
// The kernel defines before the include: TILE_M, WARPS, and the constants of grouped.cuh.
#pragma once
#include "grouped.cuh"

using four_t = Vec<uint32_t, 4>;
using sums_t = Vec<float, 4>;
constexpr int NUM_THREADS = WARPS * 32;
constexpr int FRAGMENTS = 4, ROWS = FRAGMENTS * 16, OUT_N = GATED ? ROWS / 2 : ROWS;  // rows of b, columns of out
constexpr int FRAGMENT_ROWS = GATED == 1 ? 8 : 16;  // from a fragment's first row of b to that of the next
constexpr int ROW_TILES = TILE_M / 8;
constexpr int SUM_BYTES = FRAGMENTS * ROW_TILES * 32 * sizeof(sums_t);  // of the accumulators of a warp

// The tile of a block.
struct SwapAbTile {
    int64_t expert, first_column;  // of out

    // Finds the tile, and writes its rows of out and of a to shared memory; -1 is padding. Returns whether there is any
    // row, in all threads. All threads call.
    DEVICE bool find(const ExpertTiles<TILE_M>& lists, int64_t n, int64_t num_experts, int64_t top_k,
                     int (&row_ids)[TILE_M], int (&a_rows)[TILE_M]) {
        // Blocks past the last tile exit at once.
        const int tiles = max(lists.tiles, 1), tile = int(blockIdx.x % tiles);
        first_column = int64_t(blockIdx.x / tiles) * OUT_N;
        if (lists.tiles == 0 || first_column >= n) return false;
        expert = lists.number(tile);
        if (expert < 0 || expert >= num_experts) return false;
        if (threadIdx.x < TILE_M) {
            const int id = lists.row(tile * TILE_M + threadIdx.x);
            row_ids[threadIdx.x] = id;
            a_rows[threadIdx.x] = id < 0 ? -1 : id / int(top_k);
        }
        __syncthreads();
        int largest = -1;
#pragma unroll
        for (int i = 0; i < TILE_M; ++i) largest = max(largest, row_ids[i]);
        return largest >= 0;
    }
    // Row h * 8 + g of fragment f is the expert's row first_b_row(g) + f * FRAGMENT_ROWS + h * half_rows(n).
    DEVICE int64_t first_b_row(int g) const { return GATED == 2 ? 2 * (first_column + g) : first_column + g; }
    static DEVICE int64_t half_rows(int64_t n) { return GATED == 0 ? 8 : GATED == 1 ? n : 1; }
};

// Applies the epilogue to reduced accumulators number i of FRAGMENTS * ROW_TILES * 32, those of one lane and one MMA
// tile, and writes the results.
template <typename Terms>
DEVICE void write_accumulators(out_t* out, int64_t out_stride, int64_t n, int64_t first_column, const int* row_ids,
                               const Terms& epilogue, const float (&x)[4], int i) {
    const int f = i / 32 / ROW_TILES, first_row = i / 32 % ROW_TILES * 8 + i % 4 * 2, own_g = i % 32 / 4;
    const int64_t column = first_column + f * (OUT_N / FRAGMENTS) + own_g;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int id = row_ids[first_row + j];
        if (id < 0) continue;
        const auto row = epilogue.row(id);
        out_t* const to = out + id * out_stride + column;
        if constexpr (GATED) {
            const float gate = epilogue.value(row, epilogue.column(GATED == 1 ? column : 2 * column), x[j]);
            const float up = epilogue.value(row, epilogue.column(GATED == 1 ? n + column : 2 * column + 1), x[2 + j]);
            *to = from_float<out_t>(ACTIVATION<out_t>(gate, up));
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float value = epilogue.value(row, epilogue.column(column + h * 8), x[2 * h + j]);
                to[h * 8] = from_float<out_t>(ACTIVATION<out_t>(value, value));
            }
        }
    }
}
