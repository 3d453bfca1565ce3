// silu_and_mul_nvfp4_quant: scaled_fp4_quant of a gated activation.
//
//     y = T(silu(gate) * up), rounded once    gate, up = input[r, i], input[r, hidden_size + i]    T: dtype of input
//     s = e4m3(g * (max |y| * (1/6)))    result = e2m1(y * (1 / (s * (1 / g))))    g = *input_global_scale    (fp4.cuh)
//
// A thread loops over `rounds` rows of one column of 16-element blocks; ROW_THREADS adjacent threads take adjacent
// columns. Scales are stored in tiles; scales of padding rows and columns are written as 0.
//
// Constants:
//     ACCESS        elements of input in one memory access, at most 8
//     CODE_ACCESS   bytes of result in one memory access, at most 8
//     SCALE_ACCESS  bytes of result_block_scale in one memory access, at most 4
//     UNIT          rows per write of scales, 1 or 4; divides rounds

#include "fp4_rows.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
silu_and_mul_nvfp4_quant(uint8_t* result,                  // [num_rows, blocks * 8]
                         uint8_t* result_block_scale,      // [scale_rows, columns], in tiles
                         const scalar_t* input,            // [num_rows, 2 * blocks * 16]
                         const float* input_global_scale,  // one element
                         int64_t num_rows, int64_t scale_rows, int64_t output_stride, int64_t input_stride, int blocks,
                         int columns, int rounds) {
    await_previous_kernel();
    using share_t = Fp4Share<NUM_THREADS, ROW_THREADS, UNIT>;
    fp4_rows<scalar_t, share_t, ACCESS, CODE_ACCESS, SCALE_ACCESS, true, true>(
        result, result_block_scale, input, *input_global_scale, num_rows, scale_rows, output_stride, input_stride,
        blocks, columns, share_t::unit(rounds), rounds);
}
