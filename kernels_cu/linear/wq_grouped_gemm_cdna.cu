// wq_grouped_gemm_cdna: the weight-only quantized grouped GEMM for MoE on AMD, by product.cuh. Weights are packed along
// K and dequantized to shared memory.
//
//     w[e, r, k] = T(scale[e, r, g] * (quant[e, r, k] - zero[e, r, g])), rounded once; g: k / GROUP_SIZE; T: scalar_t
//     accum[t, r] = sum_k a[t / top_k, k] * w[e, r, k], in float32; e is the expert of row t
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n], and to the gate or up that is paired with it
//
// Blocks: a block takes a tile of PLACES slots of the lists and TILE_N rows of w. blockIdx.x counts tiles, down the
// slots for the same rows of w first; blocks past the last tile exit at once.
//
// K-tiles: the block goes through K in k-tiles of 64 elements, which it dequantizes to shared memory
// (packed_steps.cuh).
//
// Warps: WARPS_M x WARPS_N warps divide the tile. GATED 1: its columns alternate, GATE_COLUMNS gates and then their
// ups; GATED 2: a gate and its up. Either way one thread has both.
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER, ROUTED    the epilogue (grouped.cuh)
//     BITS, EXPONENT, HAS_SCALES, scale_t, SCALE, ZERO_CODES, ZERO_POINT, GROUP_SIZE, WHOLE_STEPS, IN_PAIRS    of the
//                   weights, with layout_rows: packed_tile.cuh
//     TILE_M, TILE_N, WARPS_M, WARPS_N    the tile of a block, and its warps along both
//     PLACES        slots of a tile: TILE_M, or less if blocks of the lists are smaller
//     DEPTH         k-tiles in flight: packed_steps.cuh

#include "grouped_tile.cuh"
#include "packed_steps.cuh"

static_assert(!A_SCALES && PLACES <= TILE_M);

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
                     const float* row_scales,             // [E, b_rows] or [E]
                     const out_t* bias,                   // [E, b_rows]
                     int64_t num_rows, int64_t n, int64_t k, int64_t groups, int64_t top_k, int64_t num_experts,
                     int64_t block_tiles, int64_t max_tiles, int64_t a_stride, int64_t out_stride,
                     int64_t b_scale_expert_step, int64_t b_scale_step) {
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
    sum_t sums[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS] = {};
    steps.multiply(sums, warp_row, warp_column);

    const ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED> epilogue{
        topk_weights, nullptr, row_scales + expert * b_scale_expert_step, bias + expert * b_rows, int(top_k), 0,
        b_scale_step};
    const auto sum_at = [&](int i, int j, int l) { return sums[i][j][l]; };
    write_expert_tile(out, out_stride, int(n), b_rows, epilogue, rows_of_tile + warp_row + lane_row(lane),
                      warp_column + lane_column(lane), b_row_of, sum_at);
}
