// mainloop_sm80.cuh: the main loop of a GEMM by product.cuh: k-tiles from global memory to accumulators.
//
// A k-tile is 128 bytes of each row. Asynchronous copies (async.cuh) bring rows of a and b to shared memory, STAGES - 1
// k-tiles ahead. Rows and elements out of range are zeros.
//
// The kernel defines before the include: VEC_SIZE, STAGES, and the constants of tile_shape.cuh.
#pragma once
#include "tile_shape.cuh"

// A row of an operand; if it does not exist, any row.
struct OperandRow {
    const scalar_t* from;
    bool exists;
};

// Adds the MMAs of the k-tiles first_step ... first_step + steps - 1 to the accumulators of a warp. The warp's tile
// begins at (warp_row, warp_column) of the CTA's. `tile` has the rows of both operands, tile.a_row(i) and tile.b_row(i),
// and the distances of the elements of a row, tile.a_step and tile.b_step. promote(step) is called after each k-tile
// with SCALE_BLOCK.
template <typename Tile, typename Promote>
DEVICE void
multiply_tile(sum_t (&accum)[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS], const Tile& tile, uint4* memory, int64_t k,
              int64_t first_step, int steps, int warp_row, int warp_column, const Promote& promote) {
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
            for (int i = threadIdx.x / 8; i < TILE_M; i += NUM_THREADS / 8) {
                const OperandRow row = tile.a_row(i);
                copy_chunk<VEC_SIZE>(held_a.of(i), stage.at(i, chunk), row.from, tile.a_step, from, row.exists ? k : 0);
            }
#pragma unroll
            for (int i = threadIdx.x / 8; i < TILE_N; i += NUM_THREADS / 8) {
                const OperandRow row = tile.b_row(i);
                copy_chunk<VEC_SIZE>(held_b.of(i), stage.at(TILE_M + i, chunk), row.from, tile.b_step, from,
                                     row.exists ? k : 0);
            }
        }
        cp_async_commit();
    };
    const auto store_held = [&](int step) {
        if (!HOLDS_COPIES || step >= steps) return;
        held_a.store(stage_of(step), 0);
        held_b.store(stage_of(step), TILE_M);
    };
    for (int step = 0; step < STAGES - 1; ++step) {
        load(step);
        store_held(step);
    }
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
        multiply_step(accum, stage_of(step), warp_row, TILE_M + warp_column);
        store_held(step + STAGES - 1);
        if constexpr (SCALE_BLOCK > 0) promote(step);
    }
}
