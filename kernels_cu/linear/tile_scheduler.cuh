// tile_scheduler.cuh: the persistent tile scheduler of gemm_sm90: each cluster takes one tile of every wave, and with
// CUT a part of the last, partial wave (stream_k.cuh). Grouped GEMMs have a scheduler of their own (grouped.cuh).
//
// The raster order keeps concurrent tiles on shared rows and columns in the L2 cache: it walks `group_rows` row tiles
// down M, then the next column tile.
#pragma once
#include "stream_k.cuh"

template <bool CUT>
struct TileScheduler : CutTile<CUT> {
    int rows, columns;   // row tiles and column tiles
    int64_t group_rows;  // most row tiles of a group

    DEVICE TileScheduler(int rows, int columns, int num_k_tiles, int64_t group_rows, int sharers)
        : CutTile<CUT>(rows * columns, 0, num_k_tiles, sharers), rows(rows), columns(columns), group_rows(group_rows) {}

    // The row and column, counted in tiles, of the current tile.
    DEVICE void locate(int& row, int& column) const {
        const int most = int(group_rows), number = this->number, group = number / (most * columns);
        const int first = group * most, size = min(most, rows - first), within = number - group * most * columns;
        row = first + within % size;
        column = within / size;
    }
    // Whether the current tile is the last one of the cluster; without CUT.
    DEVICE bool is_last() const { return this->number + int(gridDim.x) >= this->tiles; }
};
