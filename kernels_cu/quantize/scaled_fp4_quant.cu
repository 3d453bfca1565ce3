// scaled_fp4_quant: quantises to NVFP4: e2m1 values with an e4m3 scale per 16 elements of a row and one global scale.
//
//     s = e4m3(g * (max |x| * (1/6)))    output = e2m1(x * (1 / (s * (1 / g))))    g = *input_scale    (fp4.cuh)
//
// A thread loops over `rounds` rows of one column of 16-element blocks; ROW_THREADS adjacent threads take adjacent
// columns. With TILED, scales of padding rows and columns are written as 0.
//
// Constants:
//     ACCESS        elements of input in one memory access, at most 8
//     CODE_ACCESS   bytes of output in one memory access, at most 8
//     SCALE_ACCESS  bytes of output_scale in one memory access, at most 4
//     TILED         true: scales lie in tiles; false: in rows
//     UNIT          rows per write of scales, 1 or, in tiles, 4; divides rounds

#include "fp4_rows.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
scaled_fp4_quant(uint8_t* output,           // [num_rows, blocks * 8]
                 const scalar_t* input,     // [num_rows, blocks * 16]
                 uint8_t* output_scale,     // [scale_rows, columns], in tiles or not
                 const float* input_scale,  // one element
                 int64_t num_rows, int64_t scale_rows, int64_t output_stride, int64_t input_stride, int blocks,
                 int columns, int rounds) {
    await_previous_kernel();
    using share_t = Fp4Share<NUM_THREADS, ROW_THREADS, UNIT>;
    fp4_rows<scalar_t, share_t, ACCESS, CODE_ACCESS, SCALE_ACCESS, TILED, false>(
        output, output_scale, input, *input_scale, num_rows, scale_rows, output_stride, input_stride, blocks, columns,
        share_t::unit(rounds), rounds);
}
