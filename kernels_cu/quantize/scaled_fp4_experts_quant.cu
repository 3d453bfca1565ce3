// scaled_fp4_experts_quant: scaled_fp4_quant of rows that belong to experts, each with its own scale and tiles.
//
//     expert e has the rows o[e] to o[e + 1] - 1, the scale g = input_global_scale[e], and the tiles from row t[e]
//     GATED: what is quantised is T(silu(gate) * up), gate, up = input[r, i], input[r, hidden_size + i]; one rounding
//
// Nothing is written for experts from the first offset on that is below 0, below the one before or beyond the rows, nor for
// one whose tiles are not all there. The blocks of the grid stand for the tiles of all experts, one after another, with
// the rows that fill them up: each finds the expert of its tile by counting tiles. A thread has one column of blocks of
// sixteen elements, in `rounds` rows one after another; ROW_THREADS of them stand side by side in a block.
//
// Constants
//     scalar_t      T: element type of input
//     GATED         whether input has two halves
//     ACCESS        elements of input in one memory access, at most 8
//     CODE_ACCESS   bytes of output in one memory access, at most 8
//     SCALE_ACCESS  bytes of output_scale in one memory access, at most 4
//     NUM_THREADS   threads in the block
//     ROW_THREADS   threads beside each other in a row; divides NUM_THREADS
//     UNIT          rows of which a thread writes the scales at once, 4; divides rounds
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "fp4.cuh"
#include "reduce.cuh"

// What waits for each other before the first scale is written.
DEVICE void prefetch_experts(const int32_t* offsets, const int32_t* tiles, const float* scales, int num_experts) {
    prefetch_part(offsets, num_experts, threadIdx.x);
    prefetch_part(tiles, num_experts, threadIdx.x);
    prefetch_part(scales, num_experts - 1, threadIdx.x);
}

// The expert that has a given one of all tiles, counted one after another.
struct Expert {
    bool exists = false;
    int32_t begin, end, tiles_at;  // its rows, and where its tiles are
    float g;
    uint32_t tile;  // which of its tiles it is

    // Each lane counts the tiles of neighbouring experts. Every lane of the warp takes part.
    DEVICE Expert(const int32_t* offsets, const int32_t* tile_offsets, const float* scales, int num_experts, int64_t num_rows,
                  uint32_t wanted) {
        const int lane = threadIdx.x % WARP_SIZE, share = ceil_div(num_experts, WARP_SIZE);
        const int first = min(lane * share, num_experts - 1), last = min((lane + 1) * share, num_experts);
        const auto count = [](uint32_t begin, uint32_t end) { return (end - begin + FP4_TILE_ROWS - 1) / FP4_TILE_ROWS; };
        // What is known of an expert is asked for at once, as if it were the one.
        const int32_t own_begin = offsets[first], own_end = offsets[first + 1];
        tiles_at = tile_offsets[first];
        g = scales[first];
        begin = own_begin;
        end = own_end;
        uint32_t tiles = 0;
        bool grow = true;
        for (int e = lane * share; e < last; ++e) {
            if (e > first) {
                begin = end;
                end = offsets[e + 1];
            }
            grow = grow && begin >= 0 && begin <= end && end <= num_rows;
            tiles += grow ? count(begin, end) : 0;
        }
        const lane_mask_t stop = ballot(!grow);
        if (stop && lane > lowest_bit(stop)) tiles = 0;
        uint32_t until = tiles;  // with those of the lanes before
#pragma unroll
        for (int apart = 1; apart < WARP_SIZE; apart *= 2) {
            const uint32_t before = shfl<WARP_SIZE>(until, max(lane - apart, 0));
            until += lane >= apart ? before : 0;
        }
        const lane_mask_t found = ballot(wanted < until);
        if (!found) return;
        const int owner = lowest_bit(found);
        begin = own_begin;
        end = own_end;
        tile = wanted - (until - tiles);
        if (lane == owner) {
#pragma unroll 1
            for (int e = first; tile >= count(begin, end);) {
                tile -= count(begin, end);
                begin = end;
                end = offsets[++e + 1];
                tiles_at = tile_offsets[e];
                g = scales[e];
            }
        }
        exists = true;
        begin = shfl<WARP_SIZE>(begin, owner);
        end = shfl<WARP_SIZE>(end, owner);
        tiles_at = shfl<WARP_SIZE>(tiles_at, owner);
        g = shfl<WARP_SIZE>(g, owner);
        tile = shfl<WARP_SIZE>(tile, owner);
    }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
scaled_fp4_experts_quant(uint8_t* output,                                   // [num_rows, blocks * 8]
                         uint8_t* output_scale,                             // [scale_rows, columns], in tiles
                         const scalar_t* input,                             // [num_rows, (1 or 2) * blocks * 16]
                         const float* input_global_scale,                   // [num_experts]
                         const int32_t* input_offset_by_experts,            // [num_experts + 1]
                         const int32_t* output_scale_offset_by_experts,     // [num_experts + 1]
                         int64_t num_rows, int64_t scale_rows, int64_t output_stride, int64_t input_stride, int blocks,
                         int columns, int num_experts, int rounds) {
    prefetch_experts(input_offset_by_experts, output_scale_offset_by_experts, input_global_scale, num_experts);
    await_previous_kernel();
    using share_t = Fp4Share<NUM_THREADS, ROW_THREADS, UNIT>;
    const int64_t unit = share_t::unit(rounds);
    const Expert expert(input_offset_by_experts, output_scale_offset_by_experts, input_global_scale, num_experts, num_rows,
                        uint64_t(unit) / share_t::UNITS);
    if (!expert.exists) return;
    const int64_t first = expert.begin, rows = expert.end - first, at = expert.tiles_at;
    const int64_t padded = (rows + FP4_TILE_ROWS - 1) / FP4_TILE_ROWS * FP4_TILE_ROWS;
    if (at < 0 || at + padded > scale_rows) return;
    fp4_rows<scalar_t, share_t, ACCESS, CODE_ACCESS, SCALE_ACCESS, true, GATED>(
        output + first * output_stride, output_scale + at * columns, input + first * input_stride, expert.g, rows, padded,
        output_stride, input_stride, blocks, columns, int64_t(expert.tile) * share_t::UNITS + unit % share_t::UNITS, rounds);
}
