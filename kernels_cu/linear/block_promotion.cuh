// block_promotion.cuh: promotion of the accumulators of gemm_sm90 to float32 registers, times the block scales of the
// operands. These scales are in shared memory.
// Reads the constants of the kernel that includes it, its mainloop_t and accum_t.
//
// Two warps of the producer's warpgroup copy the scales of a k-tile while TMA loads the operands. Consumers that load
// scales from global memory wait for them: their latency is longer than the MMAs of a k-tile.
#pragma once
#include "async.cuh"
#include "mainloop_sm90.cuh"

// Columns of a tile that share a block scale of b. A tile that begins in the middle of a SCALE_BLOCK also ends in the
// middle of one, hence half a block.
constexpr int SCALE_COLUMNS = SCALE_BLOCK == 0 ? TILE_N : TILE_N % SCALE_BLOCK == 0 ? SCALE_BLOCK : SCALE_BLOCK / 2;
constexpr int COLUMN_SCALES = TILE_N / SCALE_COLUMNS;
// Block scales of a stage: those of the tile's rows, then those of its columns.
constexpr int STAGE_SCALES = SCALE_BLOCK > 0 ? TILE_M + 4 : 0;
static_assert(SCALE_BLOCK == 0 || COLUMN_SCALES <= 4 && COLUMN_SCALES * SCALE_COLUMNS == TILE_N);

// The producer of a tile's block scales: copies those of its k-tiles. The last two warps of the block call; one would
// have the addresses of four rows in each thread, and no registers for them.
struct ScaleLoader {
    static constexpr int THREADS = 64, OWN_ROWS = TILE_M / THREADS;

    float* scales;                    // of all stages
    const a_scale_t* rows[OWN_ROWS];  // the scales of the thread's rows in the next k-tile
    const b_scale_t* column;          // the scale of its columns in that k-tile
    int64_t row_step, column_step;    // from each k-tile to the next

    // (row, column): the CTA's tile; k_tile: the first one.
    DEVICE ScaleLoader(const BlockScales& blocks, float* scales, int row, int column, int k_tile, int64_t m, int64_t n)
        : scales(scales), row_step(blocks.a_block_step), column_step(blocks.b_block_step) {
        const int thread = threadIdx.x % THREADS;
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            const int own = min(row * TILE_M + i * THREADS + thread, int(m) - 1);
            rows[i] = blocks.a_scales + own * blocks.a_step + k_tile * row_step;
        }
        const int own = min(column * TILE_N + min(thread, COLUMN_SCALES - 1) * SCALE_COLUMNS, int(n) - 1);
        this->column = blocks.b_scales + own / max(SCALE_BLOCK, 1) * blocks.b_step + k_tile * column_step;
    }
    DEVICE void load(const Ring<STAGES>& ring, int) {
        const int thread = threadIdx.x % THREADS;
        float* to = scales + ring.stage * STAGE_SCALES + thread;
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            cp_async<4>(to + i * THREADS, rows[i]);
            rows[i] += row_step;
        }
        if (thread < COLUMN_SCALES) cp_async<4>(to + TILE_M, column);
        column += column_step;
        cp_async_mbarrier_arrive_noinc(ring.full());
    }
};

// The block scales of a k-tile, for a thread's rows and the tile's columns.
struct Factors {
    float rows[2], columns[COLUMN_SCALES];

    // `stage`: the scales of the k-tile's stage, which has been waited for; `row`: the thread's first row of the tile.
    DEVICE void load(const float* stage, int row) {
        rows[0] = stage[row];
        rows[1] = stage[row + 8];
#pragma unroll
        for (int i = 0; i < COLUMN_SCALES; ++i) columns[i] = stage[TILE_M + i];
        sync_warp();  // all lanes have read them before one lane releases the stage
    }
};

// The threads' accumulators of a tile, in float32.
struct Promotion {
    accum_t promoted;

    DEVICE Promotion() {
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) promoted[0][i] = 0.0f;
    }
    // Adds the complete accumulators of a piece of a k-tile, with SCALE_BLOCK times the k-tile's scales.
    DEVICE void add(mainloop_t::accum_t& accum, int piece, const Factors& factors) {
        mainloop_t::fence(accum);
        float scales[COLUMN_SCALES][2];
#pragma unroll
        for (int i = 0; i < COLUMN_SCALES * 2; ++i) scales[i / 2][i % 2] = factors.rows[i % 2] * factors.columns[i / 2];
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
};
