// wq_gemm_sm80_large_m: the weight-only quantized GEMM for large M on tensor cores by mma.sync: sm_80 and later.
//
//     w[k, n] = T(scale[g, n] * (quant[k, n] - zero[g, n]))    g: the group of row k    T: scalar_t
//     ADDED: w[k, n] = T(scale[g, n] * (quant[k, n] - ZERO_POINT) + zeros[g, n])
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to sum_k a[m, k] * w[k, n], in float32
//
// Operands are swapped (swap-AB): 16 columns of w are the M of an MMA, 8 rows of a its N. A lane dequantizes the A
// operands of its MMAs in registers, each once for all TILE_M rows of its warp.
//
// Warps: WARPS_M x WARPS_N warps share a tile of BLOCK_M rows and BLOCK_N columns of out; a warp has TILE_M rows and
// TILE_N columns of it. A CTA takes a tile of each wave, down the rows of the same columns first. CUT: the last,
// partial wave is scheduled by stream-K (stream_k.cuh). WARPS_K teams of such warps take every WARPS_K-th k-tile, and
// add up their accumulators in shared memory.
//
// GROUPED: rows of out belong to experts, each with its own weight. Rows of a tile are slots of the lists that
// moe_align_block_size has written (grouped.cuh): row t of out is row t / top_k of a times the weight of its block's
// expert, times topk_weights[t] if ROUTED. Rows without a valid expert are not written.
//
// wq_grouped_gemm_sm80_large_m: the same for MoE with weights that are packed along K; e is the expert of row t.
//
//     w[e, r, k] = T(scale[e, r, g] * (quant[e, r, k] - zero[e, r, g])); g: k / GROUP_SIZE
//     accum[t, r] = sum_k a[t / top_k, k] * w[e, r, k]
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n], and to the gate or up that is paired with it
//
// GATED: the first half of a block of 16 columns are gates, the second half their ups, so that one thread has both.
//
// K-tiles: 64 rows of w, STAGES of them in shared memory. cp.async brings rows of a, quants, scales and zero points
// STAGES - 1 k-tiles ahead. The operands of a part of a k-tile, an MMA deep in K or with some layouts a unit, are read
// from shared memory while the previous part is multiplied, where registers allow (AHEAD). wq_fragment.cuh describes
// the words of a lane. Of weights that are packed along K, lanes load scales and zero points to registers, a group
// ahead.
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1
//     BITS, EXPONENT, RECODED, HAS_SCALES, scale_t, SCALE, GROUP_SCALE_EXPONENT, SCALE_ORDER, ZERO_CODES, ZERO_POINT,
//     ZERO_FLOATS, ADDED, GROUP_SIZE    of the weight: packed_weight.cuh; K is a multiple of the k-tile
//     LAYOUT        layout of the quants, which has an MmaUnit: packed_layout.cuh
//     TILE_M        rows of a warp: a multiple of 16
//     TILE_N        columns of a warp: 64
//     WARPS_M, WARPS_N    warps along both: WARPS_M is 1 or 2
//     WARPS_K       teams of these warps, which split K: 1 with experts
//     STAGES        k-tiles of a team in shared memory: 2 or more
//     CUT           whether the last wave is scheduled by stream-K: not with experts
//     MIN_BLOCKS    CTAs per SM that the registers must allow
//     GROUPED, ROUTED    whether rows belong to experts, and have routing weights; BLOCK_M divides block_size
//     HELD          false

constexpr bool SHORT_STEPS = true;
#include "column_terms.cuh"
#include "grouped.cuh"
#include "stream_k.cuh"
#include "wq_fragment.cuh"

// Warps with the same rows of w.
constexpr int TEAM_WARPS = WARPS_M * WARPS_N, TEAM_THREADS = TEAM_WARPS * 32;
constexpr int NUM_THREADS = WARPS_K * TEAM_THREADS;
constexpr int BLOCK_M = WARPS_M * TILE_M, BLOCK_N = WARPS_N * TILE_N;
// A thread copies its chunk, 16 bytes of K, of rows of a with this stride.
constexpr int ROWS_APART = TEAM_THREADS / A_CHUNKS;
#include "operand_rows.cuh"

// A stage in shared memory: rows of a, quants, scales of the groups, zero points.
constexpr int ROW_BYTES = A_CHUNKS * 16, BLOCK_QUANTS_AT = BLOCK_M * ROW_BYTES;
constexpr bool K_MAJOR = mma_unit_t::K_MAJOR;  // weights packed along K: lanes load scales and zero points
constexpr int STAGED_SCALE_BYTES = K_MAJOR ? 0 : SCALE_BYTES, STAGED_ZERO_BYTES = K_MAJOR ? 0 : ZERO_BYTES;
constexpr int SCALES_AT = BLOCK_QUANTS_AT + WARPS_N * UNITS * UNIT_BYTES;
constexpr int ZEROS_AT = SCALES_AT + GROUPS * WARPS_N * STAGED_SCALE_BYTES;
constexpr int BLOCK_STAGE_BYTES = ZEROS_AT + GROUPS * WARPS_N * STAGED_ZERO_BYTES;
// The parts of a k-tile, each with the MMAs of PART_PRODUCTS times 16 rows.
constexpr int PART_PRODUCTS = Rows::BY_PRODUCT ? 1 : PRODUCTS, PARTS = UNITS * PRODUCTS / PART_PRODUCTS;
constexpr int GROUP_PARTS = PARTS / GROUPS;  // parts of a group within a k-tile
constexpr int FRAGMENTS = TILES * ROW_TILES, PART_WORDS = PART_PRODUCTS * (ROW_TILES * 2 + WORDS / PRODUCTS);
// Of 255 registers; quants that are converted by nibbles take more of them.
constexpr bool AHEAD = FRAGMENTS * 4 + 2 * PART_WORDS <= (quants_t::TERMS == 1 ? 176 : 168) && PARTS % 2 == 0;
// The epilogue passes 16 rows of a warp through shared memory, with a stride of a chunk more to avoid bank conflicts.
constexpr int OUT_N = GATED ? TILE_N / 2 : TILE_N;  // columns of out of a warp
constexpr int STORE_ROWS = 16, STORE_PITCH = OUT_N + 8, STORE_CHUNKS = OUT_N / 8;
// K_MAJOR: rows of the weight between a lane's columns of two blocks. GATED: the halves of a block are gates and ups.
constexpr int BLOCK_ROWS = GATED == 1 ? 8 : 16;
// K_MAJOR: 8-bit two's complement integers are raised by 128, which is then their zero point.
constexpr bool IS_SIGNED = K_MAJOR && BITS == 8 && !HAS_SCALES;
static_assert(TILE_N == 64 && TILE_M % 16 == 0 && A_CHUNKS == 8 && sizeof(out_t) == 2);
static_assert(PARTS % GROUPS == 0 && (PARTS % 2 == 0 || !AHEAD));
static_assert(Unit::COPIES % WARPS_M == 0 && STAGES >= 2 &&
              TEAM_WARPS * STORE_ROWS * STORE_PITCH * 2 <= BLOCK_STAGE_BYTES * STAGES);
static_assert(!IS_SPARSE && BITS != 3 && !HELD && (K_MAJOR || !GATED) && BIAS <= 1 && AZP == 0);
static_assert(GROUPED ? !CUT && WARPS_K == 1 : !ROUTED && !K_MAJOR);

// Without experts, too: rows then have no routing weight, and are those of a.
using epilogue_t = ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED>;

// A warp's accumulators of blocks of 16 columns and 8 rows, the blocks of the same columns one after the other.
using accum_t = float[FRAGMENTS][4];

// The terms of a lane's columns in a group.
struct LaneTerms {
    using terms_t = ColumnTerms<scalar_t>;
    terms_t terms[TILES][2];

    // Loads them from the warp's scales and zero points.
    template <typename MmaUnit = mma_unit_t>
    DEVICE void load(const uint8_t* scales, const uint8_t* zeros) {
        pair_t pairs[TILES][2];
        if constexpr (HAS_SCALES) {
            Terms::spread<scale_t>(pairs, scales, terms_t::twice<scale_t>);
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) terms[i / 2][i % 2].scale = pairs[i / 2][i % 2];
        }
        if constexpr (ADDED || ZERO_FLOATS) {
            Terms::spread<scalar_t>(pairs, zeros, terms_t::added_of);
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) terms[i / 2][i % 2].added = pairs[i / 2][i % 2];
        }
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            uint32_t point = ZERO_POINT;
            if constexpr (ZERO_CODES) {
                const uint32_t* const words = reinterpret_cast<const uint32_t*>(zeros);
                point += MmaUnit::zero_point(words, threadIdx.x % 32 / 4, i / 2, i % 2);
            }
            terms[i / 2][i % 2].zero = quants_t::zero(point);
        }
    }
};

// For the layouts, which ask for raw quants: quants minus the zero point of a column.
struct ShiftedQuants {
    static constexpr bool IS_HALF = false;  // no float16 that is 16 times as large
    const quants_t& decode;
    const quants_t::Zero& zero;
    DEVICE uint32_t raw(uint32_t word, int i, int) const { return decode.pair(word, i, zero).template word<2>(0); }
};

// A warp's operands of a part of a k-tile: quants, and rows of a.
struct Fragments {
    Unit unit;
    uint32_t a[PART_PRODUCTS][ROW_TILES][2];

    DEVICE void load(const uint8_t* rows, const uint8_t* quants, const int (&words_at)[Unit::READS], int part) {
        const int of_unit = part * PART_PRODUCTS / PRODUCTS;
        unit.read(quants + of_unit * UNIT_BYTES, words_at);
#pragma unroll
        for (int i = 0; i < WORDS && IS_SIGNED; ++i) unit.words[i] ^= 0x80808080u;
        Rows{rows}.load(a, of_unit, part * PART_PRODUCTS % PRODUCTS);
    }
    DEVICE void multiply(accum_t& accum, const quants_t& decode, const LaneTerms& lane, int part) const {
#pragma unroll
        for (int i = 0; i < PART_PRODUCTS; ++i) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                uint32_t weights[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const auto& terms = lane.terms[tile][j % 2];
                    const uint32_t pair = mma_unit_t::template pair<RECODED>(
                        unit.words, ShiftedQuants{decode, terms.zero}, (part * PART_PRODUCTS + i) % PRODUCTS, tile,
                        j % 2, j / 2, 0);
                    weights[j] = terms.scaled(word_pair<scalar_t>(pair));
                }
#pragma unroll
                for (int j = 0; j < ROW_TILES; ++j) {
                    mma_m16n8k16<scalar_t>(accum[tile * ROW_TILES + j], weights, a[i][j]);
                }
            }
        }
    }
};

// The rows of the weight of a column of out: its own, and with GATED that of its up.
struct ColumnRows { int64_t own, up; };

// The terms of the lane's columns from the scales and zero points in a stage.
struct StagedTerms {
    LaneTerms lane;

    // Loads those of a group of the k-tile in `stage`.
    template <typename MmaUnit = mma_unit_t>
    DEVICE void load(const uint8_t* stage, int, int group) {
        const int at = group * WARPS_N + threadIdx.x / 32 % WARPS_N;
        lane.load<MmaUnit>(stage + SCALES_AT + at * SCALE_BYTES, stage + ZEROS_AT + at * ZERO_BYTES);
    }
};

// The same from scales and zero points in global memory, [N, groups]: each load is for the next group. With 4 bits a
// byte has the zero points of two adjacent rows of the weight.
struct RowTerms {
    static constexpr int ZERO_ROWS = BITS == 4 ? 2 : 1;
    LaneTerms lane;
    const scale_t* scales;  // of the lane's first row of the weight
    const uint8_t* zeros;
    uint32_t groups, half_rows;  // half_rows: from a row of the first half of a block to that of the second
    int steps;
    uint32_t next[TILES][2];  // a scale, and a zero point in the upper half

    DEVICE void load(const uint8_t*, int step, int group) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            using bits_t = typename word_of<sizeof(scale_t)>::type;
            const bits_t bits = bits_t(next[i / 2][i % 2]);
            auto& terms = lane.terms[i / 2][i % 2];
            if constexpr (HAS_SCALES) terms.scale = terms.twice(reinterpret_cast<const scale_t&>(bits));
            terms.zero = quants_t::zero(ZERO_POINT + (next[i / 2][i % 2] >> 16));
        }
        fetch(step + (group + 1) / GROUPS, (group + 1) % GROUPS);
    }
    // Loads the scales and zero points of a group to `next`.
    DEVICE void fetch(int step, int group) {
        const int first = min(step, steps - 1) * STEP_K + group * (STEP_K / GROUPS);
        const uint32_t at = GROUP_SIZE > 0 ? uint32_t(first) / max(1, GROUP_SIZE) : 0;
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            const int h = i % 2, nibble = BITS == 8 ? 0 : GATED == 2 ? h : threadIdx.x / 4 % 2;
            const uint32_t row = i / 2 * BLOCK_ROWS + h * half_rows;
            uint32_t& both = next[i / 2][h];
            both = 0;
            if constexpr (HAS_SCALES) {
                both = reinterpret_cast<const typename word_of<sizeof(scale_t)>::type*>(scales)[row * groups + at];
            }
            if constexpr (ZERO_CODES) {
                const uint32_t points = zeros[row / ZERO_ROWS * groups + at];
                both |= (points >> nibble * 4 & ((1u << BITS) - 1)) << 16;
            }
        }
    }
};

// The offsets in a stage of the thread's copies, and of the words that a lane reads.
struct StageOffsets {
    int a_to, own_quants, own_rows, quants_to[Unit::COPIES / WARPS_M], words_at[Unit::READS];

    DEVICE StageOffsets() {
        const int thread = threadIdx.x % TEAM_THREADS, warp = thread / 32, lane = thread % 32;
        a_to = Rows::place(thread / A_CHUNKS, thread % A_CHUNKS);
        own_rows = warp / WARPS_N * (TILE_M * ROW_BYTES);
        own_quants = BLOCK_QUANTS_AT + warp % WARPS_N * (UNITS * UNIT_BYTES);
#pragma unroll
        for (int i = 0; i < Unit::COPIES / WARPS_M; ++i) {
            quants_to[i] = own_quants + Unit::piece_at(32 * (i * WARPS_M + warp / WARPS_N) + lane);
        }
#pragma unroll
        for (int i = 0; i < Unit::READS; ++i) words_at[i] = Unit::read_at(i);
    }
};

// The copies of a tile's k-tiles to shared memory, in order.
template <typename CopiedRows>
struct TileCopies {
    CopiedRows rows;         // of a, at the thread's chunk of the next k-tile
    const uint32_t* quants;  // the source of the thread's first copy of the next k-tile
    const void *scales, *zeros;
    int64_t n, pitch;
    int first_block;  // blocks of 64 columns before the tile

    DEVICE void load(uint8_t* stage, const StageOffsets& at, int step) {
#pragma unroll
        for (int i = 0; i < BLOCK_M / ROWS_APART; ++i) {
            cp_async<16>(stage + at.a_to + i * (ROWS_APART * ROW_BYTES), rows.row(i), rows.exists(i));
        }
        rows.advance(WARPS_K * STEP_K);
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
#pragma unroll
            for (int j = 0; j < Unit::COPIES / WARPS_M; ++j) {
                cp_async<16>(stage + at.quants_to[j] + i * UNIT_BYTES, quants + Unit::copy_at(j * WARPS_M, pitch));
            }
            quants += Unit::unit_words(pitch);
        }
        quants += (WARPS_K - 1) * UNITS * Unit::unit_words(pitch);
        const int first_group = GROUP_SIZE > 0 ? int(int64_t(step) * STEP_K / max(1, GROUP_SIZE)) : 0;
        // `bytes` of each block, for each group.
        const auto copy_groups = [&](uint8_t* to, const void* from, int bytes) {
            const int group_pieces = max(1, WARPS_N * bytes / 16), blocks = int(n / TILE_N);
#pragma unroll
            for (int first = 0; first < GROUPS * group_pieces; first += TEAM_THREADS) {
                const int i = first + threadIdx.x % TEAM_THREADS, group = i / group_pieces, piece = i % group_pieces;
                if (i >= GROUPS * group_pieces) continue;
                const int64_t block = int64_t(first_group + group) * blocks + first_block;
                cp_async<16>(to + i * 16, static_cast<const uint8_t*>(from) + block * bytes + piece * 16,
                             first_block + piece * 16 / max(1, bytes) < blocks);
            }
        };
        if constexpr (STAGED_SCALE_BYTES > 0) copy_groups(stage + SCALES_AT, scales, SCALE_BYTES);
        if constexpr (STAGED_ZERO_BYTES > 0) copy_groups(stage + ZEROS_AT, zeros, ZERO_BYTES);
    }
};

// The main loop: adds the MMAs of the k-tiles first ... first + steps - 1 to the warp's accumulators. Afterwards all
// warps have read the last stage.
template <typename Copies, typename Terms>
DEVICE void multiply_tile(accum_t& accum, Copies& copies, Terms& terms, uint8_t* shared, const StageOffsets& at,
                          const quants_t& decode, int first, int steps) {
    const int team = threadIdx.x / TEAM_THREADS;
    const auto stage_of = [&](int step) { return shared + (step % STAGES * WARPS_K + team) * BLOCK_STAGE_BYTES; };
    const auto copy = [&](int step) {
        if (step < steps) copies.load(stage_of(step), at, (first + step) * WARPS_K + team);
        cp_async_commit();
    };
    // Afterwards the warp can read the next stage, and the stage before the present one can be filled.
    const auto next_stage = [] {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
    };
    for (int i = 0; i < STAGES - 1; ++i) copy(i);

    Fragments fragments[AHEAD ? 2 : 1];
    const auto load = [&](Fragments& to, int step, int part) {
        const uint8_t* const stage = stage_of(step);
        to.load(stage + at.own_rows, stage + at.own_quants, at.words_at, part);
    };
    if constexpr (AHEAD) {
        next_stage();
        load(fragments[0], 0, 0);
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const bool is_last = part == PARTS - 1;
            if (!AHEAD && part == 0) next_stage();
            if (part % GROUP_PARTS == 0) terms.load(stage_of(step), step, part / GROUP_PARTS);
            if (AHEAD && is_last) next_stage();
            if (AHEAD && (!is_last || step + 1 < steps)) {
                load(fragments[(part + 1) % 2], step + is_last, (part + 1) % PARTS);
            }
            if (!AHEAD) load(fragments[0], step, part);
            if (part == 0) copy(step + STAGES - 1);
            fragments[AHEAD ? part % 2 : 0].multiply(accum, decode, terms.lane, part);
        }
    }
    cp_async_wait<0>();
    __syncthreads();
}

// Adds the accumulators of the other teams to those of the first.
DEVICE void add_teams(accum_t& accum, uint8_t* shared) {
    static_assert(WARPS_K == 1 || FRAGMENTS * TEAM_THREADS * 16 <= WARPS_K * STAGES * BLOCK_STAGE_BYTES);
    if constexpr (WARPS_K == 1) return;
    using four_t = Vec<float, 4>;
    const int team = threadIdx.x / TEAM_THREADS;
    four_t* const fours = reinterpret_cast<four_t*>(shared) + threadIdx.x % TEAM_THREADS;
#pragma unroll 1
    for (int other = 1; other < WARPS_K; ++other) {
        if (team == other) {
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
                fours[i * TEAM_THREADS] = four_t{{accum[i][0], accum[i][1], accum[i][2], accum[i][3]}};
            }
        }
        __syncthreads();
        if (team == 0) {
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
                const four_t four = fours[i * TEAM_THREADS];
#pragma unroll
                for (int j = 0; j < 4; ++j) accum[i][j] += four.data[j];
            }
        }
        __syncthreads();
    }
}

// Applies the epilogue to the accumulators of a warp and stores them, from column `own_column` of out on. row_of(i) is
// the row of out of the tile's row i, negative if there is none. b_rows_of(i) is the row of the weight of column i of
// out, and with GATED that of its up. activated(x, y) is the element of out of both.
template <typename RowOf, typename RowsOf, typename Activated>
DEVICE void
store_tile(const accum_t& accum, uint8_t* shared, const epilogue_t& epilogue, out_t* out, int64_t out_stride,
           int64_t own_column, const RowOf& row_of, const RowsOf& b_rows_of, const Activated& activated) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    out_t* const store = reinterpret_cast<out_t*>(shared) + warp * (STORE_ROWS * STORE_PITCH);
#pragma unroll
    for (int part = 0; part < TILE_M / STORE_ROWS; ++part) {
        const int part_row = warp / WARPS_N * TILE_M + part * STORE_ROWS;
        const auto row_at = [](int j) { return j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2; };
        typename epilogue_t::Row of_rows[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) of_rows[j] = epilogue.row(max(row_of(part_row + row_at(j)), int64_t(0)));
        sync_warp();  // the previous part is stored
#pragma unroll
        for (int i = 0; i < OUT_N / 8; ++i) {
            const int tile = GATED ? i : i / 2, h = GATED ? 0 : i % 2;
            const int column = GATED ? tile * 8 + lane / 4 : Unit::column(lane / 4, tile, h);
            const ColumnRows rows = b_rows_of(own_column + column);
            const auto of_column = epilogue.column(rows.own), of_up = epilogue.column(rows.up);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* const of_block = accum[tile * ROW_TILES + part * 2 + j / 2];
                const float x = epilogue.value(of_rows[j], of_column, of_block[h * 2 + j % 2] * quants_t::SUM_FACTOR);
                const float y =
                    GATED ? epilogue.value(of_rows[j], of_up, of_block[2 + j % 2] * quants_t::SUM_FACTOR) : x;
                store[row_at(j) * STORE_PITCH + column] = from_float<out_t>(activated(x, y));
            }
        }
        sync_warp();
#pragma unroll
        for (int i = 0; i < STORE_ROWS * STORE_CHUNKS / 32; ++i) {
            const int local = i * (32 / STORE_CHUNKS) + lane / STORE_CHUNKS, first = lane % STORE_CHUNKS * 8;
            const int64_t row = row_of(part_row + local);
            if (row < 0) continue;
            Vec<out_t, 8>::load(store + local * STORE_PITCH + first).store(out + row * out_stride + own_column + first);
        }
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
wq_gemm_sm80_large_m(out_t* out,                 // [M, N]
                     const scalar_t* a,          // [M, K]
                     const uint32_t* quants,     // [K, N] by LAYOUT
                     const scale_t* scales,      // [groups, N] by SCALE_ORDER
                     const void* zeros,          // [groups, N BITS / 32] words; or [groups, N] scalar_t by SCALE_ORDER
                     const a_scale_t* a_scales,  // [M] or [1]
                     const b_scale_t* b_scales,  // [N] or [1]
                     const out_t* bias,          // [N]
                     const int32_t* sorted_token_ids,     // GROUPED: [M]; values are not trusted
                     const int32_t* expert_ids,           // [M / block_size]
                     const int32_t* num_tokens_post_pad,  // [1]
                     const float* topk_weights,           // [num_rows]
                     float* partial,                      // CUT: partial accumulators of stream_k.cuh, and counters
                     uint32_t* arrived, int64_t m, int64_t n, int64_t k, int64_t groups, int64_t a_stride,
                     int64_t out_stride, int64_t a_scale_step, int64_t b_scale_step, int64_t num_rows,
                     int64_t num_experts, int64_t block_size, int64_t top_k, int64_t sharers) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ int row_ids[BLOCK_M];  // GROUPED: rows of out; -1: padding
    uint8_t* const shared = reinterpret_cast<uint8_t*>(memory);
    const int team = threadIdx.x / TEAM_THREADS, thread = threadIdx.x % TEAM_THREADS;
    const int warp_m = thread / 32 / WARPS_N, warp_n = thread / 32 % WARPS_N;
    const int row = thread / A_CHUNKS, chunk = thread % A_CHUNKS;
    const int64_t pitch = Unit::pitch(n, k);
    const int64_t in_use = GROUPED ? min(m, int64_t(max(*num_tokens_post_pad, 0))) : m;
    const int row_tiles = int((in_use + BLOCK_M - 1) / BLOCK_M), column_tiles = int((n + BLOCK_N - 1) / BLOCK_N);
    const StageOffsets at;
    const quants_t decode;

    CutTile<CUT> tile(row_tiles * column_tiles, 0, int(k / (WARPS_K * STEP_K)), int(sharers));
    for (; tile.exists(); tile.advance()) {
        const int row_tile = tile.number % row_tiles;
        const int64_t first_row = int64_t(row_tile) * BLOCK_M;
        const int64_t first_column = int64_t(tile.number / row_tiles) * BLOCK_N;
        // Warps without columns multiply the last ones, and store nothing.
        const int64_t own_column = first_column + warp_n * TILE_N;
        const int64_t step = int64_t(tile.first) * WARPS_K + team;
        const int64_t unit = step * UNITS, first_k = step * STEP_K + chunk * 8;
        __syncthreads();  // the previous tile is stored from shared memory
        int64_t expert = 0;
        if constexpr (GROUPED) {
            const ExpertTiles<BLOCK_M> lists(sorted_token_ids, expert_ids, num_tokens_post_pad, num_rows, num_experts,
                                             block_size / BLOCK_M, m / BLOCK_M);
            expert = lists.number(row_tile);
            if (expert < 0 || expert >= num_experts) continue;
            if (!lists.template load<NUM_THREADS>(row_tile, row_ids)) continue;
        }
        const auto copied_rows = [&] {
            if constexpr (GROUPED) {
                return scattered_rows<BLOCK_M>(a, a_stride, first_k, int(top_k), [&](int i) { return row_ids[i]; });
            } else {
                return strided_rows(a + first_k, first_row + row, a_stride, ROWS_APART, m - first_row - row);
            }
        };
        TileCopies<decltype(copied_rows())> copies{
            copied_rows(),
            quants + expert * (k * n * BITS / 32) + Unit::place(min(own_column, n - TILE_N), pitch) +
                (unit * Unit::LINES + Unit::line()) * Unit::line_words(pitch) + Unit::copy_at(warp_m, pitch),
            scales + (HAS_SCALES ? expert * groups * n : 0),
            static_cast<const uint8_t*>(zeros) + expert * groups * n * ZERO_BYTES / TILE_N,
            n,
            pitch,
            int(first_column / TILE_N)};
        accum_t accum = {};
        StagedTerms terms;
        multiply_tile(accum, copies, terms, shared, at, decode, tile.first, tile.last - tile.first);
        add_teams(accum, shared);
        if (team > 0 || !tile.template complete<TEAM_WARPS>(accum, partial, arrived)) continue;
        if (own_column >= n) continue;
        // Per expert: one scale of the whole weight (as a_scales), a scale of each column, and a bias.
        const epilogue_t epilogue{topk_weights,
                                  a_scales + (A_SCALES ? expert : 0),
                                  b_scales + (B_SCALES ? expert * n : 0),
                                  bias + (BIAS > 0 ? expert * n : 0),
                                  1,
                                  a_scale_step,
                                  b_scale_step};
        const auto row_of = [&](int i) {
            if constexpr (GROUPED) return int64_t(row_ids[i]);
            else return first_row + i < m ? first_row + i : int64_t(-1);
        };
        store_tile(
            accum, shared, epilogue, out, out_stride, own_column, row_of,
            [](int64_t column) { return ColumnRows{column, column}; },
            [](float x, float) { return ACTIVATION<out_t>(x); });
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
wq_grouped_gemm_sm80_large_m(out_t* out,                          // [num_rows, N]
                             const scalar_t* a,                   // [num_rows / top_k, K]
                             const uint32_t* quants,              // [E, b_rows, K * BITS / 32]
                             const scale_t* scales,               // [E, b_rows, groups]
                             const uint8_t* zeros,                // [E, b_rows * BITS / 8, groups]
                             const int32_t* sorted_token_ids,     // [max_tiles * BLOCK_M] at least
                             const int32_t* expert_ids,           // [max_tiles / block_tiles] at least
                             const int32_t* num_tokens_post_pad,  // one element
                             const float* topk_weights,           // [num_rows]
                             const b_scale_t* row_scales,         // [E, b_rows] or [E]
                             const out_t* bias,                   // [E, b_rows]
                             int64_t num_rows, int64_t n, int64_t k, int64_t groups, int64_t top_k, int64_t num_experts,
                             int64_t block_tiles, int64_t max_tiles, int64_t a_stride, int64_t out_stride,
                             int64_t b_scale_expert_step, int64_t b_scale_step) {
    static_assert(!A_SCALES);
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ int row_ids[BLOCK_M];  // rows of out; -1: padding
    uint8_t* const shared = reinterpret_cast<uint8_t*>(memory);
    const int lane = threadIdx.x % 32, warp_m = threadIdx.x / 32 / WARPS_N, warp_n = threadIdx.x / 32 % WARPS_N;
    const int64_t b_rows = GATED ? 2 * n : n, pitch = k * BITS / 32;
    const ExpertTiles<BLOCK_M> lists(sorted_token_ids, expert_ids, num_tokens_post_pad, num_rows, num_experts,
                                     block_tiles, max_tiles);
    const int column_tiles = int((n + WARPS_N * OUT_N - 1) / (WARPS_N * OUT_N)), steps = int(k / STEP_K);
    const int64_t half_rows = GATED == 1 ? n : GATED == 2 ? 1 : 8;
    const StageOffsets at;
    const quants_t decode;

    for (int number = blockIdx.x; number < lists.tiles * column_tiles; number += gridDim.x) {
        const int tile = number % lists.tiles;
        const int64_t own_column = (int64_t(number / lists.tiles) * WARPS_N + warp_n) * OUT_N;
        const int64_t expert = lists.number(tile);
        __syncthreads();  // the previous tile is stored from shared memory
        if (expert < 0 || expert >= num_experts) continue;
        if (!lists.template load<NUM_THREADS>(tile, row_ids)) continue;
        // Warps without columns multiply the last ones, and store nothing.
        const int64_t first_b_row = expert * b_rows + min(own_column, n - OUT_N) * (GATED == 2 ? 2 : 1);
        // The row of the weight of column g of the first block, or of half h.
        const auto b_row = [&](int g, int h) { return first_b_row + (GATED == 2 ? 2 * g : g) + h * half_rows; };
        const int64_t copied = b_row(lane % 8, lane / 8 % 2) + lane / 16 * BLOCK_ROWS, own_row = b_row(lane / 4, 0);
        auto rows = scattered_rows<BLOCK_M>(a, a_stride, threadIdx.x % A_CHUNKS * 8, int(top_k),
                                            [&](int i) { return row_ids[i]; });
        TileCopies<decltype(rows)> copies{
            rows, quants + copied * pitch + Unit::copy_at(warp_m, pitch), nullptr, nullptr, n, pitch, 0};
        RowTerms terms;
        terms.scales = scales + (HAS_SCALES ? own_row * groups : 0);
        terms.zeros = zeros + (ZERO_CODES ? own_row / RowTerms::ZERO_ROWS * groups : 0);
        terms.groups = uint32_t(groups);
        terms.half_rows = uint32_t(half_rows);
        terms.steps = steps;
        terms.fetch(0, 0);
        accum_t accum = {};
        multiply_tile(accum, copies, terms, shared, at, decode, 0, steps);
        if (own_column >= n) continue;
        const epilogue_t epilogue{
            topk_weights, nullptr, row_scales + expert * b_scale_expert_step, bias + expert * b_rows, int(top_k), 0,
            b_scale_step};
        const auto rows_of = [&](int64_t column) {
            return GATED == 2 ? ColumnRows{2 * column, 2 * column + 1}
                              : ColumnRows{column, GATED == 1 ? n + column : column};
        };
        store_tile(
            accum, shared, epilogue, out, out_stride, own_column, [&](int i) { return int64_t(row_ids[i]); }, rows_of,
            [](float x, float y) { return epilogue_t::activated(x, y); });
    }
}
