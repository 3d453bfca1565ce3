// packed_steps.cuh: the steps of K that a block takes of a product with a weight of packed codes.
//
// DEPTH steps are on their way to registers while one is multiplied: rows of a, and codes. A step is stored to the other of
// two stages behind the products of the one before it, and makes room for another.
//
// Loads are issued whatever there is to load, from places that exist, so that those to wait for can be counted: sums of rows
// and columns that do not exist are stored by nobody, and elements of K that do not exist are 0 in a.
//
// Constants
//     DEPTH         steps that are on their way, an even number
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
    int64_t first;  // step
    int count, thread;
    uint16_t* memory;                       // of the stages
    const scalar_t* rows[chunks_t::COUNT];  // of a, of the thread's chunks
    uint32_t columns[PIECES];               // of the weight, the first of each piece
    Slot held[DEPTH];

    // a_row(local) is a row of a for row `local` of the tile, column(local) a column of the weight for one of the tile.
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
            keep_loads_of_warp();  // in the order in which the loop waits for them
        }
    }

    // Adds the products of all steps for the warp, from row `row` of the tile and row `column` of the weight's on.
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
    // Whether the thread's chunks of a step exist.
    DEVICE bool has_chunk(int64_t first_k) const { return WHOLE_STEPS || first_k + thread % 8 * CHUNK < weight.k; }

    // Loads step number `step`, or the last one anew: its number modulo DEPTH is `slot`.
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
    // Stores a step, and loads the one that takes its registers.
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
