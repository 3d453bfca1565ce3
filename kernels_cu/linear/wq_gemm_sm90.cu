// wq_gemm_sm90: the weight-only quantized GEMM on Hopper's tensor cores (WGMMA, swap-AB, weights from registers).
//
//     w[k, n] = T(scale[g, n] * (quant[k, n] - zero[g, n]))    g: the group of row k    T: scalar_t
//     layout_w4a8: w[k, n] = the product of scale[g, n] and quant[k, n], from a lookup table    T: fp8_e4m3_t
//     ADDED: w[k, n] = T(scale[g, n] * (quant[k, n] - ZERO_POINT) + zeros[g, n])
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to sum_k a[m, k] * w[k, n], in float32
//
// Operands are swapped (swap-AB): 64 columns of w are the M of a WGMMA, read from registers, and TILE_M rows of a are
// its N, read from shared memory. A tile is TILE_M rows and TILE_N columns of out. Each of two consumer warpgroups has
// half of the columns, and each warp 16 * PRODUCTS of them. A k-tile is BOXES times 128 bytes of a row of a: 64 * BOXES
// rows of w, or 128 with layout_w4a8. One producer thread per CTA runs up to STAGES k-tiles ahead: it loads a, quants,
// scales and zero points. The consumers dequantize the operands of one part of a k-tile, CHUNK WGMMAs deep in K, while
// the WGMMAs of the previous part run.
//
// GROUPED: rows of out belong to experts, each with its own weight; K is a multiple of the k-tile. Rows of a are slots
// of the lists that moe_align_block_size has written (grouped.cuh), gathered beforehand: slot p holds row t of out,
// where t is sorted_token_ids[p]. ROUTED: row t of out is multiplied by topk_weights[t]. Rows without a valid expert
// are not written.
//
// SPLITS: cluster split-K. The CTAs of a cluster share a tile, each has a part of K, and they reduce their accumulators
// by cluster_reduce.cuh. Tiles of more than 64 rows are stored by TMA, except with GROUPED. CUT: tiles are
// scheduled by stream-K (stream_k.cuh). NEIGHBOURS: the CTAs of a cluster have tiles of the same rows and adjacent
// columns, and the same k-tiles; each loads a part of the rows of a and multicasts it.
//
// TMA takes as long for a row past the end of a tensor as for another one. So a's tile is loaded in boxes of
// `a_box_rows`, and those without a row of a are left out: their accumulators are never stored.
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t; with layout_w4a8 fp8_e4m3_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1, GATED false
//     BITS, EXPONENT, LAYOUT, RECODED, HAS_SCALES, scale_t, SCALE, GROUP_SCALE_EXPONENT, SCALE_ORDER, ZERO_CODES,
//     ZERO_FLOATS, ZERO_POINT, ADDED, GROUP_SIZE
//                   of packed_weight.cuh; BITS is 4, 8 (not with layout_awq), or 2 (GPTQ only)
//     TILE_M        rows of a tile: a multiple of 16, at most 256
//     TILE_N        columns of a tile: 128 or 256
//     BOXES         TMA boxes of a per k-tile, 128 bytes of each row: 1, or 2 with layout_marlin
//     CHUNK         depth in K of a part, in WGMMAs (16 rows of w each, 32 with 8-bit operands): 1 or 2
//     STAGES        k-tiles of the ring in shared memory
//     SPLITS        CTAs of a cluster that share a tile of at most 64 rows; each has at least one k-tile
//     NEIGHBOURS    CTAs of a cluster with tiles of adjacent columns: 1, or 2 for tiles that TMA stores
//     APART         whether the threads promote the accumulators of each part to float32 registers: fp8 WGMMAs
//                   accumulate with 14 bits (wgmma.cuh), an error that a float16 result would show. CHUNK is then 2,
//                   and a tile has at most 128 x 128 elements
//     CUT           whether tiles are scheduled by stream-K; then SPLITS is 1, and GROUPED false
//     GROUPED, ROUTED    whether rows belong to experts (then SPLITS is 1), and have routing weights
//     MIN_BLOCKS    CTAs per SM that the registers must allow
// With SPLITS > 1 there are as many clusters as tiles.

#include "cluster.cuh"
#include "cluster_reduce.cuh"
#include "stream_k.cuh"
#include "gemm_epilogue.cuh"
#include "pipeline.cuh"
#include "packed_table.cuh"
#include "wgmma.cuh"

constexpr int CONSUMER_WARPS = 8, ROW_BYTES = 128, TILE_K = BOXES * ROW_BYTES / sizeof(scalar_t);
constexpr int PRODUCT_K = 32 / sizeof(scalar_t);                   // K of one WGMMA, in rows of w
constexpr int PRODUCTS = TILE_N / 128, PARTS = BOXES * 4 / CHUNK;  // WGMMAs along N of a warpgroup; parts of a k-tile
constexpr int GROUPS = GROUP_SIZE > 0 && GROUP_SIZE < TILE_K ? TILE_K / GROUP_SIZE : 1;  // groups of a k-tile
constexpr int BOX_BYTES = TILE_M * ROW_BYTES, A_BYTES = BOXES * BOX_BYTES, QUANT_BYTES = TILE_K * TILE_N * BITS / 8;
constexpr int SCALE_BYTES = HAS_SCALES ? GROUPS * TILE_N * (IS_TABLE ? 8 : sizeof(scale_t)) : 0;
constexpr int ZERO_BYTES = ZERO_CODES ? GROUPS * TILE_N * BITS / 8 : ADDED || ZERO_FLOATS ? GROUPS * TILE_N * 2 : 0;
constexpr int LOAD_BYTES = A_BYTES + QUANT_BYTES + SCALE_BYTES + ZERO_BYTES;
constexpr int STAGE_BYTES = ceil_div(LOAD_BYTES, 1024) * 1024;
constexpr bool TMA_STORE = TILE_M > 64 && !GROUPED;  // an expert's rows are scattered over out
// Large accumulators: a whole producer warpgroup is launched, to give its registers to the consumers (setmaxnreg).
constexpr bool REGISTER_REALLOC = PRODUCTS * TILE_M * (APART ? 2 : 1) > 128;
constexpr int NUM_THREADS = REGISTER_REALLOC ? 384 : 32 * (CONSUMER_WARPS + 1);
constexpr int WARP_FRAGMENTS = PRODUCTS * TILE_M / 8, FRAGMENTS = CONSUMER_WARPS * WARP_FRAGMENTS;
constexpr int STORE_ROW_BYTES = 32 * PRODUCTS, STORE_BYTES = 16 * STORE_ROW_BYTES, STORE_STAGES = 2;
static_assert(TILE_M % 16 == 0 && TILE_M <= 256 && (TILE_N == 128 || TILE_N == 256) && (CHUNK == 1 || CHUNK == 2));
static_assert(GROUP_SIZE == 0 || GROUP_SIZE % TILE_K == 0 || (TILE_K % GROUP_SIZE == 0 && GROUP_SIZE % PRODUCT_K == 0));
static_assert(IS_TABLE == (sizeof(scalar_t) == 1) && (!IS_TABLE || (HAS_SCALES && BITS == 4)));
static_assert(!RECODED || (ZERO_POINT == 8 && EXPONENT == 0));
static_assert(EXPONENT == 0 || (!ZERO_CODES && ZERO_POINT == 0), "floats have no zero points");
static_assert(!ZERO_FLOATS || !(HAS_SCALES || ZERO_CODES || ADDED || EXPONENT > 0));
static_assert(HAS_SCALES || (!ADDED && GROUP_SCALE_EXPONENT == 0));
static_assert((!CUT || (SPLITS == 1 && !GROUPED)) && (NEIGHBOURS == 1 || (TMA_STORE && NEIGHBOURS == 2)));
static_assert((!APART || (CHUNK == 2 && PRODUCTS * TILE_M <= 128)));
static_assert(!GROUPED || SPLITS == 1);
static_assert((SPLITS == 1 || !TMA_STORE) && !GATED && BIAS <= 1 && AZP == 0);

using quants_box_t = typename layout_t::template TmaBox<TILE_K>;
using terms_t = conditional_t<IS_TABLE, TableTerms, Terms>;
constexpr float SUM_FACTOR = IS_TABLE ? 1.0f : quants_t::SUM_FACTOR;
using cluster_sums_t = ClusterSums<float, SPLITS, SPLITS, FRAGMENTS>;

extern "C" __global__ void CLUSTER_OF(SPLITS * NEIGHBOURS) LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
wq_gemm_sm90(const __grid_constant__ TensorMap a_map,       // [M, K], boxes of a_box_rows x 128 bytes, swizzled
             const __grid_constant__ TensorMap quants_map,  // packed_weight.cuh, boxes of a k-tile of TILE_N columns
             const __grid_constant__ TensorMap scales_map,  // [groups, N], boxes of GROUPS x TILE_N
             const __grid_constant__ TensorMap zeros_map,   // [groups, N] or packed words, boxes of TILE_N columns
             const __grid_constant__ TensorMap out_map,     // [M, N], boxes of 16 x 16 * PRODUCTS, swizzled
             out_t* out,                                    // [M, N]
             const a_scale_t* a_scales,                     // [M] or [1]
             const b_scale_t* b_scales,                     // [N] or [1]
             const out_t* bias,                             // [N]
             const int32_t* sorted_token_ids,               // GROUPED: [M]; values are not trusted
             const int32_t* expert_ids,                     // [M / block_size]
             const int32_t* num_tokens_post_pad,            // [1]
             const float* topk_weights,                     // [num_rows]
             float* partial,                                // CUT: partial accumulators of stream_k.cuh, and counters
             uint32_t* arrived, int64_t m, int64_t n, int64_t k, int64_t groups, int64_t out_stride,
             int64_t a_scale_step, int64_t b_scale_step, int64_t num_rows, int64_t num_experts, int64_t block_size,
             int64_t a_box_rows, int64_t sharers) {
    // Until the previous kernel ends, the CTA prepares its shared memory.
    extern __shared__ __align__(1024) uint8_t shared[];
    const int box_rows = int(a_box_rows);
    // The rows that the last tile loads; the stages of a CTA without it have zeros there, too.
    const int last_rows = int((m % TILE_M + box_rows - 1) / box_rows * box_rows);
    for (int i = 0; i < BOXES && last_rows > 0; ++i) {
        zero_stages<STAGES, STAGE_BYTES>(shared, i * BOX_BYTES + last_rows * ROW_BYTES, (i + 1) * BOX_BYTES,
                                         NUM_THREADS);
    }
    uint8_t* const store_memory = shared + STAGES * STAGE_BYTES;  // split-K: received accumulators; else store buffers
    constexpr int BYTES = TMA_STORE ? CONSUMER_WARPS * STORE_STAGES * STORE_BYTES : cluster_sums_t::BYTES;
    const cluster_sums_t cluster_reduce{reinterpret_cast<Fragment<float>*>(store_memory),
                                        reinterpret_cast<uint64_t*>(store_memory + BYTES)};
    Ring<STAGES> ring(cluster_reduce.all_received + 1);
    const int split = SPLITS > 1 ? blockIdx.y : 0, cluster_rank = NEIGHBOURS > 1 ? blockIdx.y : 0;
    if (threadIdx.x == 0) {
        cluster_reduce.init();
        ring.init(CONSUMER_WARPS * NEIGHBOURS);
    }
    prefetch_tensor_maps(a_map, quants_map, scales_map, zeros_map, out_map);
    start_cluster<SPLITS * NEIGHBOURS>();
    await_previous_kernel();

    // Only slots in use are scheduled: tiles without an expert would fall unevenly on the CTAs.
    const int num_list_rows = GROUPED ? int(min(int64_t(max(*num_tokens_post_pad, 0)), m)) : 0;
    const int rows = int(((GROUPED ? num_list_rows : m) + TILE_M - 1) / TILE_M),
              num_k_tiles = int((k + TILE_K - 1) / TILE_K);
    const int tiles =
        rows * int((n + NEIGHBOURS * TILE_N - 1) / (NEIGHBOURS * TILE_N));  // a cluster's adjacent tiles count as one
    const int first_k_tile = int(int64_t(num_k_tiles) * split / SPLITS);
    const int last_k_tile = int(int64_t(num_k_tiles) * (split + 1) / SPLITS);
    CutTile<CUT> tile(tiles, first_k_tile, last_k_tile, int(sharers));
    const auto first_column_of = [&](int place) { return (place * NEIGHBOURS + cluster_rank) * TILE_N; };
    const int64_t rest = tiles - tile.whole;  // each CTA of a cluster has its own workspace
    partial += cluster_rank * (sharers + rest - 1) * (TILE_M * TILE_N);
    arrived += cluster_rank * rest * CONSUMER_WARPS;
    // The expert of the rows from first_row on; negative if there is no such expert.
    const auto expert_of = [&](int first_row) {
        if constexpr (!GROUPED) return 0;
        const int expert = expert_ids[first_row / block_size];
        return expert < num_experts ? expert : -1;
    };
    const int warp = shfl<WARP_SIZE>(int(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
    if (warp >= CONSUMER_WARPS) {
        if constexpr (REGISTER_REALLOC) warpgroup_reg_dealloc<40>();
        if (warp > CONSUMER_WARPS || !elect_one()) return;
        for (; tile.exists(); tile.advance()) {
            const int first_row = tile.number % rows * TILE_M, first_column = first_column_of(tile.number / rows);
            const int expert = expert_of(first_row);
            if (expert < 0) continue;
            const int boxes = (min(TILE_M, int(m) - first_row) + box_rows - 1) / box_rows;
            for (int k_tile = tile.first; k_tile < tile.last; ++k_tile, ring.advance()) {
                ring.acquire();
                uint8_t* to = shared + ring.stage * STAGE_BYTES;
                mbarrier_arrive_expect_tx(ring.full(), BOXES * boxes * box_rows * ROW_BYTES + LOAD_BYTES - A_BYTES);
                const quants_box_t box(expert * num_k_tiles + k_tile, first_column);
                tma_load(to + A_BYTES, &quants_map, ring.full(), box.x, box.y, box.z);
                for (int i = 0; i < BOXES; ++i) {
                    for (int box = cluster_rank; box < boxes; box += NEIGHBOURS) {
                        load_box<NEIGHBOURS>(to + i * BOX_BYTES + box * box_rows * ROW_BYTES, &a_map, ring.full(),
                                             k_tile * TILE_K + i * (TILE_K / BOXES), first_row + box * box_rows);
                    }
                }
                const int group = expert * int(groups) + (GROUP_SIZE > 0 ? k_tile * TILE_K / max(1, GROUP_SIZE) : 0);
                to += A_BYTES + QUANT_BYTES;
                if constexpr (HAS_SCALES) tma_load(to, &scales_map, ring.full(), first_column, group);
                to += SCALE_BYTES;
                if constexpr (ADDED || ZERO_FLOATS) tma_load(to, &zeros_map, ring.full(), first_column, group);
                if constexpr (ZERO_CODES) tma_load(to, &zeros_map, ring.full(), first_column * BITS / 32, group);
            }
        }
        if constexpr (NEIGHBOURS > 1) ring.drain();
        return;
    }

    if constexpr (REGISTER_REALLOC) warpgroup_reg_alloc<232>();
    Epilogue<out_t, A_SCALES, B_SCALES, 0, BIAS, SCALE_EXPONENT> epilogue{a_scales, b_scales,     nullptr,      nullptr,
                                                                          bias,     a_scale_step, b_scale_step, 0};
    // The column, within the tile, of half h (accumulator rows 0-7 or 8-15 of the warp) of WGMMA `product`.
    const auto column_of = [&](int of_warp, int product, int h) {
        return (of_warp * PRODUCTS + product) * 16 + h * 8 + lane / 4;
    };
    const quants_t decode;
    Place places[PRODUCTS][2];
#pragma unroll
    for (int j = 0; j < PRODUCTS * 2; ++j) places[j / 2][j % 2] = place_of(column_of(warp, j / 2, j % 2));
    int store = 0;
    for (; tile.exists(); tile.advance()) {
        const int first_row = tile.number % rows * TILE_M, first_column = first_column_of(tile.number / rows);
        if constexpr (GROUPED) {
            const int expert = expert_of(first_row);
            if (expert < 0) continue;
            // Per expert: one scale of the whole weight (as a_scales, which with tables has one for each row), a scale of
            // each column, and a bias.
            if constexpr (A_SCALES && !IS_TABLE) epilogue.a_scales = a_scales + expert;
            if constexpr (B_SCALES) epilogue.b_scales = b_scales + expert * n;
            if constexpr (BIAS > 0) epilogue.bias = bias + expert * n;
        }
        float accum[PRODUCTS][TILE_M / 2], promoted[APART ? PRODUCTS : 1][TILE_M / 2] = {};
        uint32_t weights[2][CHUNK][PRODUCTS][4];
        terms_t group_params[PRODUCTS][2];
        int previous = 0;
        for (int k_tile = tile.first; k_tile < tile.last; ++k_tile, ring.advance()) {
            const uint8_t* from = shared + ring.stage * STAGE_BYTES;
            const uint64_t a = make_smem_desc(from);
            const uint8_t* const quants = from + A_BYTES;
            lane_quants_t words[2][CHUNK][PRODUCTS];
            const auto read = [&](int part) {
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) {
                    lane_quants_t::template read<PRODUCTS, RECODED>(words[part % 2][i],
                                                                    reinterpret_cast<const uint32_t*>(quants),
                                                                    part * CHUNK + i, warp * PRODUCTS);
                }
            };
            sync_warp();  // all lanes have read the previous stage, which this k-tile releases
            ring.wait();
            // Timeline of a k-tile's parts; q: quants, w: operands. Dequantization overlaps with the previous WGMMA.
            //   part    0         1         2
            //   LDS     q0, q1    q2        q3    quants of the next part
            //   CVT     w0        w1        w2    register operands, two sets
            //   WGMMA        w0        w1         w2    wait<1> before the older set is rewritten; APART: wait<0>
            read(0);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                auto& operands = weights[part % 2];
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) {
                    const int slice = part * CHUNK + i;  // k-slice: PRODUCT_K rows of w
                    if (slice == 0 || (GROUPS > 1 && slice * PRODUCT_K % GROUP_SIZE == 0)) {
                        const int group = slice * GROUPS * PRODUCT_K / TILE_K;
#pragma unroll
                        for (int j = 0; j < PRODUCTS * 2; ++j) {
                            group_params[j / 2][j % 2].load(quants + QUANT_BYTES, SCALE_BYTES, group,
                                                            places[j / 2][j % 2]);
                        }
                    }
#pragma unroll
                    for (int j = 0; j < PRODUCTS; ++j) {
#pragma unroll
                        for (int l = 0; l < 4; ++l) {
                            operands[i][j][l] =
                                group_params[j][l % 2].weight(decode, words[part % 2][i][j], l % 2, l / 2);
                        }
                    }
                }
                if (part + 1 < PARTS) read(part + 1);  // the loads are in flight while the WGMMAs are issued
#pragma unroll
                for (int j = 0; j < PRODUCTS; ++j) warpgroup_fence_operand(accum[j]);
                warpgroup_arrive();
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) {
#pragma unroll
                    for (int j = 0; j < PRODUCTS; ++j) {
                        const int slice = part * CHUNK + i;
                        wgmma<scalar_t, TILE_M>(accum[j], operands[i][j],
                                                advance_smem_desc(a, slice / 4 * BOX_BYTES + slice % 4 * 32),
                                                APART ? i > 0 : slice > 0 || k_tile > tile.first);
                    }
                }
                warpgroup_commit_batch();
                // Wait for the previous WGMMAs: the next part rewrites their operands. APART: wait for these, to
                // promote them.
                warpgroup_wait<APART ? 0 : 1>();
                if constexpr (APART) {
#pragma unroll
                    for (int j = 0; j < PRODUCTS; ++j) warpgroup_fence_operand(accum[j]);
#pragma unroll
                    for (int i = 0; i < PRODUCTS * TILE_M / 2; ++i) {
                        promoted[i / (TILE_M / 2)][i % (TILE_M / 2)] += accum[i / (TILE_M / 2)][i % (TILE_M / 2)];
                    }
                }
                if (part == 0) {
                    if (k_tile > tile.first) ring.template release<NEIGHBOURS>(previous);
                    previous = ring.stage;
                }
            }
        }
        warpgroup_wait<0>();
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) warpgroup_fence_operand(accum[j]);
#pragma unroll
        for (int i = 0; i < PRODUCTS * TILE_M / 2 && APART; ++i) {
            accum[i / (TILE_M / 2)][i % (TILE_M / 2)] = promoted[i / (TILE_M / 2)][i % (TILE_M / 2)];
        }
        sync_warp();
        ring.template release<NEIGHBOURS>(previous);
        if (!tile.template complete<CONSUMER_WARPS>(accum, partial, arrived)) continue;

        if constexpr (TMA_STORE) {
            uint8_t* const own_stores = store_memory + warp * STORE_STAGES * STORE_BYTES;
            typename decltype(epilogue)::Column columns[PRODUCTS][2];
#pragma unroll
            for (int j = 0; j < PRODUCTS * 2; ++j) {
                const int column = first_column + column_of(warp, j / 2, j % 2);
                columns[j / 2][j % 2] = epilogue.column(min(int64_t(column), n - 1));
            }
#pragma unroll
            for (int part = 0; part < TILE_M / 16; ++part) {
                uint8_t* const to = own_stores + store * STORE_BYTES;
                store = (store + 1) % STORE_STAGES;
                if (lane == 0) tma_store_wait_read<STORE_STAGES - 1>();
                sync_warp();
#pragma unroll
                for (int j = 0; j < PRODUCTS; ++j) {
                    uint32_t pairs[4];
#pragma unroll
                    for (int l = 0; l < 4; ++l) {
                        const int at = (part * 2 + l % 2) * 4 + l / 2 * 2;
                        float x[2];
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int64_t row = first_row + part * 16 + l % 2 * 8 + lane % 4 * 2 + e;
                            const auto row_params = epilogue.row(min(row, m - 1));
                            x[e] = ACTIVATION<out_t>(
                                epilogue.value(row_params, columns[j][l / 2], accum[j][at + e] * SUM_FACTOR));
                        }
                        pairs[l] = pack_pair<out_t>(x[0], x[1]);
                    }
                    stmatrix<4, true>(to + swizzle_chunk<STORE_ROW_BYTES>(lane % 16, j * 2 + lane / 16), pairs);
                }
                fence_proxy_async();
                sync_warp();
                if (lane == 0) {
                    tma_store(&out_map, to, first_column + warp * PRODUCTS * 16, first_row + part * 16);
                    tma_store_commit();
                }
            }
        } else {
            const auto finish = [&](int fragment, const Fragment<float>& own) {
                const int i = fragment / CONSUMER_WARPS, product = i / (TILE_M / 8);
                const int64_t row = first_row + i % (TILE_M / 8) * 8 + lane % 4 * 2;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    int64_t m_at = row + j % 2;
                    const int64_t n_at = first_column + column_of(fragment % CONSUMER_WARPS, product, j / 2);
                    if (m_at >= m || n_at >= n) continue;
                    if constexpr (GROUPED) {
                        m_at = sorted_token_ids[m_at];
                        if (m_at < 0 || m_at >= num_rows) continue;
                    }
                    float x = epilogue.value(epilogue.row(m_at), epilogue.column(n_at), own.sums[j] * SUM_FACTOR);
                    if constexpr (ROUTED) x = ieee_multiply(topk_weights[m_at], x);
                    out[m_at * out_stride + n_at] = from_float<out_t>(ACTIVATION<out_t>(x));
                }
            };
#pragma unroll
            for (int i = 0; i < WARP_FRAGMENTS; ++i) {
                const int fragment = i * CONSUMER_WARPS + warp;
                const float* four = accum[i / (TILE_M / 8)] + i % (TILE_M / 8) * 4;
                const Fragment<float> own = {four[0], four[1], four[2], four[3]};
                if constexpr (SPLITS > 1) cluster_reduce.send(split, fragment, own);
                else finish(fragment, own);
            }
            if constexpr (SPLITS > 1) cluster_reduce.add_up(split, warp, CONSUMER_WARPS, finish);
        }
    }
    if (TMA_STORE && lane == 0) tma_store_wait<0>();
}
