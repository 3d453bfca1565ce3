// fp4_rows.cuh: quantises rows of a matrix to NVFP4: each thread loops over its blocks and writes their scales.

#pragma once
#include "fp4_input.cuh"

// The share of a thread: one column of blocks, in `rounds` rows. A unit is UNIT rows with contiguous scales, which are
// written at once: one row, or four rows of stride 32. A thread strides over units by STEP.
template <int NUM_THREADS, int ROW_THREADS, int UNIT_ROWS>
struct Fp4Share {
    static constexpr int UNIT = UNIT_ROWS;
    static constexpr int STEP = NUM_THREADS / ROW_THREADS;  // units that a block takes at a time
    static constexpr int UNITS = FP4_TILE_ROWS / UNIT;      // units of a tile

    static DEVICE unsigned column() { return blockIdx.x * ROW_THREADS + threadIdx.x % ROW_THREADS; }
    // The first unit of the block.
    static DEVICE int64_t unit(int rounds) {
        return (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * (rounds / UNIT * STEP);
    }
    // The thread's row in round i of a block that begins with `unit`.
    static DEVICE uint32_t row(uint32_t unit, int i) {
        unit += (STEP == 1 ? 0 : threadIdx.x / ROW_THREADS) + i / UNIT * STEP;
        return UNIT == 1 ? unit : unit / UNITS * FP4_TILE_ROWS + unit % UNITS + i % UNIT * UNITS;
    }
};

// Transposes 4 x 4 bytes over four adjacent lanes: before, byte i of lane j is row i, column j; after, lane i has row
// i.
DEVICE uint32_t turn_four(uint32_t word) {
    const unsigned lane = threadIdx.x % 4;
    word = __byte_perm(word, shfl_xor(word, 1), lane & 1 ? 0x3715 : 0x6240);
    return __byte_perm(word, shfl_xor(word, 2), lane & 2 ? 0x3276 : 0x5410);
}

// Writes the e2m1 values and scales of a thread's share of a matrix with one g; the block begins with unit `begin`. The
// next row is loaded as soon as registers are free, while this row is computed. TILED: scales are stored in tiles, and
// the scales of padding rows and columns are 0. Every thread of the block takes part.
template <typename T, typename Share, int ACCESS, int CODE_ACCESS, int SCALE_ACCESS, bool TILED, bool GATED>
DEVICE void
fp4_rows(uint8_t* output, uint8_t* scales, const T* input, const float& g, int64_t num_rows, int64_t scale_rows,
         int64_t output_stride, int64_t input_stride, unsigned blocks, unsigned columns, int64_t begin, int rounds) {
    const unsigned column = Share::column();
    // From here on, rows are counted from the beginning of the block's first tile.
    const int64_t above = uint64_t(begin) / Share::UNITS * FP4_TILE_ROWS;
    const uint32_t unit = uint64_t(begin) % Share::UNITS;
    const uint32_t rows = column < blocks ? min(max(num_rows - above, int64_t(0)), int64_t(1) << 31) : 0;
    const uint32_t padded = column < columns ? min(max(scale_rows - above, int64_t(0)), int64_t(1) << 31) : 0;
    input += above * input_stride + uint64_t(column) * FP4_BLOCK;
    output += above * output_stride + uint64_t(column) * (FP4_BLOCK / 2);
    scales +=
        above * columns + (TILED ? uint64_t(column / FP4_TILE_COLUMNS) * (FP4_TILE_ROWS * FP4_TILE_COLUMNS) : column);

    Fp4Input<T, GATED, ACCESS> x;
    uint32_t row = Share::row(unit, 0);
    bool exists = row < rows;
    if (exists) x.load(input + row * input_stride, blocks);
    const Fp4Tensor tensor(g);
    uint32_t word = 0;  // scales of a unit, the last row's in the uppermost byte
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) {
        const uint32_t next = Share::row(unit, i + 1);
        const bool more = i + 1 < rounds && next < rows;
        uint32_t scale = 0;
        if (exists) {
            const Fp4Block<T> block = x.block();
            if (more) x.load(input + next * input_stride, blocks);
            scale = block.template write<CODE_ACCESS>(output + row * output_stride, tensor);
        } else if (more) {
            x.load(input + next * input_stride, blocks);
        }
        uint8_t* at = scales + uint64_t(TILED ? row / FP4_TILE_ROWS * FP4_TILE_ROWS : row) * columns;
        if constexpr (TILED) at += row % 32 * 16;
        if constexpr (Share::UNIT == 1) {
            if (row < padded) at[TILED ? row % FP4_TILE_ROWS / 32 * 4 + column % FP4_TILE_COLUMNS : 0] = scale;
        } else {
            word = word >> 8 | scale << 24;
            if (i % Share::UNIT == Share::UNIT - 1) {
                Vec<uint8_t, 4> turned;
                turned.template word<4>(0) = turn_four(word);
                if (row < padded) turned.template store<SCALE_ACCESS>(at + threadIdx.x % 4 * 4);
            }
        }
        row = next;
        exists = more;
    }
}
