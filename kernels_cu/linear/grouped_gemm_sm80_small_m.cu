// grouped_gemm_sm80_small_m: the grouped GEMM of fp8 for MoE with small M, by mma.sync: GPUs without WGMMA.
//
//     accum[t, r] = sum_k a[t / top_k, k] * b[e, r, k], in float32; e is the expert of row t
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n], and to the gate or up that is paired with it
//
// SCALE_BLOCK: blockwise scaling. accum[t, r] = sum_j a_scales[t / top_k, j] * b_scales[e, r / SCALE_BLOCK, j] *
// partial[j], where partial[j] is the sum over the j-th SCALE_BLOCK elements of K.
//
// With few rows of each expert the bytes of b bind, if the warps keep up: so a weight is converted to float16 once, in
// the registers of the lane that multiplies it, and a row of a once for the 64 rows of b of a warp. Devices with fp8 MMA
// convert nothing. Operands are swapped, and warps share K, as swap_ab_tile.cuh says.
//
// A k-tile of a warp is 128 bytes of each row, and the warps of a block take k-tiles round-robin. cp.async brings one to
// the warp's part of shared memory, STAGES - 1 of its k-tiles ahead, whole lines at a time. The order of K within an MMA
// is free: lane 4g + t multiplies chunks t and t + 4 of 16 bytes, of rows g and g + 8 of a fragment of b, and of row g
// of a. Block scales are loaded to registers a k-tile ahead. Warps do not synchronise before the reduction.
//
// Constants
//     scalar_t      element type of a and b: fp8
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER, ROUTED    the epilogue (grouped.cuh)
//     SCALE_BLOCK   elements that share a block scale: those of a k-tile, or 0
//     TILE_M        slots of a tile: 8 or 16
//     WARPS         warps of a block
//     STAGES        k-tiles in shared memory, those in flight among them
//     MIN_BLOCKS    blocks per SM that the registers must allow

#include "async.cuh"
#include "block_scales.cuh"
#include "mma.cuh"
#include "swap_ab_tile.cuh"

constexpr int STEP_K = 128, CHUNK = 16;                     // elements of K in a k-tile, and in a chunk of 16 bytes
constexpr int CHUNKS = STEP_K / CHUNK, PARTS = CHUNKS / 4;  // chunks of a row, and those of a lane
constexpr int STAGE_BYTES = (TILE_M + ROWS) * STEP_K;       // rows of a, then rows of b
constexpr int WARP_BYTES = STAGES * STAGE_BYTES > SUM_BYTES ? STAGES * STAGE_BYTES : SUM_BYTES;
constexpr int ROWS_APART = 32 / CHUNKS;                                // rows that the lanes copy at a time
constexpr bool CONVERTS = !MULTIPLIES_BYTES<scalar_t>;                 // to float16, which represents every fp8 value
constexpr int CHUNK_WORDS = CONVERTS ? 8 : 4, MMAS = CHUNK_WORDS / 2;  // operand words and MMAs of a chunk
// The factor by which accumulators are too small.
constexpr float FACTOR = CONVERTS ? OPERAND_FACTOR<scalar_t> * OPERAND_FACTOR<scalar_t> : 1;
static_assert(SCALE_BLOCK == 0 || SCALE_BLOCK == STEP_K);
static_assert(TILE_M == 8 || TILE_M == 16);

// The offset of a chunk of a row in a stage. The eight chunks that lanes read together, four of each of two adjacent
// rows, are on different banks.
DEVICE int chunk_place(int row, int chunk) { return (row * CHUNKS + (chunk ^ (row & 1) << 2)) * CHUNK; }

// A chunk of a row as words of operands.
struct Operand {
    uint32_t words[CHUNK_WORDS];

    DEVICE void load(const uint8_t* chunk) {
        const four_t loaded = four_t::load(reinterpret_cast<const uint32_t*>(chunk));
        if constexpr (CONVERTS) {
            NanCount nans;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t halves[2];
                fp8_to_half_operand<scalar_t>(loaded.data[i], halves, nans);
                words[2 * i] = halves[0];
                words[2 * i + 1] = halves[1];
            }
            words[0] = nans.mark(words[0]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = loaded.data[i];
        }
    }
};

// Adds MMA i of a chunk: rows `low` and `high` of a fragment of b times row x of a.
DEVICE void multiply(float (&accum)[4], const Operand& low, const Operand& high, const Operand& x, int i) {
    const uint32_t b[4] = {low.words[2 * i], high.words[2 * i], low.words[2 * i + 1], high.words[2 * i + 1]};
    const uint32_t a[2] = {x.words[2 * i], x.words[2 * i + 1]};
    if constexpr (CONVERTS) mma_m16n8k16<half_t>(accum, b, a);
    else mma_m16n8k32<scalar_t>(accum, b, a);
}

// The block scales of a thread's accumulators for a k-tile: of rows g and g + 8 of every fragment, which lie in one
// block each, and of its rows of a.
struct TileScales { float halves[2], rows[ROW_TILES][2]; };

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS) grouped_gemm_sm80_small_m(
    out_t* out,                          // [num_rows, N]
    const scalar_t* a,                   // [num_rows / top_k, K]
    const scalar_t* b,                   // [E, b_rows, K]
    const int32_t* sorted_token_ids,     // [max_tiles * TILE_M] at least
    const int32_t* expert_ids,           // [max_tiles / block_tiles] at least
    const int32_t* num_tokens_post_pad,  // one element
    const float* topk_weights,           // [num_rows]
    const a_scale_t* a_scales,           // [num_rows / top_k] or [1]; SCALE_BLOCK: [num_rows / top_k, K / SCALE_BLOCK]
    const b_scale_t* b_scales,           // [E, b_rows] or [E]; SCALE_BLOCK: [E, b_rows / SCALE_BLOCK, K / SCALE_BLOCK]
    const out_t* bias,                   // [E, b_rows]
    int64_t num_rows, int64_t n, int64_t k, int64_t top_k, int64_t num_experts, int64_t block_tiles, int64_t max_tiles,
    int64_t a_stride, int64_t b_stride, int64_t out_stride, int64_t a_scale_step, int64_t a_scale_block_step,
    int64_t b_scale_expert_step, int64_t b_scale_step, int64_t b_scale_block_step) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ int row_ids[TILE_M];  // rows of out; -1: padding
    __shared__ int a_rows[TILE_M];   // rows of a; -1: padding
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint8_t* const own = reinterpret_cast<uint8_t*>(memory) + warp * WARP_BYTES;
    const ExpertTiles<TILE_M> lists(sorted_token_ids, expert_ids, num_tokens_post_pad, num_rows, num_experts,
                                    block_tiles, max_tiles);
    SwapAbTile tile;
    if (!tile.find(lists, n, num_experts, top_k, row_ids, a_rows)) return;
    const int64_t b_rows = GATED ? 2 * n : n;
    const int steps = int((k + STEP_K - 1) / STEP_K);

    // The lane copies chunk lane % CHUNKS of rows lane / CHUNKS + i * ROWS_APART.
    const int chunk = lane % CHUNKS, first_row = lane / CHUNKS;
    const int64_t first_k = int64_t(warp) * STEP_K + chunk * CHUNK;
    const scalar_t* next = b + (tile.expert * b_rows + tile.first_b_row(first_row)) * b_stride + first_k;
    const int64_t quarter_stride = (GATED == 2 ? 2 : 1) * ROWS_APART * b_stride;
    const int64_t half = tile.half_rows(n) * b_stride, fragment = FRAGMENT_ROWS * b_stride;
    const scalar_t* from[TILE_M / ROWS_APART];  // rows of a
    uint32_t exist = 0;                         // a bit of each
#pragma unroll
    for (int i = 0; i < TILE_M / ROWS_APART; ++i) {
        const int row = a_rows[first_row + i * ROWS_APART];
        from[i] = a + max(row, 0) * a_stride + first_k;
        exist |= uint32_t(row >= 0) << i;
    }
    int64_t left = k - first_k;  // elements of a row from the lane's chunk of the next k-tile on
    const auto copy = [&](uint8_t* stage) {
        const bool has_chunk = left > 0;
#pragma unroll
        for (int i = 0; i < TILE_M / ROWS_APART; ++i) {
            const bool exists = has_chunk && (exist >> i & 1);
            cp_async<CHUNK>(stage + chunk_place(first_row + i * ROWS_APART, chunk), from[i], exists);
            from[i] += WARPS * STEP_K;
        }
#pragma unroll
        for (int i = 0; i < ROWS / ROWS_APART; ++i) {
            const int f = i / 4, h = i / 2 % 2, quarter = i % 2;
            cp_async<CHUNK>(stage + chunk_place(TILE_M + first_row + i * ROWS_APART, chunk),
                            next + f * fragment + h * half + quarter * quarter_stride, has_chunk);
        }
        next += WARPS * STEP_K;
        left -= WARPS * STEP_K;
    };
    const b_scale_t* const expert_scales = b_scales + tile.expert * b_scale_expert_step;
    const BlockScales scales{a_scales,     expert_scales,      a_scale_step,
                             b_scale_step, a_scale_block_step, b_scale_block_step};
    const auto scales_of = [&](int step) {
        TileScales found{};
        if constexpr (SCALE_BLOCK > 0) {
            const int of = min(step, steps - 1);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                found.halves[h] = scales.of_column(tile.first_b_row(0) + h * tile.half_rows(n), of);
            }
#pragma unroll
            for (int i = 0; i < ROW_TILES * 2; ++i) {
                found.rows[i / 2][i % 2] = scales.of_row(max(a_rows[i / 2 * 8 + t * 2 + i % 2], 0), of);
            }
        }
        return found;
    };

#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (warp + i * WARPS < steps) copy(own + i * STAGE_BYTES);
        cp_async_commit();
    }
    TileScales next_scales = scales_of(warp);
    float sums[FRAGMENTS][ROW_TILES][4] = {};
    uint8_t* stage = own;
#pragma unroll 1
    for (int step = warp; step < steps; step += WARPS) {
        cp_async_wait<STAGES - 2>();
        sync_warp();  // all lanes have copied this stage, and have read the one that is refilled now
        const int filled = stage == own ? STAGES - 1 : -1;  // the stage to refill, from `stage` on
        if (step + (STAGES - 1) * WARPS < steps) copy(stage + filled * STAGE_BYTES);
        cp_async_commit();
        const TileScales scales_now = next_scales;
        next_scales = scales_of(step + WARPS);
        Operand x[ROW_TILES][PARTS];
#pragma unroll
        for (int i = 0; i < ROW_TILES * PARTS; ++i) {
            x[i / PARTS][i % PARTS].load(stage + chunk_place(i / PARTS * 8 + g, i % PARTS * 4 + t));
        }
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            float accum[ROW_TILES][4];
#pragma unroll
            for (int i = 0; i < ROW_TILES * 4; ++i)
                accum[i / 4][i % 4] = SCALE_BLOCK > 0 ? 0.0f : sums[f][i / 4][i % 4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                Operand low, high;
                low.load(stage + chunk_place(TILE_M + f * 16 + g, part * 4 + t));
                high.load(stage + chunk_place(TILE_M + f * 16 + 8 + g, part * 4 + t));
#pragma unroll
                for (int i = 0; i < MMAS * ROW_TILES; ++i) {
                    multiply(accum[i % ROW_TILES], low, high, x[i % ROW_TILES][part], i / ROW_TILES);
                }
            }
#pragma unroll
            for (int i = 0; i < ROW_TILES * 4; ++i) {
                float& sum = sums[f][i / 4][i % 4];
                const float scale = scales_now.halves[i % 4 / 2] * scales_now.rows[i / 4][i % 2];
                sum = SCALE_BLOCK > 0 ? fmaf(scale, accum[i / 4][i % 4] * FACTOR, sum) : accum[i / 4][i % 4];
            }
        }
        stage = stage == own + (STAGES - 1) * STAGE_BYTES ? own : stage + STAGE_BYTES;
    }

    // Each warp writes its accumulators to shared memory, then a thread adds up those of one lane and one MMA tile.
    sync_warp();
#pragma unroll
    for (int i = 0; i < FRAGMENTS * ROW_TILES; ++i) {
        sums_t four;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float sum = sums[i / ROW_TILES][i % ROW_TILES][j];
            four.data[j] = SCALE_BLOCK > 0 ? sum : sum * FACTOR;
        }
        four.store_shared(reinterpret_cast<float*>(own) + (i * 32 + lane) * 4);
    }
    __syncthreads();
    const ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED> epilogue{
        topk_weights, a_scales, expert_scales, bias + tile.expert * b_rows, int(top_k), a_scale_step, b_scale_step};
    for (int i = threadIdx.x; i < FRAGMENTS * ROW_TILES * 32; i += NUM_THREADS) {
        float x[4] = {};
#pragma unroll
        for (int part = 0; part < WARPS; ++part) {
            const sums_t four = sums_t::load(reinterpret_cast<const float*>(memory) + part * (WARP_BYTES / 4) + i * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] += four.data[j];
        }
        write_accumulators(out, out_stride, n, tile.first_column, row_ids, epilogue, x, i);
    }
}
