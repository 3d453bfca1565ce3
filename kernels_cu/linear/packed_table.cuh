// packed_table.cuh: how wq_gemm_sm90.cu reads a k-tile of a W4A8 weight (product_table.cuh).
//
// In a WGMMA of 32 rows of K, lane 4g + t of a warp has columns g + 8h (h: 0, 1) of 16, and in each the four rows from
// 4t + 16q on (q: 0, 1): the A fragment of an 8-bit WGMMA. Half q of the lane's word of a column holds their quants
// (layout_w4a8).
//
// Constants are the kernel's.
#pragma once
#include "packed_weight.cuh"
#include "product_table.cuh"

// The table of a column.
struct TableTerms {
    ProductTable table;

    // Loads the table of the column at `place`, group `group` of the k-tile.
    DEVICE void load(const uint8_t* groups, int, int group, const Place& place) {
        const auto eight = reinterpret_cast<const uint2*>(groups)[group * TILE_N + place.entry];
        table.set(eight.x, eight.y);
    }

    // The four rows of half q of column h.
    DEVICE uint32_t weight(const quants_t&, const lane_quants_t& quants, int h, int q) const {
        return table.four(quants.words[h], q);
    }
};
