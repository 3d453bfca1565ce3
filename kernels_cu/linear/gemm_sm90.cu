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
// A cluster is CLUSTER CTAs with tiles that are adjacent along M: each CTA loads its own tile of a, and a part
// of the tile of b that it multicasts to the cluster. A CTA has three warpgroups. One thread of the last is the
// producer: it runs up to STAGES k-tiles ahead, and a k-tile is 128 bytes of each row. The other two are consumers.
// They share a tile, each with half of its rows, and do not synchronise; or, with PING_PONG, they take alternate whole
// tiles, so that one runs its epilogue while the other runs its main loop. In the epilogue a warp stores 16 rows x
// STORE_COLUMNS columns at a time with TMA, from a swizzled tile in shared memory.
//
// TMA takes as long for a row past the end of a tensor as for another one. So a's tile is loaded in boxes of
// `a_box_rows`, and those without a row of a are left out: their accumulators are never stored.
//
// The tile order keeps concurrent tiles on shared rows and columns in the L2 cache: it walks `group_rows` clusters down
// M, then the next column.
//
// Constants
//     scalar_t      element type of a and b: 16 or 8 bits
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1
//     SCALE_BLOCK   elements that share a block scale: 128 with 8-bit operands, or 0
//     SUM_BLOCK     elements of K between two promotions: a k-tile or half of it; 0, without SCALE_BLOCK: no promotion
//     TILE_N        rows of b of a tile: a multiple of 16, or of 64 with SCALE_BLOCK; at most 256, with PING_PONG 192,
//                   with SUM_BLOCK 128. GATED: a multiple of 32, without SCALE_BLOCK
//     PING_PONG     whether the two consumer warpgroups take alternate tiles; not with SUM_BLOCK
//     STREAM_K      whether the last wave is divided along K; not with PING_PONG
//     STORE_COLUMNS columns of a store: 16, 32 or 64, a divisor of the columns of out that a tile has
//     STAGES        k-tiles of the ring in shared memory
//     CLUSTER       CTAs of a cluster; TILE_N is a multiple of 8 * CLUSTER

#include "cluster.cuh"
#include "column_params.cuh"
#include "pipeline.cuh"
#include "stream_k.cuh"
#include "wgmma.cuh"

using accum_t = wgmma_sum_t<scalar_t>;
constexpr int CONSUMERS = 2, NUM_THREADS = 128 * (CONSUMERS + 1), TILE_M = 128;
// Warpgroups that share a tile; warpgroups that alternate by ping-pong; WGMMAs of 64 rows by which a warpgroup covers
// its part of a tile.
constexpr int WGS_PER_TILE = PING_PONG ? 1 : CONSUMERS, PING_PONG_WAYS = CONSUMERS / WGS_PER_TILE,
              M_SLICES = TILE_M / 64 / WGS_PER_TILE;
static_assert(!PING_PONG || (SUM_BLOCK == 0 && !STREAM_K));
// Runs of consecutive rows of b of a tile, each loaded by itself: by one CTA of the cluster, or all by the only one.
constexpr int B_RUNS = GATED ? 2 : CLUSTER, RUN_ROWS = TILE_N / B_RUNS;
static_assert(!GATED || (SCALE_BLOCK == 0 && CLUSTER <= B_RUNS));
constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(scalar_t), MMA_K_BYTES = 32;  // K of one WGMMA
constexpr int A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int STORE_BYTES = 16 * STORE_COLUMNS * sizeof(out_t);
constexpr int STORE_STAGES = 2;  // store buffers of a warp: one is filled while TMA reads the other
// Columns of a tile that share a block scale of b. A tile that begins in the middle of a SCALE_BLOCK also ends in the
// middle of one, hence half a block.
constexpr int SCALE_COLUMNS = SCALE_BLOCK == 0 ? TILE_N : TILE_N % SCALE_BLOCK == 0 ? SCALE_BLOCK : SCALE_BLOCK / 2;
struct BlockScales { float rows[2], columns[TILE_N / SCALE_COLUMNS]; };
// Promotions per k-tile, and accumulators of a thread: with promotion two, so that one is promoted while WGMMAs fill
// the other.
constexpr int PIECES = SUM_BLOCK > 0 ? TILE_K / SUM_BLOCK : 1, BUFFERS = SUM_BLOCK > 0 ? 2 : 1;
static_assert(SUM_BLOCK == 0 ? SCALE_BLOCK == 0 : PIECES * SUM_BLOCK == TILE_K && PIECES <= 2);
// Registers per thread: the consumers take what the producer gives up.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of STORE_COLUMNS columns, in TMA's swizzle.
DEVICE int stored_at(int row, int chunk) {
    constexpr int BYTES = STORE_COLUMNS * sizeof(out_t);
    return row * BYTES + (chunk ^ row * BYTES / 128 % (BYTES / 16)) * 16;
}

// Named barriers: one per warpgroup for its own threads, and one per warpgroup for the ping-pong order.
constexpr int OWN_BARRIER = 1, PING_PONG_BARRIER = OWN_BARRIER + CONSUMERS;

// The row and column, counted in tiles, of tile number `index`.
DEVICE void locate(int index, int rows, int columns, int group_rows, int& row, int& column) {
    const int group = index / (group_rows * columns), first = group * group_rows, size = min(group_rows, rows - first);
    const int within = index - group * group_rows * columns;
    row = first + within % size;
    column = within / size;
}

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, 1)
gemm_sm90(const __grid_constant__ TensorMap a_map,    // [M, K], boxes of a_box_rows x TILE_K, swizzled
          const __grid_constant__ TensorMap b_map,    // [N, K], GATED [2 N, K], boxes of RUN_ROWS x TILE_K, swizzled
          const __grid_constant__ TensorMap out_map,  // [M, N], boxes of 16 x STORE_COLUMNS, swizzled
          const a_scale_t* a_scales,                  // [M] or [1]; SCALE_BLOCK: [M, K / SCALE_BLOCK]
          const b_scale_t* b_scales,                  // [N] or [1]; SCALE_BLOCK: [K / SCALE_BLOCK, N / SCALE_BLOCK]
          const int32_t* azp_adj,                     // [N]
          const int32_t* azp,                         // [M]
          const out_t* bias,                          // [N], GATED [2 N]
          float* partial,                             // STREAM_K: the workspace of stream_k.cuh, and its counters
          uint32_t* arrived, int64_t m, int64_t n, int64_t k, int64_t a_scale_step, int64_t b_scale_step,
          int64_t a_scale_block_step, int64_t b_scale_block_step, int64_t a_box_rows, int64_t group_rows,
          int64_t sharers) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    // Rows of the last tile that are not loaded; with a cluster it may have none.
    const int last_rows = CLUSTER > 1 ? 0 : int((m % TILE_M + a_box_rows - 1) / a_box_rows * a_box_rows);
    if (m % TILE_M > 0 || CLUSTER > 1 && m / TILE_M % CLUSTER > 0) {
        zero_stages<STAGES, STAGE_BYTES>(shared, last_rows * ROW_BYTES, A_BYTES, NUM_THREADS);
    }
    uint8_t* stores = shared + STAGES * STAGE_BYTES;
    uint8_t* column_params_memory = stores + 4 * CONSUMERS * STORE_STAGES * STORE_BYTES;
    Ring<STAGES> ring(column_params_memory + CONSUMERS * COLUMN_PARAM_BYTES);
    if (threadIdx.x == 0) ring.init(4 * WGS_PER_TILE * CLUSTER);
    start_cluster<CLUSTER>();

    const int rank = CLUSTER > 1 ? blockIdx.y : 0;
    const int rows = int((m + TILE_M * CLUSTER - 1) / (TILE_M * CLUSTER)), columns = int((n + OUT_N - 1) / OUT_N);
    const int tiles = rows * columns, num_k_tiles = int((k + TILE_K - 1) / TILE_K);
    CutTile<STREAM_K> tile(tiles, 0, num_k_tiles, int(sharers));
    const int64_t rest = tiles - tile.whole;  // each CTA of a cluster has its own workspace
    partial += rank * (sharers + rest - 1) * (TILE_M * TILE_N);
    arrived += rank * rest * CONSUMERS * 4;
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;
    int row, column;

    if (warpgroup == CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (warp == 0 && elect_one()) {
            // From each run of b's rows to the next.
            const int run_stride = GATED ? int(n) : RUN_ROWS;
            for (; tile.exists(); tile.advance()) {
                locate(tile.number, rows, columns, int(group_rows), row, column);
                const int first_row = (row * CLUSTER + rank) * TILE_M, first_column = column * OUT_N;
                const int box_rows = int(a_box_rows), exist = max(0, min(TILE_M, int(m) - first_row));
                const int boxes = (exist + box_rows - 1) / box_rows;
                for (int k_tile = tile.first; k_tile < tile.last; ++k_tile, ring.advance()) {
                    ring.acquire();
                    uint8_t* to = shared + ring.stage * STAGE_BYTES;
                    mbarrier_arrive_expect_tx(ring.full(), boxes * box_rows * ROW_BYTES + B_BYTES);
                    for (int i = 0; i < boxes; ++i) {
                        tma_load(to + i * box_rows * ROW_BYTES, &a_map, ring.full(), k_tile * TILE_K,
                                 first_row + i * box_rows);
                    }
#pragma unroll
                    for (int i = 0; i < B_RUNS / CLUSTER; ++i) {
                        const int run = CLUSTER > 1 ? rank : i;
                        load_box<CLUSTER>(to + A_BYTES + run * RUN_ROWS * ROW_BYTES, &b_map, ring.full(),
                                          k_tile * TILE_K, first_column + run * run_stride);
                    }
                }
            }
            ring.drain();
        }
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const epilogue_t epilogue{a_scales, b_scales, azp_adj, azp, bias, a_scale_step, b_scale_step, 0};
        ColumnParams column_params{{}, reinterpret_cast<float*>(column_params_memory + warpgroup * COLUMN_PARAM_BYTES)};
        uint8_t* own_stores = stores + (warpgroup * 4 + warp) * STORE_STAGES * STORE_BYTES;
        int store = 0;
        // The warpgroup's index in the ping-pong order, and its first row within a tile.
        const int ping_pong_index = PING_PONG ? warpgroup : 0, own_row = PING_PONG ? 0 : warpgroup * 64 * M_SLICES;
        ring.skip(ping_pong_index * num_k_tiles);
        if (ping_pong_index > 0) tile.advance();
        for (; tile.exists(); tile.advance()) {
            locate(tile.number, rows, columns, int(group_rows), row, column);
            const int64_t first_column = int64_t(column) * OUT_N;
            const int64_t warp_row = int64_t(row * CLUSTER + rank) * TILE_M + own_row + warp * 16;
            // Rows of the thread's accumulator elements in each slice. Rows past M are clamped; the TMA store drops
            // them.
            int64_t own_rows[M_SLICES][2];
            typename epilogue_t::Row row_params[M_SLICES][2];
#pragma unroll
            for (int slice = 0; slice < M_SLICES; ++slice) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    own_rows[slice][i] = min(warp_row + slice * 64 + lane / 4 + i * 8, m - 1);
                    row_params[slice][i] = epilogue.row(own_rows[slice][i]);
                }
            }
            column_params.load(epilogue, first_column, n);
            // An mbarrier's phase is one parity bit, so a waiter must be less than one lap of the ring behind. Hence a
            // ping-pong main loop begins only after the other warpgroup has waited for all of its k-tiles.
            if (PING_PONG && tile.number != blockIdx.x)
                named_barrier_sync(PING_PONG_BARRIER + ping_pong_index, 128 * CONSUMERS);

            accum_t accums[BUFFERS][M_SLICES][TILE_N / 2];
            // Waits for the stage, then issues and commits the WGMMAs of one piece of its k-tile.
            const auto issue_wgmma = [&](accum_t(&accum)[M_SLICES][TILE_N / 2], bool accumulate, int piece = 0) {
                const uint8_t* from = shared + ring.stage * STAGE_BYTES;
                const uint64_t a = make_smem_desc(from + own_row * ROW_BYTES);
                const uint64_t b = make_smem_desc(from + A_BYTES);
                if (piece == 0) ring.wait();
#pragma unroll
                for (int slice = 0; slice < M_SLICES; ++slice) warpgroup_fence_operand(accum[slice]);
                warpgroup_arrive();
#pragma unroll
                for (int i = 0; i < ROW_BYTES / MMA_K_BYTES / PIECES; ++i) {
                    const int at = (piece * (ROW_BYTES / MMA_K_BYTES / PIECES) + i) * MMA_K_BYTES;
#pragma unroll
                    for (int slice = 0; slice < M_SLICES; ++slice) {
                        wgmma<scalar_t, TILE_N>(accum[slice], advance_smem_desc(a, slice * 64 * ROW_BYTES + at),
                                                advance_smem_desc(b, at), accumulate || i > 0);
                    }
                }
                warpgroup_commit_batch();
#pragma unroll
                for (int slice = 0; slice < M_SLICES; ++slice) warpgroup_fence_operand(accum[slice]);
            };
            // Stores the tile, or with STREAM_K a part of it. Each warp finds out by itself whether it is the last one of
            // its rows, so the barriers of the warpgroup come before.
            const auto store_tile = [&](auto(&accum)[M_SLICES][TILE_N / 2]) {
                if constexpr (COLUMN_PARAMS > 0) {
                    named_barrier_sync(OWN_BARRIER + warpgroup, 128);  // all have read the previous tile's operands
                    column_params.store();
                    named_barrier_sync(OWN_BARRIER + warpgroup, 128);
                }
                if (!tile.template complete<CONSUMERS * 4>(accum, partial, arrived)) return;
#pragma unroll
                for (int number = 0; number < M_SLICES * OUT_N / STORE_COLUMNS; ++number) {
                    const int slice = number % M_SLICES, chunk = number / M_SLICES;
                    uint8_t* to = own_stores + store * STORE_BYTES;
                    store = (store + 1) % STORE_STAGES;
                    if (lane == 0) tma_store_wait_read<STORE_STAGES - 1>();
                    sync_warp();
#pragma unroll
                    for (int i = 0; i < STORE_COLUMNS / 16; ++i) {
                        uint32_t pairs[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const int at = chunk * STORE_COLUMNS + i * 16 + j / 2 * 8;
                            typename epilogue_t::Column params[2], up_params[2];
                            column_params.get(at + lane % 4 * 2, params);
                            if constexpr (GATED) column_params.get(OUT_N + at + lane % 4 * 2, up_params);
                            float x[2];
#pragma unroll
                            for (int l = 0; l < 2; ++l) {
                                const auto& of_row = row_params[slice][j % 2];
                                const int own = at / 2 + j % 2 * 2 + l;
                                x[l] = ACTIVATION<out_t>(epilogue.value(of_row, params[l], accum[slice][own]));
                                if constexpr (GATED) {
                                    const auto up = accum[slice][OUT_N / 2 + own];
                                    x[l] *= epilogue.value(of_row, up_params[l], up);
                                }
                            }
                            pairs[j] = pack_pair<out_t>(x[0], x[1]);
                        }
                        stmatrix<4>(to + stored_at(lane % 16, i * 2 + lane / 16), pairs);
                    }
                    fence_proxy_async();
                    sync_warp();
                    if (lane == 0) {
                        tma_store(&out_map, to, int(first_column) + chunk * STORE_COLUMNS, int(warp_row) + slice * 64);
                        tma_store_commit();
                    }
                }
            };

            if constexpr (SUM_BLOCK == 0) {
                int previous = 0;  // stage of the previous k-tile
                for (int k_tile = tile.first; k_tile < tile.last; ++k_tile, ring.advance()) {
                    issue_wgmma(accums[0], k_tile > tile.first);
                    warpgroup_wait<1>();  // for the WGMMAs of the previous k-tile
                    if (k_tile > tile.first) ring.template release<CLUSTER>(previous);
                    previous = ring.stage;
                }
                if (PING_PONG && tile.number + int(gridDim.x) < tiles) {
                    named_barrier_arrive(PING_PONG_BARRIER + 1 - ping_pong_index, 128 * CONSUMERS);
                }
                warpgroup_wait<0>();
#pragma unroll
                for (int slice = 0; slice < M_SLICES; ++slice) warpgroup_fence_operand(accums[0][slice]);
                ring.template release<CLUSTER>(previous);
                store_tile(accums[0]);
            } else {
                float promoted[M_SLICES][TILE_N / 2];
#pragma unroll
                for (int i = 0; i < TILE_N / 2; ++i) promoted[0][i] = 0.0f;
                BlockScales block_scales[BUFFERS];
                const auto load_scales = [&](int k_tile, BlockScales& of_k_tile) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        of_k_tile.rows[i] =
                            to_float(a_scales[own_rows[0][i] * a_scale_step + k_tile * a_scale_block_step]);
                    }
#pragma unroll
                    for (int i = 0; i < TILE_N / SCALE_COLUMNS; ++i) {
                        const int64_t block = min(first_column + i * SCALE_COLUMNS, n - 1) / max(SCALE_BLOCK, 1);
                        of_k_tile.columns[i] = to_float(b_scales[k_tile * b_scale_block_step + block * b_scale_step]);
                    }
                };
                const auto promote = [&](accum_t(&accum)[M_SLICES][TILE_N / 2], const BlockScales& of_k_tile) {
                    warpgroup_fence_operand(accum[0]);
#pragma unroll
                    for (int j = 0; j < TILE_N / SCALE_COLUMNS; ++j) {
                        const float scales[2] = {of_k_tile.rows[0] * of_k_tile.columns[j],
                                                 of_k_tile.rows[1] * of_k_tile.columns[j]};
#pragma unroll
                        for (int i = 0; i < SCALE_COLUMNS / 2; ++i) {
                            const int at = j * SCALE_COLUMNS / 2 + i;
                            const float sum = float(accum[0][at]);
                            if constexpr (SCALE_BLOCK > 0)
                                promoted[0][at] = fmaf(scales[i / 2 % 2], sum, promoted[0][at]);
                            else promoted[0][at] += sum;
                        }
                    }
                };
                // Successive pieces alternate between the two accumulators.
                const auto start = [&](int piece, int now) {
                    if constexpr (SCALE_BLOCK > 0) load_scales(piece / PIECES, block_scales[now]);
                    issue_wgmma(accums[now], false, now % PIECES);
                };
                // The WGMMAs of a piece run while the threads promote the previous piece.
                const auto next = [&](int piece, int now) {
                    const int before = ring.stage;
                    if (now % PIECES == 0) ring.advance();
                    start(piece, now);
                    warpgroup_wait<1>();
                    if (now % PIECES == 0) ring.template release<CLUSTER>(before);
                    promote(accums[1 - now], block_scales[1 - now]);
                };
                int piece = tile.first * PIECES;
                start(piece++, 0);
                for (; piece + 1 < tile.last * PIECES; piece += 2) {
                    next(piece, 1);
                    next(piece + 1, 0);
                }
                if (piece < tile.last * PIECES) {
                    next(piece, 1);
                    warpgroup_wait<0>();
                    promote(accums[1], block_scales[1]);
                } else {
                    warpgroup_wait<0>();
                    promote(accums[0], block_scales[0]);
                }
                ring.template release<CLUSTER>(ring.stage);
                ring.advance();
                store_tile(promoted);
            }
            if (PING_PONG) {
                ring.skip(num_k_tiles);
                tile.advance();
            }
        }
        if (lane == 0) tma_store_wait<0>();
    }
}
