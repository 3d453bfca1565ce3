// scaled_fp4_experts_quant: scaled_fp4_quant of rows that belong to experts, each with its own scale and tiles.
//
//     expert e has the rows o[e] to o[e + 1] - 1, the scale g = input_global_scale[e], and the tiles from row t[e]
//     GATED: what is quantised is T(silu(gate) * up), gate, up = input[r, i], input[r, hidden_size + i]; one rounding
//
// The expert of row r is the last whose o[e] <= r, found by counting offsets. Nothing is written for a row that is none of
// its expert's, nor for an expert whose rows or tiles are not all there. ROW_THREADS threads share a row, each of which
// has VECS times sixteen elements at a time; the rows of an expert also share those that fill up its last tile, with zeros.
//
// Constants
//     scalar_t      T: element type of input
//     GATED         whether input has two halves
//     ACCESS        elements of input in one memory access, at most 8
//     CODE_ACCESS   bytes of output in one memory access, at most 8
//     NUM_THREADS   threads in the block
//     ROW_THREADS   threads that share a row; divides NUM_THREADS
//     VECS          blocks of sixteen elements that a thread has in flight
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "fp4.cuh"
#include "reduce.cuh"
#include "row.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
scaled_fp4_experts_quant(uint8_t* output,                                   // [num_rows, blocks * 8]
                         fp8_e4m3_t* output_scale,                          // scale_rows rows in tiles
                         const scalar_t* input,                             // [num_rows, (1 or 2) * blocks * 16]
                         const float* input_global_scale,                   // [num_experts]
                         const int32_t* input_offset_by_experts,            // [num_experts + 1]
                         const int32_t* output_scale_offset_by_experts,     // [num_experts + 1]
                         int64_t num_rows, int64_t scale_rows, int64_t output_stride, int64_t input_stride, int blocks,
                         int num_experts) {
    await_previous_kernel();
    __shared__ int partial[NUM_THREADS / WARP_SIZE];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows);
    Fp4Row<scalar_t, ROW_THREADS, VECS, ACCESS, CODE_ACCESS, true, GATED> row(input + at.row * input_stride, blocks, at.active);
    int begun = 0;
    for (int i = threadIdx.x % ROW_THREADS; i <= num_experts; i += ROW_THREADS) {
        begun += input_offset_by_experts[i] <= at.row;
    }
    const int expert = row_reduce<Sum, ROW_THREADS>(begun, partial) - 1;
    if (!at.active || expert < 0 || expert >= num_experts) return;

    const int64_t first = input_offset_by_experts[expert], end = input_offset_by_experts[expert + 1];
    const int64_t tile = output_scale_offset_by_experts[expert];
    const int64_t rows = end - first, tiled_rows = (rows + FP4_TILE_ROWS - 1) / FP4_TILE_ROWS * FP4_TILE_ROWS;
    if (first < 0 || at.row < first || at.row >= end || end > num_rows) return;
    if (tile < 0 || tile + tiled_rows > scale_rows) return;
    const int tiles = ceil_div(blocks, 4);
    output_scale += tile * tiles * 4;
    for (int64_t i = at.row - first + rows; i < tiled_rows; i += rows) row.clear(output_scale + fp4_tiled_row(i, tiles));
    row.write(output + at.row * output_stride, output_scale + fp4_tiled_row(at.row - first, tiles), input_global_scale[expert]);
}
