// scaled_fp4_experts_quant: scaled_fp4_quant of rows that belong to experts, each with its own scale and tiles.
//
//     expert e has the rows o[e] to o[e + 1] - 1, the scale g = input_global_scale[e], and the tiles from row t[e]
//     GATED: what is quantised is T(silu(gate) * up), gate, up = input[r, i], input[r, hidden_size + i]; one rounding
//
// The expert of row r is the last whose o[e] <= r, found by counting offsets; the count is that of all rows from the largest
// offset up to r to the least beyond. Nothing is written for an expert of which these are not the rows, nor for one whose rows
// or tiles are not all there. A thread has one column of blocks of sixteen elements, in `rounds` rows one after another;
// ROW_THREADS of them stand side by side in a block. The rows of an expert also share those that fill up its last tile, with
// zeros.
//
// Constants
//     scalar_t      T: element type of input
//     GATED         whether input has two halves
//     ACCESS        elements of input in one memory access, at most 8
//     CODE_ACCESS   bytes of output in one memory access, at most 8
//     SCALE_ACCESS  bytes of output_scale in one memory access, at most 4
//     NUM_THREADS   threads in the block
//     ROW_THREADS   threads beside each other in a row; divides NUM_THREADS
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "fp4.cuh"
#include "reduce.cuh"

// What waits for each other before the first scale is written.
DEVICE void prefetch_experts(const int32_t* offsets, const int32_t* tiles, const float* scales, int num_experts) {
    prefetch_part(offsets, num_experts, threadIdx.x);
    prefetch_part(tiles, num_experts, threadIdx.x);
    prefetch_part(scales, num_experts - 1, threadIdx.x);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
scaled_fp4_experts_quant(uint8_t* output,                                   // [num_rows, blocks * 8]
                         fp8_e4m3_t* output_scale,                          // scale_rows rows in tiles
                         const scalar_t* input,                             // [num_rows, (1 or 2) * blocks * 16]
                         const float* input_global_scale,                   // [num_experts]
                         const int32_t* input_offset_by_experts,            // [num_experts + 1]
                         const int32_t* output_scale_offset_by_experts,     // [num_experts + 1]
                         int64_t num_rows, int64_t scale_rows, int64_t output_stride, int64_t input_stride, int blocks,
                         int columns, int num_experts, int rounds) {
    prefetch_experts(input_offset_by_experts, output_scale_offset_by_experts, input_global_scale, num_experts);
    await_previous_kernel();
    using share_t = Fp4Share<NUM_THREADS, ROW_THREADS>;
    constexpr int LANES = ROW_THREADS < WARP_SIZE ? ROW_THREADS : WARP_SIZE;  // that find the expert of a row
    const share_t share(rounds);
    int left = share.column < blocks ? share.among(num_rows) : 0;
    input += share.row * input_stride + uint64_t(share.column) * FP4_BLOCK;
    Fp4Input<scalar_t, GATED, ACCESS> x;
    if (left > 0) x.load(input, blocks);

    output += share.row * output_stride + uint64_t(share.column) * (FP4_BLOCK / 2);
    output_scale += fp4_tiled_column(share.column);
    // One expert after another: up to the least offset beyond, all rows are the expert's, or none is. A warp goes on to the next
    // expert as one.
    for (int64_t row = share.row; rounds > 0;) {
        uint32_t begun = 0, since = 0, until = ~0u;  // of the offsets: the largest up to the row, the least beyond
#pragma unroll 1
        for (int i = threadIdx.x % LANES; i <= num_experts; i += LANES) {
            const int offset = input_offset_by_experts[i];
            begun += offset <= row;
            since = offset <= row ? max(since, uint32_t(max(offset, 0))) : since;
            until = offset <= row ? until : min(until, uint32_t(offset));
        }
        const int expert = int(lane_reduce<Sum, LANES>(begun)) - 1;
        int first = -1, end = -1, tile = -1;
        float g = 1.0f;
        if (expert >= 0 && expert < num_experts) {
            first = input_offset_by_experts[expert];
            end = input_offset_by_experts[expert + 1];
            tile = output_scale_offset_by_experts[expert];
            g = input_global_scale[expert];
        }
        since = lane_reduce<Max, LANES>(since);
        until = lane_reduce<Min, LANES>(until);
        uint32_t ahead = min(uint64_t(until - row), uint64_t(rounds) * share_t::STEP);
        if constexpr (LANES < WARP_SIZE) ahead = lane_reduce<Min, WARP_SIZE>(ahead);
        const int run = ceil_div(ahead, share_t::STEP);
        fp8_e4m3_t* scales = output_scale;
        uint32_t at = 0, rows = 0, fill = 0;  // of the expert: the row within it, its rows, those that fill its last tile
        const bool its_own = uint32_t(first) == since && uint32_t(end) == until;  // all rows of the expert
        if (its_own && end <= num_rows && tile >= 0 && tile + fp4_tiled_rows(end - first) <= scale_rows) {
            at = row - first;
            rows = end - first;
            fill = uint32_t(fp4_tiled_rows(rows)) - rows;
            scales += uint64_t(tile) * columns;
        }
        const Fp4Tensor tensor(g);
        const bool written = rows > 0 && share.column < columns;
        rounds -= run;
        row += int64_t(run) * share_t::STEP;
        for (int i = 0; i < run; ++i) {
            if (written && at < fill) {  // while it waits for the row; a thread fills whole rows of the tile's four columns
                const unsigned among_four = share.column % 4;
                fp8_e4m3_t* const last = scales - among_four + fp4_scale_row<true>(rows / FP4_TILE_ROWS * FP4_TILE_ROWS, columns);
                for (uint32_t other = at + among_four * rows; other < fill; other += 4 * rows) {
                    Vec<fp8_e4m3_t, 4>::full(0.0f).template store<SCALE_ACCESS>(last + fp4_row_of_tile(other + rows));
                }
            }
            fp8_e4m3_t* const scale = scales + fp4_scale_row<true>(at, columns);
            if (left > 0) {
                const Fp4Block<scalar_t> block = x.block();
                input += share_t::STEP * input_stride;
                if (--left > 0) x.load(input, blocks);
                if (written) block.template write<CODE_ACCESS>(output, scale, tensor);
            } else if (written) {
                *scale = fp8_e4m3_t(0.0f);
            }
            output += share_t::STEP * output_stride;
            at += share_t::STEP;
        }
    }
}
