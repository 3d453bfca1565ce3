// wq_gemm_sm90: the weight-only quantized GEMM on Hopper's tensor cores (WGMMA, swap-AB, weights from registers).
//
//     w[k, n] = T(scale[g, n] * (quant[k, n] - zero[g, n]))    g: the group of row k    T: scalar_t
//     IS_TABLE: w[k, n] = the product of scale[g, n] and quant[k, n], from a lookup table    T: fp8_e4m3_t
//     ADDED: w[k, n] = T(scale[g, n] * (quant[k, n] - ZERO_POINT) + zeros[g, n])
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to sum_k a[m, k] * w[k, n], in float32
//
// Operands are swapped (swap-AB): 64 columns of w are the M of a WGMMA, read from registers, and TILE_M rows of a are
// its N, read from shared memory. A tile is TILE_M rows and TILE_N columns of out. Each of two consumer warpgroups has
// half of the columns, and each warp 16 * PRODUCTS of them. A k-tile is BOXES times 128 bytes of a row of a: 64 * BOXES
// rows of w, or 128 with 8-bit operands. One producer thread per CTA runs up to STAGES k-tiles ahead: it loads a,
// quants, scales and zero points. The consumers dequantize the operands of one part of a k-tile, CHUNK WGMMAs deep in
// K, while the WGMMAs of the previous part run.
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
// The parts of the kernel are the loader (TileLoader), the scheduler (stream_k.cuh), the main loop
// (wq_mainloop_sm90.cuh) and the epilogue (wq_epilogue_sm90.cuh).
//
// TMA takes as long for a row past the end of a tensor as for another one. So a's tile is loaded in boxes of
// `a_box_rows`, and those without a row of a are left out: their accumulators are never stored.
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t; with tables (IS_TABLE) fp8_e4m3_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1, GATED false
//     BITS, EXPONENT, LAYOUT, RECODED, HAS_SCALES, scale_t, SCALE, GROUP_SCALE_EXPONENT, SCALE_ORDER, ZERO_CODES,
//     ZERO_FLOATS, ZERO_POINT, ADDED, GROUP_SIZE
//                   of packed_weight.cuh; the layout has WgmmaQuants
//     TILE_M        rows of a tile: a multiple of 16, at most 256
//     TILE_N        columns of a tile: 128 or 256
//     BOXES         TMA boxes of a per k-tile, 128 bytes of each row: 1 or 2
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
#include "stream_k.cuh"
#include "wq_epilogue_sm90.cuh"
#include "wq_mainloop_sm90.cuh"

// The producer of a tile: loads its k-tiles by TMA.
struct TileLoader {
    struct { const TensorMap *a, *quants, *scales, *zeros; } maps;
    uint8_t* shared;
    int cluster_rank, box_rows, first_row, first_column;
    int boxes;                      // boxes of a that exist
    int first_k_tile, first_group;  // of the expert's weight

    DEVICE void load(const Ring<STAGES>& ring, int k_tile) const {
        uint8_t* to = shared + ring.stage * STAGE_BYTES;
        mbarrier_arrive_expect_tx(ring.full(), BOXES * boxes * box_rows * ROW_BYTES + LOAD_BYTES - A_BYTES);
        const quants_box_t quants_box(first_k_tile + k_tile, first_column);
        tma_load(to + A_BYTES, maps.quants, ring.full(), quants_box.x, quants_box.y, quants_box.z);
        for (int i = 0; i < BOXES; ++i) {
            for (int box = cluster_rank; box < boxes; box += NEIGHBOURS) {
                load_box<NEIGHBOURS>(to + i * BOX_BYTES + box * box_rows * ROW_BYTES, maps.a, ring.full(),
                                     k_tile * TILE_K + i * (TILE_K / BOXES), first_row + box * box_rows);
            }
        }
        const int group = first_group + (GROUP_SIZE > 0 ? k_tile * TILE_K / max(1, GROUP_SIZE) : 0);
        to += A_BYTES + QUANT_BYTES;
        if constexpr (HAS_SCALES) tma_load(to, maps.scales, ring.full(), first_column, group);
        to += SCALE_BYTES;
        if constexpr (ADDED || ZERO_FLOATS) tma_load(to, maps.zeros, ring.full(), first_column, group);
        if constexpr (ZERO_CODES) tma_load(to, maps.zeros, ring.full(), first_column * BITS / 32, group);
    }
};

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
    constexpr int BYTES = TMA_STORE ? CONSUMER_WARPS * tma_store_t::BYTES : cluster_sums_t::BYTES;
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
            const TileLoader loader{{&a_map, &quants_map, &scales_map, &zeros_map},
                                    shared,
                                    cluster_rank,
                                    box_rows,
                                    first_row,
                                    first_column,
                                    boxes,
                                    expert * num_k_tiles,
                                    expert * int(groups)};
            for (int k_tile = tile.first; k_tile < tile.last; ++k_tile, ring.advance()) {
                ring.acquire();
                loader.load(ring, k_tile);
            }
        }
        if constexpr (NEIGHBOURS > 1) ring.drain();
        return;
    }

    if constexpr (REGISTER_REALLOC) warpgroup_reg_alloc<232>();
    epilogue_t epilogue{a_scales, b_scales, nullptr, nullptr, bias, a_scale_step, b_scale_step, 0};
    const quants_t decode;
    Place places[PRODUCTS][2];
#pragma unroll
    for (int j = 0; j < PRODUCTS * 2; ++j) places[j / 2][j % 2] = place_of(column_of(warp, j / 2, j % 2, lane));
    tma_store_t tma_store{&out_map, store_memory + warp * tma_store_t::BYTES, lane};
    for (; tile.exists(); tile.advance()) {
        const int first_row = tile.number % rows * TILE_M, first_column = first_column_of(tile.number / rows);
        if constexpr (GROUPED) {
            const int expert = expert_of(first_row);
            if (expert < 0) continue;
            // Per expert: one scale of the whole weight (as a_scales, which with tables has one for each row), a scale
            // of each column, and a bias.
            if constexpr (A_SCALES && !IS_TABLE) epilogue.a_scales = a_scales + expert;
            if constexpr (B_SCALES) epilogue.b_scales = b_scales + expert * n;
            if constexpr (BIAS > 0) epilogue.bias = bias + expert * n;
        }
        accum_t accum;
        run_mainloop(accum, ring, shared, warp, decode, places, tile.first, tile.last);
        if (!tile.template complete<CONSUMER_WARPS>(accum, partial, arrived)) continue;

        if constexpr (TMA_STORE) {
            store_by_tma(tma_store, accum, epilogue, warp, lane, first_row, first_column, m, n);
        } else {
            const ThreadStore store{out,      epilogue,   sorted_token_ids, topk_weights, m,   n,
                                    num_rows, out_stride, first_row,        first_column, lane};
            store_by_threads(store, accum, cluster_reduce, split, warp);
        }
    }
    if constexpr (TMA_STORE) tma_store.wait();
}
