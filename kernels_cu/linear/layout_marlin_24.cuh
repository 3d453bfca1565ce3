// layout_marlin_24.cuh: 2:4 sparsity: Marlin's tiles of the stored rows, two of every four, in another order of
// columns; rows count the stored ones.
//
//     words [K / 16, N BITS / 2] as in layout_marlin, but lane 4g + t has columns 8g + 4h + j (h: 0, 1; j: 0 ... 3)
//     places: metadata, 16-bit words [K / 16, 2 N], four quads (4 rows of a column, 2 of them stored) in a word:
//
//         bits of a quad   0-1: row of the first stored quant   2-3: row of the second
#pragma once
#include "packed_layout.cuh"

template <int BITS>
struct layout_marlin_24 {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        const int row = int(k % 16), column = int(n % 64), half = column % 8 / 4;
        const int field = BITS == 4 ? row % 2 * 4 + half * 2 + row / 8 : row % 2 * 2 + row / 8;
        const int64_t tile = int64_t(k / 16) * (size.columns / 64) + n / 64;
        return quant_of_tile<BITS>(words, tile, column / 8 * 4 + row % 8 / 2, column % 4, half, field);
    }

    template <int TILE_N>
    struct MmaUnit : AnyMmaUnit<TILE_N> {
        static_assert(BITS == 4 || BITS == 8);
        static constexpr int UNITS = BITS == 4 ? 2 : 4, SPREAD = 2, LINES = 8 / BITS;
        static constexpr int HELD_WORDS = BITS == 8 ? 4 : 0;
        static constexpr RowOrder ROWS = rows_in_pairs;
        static constexpr bool NEIGHBOURS = BITS == 8;

        static DEVICE constexpr int column(int g, int tile, int h) { return 8 * g + 4 * h + tile; }
        static DEVICE int64_t first_word(int64_t first_column, int64_t, int words) {
            return first_column * (BITS / 2) + words;
        }
        static DEVICE int piece(int i) {
            const int lane = threadIdx.x % 32;
            return NEIGHBOURS ? 2 * lane + i : 32 * i + lane;
        }
        // The pair of stored quants, independent of q.
        template <bool RECODED, typename Decode>
        static DEVICE uint32_t pair(const uint32_t* words, const Decode& decode, int product, int tile, int h, int,
                                    int term) {
            static_assert(!RECODED);
            if constexpr (BITS == 4) return decode.raw(words[product / 2 * 4 + tile], 2 * h + product % 2, term);
            else return decode.raw(words[2 * tile + h], product % 2, term);
        }
    };
};
