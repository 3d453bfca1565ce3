// dequantize_table: dequantizes W4A8 weights and transposes them to the dense operand of a GEMM.
//
//     dense[e, n, k] = the e4m3 product of quant[e, k, n] with its scale, from the table of column n and group
//                      k / group_size (product_table.cuh); the order of quants is that of layout_w4a8.cuh
//
// A thread takes 16 rows, half of a tile, of columns g, g + 8, ...: the same half of the words of four lanes. Eight
// threads that differ in rows write the 128 bytes of four row tiles to each column. Both halves of a tile are read by
// adjacent threads.
//
// Constants
//     LAYOUT        layout of the quants: layout_w4a8.cuh
//     ACCESS        words of one access to quants: 1, 2 or 4, a divisor of N / 8
//     TABLE_ACCESS  bytes of one access to a table: a divisor of 8
//     GROUP_ROWS    aligned adjacent rows that share a table: 16, 8, 4, 2 or 1

#include "product_table.cuh"
#include "vec.cuh"
#include "LAYOUT.cuh"

constexpr int TILE = 32, ROWS = 16, LANES = 4, MOST_WORDS = 4;  // rows of a thread, lanes with them, words of a lane
constexpr int ROW_TILES = NUM_THREADS / 16;                     // row tiles of a block
constexpr int STEP = GROUP_ROWS < 4 ? GROUP_ROWS : 4;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
dequantize_table(uint8_t* dense,          // [weights, N, K]
                 const uint32_t* quants,  // [weights, K / 32, 4 N]
                 const uint8_t* tables,   // [weights, groups, N, 8]; blockIdx.y counts weights
                 int64_t k, int64_t n, int64_t groups, int64_t group_size) {
    await_previous_kernel();
    const uint32_t row_tiles = uint32_t(k) / TILE, row_blocks = (row_tiles + ROW_TILES - 1) / ROW_TILES;
    const uint32_t tile = blockIdx.x / row_blocks, row_block = blockIdx.x - tile * row_blocks;
    const uint32_t half = threadIdx.x % 2, g = threadIdx.x / 8 % 8;
    const uint32_t row_tile = row_block * ROW_TILES + threadIdx.x / 64 * 4 + threadIdx.x / 2 % 4;
    if (row_tile >= row_tiles) return;
    const int words = int(LAYOUT<4>::lane_words({uint32_t(k), uint32_t(n), n, 1}, tile));
    const int64_t weight = blockIdx.y;
    quants += weight * (k * n / 8) + row_tile * (4 * n) + tile * MARLIN_TILE_WORDS<4> + g * LANES * words;
    tables += weight * groups * n * 8;
    dense += weight * n * k;

    uint32_t of_lanes[LANES][MOST_WORDS] = {};
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
#pragma unroll
        for (int j = 0; j < MOST_WORDS; j += ACCESS) {
            if (j >= words) continue;
            const auto loaded = Vec<uint32_t, ACCESS>::load(quants + lane * words + j);
#pragma unroll
            for (int i = 0; i < ACCESS; ++i) of_lanes[lane][j + i] = loaded.data[i] >> half * 16;
        }
    }
    const uint32_t first = row_tile * TILE + half * ROWS;
#pragma unroll
    for (int j = 0; j < MOST_WORDS; ++j) {
        if (j >= words) return;
        const int64_t column = tile * TILE + j * 8 + g;
        Vec<uint32_t, LANES> values;
        ProductTable table;
#pragma unroll
        for (int row = 0; row < ROWS; row += STEP) {
            if (row % GROUP_ROWS == 0) {
                const int64_t group = (first | row) / uint32_t(group_size);
                const auto eight = Vec<uint8_t, 8>::load<TABLE_ACCESS>(tables + (group * n + column) * 8);
                table.set(eight.word<4>(0), eight.word<4>(4));
            }
            // A table of fewer than four rows gives later rows of the word, too, which the next table overwrites.
            const uint32_t earlier = (1u << row % 4 * 8) - 1;
            uint32_t& four = values.data[row / 4];
            four = (four & earlier) | (table.four(of_lanes[row / 4][j], 0) & ~earlier);
        }
        values.store(reinterpret_cast<uint32_t*>(dense + column * k + first));
    }
}
