// packed_layout.cuh: the index arithmetic of the layouts of packed weights, for quants and for zero points.
//
// pyops/ops/_shared/packed_layouts.py describes the layouts under the same names. packed_...::quant reads the quant at
// row k and column n of a weight. The layouts that the library packs into also have the inverse, ::element: the row and
// column of a field of a word. It combines disjoint bits by `|`, from which the compiler sees which fields come from
// one word of the layout that is read. Rows and columns are 32-bit, offsets 64-bit.

#pragma once
#include "column_permutation.cuh"
#include "vec.cuh"

// The size of a weight. packed_gptq only: the strides, in words, of rows (word_stride) and columns (word_step) of
// words.
struct PackedSize {
    uint32_t rows, columns;
    int64_t word_stride, word_step;
};
struct Element { uint32_t k, n; };

template <int BITS> constexpr uint32_t QUANT_MASK = (1u << BITS) - 1;

// The quant that begins at bit `bit` of a bit string, stored in words with stride `stride`.
template <int BITS>
DEVICE uint32_t quant_of_string(const uint32_t* words, uint64_t bit, int64_t stride) {
    const uint32_t* word = words + int64_t(bit / 32) * stride;
    const int shift = int(bit % 32);
    uint32_t quant = *word >> shift;
    if (32 % BITS != 0 && shift + BITS > 32) quant |= word[stride] << (32 - shift);
    return quant & QUANT_MASK<BITS>;
}

// The field index of column n in words of FIELDS columns that store even columns first.
template <int FIELDS> DEVICE constexpr uint32_t even_first(uint32_t n) {
    return n / FIELDS * FIELDS + n % FIELDS / 2 + n % 2 * (FIELDS / 2);
}

template <int BITS> struct packed_awq {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        return quant_of_string<BITS>(words, (uint64_t(k) * size.columns + even_first<32 / BITS>(n)) * BITS, 1);
    }
};

template <int BITS> struct packed_gptq {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        return quant_of_string<BITS>(words + n * size.word_step, uint64_t(k) * BITS, size.word_stride);
    }
};

template <int BITS> struct packed_exllama {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        constexpr int FIELDS = BITS == 3 ? 32 : 32 / BITS, UNIT_WORDS = BITS == 3 ? 3 : 1;
        const uint32_t* unit = words + int64_t(k / FIELDS) * UNIT_WORDS * size.columns + n;
        const int field = int(k % FIELDS), half = field % 2 * 16;
        if constexpr (BITS == 8) {
            return *unit >> field * 8 & 255;
        } else if constexpr (BITS == 3) {  // a word has ten quants, and at the top of its halves a bit of the last two
            if (field < 30) return unit[int64_t(field / 10) * size.columns] >> (half + field % 10 / 2 * 3) & 7;
            uint32_t quant = 0;
#pragma unroll
            for (int j = 0; j < 3; ++j) quant |= (unit[int64_t(j) * size.columns] >> (half + 15) & 1) << j;
            return quant;
        } else {
            return *unit >> (half + field / 2 * BITS) & QUANT_MASK<BITS>;
        }
    }
};

// A lane has four words of a Marlin tile with 4-bit quants, four pairs of words with 8-bit quants.
template <int BITS> constexpr int MARLIN_TILE_WORDS = 32 * BITS;
template <int BITS>
DEVICE uint32_t quant_of_tile(const uint32_t* words, int64_t tile, int lane, int word, int half, int field) {
    const int at = lane * BITS + (BITS == 4 ? word : word * 2 + half);
    return words[tile * MARLIN_TILE_WORDS<BITS> + at] >> field * BITS & QUANT_MASK<BITS>;
}

template <int BITS> struct packed_marlin {
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
};

template <int BITS> struct packed_marlin_8 {
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
};

// If the columns are an odd multiple of 16, the last 16 are half a tile, with two words per lane.
template <int BITS> struct packed_w4a8 {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        const uint32_t row = k % 32, column = n % 32, lane = column % 8 * 4 + row % 16 / 4;
        const int64_t tile = int64_t(k / 32) * size.columns * BITS + n / 32 * MARLIN_TILE_WORDS<BITS>;
        const uint32_t word = words[tile + lane * lane_words(size, n / 32) + column / 8];
        return word >> (row / 16 * 4 + row % 4) * BITS & QUANT_MASK<BITS>;
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
};

// 2:4 sparsity: k counts the stored (non-zero) rows.
template <int BITS> struct packed_marlin_24 {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        const int row = int(k % 16), column = int(n % 64), half = column % 8 / 4;
        const int field = BITS == 4 ? row % 2 * 4 + half * 2 + row / 8 : row % 2 * 2 + row / 8;
        const int64_t tile = int64_t(k / 16) * (size.columns / 64) + n / 64;
        return quant_of_tile<BITS>(words, tile, column / 8 * 4 + row % 8 / 2, column % 4, half, field);
    }
};

// The 2:4 metadata of a quad (4 rows of a column): its two stored rows, as first | second << 2. A word has four quads.
DEVICE uint32_t places_of_quad(const uint16_t* places, uint32_t columns, uint32_t quad, uint32_t n) {
    uint32_t line = (n & ~63u) + n % 2 * 2 + n % 8 / 4 + n % 4 / 2 * 32 + n % 64 / 8 * 4, word = quad / 4;
    if (line % 2 != word % 2) {  // in each 2 x 2 square of words, the two off the diagonal are swapped
        line ^= 1;
        word ^= 1;
    }
    return places[int64_t(word / 2) * 2 * columns + 2 * line + word % 2] >> int(quad % 4) * 4 & 15;
}

template <int BITS> struct packed_bytes {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        return reinterpret_cast<const uint8_t*>(words)[int64_t(k) * size.columns + n];
    }
};

template <int BITS> struct packed_n32k16 {
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
};

// The index of column n's zero point within its group.
template <int BITS> DEVICE constexpr uint32_t zero_gptq(uint32_t n) { return n; }
template <int BITS> DEVICE constexpr uint32_t zero_awq(uint32_t n) { return even_first<32 / BITS>(n); }
template <int BITS> DEVICE constexpr uint32_t zero_marlin(uint32_t n) {
    return even_first<32 / BITS>(uint32_t(column_marlin_64(n)));
}
template <int BITS> DEVICE constexpr uint32_t zero_marlin_8(uint32_t n) { return uint32_t(column_marlin_64(n)); }
