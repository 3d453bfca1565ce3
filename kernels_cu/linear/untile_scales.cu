// untile_scales: converts the scales of expert weights from tiles of 128 rows and 4 columns to row-major order.
//
//     scales[e, r, g] = tiled[e, t(r, g)]
//     t(r, g) = (r / 128 * (columns / 4) + g / 4) * 512 + r % 32 * 16 + r / 32 % 4 * 4 + g % 4
//
// Expert e is skipped if problem_sizes[e], (rows, n, K) or (n, rows, K), has no rows. A thread takes the four columns
// of a row of a tile, which are adjacent in both.
//
// Constants
//     ACCESS    scales in one access to tiled, at most 4

#include "vec.cuh"

constexpr int COLUMNS = 4;  // columns of a tile

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
untile_scales(uint8_t* scales,               // [num_experts, n, groups]
              const uint8_t* tiled,          // [num_experts, padded_rows, columns]
              const int32_t* problem_sizes,  // [num_experts, 3]
              int64_t num_experts, int64_t n, int64_t groups, int64_t columns, int64_t padded_rows) {
    await_previous_kernel();
    const int64_t i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x, row_tiles = columns / COLUMNS;
    const int64_t row = i / row_tiles, expert = row / n, r = row % n, first = i % row_tiles * COLUMNS;
    if (expert >= num_experts) return;
    const int32_t* const sizes = problem_sizes + expert * 3;
    if ((sizes[1] == n ? sizes[0] : sizes[1]) <= 0) return;
    const int64_t tile = (r / 128 * row_tiles + first / COLUMNS) * 512, within = r % 32 * 16 + r / 32 % 4 * 4;
    const auto four =
        Vec<uint8_t, COLUMNS>::template load<ACCESS>(tiled + expert * padded_rows * columns + tile + within);
    for (int j = 0; j < COLUMNS && first + j < groups; ++j) scales[row * groups + first + j] = four.data[j];
}
