// packed_steps.cuh: the main loop of a GEMM with a packed weight, by product.cuh, on devices without cp.async
// (HOLDS_COPIES).
//
// Registers hold DEPTH k-tiles in flight, rows of a and packed words of the weight, while one k-tile is multiplied.
// After the MMAs of a k-tile, the next one is dequantized to the other of two stages in shared memory, and its
// registers take the loads of the k-tile DEPTH further on.
//
// Every load is issued, from a clamped address if there is nothing to load, so that the loads to wait for can be
// counted. Accumulators of rows and columns out of range are never stored, and elements of a past the end of K are
// zeros.
//
// Constants
//     DEPTH         k-tiles in flight, an even number
#pragma once
#include "packed_tile.cuh"

static_assert(HOLDS_COPIES && DEPTH % 2 == 0, "copies wait in registers");

struct PackedSteps {
    using chunks_t = HeldChunks<TILE_M, NUM_THREADS>;
    struct Slot {
        chunks_t chunks;
        HeldPiece pieces[PIECES];
    };

    PackedMatrix weight;
    int64_t first;  // k-tile
    int count, thread;
    uint16_t* memory;                       // two stages
    const scalar_t* rows[chunks_t::COUNT];  // the row of a of each of the thread's chunks
    uint32_t columns[PIECES];               // the column of the weight where each piece begins
    Slot held[DEPTH];

    // a_row(local) points to the row of a for row `local` of the tile; column(local) is the column of the weight for
    // column `local` of the tile.
    template <typename ARow, typename Column>
    DEVICE PackedSteps(const PackedMatrix& weight, int64_t first, int64_t last, uint4* memory, const ARow& a_row,
                       const Column& column)
        : weight(weight),
          first(first),
          count(int(last - first)),
          thread(int(thread_of<NUM_THREADS>())),
          memory(reinterpret_cast<uint16_t*>(memory)) {
#pragma unroll
        for (int i = 0; i < chunks_t::COUNT; ++i) {
            const int local = thread / 8 + i * chunks_t::STRIDE;
            rows[i] = a_row(TILE_M % chunks_t::STRIDE == 0 ? local : min(local, TILE_M - 1));
        }
        each_piece([&](int i, const PiecePlace& place) { columns[i] = column(place.column); });
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            load(i, i);
            keep_loads_of_warp();  // in the order in which the main loop waits for them
        }
    }

    // Adds the MMAs of all k-tiles to the warp's accumulators. The warp's rows of a begin at row `row` of the tile, its
    // columns of the weight at column `column`.
    DEVICE void multiply(sum_t (&sums)[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS], int row, int column) {
        store(0, 0);
        for (int step = 0; step < count; step += DEPTH) {
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
                if (step + i >= count) break;
                sync_shared();
                multiply_step(sums, stage_of(i), row, TILE_M + column);
                store((i + 1) % DEPTH, step + i + 1);
            }
        }
    }

private:
    template <typename Body>
    DEVICE void each_piece(const Body& body) const {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int piece = thread + i * NUM_THREADS;
            if (TILE_PIECES % NUM_THREADS == 0 || piece < TILE_PIECES) body(i, PiecePlace(piece));
        }
    }
    DEVICE tile_t stage_of(int slot) const { return tile_t{memory + slot % 2 * (STAGE_BYTES / 2)}; }
    // Whether the thread's chunks of a k-tile lie within K.
    DEVICE bool has_chunk(int64_t first_k) const { return WHOLE_STEPS || first_k + thread % 8 * CHUNK < weight.k; }

    // Loads k-tile `step`, past the end the last one again. `slot` is `step` modulo DEPTH.
    DEVICE void load(int slot, int step) {
        const int64_t first_k = (first + min(step, count - 1)) * STEP;
        each_piece(
            [&](int i, const PiecePlace& place) { held[slot].pieces[i].load(weight, place, first_k, columns[i]); });
#pragma unroll
        for (int i = 0; i < chunks_t::COUNT; ++i) {
            hold<16>(held[slot].chunks.chunks[i], rows[i] + (has_chunk(first_k) ? first_k + thread % 8 * CHUNK : 0),
                     true);
        }
    }
    // Stores k-tile `step` to its stage, and loads k-tile `step` + DEPTH into the registers that this frees.
    DEVICE void store(int slot, int step) {
        chunks_t& chunks = held[slot].chunks;
#pragma unroll
        for (int i = 0; i < chunks_t::COUNT * 4 && !WHOLE_STEPS; ++i) {
            if (!has_chunk((first + step) * STEP)) chunks.chunks[i / 4][i % 4] = 0;
        }
        chunks.store(stage_of(slot), 0);
        each_piece(
            [&](int i, const PiecePlace& place) { held[slot].pieces[i].store(stage_of(slot), place, columns[i]); });
        load(slot, step + DEPTH);
    }
};
