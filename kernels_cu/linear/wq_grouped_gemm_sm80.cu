// wq_grouped_gemm_sm80: the weight-only quantized grouped GEMM for MoE with small M, by mma.sync: sm_80 and later.
// Weights are packed along K.
//
//     w[e, r, k] = T(scale[e, r, g] * (quant[e, r, k] - zero[e, r, g])), rounded once; g: k / GROUP_SIZE; T: scalar_t
//     accum[t, r] = sum_k a[t / top_k, k] * w[e, r, k], in float32; e is the expert of row t
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n], and to the gate or up that is paired with it
//
// Each quant is copied once from global memory, by the lane that multiplies it. Operands are swapped (swap-AB): 16 rows
// of w are the M of an MMA, 8 rows of a its N.
//
// Mapping: a block has TILE_M slots of the lists and ROWS rows of w. blockIdx.x counts such tiles, down the slots for
// the same rows of w first. The block's WARPS warps share K; their accumulators are reduced in a fixed order. A k-tile
// of a warp is 64 bytes of each row of w: lane 4g + t has the t-th 16 bytes of rows g and g + 8 of each fragment. The
// order of K within an MMA is free, so quants are paired as they lie in a word, and elements of a to match. cp.async
// brings quants and rows of a to the warp's part of shared memory, STAGES - 1 k-tiles ahead. Scales and zero points are
// loaded to registers a k-tile ahead. If the four lanes of a row have one group in a k-tile (IN_TURN), each of them
// loads for one of four k-tiles, four k-tiles ahead. Warps do not synchronise before the reduction.
//
// GATED: rows g of a fragment are gates and rows g + 8 their ups, so that one thread has both.
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER, ROUTED    the epilogue (grouped.cuh)
//     BITS, EXPONENT, HAS_SCALES, scale_t, SCALE, SCALE_TILES, HAS_ZEROS, GROUP_SIZE    of quantized_weight.cuh;
//                   GROUP_SIZE is a multiple of the elements that a lane has of a row in a k-tile, or half of them
//     TILE_M        slots of a tile: 8 or 16
//     WARPS         warps of a block
//     WHOLE_STEPS   whether K is a multiple of the k-tile
//     STAGES        k-tiles in shared memory, those in flight among them
//     MIN_BLOCKS    blocks per SM that the registers must allow

#include "async.cuh"
#include "mma.cuh"
#include "quantized_weight.cuh"
#include "swap_ab_tile.cuh"

constexpr int STEP_BYTES = 64, STEP_K = STEP_BYTES * 8 / BITS, LANE_K = STEP_K / 4;  // of a row of w, of a lane
constexpr int WORDS = 4, PRODUCTS = STEP_K / 16, WORD_PRODUCTS = PRODUCTS / WORDS;   // of a lane's 16 bytes
constexpr int CHUNK = 8, CHUNKS = STEP_K / CHUNK, LANE_CHUNKS = LANE_K / CHUNK;      // 16-byte chunks of a row of a
constexpr int A_BYTES = TILE_M * CHUNKS * 16, STAGE_BYTES = A_BYTES + ROWS * STEP_BYTES;
constexpr int COPIES = TILE_M * CHUNKS / 32;  // of rows of a, per lane and k-tile
constexpr int WARP_BYTES = STAGES * STAGE_BYTES > SUM_BYTES ? STAGES * STAGE_BYTES : SUM_BYTES;
constexpr bool IS_SIGNED = BITS == 8 && !HAS_SCALES;
// IN_TURN: whether the four lanes of a row load scales and zero points for each other. TERM_STEPS: k-tiles of one such
// load.
constexpr bool IN_TURN = HAS_SCALES && GROUP_SIZE % STEP_K == 0;
constexpr int TERM_STEPS = IN_TURN ? 4 : 1;
constexpr int GROUPS = HAS_SCALES && GROUP_SIZE < LANE_K ? LANE_K / GROUP_SIZE : 1;  // of a lane in a k-tile
static_assert(TILE_M == 8 || TILE_M == 16);
static_assert(GROUP_SIZE % (LANE_K / GROUPS) == 0);
static_assert(!A_SCALES);

using epilogue_t = ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED>;

// The offset of a chunk of a row of a in a stage, swizzled so that the eight chunks that lanes read together are on
// different banks.
DEVICE int chunk_place(int row, int chunk) {
    const int of_lane = chunk % LANE_CHUNKS, t = chunk / LANE_CHUNKS;
    return (row * CHUNKS + ((of_lane * 4 + t) ^ (row & 1) << 2)) * 16;
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
wq_grouped_gemm_sm80(out_t* out,                          // [num_rows, N]
                     const scalar_t* a,                   // [num_rows / top_k, K]
                     const uint8_t* quants,               // [E, b_rows, K * BITS / 8]
                     const scale_t* scales,               // [E, b_rows, groups], or in tiles
                     const uint8_t* zeros,                // [E, b_rows * BITS / 8, groups]; with 4 bits two per byte
                     const int32_t* sorted_token_ids,     // [max_tiles * TILE_M] at least
                     const int32_t* expert_ids,           // [max_tiles / block_tiles] at least
                     const int32_t* num_tokens_post_pad,  // one element
                     const float* topk_weights,           // [num_rows]
                     const float* row_scales,             // [E, b_rows] or [E]
                     const out_t* bias,                   // [E, b_rows]
                     int64_t num_rows, int64_t n, int64_t k, int64_t top_k, int64_t num_experts, int64_t block_tiles,
                     int64_t max_tiles, int64_t a_stride, int64_t out_stride, int64_t b_scale_expert_step,
                     int64_t b_scale_step) {
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
    const int64_t expert = tile.expert, b_rows = GATED ? 2 * n : n;

    const int64_t first_b_row = tile.first_b_row(g), half_rows = tile.half_rows(n);
    const int64_t steps = (k + STEP_K - 1) / STEP_K, row_bytes = k * BITS / 8;
    const uint32_t groups = HAS_SCALES ? uint32_t((k + GROUP_SIZE - 1) / GROUP_SIZE) : 1;
    const int first_step = int(steps * warp / WARPS), last_step = int(steps * (warp + 1) / WARPS);
    const int64_t own_row = expert * b_rows + first_b_row;
    const uint8_t* next = quants + own_row * row_bytes + int64_t(first_step) * STEP_BYTES + t * 16;  // next k-tile
    const int64_t half_bytes = half_rows * row_bytes, fragment_bytes = FRAGMENT_ROWS * row_bytes;
    const scale_t* const own_scales = scales + (SCALE_TILES  ? expert * tiled_scales(b_rows, groups)
                                                : HAS_SCALES ? own_row * groups
                                                             : 0);
    const uint32_t first_scale_row = SCALE_TILES ? uint32_t(first_b_row) : 0;
    // With 4 bits a byte has the zero points of two adjacent rows.
    constexpr int ZERO_ROWS = BITS == 4 ? 2 : 1;
    const uint8_t* const own_zeros = zeros + (HAS_ZEROS ? own_row / ZERO_ROWS * groups : 0);

    const scalar_t* from[COPIES];  // rows of a; null: padding
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
        const int row = a_rows[(i * 32 + lane) / CHUNKS];
        from[i] = row < 0 ? nullptr : a + row * a_stride + lane % CHUNKS * CHUNK;
    }
    const auto copy = [&](int step, uint8_t* stage) {
        const bool exists = WHOLE_STEPS || int64_t(step) * STEP_K + t * LANE_K < k;
#pragma unroll
        for (int i = 0; i < FRAGMENTS * 2; ++i) {
            cp_async_of_line(stage + A_BYTES + (i * 32 + lane) * 16,
                             exists ? next + i / 2 * fragment_bytes + i % 2 * half_bytes : quants, exists);
        }
        next += STEP_BYTES;
        const int64_t first = int64_t(step) * STEP_K;
        const bool has_chunk = WHOLE_STEPS || first + lane % CHUNKS * CHUNK < k;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const bool copied = from[i] != nullptr && has_chunk;
            cp_async<16>(stage + chunk_place((i * 32 + lane) / CHUNKS, lane % CHUNKS), copied ? from[i] + first : a,
                         copied);
        }
    };
    uint32_t terms[FRAGMENTS][2], now[FRAGMENTS][2];  // of the next k-tiles, and of the current ones
    const auto load_terms = [&](int step) {
        const int64_t first = IN_TURN ? int64_t(min(step + t, last_step - 1)) * STEP_K
                                      : int64_t(min(step, last_step - 1)) * STEP_K + t * LANE_K;
        const uint32_t group = WHOLE_STEPS || first < k ? uint32_t(first) / GROUP_SIZE : groups - GROUPS;
#pragma unroll
        for (int i = 0; i < FRAGMENTS * 2; ++i) {
            const int h = i % 2, nibble = BITS == 8 ? 0 : GATED == 2 ? h : g % 2;
            const uint32_t rows = i / 2 * FRAGMENT_ROWS + h * uint32_t(half_rows);
            terms[i / 2][h] =
                terms_of<GROUPS>(own_scales, own_zeros, row_entry(first_scale_row + rows, groups) + group_entry(group),
                                 rows / ZERO_ROWS * groups + group, nibble);
        }
    };

    const quants_t decode;
    if (first_step < last_step) load_terms(first_step);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (first_step + i < last_step) copy(first_step + i, own + i * STAGE_BYTES);
        cp_async_commit();
    }
    float sums[FRAGMENTS][ROW_TILES][4] = {};
    uint8_t* stage = own;
#pragma unroll 1
    for (int step = first_step; step < last_step; ++step) {
        cp_async_wait<STAGES - 2>();
        sync_warp();  // all lanes have copied this stage, and have read the one that is refilled now
        const int filled = stage == own ? STAGES - 1 : -1;  // the stage to refill, from `stage` on
        if (step + STAGES - 1 < last_step) copy(step + STAGES - 1, stage + filled * STAGE_BYTES);
        cp_async_commit();
        const int turn = (step - first_step) % TERM_STEPS;
        if (turn == 0) {
#pragma unroll
            for (int i = 0; i < FRAGMENTS * 2; ++i) now[i / 2][i % 2] = terms[i / 2][i % 2];
            load_terms(step + TERM_STEPS);
        }
        uint32_t a_pairs[ROW_TILES][PRODUCTS][2];
#pragma unroll
        for (int i = 0; i < ROW_TILES * LANE_CHUNKS; ++i) {
            const int row = i / LANE_CHUNKS * 8 + g, chunk = i % LANE_CHUNKS;
            const four_t x =
                four_t::load(reinterpret_cast<const uint32_t*>(stage + chunk_place(row, t * LANE_CHUNKS + chunk)));
            // The two quants of a pair are 16 / BITS elements of K apart.
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t low = BITS == 4 ? x.data[j / 2] : x.data[j / 2 * 2];
                const uint32_t high = BITS == 4 ? x.data[j / 2 + 2] : x.data[j / 2 * 2 + 1];
                a_pairs[i / LANE_CHUNKS][chunk * 2 + j / 2][j % 2] =
                    j % 2 ? pack_halves<true>(low, high) : pack_halves<false>(low, high);
            }
        }
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            quants_t::Zero zero[2];
            pair_t scale[2][GROUPS];
            four_t words[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const auto* const at = reinterpret_cast<const uint32_t*>(stage + A_BYTES);
                words[h] = four_t::load(at + ((f * 2 + h) * 32 + lane) * 4);
                const uint32_t own = IN_TURN ? shfl<32>(now[f][h], lane / 4 * 4 + turn) : now[f][h];
                zero[h] = quants_t::zero(own >> 16);
#pragma unroll
                for (int i = 0; i < GROUPS; ++i) scale[h][i] = scale_of(own, i);
                mark_nan(scale[h][0], words[h].data);
            }
#pragma unroll
            for (int product = 0; product < PRODUCTS; ++product) {
                uint32_t pairs[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int h = j % 2, q = j / 2;
                    uint32_t word = words[h].data[product / WORD_PRODUCTS];
                    if constexpr (IS_SIGNED) word ^= 0x80808080;
                    const pair_t own_scale = scale[h][product / (PRODUCTS / GROUPS)];
                    pairs[j] = weights_of(decode, word, product % WORD_PRODUCTS * 2 + q, zero[h], own_scale);
                }
#pragma unroll
                for (int i = 0; i < ROW_TILES; ++i) mma_m16n8k16<scalar_t>(sums[f][i], pairs, a_pairs[i][product]);
            }
        }
        stage = stage == own + (STAGES - 1) * STAGE_BYTES ? own : stage + STAGE_BYTES;
    }

    // Each warp writes its accumulators to shared memory, then a thread adds up those of one lane and one fragment.
    sync_warp();
#pragma unroll
    for (int i = 0; i < FRAGMENTS * ROW_TILES; ++i) {
        sums_t four;
#pragma unroll
        for (int j = 0; j < 4; ++j) four.data[j] = sums[i / ROW_TILES][i % ROW_TILES][j] * quants_t::SUM_FACTOR;
        four.store_shared(reinterpret_cast<float*>(own) + (i * 32 + lane) * 4);
    }
    __syncthreads();
    const epilogue_t epilogue{
        topk_weights, nullptr, row_scales + expert * b_scale_expert_step, bias + expert * b_rows, int(top_k), 0,
        b_scale_step};
    for (int i = threadIdx.x; i < FRAGMENTS * ROW_TILES * 32; i += NUM_THREADS) {
        float x[4] = {};
#pragma unroll
        for (int part = 0; part < WARPS; ++part) {
            const auto* const all = reinterpret_cast<const uint8_t*>(memory) + part * WARP_BYTES;
            const sums_t four = sums_t::load(reinterpret_cast<const float*>(all) + i * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] += four.data[j];
        }
        write_accumulators(out, out_stride, n, tile.first_column, row_ids, epilogue, x, i);
    }
}
