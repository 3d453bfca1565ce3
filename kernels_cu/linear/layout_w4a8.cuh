// layout_w4a8.cuh: tiles of 32 rows x 32 columns of 4-bit quants that select e4m3 values from tables
// (packed_table.cuh).
//
//     words [K / 32, 4 N]: a row of tiles after the other. In a tile of 128 words lane 4g + t has four adjacent words,
//     for columns g + 8j (j: 0 ... 3) and rows 4t + i, 4t + i + 16 (i: 0 ... 3). If N is an odd multiple of 16, the
//     last 16 columns are half a tile, with two words per lane.
//
//     word j:   bits   0-3   4-7   8-11  12-15  16-19  20-23  24-27  28-31
//               row    4t    4t+1  4t+2  4t+3   4t+16  4t+17  4t+18  4t+19
#pragma once
#include "packed_layout.cuh"

template <int BITS>
struct layout_w4a8 {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        const uint32_t row = k % 32, column = n % 32, lane = column % 8 * 4 + row % 16 / 4;
        const int64_t tile = int64_t(k / 32) * size.columns * BITS + n / 32 * MARLIN_TILE_WORDS<BITS>;
        const uint32_t word = words[tile + lane * lane_words(size, n / 32) + column / 8];
        return word >> (row / 16 * 4 + row % 4) * BITS & FIELD_MASK<BITS>;
    }
    static DEVICE Element element(uint64_t word, int field, const PackedSize& size) {
        const uint32_t row_words = size.columns * BITS, row_tile = uint32_t(word / row_words);
        const uint32_t rest = uint32_t(word % row_words), tile = rest / MARLIN_TILE_WORDS<BITS>;
        const uint32_t at = rest % MARLIN_TILE_WORDS<BITS>, of_lane = lane_words(size, tile), lane = at / of_lane;
        return {row_tile * 32 | lane % 4 * 4 | field / 4 * 16 | field % 4, tile * 32 | at % of_lane * 8 | lane / 4};
    }
    static DEVICE uint32_t lane_words(const PackedSize& size, uint32_t tile) {
        return tile < size.columns / 32 ? BITS : BITS / 2;
    }

    // Boxes of 128 words x columns / 32 x rows / 32: whole tiles.
    template <int ROWS>
    struct TmaBox {
        int x, y, z;
        DEVICE TmaBox(int k_tile, int column) : x(0), y(column / 32), z(k_tile * (ROWS / 32)) {}
    };

    // A WGMMA of bytes has 32 rows: a word for each of the lane's two columns.
    struct WgmmaQuants {
        static_assert(BITS == 4);
        static constexpr bool TWO_BOXES = false;  // whether a k-tile may be two boxes of a
        uint32_t words[2];

        template <int PRODUCTS, bool RECODED>
        static DEVICE void read(WgmmaQuants (&quants)[PRODUCTS], const uint32_t* from, int slice, int first) {
            static_assert(!RECODED);
            constexpr int COLUMNS = 128 * PRODUCTS;
            const int lane = threadIdx.x % 32, first_column = first * 16;
            const auto run = Vec<uint32_t, 2 * PRODUCTS>::load(
                from + ((slice * (COLUMNS / 32) + first_column / 32) * 32 + lane) * 4 + first_column % 32 / 8);
#pragma unroll
            for (int i = 0; i < 2 * PRODUCTS; ++i) quants[i / 2].words[i % 2] = run.data[i];
        }
    };
};
