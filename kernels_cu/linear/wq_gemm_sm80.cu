// wq_gemm_sm80: the weight-only quantized GEMM for small M (decode) on tensor cores by mma.sync: sm_80 and later.
//
//     w[k, n] = scale[g, n] * (quant[k, n] - zero[g, n])    g: the group of row k; not rounded
//     ADDED: w[k, n] = scale[g, n] * (quant[k, n] - ZERO_POINT) + zeros[g, n]
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to sum_k a[m, k] * w[k, n], in float32
//
// The kernel is bound by the bandwidth of reading the quants. Operands are swapped (swap-AB): 16 columns of w are the M
// of an MMA, 8 rows of a its N. The MMAs take raw quants (Quants::raw); scales and zero points are applied to the
// accumulators of a group and to the sums of the rows of a (zero_point_row_sums.cuh).
//
// Warps: a warp has a tile of TILE_M rows and TILE_N columns of out, and a part of K. The WARPS warps of a block and
// the SPLITS blocks of a cluster share a tile; their accumulators are reduced in a fixed order. blockIdx.x counts
// tiles, down the rows of the same columns first.
//
// GROUPED: rows of out belong to experts, each with its own weight. Rows of a tile are slots of the lists that
// moe_align_block_size has written (grouped.cuh): row t of out is row t / top_k of a times the weight of its block's
// expert, times topk_weights[t] if ROUTED. Rows without a valid expert are not written. The lists have capacity for
// more tiles than are in use; the blocks without a tile are the last, and exit at once.
//
// K-tiles: a warp goes through its part of K in k-tiles of four units. A unit is eight words of each lane: 128 / BITS
// rows of 64 columns. With 3-bit quants a k-tile is one unit of 24 words; with 2:4 sparsity and 4-bit quants it is two
// units, 128 rows. cp.async brings rows of a, scales and zero points of a k-tile to the warp's part of shared memory,
// STAGES - 1 k-tiles ahead. It brings quants, too, and the lane that multiplies them reads them from there. With HELD a
// lane loads its quants to registers instead: a unit of the next k-tile as soon as that unit of the current one is
// multiplied. Warps do not synchronise between their first copy and the reduction. wq_fragment.cuh describes the words
// of a lane.
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1, GATED false
//     BITS, EXPONENT, RECODED, HAS_SCALES, scale_t, SCALE, GROUP_SCALE_EXPONENT, SCALE_ORDER, ZERO_CODES, ZERO_POINT,
//     ZERO_FLOATS, ADDED, GROUP_SIZE, WHOLE_STEPS    of the weight: packed_tile.cuh
//     LAYOUT        layout of the quants, which has an MmaUnit: packed_layout.cuh
//     TILE_M        rows of a tile: 1, 2, 4, 8 or a multiple of 16
//     TILE_N        columns of a tile: 64, or MOST_COLUMNS of the layout
//     WARPS         warps of a block
//     SPLITS        blocks of a cluster, which share a tile
//     STAGES        k-tiles in shared memory: 2 or more
//     HELD          whether lanes hold quants of the next k-tile in registers: where the layout has HELD_WORDS
//     GROUPED, ROUTED    whether rows belong to experts, and have routing weights

constexpr bool SHORT_STEPS = false;
#include "cluster.cuh"
#include "sparse_24_metadata.cuh"
#include "zero_point_row_sums.cuh"

constexpr int NUM_THREADS = WARPS * 32;
constexpr int FRAGMENTS = TILES * ROW_TILES, SUM_BYTES = FRAGMENTS * 32 * 16;  // accumulators of a warp
// K-tiles of a group. Its MMAs have accumulators of their own until the group ends.
constexpr int GROUP_STEPS = GROUP_SIZE > STEP_K ? GROUP_SIZE / STEP_K : 1;
constexpr int WARP_BYTES = STAGES * STAGE_BYTES > SUM_BYTES ? STAGES * STAGE_BYTES : SUM_BYTES;
static_assert((HAS_SCALES || (!ADDED && GROUP_SCALE_EXPONENT == 0)) && (GROUPED || !ROUTED));
static_assert((!RECODED || ZERO_POINT == 8) && !(IS_SPARSE && (GROUPED || ZERO_CODES)));
static_assert(ZERO_CODES + ZERO_FLOATS + ADDED <= 1 && !GATED && BIAS <= 1 && AZP == 0 && STAGES >= 2);

// The warp's part of K: k-tiles first ... last - 1.
struct Part { int first, last; };
DEVICE Part part_of(int64_t k) {
    const int64_t steps = (k + STEP_K - 1) / STEP_K, part = (SPLITS > 1 ? blockIdx.y : 0) * WARPS + threadIdx.x / 32;
    return {int(steps * part / (SPLITS * WARPS)), int(steps * (part + 1) / (SPLITS * WARPS))};
}
// The source of the lane's first copy of unit `unit` of K.
DEVICE const uint32_t* quants_at(const uint32_t* quants, int64_t unit, int64_t first_column, int64_t pitch) {
    return quants + Unit::place(first_column, pitch) + (unit * Unit::LINES + Unit::line()) * Unit::line_words(pitch);
}

// Prefetches the quants of the warp's first k-tile.
DEVICE void prefetch_quants(const uint32_t* quants, int64_t m, int64_t n, int64_t k) {
    const Part part = part_of(k);
    const int64_t first_column = blockIdx.x / ((m + TILE_M - 1) / TILE_M) * TILE_N, pitch = Unit::pitch(n, k);
    if (GROUPED || !WHOLE_STEPS || part.first == part.last) return;  // the experts are not known yet
    const uint32_t* const from = quants_at(quants, int64_t(part.first) * UNITS, first_column, pitch);
#pragma unroll
    for (int i = 0; i < UNITS * Unit::COPIES; ++i) {
        prefetch_line(from + i / Unit::COPIES * Unit::unit_words(pitch) + Unit::copy_at(i % Unit::COPIES, pitch));
    }
}

extern "C" __global__ void CLUSTER_OF(SPLITS) LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
wq_gemm_sm80(out_t* out,                          // [M, N]
             const scalar_t* a,                   // [M, K]
             const uint32_t* quants,              // [K, N] by LAYOUT
             const scale_t* scales,               // [groups, N] by SCALE_ORDER
             const uint16_t* places,              // [K / 32, 2 N], 2:4 metadata: sparse_24_metadata.cuh
             const void* zeros,                   // [groups, N BITS / 32] words; or [groups, N] scalar_t by SCALE_ORDER
             const a_scale_t* a_scales,           // [M] or [1]
             const b_scale_t* b_scales,           // [N] or [1]
             const out_t* bias,                   // [N]
             const int32_t* sorted_token_ids,     // GROUPED: [M]; values are not trusted
             const int32_t* expert_ids,           // [M / block_size]
             const int32_t* num_tokens_post_pad,  // [1]
             const float* topk_weights,           // [num_rows]
             int64_t m, int64_t n, int64_t k, int64_t groups, int64_t a_stride, int64_t out_stride,
             int64_t a_scale_step, int64_t b_scale_step, int64_t num_rows, int64_t num_experts, int64_t block_size,
             int64_t top_k) {
    prefetch_quants(quants, m, n, k);
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t* const shared = reinterpret_cast<uint8_t*>(memory);
    uint8_t* const own = shared + warp * WARP_BYTES;
    const int64_t in_use = GROUPED ? min(m, int64_t(*num_tokens_post_pad)) : m;
    const int64_t row_tiles = max((in_use + TILE_M - 1) / TILE_M, int64_t(1));
    const int64_t first_row = blockIdx.x % row_tiles * TILE_M, first_column = blockIdx.x / row_tiles * TILE_N;
    const int split = SPLITS > 1 ? blockIdx.y : 0;
    const auto [first_step, last_step] = part_of(k);
    __shared__ uint32_t selectors[IS_SPARSE ? 16 : 1];
    if constexpr (IS_SPARSE) fill_selectors(selectors);
    __shared__ int row_ids[GROUPED ? TILE_M : 1];  // rows of out; -1: padding
    if constexpr (GROUPED) {
        if (first_column >= n || in_use <= 0) return;
        const int64_t expert = expert_ids[first_row / block_size];
        if (expert < 0 || expert >= num_experts) return;
        if (threadIdx.x < TILE_M) {
            const int id = sorted_token_ids[first_row + threadIdx.x];
            row_ids[threadIdx.x] = id >= 0 && id < num_rows ? id : -1;
        }
        __syncthreads();
        if (!any_lane(row_ids[lane % TILE_M] >= 0)) return;
        quants += expert * (k * n * BITS / 32);
        if constexpr (HAS_SCALES) scales += expert * groups * n;
        if constexpr (ZERO_BYTES > 0) {
            zeros = static_cast<const uint8_t*>(zeros) + expert * groups * n * ZERO_BYTES / TILE_N;
        }
        // Per expert: one scale of the whole weight (as a_scales), a scale of each column, and a bias.
        if constexpr (A_SCALES) a_scales += expert;
        if constexpr (B_SCALES) b_scales += expert * n;
        if constexpr (BIAS > 0) bias += expert * n;
    }

    constexpr int COPIED_ROWS = 32 / A_CHUNKS;  // rows of a that the lanes copy at a time
    const int chunk = lane % A_CHUNKS, copied_row = lane / A_CHUNKS, rows = int(min(m - first_row, int64_t(TILE_M)));
    const scalar_t* own_a =
        a + (GROUPED ? 0 : first_row + copied_row) * a_stride + chunk * 8 + int64_t(first_step) * STEP_K;
    const int64_t lines = (k * Unit::LINES + UNIT_K - 1) / UNIT_K, pitch = Unit::pitch(n, k);
    const uint32_t* next = quants_at(quants, int64_t(first_step) * UNITS, first_column, pitch);
    // Offsets of the lane's pieces in a stage. Swizzled offsets are results of shuffles: otherwise the compiler would
    // recompute them for every k-tile.
    const auto place = [&](int at) { return Unit::SIXTEENS ? shfl<32>(QUANTS_AT + at, lane) : QUANTS_AT + at; };
    int quants_to[Unit::COPIES], words_at[Unit::READS];
#pragma unroll
    for (int i = 0; i < Unit::COPIES; ++i) quants_to[i] = place(Unit::piece_at(32 * i + lane));
#pragma unroll
    for (int i = 0; i < Unit::READS; ++i) words_at[i] = place(Unit::read_at(i));
    // The lane's piece of the scales, or of the zero points after them, in the first group.
    const bool has_zeros = ZERO_BYTES > 0 && lane >= SCALE_BYTES / TERM_BYTES;
    const int group_bytes = has_zeros ? ZERO_BYTES : SCALE_BYTES;
    const uint8_t* const of_groups = static_cast<const uint8_t*>(has_zeros ? zeros : scales) +
                                     first_column / TILE_N * group_bytes +
                                     (lane - (has_zeros ? SCALE_BYTES / TERM_BYTES : 0)) * TERM_BYTES;
    const int64_t group_pitch = n / TILE_N * group_bytes;
    uint8_t* filled = own;
    const auto copy = [&](int step) {
        uint8_t* const stage = filled;
        filled = filled == own + (STAGES - 1) * STAGE_BYTES ? own : filled + STAGE_BYTES;
        if constexpr (WHOLE_STEPS && !HELD) {
            next = Unit::copy_step(stage, quants_to, next, pitch);
        } else if constexpr (!HELD) {
#pragma unroll
            for (int i = 0; i < UNITS; ++i) {
                const int64_t line = min((int64_t(step) * UNITS + i) * Unit::LINES + Unit::line(), lines - 1);
                const uint32_t* const from = quants + Unit::place(first_column, pitch) + line * Unit::line_words(pitch);
                Unit::copy(stage + i * UNIT_BYTES, quants_to, from, pitch, int(min(lines - line, int64_t(UNIT_K))));
            }
        }
        if constexpr (IS_SPARSE) Places::copy(stage + PLACES_AT, places, int64_t(step) * STEP_K, first_column, n, k);
        const bool has_chunk = WHOLE_STEPS || int64_t(step) * STEP_K + chunk * 8 < k;
        const scalar_t* from = own_a;
#pragma unroll 2  // unrolled further, predicates of all rows would be kept in registers across k-tiles
        for (int row = copied_row; row < TILE_M; row += COPIED_ROWS, from += COPIED_ROWS * a_stride) {
            if constexpr (GROUPED) {
                const int id = row_ids[row];
                const scalar_t* const of_row = own_a + max(id, 0) / int(top_k) * a_stride;
                cp_async<16>(stage + Rows::place(row, chunk), of_row, id >= 0 && has_chunk);
            } else {
                cp_async<16>(stage + Rows::place(row, chunk), from, row < rows && has_chunk);
            }
        }
        own_a += STEP_K;
        const int64_t first_group = GROUP_SIZE ? int64_t(step) * STEP_K / max(1, GROUP_SIZE) : 0;
        if constexpr (GROUPS == 1) {
            const int64_t group = WHOLE_STEPS ? first_group : min(first_group, groups - 1);
            if (lane < (SCALE_BYTES + ZERO_BYTES) / TERM_BYTES) {
                cp_async<TERM_BYTES>(stage + A_BYTES + lane * TERM_BYTES, of_groups + group * group_pitch);
            }
        } else {
            const auto copy_groups = [&](uint8_t* to, const void* from, int bytes) {
                for (int i = lane; i < GROUPS * bytes / 16; i += 32) {
                    const int64_t group = min(first_group + i / max(1, bytes / 16), groups - 1);
                    const int64_t at = (group * n + first_column) * bytes / TILE_N + i % max(1, bytes / 16) * 16;
                    cp_async<16>(to + i * 16, static_cast<const uint8_t*>(from) + at);
                }
            };
            if constexpr (SCALE_BYTES > 0) copy_groups(stage + A_BYTES, scales, SCALE_BYTES);
            if constexpr (ZERO_BYTES > 0) copy_groups(stage + A_BYTES + GROUPS * SCALE_BYTES, zeros, ZERO_BYTES);
        }
    };

    const quants_t decode;
    Unit held[HELD ? UNITS : 1];
    const auto load = [&](int step, int i) {
        if constexpr (!HELD) return;
        const int64_t line = min((int64_t(step) * UNITS + i) * Unit::LINES + Unit::line(), lines - 1);
        held[i].load(WHOLE_STEPS ? next : quants + Unit::place(first_column, pitch) + line * Unit::line_words(pitch),
                     pitch);
        next += Unit::unit_words(pitch);
    };
#pragma unroll
    for (int i = 0; i < UNITS && HELD; ++i) {
        if (first_step < last_step) load(first_step, i);
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (first_step + i < last_step) copy(first_step + i);
        cp_async_commit();
    }
    float sums[TILES][ROW_TILES][4] = {};
    float of_group[TILES][ROW_TILES][4] = {};
    RowSums of_rows;
    const uint8_t* stage = own;
#pragma unroll 1
    for (int step = first_step; step < last_step; ++step) {
        cp_async_wait<STAGES - 2>();
        sync_warp();  // all lanes have copied this stage, and have read the one that is refilled now
        if (step + STAGES - 1 < last_step) copy(step + STAGES - 1);
        cp_async_commit();
        // Whether this is the warp's last k-tile of a group.
        const bool last_of_group = GROUP_STEPS == 1 || step + 1 == last_step || (step + 1) % GROUP_STEPS == 0;
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            // With these layouts, words read ahead for all units would not fit in registers.
            if constexpr (mma_unit_t::READS_IN_ORDER) keep_loads_of_warp();
            Unit unit;
            if constexpr (HELD) unit = held[i];
            else unit.read(stage + i * UNIT_BYTES, words_at);
            Places of_quads;
            uint32_t a_pairs[PRODUCTS][ROW_TILES][2];
#pragma unroll
            for (int product = 0; product < PRODUCTS; ++product) {
                const int row = i * UNIT_K + product * 16;
                if (product == 0 || Rows::BY_PRODUCT) Rows{stage}.load(a_pairs, i, product);
                const bool ends = (row + 16) % (STEP_K / GROUPS) == 0;
                if (IS_SPARSE && product % 2 == 0) of_quads.read(stage + PLACES_AT, i, product);
                if constexpr (HAS_SHIFTS) of_rows.add(a_pairs, product);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                    for (int term = 0; term < quants_t::TERMS; ++term) {
                        uint32_t pairs[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) pairs[j] = unit.pair(decode, product, tile, j % 2, j / 2, term);
                        if constexpr (IS_SPARSE) of_quads.spread(pairs, decode, selectors, product, tile, term);
#pragma unroll
                        for (int j = 0; j < ROW_TILES; ++j) {
                            mma_m16n8k16<scalar_t>(of_group[tile][j], pairs, a_pairs[product][j]);
                        }
                    }
                }
                if (!ends || !last_of_group) continue;
                float row_sums[ROW_TILES][2];
#pragma unroll
                for (int j = 0; j < ROW_TILES * 2 && HAS_SHIFTS; ++j)
                    row_sums[j / 2][j % 2] = of_rows.of(j / 2, j % 2) * (1.0f / quants_t::RAW_FACTOR);
                Terms terms;
                terms.load(stage + A_BYTES, row * GROUPS / STEP_K);
#pragma unroll
                for (int j = 0; j < ROW_TILES * TILES * 4; ++j) {
                    const int tile = j / (ROW_TILES * 4), at = j / 4 % ROW_TILES, h = j / 2 % 2;
                    const float of_one = of_group[tile][at][j % 4];
                    of_group[tile][at][j % 4] = 0.0f;
                    if (TILE_M == 1 && !HELD && j % 2 == 1) continue;  // no second row; with HELD a skip is slower
                    float& sum = sums[tile][at][j % 4];
                    if constexpr (HAS_SHIFTS) sum = fmaf(terms.shifts[tile][h], row_sums[at][j % 2], sum);
                    sum = fmaf(terms.scales[tile][h], of_one, sum);
                }
                of_rows.clear();
            }
            if (HELD && step + 1 < last_step) load(step + 1, i);
        }
        stage = stage == own + (STAGES - 1) * STAGE_BYTES ? own : stage + STAGE_BYTES;
    }

    // A lane's accumulators of a fragment are columns h of rows 2t and 2t + 1 of a. Each warp writes its own to shared
    // memory, then a thread adds up those of one lane.
    using four_t = Vec<float, 4>;
    sync_warp();
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i) {
        four_t four;
#pragma unroll
        for (int j = 0; j < 4; ++j) four.data[j] = sums[i / ROW_TILES][i % ROW_TILES][j] * quants_t::RAW_FACTOR;
        reinterpret_cast<four_t*>(own)[i * 32 + lane] = four;
    }
    __syncthreads();
    const auto sum_of_block = [&](int i) {
        four_t total = reinterpret_cast<const four_t*>(shared)[i];
#pragma unroll
        for (int one = 1; one < WARPS; ++one) {
            const four_t part = reinterpret_cast<const four_t*>(shared + one * WARP_BYTES)[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) total.data[j] += part.data[j];
        }
        return total;
    };
    const Epilogue<out_t, A_SCALES, B_SCALES, 0, BIAS, SCALE_EXPONENT> epilogue{
        a_scales, b_scales, nullptr, nullptr, bias, a_scale_step, b_scale_step, 0};
    const auto finish = [&](int i, const four_t& total) {
        const int fragment = i / 32, tile = fragment / ROW_TILES;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int local = fragment % ROW_TILES * 8 + i % 4 * 2 + j % 2;
            if (local >= TILE_M) continue;
            const int64_t row = GROUPED ? int64_t(row_ids[GROUPED ? local : 0]) : first_row + local;
            const int64_t column = first_column + Unit::column(i % 32 / 4, tile, j / 2);
            if (GROUPED ? row < 0 : row >= m) continue;
            float x = epilogue.value(epilogue.row(row), epilogue.column(column), total.data[j]);
            if constexpr (ROUTED) x = ieee_multiply(topk_weights[row], x);
            out[row * out_stride + column] = from_float<out_t>(ACTIVATION<out_t>(x));
        }
    };
    // Each block has written its sums over the accumulators of its first warp.
    const auto sum_of_cluster = [&](int i) {
        const float* const sums_of_block = reinterpret_cast<const float*>(shared) + i * 4;
        four_t total = {};
#pragma unroll
        for (int j = 0; j < SPLITS * 4; ++j) total.data[j % 4] += load_of_block<SPLITS>(sums_of_block + j % 4, j / 4);
        return total;
    };
    // With fewer than eight rows, only the lanes with valid rows take part; with HELD, all of them are faster.
    constexpr int ROW_LANES = TILE_M < 8 && !HELD ? ceil_div(TILE_M, 2) : 4, LANES = FRAGMENTS * 8 * ROW_LANES;
    const auto lane_of = [](int i) { return i / ROW_LANES * 4 + i % ROW_LANES; };
    for (int i = threadIdx.x; i < LANES && SPLITS > 1; i += NUM_THREADS) {
        reinterpret_cast<four_t*>(shared)[lane_of(i)] = sum_of_block(lane_of(i));
    }
    if constexpr (SPLITS > 1) sync_cluster<SPLITS>();
    for (int i = split * NUM_THREADS + threadIdx.x; i < LANES; i += SPLITS * NUM_THREADS) {
        finish(lane_of(i), SPLITS > 1 ? sum_of_cluster(lane_of(i)) : sum_of_block(lane_of(i)));
    }
    leave_cluster<SPLITS>();
}
