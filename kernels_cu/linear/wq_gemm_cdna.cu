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
// K-tiles: the block goes through K in k-tiles of 64 rows, which it dequantizes to shared memory (packed_steps.cuh).
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1, GATED false
//     BITS, EXPONENT, LAYOUT, RECODED, HAS_SCALES, scale_t, SCALE, GROUP_SCALE_EXPONENT, SCALE_ORDER, ZERO_CODES,
//     ZERO_POINT, ZERO_FLOATS, ADDED, GROUP_SIZE, WHOLE_STEPS, IN_PAIRS    of the weight: packed_tile.cuh
//     DEPTH         k-tiles in flight: packed_steps.cuh
//     OUT_ACCESS    elements of one access to out: 1 or 2
//     TILE_M, TILE_N, WARPS_M, WARPS_N    the tile of a block, and its warps along both
//     PLACES        rows of a tile that are rows of out: TILE_M, or less if blocks of the lists are smaller
//     SPLITS        split-K: blocks that share a tile
//     GROUPED, ROUTED    whether rows belong to experts, and have routing weights

#include "gemm_tile.cuh"
#include "packed_steps.cuh"

static_assert(!GATED && BIAS <= 1 && AZP == 0 && (GROUPED || !ROUTED) && PLACES <= TILE_M);

using epilogue_t = Epilogue<out_t, A_SCALES, B_SCALES, 0, BIAS, SCALE_EXPONENT>;
// An Epilogue that also multiplies by the routing weight of the row.
struct RoutedEpilogue : epilogue_t {
    const float* topk_weights;

    template <typename Sum>
    DEVICE float value(const typename epilogue_t::Row& row, const typename epilogue_t::Column& column, Sum sum) const {
        const float x = epilogue_t::value(row, column, sum);
        return ROUTED ? ieee_multiply(topk_weights[row.row], x) : x;
    }
};

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
    sum_t sums[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS] = {};
    steps.multiply(sums, warp_row, warp_column);

    float result[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        result[i] = sums[i / (COLUMN_TILES * PRODUCT_SUMS)][i / PRODUCT_SUMS % COLUMN_TILES][i % PRODUCT_SUMS];
    }
    if (!add_splits<SPLITS>(result, partial, arrived, &is_last)) return;
    RoutedEpilogue epilogue{{a_scales, b_scales, nullptr, nullptr, bias, a_scale_step, b_scale_step, 0}, topk_weights};
    const auto column_of = [&](int local) { return first_column + local; };
    write_tile<OUT_ACCESS>(out, out_stride, n, epilogue, result, warp_row + lane_row(lane),
                           warp_column + lane_column(lane), row_of, exists, column_of);
}
