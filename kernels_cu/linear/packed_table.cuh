// packed_table.cuh: how wq_gemm_sm90.cu reads a step of a weight of W4A8, whose signed codes of 4 bits stand for entries of tables.
//
// A column has a table in each group: the e4m3 products of its scale with -8 ... -1. The product with a positive code is
// that with the negative one, its sign changed; 0 stands for 0.
//
// In a product of 32 rows of K, lane 4g + t of a warp has columns g + 8h (h: 0, 1) of 16, and of each the four rows
// 4t + 16q ... (q: 0, 1), as wgmma's fragment of 8-bit elements. Half q of the lane's word of a column holds their codes
// (`w4a8` of packed_layouts.py): a half word selects four bytes of eight, which a table is, in one instruction.
//
// The tensor's map of codes is, from the fastest dimension on, [128, N / 32, K / 32], boxes of 128 x TILE_N / 32 x 4.
// Constants are the kernel's.
#pragma once
#include "arith.cuh"
#include "packed_weight.cuh"

// The codes of a lane in a product: a word of each of its columns.
struct TableCode {
    uint32_t words[2];

    static DEVICE void load(uint8_t* to, const TensorMap* map, uint64_t* barrier, int step, int first_column) {
        tma_load(to, map, barrier, 0, first_column / 32, step * 4);
    }

    // Of the products side by side of warp `warp`, and of slice number `slice` of 32 rows.
    template <int PRODUCTS>
    static DEVICE void read(TableCode (&code)[PRODUCTS], const uint8_t* step, int slice, int warp) {
        const int lane = threadIdx.x % 32, first = warp * PRODUCTS * 16;  // column
        const uint32_t* from = reinterpret_cast<const uint32_t*>(step);
        const auto run = Vec<uint32_t, 2 * PRODUCTS>::load(
            from + ((slice * (TILE_N / 32) + first / 32) * 32 + lane) * 4 + first % 32 / 8);
#pragma unroll
        for (int i = 0; i < 2 * PRODUCTS; ++i) code[i / 2].words[i % 2] = run.data[i];
    }
};

// The table of a column: products with -8 ... -1, and with 0 ... 7.
struct TableTerms {
    uint32_t negative[2], positive[2];

    // Of the column with this place, in group number `group` of the step.
    DEVICE void load(const uint8_t* groups, int, int group, const Place& place) {
        const auto eight = reinterpret_cast<const uint2*>(groups)[group * TILE_N + place.entry];
        negative[0] = eight.x;
        negative[1] = eight.y;
        // In the opposite order, from that with -8 on, for which 0 stands.
        positive[0] = __byte_perm(eight.y, 0, 0x1234) ^ 0x80808000u;
        positive[1] = __byte_perm(eight.x, eight.y, 0x1234) ^ 0x80808080u;
    }

    // The rows of half q of column h.
    DEVICE uint32_t weight(const codes_t&, const TableCode& code, int h, int q) const {
        const uint32_t word = code.words[h], selector = (word & 0x77777777u) >> 16 * q;
        // A byte for each code: all bits are those of its sign.
        const uint32_t is_negative =
            q == 0 ? signs_of_bytes<0x5140>(word << 4, word) : signs_of_bytes<0x7362>(word << 4, word);
        return (__byte_perm(negative[0], negative[1], selector) & is_negative) |
               (__byte_perm(positive[0], positive[1], selector) & ~is_negative);
    }
};
