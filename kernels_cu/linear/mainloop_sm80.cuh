// mainloop_sm80.cuh: the main loop of a GEMM by product.cuh: k-tiles from global memory to accumulators.
//
// A k-tile is 128 bytes of each row. A team of warps takes every WARPS_K-th k-tile. Asynchronous copies (async.cuh) bring
// its rows of a and b to shared memory, STAGES - 1 of its k-tiles ahead. Rows and elements out of range are zeros.
//
// The kernel defines before the include: VEC_SIZE, STAGES, and the constants of tile_shape.cuh.
#pragma once
#include "tile_shape.cuh"

// A thread copies its chunk, 16 bytes of K, of every ROWS_APART-th row of a tile, from row thread_of_team() / 8 on.
constexpr int ROWS_APART = TEAM_THREADS / 8;
static_assert(WARPS_K == 1 || (!HOLDS_COPIES && ROWS_APART % 8 == 0));
#include "operand_rows.cuh"

// The copies of an operand's k-tiles to shared memory, in order.
template <int ROWS, typename Rows>
struct OperandCopies {
    static constexpr int COUNT = ceil_div(ROWS, ROWS_APART);
    Rows rows;  // at the thread's chunk of the next k-tile
    HeldChunks<ROWS, NUM_THREADS> held;

    DEVICE explicit OperandCopies(const Rows& rows) : rows(rows) {}
    // Copies a chunk of each row to a stage, to its rows from `first` on, or to registers. The rows have `left`
    // elements at distances of `step`.
    DEVICE void load(const tile_t& stage, int first, int64_t step, int64_t left) {
        const int row = thread_of_team() / 8;
        uint16_t* const to = stage.at(first + row, threadIdx.x % 8);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (ROWS % ROWS_APART != 0 && row + i * ROWS_APART >= ROWS) continue;
            copy_chunk<VEC_SIZE>(held.chunks[HOLDS_COPIES ? i : 0], to + i * tile_t::bytes(ROWS_APART) / 2, rows.row(i),
                                 step, left, rows.exists(i));
        }
        rows.advance(WARPS_K * STEP * step);
    }
};

// The operands of a warp's MMAs for one LOAD_BYTES part of a k-tile, of elements of type T.
template <typename T, int WORDS>
struct Fragments {
    static constexpr int HALVES = 16 / PRODUCT_COLUMNS;
    uint32_t rows[ROW_TILES][WORDS], columns[ceil_div(COLUMN_TILES, HALVES)][WORDS];

    DEVICE void load(const tile_t& stage, int a_row, int b_row, int part) {
        const int lane = threadIdx.x % WARP_SIZE;
        const uint16_t* const a = stage.at(a_row, lane % 16, part, lane / 16);
        const uint16_t* const b = stage.at(b_row, lane / 16 * 8 + lane % 8, part, lane / 8 % 2);
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) ldmatrix<WORDS>(rows[i], a + i * tile_t::bytes(16) / 2);
#pragma unroll
        for (int j = 0; j < COLUMN_TILES / HALVES; ++j) ldmatrix<WORDS>(columns[j], b + j * tile_t::bytes(16) / 2);
        if constexpr (COLUMN_TILES % HALVES == 1) {
            uint32_t last[WORDS / 2];
            ldmatrix<WORDS / 2>(last, b + COLUMN_TILES / HALVES * tile_t::bytes(16) / 2);
#pragma unroll
            for (int i = 0; i < WORDS / 2; ++i) columns[COLUMN_TILES / HALVES][i] = last[i];
        }
    }
    DEVICE void multiply(sum_t (&accum)[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS]) const {
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i) {
                product<T>(accum[i][j], rows[i], columns[j / HALVES], j % HALVES);
            }
        }
    }
};

// Whether the operands of an MMA are loaded while the previous part of the k-tile is multiplied. Copies of single
// elements need the registers for themselves.
constexpr bool PREFETCHES =
    PARTS == 1 && !ON_MATRIX_CORES && VEC_SIZE * sizeof(scalar_t) >= 4 && NUM_THREADS * MIN_BLOCKS <= 256;
static_assert(PREFETCHES || COLUMN_TILES % (16 / PRODUCT_COLUMNS) == 0);

// The main loop with two sets of operands: one is loaded while the other is multiplied. load(slot) begins the copies of
// the next k-tile to a stage. next_stage(step) waits for those of the next one, and stores k-tile `step` if registers
// hold it. read(operands, slot, part) loads the operands of a LOAD_BYTES part of the k-tile in a stage, and
// multiply(operands, part) adds their MMAs. begin(step) and end(step) are called before and after a k-tile.
//
// All warps copy and load at a time, and the tensor cores wait meanwhile. So a k-tile has as few instructions as
// possible besides MMAs, and no branch: the k-tile after the last one is copied, as zeros, and read, too.
template <typename Operands, typename Load, typename NextStage, typename Read, typename Multiply, typename Begin,
          typename End>
DEVICE void multiply_ahead(int steps, const Load& load, const NextStage& next_stage, const Read& read,
                           const Multiply& multiply, const Begin& begin, const End& end) {
    constexpr int K_PARTS = 128 / LOAD_BYTES;
    static_assert(K_PARTS % 2 == 0);
    Operands operands[2];
    next_stage(steps);
    read(operands[0], 0, 0);
    for (int step = 0, slot = 0; step < steps; ++step) {
        const int next = slot + 1 == STAGES ? 0 : slot + 1, free = slot == 0 ? STAGES - 1 : slot - 1;
        begin(step);
#pragma unroll
        for (int part = 0; part < K_PARTS; ++part) {
            const bool is_last = part == K_PARTS - 1;
            if (is_last) next_stage(step + STAGES - 1);
            read(operands[(part + 1) % 2], is_last ? next : slot, (part + 1) % K_PARTS);
            if (part == 0) load(free);
            multiply(operands[part % 2], part);
        }
        end(step);
        slot = next;
    }
}

// Whether block scales are loaded before the MMAs of their k-tile, which hide the latency. Next to more accumulators,
// which a thread has twice, they would spill.
static_assert(WARPS_K == 1 || SCALE_BLOCK == 0);
constexpr bool SCALES_EARLY = SCALE_BLOCK > 0 && WARP_M* WARP_N <= 32 * WARP_SIZE;

DEVICE tile_t stage_of(uint4* memory, int slot) {
    return tile_t{reinterpret_cast<uint16_t*>(memory) + (slot * WARPS_K + team()) * (STAGE_BYTES / 2)};
}

// The copies of a tile's k-tiles first_step ... first_step + steps - 1 to the stages in shared memory, in order. `tile`
// has the rows of both operands that a thread copies, tile.copied_of_a(first) and tile.copied_of_b(first), from element
// `first` on, and the distances of the elements of a row, tile.a_step and tile.b_step.
template <typename Tile>
struct TileCopies {
    // A stage holds the rows of a, then the rows of b.
    OperandCopies<TILE_M, decltype(Tile().copied_of_a(0))> a;
    OperandCopies<TILE_N, decltype(Tile().copied_of_b(0))> b;
    int64_t a_step, b_step;
    int64_t left;  // elements of a row from the next k-tile on; copies of k-tiles after the last one are zeros

    // The thread's first element. What follows from it would take registers until the next tile.
    DEVICE static int64_t first_of(int64_t first_step) {
        return (first_step + team()) * STEP + made_anew(threadIdx.x % 8 * CHUNK);
    }
    DEVICE TileCopies(const Tile& tile, int64_t k, int64_t first_step, int steps)
        : a(tile.copied_of_a(first_of(first_step))),
          b(tile.copied_of_b(first_of(first_step))),
          a_step(tile.a_step),
          b_step(tile.b_step),
          left(min(k, (first_step + steps) * STEP) - first_of(first_step)) {}
    // Begins the copies of the first STAGES - 1 k-tiles of each team.
    DEVICE void begin(uint4* memory) {
        for (int step = 0; step < STAGES - 1; ++step) {
            load(stage_of(memory, step));
            store_held(stage_of(memory, step));
        }
    }
    DEVICE void load(const tile_t& stage) {
        a.load(stage, 0, a_step, left);
        b.load(stage, TILE_M, b_step, left);
        left -= WARPS_K * STEP;
        cp_async_commit();
    }
    DEVICE void store_held(const tile_t& stage) const {
        a.held.store(stage, 0);
        b.held.store(stage, TILE_M);
    }
};

// Adds the MMAs of a tile's `steps` k-tiles to the accumulators of the teams, after their copies have begun. A warp's
// tile begins at (warp_row, warp_column) of the CTA's. With SCALE_BLOCK, scales_of(step) loads the block scales of a
// k-tile, and promote(scales) is called after its MMAs.
template <typename Copies, typename ScalesOf, typename Promote>
DEVICE void multiply_tile(sum_t (&accum)[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS], Copies& copies, uint4* memory,
                          int steps, int warp_row, int warp_column, const ScalesOf& scales_of, const Promote& promote) {
    // Afterwards the warp can read the next stage, and the stage before the present one can be filled.
    const auto next_stage = [] {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
    };
    const int own_steps = ceil_div(steps, WARPS_K);
    decltype(scales_of(0)) scales;
    const auto begin = [&](int step) {
        if constexpr (SCALES_EARLY) scales = scales_of(step);
    };
    const auto end = [&](int step) {
        if constexpr (SCALE_BLOCK > 0 && !SCALES_EARLY) scales = scales_of(step);
        if constexpr (SCALE_BLOCK > 0) promote(scales);
    };
    if constexpr (PREFETCHES) {
        using operands_t = Fragments<scalar_t, LOAD_WORDS>;
        multiply_ahead<operands_t>(
            own_steps, [&](int slot) { copies.load(stage_of(memory, slot)); },
            [&](int step) {
                copies.store_held(stage_of(memory, step % STAGES));
                next_stage();
            },
            [&](operands_t& operands, int slot, int part) {
                operands.load(stage_of(memory, slot), warp_row, TILE_M + warp_column, part);
            },
            [&](const operands_t& operands, int) { operands.multiply(accum); }, begin, end);
    } else {
        for (int step = 0; step < own_steps; ++step) {
            next_stage();
            copies.load(stage_of(memory, (step + STAGES - 1) % STAGES));
            begin(step);
            multiply_step(accum, stage_of(memory, step % STAGES), warp_row, TILE_M + warp_column);
            copies.store_held(stage_of(memory, (step + STAGES - 1) % STAGES));
            end(step);
        }
    }
    cp_async_wait<0>();
}

// The accumulators of a thread: those of its team's share of the tile, over all k-tiles of the block. get(i, j, l) is
// accumulator l of MMA tile (i, j) of the thread's own k-tiles. With teams, they pass through `memory`, the stages, and
// are added in the order of the teams.
template <typename Sum, typename Get>
DEVICE void add_teams(Sum (&result)[OUT_SUMS], uint4* memory, const Get& get) {
    if constexpr (WARPS_K == 1) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            result[i] = get(i / (COLUMN_TILES * PRODUCT_SUMS), i / PRODUCT_SUMS % COLUMN_TILES, i % PRODUCT_SUMS);
        }
    } else {
        constexpr int FOURS = PRODUCT_SUMS / 4, ROW_FOURS = COLUMN_TILES * FOURS, OUT_FOURS = OUT_TILES * FOURS;
        static_assert(TEAM_THREADS * SUMS * 4 <= STAGES * STAGE_BYTES);
        using four_t = Vec<Sum, 4>;
        four_t* const fours = reinterpret_cast<four_t*>(memory) + thread_of_team();
        __syncthreads();  // the teams have read the stages
#pragma unroll
        for (int i = 0; i < SUMS / 4; ++i) {
            four_t four;
#pragma unroll
            for (int j = 0; j < 4; ++j) four.data[j] = get(i / ROW_FOURS, i % ROW_FOURS / FOURS, i % FOURS * 4 + j);
            fours[(team() * (SUMS / 4) + i) * TEAM_THREADS] = four;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OUT_SUMS; ++i) result[i] = 0;
#pragma unroll
        for (int from = 0; from < WARPS_K; ++from) {
#pragma unroll
            for (int i = 0; i < OUT_SUMS / 4; ++i) {
                const int at = i / OUT_FOURS * ROW_FOURS + team() * OUT_FOURS + i % OUT_FOURS;
                const four_t four = fours[(from * (SUMS / 4) + at) * TEAM_THREADS];
#pragma unroll
                for (int j = 0; j < 4; ++j) result[i * 4 + j] += four.data[j];
            }
        }
    }
}
