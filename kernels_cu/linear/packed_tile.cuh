// packed_tile.cuh: dequantizes a packed weight to rows of a tile in shared memory, as gemm_step.cuh multiplies them.
//
//     w[k, n] = T(scale * quant[k, n] + shift)    shift: -scale * zero; ADDED: zeros - scale * zero    T: scalar_t
//
// A piece is four packed words, and the layout's Piece says where they lie (packed_layout.cuh): BY_LINES takes one word
// from each of four consecutive lines of the weight; otherwise it is 16 contiguous bytes. Each thread holds the same
// PIECES pieces of every k-tile in registers, with the scales and zero points of their columns, from their load until
// their k-tile is next. A piece has PIECE_COLUMNS columns, and in each of them runs of RUN pairs of adjacent rows; a
// run is one store. All rows of a piece are in one group. Of the layout's Piece:
//
//     locate      the first column, and the first row of the k-tile, of a piece of a tile
//     word_at     the index of the piece's first word, from its first row and column in the weight
//     column_at   the offset of column c of a piece from its first column
//     word_of, field_of      the word with row 2 * j + odd of a run, and the field of BITS bits in that word
//     run_row, run_column    offsets of a run's row and column from the piece's first
//     SPAN        rows among which the rows of a piece lie: those of a tile of the layout
//     OF_COLUMN   whether a piece has quants of one column
//     K_MAJOR     whether scales are [N, groups] and zero points bytes [N BITS / 8, groups]
//
// The product of a scale and a zero point fits the 24 bits of a float32 mantissa, so that -scale * zero is exact, and
// one fmaf rounds product and sum together.
//
// Constants
//     BITS, EXPONENT    type of a quant: dequant.cuh
//     LAYOUT        layout of the quants, which has a Piece: packed_layout.cuh
//     RECODED       whether `marlin_int4_fp8_preprocess` has re-encoded the quants
//     HAS_SCALES    whether groups have scales
//     scale_t, SCALE    storage type of a scale, and the function that decodes it: group_scale.cuh
//     GROUP_SCALE_EXPONENT    a scale is the stored value times 2^GROUP_SCALE_EXPONENT
//     SCALE_ORDER   column_permutation.cuh's function for the columns of scales, and of zeros of type scalar_t
//     ZERO_CODES    groups have packed integer zero points, to which ZERO_POINT is added; otherwise ZERO_POINT is
//                   the zero point of every group
//     ZERO_FLOATS   groups have zero points of type scalar_t, to which ZERO_POINT is added
//     ADDED         groups have `zeros` of type scalar_t, which are added after scaling
//     GROUP_SIZE    rows of a group: a multiple or a divisor of the k-tile; 0: all rows are one group
//     IN_PAIRS      whether pairs are dequantized in float16: scales, and differences of quants and zero points, are
//                   exact in scalar_t, float16, and their products are rounded once
//     WHOLE_STEPS   whether K is a multiple of the k-tile
#pragma once
#include "dequant.cuh"
#include "group_scale.cuh"
#include "tile_shape.cuh"
#include "LAYOUT.cuh"

using layout_t = LAYOUT<BITS>;
using piece_t = typename layout_t::template Piece<TILE_N>;
constexpr bool BY_LINES = piece_t::BY_LINES, K_MAJOR = piece_t::K_MAJOR;
constexpr int PIECE_WORDS = 4, PIECE_COLUMNS = piece_t::COLUMNS, RUN = piece_t::RUN, SPAN = piece_t::SPAN;
constexpr int PIECE_ROWS = PIECE_WORDS * 32 / BITS / PIECE_COLUMNS;
constexpr int RUNS_OF_PIECE = PIECE_WORDS * 16 / BITS / RUN;
constexpr int TILE_PIECES = TILE_N * STEP * BITS / 128, PIECES = ceil_div(TILE_PIECES, NUM_THREADS);
// 8-bit two's complement integers are raised by 128, which is then their zero point.
constexpr bool IS_SIGNED = K_MAJOR && BITS == 8 && !HAS_SCALES;
static_assert(sizeof(scalar_t) == 2 && STEP == 64 && (TILE_N == 64 || TILE_N == 128));
static_assert(GROUP_SIZE % STEP == 0 || (STEP % (GROUP_SIZE ? GROUP_SIZE : 1) == 0 && GROUP_SIZE % SPAN == 0));
static_assert(!ZERO_CODES || piece_t::HAS_ZEROS);
static_assert(ZERO_CODES + ZERO_FLOATS + ADDED <= 1 && (HAS_SCALES || !ADDED));
static_assert(!IN_PAIRS || (EXPONENT == 0 && is_same<scalar_t, half_t>));

using pair_t = Vec<scalar_t, 2>;
constexpr uint32_t QUANT_MASK = (1 << BITS) - 1;

// Whether the stored values (scales) of a piece's columns are adjacent, in any order.
DEVICE constexpr bool entries_are_neighbours() {
    for (int c = 0; c < PIECE_COLUMNS; ++c) {
        if (SCALE_ORDER(piece_t::column_at(c)) / PIECE_COLUMNS != SCALE_ORDER(0) / PIECE_COLUMNS) return false;
    }
    return true;
}

// The position of a piece in a tile: its first column, and its first row of the k-tile.
struct PiecePlace {
    int column, row;

    DEVICE explicit PiecePlace(int piece) { piece_t::locate(piece, column, row); }

    // The piece's first word in the k-tile that begins at row first_k. `c` is the column of the weight where the piece
    // begins.
    DEVICE const uint32_t* in(const uint32_t* quants, int64_t first_k, uint32_t c, int64_t n, int64_t k) const {
        return quants + piece_t::word_at(first_k + row, c, n, k);
    }
};

// A weight; in a grouped GEMM, that of the block's expert. ZERO_CODES, ZERO_FLOATS and ADDED say what `zeros` are.
struct PackedMatrix {
    const uint32_t* quants;
    const scale_t* scales;
    const void* zeros;
    int64_t n, k, groups;
};

// A piece in registers, and the scales and zero points of its columns.
struct HeldPiece {
    uint32_t words[PIECE_WORDS], points;
    scale_t scales[PIECE_COLUMNS];
    scalar_t zeros[PIECE_COLUMNS];

    // Loads the values of the piece's columns from a row of scales or zeros; `column` is its first column.
    template <typename T>
    static DEVICE void load_entries(T (&to)[PIECE_COLUMNS], const T* row, uint32_t column) {
        if constexpr (entries_are_neighbours()) {
            const uint32_t first = uint32_t(SCALE_ORDER(column)) / PIECE_COLUMNS * PIECE_COLUMNS;
            const auto run = Vec<T, PIECE_COLUMNS>::load(row + first);
#pragma unroll
            for (int c = 0; c < PIECE_COLUMNS; ++c)
                to[c] = run.data[SCALE_ORDER(piece_t::column_at(c)) % PIECE_COLUMNS];
        } else {
#pragma unroll
            for (int c = 0; c < PIECE_COLUMNS; ++c) to[c] = row[SCALE_ORDER(column + piece_t::column_at(c))];
        }
    }

    // Loads the piece of the k-tile that begins at row first_k; `column` is the column of the weight where it begins.
    // For rows past the end of K it loads from a valid address.
    template <typename Piece = piece_t>
    DEVICE void load(const PackedMatrix& w, const PiecePlace& place, int64_t first_k, uint32_t column) {
        const uint32_t* const from = place.in(w.quants, first_k, column, w.n, w.k);
        const int64_t row = first_k + place.row;
        if constexpr (BY_LINES) {
#pragma unroll
            for (int i = 0; i < PIECE_WORDS; ++i) {
                const bool exists = WHOLE_STEPS || row + i * (PIECE_ROWS / PIECE_WORDS) < w.k;
                hold<4>(words + i, exists ? from + i * Piece::line_words(w.n) : w.quants, true);
            }
        } else {
            hold<16>(words, WHOLE_STEPS || row < w.k ? from : w.quants, true);
        }
        // If the k-tile lies in one group, the index is the same in all lanes.
        int64_t group = 0;
        if constexpr (GROUP_SIZE >= STEP) group = first_k / GROUP_SIZE;
        else if constexpr (GROUP_SIZE > 0) group = first_k / GROUP_SIZE + place.row / GROUP_SIZE;
        if constexpr (GROUP_SIZE > 0 && GROUP_SIZE < STEP && !WHOLE_STEPS) group = min(group, w.groups - 1);
        if constexpr (K_MAJOR) {
            if constexpr (HAS_SCALES) scales[0] = w.scales[column * w.groups + group];
            const uint8_t* const bytes = static_cast<const uint8_t*>(w.zeros);
            if constexpr (ZERO_CODES) points = bytes[column * BITS / 8 * w.groups + group];
        } else {
            if constexpr (HAS_SCALES) load_entries(scales, w.scales + group * w.n, column);
            if constexpr (ADDED || ZERO_FLOATS) {
                load_entries(zeros, static_cast<const scalar_t*>(w.zeros) + group * w.n, column);
            }
            if constexpr (ZERO_CODES) {
                const uint32_t at = Piece::zero_column(column);
                points = (static_cast<const uint32_t*>(w.zeros) + group * (w.n * BITS / 32))[at * BITS / 32];
            }
        }
    }

    // The integer zero point of column `c`, without ADDED or ZERO_FLOATS; `column` is the piece's first column.
    template <typename Piece = piece_t>
    DEVICE int zero_of(int c, uint32_t column) const {
        if constexpr (ZERO_CODES && Piece::OF_COLUMN) {
            return ZERO_POINT + int(points >> column % Piece::ZERO_FIELDS * BITS & QUANT_MASK);
        }
        if constexpr (ZERO_CODES) return ZERO_POINT + int(points >> (c / 2 + c % 2 * 4) * 4 & 15);
        return ZERO_POINT;
    }
    // The scale and shift of column `c`; `column` is the piece's first column.
    DEVICE void terms(float& scale, float& shift, int c, uint32_t column) const {
        constexpr float FACTOR = power_of_two(GROUP_SCALE_EXPONENT);
        scale = 1.0f;
        if constexpr (HAS_SCALES) scale = SCALE<scale_t>(scales + c, 0) * FACTOR;
        const float zero = zero_of(c, column) + (ZERO_FLOATS ? to_float(zeros[c]) : 0.0f);
        shift = ADDED ? fmaf(-zero, scale, to_float(zeros[c])) : -zero * scale;
    }

    // Pair j of a run: two quants, in the low bits of the halves of a word.
    DEVICE uint32_t quants_of(int run, int j) const {
        const int word = piece_t::word_of(run, j, 0), high_word = piece_t::word_of(run, j, 1);
        const uint32_t low = words[word], high = words[high_word];
        const int shift = piece_t::field_of(run, j, 0) * BITS, high_shift = piece_t::field_of(run, j, 1) * BITS;
        if (word == high_word && high_shift == shift + 16) return low >> shift & QUANT_MASK * 0x10001;
        return pack_halves<false>(low >> shift, high >> high_shift) & QUANT_MASK * 0x10001;
    }
    // Dequantizes the piece and stores it to the rows of a stage from TILE_M on. `column` is its first column.
    DEVICE void store(const tile_t& stage, const PiecePlace& place, uint32_t column) {
#pragma unroll
        for (int i = 0; i < PIECE_WORDS; ++i) {
            if constexpr (RECODED) words[i] = recoded_plus_8(words[i]);
            if constexpr (IS_SIGNED) words[i] ^= 0x80808080u;
        }
        // Spreads the fields of a word over bytes: one instruction converts a byte to float.
        constexpr int PLANES = 8 / BITS;
        uint32_t planes[PIECE_WORDS][PLANES];
#pragma unroll
        for (int i = 0; i < PIECE_WORDS * PLANES && BITS < 8; ++i) {
            planes[i / PLANES][i % PLANES] =
                unknown_bits(words[i / PLANES] >> i % PLANES * BITS & QUANT_MASK * 0x01010101u);
        }
        const auto number = [&](int run, int j, int odd) {
            const int word = piece_t::word_of(run, j, odd), field = piece_t::field_of(run, j, odd);
            const uint32_t plane = BITS == 8 ? words[word] : planes[word][field % PLANES];
            return float(plane >> field / PLANES * 8 & 0xff);
        };
        float scale, shift;
        pair_t scale_pair, zero_pair;
#pragma unroll
        for (int run = 0; run < RUNS_OF_PIECE; ++run) {
            const int c = piece_t::run_column(run), row = place.row + piece_t::run_row(run);
            if (run == 0 || c != piece_t::run_column(run - 1)) {
                terms(scale, shift, c, column);
                if constexpr (IN_PAIRS) {
                    scale_pair = pair_t::full(scale);
                    const uint32_t zero = uint32_t(zero_of(c, column)) | RAISED_PAIR<scalar_t> >> 16;
                    zero_pair = word_pair<scalar_t>(zero * 0x10001);
                }
            }
            Vec<uint32_t, RUN> words_of_run;
#pragma unroll
            for (int j = 0; j < RUN; ++j) {
                uint32_t& word = words_of_run.data[j];
                if constexpr (IN_PAIRS) {
                    pair_t pair = word_pair<scalar_t>(quants_of(run, j) | RAISED_PAIR<scalar_t>) - zero_pair;
                    if constexpr (HAS_SCALES) pair = pair * scale_pair;
                    word = pair.template word<2>(0);
                } else if constexpr (EXPONENT > 0) {
                    using half_quants_t = Quants<half_t, BITS, EXPONENT>;
                    const auto halves =
                        half_quants_t{}.pair(quants_of(run, j), 0, {}) * Vec<half_t, 2>::full(half_quants_t::FACTOR);
                    float low, high;
                    load_pair<half_t>(halves.data, low, high);
                    word = pack_pair_of_plain_nan<scalar_t>(fmaf(low, scale, shift), fmaf(high, scale, shift));
                } else {
                    word = pack_pair_of_plain_nan<scalar_t>(fmaf(number(run, j, 0), scale, shift),
                                                            fmaf(number(run, j, 1), scale, shift));
                }
            }
            auto* const to = stage.at(TILE_M + place.column + piece_t::column_at(c), row / 8) + row % 8;
            *reinterpret_cast<Vec<uint32_t, RUN>*>(to) = words_of_run;
        }
    }
};
