// layout_rows.cuh: weights packed along K, as checkpoints of experts have them.
//
//     words [N, K BITS / 32]: row n is the string of the quants of column n of the weight, the first in the lowest
//     bits. Scales are [N, groups]; zero points bytes [N BITS / 8, groups], the first of two columns in the lower half.
#pragma once
#include "packed_layout.cuh"

template <int BITS>
struct layout_rows {
    // A piece is 16 bytes of a column: a lane has the t-th word of eight of them. GATED, a constant of the kernel: the
    // halves of a block are gates and ups; with GATED 1 rows of either are adjacent.
    template <int TILE_N>
    struct MmaUnit : AnyMmaUnit<TILE_N> {
        static_assert(BITS == 4 || BITS == 8);
        static constexpr bool K_MAJOR = true, WORD_OF_T = true;
        static constexpr int LINE_WORDS = 4, COPY_LINES = GATED == 1 ? 16 : 32, READ = 1;
        static constexpr RowOrder ROWS = rows_of_lane_in_halves;

        static DEVICE int piece(int i) {
            const int g = threadIdx.x % 32 / 4;
            return 8 * i + g;
        }
        template <bool RECODED, typename Decode>
        static DEVICE uint32_t pair(const uint32_t* words, const Decode& decode, int product, int tile, int h, int q,
                                    int term) {
            static_assert(!RECODED);
            return decode.raw(words[2 * tile + h], 2 * product + q, term);
        }
    };

    template <int TILE_N>
    struct Piece {
        static_assert(BITS == 4 || BITS == 8);
        static constexpr bool BY_LINES = false, OF_COLUMN = true, HAS_ZEROS = true;
        static constexpr bool K_MAJOR = true;  // scales and zero points are [N, groups], too
        static constexpr int COLUMNS = 1, RUN = 4, SPAN = 4 * 32 / BITS, ZERO_FIELDS = 8 / BITS, PAIRS = 16 / BITS;
        static constexpr int TILE_PIECES = 64 / SPAN;  // pieces of a column of a k-tile

        static DEVICE constexpr int column_at(int c) { return c * 8; }
        static DEVICE void locate(int piece, int& column, int& row) {
            column = piece / TILE_PIECES;
            row = piece % TILE_PIECES * SPAN;
        }
        static DEVICE int64_t word_at(int64_t r, uint32_t c, int64_t, int64_t k) { return (c * k + r) * BITS / 32; }
        static DEVICE constexpr int word_of(int run, int j, int) { return (run * RUN + j) / PAIRS; }
        static DEVICE constexpr int field_of(int run, int j, int odd) { return 2 * ((run * RUN + j) % PAIRS) + odd; }
        static DEVICE constexpr int run_row(int run) { return run * 8; }
        static DEVICE constexpr int run_column(int) { return 0; }
    };
};
