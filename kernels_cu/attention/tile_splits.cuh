// tile_splits.cuh: split-KV of the prefill kernels, in whole KV tiles.
#pragma once
#include "vec.cuh"

// MIN_SPLIT_TILES: fewest KV tiles of a split. A split costs as much as two KV tiles on top of its own, and so does the
// combine.
constexpr int MIN_SPLIT_TILES = 4;

// The splits of so many tiles, at most max_splits.
DEVICE int count_splits(int tiles, int max_splits) { return max(1, min(max_splits, tiles / MIN_SPLIT_TILES)); }

// Reduces the tiles first_tile to last_tile to those of a split. Returns the number of splits, at most max_splits. If
// that is `split` or less, there is no such split.
DEVICE int take_split(int split, int max_splits, int& first_tile, int& last_tile) {
    const int tiles = last_tile - first_tile + 1, splits = count_splits(tiles, max_splits);
    // If tiles % splits != 0, the first splits have one tile more.
    const int even = tiles / splits, longer = tiles % splits;
    first_tile += split * even + min(split, longer);
    last_tile = first_tile + even + (split < longer) - 1;
    return splits;
}
