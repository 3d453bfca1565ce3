// packed_layout.cuh: what the layouts of packed weights share. A layout is a struct in a header of the same name.
//
// Kernels include the header that the constant LAYOUT names, such as layout_marlin.cuh, as LAYOUT.cuh. It opens with a
// picture of the weight's bytes. pyops/ops/_shared/packed_layouts.py declares the layouts, without `layout_` before
// their names. `LAYOUT<BITS>` has a part for each kind of kernel; a layout lacks the parts of kernels that do not read
// it.
//
//     quant, element       a quant by row and column, and the row and column of a field of a word, for
//                          dequantize_packed.cu and repack_weight.cu. `element`, of the layouts that the library packs
//                          into, combines disjoint bits by `|`, from which the compiler sees which fields come from one
//                          word.
//     zero_place           the index of a column's packed zero point within its group
//     TmaBox, WgmmaQuants  the coordinates of a box of ROWS rows, and the register fragments of WGMMAs, for
//                          wq_gemm_sm90.cu: packed_weight.cuh
//     MmaUnit              the register fragments of mma.sync, for wq_gemm_sm80.cu: wq_fragment.cuh
//     FewRows              the reads of wq_gemm_sm90_small_m.cu, which also takes TmaBox and MmaUnit
//     Piece                four words and their position in a tile, for wq_gemm_cdna.cu: packed_tile.cuh
//
// Rows and columns are 32-bit, offsets 64-bit.
#pragma once
#include "column_permutation.cuh"
#include "vec.cuh"

// The size of a weight. layout_gptq only: the strides, in words, of rows (word_stride) and columns (word_step) of
// words.
struct PackedSize {
    uint32_t rows, columns;
    int64_t word_stride, word_step;
};
struct Element { uint32_t k, n; };

template <int BITS> constexpr uint32_t FIELD_MASK = (1u << BITS) - 1;

// The quant that begins at bit `bit` of a bit string, stored in words with stride `stride`.
template <int BITS>
DEVICE uint32_t quant_of_string(const uint32_t* words, uint64_t bit, int64_t stride) {
    const uint32_t* word = words + int64_t(bit / 32) * stride;
    const int shift = int(bit % 32);
    uint32_t quant = *word >> shift;
    if (32 % BITS != 0 && shift + BITS > 32) quant |= word[stride] << (32 - shift);
    return quant & FIELD_MASK<BITS>;
}

// The field index of column n in words of FIELDS columns that store even columns first.
template <int FIELDS> DEVICE constexpr uint32_t even_first(uint32_t n) {
    return n / FIELDS * FIELDS + n % FIELDS / 2 + n % 2 * (FIELDS / 2);
}

// A lane has four words of a Marlin tile with 4-bit quants, four pairs of words with 8-bit quants.
template <int BITS> constexpr int MARLIN_TILE_WORDS = 32 * BITS;
template <int BITS>
DEVICE uint32_t quant_of_tile(const uint32_t* words, int64_t tile, int lane, int word, int half, int field) {
    const int at = lane * BITS + (BITS == 4 ? word : word * 2 + half);
    return words[tile * MARLIN_TILE_WORDS<BITS> + at] >> field * BITS & FIELD_MASK<BITS>;
}

// The 2:4 metadata of a quad (4 rows of a column): its two stored rows, as first | second << 2. A word has four quads.
DEVICE uint32_t places_of_quad(const uint16_t* places, uint32_t columns, uint32_t quad, uint32_t n) {
    uint32_t line = (n & ~63u) + n % 2 * 2 + n % 8 / 4 + n % 4 / 2 * 32 + n % 64 / 8 * 4, word = quad / 4;
    if (line % 2 != word % 2) {  // in each 2 x 2 square of words, the two off the diagonal are swapped
        line ^= 1;
        word ^= 1;
    }
    return places[int64_t(word / 2) * 2 * columns + 2 * line + word % 2] >> int(quad % 4) * 4 & 15;
}

// The order of the rows of a that the quants of a lane multiply in wq_gemm_sm80.cu (`Rows` of wq_fragment.cuh).
enum RowOrder {
    rows_of_fragment,       // those of a B fragment, as ldmatrix loads it
    rows_in_pairs,          // four adjacent rows: the first two, then the last two
    rows_alternating,       // four adjacent rows: the first and the third, then the second and the fourth
    rows_of_lane,           // all rows of a unit that the lane holds are adjacent: pairs of adjacent ones
    rows_of_lane_in_halves  // the same rows: pairs of one of their first half and one of their second half
};

// The MmaUnit of a layout, with the values of most layouts. A unit is the WORDS packed words that each lane of a warp
// has of consecutive rows. Quants are stored in lines along K; a unit takes pieces of 16 bytes from each of LINES
// lines.
template <int TILE_N>
struct AnyMmaUnit {
    static constexpr int WORDS = 8, UNITS = 4;  // words of a lane in a unit; units of a k-tile
    static constexpr int SPREAD = 1;            // rows of the weight per stored row
    static constexpr int MOST_COLUMNS = 64;     // most columns of a tile
    static constexpr int LINES = 1;
    static constexpr int LINE_WORDS = 0;    // words of a unit in a line of a column block; 0: a line has all columns
    static constexpr int COPY_LINES = 8;    // with LINE_WORDS: lines of one copy of all lanes
    static constexpr bool K_MAJOR = false;  // whether scales and zero points are [N, groups], too
    static constexpr RowOrder ROWS = rows_of_fragment;
    static constexpr bool GROUPS_OF_16 = false;  // whether a group may end after any 16 rows, or only after a unit
    // Swizzles against bank conflicts: NEIGHBOURS if each lane reads two adjacent pieces, SIXTEENS if the lanes read
    // two pieces of every sixteen.
    static constexpr bool NEIGHBOURS = false, SIXTEENS = false;
    static constexpr int READ = 4;  // words that a lane reads at a time
    static constexpr bool WORD_OF_T =
        false;  // with READ 1, whether lane 4g + t reads word t of its pieces, not word g % 4
    // HELD: words between the pieces of a lane, which lie in one line; 0: quants are not held.
    static constexpr int HELD_WORDS = 0;
    // Whether words read ahead for all units of a k-tile would not fit in registers.
    static constexpr bool READS_IN_ORDER = false;

    // The column, within the warp's tile, of block `tile` of 16 columns and half h, for lane 4g + t.
    static DEVICE constexpr int column(int g, int tile, int h) { return 16 * tile + 8 * h + g; }
    // The piece of read i of a lane.
    static DEVICE int piece(int i) {
        const int lane = threadIdx.x % 32;
        return 32 * i + lane;
    }
    // The factor by which `pair` is too large.
    template <typename Decode>
    static constexpr float factor(int) {
        return 1.0f;
    }
};
