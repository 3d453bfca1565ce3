// layout_marlin_8.cuh: Marlin's tiles of 32 rows x 32 columns, for activations of 8 bits.
//
//     words [K / 32, N BITS]: a row of tiles after the other. A tile is 128 words of 4-bit quants, or 256 of 8-bit
//     ones: lane 4g + t has BITS adjacent words, for columns g + 8j (j: 0 ... 3) and rows 4t + i, 4t + i + 16 (i: 0 ...
//     3), the A fragment of an MMA of bytes.
//
//     4 bits, word j:   bits   0-3   4-7    8-11  12-15  16-19 20-23  24-27 28-31
//                       row    4t    4t+16  4t+1  4t+17  4t+2  4t+18  4t+3  4t+19
//     8 bits, word 2j + h:     bits  0-7       8-15        16-23       24-31
//                              row   4t + 16h  4t+1 + 16h  4t+2 + 16h  4t+3 + 16h
//
//     zero points of a group: 64 columns in the order of layout_marlin, not interleaved
//
// An MMA of 16-bit operands takes pair q of a lane as rows 4t + q and 4t + q + 2; the columns of a are permuted to
// match.
#pragma once
#include "packed.cuh"
#include "packed_layout.cuh"

template <int BITS>
struct layout_marlin_8 {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        const int row = int(k % 32), column = int(n % 32), half = row / 16;
        const int64_t tile = int64_t(k / 32) * (size.columns / 32) + n / 32;
        const int field = BITS == 4 ? row % 4 * 2 + half : row % 4;
        return quant_of_tile<BITS>(words, tile, column % 8 * 4 + row % 16 / 4, column / 8, half, field);
    }
    static DEVICE Element element(uint64_t word, int field, const PackedSize& size) {
        const uint32_t tiles = size.columns / 32, tile = uint32_t(word / MARLIN_TILE_WORDS<BITS>);
        const uint32_t at = word % MARLIN_TILE_WORDS<BITS>, lane = at / BITS, rest = at % BITS;
        const uint32_t row = BITS == 4 ? field / 2 + field % 2 * 16 : field + rest % 2 * 16;
        return {tile / tiles * 32 | lane % 4 * 4 | row,
                tile % tiles * 32 | (BITS == 4 ? rest : rest / 2) * 8 | lane / 4};
    }
    static DEVICE constexpr uint32_t zero_place(uint32_t n) { return uint32_t(column_marlin_64(n)); }

    // Boxes of 128 words x columns / 32 x rows / 32: whole tiles.
    template <int ROWS>
    struct TmaBox {
        int x, y, z;
        DEVICE TmaBox(int k_tile, int column) : x(0), y(column / 32), z(k_tile * (ROWS / 32)) {}
    };

    struct WgmmaQuants {
        static_assert(BITS == 4);
        static constexpr bool TWO_BOXES = false;  // whether a k-tile may be two boxes of a
        static constexpr int WORDS = 2;
        uint32_t words[WORDS];

        // A tile of 32 rows has a lane's words in order of the 8-column blocks.
        template <int PRODUCTS, bool RECODED>
        static DEVICE void read(WgmmaQuants (&quants)[PRODUCTS], const uint32_t* from, int slice, int first) {
            constexpr int COLUMNS = 128 * PRODUCTS;
            const int lane = threadIdx.x % 32;
            using run_t = Vec<uint32_t, PRODUCTS * WORDS>;
            const auto run =
                run_t::load(from + ((slice / 2 * (COLUMNS / 32) + first / 2) * 32 + lane) * 4 + first % 2 * WORDS);
#pragma unroll
            for (int i = 0; i < PRODUCTS * WORDS; ++i) {
                const uint32_t word = RECODED ? recoded_plus_8(run.data[i]) : run.data[i];
                quants[i / WORDS].words[i % WORDS] = word >> slice % 2 * BITS;
            }
        }
        template <typename Decode>
        DEVICE auto pair(const Decode& decode, int h, int q, const typename Decode::Zero& zero) const {
            return decode.pair(words[h], 2 * q, zero);
        }
    };

    template <int TILE_N>
    struct MmaUnit : AnyMmaUnit<TILE_N> {
        static_assert(BITS == 4);
        static constexpr RowOrder ROWS = rows_alternating;
        static constexpr bool READS_IN_ORDER = true;

        static DEVICE int64_t first_word(int64_t first_column, int64_t, int words) {
            return first_column * BITS + words;
        }
        template <bool RECODED, typename Decode>
        static DEVICE uint32_t pair(const uint32_t* words, const Decode& decode, int product, int tile, int h, int q,
                                    int term) {
            uint32_t word = words[2 * tile + h];
            if constexpr (RECODED) word = recoded_plus_8(word);
            return decode.raw(word, product + 2 * q, term);
        }
    };

    template <int TILE_N>
    struct Piece {
        static constexpr bool BY_LINES = false, OF_COLUMN = false, K_MAJOR = false, HAS_ZEROS = false;
        static constexpr int COLUMNS = 4, RUN = 2, SPAN = 32;

        static DEVICE constexpr int column_at(int c) { return c * 8; }
        static DEVICE void locate(int piece, int& column, int& row) {
            column = piece % TILE_N / 32 * 32 + piece % 32 / 4;
            row = piece / TILE_N * 32 + piece % 4 * 4;
        }
        static DEVICE int64_t word_at(int64_t r, uint32_t c, int64_t n, int64_t) {
            return (r / 32 * (n / 32) + c / 32) * 128 + (c % 8 * 4 + r % 16 / 4) * 4;
        }
        static DEVICE constexpr int word_of(int run, int, int) { return run / 2; }
        static DEVICE constexpr int field_of(int run, int j, int odd) { return run % 2 + 2 * odd + 16 / BITS * j; }
        static DEVICE constexpr int run_row(int run) { return run % 2 * 16; }
        static DEVICE constexpr int run_column(int run) { return run / 2; }
    };
};
