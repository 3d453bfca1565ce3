// wq_gemm_sm90: a product with a weight of packed codes on Hopper's tensor cores.
//
//     w[k, n] = T(scale[g, n] * (code[k, n] - zero[g, n]))    g: the group of row k    T: scalar_t
//     layout_w4a8: w[k, n] = the product of scale[g, n] and code[k, n] that a table has    T: fp8_e4m3_t
//     ADDED: w[k, n] = T(scale[g, n] * (code[k, n] - ZERO_POINT) + zeros[g, n])
//     out[m, n] = what gemm_epilogue.cuh makes of sum_k a[m, k] * w[k, n], in float32
//
// Operands are swapped: columns of w are the 64 rows of a wgmma, which come from registers, and rows of a its TILE_M
// columns. A tile is TILE_M rows and TILE_N columns of out, half of the columns for each of two warpgroups, 16 * PRODUCTS
// of them for a warp. A step is 128 bytes of a row of a, 64 rows of w, with layout_w4a8 128; or BOXES times as much. One
// thread of a block loads, ahead by STAGES steps: a, codes, scales and zero points. The warpgroups make operands of the
// codes of CHUNK products while the products before are computed.
//
// GROUPED: rows of out belong to experts, each with a weight; K is whole steps. Rows of a are places of lists that
// moe_align_block_size has written (grouped.cuh), gathered before: place p holds row t of out, which is
// sorted_token_ids[p]. ROUTED: it is multiplied by topk_weights[t]. Rows whose expert does not exist are left as they are.
//
// SPLITS: the blocks of a cluster share a tile, each with a part of K, and add up sums by cluster_reduce.cuh. Tiles of more
// than 64 rows are stored by the copy engine, but those of experts; with CUT, those of the last round are cut along K
// (stream_k.cuh). NEIGHBOURS: the blocks of a cluster have tiles of the same rows, side by side, and the same steps. Each
// loads a part of the rows of a, and multicasts it.
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t; with layout_w4a8 fp8_e4m3_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1, GATED false
//     BITS, EXPONENT, LAYOUT, RECODED, HAS_SCALES, scale_t, SCALE, GROUP_SCALE_EXPONENT, SCALE_ORDER, ZERO_CODES, ZERO_FLOATS, ZERO_POINT, ADDED, GROUP_SIZE
//                   of packed_weight.cuh; BITS is 4, 8 but for layout_awq, or of GPTQ 2
//     TILE_M        rows of a tile: a multiple of 16, at most 256
//     TILE_N        columns of a tile: 128 or 256
//     BOXES         of 128 bytes of a row of a, in a step: 1, or 2 of layout_marlin
//     CHUNK         products of 16 rows of w, of 8-bit numbers 32, in flight: 1 or 2
//     STAGES        steps of K in shared memory
//     SPLITS        blocks of a cluster, of tiles of at most 64 rows; there is a step of K for each
//     NEIGHBOURS    blocks of a cluster whose tiles lie side by side: 1 or 2; of tiles that the copy engine stores
//     APART         whether the sums of each chunk are added up by threads, in float32: tensor cores' sums of fp8 have 14
//                   bits (wgmma.cuh), which a result of float16 would show. CHUNK is 2, a tile has 128 x 128 sums at most
//     CUT           whether tiles of the last round are cut; of tiles of more than 64 rows
//     GROUPED, ROUTED    whether rows belong to experts, whose tiles have one split, and have weights
//     MIN_BLOCKS
// If sums are shared, there are as many clusters as tiles.

#include "cluster.cuh"
#include "cluster_reduce.cuh"
#include "stream_k.cuh"
#include "gemm_epilogue.cuh"
#include "pipeline.cuh"
#include "packed_table.cuh"
#include "wgmma.cuh"

constexpr int CONSUMER_WARPS = 8, ROW_BYTES = 128, TILE_K = BOXES * ROW_BYTES / sizeof(scalar_t);
constexpr int PRODUCT_K = 32 / sizeof(scalar_t);                   // rows of w of a wgmma
constexpr int PRODUCTS = TILE_N / 128, PARTS = BOXES * 4 / CHUNK;  // wgmmas side by side; chunks of a step
constexpr int GROUPS = GROUP_SIZE > 0 && GROUP_SIZE < TILE_K ? TILE_K / GROUP_SIZE : 1;  // of a step
constexpr int BOX_BYTES = TILE_M * ROW_BYTES, A_BYTES = BOXES * BOX_BYTES, CODE_BYTES = TILE_K * TILE_N * BITS / 8;
constexpr int SCALE_BYTES = HAS_SCALES ? GROUPS * TILE_N * (IS_TABLE ? 8 : sizeof(scale_t)) : 0;
constexpr int ZERO_BYTES = ZERO_CODES ? GROUPS * TILE_N * BITS / 8 : ADDED || ZERO_FLOATS ? GROUPS * TILE_N * 2 : 0;
constexpr int LOAD_BYTES = A_BYTES + CODE_BYTES + SCALE_BYTES + ZERO_BYTES;
constexpr int STAGE_BYTES = ceil_div(LOAD_BYTES, 1024) * 1024;
constexpr bool BY_STORES = TILE_M > 64 && !GROUPED;  // rows of experts lie apart
// Where sums take many registers, those of a producing warpgroup go to the others.
constexpr bool MANY_SUMS = PRODUCTS * TILE_M * (APART ? 2 : 1) > 128;
constexpr int NUM_THREADS = MANY_SUMS ? 384 : 32 * (CONSUMER_WARPS + 1);
constexpr int WARP_FRAGMENTS = PRODUCTS * TILE_M / 8, FRAGMENTS = CONSUMER_WARPS * WARP_FRAGMENTS;
constexpr int STORE_ROW_BYTES = 32 * PRODUCTS, STORE_BYTES = 16 * STORE_ROW_BYTES, STORES = 2;
static_assert(TILE_M % 16 == 0 && TILE_M <= 256 && (TILE_N == 128 || TILE_N == 256) && (CHUNK == 1 || CHUNK == 2));
static_assert(GROUP_SIZE == 0 || GROUP_SIZE % TILE_K == 0 || (TILE_K % GROUP_SIZE == 0 && GROUP_SIZE % PRODUCT_K == 0));
static_assert(IS_TABLE == (sizeof(scalar_t) == 1) && (!IS_TABLE || (HAS_SCALES && BITS == 4)));
static_assert(!RECODED || (LAYOUT == layout_marlin_8 && ZERO_POINT == 8 && EXPONENT == 0));
static_assert(EXPONENT == 0 || (!ZERO_CODES && ZERO_POINT == 0), "floats have no zero points");
static_assert(!ZERO_FLOATS || !(HAS_SCALES || ZERO_CODES || ADDED || EXPONENT > 0));
static_assert(HAS_SCALES || (!ADDED && GROUP_SCALE_EXPONENT == 0));
static_assert((!CUT && NEIGHBOURS == 1) || (BY_STORES && SPLITS == 1 && NEIGHBOURS <= 2));
static_assert((!APART || (CHUNK == 2 && PRODUCTS * TILE_M <= 128)) && (BOXES == 1 || LAYOUT == layout_marlin));
static_assert(!GROUPED || (SPLITS == 1 && !IS_TABLE));
static_assert((SPLITS == 1 || !BY_STORES) && !GATED && BIAS <= 1 && AZP == 0);

using code_t = conditional_t<IS_TABLE, TableCode, Code>;
using terms_t = conditional_t<IS_TABLE, TableTerms, Terms>;
constexpr float SUM_FACTOR = IS_TABLE ? 1.0f : codes_t::SUM_FACTOR;
using cluster_sums_t = ClusterSums<float, SPLITS, SPLITS, FRAGMENTS>;

extern "C" __global__ void CLUSTER_OF(SPLITS * NEIGHBOURS) LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
wq_gemm_sm90(const __grid_constant__ TensorMap a_map,       // [M, K], boxes of TILE_M / NEIGHBOURS x TILE_K, swizzled
             const __grid_constant__ TensorMap codes_map,   // packed_weight.cuh, boxes of a step of TILE_N columns
             const __grid_constant__ TensorMap scales_map,  // [groups, N], boxes of GROUPS x TILE_N
             const __grid_constant__ TensorMap zeros_map,   // [groups, N] or words of codes, boxes of as many columns
             const __grid_constant__ TensorMap out_map,     // [M, N], boxes of 16 x 16 * PRODUCTS, swizzled
             out_t* out,                                    // [M, N]
             const a_scale_t* a_scales,                     // [M] or [1]
             const b_scale_t* b_scales,                     // [N] or [1]
             const out_t* bias,                             // [N]
             const int32_t* sorted_token_ids,               // [M], of GROUPED; any numbers
             const int32_t* expert_ids,                     // [M / block_size]
             const int32_t* num_tokens_post_pad,            // [1]
             const float* topk_weights,                     // [num_rows]
             float* partial,                                // of CUT: sums and counters of stream_k.cuh
             uint32_t* arrived, int64_t m, int64_t n, int64_t k, int64_t groups, int64_t out_stride,
             int64_t a_scale_step, int64_t b_scale_step, int64_t num_rows, int64_t num_experts, int64_t block_size,
             int64_t sharers) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* const behind = shared + STAGES * STAGE_BYTES;  // the received sums, or tiles that are stored
    constexpr int BYTES = BY_STORES ? CONSUMER_WARPS * STORES * STORE_BYTES : cluster_sums_t::BYTES;
    const cluster_sums_t sums{reinterpret_cast<Fragment<float>*>(behind), reinterpret_cast<uint64_t*>(behind + BYTES)};
    Ring<STAGES> ring(sums.all_received + 1);
    const int split = SPLITS > 1 ? blockIdx.y : 0, neighbour = NEIGHBOURS > 1 ? blockIdx.y : 0;
    if (threadIdx.x == 0) {
        sums.init();
        ring.init(CONSUMER_WARPS * NEIGHBOURS);
    }
    start_cluster<SPLITS * NEIGHBOURS>();

    // Of places, only those in use are dealt out: tiles without an expert would fall to some blocks more than to others.
    const int num_places = GROUPED ? int(min(int64_t(max(*num_tokens_post_pad, 0)), m)) : 0;
    const int rows = int(((GROUPED ? num_places : m) + TILE_M - 1) / TILE_M), steps = int((k + TILE_K - 1) / TILE_K);
    const int tiles = rows * int((n + NEIGHBOURS * TILE_N - 1) / (NEIGHBOURS * TILE_N));  // of neighbours together
    const int first_step = int(int64_t(steps) * split / SPLITS);
    const int last_step = int(int64_t(steps) * (split + 1) / SPLITS);
    CutTile<CUT> tile(tiles, first_step, last_step, int(sharers));
    const auto first_column_of = [&](int place) { return (place * NEIGHBOURS + neighbour) * TILE_N; };
    const int64_t rest = tiles - tile.whole;  // neighbours have sums and counters of their own
    partial += neighbour * (sharers + rest - 1) * (TILE_M * TILE_N);
    arrived += neighbour * rest * CONSUMER_WARPS;
    // The expert of a tile of rows; -1 if it has none.
    const auto expert_of = [&](int first_row) {
        if constexpr (!GROUPED) return 0;
        const int expert = expert_ids[first_row / block_size];
        return expert < num_experts ? expert : -1;
    };
    const int warp = shfl<WARP_SIZE>(int(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
    if (warp >= CONSUMER_WARPS) {
        if constexpr (MANY_SUMS) warpgroup_reg_dealloc<40>();
        if (warp > CONSUMER_WARPS || !elect_one()) return;
        for (; tile.exists(); tile.advance()) {
            const int first_row = tile.number % rows * TILE_M, first_column = first_column_of(tile.number / rows);
            const int expert = expert_of(first_row);
            if (expert < 0) continue;
            for (int step = tile.first; step < tile.last; ++step, ring.advance()) {
                ring.acquire();
                uint8_t* to = shared + ring.stage * STAGE_BYTES;
                mbarrier_arrive_expect_tx(ring.full(), LOAD_BYTES);
                code_t::load(to + A_BYTES, &codes_map, ring.full(), expert * steps + step, first_column);
                for (int i = 0; i < BOXES; ++i) {
                    load_rows<NEIGHBOURS, TILE_M, ROW_BYTES>(to + i * BOX_BYTES, &a_map, ring.full(), neighbour,
                                                             step * TILE_K + i * (TILE_K / BOXES), first_row);
                }
                const int group = expert * int(groups) + (GROUP_SIZE > 0 ? step * TILE_K / max(1, GROUP_SIZE) : 0);
                to += A_BYTES + CODE_BYTES;
                if constexpr (HAS_SCALES) tma_load(to, &scales_map, ring.full(), first_column, group);
                to += SCALE_BYTES;
                if constexpr (ADDED || ZERO_FLOATS) tma_load(to, &zeros_map, ring.full(), first_column, group);
                if constexpr (ZERO_CODES) tma_load(to, &zeros_map, ring.full(), first_column * BITS / 32, group);
            }
        }
        if constexpr (NEIGHBOURS > 1) ring.drain();
        return;
    }

    if constexpr (MANY_SUMS) warpgroup_reg_alloc<232>();
    Epilogue<out_t, A_SCALES, B_SCALES, 0, BIAS, SCALE_EXPONENT> epilogue{a_scales, b_scales,     nullptr,      nullptr,
                                                                          bias,     a_scale_step, b_scale_step, 0};
    // The column, in the tile, of a lane's sums number h of a product.
    const auto column_of = [&](int of_warp, int product, int h) {
        return (of_warp * PRODUCTS + product) * 16 + h * 8 + lane / 4;
    };
    const codes_t decode;
    Place places[PRODUCTS][2];
#pragma unroll
    for (int j = 0; j < PRODUCTS * 2; ++j) places[j / 2][j % 2] = place_of(column_of(warp, j / 2, j % 2));
    int store = 0;
    for (; tile.exists(); tile.advance()) {
        const int first_row = tile.number % rows * TILE_M, first_column = first_column_of(tile.number / rows);
        if constexpr (GROUPED) {
            const int expert = expert_of(first_row);
            if (expert < 0) continue;
            // One scale of the whole weight, a scale of each column, a bias.
            if constexpr (A_SCALES) epilogue.a_scales = a_scales + expert;
            if constexpr (B_SCALES) epilogue.b_scales = b_scales + expert * n;
            if constexpr (BIAS > 0) epilogue.bias = bias + expert * n;
        }
        float d[PRODUCTS][TILE_M / 2], totals[APART ? PRODUCTS : 1][TILE_M / 2] = {};
        uint32_t weights[2][CHUNK][PRODUCTS][4];
        terms_t terms[PRODUCTS][2];
        int previous = 0;
        for (int step = tile.first; step < tile.last; ++step, ring.advance()) {
            const uint8_t* from = shared + ring.stage * STAGE_BYTES;
            const uint64_t a = make_smem_desc(from);
            const uint8_t* const codes = from + A_BYTES;
            code_t code[2][CHUNK][PRODUCTS];
            const auto read = [&](int part) {
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) code_t::read(code[part % 2][i], codes, part * CHUNK + i, warp);
            };
            sync_warp();  // lanes have read what they need of the stage before, which is released in this step
            ring.wait();
            read(0);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                auto& operands = weights[part % 2];
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) {
                    const int slice = part * CHUNK + i;  // of PRODUCT_K rows
                    if (slice == 0 || (GROUPS > 1 && slice * PRODUCT_K % GROUP_SIZE == 0)) {
                        const int group = slice * GROUPS * PRODUCT_K / TILE_K;
#pragma unroll
                        for (int j = 0; j < PRODUCTS * 2; ++j) {
                            terms[j / 2][j % 2].load(codes + CODE_BYTES, SCALE_BYTES, group, places[j / 2][j % 2]);
                        }
                    }
#pragma unroll
                    for (int j = 0; j < PRODUCTS; ++j) {
#pragma unroll
                        for (int l = 0; l < 4; ++l) {
                            operands[i][j][l] = terms[j][l % 2].weight(decode, code[part % 2][i][j], l % 2, l / 2);
                        }
                    }
                }
                if (part + 1 < PARTS) read(part + 1);  // on their way while the products begin
#pragma unroll
                for (int j = 0; j < PRODUCTS; ++j) warpgroup_fence_operand(d[j]);
                warpgroup_arrive();
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) {
#pragma unroll
                    for (int j = 0; j < PRODUCTS; ++j) {
                        const int slice = part * CHUNK + i;
                        wgmma<scalar_t, TILE_M>(d[j], operands[i][j],
                                                advance_smem_desc(a, slice / 4 * BOX_BYTES + slice % 4 * 32),
                                                APART ? i > 0 : slice > 0 || step > tile.first);
                    }
                }
                warpgroup_commit_batch();
                // For the products before, whose operands are written next; APART for these.
                warpgroup_wait<APART ? 0 : 1>();
                if constexpr (APART) {
#pragma unroll
                    for (int j = 0; j < PRODUCTS; ++j) warpgroup_fence_operand(d[j]);
#pragma unroll
                    for (int i = 0; i < PRODUCTS * TILE_M / 2; ++i) {
                        totals[i / (TILE_M / 2)][i % (TILE_M / 2)] += d[i / (TILE_M / 2)][i % (TILE_M / 2)];
                    }
                }
                if (part == 0) {
                    if (step > tile.first) ring.template release<NEIGHBOURS>(previous);
                    previous = ring.stage;
                }
            }
        }
        warpgroup_wait<0>();
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) warpgroup_fence_operand(d[j]);
#pragma unroll
        for (int i = 0; i < PRODUCTS * TILE_M / 2 && APART; ++i) {
            d[i / (TILE_M / 2)][i % (TILE_M / 2)] = totals[i / (TILE_M / 2)][i % (TILE_M / 2)];
        }
        sync_warp();
        ring.template release<NEIGHBOURS>(previous);
        if (!tile.template complete<CONSUMER_WARPS>(d, partial, arrived)) continue;

        if constexpr (BY_STORES) {
            uint8_t* const own_stores = behind + warp * STORES * STORE_BYTES;
            typename decltype(epilogue)::Column columns[PRODUCTS][2];
#pragma unroll
            for (int j = 0; j < PRODUCTS * 2; ++j) {
                const int column = first_column + column_of(warp, j / 2, j % 2);
                columns[j / 2][j % 2] = epilogue.column(min(int64_t(column), n - 1));
            }
#pragma unroll
            for (int part = 0; part < TILE_M / 16; ++part) {
                uint8_t* const to = own_stores + store * STORE_BYTES;
                store = (store + 1) % STORES;
                if (lane == 0) tma_store_wait_read<STORES - 1>();
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
                            const auto row_terms = epilogue.row(min(row, m - 1));
                            x[e] = ACTIVATION<out_t>(
                                epilogue.value(row_terms, columns[j][l / 2], d[j][at + e] * SUM_FACTOR));
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
                const float* four = d[i / (TILE_M / 8)] + i % (TILE_M / 8) * 4;
                const Fragment<float> own = {four[0], four[1], four[2], four[3]};
                if constexpr (SPLITS > 1) sums.send(split, fragment, own);
                else finish(fragment, own);
            }
            if constexpr (SPLITS > 1) sums.add_up(split, warp, CONSUMER_WARPS, finish);
        }
    }
    if (BY_STORES && lane == 0) tma_store_wait<0>();
}
