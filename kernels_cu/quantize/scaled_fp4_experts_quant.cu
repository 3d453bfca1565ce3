// scaled_fp4_experts_quant: scaled_fp4_quant of rows that belong to experts, each expert with its own scale and scale
// tiles.
//
//     o = input_offset_by_experts, t = output_scale_offset_by_experts
//     expert e has the rows o[e] to o[e + 1] - 1, the scale g = input_global_scale[e], and scale tiles from row t[e] on
//     GATED: quantises T(silu(gate) * up), rounded once; gate, up = input[r, i], input[r, hidden_size + i]; T its dtype
//
// From the first invalid offset on (below 0, below the one before, or beyond the rows), experts are skipped; so is an
// expert with tiles that do not all fit in output_scale.
//
// The grid covers the tiles of all experts, one after another, padding rows included. Each block finds the expert of
// its tile by summing up tile counts. A thread has a column of 16-element blocks, in `rounds` rows one after another;
// ROW_THREADS adjacent threads take adjacent columns.
//
// Constants:
//     GATED         input has two halves, gate and up
//     ACCESS        elements of input in one memory access, at most 8
//     CODE_ACCESS   bytes of output in one memory access, at most 8
//     SCALE_ACCESS  bytes of output_scale in one memory access, at most 4
//     UNIT          rows per write of scales, 4; divides rounds

#include "fp4_experts.cuh"
#include "fp4_rows.cuh"

// Prefetches offsets and scales, which a block needs before anything else.
DEVICE void prefetch_experts(const int32_t* offsets, const int32_t* tiles, const float* scales, int num_experts) {
    prefetch_part(offsets, num_experts, threadIdx.x);
    prefetch_part(tiles, num_experts, threadIdx.x);
    prefetch_part(scales, num_experts - 1, threadIdx.x);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
scaled_fp4_experts_quant(uint8_t* output,                                // [num_rows, blocks * 8]
                         uint8_t* output_scale,                          // [scale_rows, columns], in tiles
                         const scalar_t* input,                          // [num_rows, (1 or 2) * blocks * 16]
                         const float* input_global_scale,                // [num_experts]
                         const int32_t* input_offset_by_experts,         // [num_experts + 1]
                         const int32_t* output_scale_offset_by_experts,  // [num_experts + 1]
                         int64_t num_rows, int64_t scale_rows, int64_t output_stride, int64_t input_stride, int blocks,
                         int columns, int num_experts, int rounds) {
    prefetch_experts(input_offset_by_experts, output_scale_offset_by_experts, input_global_scale, num_experts);
    await_previous_kernel();
    using share_t = Fp4Share<NUM_THREADS, ROW_THREADS, UNIT>;
    const int64_t unit = share_t::unit(rounds);
    const Expert expert(FollowingRows{input_offset_by_experts, num_rows}, output_scale_offset_by_experts,
                        input_global_scale, num_experts, uint64_t(unit) / share_t::UNITS);
    if (!expert.exists) return;
    const int64_t first = expert.begin, rows = expert.end - first, first_tile_row = expert.tiles_at;
    const int64_t padded = (rows + FP4_TILE_ROWS - 1) / FP4_TILE_ROWS * FP4_TILE_ROWS;
    if (first_tile_row < 0 || first_tile_row + padded > scale_rows) return;
    fp4_rows<scalar_t, share_t, ACCESS, CODE_ACCESS, SCALE_ACCESS, true, GATED>(
        output + first * output_stride, output_scale + first_tile_row * columns, input + first * input_stride, expert.g,
        rows, padded, output_stride, input_stride, blocks, columns,
        int64_t(expert.tile) * share_t::UNITS + unit % share_t::UNITS, rounds);
}
