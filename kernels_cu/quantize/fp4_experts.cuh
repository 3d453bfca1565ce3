// fp4_experts.cuh: finds the expert of a scale tile, for rows sorted by expert, and writes such a tile.

#pragma once
#include "fp4.cuh"
#include "reduce.cuh"

// Experts with consecutive rows: expert e has rows offsets[e] to offsets[e + 1] - 1. From the first invalid offset on
// (below 0, below the one before, or beyond the rows), experts are empty.
struct FollowingRows {
    const int32_t* offsets;  // [num_experts + 1]
    int64_t num_rows;

    DEVICE void of(int e, int32_t& begin, int32_t& end) const { begin = offsets[e], end = offsets[e + 1]; }
    // The rows of expert e, given those of expert e - 1.
    DEVICE void next(int e, int32_t& begin, int32_t& end) const { begin = end, end = offsets[e + 1]; }
    DEVICE bool is_valid(int32_t begin, int32_t end) const { return begin >= 0 && begin <= end && end <= num_rows; }
};

// Experts with arbitrary row ranges: expert e has problem_sizes[e, 0] rows from offsets[e] on. An expert is empty if
// any of its rows does not exist.
struct SizedRows {
    const int32_t* offsets;        // [num_experts]
    const int32_t* problem_sizes;  // [num_experts, 3]
    int64_t num_rows;

    DEVICE void of(int e, int32_t& begin, int32_t& end) const {
        const int64_t first = offsets[e], rows = problem_sizes[int64_t(e) * 3];
        const bool exist = first >= 0 && rows >= 0 && first + rows <= num_rows;
        begin = exist ? int32_t(first) : 0;
        end = exist ? int32_t(first + rows) : 0;
    }
    DEVICE void next(int e, int32_t& begin, int32_t& end) const { of(e, begin, end); }
    DEVICE bool is_valid(int32_t, int32_t) const { return true; }
};

// The expert that owns tile `wanted`, where tiles are numbered through all experts. `scales` is null if experts have no
// global scale; then g is 1.
struct Expert {
    bool exists = false;
    int32_t begin, end;  // rows of the expert
    int32_t tiles_at;    // row of output_scale at which the expert's tiles begin
    float g;
    uint32_t tile;  // index of the wanted tile within the expert

    // Each lane counts the tiles of its consecutive experts. Every lane of the warp takes part.
    template <typename Rows>
    DEVICE
    Expert(const Rows& rows, const int32_t* tile_offsets, const float* scales, int num_experts, uint32_t wanted) {
        const int lane = threadIdx.x % WARP_SIZE, lane_experts = ceil_div(num_experts, WARP_SIZE);
        const int first = min(lane * lane_experts, num_experts - 1),
                  end_expert = min((lane + 1) * lane_experts, num_experts);
        const auto count = [](uint32_t begin, uint32_t end) {
            return (end - begin + FP4_TILE_ROWS - 1) / FP4_TILE_ROWS;
        };
        // Tile offset and scale of the lane's first expert are loaded early, in case this expert is the wanted one.
        int32_t own_begin, own_end;
        rows.of(first, own_begin, own_end);
        tiles_at = tile_offsets[first];
        g = scales ? scales[first] : 1.0f;
        begin = own_begin;
        end = own_end;
        uint32_t tiles = 0;
        bool is_valid = true;
        for (int e = lane * lane_experts; e < end_expert; ++e) {
            if (e > first) rows.next(e, begin, end);
            is_valid = is_valid && rows.is_valid(begin, end);
            tiles += is_valid ? count(begin, end) : 0;
        }
        const lane_mask_t stop = ballot(!is_valid);
        if (stop && lane > lowest_bit(stop)) tiles = 0;
        uint32_t tiles_until = tiles;  // inclusive prefix sum over lanes
#pragma unroll
        for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
            const uint32_t before = shfl<WARP_SIZE>(tiles_until, max(lane - distance, 0));
            tiles_until += lane >= distance ? before : 0;
        }
        const lane_mask_t found = ballot(wanted < tiles_until);
        if (!found) return;
        const int owner = lowest_bit(found);
        begin = own_begin;
        end = own_end;
        tile = wanted - (tiles_until - tiles);
        if (lane == owner) {
#pragma unroll 1
            for (int e = first; tile >= count(begin, end);) {
                tile -= count(begin, end);
                rows.next(++e, begin, end);
                tiles_at = tile_offsets[e];
                g = scales ? scales[e] : 1.0f;
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

// Writes a block's scale tile: 128 rows of an expert and FP4_TILE_COLUMNS columns; blockIdx.y is the tile column.
// scale_at(row, column) quantises one block of a matrix row and returns its scale; padding of the tile gets scale 0. A
// thread handles one column, in rows with stride ROWS_APART; adjacent threads take the columns of a row. An expert is
// skipped if its tiles do not all fit in scales.
template <int NUM_THREADS, typename F>
DEVICE void write_scale_tile(uint8_t* scales, const Expert& expert, int64_t scale_rows, int blocks, int columns,
                             const F& scale_at) {
    constexpr int ROWS_APART = NUM_THREADS / FP4_TILE_COLUMNS;
    static_assert(ROWS_APART == 32, "scales of rows 32 apart are neighbours");
    if (!expert.exists) return;
    const int64_t rows = expert.end - expert.begin, first_tile_row = expert.tiles_at;
    const int64_t padded = (rows + FP4_TILE_ROWS - 1) / FP4_TILE_ROWS * FP4_TILE_ROWS;
    if (first_tile_row < 0 || first_tile_row + padded > scale_rows) return;

    const int64_t tile_row = int64_t(expert.tile) * FP4_TILE_ROWS;
    const int lane_row = threadIdx.x / FP4_TILE_COLUMNS, lane_column = threadIdx.x % FP4_TILE_COLUMNS;
    const int column = blockIdx.y * FP4_TILE_COLUMNS + lane_column;
    scales += (first_tile_row + tile_row) * columns + int64_t(blockIdx.y) * (FP4_TILE_ROWS * FP4_TILE_COLUMNS) +
              lane_row * (FP4_TILE_ROWS / ROWS_APART * FP4_TILE_COLUMNS) + lane_column;
#pragma unroll 1
    for (int i = 0; i < FP4_TILE_ROWS / ROWS_APART; ++i) {
        const int64_t row = tile_row + i * ROWS_APART + lane_row;
        uint32_t scale = 0;
        if (row < rows && column < blocks) scale = scale_at(expert.begin + row, column);
        scales[i * FP4_TILE_COLUMNS] = uint8_t(scale);
    }
}
