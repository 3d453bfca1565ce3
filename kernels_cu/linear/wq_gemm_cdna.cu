// wq_gemm_cdna: the weight-only quantized GEMM on AMD, by product.cuh, with weights dequantized to shared memory.
//
//     w[k, n] = T(scale[g, n] * (quant[k, n] - zero[g, n]))    g: the group of row k    T: scalar_t
//     ADDED: w[k, n] = T(scale[g, n] * (quant[k, n] - ZERO_POINT) + zeros[g, n])
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to sum_k a[m, k] * w[k, n], in float32
//
// Blocks: a block takes an output tile of TILE_M x TILE_N. blockIdx.x counts tiles, down the rows of the same columns
// first. Split-K: SPLITS blocks along y share a tile, each with a part of K; the last block to arrive reduces their
// accumulators.
//
// GROUPED: rows of out belong to experts, each with its own weight. Rows of a tile are slots of the lists that
// moe_align_block_size has written (grouped.cuh): row t of out is row t / top_k of a times the weight of its block's
// expert, times topk_weights[t] if ROUTED. Rows without a valid expert are not written.
//
// wq_grouped_gemm_cdna: the same for MoE with weights that are packed along K; e is the expert of row t.
//
//     w[e, r, k] = T(scale[e, r, g] * (quant[e, r, k] - zero[e, r, g])), rounded once; g: k / GROUP_SIZE
//     accum[t, r] = sum_k a[t / top_k, k] * w[e, r, k]
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n], and to the gate or up that is paired with it
//
// A block takes a tile of PLACES slots of the lists and TILE_N rows of w; blocks past the last tile exit at once.
// GATED 1: columns of a tile alternate, GATE_COLUMNS gates and then their ups; GATED 2: a gate and its up.
//
// K-tiles: the block goes through K in k-tiles of 64 rows, which it dequantizes to shared memory (packed_steps.cuh).
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1, AZP 0
//     BITS, EXPONENT, LAYOUT, RECODED, HAS_SCALES, scale_t, SCALE, GROUP_SCALE_EXPONENT, SCALE_ORDER, ZERO_CODES,
//     ZERO_POINT, ZERO_FLOATS, ADDED, GROUP_SIZE, WHOLE_STEPS, IN_PAIRS    of the weight: packed_tile.cuh
//     DEPTH         k-tiles in flight: packed_steps.cuh
//     TILE_M, TILE_N, WARPS_M, WARPS_N    the tile of a block, and its warps along both
//     PLACES        rows of a tile that are rows of out: TILE_M, or less if blocks of the lists are smaller
//     ROUTED        whether rows have routing weights
//
// Constants of wq_gemm_cdna alone
//     OUT_ACCESS    elements of one access to out: 1 or 2
//     SPLITS        split-K: blocks that share a tile
//     GROUPED       whether rows belong to experts (of weights in the layouts of single ones)

constexpr int WARPS_K = 1;  // team
#include "gemm_tile.cuh"
#include "grouped_tile.cuh"
#include "packed_steps.cuh"

static_assert(BIAS <= 1 && AZP == 0 && PLACES <= TILE_M);

// Without experts, too: rows then have no routing weight, and are those of a.
using epilogue_t = ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
wq_gemm_cdna(out_t* out,                          // [M, N]
             const scalar_t* a,                   // [M, K]
             const uint32_t* quants,              // [K, N] by LAYOUT
             const scale_t* scales,               // [groups, N] by SCALE_ORDER
             const void* zeros,                   // [groups, N BITS / 32] words; or [groups, N] scalar_t by SCALE_ORDER
             const a_scale_t* a_scales,           // [M] or [1]
             const b_scale_t* b_scales,           // [N] or [1]
             const out_t* bias,                   // [N]
             const int32_t* sorted_token_ids,     // GROUPED: [M]; values are not trusted
             const int32_t* expert_ids,           // [M / block_size]
             const int32_t* num_tokens_post_pad,  // [1]
             const float* topk_weights,           // [num_rows]
             float* partial,                      // [tiles, SPLITS, SUMS / 4, NUM_THREADS, 4]
             uint32_t* arrived,                   // [tiles]
             int64_t m, int64_t n, int64_t k, int64_t groups, int64_t a_stride, int64_t out_stride,
             int64_t a_scale_step, int64_t b_scale_step, int64_t num_rows, int64_t num_experts, int64_t block_size,
             int64_t top_k) {
    static_assert(!GATED && (GROUPED || !ROUTED));
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ uint32_t is_last;
    __shared__ int row_ids[GROUPED ? TILE_M : 1];  // rows of out; -1: padding
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;
    const int64_t row_tiles = (m + PLACES - 1) / PLACES;
    const int64_t first_row = blockIdx.x % row_tiles * PLACES, first_column = blockIdx.x / row_tiles * TILE_N;
    if constexpr (GROUPED) {
        if (first_row >= *num_tokens_post_pad) return;
        const int64_t expert = expert_ids[first_row / block_size];
        if (expert < 0 || expert >= num_experts) return;
        for (int i = threadIdx.x; i < TILE_M; i += NUM_THREADS) {
            const int id = i < PLACES ? sorted_token_ids[first_row + i] : -1;
            row_ids[i] = id >= 0 && id < num_rows ? id : -1;
        }
        __syncthreads();
        quants += expert * (k * n * BITS / 32);
        if constexpr (HAS_SCALES) scales += expert * groups * n;
        zeros = static_cast<const uint8_t*>(zeros) + expert * groups * n * (ZERO_CODES ? BITS : 16) / 8;
        // Per expert: one scale of the whole weight (as a_scales), a scale of each column, and a bias.
        if constexpr (A_SCALES) a_scales += expert;
        if constexpr (B_SCALES) b_scales += expert * n;
        if constexpr (BIAS > 0) bias += expert * n;
    }
    const auto row_of = [&](int local, int more) {
        return GROUPED ? int64_t(row_ids[GROUPED ? local + more : 0]) : first_row + local + more;
    };
    const auto exists = [&](int64_t row) { return GROUPED ? row >= 0 : row < m; };

    const int64_t all_steps = (k + STEP - 1) / STEP;
    const int64_t first_step = all_steps * blockIdx.y / SPLITS, end_step = all_steps * (blockIdx.y + 1) / SPLITS;
    const auto a_row = [&](int local) {
        const int64_t row = row_of(local, 0);
        return a + (!exists(row) ? 0 : GROUPED ? row / top_k : row) * a_stride;
    };
    const auto existing_column = [&](int local) {
        const uint32_t column = uint32_t(first_column) + local;
        return TILE_N > 64 && column >= n ? column - 64 : column;  // n is a multiple of 64
    };
    PackedSteps steps({quants, scales, zeros, n, k, groups}, first_step, end_step, memory, a_row, existing_column);
    sum_t accum[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS] = {};
    steps.multiply(accum, warp_row, warp_column);

    float result[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        result[i] = accum[i / (COLUMN_TILES * PRODUCT_SUMS)][i / PRODUCT_SUMS % COLUMN_TILES][i % PRODUCT_SUMS];
    }
    if (!add_splits<SPLITS>(result, partial, arrived, &is_last)) return;
    const epilogue_t epilogue{topk_weights, a_scales, b_scales, bias, 1, a_scale_step, b_scale_step};
    const auto column_of = [&](int local) { return first_column + local; };
    write_tile<OUT_ACCESS>(out, out_stride, n, epilogue, result, warp_row + lane_row(lane),
                           warp_column + lane_column(lane), row_of, exists, column_of);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
wq_grouped_gemm_cdna(out_t* out,                          // [num_rows, N]
                     const scalar_t* a,                   // [num_rows / top_k, K]
                     const uint32_t* quants,              // [E, b_rows, K * BITS / 32]
                     const scale_t* scales,               // [E, b_rows, groups]
                     const uint8_t* zeros,                // [E, b_rows * BITS / 8, groups]; with 4 bits two per byte
                     const int32_t* sorted_token_ids,     // [max_tiles * PLACES] at least
                     const int32_t* expert_ids,           // [max_tiles / block_tiles] at least
                     const int32_t* num_tokens_post_pad,  // one element
                     const float* topk_weights,           // [num_rows]
                     const b_scale_t* row_scales,         // [E, b_rows] or [E]
                     const out_t* bias,                   // [E, b_rows]
                     int64_t num_rows, int64_t n, int64_t k, int64_t groups, int64_t top_k, int64_t num_experts,
                     int64_t block_tiles, int64_t max_tiles, int64_t a_stride, int64_t out_stride,
                     int64_t b_scale_expert_step, int64_t b_scale_step) {
    static_assert(!A_SCALES);
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ int rows_of_tile[TILE_M];  // -1: padding
    const ExpertTiles<PLACES> lists(sorted_token_ids, expert_ids, num_tokens_post_pad, num_rows, num_experts,
                                    block_tiles, max_tiles);
    const int b_rows = int(GATED ? 2 * n : n);
    const int tiles = max(lists.tiles, 1), tile = int(blockIdx.x % tiles),
              first_column = int(blockIdx.x / tiles) * TILE_N;
    if (lists.tiles == 0 || first_column >= b_rows) return;
    const int64_t expert = lists.number(tile);
    if (expert < 0 || expert >= num_experts) return;
    for (int i = threadIdx.x; i < TILE_M; i += NUM_THREADS) {
        rows_of_tile[i] = i < PLACES ? lists.row(tile * PLACES + i) : -1;
    }
    __syncthreads();
    bool has_rows = false;
    for (int i = threadIdx.x % WARP_SIZE; i < TILE_M; i += WARP_SIZE) has_rows |= rows_of_tile[i] >= 0;
    if (!any_lane(has_rows)) return;

    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;
    const auto b_row_of = [&](int local) { return expert_row(first_column, local, int(n), b_rows); };
    const auto a_row = [&](int local) { return a + int64_t(max(rows_of_tile[local], 0) / int(top_k)) * a_stride; };
    const auto existing_row = [&](int local) { return uint32_t(min(b_row_of(local), b_rows - 1)); };
    const PackedMatrix weight{quants + expert * b_rows * (k * BITS / 32),
                              HAS_SCALES ? scales + expert * b_rows * groups : scales,
                              ZERO_CODES ? zeros + expert * b_rows * BITS / 8 * groups : zeros,
                              b_rows,
                              k,
                              groups};
    PackedSteps steps(weight, 0, (k + STEP - 1) / STEP, memory, a_row, existing_row);
    sum_t accum[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS] = {};
    steps.multiply(accum, warp_row, warp_column);

    const epilogue_t epilogue{
        topk_weights, nullptr, row_scales + expert * b_scale_expert_step, bias + expert * b_rows, int(top_k), 0,
        b_scale_step};
    const auto sum_at = [&](int i, int j, int l) { return accum[i][j][l]; };
    write_expert_tile(out, out_stride, int(n), b_rows, epilogue, rows_of_tile + warp_row + lane_row(lane),
                      warp_column + lane_column(lane), b_row_of, sum_at);
}
