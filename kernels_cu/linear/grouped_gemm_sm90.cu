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
// ahead: it finds the tiles and queues them for the consumers, one thread loads b by TMA, and all threads gather the
// valid rows of a by cp.async, 16 bytes at a time. Each of the other warpgroups, the consumers, multiplies 64 rows by
// TILE_N rows of b; with a TILE_M of 64, two consumers halve TILE_N instead of the rows. A consumer without valid rows
// only releases the stages.
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
//                   warpgroup
//     STAGES        k-tiles of the ring in shared memory
//     GROUP         row tiles of one expert that the tile order takes before the next column
//     ALIGNED_OUT   whether rows of out are 16-byte aligned

#include "async.cuh"
#include "mainloop_sm90.cuh"
#include "grouped.cuh"

constexpr int CONSUMERS = TILE_M > 128 ? TILE_M / 64 : 2, NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int QUEUE = 4;  // tiles that the producer may have found before the consumers take them
constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(scalar_t);
constexpr int A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
// Parts into which consumers divide the rows of b; rows of a part, boxes of a part (gates, ups), rows of a box, and
// columns of out per part.
constexpr int PARTS = TILE_M == 64 ? 2 : 1, PART_N = TILE_N / PARTS;
constexpr int HALVES = GATED == 1 ? 2 : 1, BOX_N = PART_N / HALVES, OUT_N = GATED ? PART_N / 2 : PART_N;
// Promotion: columns of an accumulator, pieces of a k-tile, and accumulators of a thread: two, if registers suffice, so
// that one is promoted while WGMMAs fill the other.
constexpr int SUM_COLUMNS = SCALE_BLOCK > 0 && PART_N > 192 ? PART_N / 2 : PART_N, PIECES = PART_N / SUM_COLUMNS;
constexpr int BUFFERS = SCALE_BLOCK > 0 && CONSUMERS == 2 && PART_N <= 128 ? 2 : 1;
constexpr int N_PIECES = PIECES, SCALE_RUN = BOX_N;
// Registers per thread: the consumers take what the producers give up.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 80 : 56, CONSUMER_REGISTERS = CONSUMERS == 3 ? 144 : 224;

static_assert(TILE_M == 64 || TILE_M == 128 || TILE_M == 192);
static_assert(PART_N % 16 == 0 && BOX_N % 8 == 0 && PART_N <= 256);
static_assert(SCALE_BLOCK == 0 || is_same<wgmma_sum_t<scalar_t>, float>);

using mainloop_t = WgmmaMainloop<scalar_t, 1, SUM_COLUMNS, 1, N_PIECES, STAGES, STAGE_BYTES, 1, true>;
using accum_t = wgmma_sum_t<scalar_t>[1][PART_N / 2];  // a thread's accumulators of a tile
using epilogue_t = ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED>;
#include "block_promotion.cuh"
#include "expert_store.cuh"
using scale_loader_t = ScaleLoader<128>;
// Three warpgroups with promoted gates and ups have no register for the operands of a row during the main loop.
constexpr bool LATE_TERMS = SCALE_BLOCK > 0 && CONSUMERS == 3 && GATED > 0;
constexpr int COLUMNS_BARRIER = 1;  // the first of the named barriers of the operands of columns, one for each consumer

// A tile that the producer has found; a negative expert: there are no more.
struct FoundTile { int expert, row, column, unused; };

// The queue of found tiles, in shared memory. The producer and each consumer have one of their own.
struct TileQueue {
    static constexpr int BYTES = QUEUE * (sizeof(FoundTile) + 2 * sizeof(uint64_t));

    uint8_t* shared;  // QUEUE tiles, then the barriers of a ring
    int number = 0;   // of the next tile

    DEVICE FoundTile* tiles() const { return reinterpret_cast<FoundTile*>(shared); }
    DEVICE Ring<QUEUE> ring() const {
        Ring<QUEUE> found(shared + QUEUE * sizeof(FoundTile));
        found.skip(number);
        return found;
    }
    // One thread of the producer.
    DEVICE void put(const FoundTile& tile) {
        const Ring<QUEUE> at = ring();
        at.acquire();
        tiles()[at.stage] = tile;
        mbarrier_arrive(at.full());
        ++number;
    }
    DEVICE FoundTile take() {
        const Ring<QUEUE> at = ring();
        at.wait();
        const FoundTile tile = tiles()[at.stage];
        sync_warp();  // all lanes have read it before one lane releases it
        at.release(at.stage);
        ++number;
        // The same in all lanes, which saves registers.
        return {shfl<WARP_SIZE>(tile.expert, 0), shfl<WARP_SIZE>(tile.row, 0), shfl<WARP_SIZE>(tile.column, 0), 0};
    }
};

// The producer of a tile, a warpgroup: one thread loads b by TMA, and all threads gather the rows of a by cp.async, and
// the block scales.
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
    DEVICE void load(const Ring<STAGES>& ring, int step, scale_loader_t& block_scales) {
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
        block_scales.load(ring, step);
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
    uint8_t* column_params = stores + 4 * CONSUMERS * ExpertStore::BYTES;
    float* scales = reinterpret_cast<float*>(column_params + CONSUMERS * column_params_t::BYTES);
    TileQueue queue{reinterpret_cast<uint8_t*>(scales + STAGES * STAGE_SCALES)};
    Ring<STAGES> ring(queue.shared + TileQueue::BYTES);
    if (threadIdx.x == 0) {
        ring.init(4 * CONSUMERS, 1 + 128);
        queue.ring().init(4 * CONSUMERS);
    }
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
    const int num_columns = int((n + PARTS * OUT_N - 1) / (PARTS * OUT_N)), steps = int((k + TILE_K - 1) / TILE_K);
    const int tiles = rows.tiles * num_columns, b_rows = int(GATED ? 2 * n : n);
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;

    if (warpgroup == CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        const int own_row = threadIdx.x % 128 / GatherLoader::ROW_CHUNKS,
                  chunk = threadIdx.x % GatherLoader::ROW_CHUNKS;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            int tile_row, tile_column;
            const int expert = rows.template locate<GROUP>(tile, num_columns, int(gridDim.x), tile_row, tile_column);
            if (expert < 0 || !rows.template any<TILE_M>(tile_row * TILE_M)) continue;
            if (warp == 0 && elect_one()) queue.put({expert, tile_row, tile_column, 0});
            GatherLoader loader{b_map, shared, n, k, warp, own_row, chunk, expert, b_rows, tile_column};
            loader.begin(rows, tile_row, a, a_stride, int(top_k));
            const BlockScales blocks{a_scales,           b_scales + expert * b_scale_expert_step,
                                     a_scale_step,       b_scale_step,
                                     a_scale_block_step, b_scale_block_step};
            scale_loader_t block_scales(
                blocks, scales, 0, [&](int i) { return max(rows.row(tile_row * TILE_M + i), 0) / int(top_k); },
                [&](int i) {
                    const int of_part = i % PART_SCALES * SCALE_COLUMNS;
                    const int column = (tile_column * PARTS + i / PART_SCALES) * OUT_N;
                    const int b_row = GATED == 2 ? 2 * column : column + of_part / BOX_N * int(n);
                    return min(b_row + of_part % BOX_N, b_rows - 1);
                });
            for (int step = 0; step < steps; ++step, ring.advance()) {
                ring.acquire();
                loader.load(ring, step, block_scales);
            }
        }
        if (warp == 0 && elect_one()) queue.put({-1, 0, 0, 0});
        ring.drain();
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const int part = PARTS > 1 ? warpgroup : 0, first_row = PARTS > 1 ? 0 : warpgroup * 64;
        mainloop_t mainloop{ring, shared, first_row * ROW_BYTES, A_BYTES + part * PART_N * ROW_BYTES};
        column_params_t columns{{}, reinterpret_cast<float*>(column_params + warpgroup * column_params_t::BYTES)};
        for (FoundTile tile = queue.take(); tile.expert >= 0; tile = queue.take()) {
            const int first_place = tile.row * TILE_M + first_row, first_column = (tile.column * PARTS + part) * OUT_N;
            if (TILE_M > 64 && !rows.template any<64>(first_place)) {
                mainloop.skip(0, steps);
                continue;
            }
            // Lane i has row i % 16 of the warp; results of padding rows are not stored.
            const int own_row = rows.row(first_place + warp * 16 + lane % 16);
            const float* expert_scales = b_scales + tile.expert * b_scale_expert_step;
            const epilogue_t epilogue{topk_weights, a_scales,     expert_scales, bias + int64_t(tile.expert) * b_rows,
                                      int(top_k),   a_scale_step, b_scale_step};
            // Loaded before the main loop, which hides the latency.
            const typename epilogue_t::Row row_terms =
                LATE_TERMS ? typename epilogue_t::Row{} : epilogue.row(max(own_row, 0));
            columns.load([&](int i) {
                if (GATED == 2) return epilogue.column(min(2 * first_column + i, b_rows - 1));
                const int is_up = GATED == 1 && i >= OUT_N;
                return epilogue.column(min(first_column + i - is_up * OUT_N, int(n) - 1) + is_up * int(n));
            });
            const auto store_tile = [&](const auto& sums) {
                columns.share(COLUMNS_BARRIER + warpgroup);
                // Values of the thread are computed here, so that no register holds them during the main loop.
                const int thread = made_anew(threadIdx.x);
                uint8_t* own_store = stores + thread / 32 * ExpertStore::BYTES;
                const ExpertStore store{out, out_stride, int(n), own_store, epilogue, thread % 32};
                store.store(sums, own_row, LATE_TERMS ? epilogue.row(max(own_row, 0)) : row_terms, columns,
                            first_column);
            };
            if constexpr (SCALE_BLOCK == 0) {
                mainloop_t::accum_t accum;
                mainloop.run(accum, 0, steps, [] {});
                store_tile(reinterpret_cast<accum_t&>(accum)[0]);
            } else {
                Promotion promotion;
                promotion.run(mainloop, scales, first_row + warp * 16 + lane / 4, part, 0, steps);
                store_tile(promotion.promoted[0]);
            }
        }
    }
}
