// gemm_sm90_swap_ab: the GEMM for small M (decode) on Hopper's tensor cores, bound by the bandwidth of reading b.
//
//     accum[m, n] = sum_k a[m, k] * b[n, k], in float32; int8 operands in int32
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to accum[m, n]
//
// SCALE_BLOCK: blockwise scaling. accum[m, n] = sum_j a_scales[m, j] * b_scales[j, n / SCALE_BLOCK] * partial[j], where
// partial[j] sums over the j-th SCALE_BLOCK elements of K.
// SUM_BLOCK: the tensor cores accumulate SUM_BLOCK elements of K, then the threads promote the result: they add it to
// float32 registers (wgmma.cuh describes the precision of fp8 accumulation).
//
// Operands are swapped (swap-AB): the kernel computes the transpose of out, with 64 rows of b as the M of a WGMMA and
// TILE_M rows of a as its N. A tile is TILE_M rows and TILE_N columns of out; TILE_N is chosen to give all SMs an equal
// share of b. If TILE_N is not a multiple of 64, the tile is padded with rows of zeros. A k-tile is 128 bytes of each
// row of a and b. One producer thread per CTA runs up to STAGES k-tiles ahead. Two consumer warpgroups each take half
// of the tile's rows of b or, if these are at most 64, every other k-tile.
//
// GATED: b has 2 N rows, gates and then ups. The tensor map interleaves them, 8 gates and 8 ups of the same columns of
// out, so that a lane's fragment has both.
//
// Cluster split-K: the CTAs of a cluster share a tile, each with a part of K. Partial accumulators of CTAs, and of
// warpgroups that alternate k-tiles, are sent to one CTA per fragment, which reduces them (cluster_reduce.cuh). A
// lane's fragment is two rows and two columns of out. Those of large tiles (IN_RING) take the place of the ring, so
// they are sent when every warp of the cluster has read its last k-tile.
//
// Constants
//     scalar_t      element type of a and b: 16 or 8 bits
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1
//     SCALE_BLOCK   elements that share a block scale: 128 with 8-bit operands, or 0
//     SUM_BLOCK     elements of K between two promotions: a k-tile or half of it; 0, without SCALE_BLOCK: no promotion
//     TILE_M        rows of a tile: a multiple of 16, at most 192
//     TILE_N        rows of b of a tile: a multiple of 8, GATED of 16, at most 256
//     STAGES        k-tiles of the ring in shared memory: an even number above two if TILE_N is at most 64
//     SPLITS        CTAs of a cluster; K has at least one k-tile for each of their warpgroups that alternate k-tiles
// If accumulators are reduced across CTAs or warpgroups, there are as many clusters as tiles.

#include "cluster.cuh"
#include "cluster_reduce.cuh"
#include "gemm_epilogue.cuh"
#include "mainloop_sm90.cuh"

using sum_t = wgmma_sum_t<scalar_t>;
constexpr int CONSUMER_WARPS = 8, NUM_THREADS = 32 * (CONSUMER_WARPS + 1);
constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(scalar_t);
// Warpgroups that alternate k-tiles, warps that divide the rows of b, and WGMMAs of a warpgroup along those rows.
constexpr int TURNS = TILE_N <= 64 ? 2 : 1, ROW_WARPS = CONSUMER_WARPS / TURNS;
constexpr int PRODUCTS = TURNS > 1 ? 1 : ceil_div(TILE_N, 128), PADDED_N = PRODUCTS * ROW_WARPS * 16;
constexpr int A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES, STAGE_BYTES = A_BYTES + PADDED_N * ROW_BYTES;
constexpr int WARP_FRAGMENTS = PRODUCTS * TILE_M / 8, FRAGMENTS = ROW_WARPS * WARP_FRAGMENTS;
constexpr int PARTS = SPLITS * TURNS;  // partial accumulators per element of out
constexpr bool IN_RING = PARTS > 1 && TILE_M > 64;
// Promotions per k-tile.
constexpr int PIECES = SUM_BLOCK > 0 ? TILE_K / SUM_BLOCK : 1;
static_assert(SUM_BLOCK == 0 ? SCALE_BLOCK == 0 : PIECES * SUM_BLOCK == TILE_K && is_same<sum_t, float>);
static_assert(!GATED || (SCALE_BLOCK == 0 && TILE_N % 16 == 0));
static_assert(STAGES % TURNS == 0, "a warpgroup waits for every phase of the barriers that it waits for");
static_assert(STAGES > TURNS, "a warpgroup holds a stage until it has begun with its next one");

using mainloop_t = WgmmaMainloop<scalar_t, PRODUCTS, TILE_M, PIECES, 1, STAGES, STAGE_BYTES, 1, false, true>;
using cluster_sums_t = ClusterSums<sum_t, PARTS, SPLITS, FRAGMENTS>;
static_assert(!IN_RING || cluster_sums_t::BYTES <= STAGES * STAGE_BYTES, "partial accumulators fit into the ring");
using epilogue_t = Epilogue<out_t, A_SCALES, B_SCALES, AZP, BIAS, SCALE_EXPONENT>;

// The row of b, within the tile, of the thread's first accumulator of a WGMMA; its other row is 8 further.
DEVICE int column_of(int of_warp, int product, int lane) {
    return (of_warp / 4 * PRODUCTS + product) * 64 + of_warp % 4 * 16 + lane / 4;
}

// The threads' accumulators with SUM_BLOCK, and the block scales of a k-tile.
struct Promotion {
    static constexpr int ROWS = SCALE_BLOCK > 0 ? TILE_M / 4 : 1;  // rows of a of the thread's accumulators
    float promoted[PRODUCTS][SUM_BLOCK > 0 ? TILE_M / 2 : 1] = {};
    // Block scales of the next k-tile, for the rows of a and b of the thread's accumulators; their products for this
    // one.
    float row_scales[ROWS], column_scales[PRODUCTS][2];
    float factors[PRODUCTS][2][ROWS];

    DEVICE void load(const BlockScales& scales, int step, int first_row, int first_column, int64_t m, int64_t n,
                     int row_warp, int lane) {
#pragma unroll
        for (int i = 0; i < PRODUCTS * 2; ++i) {
            const int column_at = first_column + column_of(row_warp, i / 2, lane) + i % 2 * 8;
            column_scales[i / 2][i % 2] = scales.of_column(min(int64_t(column_at), n - 1), step);
        }
#pragma unroll
        for (int i = 0; i < TILE_M / 4; ++i) {
            const int64_t row = min(int64_t(first_row + i / 2 * 8 + lane % 4 * 2 + i % 2), m - 1);
            row_scales[i] = scales.of_row(row, step);
        }
    }
    // The next k-tile becomes the current one.
    DEVICE void advance() {
#pragma unroll
        for (int i = 0; i < PRODUCTS * 2; ++i) {
#pragma unroll
            for (int j = 0; j < TILE_M / 4; ++j) {
                factors[i / 2][i % 2][j] = row_scales[j] * column_scales[i / 2][i % 2];
            }
        }
    }
    // Adds the complete accumulators of a piece, times its block scales.
    DEVICE void add(mainloop_t::accum_t& accum) {
#pragma unroll
        for (int product = 0; product < PRODUCTS; ++product) {
            warpgroup_fence_operand(accum[product]);
#pragma unroll
            for (int i = 0; i < TILE_M / 2; ++i) {
                const float factor = SCALE_BLOCK > 0 ? factors[product][i / 2 % 2][i / 4 * 2 + i % 2] : 1.0f;
                promoted[product][i] = fmaf(factor, float(accum[product][i]), promoted[product][i]);
            }
        }
    }
};

// The epilogue of a tile: applied to reduced fragments and stored element by element, since a lane's two columns are
// not adjacent.
struct DirectStore {
    const epilogue_t& epilogue;
    out_t* out;
    int64_t m, n, out_stride;
    int first_row, first_column, lane;

    DEVICE void operator()(int fragment, const Fragment<sum_t>& own) const {
        const int i = fragment / ROW_WARPS, column = column_of(fragment % ROW_WARPS, i / (TILE_M / 8), lane);
        const int64_t row = first_row + i % (TILE_M / 8) * 8 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < (GATED ? 2 : 4); ++j) {
            const int within = GATED ? column / 16 * 8 + column % 16 : column + j / 2 * 8;
            const int64_t m_at = row + j % 2, n_at = (GATED ? first_column / 2 : first_column) + within;
            if (m_at >= m || n_at >= n || (GATED ? 2 * within : within) >= TILE_N) continue;
            float x = ACTIVATION<out_t>(epilogue.value(epilogue.row(m_at), epilogue.column(n_at), own.sums[j]));
            if constexpr (GATED) {
                x *= epilogue.value(epilogue.row(m_at), epilogue.column(n + n_at), own.sums[2 + j]);
            }
            out[m_at * out_stride + n_at] = from_float<out_t>(x);
        }
    }
};

// Announces the bytes of a k-tile with a_rows rows of a, and loads its rows of b.
DEVICE void fill_b(uint8_t* stage, const TensorMap* map, uint64_t* full, int step, int column, int a_rows) {
    mbarrier_arrive_expect_tx(full, a_rows * ROW_BYTES + B_BYTES);
    if constexpr (GATED) tma_load(stage + A_BYTES, map, full, step * TILE_K, 0, 0, column / 16);
    else tma_load(stage + A_BYTES, map, full, step * TILE_K, column);
}

// Fills the ring, but for the rows of a. It may run before the previous kernel has ended.
DEVICE void
prefetch_b(Ring<STAGES> ring, uint8_t* stages, const TensorMap* map, int step, int last_step, int column, int a_rows) {
    for (int i = 0; i < STAGES && step + i < last_step; ++i, ring.advance()) {
        fill_b(stages + i * STAGE_BYTES, map, ring.full(), step + i, column, a_rows);
    }
}

extern "C" __global__ void CLUSTER_OF(SPLITS) LAUNCH_BOUNDS(NUM_THREADS, 1)
gemm_sm90_swap_ab(const __grid_constant__ TensorMap a_map,       // [M, K], boxes of TILE_M x TILE_K, swizzled
                  const __grid_constant__ TensorMap a_tail_map,  // [M, K], boxes of the last M % TILE_M rows (times 8)
                  const __grid_constant__ TensorMap b_map,       // [N, K], boxes of TILE_N x TILE_K, swizzled; GATED:
                                                                 // [N / 8, 2, 8, K] by the strides of [2, N / 8, 8, K]
                  out_t* out,                                    // [M, N]
                  const a_scale_t* a_scales,                     // [M] or [1]; SCALE_BLOCK: [M, K / SCALE_BLOCK]
                  const b_scale_t* b_scales,  // [N] or [1]; SCALE_BLOCK: [K / SCALE_BLOCK, N / SCALE_BLOCK]
                  const int32_t* azp_adj,     // [N]
                  const int32_t* azp,         // [M]
                  const out_t* bias,          // [N], or [M, N]
                  int64_t m, int64_t n, int64_t k, int64_t out_stride, int64_t bias_stride, int64_t a_scale_step,
                  int64_t b_scale_step, int64_t a_scale_block_step, int64_t b_scale_block_step) {
    const int rows = int((m + TILE_M - 1) / TILE_M), steps = int((k + TILE_K - 1) / TILE_K);
    if constexpr (B_SCALES || BIAS > 0 || AZP > 0) {
        // The first tile's operands of the epilogue are in the L2 cache when the main loop ends. Not those of the ups.
        const int64_t first = int64_t(blockIdx.x) / rows * TILE_N / (GATED ? 2 : 1);
        const int64_t last = min(int64_t(TILE_N), n - first) - 1;
        if (B_SCALES) prefetch_part(b_scales + first * b_scale_step, last * b_scale_step, threadIdx.x);
        if (BIAS > 0) prefetch_part(bias + first, last, threadIdx.x);
        if (AZP > 0) prefetch_part(azp_adj + first, last, threadIdx.x);
    }
    // Until the previous kernel ends, the CTA prepares its shared memory.
    extern __shared__ __align__(1024) uint8_t shared[];
    prefetch_tensor_maps(a_map, a_tail_map, b_map);
    // Rows of the box that loads the last, partial row tile of a, as in gemm_sm90.cu.
    const int tail_rows = int((m % TILE_M + 7) / 8 * 8);
    if (tail_rows > 0) zero_stages<STAGES, STAGE_BYTES>(shared, tail_rows * ROW_BYTES, A_BYTES, NUM_THREADS);
    zero_stages<STAGES, STAGE_BYTES>(shared, A_BYTES + B_BYTES, STAGE_BYTES, NUM_THREADS);
    uint8_t* const behind = shared + STAGES * STAGE_BYTES;
    const cluster_sums_t sums{reinterpret_cast<Fragment<sum_t>*>(IN_RING ? shared : behind),
                              reinterpret_cast<uint64_t*>(behind + (IN_RING ? 0 : cluster_sums_t::BYTES))};
    uint64_t* const all_read = sums.all_received + 1;  // IN_RING: an mbarrier of the consumer warps of the cluster
    Ring<STAGES> ring(all_read + IN_RING);
    const int split = SPLITS > 1 ? blockIdx.y : 0;
    if (threadIdx.x == 0) {
        sums.init();
        if constexpr (IN_RING) mbarrier_init(all_read, SPLITS * CONSUMER_WARPS);
        ring.init(ROW_WARPS);
    }
    start_cluster<SPLITS>();
    const int first_step = int(int64_t(steps) * split / SPLITS);
    const int last_step = int(int64_t(steps) * (split + 1) / SPLITS);
    const auto rows_of = [&](int row) { return row + TILE_M > m ? tail_rows : TILE_M; };
    const int warp = shfl<WARP_SIZE>(int(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
    const bool is_producer = warp == CONSUMER_WARPS && elect_one();
    if (CONSTANT_WEIGHT && is_producer) {
        prefetch_b(ring, shared, &b_map, first_step, last_step, blockIdx.x / rows * TILE_N,
                   rows_of(blockIdx.x % rows * TILE_M));
    }
    await_previous_kernel();

    const int tiles = rows * int(((GATED ? 2 * n : n) + TILE_N - 1) / TILE_N);
    if (warp == CONSUMER_WARPS) {
        if (!is_producer) return;
        int prefetched = CONSTANT_WEIGHT ? STAGES : 0;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int row = tile % rows * TILE_M, column = tile / rows * TILE_N;
            const bool is_tail = row + TILE_M > m;
            for (int step = first_step; step < last_step; ++step, ring.advance()) {
                ring.acquire();
                uint8_t* to = shared + ring.stage * STAGE_BYTES;
                if (prefetched <= 0) fill_b(to, &b_map, ring.full(), step, column, rows_of(row));
                tma_load(to, is_tail ? &a_tail_map : &a_map, ring.full(), step * TILE_K, row);
                --prefetched;
            }
            prefetched = 0;
        }
        return;
    }

    const int turn = TURNS > 1 ? warp / 4 : 0, row_warp = warp % ROW_WARPS;
    if (turn > 0) ring.advance();
    const mainloop_t mainloop{ring, shared, A_BYTES + row_warp / 4 * PRODUCTS * 64 * ROW_BYTES, 0};
    const epilogue_t epilogue{a_scales, b_scales, azp_adj, azp, bias, a_scale_step, b_scale_step, bias_stride};
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int first_row = tile % rows * TILE_M, first_column = tile / rows * TILE_N;
        mainloop_t::accum_t accum;
        Promotion promotion;
        const auto load_scales = [&](int step) {
            const BlockScales scales{a_scales,     b_scales,           a_scale_step,
                                     b_scale_step, a_scale_block_step, b_scale_block_step};
            promotion.load(scales, step, first_row, first_column, m, n, row_warp, lane);
        };
        if constexpr (SCALE_BLOCK > 0) load_scales(first_step + turn);
        int previous = 0;
        bool accumulate = false;
        for (int step = first_step + turn; step < last_step; step += TURNS) {
            if constexpr (SCALE_BLOCK > 0) {
                promotion.advance();
                load_scales(min(step + TURNS, last_step - 1));
            }
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                mainloop.issue(accum, accumulate, piece);
                if constexpr (SUM_BLOCK > 0) {
                    warpgroup_wait<0>();
                    if (piece == PIECES - 1) ring.release(ring.stage);
                    promotion.add(accum);
                } else {
                    warpgroup_wait<1>();  // for the WGMMAs of the previous k-tile
                    if (accumulate) ring.release(previous);
                    previous = ring.stage;
                    accumulate = true;
                }
            }
            ring.advance();
            if constexpr (TURNS > 1) ring.advance();
        }
        if constexpr (SUM_BLOCK == 0) {
            warpgroup_wait<0>();
            mainloop_t::fence(accum);
            if (accumulate) ring.release(previous);
        }

        if constexpr (IN_RING) {
            if (lane < SPLITS) mbarrier_arrive_cluster(all_read, lane);
            mbarrier_wait(all_read, 0);
        }

        // Accumulator j of four in the warp's fragment i.
        const auto own_sum = [&](int i, int j) {
            const int product = i / (TILE_M / 8), at = i % (TILE_M / 8) * 4 + j;
            if constexpr (SUM_BLOCK > 0) return promotion.promoted[product][at];
            else return accum[product][at];
        };
        const DirectStore finish{epilogue, out, m, n, out_stride, first_row, first_column, lane};
#pragma unroll
        for (int i = 0; i < WARP_FRAGMENTS; ++i) {
            const int fragment = i * ROW_WARPS + row_warp;
            const Fragment<sum_t> own = {own_sum(i, 0), own_sum(i, 1), own_sum(i, 2), own_sum(i, 3)};
            if constexpr (PARTS > 1) sums.send(split * TURNS + turn, fragment, own);
            else finish(fragment, own);
        }
        if constexpr (PARTS > 1) sums.add_up(split, warp, CONSUMER_WARPS, finish);
    }
}
