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
// partial wave is scheduled by stream-K (stream_k.cuh).
//
// GROUPED: rows of out belong to experts, each with its own weight. Rows of a tile are slots of the lists that
// moe_align_block_size has written (grouped.cuh): row t of out is row t / top_k of a times the weight of its block's
// expert, times topk_weights[t] if ROUTED. Rows without a valid expert are not written.
//
// K-tiles: 64 rows of w, STAGES of them in shared memory. cp.async brings rows of a, quants, scales and zero points
// STAGES - 1 k-tiles ahead. The operands of a part of a k-tile, an MMA deep in K or with some layouts a unit, are read
// from shared memory while the previous part is multiplied, where registers allow (AHEAD). wq_fragment.cuh describes
// the words of a lane.
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1, GATED false
//     BITS, EXPONENT, RECODED, HAS_SCALES, scale_t, SCALE, GROUP_SCALE_EXPONENT, SCALE_ORDER, ZERO_CODES, ZERO_POINT,
//     ZERO_FLOATS, ADDED, GROUP_SIZE    of the weight: packed_weight.cuh; K is a multiple of the k-tile
//     LAYOUT        layout of the quants, which has an MmaUnit: packed_layout.cuh
//     TILE_M        rows of a warp: a multiple of 16
//     TILE_N        columns of a warp: 64
//     WARPS_M, WARPS_N    warps along both: WARPS_M is 1 or 2
//     STAGES        k-tiles in shared memory: 2 or more
//     CUT           whether the last wave is scheduled by stream-K: not with experts
//     MIN_BLOCKS    CTAs per SM that the registers must allow
//     GROUPED, ROUTED    whether rows belong to experts, and have routing weights; BLOCK_M divides block_size
//     HELD          false

constexpr bool SHORT_STEPS = true;
#include "column_terms.cuh"
#include "stream_k.cuh"
#include "wq_fragment.cuh"

constexpr int NUM_WARPS = WARPS_M * WARPS_N, NUM_THREADS = NUM_WARPS * 32;
constexpr int BLOCK_M = WARPS_M * TILE_M, BLOCK_N = WARPS_N * TILE_N;
// A thread copies its chunk, 16 bytes of K, of rows of a with this stride.
constexpr int ROWS_APART = NUM_THREADS / A_CHUNKS;
#include "operand_rows.cuh"

// A stage in shared memory: rows of a, quants, scales of the groups, zero points.
constexpr int ROW_BYTES = A_CHUNKS * 16, BLOCK_QUANTS_AT = BLOCK_M * ROW_BYTES;
constexpr int SCALES_AT = BLOCK_QUANTS_AT + WARPS_N * UNITS * UNIT_BYTES;
constexpr int ZEROS_AT = SCALES_AT + GROUPS * WARPS_N * SCALE_BYTES;
constexpr int BLOCK_STAGE_BYTES = ZEROS_AT + GROUPS * WARPS_N * ZERO_BYTES;
// The parts of a k-tile, each with the MMAs of PART_PRODUCTS times 16 rows.
constexpr int PART_PRODUCTS = Rows::BY_PRODUCT ? 1 : PRODUCTS, PARTS = UNITS * PRODUCTS / PART_PRODUCTS;
constexpr int GROUP_PARTS = PARTS / GROUPS;  // parts of a group within a k-tile
constexpr int FRAGMENTS = TILES * ROW_TILES, PART_WORDS = PART_PRODUCTS * (ROW_TILES * 2 + WORDS / PRODUCTS);
// Of 255 registers; quants that are converted by nibbles take more of them.
constexpr bool AHEAD = FRAGMENTS * 4 + 2 * PART_WORDS <= (quants_t::TERMS == 1 ? 176 : 168) && PARTS % 2 == 0;
// The epilogue passes 16 rows of a warp through shared memory, with a stride of a chunk more to avoid bank conflicts.
constexpr int STORE_ROWS = 16, STORE_PITCH = TILE_N + 8;
static_assert(TILE_N == 64 && TILE_M % 16 == 0 && A_CHUNKS == 8 && sizeof(out_t) == 2);
static_assert(PARTS % GROUPS == 0 && (PARTS % 2 == 0 || !AHEAD));
static_assert(Unit::COPIES % WARPS_M == 0 && STAGES >= 2 &&
              NUM_WARPS * STORE_ROWS * STORE_PITCH * 2 <= BLOCK_STAGE_BYTES * STAGES);
static_assert(!IS_SPARSE && BITS != 3 && !HELD && !GATED && BIAS <= 1 && AZP == 0);
static_assert(GROUPED ? !CUT : !ROUTED);

using epilogue_t = Epilogue<out_t, A_SCALES, B_SCALES, 0, BIAS, SCALE_EXPONENT>;

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

using copied_rows_t = conditional_t<GROUPED, ScatteredRows<BLOCK_M / ROWS_APART>, StridedRows>;

// The copies of a tile's k-tiles to shared memory, in order.
struct TileCopies {
    copied_rows_t rows;      // of a, at the thread's chunk of the next k-tile
    const uint32_t* quants;  // the source of the thread's first copy of the next k-tile
    const void *scales, *zeros;
    int64_t n, pitch;
    int first_block;  // blocks of 64 columns before the tile

    DEVICE void load(uint8_t* stage, int a_to, const int (&quants_to)[Unit::COPIES / WARPS_M], int step) {
#pragma unroll
        for (int i = 0; i < BLOCK_M / ROWS_APART; ++i) {
            cp_async<16>(stage + a_to + i * (ROWS_APART * ROW_BYTES), rows.row(i), rows.exists(i));
        }
        rows.advance(STEP_K);
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
#pragma unroll
            for (int j = 0; j < Unit::COPIES / WARPS_M; ++j) {
                cp_async<16>(stage + quants_to[j] + i * UNIT_BYTES, quants + Unit::copy_at(j * WARPS_M, pitch));
            }
            quants += Unit::unit_words(pitch);
        }
        const int first_group = GROUP_SIZE > 0 ? int(int64_t(step) * STEP_K / max(1, GROUP_SIZE)) : 0;
        // `bytes` of each block, for each group.
        const auto copy_groups = [&](uint8_t* to, const void* from, int bytes) {
            const int group_pieces = max(1, WARPS_N * bytes / 16), blocks = int(n / TILE_N);
#pragma unroll
            for (int first = 0; first < GROUPS * group_pieces; first += NUM_THREADS) {
                const int i = first + threadIdx.x, group = i / group_pieces, piece = i % group_pieces;
                if (i >= GROUPS * group_pieces) continue;
                const int64_t block = int64_t(first_group + group) * blocks + first_block;
                cp_async<16>(to + i * 16, static_cast<const uint8_t*>(from) + block * bytes + piece * 16,
                             first_block + piece * 16 / max(1, bytes) < blocks);
            }
        };
        if constexpr (SCALE_BYTES > 0) copy_groups(stage + SCALES_AT, scales, SCALE_BYTES);
        if constexpr (ZERO_BYTES > 0) copy_groups(stage + ZEROS_AT, zeros, ZERO_BYTES);
    }
};

// Loads the rows of out of a tile's slots, -1 for padding, and returns whether there is any. All threads call.
DEVICE bool load_rows(int (&rows)[GROUPED ? BLOCK_M : 1], const int32_t* slots, int64_t num_rows) {
    constexpr int COUNT = GROUPED ? BLOCK_M : 1;
    for (int i = threadIdx.x; i < COUNT; i += NUM_THREADS) {
        rows[i] = slots[i] >= 0 && slots[i] < num_rows ? slots[i] : -1;
    }
    __syncthreads();
    bool any = false;
    for (int i = threadIdx.x % 32; i < COUNT; i += 32) any |= rows[i] >= 0;
    return any_lane(any);
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
    __shared__ int row_ids[GROUPED ? BLOCK_M : 1];  // rows of out; -1: padding
    uint8_t* const shared = reinterpret_cast<uint8_t*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_m = warp / WARPS_N, warp_n = warp % WARPS_N;
    const int64_t pitch = Unit::pitch(n, k);
    const int64_t in_use = GROUPED ? min(m, int64_t(max(*num_tokens_post_pad, 0))) : m;
    const int row_tiles = int((in_use + BLOCK_M - 1) / BLOCK_M), column_tiles = int((n + BLOCK_N - 1) / BLOCK_N);
    const auto stage_of = [&](int step) { return shared + step % STAGES * BLOCK_STAGE_BYTES; };
    // Offsets in a stage: of the thread's copies, and of the words that a lane reads.
    const int row = threadIdx.x / A_CHUNKS, chunk = threadIdx.x % A_CHUNKS, a_to = Rows::place(row, chunk);
    const int own_quants = BLOCK_QUANTS_AT + warp_n * (UNITS * UNIT_BYTES);
    int quants_to[Unit::COPIES / WARPS_M], words_at[Unit::READS];
#pragma unroll
    for (int i = 0; i < Unit::COPIES / WARPS_M; ++i) {
        quants_to[i] = own_quants + Unit::piece_at(32 * (i * WARPS_M + warp_m) + lane);
    }
#pragma unroll
    for (int i = 0; i < Unit::READS; ++i) words_at[i] = Unit::read_at(i);
    const quants_t decode;

    CutTile<CUT> tile(row_tiles * column_tiles, 0, int(k / STEP_K), int(sharers));
    for (; tile.exists(); tile.advance()) {
        const int64_t first_row = int64_t(tile.number % row_tiles) * BLOCK_M;
        const int64_t first_column = int64_t(tile.number / row_tiles) * BLOCK_N;
        // Warps without columns multiply the last ones, and store nothing.
        const int64_t own_column = first_column + warp_n * TILE_N;
        const int64_t unit = int64_t(tile.first) * UNITS;
        const int64_t expert = GROUPED ? int64_t(expert_ids[first_row / block_size]) : 0;
        if (GROUPED && (expert < 0 || expert >= num_experts)) continue;
        __syncthreads();  // the previous tile is stored from shared memory
        if constexpr (GROUPED) {
            if (!load_rows(row_ids, sorted_token_ids + first_row, num_rows)) continue;
        }
        const auto copied_rows = [&] {
            const int64_t first = int64_t(tile.first) * STEP_K + chunk * 8;
            if constexpr (GROUPED) {
                return scattered_rows<BLOCK_M>(a, a_stride, first, int(top_k), [&](int i) { return row_ids[i]; });
            } else {
                return strided_rows(a + first, first_row + row, a_stride, ROWS_APART, m - first_row - row);
            }
        };
        TileCopies copies{copied_rows(),
                          quants + expert * (k * n * BITS / 32) + Unit::place(min(own_column, n - TILE_N), pitch) +
                              (unit * Unit::LINES + Unit::line()) * Unit::line_words(pitch) +
                              Unit::copy_at(warp_m, pitch),
                          scales + (HAS_SCALES ? expert * groups * n : 0),
                          static_cast<const uint8_t*>(zeros) + expert * groups * n * ZERO_BYTES / TILE_N,
                          n,
                          pitch,
                          int(first_column / TILE_N)};
        const int steps = tile.last - tile.first;
        const auto copy = [&](int step) {
            if (step < steps) copies.load(stage_of(step), a_to, quants_to, tile.first + step);
            cp_async_commit();
        };
        // Afterwards the warp can read the next stage, and the stage before the present one can be filled.
        const auto next_stage = [] {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
        };
        for (int i = 0; i < STAGES - 1; ++i) copy(i);

        accum_t accum = {};
        Fragments fragments[AHEAD ? 2 : 1];
        LaneTerms terms;
        const auto load = [&](Fragments& to, int step, int part) {
            const uint8_t* const stage = stage_of(step);
            to.load(stage + warp_m * (TILE_M * ROW_BYTES), stage + own_quants, words_at, part);
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
                if (part % GROUP_PARTS == 0) {
                    const uint8_t* const of_group = stage_of(step);
                    const int at = part / GROUP_PARTS * WARPS_N + warp_n;
                    terms.load(of_group + SCALES_AT + at * SCALE_BYTES, of_group + ZEROS_AT + at * ZERO_BYTES);
                }
                if (AHEAD && is_last) next_stage();
                if (AHEAD && (!is_last || step + 1 < steps)) {
                    load(fragments[(part + 1) % 2], step + is_last, (part + 1) % PARTS);
                }
                if (!AHEAD) load(fragments[0], step, part);
                if (part == 0) copy(step + STAGES - 1);
                fragments[AHEAD ? part % 2 : 0].multiply(accum, decode, terms, part);
            }
        }
        cp_async_wait<0>();
        __syncthreads();  // all warps have read the last stage
        if (!tile.template complete<NUM_WARPS>(accum, partial, arrived)) continue;

        out_t* const store = reinterpret_cast<out_t*>(shared) + warp * (STORE_ROWS * STORE_PITCH);
        if (own_column >= n) continue;
        // Per expert: one scale of the whole weight (as a_scales), a scale of each column, and a bias.
        const epilogue_t epilogue{a_scales + (A_SCALES ? expert : 0),
                                  b_scales + (B_SCALES ? expert * n : 0),
                                  nullptr,
                                  nullptr,
                                  bias + (BIAS > 0 ? expert * n : 0),
                                  a_scale_step,
                                  b_scale_step,
                                  0};
#pragma unroll
        for (int part = 0; part < TILE_M / STORE_ROWS; ++part) {
            // The row of out of a row of the part; -1: none.
            const auto row_of = [&](int local) {
                const int in_tile = warp_m * TILE_M + part * STORE_ROWS + local;
                if constexpr (GROUPED) return int64_t(row_ids[in_tile]);
                else return first_row + in_tile < m ? first_row + in_tile : -1;
            };
            typename epilogue_t::Row of_rows[4];
            float weights[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int64_t out_row = max(row_of(j / 2 * 8 + lane % 4 * 2 + j % 2), int64_t(0));
                of_rows[j] = epilogue.row(out_row);
                weights[j] = ROUTED ? topk_weights[out_row] : 1.0f;
            }
            sync_warp();  // the previous part is stored
#pragma unroll
            for (int i = 0; i < TILES * 2; ++i) {
                const int column = Unit::column(lane / 4, i / 2, i % 2);
                const auto of_column = epilogue.column(own_column + column);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int local = j / 2 * 8 + lane % 4 * 2 + j % 2;
                    const float sum = accum[i / 2 * ROW_TILES + part * 2 + j / 2][i % 2 * 2 + j % 2];
                    float x = epilogue.value(of_rows[j], of_column, sum * quants_t::SUM_FACTOR);
                    if constexpr (ROUTED) x = ieee_multiply(weights[j], x);
                    store[local * STORE_PITCH + column] = from_float<out_t>(ACTIVATION<out_t>(x));
                }
            }
            sync_warp();
#pragma unroll
            for (int i = 0; i < STORE_ROWS / 4; ++i) {
                const int local = i * 4 + lane / 8;
                const int64_t out_row = row_of(local);
                if (out_row < 0) continue;
                const auto eight = Vec<out_t, 8>::load(store + local * STORE_PITCH + lane % 8 * 8);
                eight.store(out + out_row * out_stride + own_column + lane % 8 * 8);
            }
        }
    }
}
