// packed_weight.cuh: how wq_gemm_sm90.cu loads a k-tile of a packed weight by TMA and reads it from shared memory as
// register fragments: the quants, and the scale and zero point of each column.
//
// The layout says where the quants lie: its TmaBox, the coordinates of the box with the quants of a k-tile, and its
// WgmmaQuants, the quants of a lane for one WGMMA:
//
//     read    the lane's quants in k-slice `slice`, for PRODUCTS adjacent WGMMAs from number `first` of the tile on
//     pair    row pair q of column h: quant - zero point, not yet scaled
//
// In an MMA of 16 rows of K and 16 columns, lane 4g + t of a warp has columns g + 8h (h: 0, 1), and in each the row
// pairs 2t + 8q, 2t + 8q + 1 (q: 0, 1): the A fragment of mma.cuh.
//
// Constants
//     BITS, EXPONENT    type of a quant: dequant.cuh
//     LAYOUT        layout of the quants: packed_layout.cuh
//     RECODED       whether `marlin_int4_fp8_preprocess` has re-encoded the quants
//     HAS_SCALES    whether groups have scales
//     scale_t, SCALE    storage type of a scale, and the function that decodes it: group_scale.cuh
//     GROUP_SCALE_EXPONENT    a scale is the stored value times 2^GROUP_SCALE_EXPONENT
//     SCALE_ORDER   column_permutation.cuh's function for the columns of scales, and of zeros that are ADDED
//     ZERO_CODES    groups have packed integer zero points, to which ZERO_POINT is added; otherwise ZERO_POINT is
//                   the zero point of every group
//     ZERO_FLOATS   groups have zero points of type scalar_t, to which ZERO_POINT is added, and no scales: the
//                   difference from a quant is rounded
//     ADDED         groups have `zeros` of type scalar_t, which are added after scaling
//     GROUP_SIZE    rows of a group: a multiple or a divisor of the k-tile; 0: all rows are one group
#pragma once
#include "column_permutation.cuh"
#include "column_terms.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "LAYOUT.cuh"

constexpr bool IS_TABLE = sizeof(scalar_t) == 1;  // whether weights come from the lookup tables of packed_table.cuh
using layout_t = LAYOUT<BITS>;
using lane_quants_t = typename layout_t::WgmmaQuants;
using number_t = conditional_t<IS_TABLE, bf16_t, scalar_t>;
using quants_t = Quants<number_t, BITS, EXPONENT>;
using pair_t = Vec<number_t, 2>;

// Offsets of a column within a group's row: of its scale (entry), and of its packed zero point (word, shift).
struct Place { int entry, word, shift; };
template <typename Layout = layout_t>
DEVICE Place place_of(int column) {
    constexpr int FIELDS = 32 / BITS;
    uint32_t zero = 0;
    if constexpr (ZERO_CODES) zero = Layout::zero_place(column);
    return {int(SCALE_ORDER(column)), int(zero / FIELDS), int(zero % FIELDS * BITS)};
}

// The terms of a column, as a lane of a WGMMA loads them.
struct Terms : ColumnTerms<number_t> {
    // Loads them for the column with these offsets, group `group` of the k-tile. Zero points begin `scale_bytes` after
    // the scales.
    DEVICE void load(const uint8_t* groups, int scale_bytes, int group, const Place& at) {
        const uint8_t* points = groups + scale_bytes;
        const int entry = group * TILE_N + at.entry;
        if constexpr (HAS_SCALES) scale = twice(reinterpret_cast<const scale_t*>(groups)[entry]);
        if constexpr (ADDED || ZERO_FLOATS) added = added_of(reinterpret_cast<const number_t*>(points)[entry]);
        uint32_t point = ZERO_POINT;
        if constexpr (ZERO_CODES) {
            const uint32_t word = reinterpret_cast<const uint32_t*>(points)[group * (TILE_N * BITS / 32) + at.word];
            point += word >> at.shift & ((1 << BITS) - 1);
        }
        zero = quants_t::zero(point);
    }

    // Row pair q of column h, dequantized.
    template <typename LaneQuants>
    DEVICE uint32_t weight(const quants_t& decode, const LaneQuants& quants, int h, int q) const {
        return scaled(quants.pair(decode, h, q, zero));
    }
};
