// gemm: a matrix product on Hopper's tensor cores, for many rows of a.
//
//     sum[m, n] = sum_k a[m, k] * b[n, k], in float32; integers in int32
//     out[m, n] = what gemm_epilogue.cuh makes of sum[m, n]
//
// SCALE_BLOCK: sum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * (sum over the j-th SCALE_BLOCK elements
// of K). The tensor cores add up what is in parentheses, the threads the rest.
//
// Tiles of 128 x TILE_N elements of out are taken by as many clusters as the device holds at a time, one tile after
// another. A cluster is CLUSTER blocks, whose tiles lie below one another: each loads its rows of a, and a part of the
// rows of b that it multicasts to all. Of the three warpgroups of a block, one thread of the last loads, ahead by
// STAGES steps of K, 128 bytes of each row in a step. Each of the other two multiplies 64 rows, and its warps store 16 rows
// each, STORE_COLUMNS columns at a time, by way of a swizzled tile in shared memory. The two warpgroups do not wait for
// each other: while one stores, the other has the tensor cores.
//
// Tiles that run at the same time share rows and columns in the L2 cache: tiles are counted down GROUP clusters of rows,
// then along the columns.
//
// Constants
//     scalar_t      element type of a and b: 16 or 8 bits
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION    of gemm_epilogue.cuh; BIAS is at most 1
//     SCALE_BLOCK   elements under one scale: 128 of 8 bits, or 0
//     TILE_N        columns of a tile: a multiple of 32, or of 64 with SCALE_BLOCK; at most 256
//     STAGES        steps of K in shared memory
//     CLUSTER       blocks of a cluster; TILE_N is a multiple of 8 * CLUSTER
//     GROUP         clusters of rows that are counted down together

#include "cluster.cuh"
#include "gemm_epilogue.cuh"
#include "gemm_pipeline.cuh"
#include "wgmma.cuh"

using sum_t = wgmma_sum_t<scalar_t>;
constexpr int CONSUMERS = 2, NUM_THREADS = 128 * (CONSUMERS + 1), TILE_M = 64 * CONSUMERS;
constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(scalar_t), STEP_BYTES = 32;  // a wgmma takes STEP_BYTES of K
constexpr int A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
// A thread holds the terms of STORE_COLUMNS / 4 columns in registers; more than one of each column leave room for half.
constexpr int TERMS = B_SCALES + BIAS + (AZP > 0);
constexpr int STORE_COLUMNS = TILE_N % 64 == 0 && TERMS < 2 ? 64 : 32, STORE_BYTES = 16 * STORE_COLUMNS * sizeof(out_t);
constexpr int STORES = 2;  // tiles of a warp on their way to out
// Columns of a tile under one scale of b. Where a tile begins in the middle of SCALE_BLOCK, it ends there, too.
constexpr int SCALE_COLUMNS = SCALE_BLOCK == 0 ? TILE_N : TILE_N % SCALE_BLOCK == 0 ? SCALE_BLOCK : SCALE_BLOCK / 2;
// A thread's registers: what the producer gives up, the consumers take.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

// Offset of the 16 bytes `chunk` of row `row` in a tile of STORE_COLUMNS columns, as the copy engine swizzles it.
DEVICE int stored_at(int row, int chunk) {
    constexpr int BYTES = STORE_COLUMNS * sizeof(out_t);
    return row * BYTES + (chunk ^ row * BYTES / 128 % (BYTES / 16)) * 16;
}

// The row and column of tile number `index`, in tiles.
DEVICE void locate(int index, int rows, int columns, int& row, int& column) {
    const int group = index / (GROUP * columns), first = group * GROUP, size = min(GROUP, rows - first);
    const int within = index - group * GROUP * columns;
    row = first + within % size;
    column = within / size;
}

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, 1)
gemm(const __grid_constant__ TensorMap a_map,    // [M, K], boxes of TILE_M x TILE_K, swizzled
     const __grid_constant__ TensorMap b_map,    // [N, K], boxes of TILE_N / CLUSTER x TILE_K, swizzled
     const __grid_constant__ TensorMap out_map,  // [M, N], boxes of 16 x STORE_COLUMNS, swizzled
     const float* a_scales,                      // [M] or [1]; SCALE_BLOCK: [M, K / SCALE_BLOCK]
     const float* b_scales,                      // [N] or [1]; SCALE_BLOCK: [K / SCALE_BLOCK, N / SCALE_BLOCK]
     const int32_t* azp_adj,                     // [N]
     const int32_t* azp,                         // [M]
     const out_t* bias,                          // [N]
     int64_t m, int64_t n, int64_t k, int64_t a_scale_step, int64_t b_scale_step, int64_t a_scale_block_step,
     int64_t b_scale_block_step) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* stores = shared + STAGES * STAGE_BYTES;
    Ring<STAGES> ring(stores + 4 * CONSUMERS * STORES * STORE_BYTES);
    if (threadIdx.x == 0) ring.init(4 * CONSUMERS * CLUSTER);
    start_cluster<CLUSTER>();

    const int rank = CLUSTER > 1 ? blockIdx.y : 0;
    const int rows = int((m + TILE_M * CLUSTER - 1) / (TILE_M * CLUSTER)), columns = int((n + TILE_N - 1) / TILE_N);
    const int tiles = rows * columns, steps = int((k + TILE_K - 1) / TILE_K);
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;
    int row, column;

    if (warpgroup == CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (warp == 0 && elect_one()) {
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                locate(tile, rows, columns, row, column);
                const int first_row = (row * CLUSTER + rank) * TILE_M, first_column = column * TILE_N;
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    ring.acquire();
                    uint8_t* to = shared + ring.stage * STAGE_BYTES;
                    mbarrier_arrive_expect_tx(ring.full(), STAGE_BYTES);
                    tma_load(to, &a_map, ring.full(), step * TILE_K, first_row);
                    if constexpr (CLUSTER > 1) {
                        constexpr int PART = TILE_N / CLUSTER;
                        tma_load_multicast(to + A_BYTES + rank * PART * ROW_BYTES, &b_map, ring.full(),
                                           (1 << CLUSTER) - 1, step * TILE_K, first_column + rank * PART);
                    } else {
                        tma_load(to + A_BYTES, &b_map, ring.full(), step * TILE_K, first_column);
                    }
                }
            }
            ring.drain();
        }
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS> epilogue{a_scales, b_scales,     azp_adj,      azp,
                                                                      bias,     a_scale_step, b_scale_step, 0};
        uint8_t* own_stores = stores + (warpgroup * 4 + warp) * STORES * STORE_BYTES;
        int store = 0;
        sum_t d[TILE_N / 2];
        float scaled[SCALE_BLOCK > 0 ? TILE_N / 2 : 1];
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            locate(tile, rows, columns, row, column);
            const int64_t first_column = int64_t(column) * TILE_N;
            const int64_t warp_row = int64_t(row * CLUSTER + rank) * TILE_M + warpgroup * 64 + warp * 16;
            // The thread has elements of these rows; of one that does not exist, results are not stored.
            const int64_t upper = min(warp_row + lane / 4, m - 1), lower = min(warp_row + lane / 4 + 8, m - 1);
            if constexpr (SCALE_BLOCK > 0) {
#pragma unroll
                for (int i = 0; i < TILE_N / 2; ++i) scaled[i] = 0.0f;
            }
            int previous = 0;
            for (int step = 0; step < steps; ++step, ring.advance()) {
                const uint8_t* from = shared + ring.stage * STAGE_BYTES;
                const uint64_t a = make_smem_desc(from + warpgroup * 64 * ROW_BYTES),
                               b = make_smem_desc(from + A_BYTES);
                float factors[2] = {}, column_factors[TILE_N / SCALE_COLUMNS] = {};
                if constexpr (SCALE_BLOCK > 0) {
                    factors[0] = a_scales[upper * a_scale_step + step * a_scale_block_step];
                    factors[1] = a_scales[lower * a_scale_step + step * a_scale_block_step];
#pragma unroll
                    for (int i = 0; i < TILE_N / SCALE_COLUMNS; ++i) {
                        const int64_t block = min(first_column + i * SCALE_COLUMNS, n - 1) / max(SCALE_BLOCK, 1);
                        column_factors[i] = b_scales[step * b_scale_block_step + block * b_scale_step];
                    }
                }
                ring.wait();
                warpgroup_fence_operand(d);
                warpgroup_arrive();
#pragma unroll
                for (int i = 0; i < ROW_BYTES / STEP_BYTES; ++i) {
                    wgmma<scalar_t, TILE_N>(d, advance_smem_desc(a, i * STEP_BYTES),
                                            advance_smem_desc(b, i * STEP_BYTES),
                                            i > 0 || (SCALE_BLOCK == 0 && step > 0));
                }
                warpgroup_commit_batch();
                warpgroup_fence_operand(d);
                if constexpr (SCALE_BLOCK > 0) {
                    warpgroup_wait<0>();
                    warpgroup_fence_operand(d);
                    ring.template release<CLUSTER>(ring.stage);
#pragma unroll
                    for (int j = 0; j < TILE_N / SCALE_COLUMNS; ++j) {
                        const float scales[2] = {factors[0] * column_factors[j], factors[1] * column_factors[j]};
#pragma unroll
                        for (int i = 0; i < SCALE_COLUMNS / 2; ++i) {
                            float& sum = scaled[j * SCALE_COLUMNS / 2 + i];
                            sum = fmaf(scales[i / 2 % 2], float(d[j * SCALE_COLUMNS / 2 + i]), sum);
                        }
                    }
                } else {
                    warpgroup_wait<1>();  // for the products of the step before
                    if (step > 0) ring.template release<CLUSTER>(previous);
                    previous = ring.stage;
                }
            }
            // What the epilogue needs of rows and of the first columns is on its way while the last products run.
            using Columns = typename Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS>::Column;
            const auto upper_terms = epilogue.row(upper), lower_terms = epilogue.row(lower);
            Columns terms[STORE_COLUMNS / 4];
            const auto load_terms = [&](int chunk) {
#pragma unroll
                for (int i = 0; i < STORE_COLUMNS / 4; ++i) {
                    const int64_t at = first_column + chunk * STORE_COLUMNS + i / 2 * 8 + lane % 4 * 2 + i % 2;
                    terms[i] = epilogue.column(min(at, n - 1));
                }
            };
            load_terms(0);
            if constexpr (SCALE_BLOCK == 0) {
                warpgroup_wait<0>();
                warpgroup_fence_operand(d);
                ring.template release<CLUSTER>(previous);
            }
#pragma unroll
            for (int chunk = 0; chunk < TILE_N / STORE_COLUMNS; ++chunk) {
                uint32_t pairs[STORE_COLUMNS / 16][4];
#pragma unroll
                for (int i = 0; i < STORE_COLUMNS / 4; ++i) {
                    float x[2];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int at = chunk * STORE_COLUMNS / 2 + i * 2 + j;
                        const auto& row_terms = i % 2 ? lower_terms : upper_terms;
                        if constexpr (SCALE_BLOCK > 0)
                            x[j] = epilogue.value(row_terms, terms[i / 2 * 2 + j], scaled[at]);
                        else x[j] = epilogue.value(row_terms, terms[i / 2 * 2 + j], d[at]);
                        x[j] = ACTIVATION<out_t>(x[j]);
                    }
                    pairs[i / 4][i % 4] = pack_pair<out_t>(x[0], x[1]);
                }
                if (chunk + 1 < TILE_N / STORE_COLUMNS) load_terms(chunk + 1);
                uint8_t* to = own_stores + store * STORE_BYTES;
                store ^= 1;
                if (lane == 0) tma_store_wait_read<STORES - 1>();
                sync_warp();
#pragma unroll
                for (int i = 0; i < STORE_COLUMNS / 16; ++i) {
                    stmatrix<4>(to + stored_at(lane % 16, i * 2 + lane / 16), pairs[i]);
                }
                fence_proxy_async();
                sync_warp();
                if (lane == 0) {
                    tma_store(&out_map, to, int(first_column) + chunk * STORE_COLUMNS, int(warp_row));
                    tma_store_commit();
                }
            }
        }
        if (lane == 0) tma_store_wait<0>();
    }
}
