// scaled_fp4_quant: codes of e2m1 and a scale of e4m3 for every sixteen elements of a row, under one scale of the tensor.
//
//     s = e4m3(g * (max |x| * (1/6)))    output = e2m1(x * (1 / (s * (1 / g))))    g = *input_scale    (fp4.cuh)
//
// A thread has one column of blocks of sixteen elements, in `rounds` rows one after another; ROW_THREADS of them stand side by
// side in a block. TILED: rows that are not there fill up the last tile of scales with zeros, as columns do.
//
// Constants
//     scalar_t      element type of input
//     ACCESS        elements of input in one memory access, at most 8
//     CODE_ACCESS   bytes of output in one memory access, at most 8
//     SCALE_ACCESS  bytes of output_scale in one memory access, at most 4
//     TILED         whether scales lie in tiles; else in rows
//     NUM_THREADS   threads in the block
//     ROW_THREADS   threads beside each other in a row; divides NUM_THREADS
//     UNIT          rows of which a thread writes the scales at once, 1 or, in tiles, 4; divides rounds
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "fp4.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
scaled_fp4_quant(uint8_t* output,            // [num_rows, blocks * 8]
                 const scalar_t* input,      // [num_rows, blocks * 16]
                 uint8_t* output_scale,      // [scale_rows, columns], in tiles or not
                 const float* input_scale,   // one element
                 int64_t num_rows, int64_t scale_rows, int64_t output_stride, int64_t input_stride, int blocks, int columns,
                 int rounds) {
    await_previous_kernel();
    using share_t = Fp4Share<NUM_THREADS, ROW_THREADS, UNIT>;
    fp4_rows<scalar_t, share_t, ACCESS, CODE_ACCESS, SCALE_ACCESS, TILED, false>(
        output, output_scale, input, *input_scale, num_rows, scale_rows, output_stride, input_stride, blocks, columns,
        share_t::unit(rounds), rounds);
}
