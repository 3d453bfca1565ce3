// ggml.cuh: the block formats of GGUF's quantized types, decoded four or eight elements at a time.
//
// A type is a struct: a block has LENGTH elements in BYTES bytes, at an address that is a multiple of ALIGNMENT. Every
// GROUP elements of a block share a scale and a minimum:
//
//     element = (quant - OFFSET) * scale - minimum
//
//     quants(block, q, grid)    quants of elements 4 q to 4 q + 3, one per byte, at most LARGEST, which is 2^i - 1
//     quants_in_place(block, q, grid)    if ODD_FACTOR > 1: the same, but quants of odd groups times ODD_FACTOR
//     scale(block, g)          scale of group g, in float32; exact
//     minimum(block, g)        minimum of group g, in float32; exact; 0 unless HAS_MINIMUM
//
// A type with a grid reads a copy of its table, GRID_SIZE entries, at `grid`. A scale times a quant has at most 24 bits
// and is exact.

#pragma once
#include "ggml_grids.cuh"
#include "packed.cuh"

// The base of the types, with the values that most of them share.
template <int ELEMENTS, int SIZE, int ALIGNED = 2>
struct Blocks {
    static constexpr int LENGTH = ELEMENTS, BYTES = SIZE, ALIGNMENT = ALIGNED, GRID_SIZE = 0;
    static constexpr int GROUP = 32, OFFSET = 0, LARGEST = 127, ODD_FACTOR = 1;
    static constexpr bool HAS_MINIMUM = false;
    static DEVICE const uint16_t* table() { return nullptr; }
    static DEVICE float minimum(const uint8_t*, uint32_t) { return 0.0f; }
};

// Dequantizes: x = elements 8 v to 8 v + 7 of a block, in float32. With a minimum, fmaf rounds once.
template <typename FORMAT_T>
DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t* grid, float (&x)[8]) {
    const uint32_t group = v * 8 / FORMAT_T::GROUP;
    const float scale = FORMAT_T::scale(block, group), minimum = FORMAT_T::minimum(block, group);
    bytes_to_floats(FORMAT_T::quants(block, 2 * v, grid), FORMAT_T::OFFSET, x);
    bytes_to_floats(FORMAT_T::quants(block, 2 * v + 1, grid), FORMAT_T::OFFSET, x + 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if constexpr (FORMAT_T::HAS_MINIMUM) x[i] = fmaf(x[i], scale, -minimum);
        else x[i] *= scale;
    }
}

constexpr uint32_t ONES = 0x01010101;  // a 1 in each byte

// Types with blocks of 32 elements: the low nibbles hold the first half of the elements, the high nibbles the second
// half.

template <int ALIGNMENT>
DEVICE uint32_t nibbles_of_halves(const uint8_t* quants, uint32_t q) {
    return word_at<ALIGNMENT>(quants + q % 4 * 4) >> q / 4 * 4 & 15 * ONES;
}
// Returns bits 4 q to 4 q + 3 of a bit array, each as the fifth bit of a byte.
DEVICE uint32_t fifth_bits(const uint8_t* bits, uint32_t q) { return bits_to_bytes(bits[q / 2] >> q % 2 * 4) << 4; }

struct Q4_0 : Blocks<32, 18> {
    static constexpr int OFFSET = 8, LARGEST = 15;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t*) {
        return nibbles_of_halves<2>(block + 2, q);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t) { return half_at(block); }
};

struct Q4_1 : Blocks<32, 20, 4> {
    static constexpr int LARGEST = 15;
    static constexpr bool HAS_MINIMUM = true;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t*) {
        return nibbles_of_halves<4>(block + 4, q);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t) { return half_at(block); }
    static DEVICE float minimum(const uint8_t* block, uint32_t) { return -half_at(block + 2); }
};

struct Q5_0 : Blocks<32, 22> {
    static constexpr int OFFSET = 16, LARGEST = 31;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t*) {
        return nibbles_of_halves<2>(block + 6, q) | fifth_bits(block + 2, q);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t) { return half_at(block); }
};

struct Q5_1 : Blocks<32, 24, 8> {
    static constexpr int LARGEST = 31;
    static constexpr bool HAS_MINIMUM = true;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t*) {
        return nibbles_of_halves<8>(block + 8, q) | fifth_bits(block + 4, q);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t) { return half_at(block); }
    static DEVICE float minimum(const uint8_t* block, uint32_t) { return -half_at(block + 2); }
};

struct Q8_0 : Blocks<32, 34> {
    static constexpr int OFFSET = 128, LARGEST = 255;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t*) {
        return word_at<2>(block + 2 + 4 * q) ^ 128 * ONES;
    }
    static DEVICE float scale(const uint8_t* block, uint32_t) { return half_at(block); }
};

// The IQ4 types: a nibble, stored as in the types with blocks of 32 elements, is an index into this table of quants.
template <int ALIGNMENT>
DEVICE uint32_t iq4_quants(const uint8_t* nibbles, uint32_t q) {
    constexpr uint32_t table[4] = {0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5};
    return look_up_nibbles(word_at<ALIGNMENT>(nibbles + q % 4 * 4), q / 4 != 0, table);
}

struct IQ4_NL : Blocks<32, 18> {
    static constexpr int OFFSET = 128, LARGEST = 255;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t*) {
        return iq4_quants<2>(block + 2, q);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t) { return half_at(block); }
};

// Types with blocks of 256 elements: eight sub-blocks of 32 elements. Several sub-blocks share 32 bytes: each sub-block
// has some bits of every byte.

struct Q2_K : Blocks<256, 84, 4> {
    static constexpr int GROUP = 16, LARGEST = 3;
    static constexpr bool HAS_MINIMUM = true;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t*) {
        return word_at<4>(block + 16 + q / 32 * 32 + q % 8 * 4) >> q / 8 % 4 * 2 & 3 * ONES;
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) { return half_at(block + 80) * float(block[g] & 15); }
    static DEVICE float minimum(const uint8_t* block, uint32_t g) { return half_at(block + 82) * float(block[g] >> 4); }
};

struct Q3_K : Blocks<256, 110> {
    static constexpr int GROUP = 16, OFFSET = 4, LARGEST = 7;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t*) {
        const uint32_t low = word_at<2>(block + 32 + q / 32 * 32 + q % 8 * 4) >> q / 8 % 4 * 2 & 3 * ONES;
        return low | (word_at<2>(block + q % 8 * 4) >> q / 8 & ONES) << 2;
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) {
        const uint8_t* scales = block + 96;
        const uint32_t code = (scales[g % 8] >> g / 8 * 4 & 15) | (scales[8 + g % 4] >> g / 4 * 2 & 3) << 4;
        return half_at(block + 108) * float(int(code) - 32);
    }
};

// Scale and minimum of the groups of Q4_K and Q5_K: six bits each, in twelve bytes after two half-precision numbers.
// The bits of the last four groups are spread over all twelve bytes.
struct SixBits {
    static DEVICE uint32_t word(const uint8_t* block, int i) { return word_at<4>(block + 4 + 4 * i); }
    // Returns the six bits of group g as a float; they are in byte g % 4. In the first four groups `own` holds all six
    // bits. In the last four groups `low` holds the lower four bits, and `own` the upper two, above the six bits of the
    // earlier group. The ulp of 2^23 is 1, so OR-ing the six bits into its bits adds them. Multiplying by the scale
    // before the subtraction would make NaN of infinite scales.
    static DEVICE float six_bits(uint32_t own, uint32_t low, uint32_t g) {
        const bool is_first = (g / 2 & 2) == 0;  // g / 2: the compiler sees that two adjacent groups agree
        const uint32_t upper = is_first ? own & 48 * ONES : own >> 2 & 48 * ONES;
        const uint32_t four = upper | ((is_first ? own : low) & 15 * ONES);
        return __uint_as_float(byte_perm(four, 0x4b000000, 0x7540 + (g & 3))) - 8388608.0f;
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) {
        return half_at(block) * six_bits(word(block, 0), word(block, 2), g);
    }
    static DEVICE float minimum(const uint8_t* block, uint32_t g) {
        return half_at(block + 2) * six_bits(word(block, 1), word(block, 2) >> 4, g);
    }
};

struct Q4_K : Blocks<256, 144, 16> {
    static constexpr int LARGEST = 15;
    static constexpr bool HAS_MINIMUM = true;
    static constexpr int ODD_FACTOR = 16;
    static DEVICE uint32_t quants_in_place(const uint8_t* block, uint32_t q, const uint16_t*) {
        return word_at<16>(block + 16 + q / 16 * 32 + q % 8 * 4) & 15 * ONES << q / 8 % 2 * 4;
    }
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t* grid) {
        return quants_in_place(block, q, grid) >> q / 8 % 2 * 4;
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) { return SixBits::scale(block, g); }
    static DEVICE float minimum(const uint8_t* block, uint32_t g) { return SixBits::minimum(block, g); }
};

struct Q5_K : Blocks<256, 176, 16> {
    static constexpr int LARGEST = 31;
    static constexpr bool HAS_MINIMUM = true;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t*) {
        const uint32_t low = word_at<16>(block + 48 + q / 16 * 32 + q % 8 * 4) >> q / 8 % 2 * 4 & 15 * ONES;
        return low | (word_at<16>(block + 16 + q % 8 * 4) >> q / 8 & ONES) << 4;
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) { return SixBits::scale(block, g); }
    static DEVICE float minimum(const uint8_t* block, uint32_t g) { return SixBits::minimum(block, g); }
};

struct Q6_K : Blocks<256, 210> {
    static constexpr int GROUP = 16, OFFSET = 32, LARGEST = 63;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t*) {
        const uint32_t low = word_at<2>(block + q / 32 * 64 + q % 16 * 4) >> q / 16 % 2 * 4 & 15 * ONES;
        return low | (word_at<2>(block + 128 + q / 32 * 32 + q % 8 * 4) >> q / 8 % 4 * 2 & 3 * ONES) << 4;
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) {
        return half_at(block + 208) * float(int8_t(block[192 + g]));
    }
};

struct IQ4_XS : Blocks<256, 136, 8> {
    static constexpr int OFFSET = 128, LARGEST = 255;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t*) {
        return iq4_quants<8>(block + 8 + q / 8 * 16, q % 8);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) {
        const uint32_t code = (block[4 + g / 2] >> g % 2 * 4 & 15) | (short_at(block + 2) >> 2 * g & 3) << 4;
        return half_at(block) * float(int(code) - 32);
    }
};

// Types with grids: a grid entry holds eight elements (IQ2, IQ1) or four elements (IQ3).

template <int SIZE, int ENTRIES, const uint16_t (&GRID)[ENTRIES]>
struct GridBlocks : Blocks<256, SIZE> {
    static constexpr int GRID_SIZE = ENTRIES;
    static DEVICE const uint16_t* table() { return GRID; }
};

// Quants 64 + magnitude, or 64 - magnitude where a bit of `signs` is set; magnitudes are below 64.
DEVICE uint32_t signed_quants(uint32_t magnitudes, uint32_t signs) {
    const uint32_t is_negative = bits_to_bytes(signs) * 0xff;
    return ((64 * ONES + magnitudes) & ~is_negative) | ((64 * ONES - magnitudes) & is_negative);
}
// Adds an eighth sign to seven, so that the number of negative signs is even.
DEVICE uint32_t eight_signs(uint32_t seven) { return seven | uint32_t(count_bits(seven) & 1) << 7; }

// Quants of one half (the upper one if `odd`) of an entry of an IQ2 grid: levels 0, 1, 2 are magnitudes 8, 25, 43.
DEVICE uint32_t iq2_quants(uint32_t entry, uint32_t eight, uint32_t odd) {
    const uint32_t levels = crumbs_to_bytes(entry >> odd * 8 & 0xff);
    return signed_quants(levels * 17 + (levels >> 1 & ONES) + 8 * ONES, eight >> odd * 4);
}
DEVICE float iq2_scale(float scale, uint32_t nibble) { return scale * (0.5f + float(nibble)) * 0.25f; }

struct IQ2_XXS : GridBlocks<66, 256, GRID_IQ2_XXS> {
    static constexpr int OFFSET = 64;
    static DEVICE uint32_t aux(const uint8_t* block, uint32_t g) { return word_at<2>(block + 6 + g * 8); }
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t* grid) {
        const uint32_t g = q / 8, v = q / 2 % 4;
        return iq2_quants(grid[block[2 + 8 * g + v]], eight_signs(aux(block, g) >> v * 7 & 127), q % 2);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) {
        return iq2_scale(half_at(block), aux(block, g) >> 28);
    }
};

struct IQ2_XS : GridBlocks<74, 512, GRID_IQ2_XS> {
    static constexpr int GROUP = 16, OFFSET = 64;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t* grid) {
        const uint32_t code = short_at(block + 2 + q / 2 * 2);
        return iq2_quants(grid[code & 511], eight_signs(code >> 9), q % 2);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) {
        return iq2_scale(half_at(block), block[66 + g / 2] >> g % 2 * 4 & 15);
    }
};

struct IQ2_S : GridBlocks<82, 1024, GRID_IQ2_S> {
    static constexpr int GROUP = 16, OFFSET = 64;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t* grid) {
        const uint32_t v = q / 2, index = block[2 + v] | (uint32_t(block[66 + v / 4]) << (8 - v % 4 * 2) & 0x300);
        return iq2_quants(grid[index], block[34 + v], q % 2);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) {
        return iq2_scale(half_at(block), block[74 + g / 2] >> g % 2 * 4 & 15);
    }
};

struct IQ3_XXS : GridBlocks<98, 256, GRID_IQ3_XXS> {
    static constexpr int OFFSET = 64;
    static DEVICE uint32_t aux(const uint8_t* block, uint32_t g) { return word_at<2>(block + 66 + g * 4); }
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t* grid) {
        // Level l is magnitude 4 + 8 l, except level 7, which is 62.
        const uint32_t levels = nibbles_to_bytes(grid[block[2 + q]]);
        const uint32_t magnitudes = levels * 8 + 4 * ONES + ((levels + ONES) >> 2 & 2 * ONES);
        return signed_quants(magnitudes, eight_signs(aux(block, q / 8) >> q / 2 % 4 * 7 & 127) >> q % 2 * 4);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) {
        return half_at(block) * (0.5f + float(aux(block, g) >> 28)) * 0.5f;
    }
};

struct IQ3_S : GridBlocks<110, 512, GRID_IQ3_S> {
    static constexpr int OFFSET = 64;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t* grid) {
        const uint32_t index = block[2 + q] | (uint32_t(block[66 + q / 8]) << (8 - q % 8) & 256);
        return signed_quants(nibbles_to_bytes(grid[index]) * 2 + ONES, block[74 + q / 2] >> q % 2 * 4);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) {
        return half_at(block) * float(1 + 2 * (block[106 + g / 2] >> g % 2 * 4 & 15));
    }
};

// The IQ1 types: an element is its level - 1 + 1/8, or - 1/8 if `lower`; quants count eighths.
DEVICE uint32_t iq1_quants(uint32_t entry, uint32_t odd, bool lower) {
    return crumbs_to_bytes(entry >> odd * 8 & 0xff) * 8 + (lower ? 0 : 2 * ONES);
}

struct IQ1_S : GridBlocks<50, 2048, GRID_IQ1> {
    static constexpr int OFFSET = 9, LARGEST = 31;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t* grid) {
        const uint32_t v = q / 2, high = short_at(block + 34 + v / 4 * 2);
        return iq1_quants(grid[block[2 + v] | (high >> v % 4 * 3 & 7) << 8], q % 2, high & 0x8000);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) {
        return half_at(block) * float(2 * (short_at(block + 34 + g * 2) >> 12 & 7) + 1) * 0.125f;
    }
};

struct IQ1_M : GridBlocks<56, 2048, GRID_IQ1> {
    static constexpr int GROUP = 16, OFFSET = 9, LARGEST = 31;
    static DEVICE uint32_t quants(const uint8_t* block, uint32_t q, const uint16_t* grid) {
        const uint32_t v = q / 2, high = block[32 + v / 2] >> v % 2 * 4;
        return iq1_quants(grid[block[v] | (high & 7) << 8], q % 2, high & 8);
    }
    static DEVICE float scale(const uint8_t* block, uint32_t g) {
        // The high nibbles of four 16-bit words form the scale of the block; their low bits are the scales of the
        // groups.
        uint16_t bits = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) bits |= (short_at(block + 48 + 2 * i) >> 12) << 4 * i;
        const uint32_t code = short_at(block + 48 + g / 4 * 2) >> g % 4 * 3 & 7;
        return half_at(reinterpret_cast<const uint8_t*>(&bits)) * float(2 * code + 1) * 0.125f;
    }
};
