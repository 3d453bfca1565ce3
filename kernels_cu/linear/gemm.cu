// gemm: a matrix product on Hopper's tensor cores, for many rows of a.
//
//     sum[m, n] = sum_k a[m, k] * b[n, k], in float32; integers in int32
//     out[m, n] = what gemm_epilogue.cuh makes of sum[m, n]
//
// SCALE_BLOCK: sum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * (sum over the j-th SCALE_BLOCK
// elements of K). The tensor cores add up what is in parentheses, the threads the rest.
//
// Tiles of 128 x TILE_N elements of out are taken by as many clusters as the device holds at a time, one tile after
// another. A cluster is CLUSTER blocks, whose tiles lie below one another: each loads its rows of a, and a part of the
// rows of b that it multicasts to all. Of the three warpgroups of a block, one thread of the last loads, ahead by
// STAGES steps of K, 128 bytes of each row in a step. Each of the other two multiplies 64 rows, and its warps store 16
// rows each, STORE_COLUMNS columns at a time, by way of a swizzled tile in shared memory. The two warpgroups do not
// wait for each other.
//
// Tiles that run at the same time share rows and columns in the L2 cache: tiles are counted down GROUP clusters of
// rows, then along the columns.
//
// Constants
//     scalar_t      element type of a and b: 16 or 8 bits
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1, GATED false
//     SCALE_BLOCK   elements under one scale: 128 of 8 bits, or 0
//     TILE_N        columns of a tile: a multiple of 16, or of 64 with SCALE_BLOCK; at most 256
//     STAGES        steps of K in shared memory
//     BUFFERS       steps of K whose sums a thread holds: 2 with SCALE_BLOCK, if registers suffice, otherwise 1
//     CLUSTER       blocks of a cluster; TILE_N is a multiple of 8 * CLUSTER
//     GROUP         clusters of rows that are counted down together

#include "cluster.cuh"
#include "gemm_epilogue.cuh"
#include "gemm_pipeline.cuh"
#include "wgmma.cuh"

using sum_t = wgmma_sum_t<scalar_t>;
constexpr int CONSUMERS = 2, NUM_THREADS = 128 * (CONSUMERS + 1), TILE_M = 64 * CONSUMERS;
constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(scalar_t), STEP_BYTES = 32;  // of a wgmma
constexpr int A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
// What the epilogue needs of a column: one array of a tile's columns each, in shared memory.
constexpr int TERMS = B_SCALES + BIAS + (AZP > 0), TERM_BYTES = TERMS * TILE_N * 4;
// Where terms take room, stores have half of it.
constexpr int STORE_COLUMNS = TILE_N % 32 != 0 ? 16 : TILE_N % 64 == 0 && TERMS < 2 ? 64 : 32;
constexpr int STORE_BYTES = 16 * STORE_COLUMNS * sizeof(out_t);
constexpr int STORES = 2;  // tiles of a warp on their way to out
// Columns of a tile under one scale of b. Where a tile begins in the middle of SCALE_BLOCK, it ends there, too.
constexpr int SCALE_COLUMNS = SCALE_BLOCK == 0 ? TILE_N : TILE_N % SCALE_BLOCK == 0 ? SCALE_BLOCK : SCALE_BLOCK / 2;
struct Factors { float rows[2], columns[TILE_N / SCALE_COLUMNS]; };
// A thread's registers: what the producer gives up, the consumers take.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

static_assert(!GATED);

using epilogue_t = Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS, SCALE_EXPONENT>;

// The terms of a tile's columns, which a warpgroup loads while it multiplies and keeps in shared memory.
struct Terms {
    static constexpr int COLUMNS = ceil_div(TILE_N, 128);  // of a thread
    typename epilogue_t::Column loaded[COLUMNS];
    float* memory;

    DEVICE void load(const epilogue_t& epilogue, int64_t first_column, int64_t n) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            loaded[i] = epilogue.column(min(first_column + threadIdx.x % 128 + i * 128, n - 1));
        }
    }
    DEVICE void store() {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const int column = threadIdx.x % 128 + i * 128;
            if (TILE_N % 128 != 0 && column >= TILE_N) continue;
            if constexpr (B_SCALES) memory[column] = loaded[i].scale;
            if constexpr (BIAS) memory[B_SCALES * TILE_N + column] = loaded[i].bias;
            if constexpr (AZP > 0) zero_points()[column] = loaded[i].azp;
        }
    }
    // The terms of `column` and the next.
    DEVICE void get(int column, typename epilogue_t::Column (&pair)[2]) const {
        Vec<float, 2> scale, bias;
        Vec<int32_t, 2> azp;
        if constexpr (B_SCALES) scale = Vec<float, 2>::load(memory + column);
        if constexpr (BIAS) bias = Vec<float, 2>::load(memory + B_SCALES * TILE_N + column);
        if constexpr (AZP > 0) azp = Vec<int32_t, 2>::load(zero_points() + column);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            pair[i] = {0, B_SCALES ? scale.data[i] : 1.0f, BIAS ? bias.data[i] : 0.0f, AZP > 0 ? azp.data[i] : 0};
        }
    }
    DEVICE int32_t* zero_points() const { return reinterpret_cast<int32_t*>(memory) + (B_SCALES + BIAS) * TILE_N; }
};

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
     const a_scale_t* a_scales,                  // [M] or [1]; SCALE_BLOCK: [M, K / SCALE_BLOCK]
     const b_scale_t* b_scales,                  // [N] or [1]; SCALE_BLOCK: [K / SCALE_BLOCK, N / SCALE_BLOCK]
     const int32_t* azp_adj,                     // [N]
     const int32_t* azp,                         // [M]
     const out_t* bias,                          // [N]
     int64_t m, int64_t n, int64_t k, int64_t a_scale_step, int64_t b_scale_step, int64_t a_scale_block_step,
     int64_t b_scale_block_step) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* stores = shared + STAGES * STAGE_BYTES;
    uint8_t* terms_memory = stores + 4 * CONSUMERS * STORES * STORE_BYTES;
    Ring<STAGES> ring(terms_memory + CONSUMERS * TERM_BYTES);
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
        const epilogue_t epilogue{a_scales, b_scales, azp_adj, azp, bias, a_scale_step, b_scale_step, 0};
        Terms terms{{}, reinterpret_cast<float*>(terms_memory + warpgroup * TERM_BYTES)};
        uint8_t* own_stores = stores + (warpgroup * 4 + warp) * STORES * STORE_BYTES;
        int store = 0;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            locate(tile, rows, columns, row, column);
            const int64_t first_column = int64_t(column) * TILE_N;
            const int64_t warp_row = int64_t(row * CLUSTER + rank) * TILE_M + warpgroup * 64 + warp * 16;
            // The thread has elements of these rows; of one that does not exist, results are not stored.
            const int64_t upper = min(warp_row + lane / 4, m - 1), lower = min(warp_row + lane / 4 + 8, m - 1);
            const auto upper_terms = epilogue.row(upper), lower_terms = epilogue.row(lower);
            terms.load(epilogue, first_column, n);

            sum_t d[BUFFERS][TILE_N / 2];
            int previous = 0;  // the stage of the step before
            // Starts the products of the stage.
            const auto multiply = [&](sum_t(&sums)[TILE_N / 2], bool accumulate) {
                const uint8_t* from = shared + ring.stage * STAGE_BYTES;
                const uint64_t a = make_smem_desc(from + warpgroup * 64 * ROW_BYTES);
                const uint64_t b = make_smem_desc(from + A_BYTES);
                ring.wait();
                warpgroup_fence_operand(sums);
                warpgroup_arrive();
#pragma unroll
                for (int i = 0; i < ROW_BYTES / STEP_BYTES; ++i) {
                    wgmma<scalar_t, TILE_N>(sums, advance_smem_desc(a, i * STEP_BYTES),
                                            advance_smem_desc(b, i * STEP_BYTES), accumulate || i > 0);
                }
                warpgroup_commit_batch();
                warpgroup_fence_operand(sums);
            };
            const auto finish = [&](const auto& sums) {
                if constexpr (TERMS > 0) {
                    named_barrier_sync(1 + warpgroup, 128);  // the last tile's terms have been read
                    terms.store();
                    named_barrier_sync(1 + warpgroup, 128);
                }
#pragma unroll
                for (int chunk = 0; chunk < TILE_N / STORE_COLUMNS; ++chunk) {
                    uint8_t* to = own_stores + store * STORE_BYTES;
                    store = (store + 1) % STORES;
                    if (lane == 0) tma_store_wait_read<STORES - 1>();
                    sync_warp();
#pragma unroll
                    for (int i = 0; i < STORE_COLUMNS / 16; ++i) {
                        uint32_t pairs[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const int at = chunk * STORE_COLUMNS + i * 16 + j / 2 * 8;
                            typename epilogue_t::Column column_terms[2];
                            terms.get(at + lane % 4 * 2, column_terms);
                            const auto& row_terms = j % 2 ? lower_terms : upper_terms;
                            float x[2];
#pragma unroll
                            for (int l = 0; l < 2; ++l) {
                                const auto sum = sums[at / 2 + j % 2 * 2 + l];
                                x[l] = ACTIVATION<out_t>(epilogue.value(row_terms, column_terms[l], sum));
                            }
                            pairs[j] = pack_pair<out_t>(x[0], x[1]);
                        }
                        stmatrix<4>(to + stored_at(lane % 16, i * 2 + lane / 16), pairs);
                    }
                    fence_proxy_async();
                    sync_warp();
                    if (lane == 0) {
                        tma_store(&out_map, to, int(first_column) + chunk * STORE_COLUMNS, int(warp_row));
                        tma_store_commit();
                    }
                }
            };

            if constexpr (SCALE_BLOCK == 0) {
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    multiply(d[0], step > 0);
                    warpgroup_wait<1>();  // for the products of the step before
                    if (step > 0) ring.template release<CLUSTER>(previous);
                    previous = ring.stage;
                }
                warpgroup_wait<0>();
                warpgroup_fence_operand(d[0]);
                ring.template release<CLUSTER>(previous);
                finish(d[0]);
            } else {
                float scaled[TILE_N / 2];
#pragma unroll
                for (int i = 0; i < TILE_N / 2; ++i) scaled[i] = 0.0f;
                Factors factors[BUFFERS];
                const auto start = [&](int step, sum_t(&sums)[TILE_N / 2], Factors& of_step) {
                    of_step.rows[0] = to_float(a_scales[upper * a_scale_step + step * a_scale_block_step]);
                    of_step.rows[1] = to_float(a_scales[lower * a_scale_step + step * a_scale_block_step]);
#pragma unroll
                    for (int i = 0; i < TILE_N / SCALE_COLUMNS; ++i) {
                        const int64_t block = min(first_column + i * SCALE_COLUMNS, n - 1) / max(SCALE_BLOCK, 1);
                        of_step.columns[i] = to_float(b_scales[step * b_scale_block_step + block * b_scale_step]);
                    }
                    multiply(sums, false);
                };
                const auto add = [&](sum_t(&sums)[TILE_N / 2], const Factors& of_step) {
                    warpgroup_fence_operand(sums);
#pragma unroll
                    for (int j = 0; j < TILE_N / SCALE_COLUMNS; ++j) {
                        const float scales[2] = {of_step.rows[0] * of_step.columns[j],
                                                 of_step.rows[1] * of_step.columns[j]};
#pragma unroll
                        for (int i = 0; i < SCALE_COLUMNS / 2; ++i) {
                            const int at = j * SCALE_COLUMNS / 2 + i;
                            scaled[at] = fmaf(scales[i / 2 % 2], sums[at], scaled[at]);
                        }
                    }
                };
                if constexpr (BUFFERS == 1) {
                    for (int step = 0; step < steps; ++step, ring.advance()) {
                        start(step, d[0], factors[0]);
                        warpgroup_wait<0>();
                        ring.template release<CLUSTER>(ring.stage);
                        add(d[0], factors[0]);
                    }
                } else {
                    // Products of a step run while those of the step before are added.
                    start(0, d[0], factors[0]);
                    const auto next = [&](int step, int now) {
                        const int before = ring.stage;
                        ring.advance();
                        start(step, d[now], factors[now]);
                        warpgroup_wait<1>();
                        ring.template release<CLUSTER>(before);
                        add(d[1 - now], factors[1 - now]);
                    };
                    int step = 1;
                    for (; step + 1 < steps; step += 2) {
                        next(step, 1);
                        next(step + 1, 0);
                    }
                    if (step < steps) {
                        next(step, 1);
                        warpgroup_wait<0>();
                        add(d[1], factors[1]);
                    } else {
                        warpgroup_wait<0>();
                        add(d[0], factors[0]);
                    }
                    ring.template release<CLUSTER>(ring.stage);
                    ring.advance();
                }
                finish(scaled);
            }
        }
        if (lane == 0) tma_store_wait<0>();
    }
}
