// gemm_swap: a matrix product on Hopper's tensor cores, for few rows of a, bound by the bandwidth of reading b.
//
//     sum[m, n] = sum_k a[m, k] * b[n, k], in float32; integers in int32
//     out[m, n] = what gemm_epilogue.cuh makes of sum[m, n]
//
// SCALE_BLOCK: sum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * (sum over the j-th SCALE_BLOCK elements
// of K). The tensor cores add up what is in parentheses, the threads the rest.
//
// Operands are swapped: the transpose of out is computed, so that rows of b are the 64 rows of a wgmma and rows of a its
// TILE_M columns. A cluster takes a tile of TILE_M rows of out and SHARES * TILE_N columns. Of its SPLITS * SHARES blocks,
// those of equal rank / SPLITS share columns and have a part of K each; those of equal rank % SPLITS share a part of K, and
// each loads a part of the rows of a, which it multicasts to all. One thread of a block loads, ahead by STAGES steps of K,
// 128 bytes of each row in a step; two warpgroups multiply, TILE_N / 2 rows of b each. While the kernel before still runs,
// the block's first tiles of b are brought to L2.
//
// With SPLITS, warps store their sums in the shared memory of the other blocks, a part of the tile to each. A block adds up
// its part in the order of K: results do not depend on which block is the first. What a warp's registers hold of d, four
// registers of a lane at a time, is a fragment: FRAGMENTS of a tile go to the SPLITS blocks in turn.
//
// Constants
//     scalar_t      element type of a and b: 16 or 8 bits
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION    of gemm_epilogue.cuh; BIAS is at most 1
//     SCALE_BLOCK   elements under one scale: 128 of 8 bits, or 0
//     TILE_M        rows of a tile: a multiple of 16 and of 8 * SHARES
//     TILE_N        columns of a tile: a multiple of 128, or 128 with SCALE_BLOCK
//     STAGES        steps of K in shared memory
//     SPLITS        blocks that share a sum; at most the steps of K
//     SHARES        blocks that share rows of a
//     MIN_BLOCKS

#include "cluster.cuh"
#include "gemm_epilogue.cuh"
#include "gemm_pipeline.cuh"
#include "wgmma.cuh"

using sum_t = wgmma_sum_t<scalar_t>;
constexpr int CLUSTER = SPLITS * SHARES, CONSUMERS = 2, NUM_THREADS = 128 * CONSUMERS + 32;
constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(scalar_t), STEP_BYTES = 32;  // a wgmma takes STEP_BYTES of K
constexpr int A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int PRODUCTS = TILE_N / CONSUMERS / 64;  // of a warpgroup, each of 64 rows of b
constexpr int FRAGMENTS = PRODUCTS * TILE_M, PART = FRAGMENTS / SPLITS, PART_BYTES = PART * WARP_SIZE * 16;

static_assert(SCALE_BLOCK == 0 || is_same<sum_t, float>);
static_assert(FRAGMENTS % SPLITS == 0);

// A sum as bits, and back.
DEVICE uint32_t as_word(sum_t sum) {
    if constexpr (is_same<sum_t, float>) return __float_as_uint(sum);
    else return uint32_t(sum);
}
DEVICE sum_t as_sum(uint32_t word) {
    if constexpr (is_same<sum_t, float>) return __uint_as_float(word);
    else return int32_t(word);
}

// Where a block stands, and which steps of K it takes.
struct Part {
    int split, share, first_row, first_column, first_step, last_step;

    DEVICE Part(int64_t m, int64_t k) {
        const int rank = CLUSTER > 1 ? blockIdx.y : 0, steps = int((k + TILE_K - 1) / TILE_K);
        const int rows = int((m + TILE_M - 1) / TILE_M);
        split = rank % SPLITS;
        share = rank / SPLITS;
        first_row = int(blockIdx.x) % rows * TILE_M;
        first_column = (int(blockIdx.x) / rows * SHARES + share) * TILE_N;
        first_step = int(int64_t(steps) * split / SPLITS);
        last_step = int(int64_t(steps) * (split + 1) / SPLITS);
    }
};

DEVICE void prefetch_b(const TensorMap* b_map, int64_t m, int64_t k) {
    if (threadIdx.x != 0) return;
    const Part part(m, k);
    for (int step = part.first_step; step < min(part.first_step + PREFETCH, part.last_step); ++step) {
        tma_prefetch(b_map, step * TILE_K, part.first_column);
    }
}

extern "C" __global__ void CLUSTER_OF(SPLITS * SHARES) LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemm_swap(const __grid_constant__ TensorMap a_map,  // [M, K], boxes of TILE_M / SHARES x TILE_K, swizzled
          const __grid_constant__ TensorMap b_map,  // [N, K], boxes of TILE_N x TILE_K, swizzled
          out_t* out,                               // [M, N]
          const float* a_scales,                    // [M] or [1]; SCALE_BLOCK: [M, K / SCALE_BLOCK]
          const float* b_scales,                    // [N] or [1]; SCALE_BLOCK: [K / SCALE_BLOCK, N / SCALE_BLOCK]
          const int32_t* azp_adj,                   // [N]
          const int32_t* azp,                       // [M]
          const out_t* bias,                        // [N]
          int64_t m, int64_t n, int64_t k, int64_t out_stride, int64_t a_scale_step, int64_t b_scale_step,
          int64_t a_scale_block_step, int64_t b_scale_block_step) {
    prefetch_b(&b_map, m, k);
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    // [SPLITS, PART, lanes] fragments of the block's part of the tile, one split after another.
    uint4* received = reinterpret_cast<uint4*>(shared + STAGES * STAGE_BYTES);
    uint64_t* all_received = reinterpret_cast<uint64_t*>(received + (SPLITS > 1 ? SPLITS * PART * WARP_SIZE : 0));
    Ring<STAGES> ring(all_received + 1);
    if (threadIdx.x == 0) {
        mbarrier_init(all_received, 1);
        ring.init(4 * CONSUMERS * SHARES);
        if constexpr (SPLITS > 1) mbarrier_arrive_expect_tx(all_received, SPLITS * PART_BYTES);
    }
    start_cluster<CLUSTER>();

    const Part part(m, k);
    const int warp = shfl<WARP_SIZE>(int(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
    if (warp == 4 * CONSUMERS) {
        if (elect_one()) {
            for (int step = part.first_step; step < part.last_step; ++step, ring.advance()) {
                ring.acquire();
                uint8_t* to = shared + ring.stage * STAGE_BYTES;
                mbarrier_arrive_expect_tx(ring.full(), STAGE_BYTES);
                tma_load(to + A_BYTES, &b_map, ring.full(), step * TILE_K, part.first_column);
                if constexpr (SHARES > 1) {
                    constexpr int ROWS = TILE_M / SHARES;
                    uint16_t blocks = 0;
                    for (int i = 0; i < SHARES; ++i) blocks |= 1 << (i * SPLITS + part.split);
                    tma_load_multicast(to + part.share * ROWS * ROW_BYTES, &a_map, ring.full(), blocks, step * TILE_K,
                                       part.first_row + part.share * ROWS);
                } else {
                    tma_load(to, &a_map, ring.full(), step * TILE_K, part.first_row);
                }
            }
            ring.drain();
        }
    } else {
        const int warpgroup = warp / 4;
        sum_t d[PRODUCTS][TILE_M / 2];
        float scaled[SCALE_BLOCK > 0 ? TILE_M / 2 : 1] = {};
        // Scales of the next step: of the rows of a of which the thread has sums, and of b. TILE_N is SCALE_BLOCK.
        float row_scales[SCALE_BLOCK > 0 ? TILE_M / 4 : 1], column_scale = 1.0f;
        const auto load_scales = [&](int step) {
            const int64_t block = min(int64_t(part.first_column), n - 1) / max(SCALE_BLOCK, 1);
            column_scale = b_scales[step * b_scale_block_step + block * b_scale_step];
#pragma unroll
            for (int i = 0; i < TILE_M / 4; ++i) {
                const int64_t row = min(int64_t(part.first_row + i / 2 * 8 + lane % 4 * 2 + i % 2), m - 1);
                row_scales[i] = a_scales[row * a_scale_step + step * a_scale_block_step];
            }
        };
        if constexpr (SCALE_BLOCK > 0) load_scales(part.first_step);
        int previous = 0;
        for (int step = part.first_step; step < part.last_step; ++step, ring.advance()) {
            const uint8_t* from = shared + ring.stage * STAGE_BYTES;
            const uint64_t a = make_smem_desc(from);
            float factors[SCALE_BLOCK > 0 ? TILE_M / 4 : 1];
            if constexpr (SCALE_BLOCK > 0) {
#pragma unroll
                for (int i = 0; i < TILE_M / 4; ++i) factors[i] = row_scales[i] * column_scale;
                load_scales(min(step + 1, part.last_step - 1));
            }
            ring.wait();
#pragma unroll
            for (int product = 0; product < PRODUCTS; ++product) warpgroup_fence_operand(d[product]);
            warpgroup_arrive();
#pragma unroll
            for (int product = 0; product < PRODUCTS; ++product) {
                const uint64_t b = make_smem_desc(from + A_BYTES + (warpgroup * PRODUCTS + product) * 64 * ROW_BYTES);
#pragma unroll
                for (int i = 0; i < ROW_BYTES / STEP_BYTES; ++i) {
                    wgmma<scalar_t, TILE_M>(d[product], advance_smem_desc(b, i * STEP_BYTES),
                                            advance_smem_desc(a, i * STEP_BYTES),
                                            i > 0 || (SCALE_BLOCK == 0 && step > part.first_step));
                }
            }
            warpgroup_commit_batch();
            if constexpr (SCALE_BLOCK > 0) {
                warpgroup_wait<0>();
                warpgroup_fence_operand(d[0]);
                ring.template release<SHARES, SPLITS>(ring.stage, part.split);
#pragma unroll
                for (int i = 0; i < TILE_M / 2; ++i) {
                    scaled[i] = fmaf(factors[i / 4 * 2 + i % 2], float(d[0][i]), scaled[i]);
                }
            } else {
                warpgroup_wait<1>();  // for the products of the step before
                if (step > part.first_step) ring.template release<SHARES, SPLITS>(previous, part.split);
                previous = ring.stage;
            }
        }
        if constexpr (SCALE_BLOCK == 0) {
            warpgroup_wait<0>();
#pragma unroll
            for (int product = 0; product < PRODUCTS; ++product) warpgroup_fence_operand(d[product]);
            ring.template release<SHARES, SPLITS>(previous, part.split);
        }
        const Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS> epilogue{a_scales, b_scales,     azp_adj,      azp,
                                                                      bias,     a_scale_step, b_scale_step, 0};
        // Stores the four elements of out whose sums are the lane's in a fragment.
        const auto finish = [&](int fragment, const sum_t(&sums)[4]) {
            const int of_warp = fragment % 8, number = fragment / 8, product = number / (TILE_M / 8);
            const int64_t row = part.first_row + number % (TILE_M / 8) * 8 + lane % 4 * 2;
            const int64_t column =
                part.first_column + (of_warp / 4 * PRODUCTS + product) * 64 + of_warp % 4 * 16 + lane / 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int64_t m_at = row + i % 2, n_at = column + i / 2 * 8;
                if (m_at >= m || n_at >= n) continue;
                const float x = epilogue.value(epilogue.row(m_at), epilogue.column(n_at), sums[i]);
                out[m_at * out_stride + n_at] = from_float<out_t>(ACTIVATION<out_t>(x));
            }
        };
#pragma unroll
        for (int i = 0; i < FRAGMENTS / 8; ++i) {
            const int fragment = i * 8 + warp, product = i / (TILE_M / 8), at = i % (TILE_M / 8) * 4;
            sum_t sums[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if constexpr (SCALE_BLOCK > 0) sums[j] = scaled[at + j];
                else sums[j] = d[product][at + j];
            }
            if constexpr (SPLITS == 1) {
                finish(fragment, sums);
            } else {
                const uint32_t words[4] = {as_word(sums[0]), as_word(sums[1]), as_word(sums[2]), as_word(sums[3])};
                store_async(received + (part.split * PART + fragment / SPLITS) * WARP_SIZE + lane, all_received,
                            part.share * SPLITS + fragment % SPLITS, words);
            }
        }
        if constexpr (SPLITS > 1) {
            mbarrier_wait(all_received, 0);
            for (int i = warp; i < PART; i += 4 * CONSUMERS) {
                sum_t sums[4] = {};
#pragma unroll
                for (int split = 0; split < SPLITS; ++split) {
                    const uint4 words = received[(split * PART + i) * WARP_SIZE + lane];
                    sums[0] += as_sum(words.x);
                    sums[1] += as_sum(words.y);
                    sums[2] += as_sum(words.z);
                    sums[3] += as_sum(words.w);
                }
                finish(i * SPLITS + part.split, sums);
            }
        }
    }
}
