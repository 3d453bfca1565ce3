// layout_gptq.cuh: GPTQ's columns as strings of quants (Frantar et al. 2022, arXiv:2210.17323).
//
//     words [K BITS / 32, N]: column n is the string of its quants, from the lowest bit of its first word on.
//
//     4 bits:   bits   0-3  4-7  8-11  12-15  16-19  20-23  24-27  28-31
//               row    0    1    2     3      4      5      6      7
//
//     zero points of a group: a string, in the order of the columns
//
// Pairs of quants (dequant.cuh) of a word are then rows r and r + 16 / BITS, not adjacent ones as in layout_exllama.
#pragma once
#include "packed_layout.cuh"

// Layouts with such words of one column; EVEN_FIRST: even rows are in the lower halves.
template <int BITS, bool EVEN_FIRST>
struct column_words {
    static DEVICE constexpr uint32_t zero_place(uint32_t n) { return n; }

    // Boxes of columns x rows BITS / 32 x 1.
    template <int ROWS>
    struct TmaBox {
        int x, y, z;
        DEVICE TmaBox(int k_tile, int column) : x(column), y(k_tile * (ROWS * BITS / 32)), z(0) {}
    };

    struct WgmmaQuants {
        static_assert(BITS == 2 || BITS == 4 || BITS == 8);
        static constexpr bool TWO_BOXES = false;  // whether a k-tile may be two boxes of a
        uint32_t words[4];

        template <int PRODUCTS, bool RECODED>
        static DEVICE void read(WgmmaQuants (&quants)[PRODUCTS], const uint32_t* from, int slice, int first) {
            static_assert(!RECODED);
            constexpr int COLUMNS = 128 * PRODUCTS;
            const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
            for (int i = 0; i < PRODUCTS * 4; ++i) {
                const int q = i / 2 % 2, h = i % 2, row = slice * 16 + 8 * q + 2 * t;
                const uint32_t word = from[row * BITS / 32 * COLUMNS + (first + i / 4) * 16 + 8 * h + g];
                quants[i / 4].words[i % 4] = word >> (EVEN_FIRST ? row % (32 / BITS) / 2 : row % (32 / BITS)) * BITS;
            }
        }
        template <typename Decode>
        DEVICE auto pair(const Decode& decode, int h, int q, const typename Decode::Zero& zero) const {
            if constexpr (EVEN_FIRST) return decode.pair(words[2 * q + h], 0, zero);
            constexpr uint32_t TWO = (1u << 2 * BITS) - 1;
            const uint32_t both = words[2 * q + h] & TWO;
            return decode.pair(both | both << (16 - BITS), 0, zero);
        }
    };

    // A lane has eight columns. 3 bits: a k-tile is one unit, the three words of 32 rows of each column, so that no
    // quant crosses lanes.
    template <int TILE_N>
    struct MmaUnit : AnyMmaUnit<TILE_N> {
        static_assert(BITS == 2 || BITS == 4 || BITS == 8 || (BITS == 3 && EVEN_FIRST));
        static constexpr int WORDS = BITS == 3 ? 24 : 8, UNITS = BITS == 3 ? 1 : 4, LINES = WORDS / 2;
        static constexpr int HELD_WORDS = 32;
        static constexpr RowOrder ROWS = EVEN_FIRST ? rows_of_lane : rows_of_lane_in_halves;
        static constexpr bool SIXTEENS = true;

        static DEVICE constexpr int column(int g, int tile, int h) { return 32 * h + 4 * g + tile; }
        static DEVICE int64_t first_word(int64_t first_column, int64_t, int words) { return first_column + words; }
        static DEVICE int piece(int i) {
            const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
            return 16 * (LINES / 4) * t + 8 * i + g;
        }
        template <bool RECODED, typename Decode>
        static DEVICE uint32_t pair(const uint32_t* words, const Decode& decode, int product, int tile, int h, int q,
                                    int term) {
            static_assert(!RECODED);
            const int i = 2 * product + q, at = 4 * h + tile;
            if constexpr (BITS != 3) return decode.raw(words[at], i, term);
            // A word has five pairs; the top bit of each half belongs to the 16th pair, which takes one from each word.
            if (i < 15) return decode.raw(words[i / 5 * 8 + at], i % 5, term);
            const uint32_t last = (words[at] >> 15 & 0x10001) | (words[8 + at] >> 14 & 0x20002);
            return decode.raw(last | (words[16 + at] >> 13 & 0x40004), 0, term);
        }
        static DEVICE uint32_t zero_point(const uint32_t* words, int g, int tile, int h) {
            if constexpr (BITS == 3) {
                // First bit of the lane's four columns; 32 columns share three words.
                const int bit = 12 * g, word = 3 * h + bit / 32;
                const uint64_t two = uint64_t(words[min(word + 1, 5)]) << 32 | words[word];
                return uint32_t(two >> bit % 32) >> 3 * tile & 7;
            } else {
                constexpr int FIELDS = 32 / BITS;
                const int first = 32 * h + 4 * g;
                return words[first / FIELDS] >> (first % FIELDS + tile) * BITS & ((1 << BITS) - 1);
            }
        }
    };

    template <int TILE_N>
    struct Piece {
        static_assert(BITS == 2 || BITS == 4 || BITS == 8);
        static constexpr bool BY_LINES = true, OF_COLUMN = true, K_MAJOR = false, HAS_ZEROS = true;
        static constexpr int COLUMNS = 1, RUN = 4, SPAN = 4 * 32 / BITS, ZERO_FIELDS = 32 / BITS, PAIRS = 16 / BITS;

        static DEVICE constexpr int column_at(int c) { return c * 8; }
        static DEVICE void locate(int piece, int& column, int& row) {
            column = piece % TILE_N;
            row = piece / TILE_N * SPAN;
        }
        static DEVICE int64_t word_at(int64_t r, uint32_t c, int64_t n, int64_t) { return r * BITS / 32 * n + c; }
        static DEVICE int64_t line_words(int64_t n) { return n; }
        static DEVICE uint32_t zero_column(uint32_t column) { return column; }
        static DEVICE constexpr int word_of(int run, int j, int) { return (run * RUN + j) / PAIRS; }
        static DEVICE constexpr int field_of(int run, int j, int odd) {
            const int number = (run * RUN + j) % PAIRS;  // index of the pair in its word
            return EVEN_FIRST ? number + odd * PAIRS : 2 * number + odd;
        }
        static DEVICE constexpr int run_row(int run) { return run * 8; }
        static DEVICE constexpr int run_column(int) { return 0; }
    };
};

template <int BITS>
struct layout_gptq : column_words<BITS, false> {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        return quant_of_string<BITS>(words + n * size.word_step, uint64_t(k) * BITS, size.word_stride);
    }
};
