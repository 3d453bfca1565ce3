// layout_awq.cuh: AWQ's words of adjacent columns (Lin et al. 2023, arXiv:2306.00978, as AutoAWQ packs them).
//
//     words [K, N BITS / 32]: a word has 32 / BITS columns of a row, the even ones in its lower half.
//
//     4 bits:   bits     0-3  4-7  8-11  12-15  16-19  20-23  24-27  28-31
//               column   0    2    4     6      1      3      5      7
//
//     zero points of a group: as a row of the weight
#pragma once
#include "arith.cuh"
#include "packed_layout.cuh"

template <int BITS>
struct layout_awq {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        constexpr int FIELDS = 32 / BITS;
        const uint32_t word = words[int64_t(k) * (size.columns / FIELDS) + n / FIELDS];
        return word >> even_first<FIELDS>(n) % FIELDS * BITS & FIELD_MASK<BITS>;
    }
    static DEVICE constexpr uint32_t zero_place(uint32_t n) { return even_first<32 / BITS>(n); }

    // Boxes of columns / 8 words x rows x 1. TMA swizzles rows by their size.
    template <int ROWS>
    struct TmaBox {
        int x, y, z;
        DEVICE TmaBox(int k_tile, int column) : x(column / 8), y(k_tile * ROWS), z(0) {}
    };

    struct WgmmaQuants {
        static_assert(BITS == 4);
        static constexpr bool TWO_BOXES = false;  // whether a k-tile may be two boxes of a
        uint32_t words[8];

        // A row is COLUMNS / 8 words. Swizzle: bits of the row number are xor-ed into the 16-byte chunk index.
        template <int PRODUCTS, bool RECODED>
        static DEVICE void read(WgmmaQuants (&quants)[PRODUCTS], const uint32_t* from, int slice, int first) {
            static_assert(!RECODED);
            constexpr int COLUMNS = 128 * PRODUCTS, ROW_BYTES = COLUMNS / 2;
            const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = slice * 16 + i / 2 * 8 + 2 * t + i % 2, column = first * 8;
                const int chunk = column / 16 ^ row * ROW_BYTES / 128 % (ROW_BYTES / 16);
                const auto run =
                    Vec<uint32_t, 2 * PRODUCTS>::load(from + (row * ROW_BYTES + chunk * 16 + column % 16) / 4);
#pragma unroll
                for (int j = 0; j < 2 * PRODUCTS; ++j) {
                    quants[j / 2].words[i * 2 + j % 2] = run.data[j] >> (g / 2 * 4 + g % 2 * 16);
                }
            }
        }
        template <typename Decode>
        DEVICE auto pair(const Decode& decode, int h, int q, const typename Decode::Zero& zero) const {
            return decode.pair(byte_perm(words[q * 4 + h], words[q * 4 + 2 + h], 0x5410), 0, zero);
        }
    };

    // A lane loads one word of a row, or with 128 columns two.
    template <int TILE_N>
    struct MmaUnit : AnyMmaUnit<TILE_N> {
        static_assert(BITS == 4);
        static constexpr int MOST_COLUMNS = 128, READ = TILE_N / 64, LINES = 8 * 256 / TILE_N;
        static constexpr RowOrder ROWS = rows_of_lane;
        static constexpr bool SIXTEENS = true;

        static DEVICE constexpr int column(int g, int tile, int h) { return TILE_N / 8 * g + 2 * tile + h; }
        static DEVICE int64_t first_word(int64_t first_column, int64_t, int words) { return first_column / 8 + words; }
        static DEVICE int piece(int i) {
            const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
            return 16 * t + 64 / LINES * i + g / (4 / READ);
        }
        // In place (dequant.cuh), float16 quants of odd blocks of columns need no shift and are 16 times as large.
        template <typename Decode>
        static constexpr float factor(int tile) {
            return Decode::IS_HALF && tile % 2 ? 16.0f : 1.0f;
        }
        // Takes the byte with this column and its neighbour from two rows.
        template <bool RECODED, typename Decode>
        static DEVICE uint32_t pair(const uint32_t* words, const Decode& decode, int product, int tile, int h, int q,
                                    int term) {
            static_assert(!RECODED);
            const int row = (4 * product + 2 * q) * READ + tile / 4;
            const uint32_t byte = 2 * h + tile % 4 / 2, both = byte * 0x11 + (byte + 4) * 0x1100;
            const uint32_t bytes = byte_perm(words[row], words[row + READ], both);
            if constexpr (Decode::IS_HALF) return decode.raw_in_place(bytes, tile % 2);
            else return decode.raw(bytes, tile % 2, term);
        }
        static DEVICE uint32_t zero_point(const uint32_t* words, int g, int tile, int h) {
            return words[READ * g + tile / 4] >> (tile % 4 + 4 * h) * 4 & 15;
        }
    };

    template <int BLOCK_N, int QUANTS_AT>
    struct FewRows {
        static constexpr bool BY_HALVES = false;
        static constexpr int RUN = 8;

        // A row of the CTA's columns is 128 bytes, in the 128-byte swizzle; a lane reads a word, eight columns.
        static DEVICE void read(uint32_t (&unit)[8], const uint8_t* stage, int slice, int) {
            static_assert(BLOCK_N == 256);
            const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
            uint32_t* const words = unit + slice % 2 * 4;
            const uint8_t* const quants = stage + QUANTS_AT;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i / 2 * 8 + 2 * t + i % 2, column = warp * 32 + g * 4;  // of bytes
                const int offset = row * 128 + ((column >> 4 ^ row) & 7) * 16 + column % 16;
                words[i] = *reinterpret_cast<const uint32_t*>(quants + slice * (16 * 128) + offset);
            }
        }
    };

    template <int TILE_N>
    struct Piece {
        static_assert(BITS == 4);
        static constexpr bool BY_LINES = true, OF_COLUMN = false, K_MAJOR = false, HAS_ZEROS = true;
        static constexpr int COLUMNS = 8, RUN = 2, SPAN = 4;

        static DEVICE constexpr int column_at(int c) { return c; }
        static DEVICE void locate(int piece, int& column, int& row) {
            column = piece % (TILE_N / 8) * 8;
            row = piece / (TILE_N / 8) * SPAN;
        }
        static DEVICE int64_t word_at(int64_t r, uint32_t c, int64_t n, int64_t) { return (r * n + c) / 8; }
        static DEVICE int64_t line_words(int64_t n) { return n / 8; }
        static DEVICE uint32_t zero_column(uint32_t column) { return column; }
        static DEVICE constexpr int word_of(int, int j, int odd) { return 2 * j + odd; }
        static DEVICE constexpr int field_of(int run, int, int) { return run / 2 + run % 2 * (16 / BITS); }
        static DEVICE constexpr int run_row(int) { return 0; }
        static DEVICE constexpr int run_column(int run) { return run; }
    };
};
