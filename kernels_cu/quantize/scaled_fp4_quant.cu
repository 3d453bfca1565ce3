// scaled_fp4_quant: codes of e2m1 and a scale of e4m3 for every sixteen elements of a row, under one scale of the tensor.
//
//     s = e4m3(g * (max |x| * (1/6)))    output = e2m1(x * (1 / (s * (1 / g))))    g = *input_scale    (fp4.cuh)
//
// ROW_THREADS threads share a row, each of which has VECS times sixteen elements at a time. TILED: rows that are not there fill up
// the last tile of scales with zeros, as columns do.
//
// Constants
//     scalar_t      element type of input
//     ACCESS        elements of input in one memory access, at most 8
//     CODE_ACCESS   bytes of output in one memory access, at most 8
//     TILED         whether scales lie in tiles; else in rows
//     NUM_THREADS   threads in the block
//     ROW_THREADS   threads that share a row; divides NUM_THREADS
//     VECS          blocks of sixteen elements that a thread has in flight
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "fp4.cuh"
#include "row.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
scaled_fp4_quant(uint8_t* output,             // [num_rows, blocks * 8]
                 const scalar_t* input,       // [num_rows, blocks * 16]
                 fp8_e4m3_t* output_scale,    // [scale_rows, blocks], or in tiles, of which blocks fill the last
                 const float* input_scale,    // one element
                 int64_t num_rows, int64_t scale_rows, int64_t output_stride, int64_t input_stride, int blocks) {
    await_previous_kernel();
    const RowIndex<NUM_THREADS, ROW_THREADS> at(scale_rows);
    if (!at.active) return;
    const bool exists = !TILED || at.row < num_rows;
    Fp4Row<scalar_t, ROW_THREADS, VECS, ACCESS, CODE_ACCESS, TILED, false> row(input + at.row * input_stride, blocks, exists);
    fp8_e4m3_t* scales = output_scale + (TILED ? fp4_tiled_row(at.row, ceil_div(blocks, 4)) : at.row * blocks);
    if (exists) {
        row.write(output + at.row * output_stride, scales, *input_scale);
    } else {
        row.clear(scales);
    }
}
