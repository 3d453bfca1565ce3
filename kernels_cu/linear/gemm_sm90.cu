// gemm_sm90: the GEMM for large M on Hopper's tensor cores (TMA, WGMMA, warp-specialised, persistent).
//
//     accum[m, n] = sum_k a[m, k] * b[n, k], in float32; int8 operands in int32
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to accum[m, n]
//
// SCALE_BLOCK: blockwise scaling. accum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * partial[j], where
// partial[j] sums over the j-th SCALE_BLOCK elements of K.
// SUM_BLOCK: the tensor cores accumulate SUM_BLOCK elements of K, then the threads promote the result: they add it to
// float32 registers (wgmma.cuh describes the precision of fp8 accumulation).
//
// GATED: b has 2 N rows, gates and then ups; a tile's b is TILE_N / 2 rows of each, and the epilogue combines them:
// out[m, n] = ACTIVATION(gate) * up. A thread's accumulators hold both for the same columns.
//
// The grid is as many clusters as the device holds at a time; each takes output tiles of 128 x TILE_N, one after
// another. STREAM_K: the tiles that would not fill the last wave are divided along K among all clusters (stream_k.cuh).
// A cluster is CTAs with adjacent tiles: CLUSTER_M along M, which share the tile of b, or CLUSTER_N along N, which
// share the tile of a. Each CTA loads a part of the shared tile, and multicasts it to the cluster. A CTA has three
// warpgroups. One thread of the last is the producer: it runs up to STAGES k-tiles ahead, and a k-tile is 128 bytes of
// each row. The other two are consumers. They share a tile, each with half of its rows, and do not synchronise; or,
// with PING_PONG, they take alternate whole tiles, so that one runs its epilogue while the other runs its main loop. In
// the epilogue a warp stores 16 rows x STORE_COLUMNS columns at a time with TMA, from a swizzled tile in shared memory.
//
// TMA spends about 2 ns on each row past the end of a tensor. So a box of its own size, a_tail_map, loads the rows of
// the last, partial row tile; the accumulators of the other rows are never stored. Each CTA loads these rows for
// itself.
//
// Up to `group_rows` row tiles, in clusters, form a group that shares columns of b in the L2 cache.
//
// Five parts make the kernel: the scheduler (tile_scheduler.cuh), the loader (TileLoader), the main loop
// (mainloop_sm90.cuh), the promotion (block_promotion.cuh), for which two more warps of the producer's warpgroup load
// block scales, and the epilogue (tile_epilogue.cuh).
//
// Constants
//     scalar_t      element type of a and b: 16 or 8 bits
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1
//     SCALE_BLOCK   elements that share a block scale: 128 with 8-bit operands, or 0
//     SUM_BLOCK     elements of K between two promotions: a k-tile or half of it; 0, without SCALE_BLOCK: no promotion
//     TILE_N        rows of b of a tile: a multiple of 16, or of 64 with SCALE_BLOCK; at most 256, with PING_PONG 192,
//                   with SUM_BLOCK 128, or 192 or 256 itself. GATED: a multiple of 32, without SCALE_BLOCK
//     PING_PONG     whether the two consumer warpgroups take alternate tiles; not with SUM_BLOCK
//     STREAM_K      whether the last wave is divided along K; not with PING_PONG
//     STORE_COLUMNS columns of a store: 16, 32 or 64, a divisor of the columns of out that a tile has
//     STAGES        k-tiles of the ring in shared memory
//     CLUSTER_M, CLUSTER_N    CTAs of a cluster along M and along N, one of them 1; TILE_N is a multiple of
//                   8 * CLUSTER_M

#include "cluster.cuh"
#include "mainloop_sm90.cuh"
#include "tile_epilogue.cuh"
#include "tile_scheduler.cuh"

constexpr int CONSUMERS = 2, NUM_THREADS = 128 * (CONSUMERS + 1), TILE_M = 128;
// Warpgroups that share a tile; WGMMAs of 64 rows by which a warpgroup covers its part of a tile.
constexpr int WGS_PER_TILE = PING_PONG ? 1 : CONSUMERS, M_SLICES = TILE_M / 64 / WGS_PER_TILE;
static_assert(!PING_PONG || (SUM_BLOCK == 0 && !STREAM_K));
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;
static_assert(CLUSTER_M == 1 || CLUSTER_N == 1);
// Runs of consecutive rows of b of a tile, each loaded by itself: by one CTA of a cluster along M, else all by each
// CTA.
constexpr int B_RUNS = GATED ? 2 : CLUSTER_M, RUN_ROWS = TILE_N / B_RUNS;
static_assert(!GATED || (SCALE_BLOCK == 0 && CLUSTER_M <= B_RUNS));
constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(scalar_t);
constexpr int A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
using tma_store_t = TmaStore<out_t, STORE_COLUMNS>;
// Promotion: columns of an accumulator, and accumulators of a thread. Two, so that one is promoted while WGMMAs fill
// the other; more than 128 columns leave registers for one, and the other warpgroup's WGMMAs run while it is promoted.
constexpr int SUM_COLUMNS = SUM_BLOCK > 0 && TILE_N > 192 ? TILE_N / 2 : TILE_N;
constexpr int BUFFERS = SUM_BLOCK > 0 && TILE_N <= 128 ? 2 : 1;
// Pieces of a k-tile that are promoted separately: along K, and along N.
constexpr int K_PIECES = SUM_BLOCK > 0 ? TILE_K / SUM_BLOCK : 1, N_PIECES = TILE_N / SUM_COLUMNS;
constexpr int PIECES = K_PIECES * N_PIECES;
static_assert(SUM_BLOCK == 0 ? SCALE_BLOCK == 0 : K_PIECES * SUM_BLOCK == TILE_K && K_PIECES <= 2);
using mainloop_t = WgmmaMainloop<scalar_t, M_SLICES, SUM_COLUMNS, K_PIECES, N_PIECES, STAGES, STAGE_BYTES, CLUSTER>;
using accum_t = wgmma_sum_t<scalar_t>[M_SLICES][TILE_N / 2];  // a thread's accumulators of a tile
// Registers per thread: the consumers take what the producer gives up.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

constexpr int PARTS = 1, PART_N = TILE_N, SCALE_RUN = TILE_N;
#include "block_promotion.cuh"
constexpr int SCALE_THREADS = 64;  // two warps of the producer's warpgroup

// Rows of the box that loads the last, partial row tile of a.
DEVICE int tail_rows(int64_t m) { return int((m % TILE_M + 7) / 8 * 8); }

// The producer of a tile: loads its k-tiles by TMA.
struct TileLoader {
    const TensorMap *a_map, *b_map;
    uint8_t* shared;
    int rank, first_row, first_column;
    int a_rows;      // rows of a in the stage, 0: the CTA has none
    int run_stride;  // from each run of b's rows to the next

    // (row, column): the CTA's tile.
    DEVICE TileLoader(const TensorMap& full_map, const TensorMap& tail_map, const TensorMap& b_map, uint8_t* shared,
                      int rank, int row, int column, int64_t m, int64_t n)
        : b_map(&b_map),
          shared(shared),
          rank(rank),
          first_row(row * TILE_M),
          first_column(column * OUT_N),
          run_stride(GATED ? int(n) : RUN_ROWS) {
        const int exist = int(m) - first_row;
        a_rows = exist >= TILE_M ? TILE_M : exist > 0 ? tail_rows(m) : 0;
        a_map = a_rows == TILE_M ? &full_map : &tail_map;  // of 121 to 127 rows, too: whole boxes can be multicast
    }
    DEVICE void load(const Ring<STAGES>& ring, int k_tile) const {
        uint8_t* to = shared + ring.stage * STAGE_BYTES;
        mbarrier_arrive_expect_tx(ring.full(), a_rows * ROW_BYTES + B_BYTES);
        if (CLUSTER_N > 1 && a_rows == TILE_M) {
            const int part = rank * (TILE_M / CLUSTER_N);
            load_box<CLUSTER_N>(to + part * ROW_BYTES, a_map, ring.full(), k_tile * TILE_K, first_row + part);
        } else if (a_rows > 0) {
            tma_load(to, a_map, ring.full(), k_tile * TILE_K, first_row);
        }
#pragma unroll
        for (int i = 0; i < B_RUNS / CLUSTER_M; ++i) {
            const int run = CLUSTER_M > 1 ? rank : i;
            load_box<CLUSTER_M>(to + A_BYTES + run * RUN_ROWS * ROW_BYTES, b_map, ring.full(), k_tile * TILE_K,
                                first_column + run * run_stride);
        }
    }
};

// Named barriers: one per warpgroup for its own threads, and one per warpgroup for the ping-pong order.
constexpr int OWN_BARRIER = 1, PING_PONG_BARRIER = OWN_BARRIER + CONSUMERS;

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, 1)
gemm_sm90(const __grid_constant__ TensorMap a_map,       // [M, K], boxes of TILE_M / CLUSTER_N x TILE_K, swizzled
          const __grid_constant__ TensorMap a_tail_map,  // [M, K], boxes of the last M % TILE_M rows (times 8) x TILE_K
          const __grid_constant__ TensorMap b_map,       // [N, K], GATED [2 N, K], boxes of RUN_ROWS x TILE_K, swizzled
          const __grid_constant__ TensorMap out_map,     // [M, N], boxes of 16 x STORE_COLUMNS, swizzled
          const a_scale_t* a_scales,                     // [M] or [1]; SCALE_BLOCK: [M, K / SCALE_BLOCK]
          const b_scale_t* b_scales,                     // [N] or [1]; SCALE_BLOCK: [K / SCALE_BLOCK, N / SCALE_BLOCK]
          const int32_t* azp_adj,                        // [N]
          const int32_t* azp,                            // [M]
          const out_t* bias,                             // [N], GATED [2 N]
          float* partial,                                // STREAM_K: the workspace of stream_k.cuh, and its counters
          uint32_t* arrived, int64_t m, int64_t n, int64_t k, int64_t a_scale_step, int64_t b_scale_step,
          int64_t a_scale_block_step, int64_t b_scale_block_step, int64_t group_rows, int64_t sharers) {
    // Until the previous kernel ends, the CTA prepares its shared memory.
    extern __shared__ __align__(1024) uint8_t shared[];
    prefetch_tensor_maps(a_map, a_tail_map, b_map, out_map);
    // Rows of the last tile that are not loaded; with a cluster it may have none.
    if (m % TILE_M > 0 || CLUSTER_M > 1 && m / TILE_M % CLUSTER_M > 0) {
        const int loaded = CLUSTER_M > 1 ? 0 : tail_rows(m);
        zero_stages<STAGES, STAGE_BYTES>(shared, loaded * ROW_BYTES, A_BYTES, NUM_THREADS);
    }
    uint8_t* stores = shared + STAGES * STAGE_BYTES;
    uint8_t* column_params_memory = stores + 4 * CONSUMERS * tma_store_t::BYTES;
    float* scales = reinterpret_cast<float*>(column_params_memory + CONSUMERS * column_params_t::BYTES);
    Ring<STAGES> ring(scales + STAGES * STAGE_SCALES);
    if (threadIdx.x == 0) ring.init(4 * WGS_PER_TILE * CLUSTER, SCALE_BLOCK > 0 ? 1 + SCALE_THREADS : 1);
    start_cluster<CLUSTER>();
    await_previous_kernel();

    const int rank = CLUSTER > 1 ? blockIdx.y : 0;
    constexpr int CLUSTER_ROWS = TILE_M * CLUSTER_M, CLUSTER_COLUMNS = OUT_N * CLUSTER_N;
    const int rows = int((m + CLUSTER_ROWS - 1) / CLUSTER_ROWS);
    const int columns = int((n + CLUSTER_COLUMNS - 1) / CLUSTER_COLUMNS);
    const int num_k_tiles = int((k + TILE_K - 1) / TILE_K);
    TileScheduler<STREAM_K> tile(rows, columns, num_k_tiles, group_rows, int(sharers));
    const int64_t rest = tile.tiles - tile.whole;  // each CTA of a cluster has its own workspace
    partial += rank * (sharers + rest - 1) * (TILE_M * TILE_N);
    arrived += rank * rest * CONSUMERS * 4;
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;
    int row, column;
    // The CTA's tile of the cluster's current ones.
    const auto locate = [&] {
        tile.locate(row, column);
        row = CLUSTER_M > 1 ? row * CLUSTER_M + rank : row;
        column = CLUSTER_N > 1 ? column * CLUSTER_N + rank : column;
    };

    if (warpgroup == CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        // Loads all k-tiles of all tiles, with a loader for each tile.
        const auto produce = [&](auto loader_of) {
            for (; tile.exists(); tile.advance()) {
                locate();
                auto loader = loader_of();
                for (int k_tile = tile.first; k_tile < tile.last; ++k_tile, ring.advance()) {
                    ring.acquire();
                    loader.load(ring, k_tile);
                }
            }
            ring.drain();
        };
        if (warp == 0 && elect_one()) {
            produce([&] { return TileLoader(a_map, a_tail_map, b_map, shared, rank, row, column, m, n); });
        } else if (SCALE_BLOCK > 0 && warp >= 2) {
            const BlockScales blocks{a_scales,     b_scales,           a_scale_step,
                                     b_scale_step, a_scale_block_step, b_scale_block_step};
            produce([&] {
                return ScaleLoader<SCALE_THREADS>(
                    blocks, scales, tile.first, [&](int i) { return min(row * TILE_M + i, int(m) - 1); },
                    [&](int i) { return min(column * TILE_N + i * SCALE_COLUMNS, int(n) - 1); });
            });
        }
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const epilogue_t epilogue{a_scales, b_scales, azp_adj, azp, bias, a_scale_step, b_scale_step, 0};
        column_params_t column_params{
            {}, reinterpret_cast<float*>(column_params_memory + warpgroup * column_params_t::BYTES)};
        tma_store_t tma_store{&out_map, stores + (warpgroup * 4 + warp) * tma_store_t::BYTES, lane};
        const TileEpilogue tile_epilogue{epilogue, column_params, tma_store};
        // The warpgroup's index in the ping-pong order, and its first row within a tile.
        const int ping_pong_index = PING_PONG ? warpgroup : 0, own_row = PING_PONG ? 0 : warpgroup * 64 * M_SLICES;
        mainloop_t mainloop{ring, shared, own_row * ROW_BYTES, A_BYTES};
        ring.skip(ping_pong_index * num_k_tiles);
        if (ping_pong_index > 0) tile.advance();
        for (; tile.exists(); tile.advance()) {
            locate();
            const int64_t first_column = int64_t(column) * OUT_N;
            const int64_t warp_row = int64_t(row) * TILE_M + own_row + warp * 16;
            const RowParams<M_SLICES> row_params(epilogue, warp_row, m, lane);
            column_params.load([&](int i) {
                const int is_up = GATED && i >= OUT_N;
                return epilogue.column(min(first_column + i - is_up * OUT_N, n - 1) + is_up * n);
            });
            // An mbarrier's phase is one parity bit, so a waiter must be less than one lap of the ring behind. Hence a
            // ping-pong main loop begins only after the other warpgroup has waited for all of its k-tiles.
            if (PING_PONG && tile.number != blockIdx.x)
                named_barrier_sync(PING_PONG_BARRIER + ping_pong_index, 128 * CONSUMERS);

            // Stores the tile, or with STREAM_K a part of it. Each warp finds out by itself whether it is the last one
            // of its rows, so the barriers of the warpgroup come before.
            const auto store_tile = [&](accum_t& accum) {
                column_params.share(OWN_BARRIER + warpgroup);
                if (!tile.template complete<CONSUMERS * 4>(accum, partial, arrived)) return;
                tile_epilogue.store(accum, row_params, warp_row, first_column);
            };

            if constexpr (SUM_BLOCK == 0) {
                mainloop_t::accum_t accum;
                mainloop.run(accum, tile.first, tile.last, [&] {
                    if (PING_PONG && !tile.is_last()) {
                        named_barrier_arrive(PING_PONG_BARRIER + 1 - ping_pong_index, 128 * CONSUMERS);
                    }
                });
                store_tile(reinterpret_cast<accum_t&>(accum));  // of the same type without promotion
            } else {
                Promotion promotion;
                promotion.run(mainloop, scales, own_row + warp * 16 + lane / 4, 0, tile.first, tile.last);
                store_tile(promotion.promoted);
            }
            if (PING_PONG) {
                ring.skip(num_k_tiles);
                tile.advance();
            }
        }
        tma_store.wait();
    }
}
