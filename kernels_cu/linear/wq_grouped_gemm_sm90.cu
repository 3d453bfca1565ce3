// wq_grouped_gemm_sm90: the weight-only quantized grouped GEMM for MoE on Hopper's tensor cores (WGMMA, swap-AB,
// weights from registers). Weights are packed along K.
//
//     accum[t, r] = sum_k a[t / top_k, k] * w[e, r, k], in float32; e is the expert of row t    w: quantized_weight.cuh
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n], and to the gate or up that is paired with it
//
// Operands are swapped (swap-AB): 64 rows of w are the M of a WGMMA, read from registers, and TILE_M slots of the lists
// its N. A tile is TILE_M slots and TILE_N rows of w, 16 * PRODUCTS of these for each of eight consumer warps. The
// kernel is persistent: the grid is as many CTAs as the device holds at a time, and each takes tiles one after another;
// tiles with the same rows of w are adjacent. A k-tile is TILE_K elements of K, and K is a multiple of it. One producer
// thread per CTA runs up to STAGES k-tiles ahead: it loads quants, and rows of a in the order of the slots, as
// gather_expert_columns.cu has written them. The consumers dequantize the operands of one part of a k-tile, CHUNK
// WGMMAs deep in K, while the WGMMAs of the previous part run.
//
// The order of K within a WGMMA is free. Lane 4g + t has the t-th quarter of a k-tile in rows g and g + 8 of a
// fragment, WORDS words of each, and pairs quants as they lie in a word; the gathered columns of a are permuted to
// match (LANE_STEP and LANE_PAIRS of gather_expert_columns.cu). So all quants of a lane in one row of a k-tile share a
// scale, or each half of them. Scales and zero points are loaded ahead of their use; if a k-tile has one group
// (IN_TURN), each of the four lanes of a row loads one of four groups.
//
// GATED: rows g of a fragment are gates and rows g + 8 their ups, so that one thread has both.
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER, ROUTED    the epilogue (grouped.cuh)
//     BITS, EXPONENT, HAS_SCALES, scale_t, SCALE, SCALE_TILES, HAS_ZEROS, GROUP_SIZE    of quantized_weight.cuh;
//                   HAS_SCALES is true, GROUP_SIZE a multiple of a quarter of TILE_K, or half of it
//     TILE_M        slots of a tile: a multiple of 16, at most 256
//     TILE_N        rows of w of a tile: 128 or 256
//     TILE_K        elements of K of a k-tile: 64, or with 4 bits 128
//     STAGES        k-tiles of the ring in shared memory

#include "quantized_weight.cuh"
#include "pipeline.cuh"
#include "grouped.cuh"
#include "wgmma.cuh"

constexpr int WARPS = 8;                                      // consumer warps
constexpr int BOXES = TILE_K / 64, BOX_BYTES = TILE_M * 128;  // TMA boxes of a: 128 bytes of each row
constexpr int QUANT_ROW_BYTES = TILE_K * BITS / 8, WORDS = QUANT_ROW_BYTES / 16;  // of a row in a k-tile; of its lanes
constexpr int PRODUCTS = TILE_N / (16 * WARPS);          // WGMMAs of a warpgroup along the rows of w
constexpr int CHUNK = 2, PARTS = TILE_K / (16 * CHUNK);  // depth of a part in WGMMAs; parts of a k-tile
constexpr int HALVES = GATED == 1 ? 2 : 1, BOX_N = TILE_N / HALVES, OUT_N = GATED ? TILE_N / 2 : TILE_N;
constexpr int A_BYTES = BOXES * BOX_BYTES, STAGE_BYTES = A_BYTES + TILE_N * QUANT_ROW_BYTES;
// Large accumulators: a whole producer warpgroup is launched, to give its registers to the consumers (setmaxnreg).
constexpr bool MANY_SUMS = PRODUCTS * TILE_M > 128;
constexpr int NUM_THREADS = 32 * WARPS + (MANY_SUMS ? 128 : 32);
// IN_TURN: whether the four lanes of a row load scales and zero points for each other. GROUP_STEPS: k-tiles of a group;
// TERM_STEPS: k-tiles of one load.
constexpr bool IN_TURN = GROUP_SIZE % TILE_K == 0;
constexpr int GROUP_STEPS = IN_TURN ? GROUP_SIZE / TILE_K : 1, TERM_STEPS = IN_TURN ? 4 * GROUP_STEPS : 1;
constexpr int LANE_K = TILE_K / 4, LANE_PAIRS = LANE_K / 2;            // elements of a lane in a row of a k-tile
constexpr int GROUPS = GROUP_SIZE < LANE_K ? LANE_K / GROUP_SIZE : 1;  // of a lane in a row of a k-tile
static_assert((BITS == 4 || EXPONENT > 0) && HAS_SCALES && !A_SCALES);
static_assert(TILE_M % 16 == 0 && TILE_M <= 256 && (TILE_N == 128 || TILE_N == 256));
static_assert(WORDS <= 4 && GROUP_SIZE % (LANE_K / GROUPS) == 0);

using epilogue_t = ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
wq_grouped_gemm_sm90(const __grid_constant__ TensorMap a_map,       // [slots, K], boxes of TILE_M x 64, swizzled
                     const __grid_constant__ TensorMap quants_map,  // [E * b_rows, bytes], boxes of BOX_N rows
                     out_t* out,                                    // [num_rows, N]
                     const scale_t* scales,                         // [E, b_rows, groups], or in tiles
                     const uint8_t* zeros,                          // [E, b_rows / 2, groups]; two per byte
                     const int32_t* sorted_token_ids,               // [max_tiles * TILE_M] at least
                     const int32_t* expert_ids,                     // [max_tiles / block_tiles] at least
                     const int32_t* num_tokens_post_pad,            // one element
                     const float* topk_weights,                     // [num_rows]
                     const out_t* bias,                             // [E, b_rows]
                     int64_t num_rows, int64_t n, int64_t k, int64_t num_experts, int64_t block_tiles,
                     int64_t max_tiles, int64_t out_stride,
                     const float* row_scales,  // [E, b_rows] or [E]
                     int64_t b_scale_expert_step, int64_t b_scale_step) {
    // Until the previous kernel ends, the CTA prepares its shared memory.
    extern __shared__ __align__(1024) uint8_t shared[];
    Ring<STAGES> ring(shared + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0) ring.init(WARPS);
    prefetch_tensor_maps(a_map, quants_map);
    __syncthreads();
    await_previous_kernel();

    const ExpertTiles<TILE_M> lists(sorted_token_ids, expert_ids, num_tokens_post_pad, num_rows, num_experts,
                                    block_tiles, max_tiles);
    const int steps = int(k / TILE_K), tiles = lists.tiles * int((n + OUT_N - 1) / OUT_N);
    const int b_rows = int(GATED ? 2 * n : n);
    const auto expert_of = [&](int row_tile) {
        const int expert = lists.number(row_tile);
        return expert < num_experts ? expert : -1;
    };
    const int warp = shfl<WARP_SIZE>(int(threadIdx.x / 32), 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (warp >= WARPS) {
        if constexpr (MANY_SUMS) warpgroup_reg_dealloc<40>();
        if (warp > WARPS || !elect_one()) return;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int row_tile = tile % lists.tiles, first_column = tile / lists.tiles * OUT_N;
            const int expert = expert_of(row_tile);
            if (expert < 0) continue;
            const int first_b_row = expert * b_rows + (GATED == 2 ? 2 * first_column : first_column);
            for (int step = 0; step < steps; ++step, ring.advance()) {
                ring.acquire();
                uint8_t* const to = shared + ring.stage * STAGE_BYTES;
                mbarrier_arrive_expect_tx(ring.full(), STAGE_BYTES);
#pragma unroll
                for (int i = 0; i < HALVES; ++i) {
                    tma_load(to + A_BYTES + i * BOX_N * QUANT_ROW_BYTES, &quants_map, ring.full(),
                             step * QUANT_ROW_BYTES, first_b_row + i * int(n));
                }
#pragma unroll
                for (int i = 0; i < BOXES; ++i) {
                    tma_load(to + i * BOX_BYTES, &a_map, ring.full(), step * TILE_K + i * 64, row_tile * TILE_M);
                }
            }
        }
        return;
    }

    if constexpr (MANY_SUMS) warpgroup_reg_alloc<232>();
    // Row h * 8 + g of the warp's fragment f is row own_row + f * FRAGMENT_ROWS + h * HALF of the tile in shared
    // memory. In the expert's weight its distance between the halves is half_rows instead of HALF.
    constexpr int FRAGMENT_ROWS = GATED == 1 ? 8 : 16, HALF = GATED == 0 ? 8 : GATED == 1 ? BOX_N : 1;
    const int own_row = warp * PRODUCTS * FRAGMENT_ROWS + (GATED == 2 ? 2 * g : g);
    const uint32_t half_rows = GATED == 1 ? uint32_t(n) : HALF, groups = uint32_t(k) / GROUP_SIZE;
    const quants_t decode;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int row_tile = tile % lists.tiles, first_column = tile / lists.tiles * OUT_N;
        const int expert = expert_of(row_tile);
        if (expert < 0) continue;
        // Rows past the last one use the scale and zero point of the last. A byte of zeros has two adjacent rows.
        uint32_t rows[PRODUCTS][2], terms[PRODUCTS][2];
        const scale_t* const expert_scales =
            scales + (SCALE_TILES ? expert * tiled_scales(b_rows, groups) : int64_t(expert) * b_rows * groups);
        const uint8_t* const expert_zeros = zeros + (HAS_ZEROS ? int64_t(expert) * b_rows / 2 * groups : 0);
#pragma unroll
        for (int i = 0; i < PRODUCTS * 2; ++i) {
            const uint32_t row =
                (GATED == 2 ? 2 : 1) * first_column + own_row + i / 2 * FRAGMENT_ROWS + i % 2 * half_rows;
            rows[i / 2][i % 2] = min(row, uint32_t(b_rows) - 1);
        }
        const auto load_terms = [&](int step) {
            const uint32_t group = IN_TURN ? min(uint32_t(step / GROUP_STEPS) + t, groups - 1)
                                           : uint32_t(min(step, steps - 1) * TILE_K + t * LANE_K) / GROUP_SIZE;
#pragma unroll
            for (int i = 0; i < PRODUCTS * 2; ++i) {
                const uint32_t row = rows[i / 2][i % 2];
                terms[i / 2][i % 2] =
                    terms_of<GROUPS>(expert_scales, expert_zeros, row_entry(row, groups) + group_entry(group),
                                     row / 2 * groups + group, int(row % 2));
            }
        };
        load_terms(0);

        float d[PRODUCTS][TILE_M / 2];
        uint32_t weights[2][CHUNK][PRODUCTS][4], now[PRODUCTS][2];
        quants_t::Zero zero[PRODUCTS][2];
        pair_t scale[PRODUCTS][2][GROUPS];
        int previous = 0;
        for (int step = 0; step < steps; ++step, ring.advance()) {
            const uint8_t* const from = shared + ring.stage * STAGE_BYTES;
            const uint64_t a = make_smem_desc(from);
            if (step % GROUP_STEPS == 0) {
                if (step % TERM_STEPS == 0) {
#pragma unroll
                    for (int i = 0; i < PRODUCTS * 2; ++i) now[i / 2][i % 2] = terms[i / 2][i % 2];
                    load_terms(step + TERM_STEPS);
                }
#pragma unroll
                for (int i = 0; i < PRODUCTS * 2; ++i) {
                    const uint32_t one = now[i / 2][i % 2], turn = step / GROUP_STEPS % 4;
                    const uint32_t own = IN_TURN ? shfl<32>(one, lane / 4 * 4 + turn) : one;
                    zero[i / 2][i % 2] = quants_t::zero(own >> 16);
#pragma unroll
                    for (int j = 0; j < GROUPS; ++j) scale[i / 2][i % 2][j] = scale_of(own, j);
                }
            }
            sync_warp();  // all lanes have read the previous stage, which this k-tile releases
            ring.wait();
            Vec<uint32_t, WORDS> quants[PRODUCTS][2];
#pragma unroll
            for (int i = 0; i < PRODUCTS * 2; ++i) {
                const int row = own_row + i / 2 * FRAGMENT_ROWS + i % 2 * HALF;
                quants[i / 2][i % 2] = Vec<uint32_t, WORDS>::load(
                    reinterpret_cast<const uint32_t*>(from + A_BYTES + row * QUANT_ROW_BYTES + t * WORDS * 4));
                mark_nan(scale[i / 2][i % 2][0], quants[i / 2][i % 2].data);
            }
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                auto& operands = weights[part % 2];
#pragma unroll
                for (int i = 0; i < CHUNK * PRODUCTS * 4; ++i) {
                    const int slice = i / (PRODUCTS * 4), j = i / 4 % PRODUCTS, h = i % 2;
                    const int pair = (part * CHUNK + slice) * 2 + i / 2 % 2;  // index among the lane's pairs
                    operands[slice][j][i % 4] =
                        weights_of(decode, quants[j][h].data[pair / quants_t::PAIRS], pair % quants_t::PAIRS,
                                   zero[j][h], scale[j][h][pair / (LANE_PAIRS / GROUPS)]);
                }
#pragma unroll
                for (int j = 0; j < PRODUCTS; ++j) warpgroup_fence_operand(d[j]);
                warpgroup_arrive();
#pragma unroll
                for (int i = 0; i < CHUNK * PRODUCTS; ++i) {
                    const int slice = part * CHUNK + i / PRODUCTS;
                    wgmma<scalar_t, TILE_M>(d[i % PRODUCTS], operands[i / PRODUCTS][i % PRODUCTS],
                                            advance_smem_desc(a, slice / 4 * BOX_BYTES + slice % 4 * 32),
                                            slice > 0 || step > 0);
                }
                warpgroup_commit_batch();
                warpgroup_wait<1>();  // for the previous WGMMAs: their operands are rewritten next
                if (part == 0) {
                    if (step > 0) ring.release(previous);
                    previous = ring.stage;
                }
            }
        }
        warpgroup_wait<0>();
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) warpgroup_fence_operand(d[j]);
        sync_warp();
        ring.release(previous);

        const epilogue_t epilogue{
            topk_weights, nullptr, row_scales + expert * b_scale_expert_step, bias + int64_t(expert) * b_rows, 1, 0,
            b_scale_step};
#pragma unroll
        for (int i = 0; i < TILE_M / 4; ++i) {
            const int id = lists.row(row_tile * TILE_M + i / 2 * 8 + 2 * t + i % 2);
            if (id < 0) continue;
            const auto row = epilogue.row(id);
#pragma unroll
            for (int j = 0; j < PRODUCTS; ++j) {
                const int column = first_column + (warp * PRODUCTS + j) * (GATED ? 8 : 16) + g;
                const float sums[2] = {d[j][i / 2 * 4 + i % 2] * quants_t::SUM_FACTOR,
                                       d[j][i / 2 * 4 + 2 + i % 2] * quants_t::SUM_FACTOR};
                out_t* const to = out + id * out_stride + column;
                if constexpr (GATED) {
                    if (column >= n) continue;
                    const float gate = epilogue.value(row, epilogue.column(GATED == 1 ? column : 2 * column), sums[0]);
                    const float up =
                        epilogue.value(row, epilogue.column(GATED == 1 ? n + column : 2 * column + 1), sums[1]);
                    *to = from_float<out_t>(ACTIVATION<out_t>(gate, up));
                } else {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        if (column + h * 8 >= n) continue;
                        const float value = epilogue.value(row, epilogue.column(column + h * 8), sums[h]);
                        to[h * 8] = from_float<out_t>(ACTIVATION<out_t>(value, value));
                    }
                }
            }
        }
    }
}
