// gemm_sm90: a matrix product on Hopper's tensor cores, for many rows of a.
//
//     sum[m, n] = sum_k a[m, k] * b[n, k], in float32; integers in int32
//     out[m, n] = what gemm_epilogue.cuh makes of sum[m, n]
//
// SCALE_BLOCK: sum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * (sum over the j-th SCALE_BLOCK
// elements of K).
// SUM_BLOCK: the tensor cores add up SUM_BLOCK elements of K, the threads the rest (wgmma.cuh tells of sums of fp8).
//
// Tiles of 128 x TILE_N elements of out are taken by as many clusters as the device holds at a time, one tile after
// another. A cluster is CLUSTER blocks, whose tiles lie below one another: each loads its rows of a, and a part of the
// rows of b that it multicasts to all. Of the three warpgroups of a block, one thread of the last loads, ahead by
// STAGES steps of K, 128 bytes of each row in a step. The other two multiply. They share a tile, each with half of its
// rows, and do not wait for each other; or, with PING_PONG, they take whole tiles in turn, so that one stores a tile
// while the other multiplies. A warp stores 16 rows, STORE_COLUMNS columns at a time, by way of a swizzled tile in shared
// memory.
//
// Tiles that run at the same time share rows and columns in the L2 cache: tiles are counted down GROUP clusters of
// rows, then along the columns.
//
// Constants
//     scalar_t      element type of a and b: 16 or 8 bits
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1, GATED false
//     SCALE_BLOCK   elements under one scale: 128 of 8 bits, or 0
//     SUM_BLOCK     elements of K that the tensor cores add up: a step or half of it; 0: all of K, without SCALE_BLOCK
//     TILE_N        columns of a tile: a multiple of 16, or of 64 with SCALE_BLOCK; at most 256, with PING_PONG 192,
//                   with SUM_BLOCK 128
//     PING_PONG     whether the two warpgroups that multiply take tiles in turn; not with SUM_BLOCK
//     STORE_COLUMNS columns of a store: 16, 32 or 64, a divisor of TILE_N
//     STAGES        steps of K in shared memory
//     CLUSTER       blocks of a cluster; TILE_N is a multiple of 8 * CLUSTER
//     GROUP         clusters of rows that are counted down together

#include "cluster.cuh"
#include "gemm_epilogue.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

using sum_t = wgmma_sum_t<scalar_t>;
constexpr int CONSUMERS = 2, NUM_THREADS = 128 * (CONSUMERS + 1), TILE_M = 128;
// Warpgroups that share a tile, that take tiles in turn, and products of 64 rows each that a warpgroup has of a tile.
constexpr int SHARERS = PING_PONG ? 1 : CONSUMERS, TURNS = CONSUMERS / SHARERS, PARTS = TILE_M / 64 / SHARERS;
static_assert(SUM_BLOCK == 0 || !PING_PONG);
constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(scalar_t), STEP_BYTES = 32;  // of a wgmma
constexpr int A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
// What the epilogue needs of a column: one array of a tile's columns each, in shared memory.
constexpr int TERMS = B_SCALES + BIAS + (AZP > 0), TERM_BYTES = TERMS * TILE_N * 4;
constexpr int STORE_BYTES = 16 * STORE_COLUMNS * sizeof(out_t);
constexpr int STORES = 2;  // tiles of a warp on their way to out
// Columns of a tile under one scale of b. Where a tile begins in the middle of SCALE_BLOCK, it ends there, too.
constexpr int SCALE_COLUMNS = SCALE_BLOCK == 0 ? TILE_N : TILE_N % SCALE_BLOCK == 0 ? SCALE_BLOCK : SCALE_BLOCK / 2;
struct Factors { float rows[2], columns[TILE_N / SCALE_COLUMNS]; };
// Pieces of a step whose sums the threads add up, and how many such sums a thread holds.
constexpr int PIECES = SUM_BLOCK > 0 ? TILE_K / SUM_BLOCK : 1, BUFFERS = SUM_BLOCK > 0 ? 2 : 1;
static_assert(SUM_BLOCK == 0 ? SCALE_BLOCK == 0 : PIECES * SUM_BLOCK == TILE_K && PIECES <= 2);
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

// Named barriers: those of a warpgroup alone, and those by which one warpgroup hands its turn on to the other.
constexpr int OWN_BARRIER = 1, TURN_BARRIER = OWN_BARRIER + CONSUMERS;

// The row and column of tile number `index`, in tiles.
DEVICE void locate(int index, int rows, int columns, int& row, int& column) {
    const int group = index / (GROUP * columns), first = group * GROUP, size = min(GROUP, rows - first);
    const int within = index - group * GROUP * columns;
    row = first + within % size;
    column = within / size;
}

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, 1)
gemm_sm90(const __grid_constant__ TensorMap a_map,    // [M, K], boxes of TILE_M x TILE_K, swizzled
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
    if (threadIdx.x == 0) ring.init(4 * SHARERS * CLUSTER);
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
                    load_rows<CLUSTER, TILE_N, ROW_BYTES>(to + A_BYTES, &b_map, ring.full(), rank, step * TILE_K,
                                                          first_column);
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
        // The warpgroup's turn among those that take tiles, and its first row of a tile.
        const int turn = PING_PONG ? warpgroup : 0, own_row = PING_PONG ? 0 : warpgroup * 64 * PARTS;
        ring.skip(turn * steps);
        for (int tile = blockIdx.x + turn * gridDim.x; tile < tiles; tile += TURNS * gridDim.x) {
            locate(tile, rows, columns, row, column);
            const int64_t first_column = int64_t(column) * TILE_N;
            const int64_t warp_row = int64_t(row * CLUSTER + rank) * TILE_M + own_row + warp * 16;
            // The thread has elements of these rows of each part; of one that does not exist, results are not stored.
            int64_t own_rows[PARTS][2];
            typename epilogue_t::Row row_terms[PARTS][2];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    own_rows[part][i] = min(warp_row + part * 64 + lane / 4 + i * 8, m - 1);
                    row_terms[part][i] = epilogue.row(own_rows[part][i]);
                }
            }
            terms.load(epilogue, first_column, n);
            // A phase of a barrier has a parity and no number: who waits must be less than a lap of the ring behind.
            // So a turn begins when the other warpgroup has waited for all of its steps.
            if (PING_PONG && tile != blockIdx.x) named_barrier_sync(TURN_BARRIER + turn, 128 * CONSUMERS);

            sum_t d[BUFFERS][PARTS][TILE_N / 2];
            // Starts the products of a piece of the stage.
            const auto multiply = [&](sum_t(&sums)[PARTS][TILE_N / 2], bool accumulate, int piece = 0) {
                const uint8_t* from = shared + ring.stage * STAGE_BYTES;
                const uint64_t a = make_smem_desc(from + own_row * ROW_BYTES);
                const uint64_t b = make_smem_desc(from + A_BYTES);
                if (piece == 0) ring.wait();
#pragma unroll
                for (int part = 0; part < PARTS; ++part) warpgroup_fence_operand(sums[part]);
                warpgroup_arrive();
#pragma unroll
                for (int i = 0; i < ROW_BYTES / STEP_BYTES / PIECES; ++i) {
                    const int at = (piece * (ROW_BYTES / STEP_BYTES / PIECES) + i) * STEP_BYTES;
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
                        wgmma<scalar_t, TILE_N>(sums[part], advance_smem_desc(a, part * 64 * ROW_BYTES + at),
                                                advance_smem_desc(b, at), accumulate || i > 0);
                    }
                }
                warpgroup_commit_batch();
#pragma unroll
                for (int part = 0; part < PARTS; ++part) warpgroup_fence_operand(sums[part]);
            };
            const auto finish = [&](const auto(&sums)[PARTS][TILE_N / 2]) {
                if constexpr (TERMS > 0) {
                    named_barrier_sync(OWN_BARRIER + warpgroup, 128);  // the last tile's terms have been read
                    terms.store();
                    named_barrier_sync(OWN_BARRIER + warpgroup, 128);
                }
#pragma unroll
                for (int number = 0; number < PARTS * TILE_N / STORE_COLUMNS; ++number) {
                    const int part = number % PARTS, chunk = number / PARTS;
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
                            float x[2];
#pragma unroll
                            for (int l = 0; l < 2; ++l) {
                                const auto sum = sums[part][at / 2 + j % 2 * 2 + l];
                                x[l] = ACTIVATION<out_t>(epilogue.value(row_terms[part][j % 2], column_terms[l], sum));
                            }
                            pairs[j] = pack_pair<out_t>(x[0], x[1]);
                        }
                        stmatrix<4>(to + stored_at(lane % 16, i * 2 + lane / 16), pairs);
                    }
                    fence_proxy_async();
                    sync_warp();
                    if (lane == 0) {
                        tma_store(&out_map, to, int(first_column) + chunk * STORE_COLUMNS, int(warp_row) + part * 64);
                        tma_store_commit();
                    }
                }
            };

            if constexpr (SUM_BLOCK == 0) {
                int previous = 0;  // the stage of the step before
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    multiply(d[0], step > 0);
                    warpgroup_wait<1>();  // for the products of the step before
                    if (step > 0) ring.template release<CLUSTER>(previous);
                    previous = ring.stage;
                }
                if (PING_PONG && tile + gridDim.x < tiles) {
                    named_barrier_arrive(TURN_BARRIER + 1 - turn, 128 * CONSUMERS);
                }
                warpgroup_wait<0>();
#pragma unroll
                for (int part = 0; part < PARTS; ++part) warpgroup_fence_operand(d[0][part]);
                ring.template release<CLUSTER>(previous);
                finish(d[0]);
            } else {
                float total[PARTS][TILE_N / 2];
#pragma unroll
                for (int i = 0; i < TILE_N / 2; ++i) total[0][i] = 0.0f;
                Factors factors[BUFFERS];
                const auto load = [&](int step, Factors& of_step) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        of_step.rows[i] = to_float(a_scales[own_rows[0][i] * a_scale_step + step * a_scale_block_step]);
                    }
#pragma unroll
                    for (int i = 0; i < TILE_N / SCALE_COLUMNS; ++i) {
                        const int64_t block = min(first_column + i * SCALE_COLUMNS, n - 1) / max(SCALE_BLOCK, 1);
                        of_step.columns[i] = to_float(b_scales[step * b_scale_block_step + block * b_scale_step]);
                    }
                };
                const auto add = [&](sum_t(&sums)[PARTS][TILE_N / 2], const Factors& of_step) {
                    warpgroup_fence_operand(sums[0]);
#pragma unroll
                    for (int j = 0; j < TILE_N / SCALE_COLUMNS; ++j) {
                        const float scales[2] = {of_step.rows[0] * of_step.columns[j],
                                                 of_step.rows[1] * of_step.columns[j]};
#pragma unroll
                        for (int i = 0; i < SCALE_COLUMNS / 2; ++i) {
                            const int at = j * SCALE_COLUMNS / 2 + i;
                            const float sum = float(sums[0][at]);
                            if constexpr (SCALE_BLOCK > 0) total[0][at] = fmaf(scales[i / 2 % 2], sum, total[0][at]);
                            else total[0][at] += sum;
                        }
                    }
                };
                // Pieces of all steps alternate between the two sums.
                const auto start = [&](int piece, int now) {
                    if constexpr (SCALE_BLOCK > 0) load(piece / PIECES, factors[now]);
                    multiply(d[now], false, now % PIECES);
                };
                // Products of a piece run while sums of the piece before are added.
                const auto next = [&](int piece, int now) {
                    const int before = ring.stage;
                    if (now % PIECES == 0) ring.advance();
                    start(piece, now);
                    warpgroup_wait<1>();
                    if (now % PIECES == 0) ring.template release<CLUSTER>(before);
                    add(d[1 - now], factors[1 - now]);
                };
                start(0, 0);
                int piece = 1;
                for (; piece + 1 < steps * PIECES; piece += 2) {
                    next(piece, 1);
                    next(piece + 1, 0);
                }
                if (piece < steps * PIECES) {
                    next(piece, 1);
                    warpgroup_wait<0>();
                    add(d[1], factors[1]);
                } else {
                    warpgroup_wait<0>();
                    add(d[0], factors[0]);
                }
                ring.template release<CLUSTER>(ring.stage);
                ring.advance();
                finish(total);
            }
            ring.skip((TURNS - 1) * steps);
        }
        if (lane == 0) tma_store_wait<0>();
    }
}
