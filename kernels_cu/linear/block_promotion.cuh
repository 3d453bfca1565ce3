// block_promotion.cuh: promotion of the accumulators of gemm_sm90 and grouped_gemm_sm90 to float32 registers, times the
// block scales of the operands. These scales are in shared memory.
//
// Threads of the producer's warpgroup copy the scales of a k-tile while the operands are loaded. Consumers that load
// scales from global memory wait for them: their latency is longer than the MMAs of a k-tile.
//
// The kernel defines before the include: its constants; mainloop_t, with accumulators of SUM_COLUMNS columns for each
// piece of a k-tile, N_PIECES along the columns of a warpgroup, and PIECES in all; BUFFERS such accumulators of a
// thread; accum_t, a thread's accumulators of all columns; PARTS of a tile's columns that warpgroups divide, PART_N
// columns each; SCALE_RUN columns of a part that are adjacent rows of b.
#pragma once
#include "async.cuh"
#include "mainloop_sm90.cuh"

// Columns that share a block scale of b: the largest power of two that divides both a run, wherever it begins in b, and
// SCALE_BLOCK.
constexpr int SCALE_COLUMNS = SCALE_BLOCK == 0 ? PART_N : (SCALE_RUN | SCALE_BLOCK) & -(SCALE_RUN | SCALE_BLOCK);
constexpr int PART_SCALES = PART_N / SCALE_COLUMNS, COLUMN_SCALES = PARTS * PART_SCALES;
// Block scales of a stage: those of the tile's rows, then those of its columns.
constexpr int STAGE_SCALES = SCALE_BLOCK > 0 ? TILE_M + (COLUMN_SCALES + 3) / 4 * 4 : 0;

// The producer of a tile's block scales: THREADS adjacent threads copy those of its k-tiles. With a warp alone, a
// thread would have the addresses of four rows, and no registers for them.
template <int THREADS>
struct ScaleLoader {
    static constexpr int OWN_ROWS = (TILE_M + THREADS - 1) / THREADS;
    static_assert(COLUMN_SCALES <= THREADS);

    float* scales;                    // of all stages
    const a_scale_t* rows[OWN_ROWS];  // the scales of the thread's rows in the next k-tile
    const b_scale_t* column;          // the scale of its columns in that k-tile
    int64_t row_step, column_step;    // from each k-tile to the next

    // row_of(i): the row of a that is row i of the tile; column_of(i): a row of b that has scale number i of the tile's
    // columns. Both exist. k_tile: the first one.
    template <typename RowOf, typename ColumnOf>
    DEVICE ScaleLoader(const BlockScales& blocks, float* scales, int k_tile, RowOf row_of, ColumnOf column_of)
        : scales(scales), row_step(blocks.a_block_step), column_step(blocks.b_block_step) {
        const int thread = threadIdx.x % THREADS;
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            const int own = row_of(min(i * THREADS + thread, TILE_M - 1));
            rows[i] = blocks.a_scales + own * blocks.a_step + k_tile * row_step;
        }
        const int own = column_of(min(thread, COLUMN_SCALES - 1));
        column = blocks.b_scales + own / max(SCALE_BLOCK, 1) * blocks.b_step + k_tile * column_step;
    }
    // Copies the scales of the next k-tile to its stage. The thread arrives there when this copy and all its earlier
    // ones are complete. Without SCALE_BLOCK there are no scales.
    DEVICE void load(const Ring<STAGES>& ring, int) {
        if constexpr (SCALE_BLOCK > 0) {
            const int thread = threadIdx.x % THREADS;
            float* to = scales + ring.stage * STAGE_SCALES + thread;
#pragma unroll
            for (int i = 0; i < OWN_ROWS; ++i) {
                if (TILE_M % THREADS == 0 || i * THREADS + thread < TILE_M) cp_async<4>(to + i * THREADS, rows[i]);
                rows[i] += row_step;
            }
            if (thread < COLUMN_SCALES) cp_async<4>(to + TILE_M, column);
            column += column_step;
        }
        cp_async_mbarrier_arrive_noinc(ring.full());
    }
};

// The block scales of a k-tile, for a thread's rows and a warpgroup's columns.
struct Factors {
    float rows[2], columns[PART_SCALES];

    // `stage`: the scales of the k-tile's stage, which has been waited for; `row`: the thread's first row of the tile;
    // `part`: the warpgroup's of the tile's columns.
    DEVICE void load(const float* stage, int row, int part) {
        rows[0] = stage[row];
        rows[1] = stage[row + 8];
#pragma unroll
        for (int i = 0; i < PART_SCALES; ++i) columns[i] = stage[TILE_M + part * PART_SCALES + i];
        sync_warp();  // all lanes have read them before one lane releases the stage
    }
};

// The threads' accumulators of a tile, in float32.
struct Promotion {
    accum_t promoted;

    DEVICE Promotion() {
#pragma unroll
        for (int i = 0; i < PART_N / 2; ++i) promoted[0][i] = 0.0f;
    }
    // Adds the complete accumulators of a piece of a k-tile, with SCALE_BLOCK times the k-tile's scales.
    DEVICE void add(mainloop_t::accum_t& accum, int piece, const Factors& factors) {
        mainloop_t::fence(accum);
        float scales[PART_SCALES][2];
#pragma unroll
        for (int i = 0; i < PART_SCALES * 2; ++i) scales[i / 2][i % 2] = factors.rows[i % 2] * factors.columns[i / 2];
#pragma unroll
        for (int i = 0; i < SUM_COLUMNS / 2; ++i) {
            const int at = piece % N_PIECES * (SUM_COLUMNS / 2) + i;
            const float sum = float(accum[0][i]);
            if constexpr (SCALE_BLOCK > 0) {
                promoted[0][at] = fmaf(scales[at * 2 / SCALE_COLUMNS][i / 2 % 2], sum, promoted[0][at]);
            } else {
                promoted[0][at] += sum;
            }
        }
    }

    // Accumulates and promotes k-tiles first ... last - 1. `scales`: those of all stages; row, part: see Factors.
    DEVICE void run(mainloop_t& mainloop, const float* scales, int row, int part, int first, int last) {
        mainloop_t::accum_t accums[BUFFERS];
        Factors factors[BUFFERS];
        // Issues a piece of a k-tile, and loads the k-tile's scales.
        const auto issue = [&](int piece, int buffer) {
            mainloop.issue(accums[buffer], false, piece);
            if (SCALE_BLOCK > 0 && (piece == 0 || BUFFERS > 1)) {
                factors[buffer].load(scales + mainloop.ring.stage * STAGE_SCALES, row, part);
            }
        };
        if constexpr (BUFFERS == 1) {
            mainloop.run_promoted_at_once(
                first, last, [&](int, int piece) { issue(piece, 0); },
                [&](int piece) { add(accums[0], piece, factors[0]); });
        } else {
            mainloop.run_promoted(
                first, last, [&](int, int buffer) { issue(buffer % PIECES, buffer); },
                [&](int buffer) { add(accums[buffer], buffer % PIECES, factors[buffer]); });
        }
    }
};
