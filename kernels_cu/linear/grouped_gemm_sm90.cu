// grouped_gemm_sm90: the grouped GEMM for MoE on Hopper's tensor cores (WGMMA, warp-specialised, persistent).
//
//     accum[t, n] = sum_k a[t / top_k, k] * b[e, n, k], in float32; int8 operands in int32; e is the expert of row t
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n], and to the gate or up that is paired with it
//
// SCALE_BLOCK: blockwise scaling. accum[t, n] = sum_j a_scales[t / top_k, j] * b_scales[e, n / SCALE_BLOCK, j] *
// partial[j], where partial[j] sums over the j-th SCALE_BLOCK elements of K. The tensor cores compute partial[j], the
// threads scale and promote it.
//
// The grid is as many CTAs as the device holds at a time; each takes tiles of TILE_M rows and TILE_N rows of b[e], one
// after another. A k-tile is 128 bytes of each row of a and b. The last warpgroup is the producer, up to STAGES k-tiles
// ahead: one thread loads b by TMA, and all threads gather the valid rows of a by cp.async, 16 bytes at a time. Each of
// the other warpgroups, the consumers, multiplies 64 rows by TILE_N rows of b; with a TILE_M of 64, two consumers halve
// TILE_N instead of the rows. A consumer without valid rows only releases the stages.
//
// A thread has the accumulators of both a gate and its up: a consumer's rows of b are OUT_N gates and then OUT_N ups,
// or the two interleaved. A warp stores 16 rows of out, staged through shared memory.
//
// Constants
//     scalar_t      element type of a and b: 16 or 8 bits
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER, ROUTED    the epilogue (grouped.cuh)
//     SCALE_BLOCK   elements that share a block scale: 128 with 8-bit operands, or 0
//     TILE_M        rows of a tile: 64, 128 or 192
//     TILE_N        rows of b in a tile: a multiple of 32, of 64 with a TILE_M of 64 and two halves; at most 256 for a
//                   warpgroup. With SCALE_BLOCK a warpgroup's gates share one block scale, and so do its ups; without
//                   GATED its columns have at most two
//     STAGES        k-tiles of the ring in shared memory
//     BUFFERS       accumulators of a thread, one per k-tile: 2 with SCALE_BLOCK if registers suffice, otherwise 1
//     GROUP         row tiles of one expert that the tile order takes before the next column
//     ALIGNED_OUT   whether rows of out are 16-byte aligned

#include "async.cuh"
#include "mainloop_sm90.cuh"
#include "grouped.cuh"

constexpr int CONSUMERS = TILE_M > 128 ? TILE_M / 64 : 2, NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(scalar_t);
constexpr int A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
// Parts into which consumers divide the rows of b; rows of a part, boxes of a part (gates, ups), rows of a box, and
// columns of out per part.
constexpr int PARTS = TILE_M == 64 ? 2 : 1, PART_N = TILE_N / PARTS;
constexpr int HALVES = GATED == 1 ? 2 : 1, BOX_N = PART_N / HALVES, OUT_N = GATED ? PART_N / 2 : PART_N;
// Whether the columns of a warpgroup may have two block scales; the boundary is at a multiple of 8 columns.
constexpr bool STRADDLES = SCALE_BLOCK > 0 && SCALE_BLOCK % BOX_N != 0;
constexpr int FACTORS = STRADDLES ? 2 : HALVES;  // block scales of the columns of a warpgroup
// Registers per thread: the consumers take what the producers give up.
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = CONSUMERS == 3 ? 152 : 224;

static_assert(TILE_M == 64 || TILE_M == 128 || TILE_M == 192);
static_assert(PART_N % 16 == 0 && BOX_N % 8 == 0 && PART_N <= 256);
static_assert(SCALE_BLOCK == 0 || (BOX_N <= SCALE_BLOCK && is_same<wgmma_sum_t<scalar_t>, float>));
static_assert(!STRADDLES || GATED == 0);

using mainloop_t = WgmmaMainloop<scalar_t, 1, PART_N, 1, 1, STAGES, STAGE_BYTES, 1, true>;
using epilogue_t = ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED>;
#include "expert_store.cuh"

// The producer of a tile, a warpgroup: one thread loads b by TMA, and all threads gather the rows of a by cp.async.
struct GatherLoader {
    // Elements of 16 bytes, 16-byte chunks of a row, rows that all threads load at a time, and rows that a thread
    // loads.
    static constexpr int CHUNK = 16 / sizeof(scalar_t), ROW_CHUNKS = ROW_BYTES / 16, PASS_ROWS = 128 / ROW_CHUNKS;
    static constexpr int OWN_ROWS = TILE_M / PASS_ROWS;

    const TensorMap& b_map;
    uint8_t* shared;
    int64_t n, k;
    int warp, own_row, chunk;  // the thread's first row of the tile, and its 16-byte chunk of each row
    int expert, b_rows, tile_column;
    // The next source address of each of the thread's rows, which of them are valid, and how many there are up to the
    // warp's last valid one. A k-tile waits for its last copy, so each address and predicate is independent and cheap.
    const scalar_t* from[OWN_ROWS];
    uint32_t existing;
    int count;

    // Begins with the tile that has row tile `tile_row` of the sorted lists.
    DEVICE void begin(const ExpertTiles<TILE_M>& rows, int tile_row, const scalar_t* a, int64_t a_stride, int top_k) {
        existing = 0;
        count = 0;
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            const int row = rows.row(tile_row * TILE_M + own_row + i * PASS_ROWS);
            from[i] = a + int64_t(max(row, 0) / top_k) * a_stride + chunk * CHUNK;
            existing |= uint32_t(row >= 0) << i;
            if (any_lane(row >= 0)) count = i + 1;
        }
    }
    DEVICE void load(const Ring<STAGES>& ring, int step) {
        uint8_t* to = shared + ring.stage * STAGE_BYTES;
        if (warp == 0 && elect_one()) {
            mbarrier_arrive_expect_tx(ring.full(), B_BYTES);
#pragma unroll
            for (int i = 0; i < PARTS * HALVES; ++i) {
                const int column = (tile_column * PARTS + i / HALVES) * OUT_N;
                const int b_row = GATED == 2 ? 2 * column : column + i % HALVES * int(n);
                tma_load(to + A_BYTES + i * BOX_N * ROW_BYTES, &b_map, ring.full(), step * TILE_K,
                         expert * b_rows + b_row);
            }
        }
        uint8_t* own = to + swizzle_128b(own_row, chunk * 16);
        const uint32_t valid = step * TILE_K + chunk * CHUNK < k ? existing : 0u;
        const int copied = step < STAGES ? OWN_ROWS : count;
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i, own += PASS_ROWS * ROW_BYTES) {
            if (i < copied) cp_async<16>(own, from[i], valid >> i & 1);
            from[i] += TILE_K;
        }
        cp_async_mbarrier_arrive_noinc(ring.full());
    }
};

// The block scales of a k-tile, for a thread's rows and a warpgroup's columns.
struct Factors { float rows[2], columns[FACTORS]; };

// The threads' accumulators with SCALE_BLOCK, and the block scales of the k-tiles in flight.
struct Promotion {
    float promoted[PART_N / 2];
    // Addresses of the next k-tile's block scales: for the thread's rows, and for the warpgroup's columns.
    const float *row_scales[2], *column_scales[FACTORS];
    int64_t row_step, column_step;  // from each k-tile to the next
    int own_columns;                // STRADDLES: columns under the first of two scales

    DEVICE
    Promotion(const BlockScales& scales, const int (&own_rows)[2], int top_k, int first_column, int64_t n, int b_rows)
        : row_step(scales.a_block_step), column_step(scales.b_block_step) {
#pragma unroll
        for (int i = 0; i < PART_N / 2; ++i) promoted[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) row_scales[i] = scales.a_scales + max(own_rows[i], 0) / top_k * scales.a_step;
#pragma unroll
        for (int i = 0; i < FACTORS; ++i) {
            const int64_t other = STRADDLES ? BOX_N - 1 : n;
            const int64_t column = GATED == 2 ? 2 * first_column : first_column + i * other;
            const int64_t block = min(column, int64_t(b_rows) - 1) / max(SCALE_BLOCK, 1);
            column_scales[i] = scales.b_scales + block * scales.b_step;
        }
        own_columns = SCALE_BLOCK - first_column % max(SCALE_BLOCK, 1);
    }
    // The block scales of the current k-tile, or with `advance` of the next one.
    DEVICE Factors load(bool advance) {
        Factors factors;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (advance) row_scales[i] += row_step;
            factors.rows[i] = *row_scales[i];
        }
#pragma unroll
        for (int i = 0; i < FACTORS; ++i) {
            if (advance) column_scales[i] += column_step;
            factors.columns[i] = *column_scales[i];
        }
        return factors;
    }
    // Adds the complete accumulators of a k-tile, times its block scales.
    DEVICE void add(mainloop_t::accum_t& accum, const Factors& factors) {
        mainloop_t::fence(accum);
        float scales[FACTORS][2];
#pragma unroll
        for (int i = 0; i < FACTORS * 2; ++i) {
            scales[i / 2][i % 2] = factors.rows[i % 2] * factors.columns[i / 2];
        }
#pragma unroll
        for (int i = 0; i < PART_N / 2; ++i) {
            float scale = scales[i / (BOX_N / 2)][i / 2 % 2];
            if constexpr (STRADDLES) scale = i / 4 * 8 < own_columns ? scale : scales[1][i / 2 % 2];
            promoted[i] = fmaf(scale, accum[0][i], promoted[i]);
        }
    }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
grouped_gemm_sm90(const __grid_constant__ TensorMap b_map,  // [E * B_ROWS, K], boxes of BOX_N x TILE_K, swizzled
                  out_t* out,                               // [num_rows, N]
                  const scalar_t* a,                        // [num_rows / top_k, K]
                  const int32_t* sorted_token_ids,          // [max_tiles * TILE_M] at least
                  const int32_t* expert_ids,                // [max_tiles / block_tiles] at least
                  const int32_t* num_tokens_post_pad,       // one element
                  const float* topk_weights,                // [num_rows]
                  const float* a_scales,  // [num_rows / top_k] or [1]; SCALE_BLOCK: [.., K / SCALE_BLOCK]
                  const float* b_scales,  // [E, B_ROWS] or [E]; SCALE_BLOCK: [E, B_ROWS / .., K / ..]
                  const out_t* bias,      // [E, B_ROWS]
                  int64_t num_rows, int64_t n, int64_t k, int64_t top_k, int64_t num_experts, int64_t block_tiles,
                  int64_t max_tiles, int64_t a_stride, int64_t out_stride, int64_t a_scale_step,
                  int64_t a_scale_block_step, int64_t b_scale_expert_step, int64_t b_scale_step,
                  int64_t b_scale_block_step) {
    // Until the previous kernel ends, the CTA prepares its shared memory.
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* stores = shared + STAGES * STAGE_BYTES;
    Ring<STAGES> ring(stores + 4 * CONSUMERS * ExpertStore::BYTES);
    if (threadIdx.x == 0) ring.init(4 * CONSUMERS, 1 + 128);
    // Padding rows are never loaded. Rows that are padding now, but were valid in the previous tile, are zeroed again:
    // MMAs on stale data would cost power, which limits the clock of a busy GPU.
    for (int i = threadIdx.x; i < STAGES * A_BYTES / 16; i += NUM_THREADS) {
        uint8_t* stage = shared + i / (A_BYTES / 16) * STAGE_BYTES;
        reinterpret_cast<uint4*>(stage)[i % (A_BYTES / 16)] = {0, 0, 0, 0};
    }
    fence_proxy_async();
    prefetch_tensor_maps(b_map);
    __syncthreads();
    await_previous_kernel();

    const ExpertTiles<TILE_M> rows(sorted_token_ids, expert_ids, num_tokens_post_pad, num_rows, num_experts,
                                   block_tiles, max_tiles);
    const int columns = int((n + PARTS * OUT_N - 1) / (PARTS * OUT_N)), steps = int((k + TILE_K - 1) / TILE_K);
    const int tiles = rows.tiles * columns, b_rows = int(GATED ? 2 * n : n);
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;
    int tile_row, tile_column;

    if (warpgroup == CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        const int own_row = threadIdx.x % 128 / GatherLoader::ROW_CHUNKS,
                  chunk = threadIdx.x % GatherLoader::ROW_CHUNKS;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int expert = rows.template locate<GROUP>(tile, columns, int(gridDim.x), tile_row, tile_column);
            if (expert < 0) continue;
            GatherLoader loader{b_map, shared, n, k, warp, own_row, chunk, expert, b_rows, tile_column};
            loader.begin(rows, tile_row, a, a_stride, int(top_k));
            for (int step = 0; step < steps; ++step, ring.advance()) {
                ring.acquire();
                loader.load(ring, step);
            }
        }
        ring.drain();
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const int part = PARTS > 1 ? warpgroup : 0, first_row = PARTS > 1 ? 0 : warpgroup * 64;
        mainloop_t mainloop{ring, shared, first_row * ROW_BYTES, A_BYTES + part * PART_N * ROW_BYTES};
        uint8_t* own_store = stores + (warpgroup * 4 + warp) * ExpertStore::BYTES;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int expert = rows.template locate<GROUP>(tile, columns, int(gridDim.x), tile_row, tile_column);
            if (expert < 0) continue;
            const int first_place = tile_row * TILE_M + first_row, first_column = (tile_column * PARTS + part) * OUT_N;
            if (!any_lane(rows.row(first_place + lane) >= 0 || rows.row(first_place + 32 + lane) >= 0)) {
                mainloop.skip(0, steps);
                continue;
            }
            // The two rows of out of the thread's accumulators; results of padding rows are not stored.
            const int own_rows[2] = {rows.row(first_place + warp * 16 + lane / 4),
                                     rows.row(first_place + warp * 16 + lane / 4 + 8)};
            const float* expert_scales = b_scales + expert * b_scale_expert_step;
            const epilogue_t epilogue{topk_weights, a_scales,     expert_scales, bias + int64_t(expert) * b_rows,
                                      int(top_k),   a_scale_step, b_scale_step};

            mainloop_t::accum_t accums[BUFFERS];
            const ExpertStore store{out, out_stride, n, own_store, lane};
            if constexpr (SCALE_BLOCK == 0) {
                mainloop.run(accums[0], 0, steps, [] {});
                store.store(accums[0][0], own_rows, epilogue, first_column);
            } else {
                const BlockScales scales{a_scales,     expert_scales,      a_scale_step,
                                         b_scale_step, a_scale_block_step, b_scale_block_step};
                Promotion promotion(scales, own_rows, int(top_k), first_column, n, b_rows);
                // Scales are loaded after the WGMMAs of a k-tile are issued, which hide the latency of the loads.
                if constexpr (BUFFERS == 1) {
                    Factors factors = promotion.load(false), next;
                    const auto start = [&](int step, int) {
                        mainloop.issue(accums[0], false);
                        next = promotion.load(step + 1 < steps);
                    };
                    mainloop.run_promoted_at_once(0, steps, start, [&](int) {
                        promotion.add(accums[0], factors);
                        factors = next;
                    });
                } else {
                    Factors factors[2];
                    const auto start = [&](int step, int now) {
                        mainloop.issue(accums[now], false);
                        factors[now] = promotion.load(step > 0);
                    };
                    mainloop.run_promoted(0, steps, start, [&](int now) { promotion.add(accums[now], factors[now]); });
                }
                store.store(promotion.promoted, own_rows, epilogue, first_column);
            }
        }
    }
}
