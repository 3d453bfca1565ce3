// gemm_swap: a matrix product on Hopper's tensor cores, for few rows of a, bound by the bandwidth of reading b.
//
//     sum[m, n] = sum_k a[m, k] * b[n, k], in float32; integers in int32
//     out[m, n] = what gemm_epilogue.cuh makes of sum[m, n]
//
// SCALE_BLOCK: sum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * (sum over the j-th SCALE_BLOCK elements
// of K). The tensor cores add up what is in parentheses, the threads the rest.
//
// Operands are swapped: the transpose of out is computed, so that rows of b are the 64 rows of a wgmma and rows of a its
// TILE_M columns. A tile is TILE_M rows and TILE_N columns of out, a step 128 bytes of each row of a and b. One thread of a
// block loads, ahead by STAGES steps; two warpgroups multiply, TILE_N / 2 rows of b each. What a lane's registers hold of a
// tile are fragments of four sums: two rows, two columns.
//
// The steps of all tiles are a sequence, one tile after another, and blocks share it in one of two ways:
//
// - SPLITS is 1: every block takes as many steps as the others. Of a tile that it has not all steps of, it leaves its sums
//   in `partial`, and the last of the tile's blocks to arrive adds them up.
// - SPLITS > 1: the blocks of a cluster share a tile. Each stores its sums in the shared memory of the others, fragments
//   going to them in turn, and adds up those that it has been sent.
//
// Either way sums are added in the order of K, whoever comes first.
//
// Constants
//     scalar_t      element type of a and b: 16 or 8 bits
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION    of gemm_epilogue.cuh; BIAS is at most 1
//     SCALE_BLOCK   elements under one scale: 128 of 8 bits, or 0
//     TILE_M        rows of a tile: a multiple of 16
//     TILE_N        columns of a tile: a multiple of 128, or 128 with SCALE_BLOCK
//     STAGES        steps of K in shared memory
//     SPLITS        blocks of a cluster; at most the steps of K
//     PREFETCH      steps of b that are brought to L2 while the kernel before still runs
//     MIN_BLOCKS

#include "cluster.cuh"
#include "gemm_epilogue.cuh"
#include "gemm_pipeline.cuh"
#include "wgmma.cuh"

using sum_t = wgmma_sum_t<scalar_t>;
constexpr int CONSUMERS = 2, CONSUMER_WARPS = 4 * CONSUMERS, NUM_THREADS = 128 * CONSUMERS + 32;
constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(scalar_t), STEP_BYTES = 32;  // a wgmma takes STEP_BYTES of K
constexpr int A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int PRODUCTS = TILE_N / CONSUMERS / 64;  // of a warpgroup, each of 64 rows of b
// Fragments of a tile, of which each warp has WARP_FRAGMENTS, and which a cluster's blocks share.
constexpr int FRAGMENTS = PRODUCTS * TILE_M, WARP_FRAGMENTS = FRAGMENTS / CONSUMER_WARPS, PART = FRAGMENTS / SPLITS;
static_assert(SCALE_BLOCK == 0 || is_same<sum_t, float>);
static_assert(FRAGMENTS % SPLITS == 0);

// A sum as bits, and back.
DEVICE uint32_t as_word(sum_t sum) {
    if constexpr (is_same<sum_t, float>) return __float_as_uint(sum);
    else return uint32_t(sum);
}
DEVICE void add_words(sum_t (&sums)[4], const uint4& words) {
    const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (is_same<sum_t, float>) sums[i] += __uint_as_float(all[i]);
        else sums[i] += int32_t(all[i]);
    }
}

// Steps first to last of a tile.
struct Segment { int tile, first, last; };

// How the steps of all tiles are shared by blocks.
struct Sequence {
    int rows, steps;  // tiles below one another, steps of a tile
    int64_t total, begin, end;

    DEVICE Sequence(int64_t m, int64_t n, int64_t k) {
        rows = int((m + TILE_M - 1) / TILE_M);
        steps = int((k + TILE_K - 1) / TILE_K);
        total = int64_t(steps) * rows * ((n + TILE_N - 1) / TILE_N);
        if constexpr (SPLITS > 1) {
            begin = int64_t(blockIdx.x) * steps + int64_t(steps) * blockIdx.y / SPLITS;
            end = int64_t(blockIdx.x) * steps + int64_t(steps) * (blockIdx.y + 1) / SPLITS;
        } else {
            begin = first_of(blockIdx.x);
            end = first_of(blockIdx.x + 1);
        }
    }
    // The first step of a block, and the block that takes a step.
    DEVICE int64_t first_of(int block) const { return total * block / gridDim.x; }
    DEVICE int block_of(int64_t step) const { return int(((step + 1) * gridDim.x - 1) / total); }

    DEVICE Segment segment(int64_t from) const {
        const int tile = int(from / steps), first = int(from - int64_t(tile) * steps);
        return {tile, first, int(min(int64_t(steps), first + end - from))};
    }
    DEVICE int first_row(const Segment& segment) const { return segment.tile % rows * TILE_M; }
    DEVICE int first_column(const Segment& segment) const { return segment.tile / rows * TILE_N; }
};

DEVICE void prefetch_b(const TensorMap* b_map, int64_t m, int64_t n, int64_t k) {
    if (PREFETCH == 0 || threadIdx.x != 0) return;
    const Sequence sequence(m, n, k);
    const Segment segment = sequence.segment(sequence.begin);
    for (int step = segment.first; step < min(segment.first + PREFETCH, segment.last); ++step) {
        tma_prefetch(b_map, step * TILE_K, sequence.first_column(segment));
    }
}

extern "C" __global__ void CLUSTER_OF(SPLITS) LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemm_swap(const __grid_constant__ TensorMap a_map,  // [M, K], boxes of TILE_M x TILE_K, swizzled
          const __grid_constant__ TensorMap b_map,  // [N, K], boxes of TILE_N x TILE_K, swizzled
          out_t* out,                               // [M, N]
          const float* a_scales,                    // [M] or [1]; SCALE_BLOCK: [M, K / SCALE_BLOCK]
          const float* b_scales,                    // [N] or [1]; SCALE_BLOCK: [K / SCALE_BLOCK, N / SCALE_BLOCK]
          const int32_t* azp_adj,                   // [N]
          const int32_t* azp,                       // [M]
          const out_t* bias,                        // [N]
          uint4* partial,                           // [blocks, 2, FRAGMENTS, 32]: of the first tile, and of the last
          uint32_t* arrived,                        // [tiles]: blocks, of those that share a tile
          int64_t m, int64_t n, int64_t k, int64_t out_stride, int64_t a_scale_step, int64_t b_scale_step,
          int64_t a_scale_block_step, int64_t b_scale_block_step) {
    prefetch_b(&b_map, m, n, k);
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    uint4* received = reinterpret_cast<uint4*>(shared + STAGES * STAGE_BYTES);  // [SPLITS, PART, lanes]
    uint64_t* all_received = reinterpret_cast<uint64_t*>(received + (SPLITS > 1 ? FRAGMENTS * WARP_SIZE : 0));
    Ring<STAGES> ring(all_received + 1);
    uint32_t* is_last = reinterpret_cast<uint32_t*>(ring.barriers + 2 * STAGES);
    if (threadIdx.x == 0) {
        mbarrier_init(all_received, 1);
        ring.init(CONSUMER_WARPS);
        if constexpr (SPLITS > 1) mbarrier_arrive_expect_tx(all_received, FRAGMENTS * WARP_SIZE * 16);
    }
    start_cluster<SPLITS>();

    const Sequence sequence(m, n, k);
    const int warp = shfl<WARP_SIZE>(int(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
    if (warp == CONSUMER_WARPS) {
        if (!elect_one()) return;
        for (int64_t at = sequence.begin; at < sequence.end;) {
            const Segment segment = sequence.segment(at);
            for (int step = segment.first; step < segment.last; ++step, ring.advance()) {
                ring.acquire();
                uint8_t* to = shared + ring.stage * STAGE_BYTES;
                mbarrier_arrive_expect_tx(ring.full(), STAGE_BYTES);
                tma_load(to + A_BYTES, &b_map, ring.full(), step * TILE_K, sequence.first_column(segment));
                tma_load(to, &a_map, ring.full(), step * TILE_K, sequence.first_row(segment));
            }
            at += segment.last - segment.first;
        }
        return;
    }

    const int warpgroup = warp / 4;
    const Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS> epilogue{a_scales, b_scales,     azp_adj,      azp,
                                                                  bias,     a_scale_step, b_scale_step, 0};
    for (int64_t at = sequence.begin; at < sequence.end;) {
        const Segment segment = sequence.segment(at);
        const int first_row = sequence.first_row(segment), first_column = sequence.first_column(segment);
        sum_t d[PRODUCTS][TILE_M / 2];
        float scaled[SCALE_BLOCK > 0 ? TILE_M / 2 : 1] = {};
        // Scales of the next step: of the rows of a of which the thread has sums, and of b. TILE_N is SCALE_BLOCK.
        float row_scales[SCALE_BLOCK > 0 ? TILE_M / 4 : 1], column_scale = 1.0f;
        const auto load_scales = [&](int step) {
            const int64_t block = min(int64_t(first_column), n - 1) / max(SCALE_BLOCK, 1);
            column_scale = b_scales[step * b_scale_block_step + block * b_scale_step];
#pragma unroll
            for (int i = 0; i < TILE_M / 4; ++i) {
                const int64_t row = min(int64_t(first_row + i / 2 * 8 + lane % 4 * 2 + i % 2), m - 1);
                row_scales[i] = a_scales[row * a_scale_step + step * a_scale_block_step];
            }
        };
        if constexpr (SCALE_BLOCK > 0) load_scales(segment.first);
        int previous = 0;
        for (int step = segment.first; step < segment.last; ++step, ring.advance()) {
            const uint8_t* from = shared + ring.stage * STAGE_BYTES;
            const uint64_t a = make_smem_desc(from);
            float factors[SCALE_BLOCK > 0 ? TILE_M / 4 : 1];
            if constexpr (SCALE_BLOCK > 0) {
#pragma unroll
                for (int i = 0; i < TILE_M / 4; ++i) factors[i] = row_scales[i] * column_scale;
                load_scales(min(step + 1, segment.last - 1));
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
                                            i > 0 || (SCALE_BLOCK == 0 && step > segment.first));
                }
            }
            warpgroup_commit_batch();
            if constexpr (SCALE_BLOCK > 0) {
                warpgroup_wait<0>();
                warpgroup_fence_operand(d[0]);
                ring.release(ring.stage);
#pragma unroll
                for (int i = 0; i < TILE_M / 2; ++i) {
                    scaled[i] = fmaf(factors[i / 4 * 2 + i % 2], float(d[0][i]), scaled[i]);
                }
            } else {
                warpgroup_wait<1>();  // for the products of the step before
                if (step > segment.first) ring.release(previous);
                previous = ring.stage;
            }
        }
        if constexpr (SCALE_BLOCK == 0) {
            warpgroup_wait<0>();
#pragma unroll
            for (int product = 0; product < PRODUCTS; ++product) warpgroup_fence_operand(d[product]);
            ring.release(previous);
        }

        // The sums of the warp's fragment number i; and what becomes of those of any fragment.
        const auto own_sum = [&](int i, int j) {
            if constexpr (SCALE_BLOCK > 0) return scaled[i * 4 + j];
            else return d[i / (TILE_M / 8)][i % (TILE_M / 8) * 4 + j];
        };
        const auto finish = [&](int fragment, const sum_t(&sums)[4]) {
            const int of_warp = fragment % CONSUMER_WARPS, i = fragment / CONSUMER_WARPS;
            const int64_t row = first_row + i % (TILE_M / 8) * 8 + lane % 4 * 2;
            const int64_t column =
                first_column + (of_warp / 4 * PRODUCTS + i / (TILE_M / 8)) * 64 + of_warp % 4 * 16 + lane / 4;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int64_t m_at = row + j % 2, n_at = column + j / 2 * 8;
                if (m_at >= m || n_at >= n) continue;
                const float x = epilogue.value(epilogue.row(m_at), epilogue.column(n_at), sums[j]);
                out[m_at * out_stride + n_at] = from_float<out_t>(ACTIVATION<out_t>(x));
            }
        };
        if constexpr (SPLITS > 1) {
#pragma unroll
            for (int i = 0; i < WARP_FRAGMENTS; ++i) {
                const int fragment = i * CONSUMER_WARPS + warp;
                const uint32_t words[4] = {as_word(own_sum(i, 0)), as_word(own_sum(i, 1)), as_word(own_sum(i, 2)),
                                           as_word(own_sum(i, 3))};
                store_async(received + (int(blockIdx.y) * PART + fragment / SPLITS) * WARP_SIZE + lane, all_received,
                            fragment % SPLITS, words);
            }
            mbarrier_wait(all_received, 0);
            for (int i = warp; i < PART; i += CONSUMER_WARPS) {
                sum_t sums[4] = {};
#pragma unroll
                for (int split = 0; split < SPLITS; ++split) {
                    add_words(sums, received[(split * PART + i) * WARP_SIZE + lane]);
                }
                finish(i * SPLITS + int(blockIdx.y), sums);
            }
        } else {
            const int64_t tile_begin = int64_t(segment.tile) * sequence.steps;
            const int first_block = sequence.block_of(tile_begin);
            const int last_block = sequence.block_of(tile_begin + sequence.steps - 1);
            if (first_block == last_block) {
#pragma unroll
                for (int i = 0; i < WARP_FRAGMENTS; ++i) {
                    const sum_t sums[4] = {own_sum(i, 0), own_sum(i, 1), own_sum(i, 2), own_sum(i, 3)};
                    finish(i * CONSUMER_WARPS + warp, sums);
                }
            } else {
                // A block shares its first tile, if it does not begin with it, and its last.
                const auto partial_of = [&](int block) {
                    const int which = sequence.first_of(block) > tile_begin ? 0 : 1;
                    return partial + ((int64_t(block) * 2 + which) * FRAGMENTS + warp) * WARP_SIZE + lane;
                };
                uint4* own = partial_of(blockIdx.x);
#pragma unroll
                for (int i = 0; i < WARP_FRAGMENTS; ++i) {
                    own[i * CONSUMER_WARPS * WARP_SIZE] = {as_word(own_sum(i, 0)), as_word(own_sum(i, 1)),
                                                           as_word(own_sum(i, 2)), as_word(own_sum(i, 3))};
                }
                if (warpgroups_arrive_last<1, 128 * CONSUMERS>(arrived + segment.tile, last_block - first_block + 1,
                                                               is_last)) {
#pragma unroll 1
                    for (int i = 0; i < FRAGMENTS; i += CONSUMER_WARPS) {
                        sum_t sums[4] = {};
#pragma unroll 4
                        for (int block = first_block; block <= last_block; ++block) {
                            add_words(sums, load_fresh(partial_of(block) + i * WARP_SIZE));
                        }
                        finish(i + warp, sums);
                    }
                }
            }
        }
        at += segment.last - segment.first;
    }
}
