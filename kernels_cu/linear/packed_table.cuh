// packed_table.cuh: how wq_gemm_sm90.cu reads a k-tile of a W4A8 weight: signed 4-bit quants select e4m3 values from
// lookup tables.
//
// Each column has a table per group: the e4m3 products of its scale with -8 ... -1. A positive quant takes the entry of
// the negative one with the sign flipped; quant 0 gives 0.
//
// In a WGMMA of 32 rows of K, lane 4g + t of a warp has columns g + 8h (h: 0, 1) of 16, and in each the four rows from
// 4t + 16q on (q: 0, 1): the A fragment of an 8-bit WGMMA. Half q of the lane's word of a column holds their quants
// (layout_w4a8): one byte permutation, with a half word as its selector, takes four bytes from the eight of a table.
//
// Constants are the kernel's.
#pragma once
#include "arith.cuh"
#include "packed_weight.cuh"

// The table of a column: the products of its scale with -8 ... -1, and with 0 ... 7.
struct TableTerms {
    uint32_t negative[2], positive[2];

    // Loads the table of the column at `place`, group `group` of the k-tile.
    DEVICE void load(const uint8_t* groups, int, int group, const Place& place) {
        const auto eight = reinterpret_cast<const uint2*>(groups)[group * TILE_N + place.entry];
        negative[0] = eight.x;
        negative[1] = eight.y;
        // Byte q of `positive` is the entry of -q with the sign flipped, byte 0 is 0.
        positive[0] = __byte_perm(eight.y, 0, 0x1234) ^ 0x80808000u;
        positive[1] = __byte_perm(eight.x, eight.y, 0x1234) ^ 0x80808080u;
    }

    // The four rows of half q of column h.
    DEVICE uint32_t weight(const quants_t&, const lane_quants_t& quants, int h, int q) const {
        const uint32_t word = quants.words[h], selector = (word & 0x77777777u) >> 16 * q;
        // One byte per quant: all ones if it is negative, else zeros.
        const uint32_t is_negative =
            q == 0 ? signs_of_bytes<0x5140>(word << 4, word) : signs_of_bytes<0x7362>(word << 4, word);
        return (__byte_perm(negative[0], negative[1], selector) & is_negative) |
               (__byte_perm(positive[0], positive[1], selector) & ~is_negative);
    }
};
