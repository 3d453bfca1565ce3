// layout_n32k16.cuh: AllSpark's tiles of 16 rows x 32 columns of bytes.
//
//     bytes [N rounded up to 32, K]: 32 columns are 8 lines of 4 K bytes, and line g has columns g + 8j (j: 0 ... 3).
//     16 rows of a line are 64 bytes:
//
//         byte   16t + 4j   + 1    + 2    + 3       (t: 0 ... 3)
//         row    2t         2t+1   2t+8   2t+9
#pragma once
#include "packed_layout.cuh"

template <int BITS>
struct layout_n32k16 {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        const int row = int(k % 16), column = int(n % 32);
        const int at = row % 8 / 2 * 16 + column / 8 * 4 + row / 8 * 2 + row % 2;
        const int64_t line = int64_t(n / 32) * 8 + column % 8;
        return reinterpret_cast<const uint8_t*>(words)[line * 4 * size.rows + int64_t(k / 16) * 64 + at];
    }
    static DEVICE Element element(uint64_t word, int field, const PackedSize& size) {
        const uint32_t line = uint32_t(word / size.rows), at = uint32_t(word % size.rows);
        return {at / 16 * 16 + at % 16 / 4 * 2 + field / 2 * 8 + field % 2, line / 8 * 32 + at % 4 * 8 + line % 8};
    }

    // Boxes of rows x columns / 4 x 1: a word of four columns for each row.
    template <int ROWS>
    struct TmaBox {
        int x, y, z;
        DEVICE TmaBox(int k_tile, int column) : x(k_tile * ROWS), y(column / 4), z(0) {}
    };

    struct WgmmaQuants {
        static_assert(BITS == 8);
        static constexpr bool TWO_BOXES = false;  // whether a k-tile may be two boxes of a
        static constexpr int WORDS = 2;
        uint32_t words[WORDS];

        // A lane's words for 32 columns are adjacent, in order of the 8-column blocks.
        template <int PRODUCTS, bool RECODED>
        static DEVICE void read(WgmmaQuants (&quants)[PRODUCTS], const uint32_t* from, int slice, int first) {
            static_assert(!RECODED);
            const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
            using run_t = Vec<uint32_t, PRODUCTS * WORDS>;
            const auto run = run_t::load(from + (first / 2 * 8 + g) * 64 + slice * 16 + t * 4 + first % 2 * WORDS);
#pragma unroll
            for (int i = 0; i < PRODUCTS * WORDS; ++i) quants[i / WORDS].words[i % WORDS] = run.data[i];
        }
        template <typename Decode>
        DEVICE auto pair(const Decode& decode, int h, int q, const typename Decode::Zero& zero) const {
            return decode.pair(rows_in_order(words[h]), q, zero);
        }
    };

    template <int TILE_N>
    struct MmaUnit : AnyMmaUnit<TILE_N> {
        static_assert(BITS == 8);
        static constexpr int LINE_WORDS = 16, HELD_WORDS = 4;

        static DEVICE int64_t first_word(int64_t first_column, int64_t pitch, int) {
            const int lane = threadIdx.x % 32;
            return (first_column / 4 + lane / 4) * pitch + lane % 4 * 4;
        }
        template <bool RECODED, typename Decode>
        static DEVICE uint32_t pair(const uint32_t* words, const Decode& decode, int, int tile, int h, int q,
                                    int term) {
            static_assert(!RECODED);
            return decode.raw(rows_in_order(words[2 * tile + h]), q, term);
        }
    };

    template <int TILE_N>
    struct Piece {
        static constexpr bool BY_LINES = false, OF_COLUMN = false, K_MAJOR = false, HAS_ZEROS = false;
        static constexpr int COLUMNS = 4, RUN = 1, SPAN = 16;

        static DEVICE constexpr int column_at(int c) { return c * 8; }
        static DEVICE void locate(int piece, int& column, int& row) {
            const int line = piece / 16;
            column = line / 8 * 32 + line % 8;
            row = piece % 16 / 4 * 16 + piece % 4 * 2;
        }
        static DEVICE int64_t word_at(int64_t r, uint32_t c, int64_t, int64_t k) {
            return (c / 32 * 8 + c % 8) * k + r / 16 * 16 + r % 8 / 2 * 4;
        }
        static DEVICE constexpr int word_of(int run, int, int) { return run / 2; }
        static DEVICE constexpr int field_of(int run, int, int odd) { return run % 2 * 2 + odd; }
        static DEVICE constexpr int run_row(int run) { return run % 2 * 8; }
        static DEVICE constexpr int run_column(int run) { return run / 2; }
    };

private:
    // Swaps bytes 1 and 2 of a word: pairs of quants (dequant.cuh) are then adjacent rows.
    static DEVICE uint32_t rows_in_order(uint32_t word) { return __byte_perm(word, 0, 0x3120); }
};
