// layout_marlin.cuh: Marlin's tiles of 16 rows x 64 columns, for activations of 16 bits (Frantar et al. 2024,
// arXiv:2408.11743).
//
//     words [K / 16, N BITS / 2]: a row of tiles after the other. A tile is 128 words of 4-bit quants, or 256 of 8-bit
//     ones: lane 4g + t has BITS adjacent words, for columns g + 8h + 16j (h: 0, 1; j: 0 ... 3) and rows 2t + 8q,
//     2t + 8q + 1 (q: 0, 1), the A fragment of mma.cuh.
//
//     4 bits, word j:   bits   0-3   4-7   8-11  12-15 16-19 20-23 24-27 28-31
//                       row    2t    2t+8  2t    2t+8  2t+1  2t+9  2t+1  2t+9
//                       h      0     0     1     1     0     0     1     1
//     8 bits, word 2j + h:     bits  0-7   8-15  16-23 24-31
//                              row   2t    2t+8  2t+1  2t+9
//
//     zero points of a group: 64 columns in the order g, 8j + h of its lanes, then as in layout_awq
#pragma once
#include "packed_layout.cuh"

template <int BITS>
struct layout_marlin {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        const int row = int(k % 16), column = int(n % 64), half = column % 16 / 8;
        const int field = BITS == 4 ? row % 2 * 4 + half * 2 + row / 8 : row % 2 * 2 + row / 8;
        const int64_t tile = int64_t(k / 16) * (size.columns / 64) + n / 64;
        return quant_of_tile<BITS>(words, tile, column % 8 * 4 + row % 8 / 2, column / 16, half, field);
    }
    static DEVICE Element element(uint64_t word, int field, const PackedSize& size) {
        const uint32_t tiles = size.columns / 64, tile = uint32_t(word / MARLIN_TILE_WORDS<BITS>);
        const uint32_t at = word % MARLIN_TILE_WORDS<BITS>, lane = at / BITS, rest = at % BITS;
        const uint32_t half = BITS == 4 ? field / 2 % 2 : rest % 2, odd = BITS == 4 ? field / 4 : field / 2;
        return {tile / tiles * 16 | lane % 4 * 2 | odd | field % 2 * 8,
                tile % tiles * 64 | (BITS == 4 ? rest : rest / 2) * 16 | lane / 4 | half * 8};
    }
    static DEVICE constexpr uint32_t zero_place(uint32_t n) {
        return even_first<32 / BITS>(uint32_t(column_marlin_64(n)));
    }

    // Boxes of 32 BITS words x columns / 64 x rows / 16: whole tiles.
    template <int ROWS>
    struct TmaBox {
        int x, y, z;
        DEVICE TmaBox(int k_tile, int column) : x(0), y(column / 64), z(k_tile * (ROWS / 16)) {}
    };

    struct WgmmaQuants {
        static_assert(BITS == 4 || BITS == 8);
        static constexpr bool TWO_BOXES = true;  // whether a k-tile may be two boxes of a
        static constexpr int WORDS = BITS / 4;
        uint32_t words[WORDS];

        // A tile has a lane's words for 64 columns, in order of the 16-column blocks.
        template <int PRODUCTS, bool RECODED>
        static DEVICE void read(WgmmaQuants (&quants)[PRODUCTS], const uint32_t* from, int slice, int first) {
            static_assert(!RECODED);
            constexpr int COLUMNS = 128 * PRODUCTS;
            const int lane = threadIdx.x % 32;
            using run_t = Vec<uint32_t, PRODUCTS * WORDS>;
            const auto run = run_t::load(from + ((slice * (COLUMNS / 64) + first / 4) * 32 + lane) * (4 * WORDS) +
                                         first % 4 * WORDS);
#pragma unroll
            for (int i = 0; i < PRODUCTS * WORDS; ++i) quants[i / WORDS].words[i % WORDS] = run.data[i];
        }
        template <typename Decode>
        DEVICE auto pair(const Decode& decode, int h, int q, const typename Decode::Zero& zero) const {
            if constexpr (BITS == 4) return decode.pair(words[0], 2 * h + q, zero);
            else return decode.pair(words[h], q, zero);
        }
    };

    template <int TILE_N>
    struct MmaUnit : AnyMmaUnit<TILE_N> {
        static_assert(BITS == 4 || BITS == 8);
        static constexpr int LINES = 8 / BITS, HELD_WORDS = BITS == 8 ? 4 : 0;
        static constexpr bool NEIGHBOURS = BITS == 8, READS_IN_ORDER = BITS == 8, GROUPS_OF_16 = true;

        static DEVICE int64_t first_word(int64_t first_column, int64_t, int words) {
            return first_column * (BITS / 2) + words;
        }
        static DEVICE int piece(int i) {
            const int lane = threadIdx.x % 32;
            return NEIGHBOURS ? 2 * lane + i : 32 * i + lane;
        }
        template <bool RECODED, typename Decode>
        static DEVICE uint32_t pair(const uint32_t* words, const Decode& decode, int product, int tile, int h, int q,
                                    int term) {
            static_assert(!RECODED);
            if constexpr (BITS == 4) return decode.raw(words[4 * product + tile], 2 * h + q, term);
            else return decode.raw(words[2 * tile + h], q, term);
        }
        static DEVICE uint32_t zero_point(const uint32_t* words, int g, int tile, int h) {
            static_assert(BITS == 4);
            return words[g] >> (tile % 4 + 4 * h) * 4 & 15;
        }
    };

    template <int BLOCK_N, int QUANTS_AT>
    struct FewRows {
        static_assert(BITS == 4);
        static constexpr bool BY_HALVES = false;
        static constexpr int RUN = 1;

        static DEVICE void read(uint32_t (&unit)[8], const uint8_t* stage, int slice, int) {
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
            uint32_t* const words = unit + slice % 2 * 4;
            const uint8_t* const quants = stage + QUANTS_AT;
            const auto run = Vec<uint32_t, 4>::load(
                reinterpret_cast<const uint32_t*>(quants + slice * (4 * 512) + (warp * 32 + lane) * 16));
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = run.data[i];
        }
    };

    template <int TILE_N>
    struct Piece {
        static constexpr bool BY_LINES = false, OF_COLUMN = false, K_MAJOR = false, HAS_ZEROS = BITS == 4;
        static constexpr int COLUMNS = 32 / BITS, RUN = 1, SPAN = 16;

        static DEVICE constexpr int column_at(int c) { return c / 2 * 16 + c % 2 * 8; }
        static DEVICE void locate(int piece, int& column, int& row) {
            constexpr int LANE_PIECES = BITS / 4, ACROSS = TILE_N * BITS / 8;  // pieces of a lane, of 16 rows
            const int lane = piece / LANE_PIECES % 32;
            column = piece % ACROSS / (32 * LANE_PIECES) * 64 + piece % LANE_PIECES * 32 + lane / 4;
            row = piece / ACROSS * 16 + lane % 4 * 2;
        }
        static DEVICE int64_t word_at(int64_t r, uint32_t c, int64_t n, int64_t) {
            const int64_t tile = r / 16 * (n / 64) + c / 64;
            return tile * (32 * BITS) + (c % 8 * 4 + r % 8 / 2) * BITS + c % 64 / 32 * (BITS == 8 ? 4 : 0);
        }
        // The zero points of a piece's columns share a word, word n % 8 of the 64 columns.
        static DEVICE uint32_t zero_column(uint32_t column) { return (column & -64) + column % 8 * 8; }
        static DEVICE constexpr int word_of(int run, int, int) { return run / (16 / BITS); }
        static DEVICE constexpr int field_of(int run, int, int odd) { return run % (16 / BITS) + odd * (16 / BITS); }
        static DEVICE constexpr int run_row(int run) { return run % 2 * 8; }
        static DEVICE constexpr int run_column(int run) { return run / 2; }
    };
};
