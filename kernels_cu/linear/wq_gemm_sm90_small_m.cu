// wq_gemm_sm90_small_m: the weight-only quantized GEMM for small M (up to 16 rows) on Hopper's tensor cores.
//
//     w[k, n] = scale[g, n] * (quant[k, n] - zero[g, n])    g: the group of row k; not rounded
//     ADDED: w[k, n] = scale[g, n] * (quant[k, n] - ZERO_POINT) + zeros[g, n]
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to sum_k a[m, k] * w[k, n], in float32
//
// The kernel is bound by the bandwidth of reading the quants. Operands are swapped (swap-AB): 64 columns of w are the M
// of a WGMMA, read from registers, and 16 rows of a are its N. The MMAs take raw quants (Quants::raw); scales and zero
// points are applied to the accumulators of a k-tile and to the sums of the rows of a.
//
// A CTA has a tile of 16 rows and 256 columns of out; a k-tile is 128 rows of w. One producer thread runs up to STAGES
// k-tiles ahead. Four consumer warpgroups take k-tiles round-robin; warp w of each multiplies the columns from 64 w on.
// At the end the first warpgroup reduces the accumulators of all four, in their order.
//
// TMA takes as long for a row past the end of a tensor as for another one. So a's tile is loaded in boxes of
// `a_box_rows`, and those without a row of a are left out: their accumulators are never stored.
//
// Constants
//     those of wq_gemm_sm80.cu, with BITS 4, a LAYOUT that has FewRows, TILE_M 16,
//     TILE_N, the columns of a warp, 64, HELD false, and GROUP_SIZE 0 or a multiple of the k-tile; and
//     STAGES        k-tiles of the ring in shared memory: a multiple of the four consumer warpgroups

constexpr bool SHORT_STEPS = false;
#include "pipeline.cuh"
#include "wq_fragment.cuh"
#include "wgmma.cuh"

constexpr int TURNS = 4, CONSUMER_WARPS = 4 * TURNS, NUM_THREADS = 32 * (CONSUMER_WARPS + 4), BLOCK_N = 4 * TILE_N;
constexpr int BOX_BYTES = TILE_M * 128, BOXES = STEP_K / 64;  // TMA boxes of 64 columns of a
constexpr int QUANT_BYTES = STEP_K * BLOCK_N * BITS / 8, BLOCK_QUANTS_AT = BOXES * BOX_BYTES;
constexpr int SCALES_AT = BLOCK_QUANTS_AT + QUANT_BYTES, ZEROS_AT = SCALES_AT + 4 * SCALE_BYTES;
constexpr int LOAD_BYTES = ZEROS_AT + 4 * ZERO_BYTES, BLOCK_STAGE_BYTES = ceil_div(LOAD_BYTES, 1024) * 1024;
constexpr int SLICES = STEP_K / 16, SUMS = TILE_M / 2;  // WGMMAs along K of a k-tile; accumulators of a lane in one
constexpr int FOURS = TILES * SUMS / 4;                 // float4s of a lane's accumulators
constexpr int LEFT = 1;  // named barrier: the accumulators of the other warpgroups are written
using quants_box_t = typename layout_t::template TmaBox<STEP_K>;
using few_rows_t = typename layout_t::template FewRows<BLOCK_N, BLOCK_QUANTS_AT>;
// Whether a lane holds the words of only two WGMMAs at a time, for lack of registers.
constexpr bool BY_HALVES = few_rows_t::BY_HALVES;
static_assert(BITS == 4);
static_assert(STAGES % TURNS == 0, "a warpgroup waits for every phase of the barriers that it waits for");
static_assert(TILE_N == 64 && TILE_M == 16 && !HELD && GROUPS == 1 && !GROUPED && !ROUTED && !GATED && BIAS <= 1 &&
              AZP == 0);

// A k-tile in shared memory, as a warp reads it.
struct Step {
    const uint8_t* data;

    // Reads the lane's words of k-slice `slice` (16 rows). BY_HALVES: only those of WGMMA `first` and the next.
    DEVICE void read(Unit& unit, int slice, int first) const { few_rows_t::read(unit.words, data, slice, first); }
    // Row pair q of column h of WGMMA `product`.
    static DEVICE uint32_t pair(const Unit& unit, const quants_t& decode, int slice, int product, int h, int q) {
        if constexpr (BY_HALVES) return decode.raw(unit.words[(2 * q + h) * 2 + product % 2], 0, 0);
        else return unit.pair(decode, slice % PRODUCTS, product, h, q, 0);
    }
    // Reads the rows of a in k-slice `slice` as the A fragment of mma.sync.
    DEVICE void read(uint32_t (&rows)[4], int slice) const {
        const int lane = threadIdx.x % 32;
        ldmatrix<4>(rows, data + slice / 4 * BOX_BYTES + swizzle_128b(lane % 16, slice % 4 * 32 + lane / 16 * 16));
    }
};

// Prefetches the quants of the CTA's first STAGES k-tiles.
DEVICE void prefetch_quants(const TensorMap* quants_map, int64_t m, int64_t k) {
    const int rows = int((m + TILE_M - 1) / TILE_M), step = int(threadIdx.x);
    const quants_box_t box(step, blockIdx.x / rows * BLOCK_N);
    if (step < STAGES && int64_t(step) * STEP_K < k) tma_prefetch(quants_map, box.x, box.y, box.z);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1) wq_gemm_sm90_small_m(
    const __grid_constant__ TensorMap a_map,       // [M, K], boxes of a_box_rows x 64, swizzled
    const __grid_constant__ TensorMap quants_map,  // packed_weight.cuh, boxes of a k-tile of BLOCK_N columns
    const __grid_constant__ TensorMap scales_map,  // [groups, N], boxes of 1 x BLOCK_N
    const __grid_constant__ TensorMap zeros_map,   // [groups, N] or packed words, boxes of BLOCK_N columns
    out_t* out,                                    // [M, N]
    const a_scale_t* a_scales,                     // [M] or [1]
    const b_scale_t* b_scales,                     // [N] or [1]
    const out_t* bias,                             // [N]
    int64_t m, int64_t n, int64_t k, int64_t out_stride, int64_t a_scale_step, int64_t b_scale_step,
    int64_t a_box_rows) {
    prefetch_quants(&quants_map, m, k);
    // Until the previous kernel ends, the CTA prepares its shared memory.
    extern __shared__ __align__(1024) uint8_t shared[];
    float4* const exchanged =
        reinterpret_cast<float4*>(shared + STAGES * BLOCK_STAGE_BYTES);  // [TURNS - 1, FOURS, 128]
    Ring<STAGES> ring(exchanged + (TURNS - 1) * FOURS * 128);
    if (threadIdx.x == 0) ring.init(4);
    const int rows = int((m + TILE_M - 1) / TILE_M), steps = int((k + STEP_K - 1) / STEP_K);
    const int first_row = blockIdx.x % rows * TILE_M, first_column = blockIdx.x / rows * BLOCK_N;
    const int box_rows = int(a_box_rows), loads = (min(TILE_M, int(m) - first_row) + box_rows - 1) / box_rows;
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
        zero_stages<STAGES, BLOCK_STAGE_BYTES>(shared, i * BOX_BYTES + loads * box_rows * 128, (i + 1) * BOX_BYTES,
                                               NUM_THREADS);
    }
    prefetch_tensor_maps(a_map, scales_map, zeros_map);
    start_cluster<1>();
    await_previous_kernel();

    const int warp = shfl<WARP_SIZE>(int(threadIdx.x / 32), 0), lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    if (warp >= CONSUMER_WARPS) {
        warpgroup_reg_dealloc<32>();
        if (warp == CONSUMER_WARPS && elect_one()) {
            for (int step = 0; step < steps; ++step, ring.advance()) {
                ring.acquire();
                uint8_t* const to = shared + ring.stage * BLOCK_STAGE_BYTES;
                uint64_t* const full = ring.full();
                mbarrier_arrive_expect_tx(full, BOXES * loads * box_rows * 128 + LOAD_BYTES - BLOCK_QUANTS_AT);
                const quants_box_t box(step, first_column);
                tma_load(to + BLOCK_QUANTS_AT, &quants_map, full, box.x, box.y, box.z);
#pragma unroll
                for (int i = 0; i < BOXES; ++i) {
                    for (int load = 0; load < loads; ++load) {
                        tma_load(to + i * BOX_BYTES + load * box_rows * 128, &a_map, full, step * STEP_K + i * 64,
                                 first_row + load * box_rows);
                    }
                }
                const int group = GROUP_SIZE > 0 ? step * STEP_K / max(1, GROUP_SIZE) : 0;
                constexpr int ZERO_COLUMNS = ZERO_CODES ? 32 / BITS : 1;  // columns per tensor element
                if constexpr (HAS_SCALES) tma_load(to + SCALES_AT, &scales_map, full, first_column, group);
                if constexpr (ZERO_BYTES > 0) {
                    tma_load(to + ZEROS_AT, &zeros_map, full, first_column / ZERO_COLUMNS, group);
                }
            }
        }
        return;
    }

    warpgroup_reg_alloc<112>();
    const int turn = warp / 4;
    const Epilogue<out_t, A_SCALES, B_SCALES, 0, BIAS, SCALE_EXPONENT> epilogue{
        a_scales, b_scales, nullptr, nullptr, bias, a_scale_step, b_scale_step, 0};
    const quants_t decode;
    const uint32_t one = pair_t::full(1.0f).template word<2>(0), ones[2] = {one, one};
    float totals[TILES][SUMS] = {};
    ring.skip(turn);
    for (int number = turn; number < steps; number += TURNS, ring.skip(TURNS)) {
        const Step step{shared + ring.stage * BLOCK_STAGE_BYTES};
        float sums[TILES][SUMS];
        uint32_t operands[2][TILES / 2][4], rows_of_a[4];
        float of_rows[4] = {};  // sums of rows g and g + 8 of a, each twice
        Unit unit;
        ring.wait();
        if (!BY_HALVES) step.read(unit, 0, 0);
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            const uint64_t a = make_smem_desc(step.data + slice / 4 * BOX_BYTES);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (BY_HALVES) step.read(unit, slice, half * 2);
#pragma unroll
                for (int i = 0; i < TILES * 2; ++i) {
                    operands[half][i / 4][i % 4] =
                        Step::pair(unit, decode, slice, half * (TILES / 2) + i / 4, i % 2, i / 2 % 2);
                }
                // These loads overlap with the WGMMAs.
                if (half == 1 && slice + 1 < SLICES && !BY_HALVES) step.read(unit, slice + 1, 0);
                if (half == 1 && HAS_SHIFTS) step.read(rows_of_a, slice);
#pragma unroll
                for (int i = 0; i < TILES / 2; ++i) warpgroup_fence_operand(sums[half * (TILES / 2) + i]);
                warpgroup_arrive();
#pragma unroll
                for (int i = 0; i < TILES / 2; ++i) {
                    wgmma<scalar_t, TILE_M>(sums[half * (TILES / 2) + i], operands[half][i],
                                            advance_smem_desc(a, slice % 4 * 32), slice > 0);
                }
                warpgroup_commit_batch();
                if (half == 1 && HAS_SHIFTS) mma_m16n8k16<scalar_t>(of_rows, rows_of_a, ones);
                warpgroup_wait<1>();  // for the previous WGMMAs: their operands are rewritten next
            }
        }
        const uint8_t* const of_group = step.data + SCALES_AT;
        Terms terms;
        terms.load(of_group + warp % 4 * SCALE_BYTES, of_group + 4 * SCALE_BYTES + warp % 4 * ZERO_BYTES);
        float row_sums[2][2] = {};  // for the lane's rows 2t and 2t + 1, and for rows 8 further
#pragma unroll
        for (int i = 0; i < 4 && HAS_SHIFTS; ++i) {
            row_sums[i / 2][i % 2] =
                shfl<32>(of_rows[i / 2 * 2], (lane % 4 * 2 + i % 2) * 4) * (1.0f / quants_t::RAW_FACTOR);
        }
        warpgroup_wait<0>();
#pragma unroll
        for (int i = 0; i < TILES; ++i) warpgroup_fence_operand(sums[i]);
        sync_warp();
        ring.release(ring.stage);
#pragma unroll
        for (int i = 0; i < TILES * SUMS; ++i) {
            const int of_tile = i / SUMS, h = i / 2 % 2;
            float& total = totals[of_tile][i % SUMS];
            if constexpr (HAS_SHIFTS) total = fmaf(terms.shifts[of_tile][h], row_sums[i / 4 % 2][i % 2], total);
            total = fmaf(terms.scales[of_tile][h], sums[of_tile][i % SUMS], total);
        }
    }

    // The first warpgroup adds the accumulators that the others write.
    if (turn > 0) {
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            const float* four = totals[i * 4 / SUMS] + i * 4 % SUMS;
            exchanged[((turn - 1) * FOURS + i) * 128 + thread] = {four[0], four[1], four[2], four[3]};
        }
        named_barrier_arrive<LEFT>(CONSUMER_WARPS * 32);
        return;
    }
    named_barrier_sync<LEFT>(CONSUMER_WARPS * 32);
#pragma unroll
    for (int i = 0; i < (TURNS - 1) * FOURS; ++i) {
        const float4 four = exchanged[i * 128 + thread];
        float* const to = totals[i % FOURS * 4 / SUMS] + i * 4 % SUMS;
        to[0] += four.x;
        to[1] += four.y;
        to[2] += four.z;
        to[3] += four.w;
    }
    // A lane has four rows of eight columns, and RUN of the columns are adjacent. Column `at` belongs to WGMMA at / 2,
    // half at % 2; BY_HALVES: to WGMMA at % 4, half at / 4. The epilogue operands of a run are loaded once.
    constexpr int RUN = few_rows_t::RUN;
    const auto product_of = [](int at) { return BY_HALVES ? at % 4 : at / 2; };
    const auto half_of = [](int at) { return BY_HALVES ? at / 4 : at % 2; };
    const auto column_of = [&](int at) {
        return int64_t(first_column) + warp * TILE_N + Unit::column(lane / 4, product_of(at), half_of(at));
    };
#pragma unroll
    for (int i = 0; i < TILES * 2; i += RUN) {
        decltype(epilogue.column(0)) columns[RUN];
#pragma unroll
        for (int j = 0; j < RUN; ++j) columns[j] = epilogue.column(min(column_of(i + j), n - 1));
#pragma unroll
        for (int of_row = 0; of_row < 4; ++of_row) {
            const int64_t row = first_row + of_row / 2 * 8 + lane % 4 * 2 + of_row % 2;
            const auto row_scale = epilogue.row(min(row, m - 1));
            Vec<out_t, RUN> run;
#pragma unroll
            for (int j = 0; j < RUN; ++j) {
                const float sum = totals[product_of(i + j)][of_row / 2 * 4 + half_of(i + j) * 2 + of_row % 2];
                const float x = epilogue.value(row_scale, columns[j], sum * quants_t::RAW_FACTOR);
                run.data[j] = from_float<out_t>(ACTIVATION<out_t>(x));
            }
            if (row < m && column_of(i) < n) run.store(out + row * out_stride + column_of(i));
        }
    }
}
