// ggml.cuh: the blocks of GGUF's quantised types, decoded eight elements at a time.
//
// A type is a struct: a block has LENGTH elements in BYTES bytes, at an address that is a multiple of ALIGNMENT.
// decode(block, v, grid, x) sets x to elements 8 v to 8 v + 7 of a block, in float32. Products of scales and codes have
// at most 24 bits and are exact; where a minimum is subtracted, the difference is rounded once. A type with a grid
// reads a copy of its table at `grid`.

#pragma once
#include "ggml_grids.cuh"
#include "packed.cuh"

// The base of the types: no grid, and by default an alignment of two bytes.
template <int ELEMENTS, int SIZE, int ALIGNED = 2>
struct Blocks {
    static constexpr int LENGTH = ELEMENTS, BYTES = SIZE, ALIGNMENT = ALIGNED, GRID_SIZE = 0;
    static DEVICE const uint16_t* table() { return nullptr; }
};

// Eight codes, one in each byte.
template <int ALIGNMENT>
struct Eight {
    uint32_t words[2];

    explicit DEVICE Eight(const uint8_t* address)
        : words{word_at<ALIGNMENT>(address), word_at<ALIGNMENT>(address + 4)} {}
    DEVICE void take(int shift, uint32_t mask) {  // keeps `mask` of each byte, shifted down
        words[0] = words[0] >> shift & mask;
        words[1] = words[1] >> shift & mask;
    }
    DEVICE void add(const Eight& high, int shift) {  // puts the bytes of `high` above the bits of each byte
        words[0] |= high.words[0] << shift;
        words[1] |= high.words[1] << shift;
    }
    DEVICE void add_bits(uint32_t eight, int shift) {  // puts one bit into each byte
        words[0] |= bits_to_bytes(eight) << shift;
        words[1] |= bits_to_bytes(eight >> 4) << shift;
    }
    DEVICE void to_floats(float offset, float (&x)[8]) const {
        bytes_to_floats(words[0], offset, x);
        bytes_to_floats(words[1], offset, x + 4);
    }
    DEVICE void scaled(float scale, float offset, float (&x)[8]) const {
        to_floats(offset, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= scale;
    }
    DEVICE void scaled_and_shifted(float scale, float shift, float (&x)[8]) const {
        to_floats(0.0f, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = fmaf(x[i], scale, shift);
    }
};

// Negates x[i] if bit i of `signs` is set.
DEVICE void apply_signs(uint32_t signs, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(__float_as_uint(x[i]) ^ (signs << (31 - i) & 0x80000000u));
}
// Seven signs as given, and an eighth that makes the number of negative signs even.
DEVICE uint32_t eight_signs(uint32_t seven) { return seven | uint32_t(count_bits(seven) & 1) << 7; }

// Types with blocks of 32 elements: the low nibbles hold the first half of the elements, the high nibbles the second
// half.

template <int ALIGNMENT>
DEVICE Eight<ALIGNMENT> nibbles_of_halves(const uint8_t* codes, uint32_t v) {
    Eight<ALIGNMENT> q(codes + v % 2 * 8);
    q.take(v / 2 * 4, 0x0f0f0f0f);
    return q;
}

struct Q4_0 : Blocks<32, 18> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        nibbles_of_halves<2>(block + 2, v).scaled(half_at(block), 8.0f, x);
    }
};

struct Q4_1 : Blocks<32, 20, 4> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        nibbles_of_halves<4>(block + 4, v).scaled_and_shifted(half_at(block), half_at(block + 2), x);
    }
};

struct Q5_0 : Blocks<32, 22> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        Eight<2> q = nibbles_of_halves<2>(block + 6, v);
        q.add_bits(block[2 + v], 4);
        q.scaled(half_at(block), 16.0f, x);
    }
};

struct Q5_1 : Blocks<32, 24, 8> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        Eight<8> q = nibbles_of_halves<8>(block + 8, v);
        q.add_bits(block[4 + v], 4);
        q.scaled_and_shifted(half_at(block), half_at(block + 2), x);
    }
};

struct Q8_0 : Blocks<32, 34> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        Eight<2> q(block + 2 + 8 * v);
        q.words[0] ^= 0x80808080;
        q.words[1] ^= 0x80808080;
        q.scaled(half_at(block), 128.0f, x);
    }
};

// x = scale * code for the IQ4 types, in which a nibble stands for a code of this table, minus 128.
template <int ALIGNMENT>
DEVICE void scaled_iq4(Eight<ALIGNMENT> nibbles, float scale, float (&x)[8]) {
    constexpr uint32_t table[4] = {0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5};
    nibbles.words[0] = look_up_bytes(nibbles.words[0], table);
    nibbles.words[1] = look_up_bytes(nibbles.words[1], table);
    nibbles.scaled(scale, 128.0f, x);
}

struct IQ4_NL : Blocks<32, 18> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        scaled_iq4(nibbles_of_halves<2>(block + 2, v), half_at(block), x);
    }
};

// Types with blocks of 256 elements: eight sub-blocks of 32 elements, four vectors each. Several sub-blocks share 32
// bytes, and each has some bits of every byte.

struct Q2_K : Blocks<256, 84, 4> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        Eight<4> q(block + 16 + v / 16 * 32 + v % 4 * 8);
        q.take(v / 4 % 4 * 2, 0x03030303);
        const uint32_t scale = block[v / 2];
        q.scaled_and_shifted(half_at(block + 80) * float(scale & 15), -(half_at(block + 82) * float(scale >> 4)), x);
    }
};

struct Q3_K : Blocks<256, 110> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        Eight<2> q(block + 32 + v / 16 * 32 + v % 4 * 8);
        q.take(v / 4 % 4 * 2, 0x03030303);
        Eight<2> high(block + v % 4 * 8);
        high.take(v / 4, 0x01010101);
        q.add(high, 2);
        const uint32_t s = v / 2;
        const uint8_t* scales = block + 96;
        const uint32_t scale = (scales[s % 8] >> s / 8 * 4 & 15) | (scales[8 + s % 4] >> s / 4 * 2 & 3) << 4;
        q.scaled(half_at(block + 108) * float(int(scale) - 32), 4.0f, x);
    }
};

// x = q * scale - minimum for a sub-block of Q4_K and Q5_K. Scale and minimum of a sub-block have six bits each; the
// bits of the last four sub-blocks are spread over the bytes of all sub-blocks.
DEVICE void scaled_k(const Eight<16>& q, const uint8_t* block, uint32_t sub, float (&x)[8]) {
    const uint32_t a = block[4 + sub % 4], b = block[8 + sub % 4], c = block[12 + sub % 4];
    const uint32_t scale = sub < 4 ? a & 63 : (c & 15) | a >> 6 << 4;
    const uint32_t minimum = sub < 4 ? b & 63 : c >> 4 | b >> 6 << 4;
    q.scaled_and_shifted(half_at(block) * float(scale), -(half_at(block + 2) * float(minimum)), x);
}

struct Q4_K : Blocks<256, 144, 16> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        Eight<16> q(block + 16 + v / 8 * 32 + v % 4 * 8);
        q.take(v / 4 % 2 * 4, 0x0f0f0f0f);
        scaled_k(q, block, v / 4, x);
    }
};

struct Q5_K : Blocks<256, 176, 16> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        Eight<16> q(block + 48 + v / 8 * 32 + v % 4 * 8);
        q.take(v / 4 % 2 * 4, 0x0f0f0f0f);
        Eight<16> high(block + 16 + v % 4 * 8);
        high.take(v / 4, 0x01010101);
        q.add(high, 4);
        scaled_k(q, block, v / 4, x);
    }
};

struct Q6_K : Blocks<256, 210> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        Eight<2> q(block + v / 16 * 64 + v / 4 % 2 * 32 + v % 4 * 8);
        q.take(v / 8 % 2 * 4, 0x0f0f0f0f);
        Eight<2> high(block + 128 + v / 16 * 32 + v % 4 * 8);
        high.take(v / 4 % 4 * 2, 0x03030303);
        q.add(high, 4);
        q.scaled(half_at(block + 208) * float(int8_t(block[192 + v / 2])), 32.0f, x);
    }
};

struct IQ4_XS : Blocks<256, 136, 8> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t*, float (&x)[8]) {
        const uint32_t sub = v / 4;
        const uint32_t scale = (block[4 + sub / 2] >> sub % 2 * 4 & 15) | (short_at(block + 2) >> 2 * sub & 3) << 4;
        scaled_iq4(nibbles_of_halves<8>(block + 8 + sub * 16, v % 4), half_at(block) * float(int(scale) - 32), x);
    }
};

// Types with grids: an entry of the grid is eight elements of a vector (IQ2, IQ1) or four elements (IQ3).

template <int SIZE, int ENTRIES, const uint16_t (&GRID)[ENTRIES]>
struct GridBlocks : Blocks<256, SIZE> {
    static constexpr int GRID_SIZE = ENTRIES;
    static DEVICE const uint16_t* table() { return GRID; }
};

// The magnitudes of four elements of an IQ2 grid: levels 0, 1, 2 stand for 8, 25, 43.
DEVICE uint32_t iq2_magnitudes(uint32_t four) {
    const uint32_t levels = crumbs_to_bytes(four & 0xff);
    return levels * 17 + (levels >> 1 & 0x01010101) + 0x08080808;
}
DEVICE void scaled_iq2(uint32_t entry, uint32_t signs, float scale, uint32_t nibble, float (&x)[8]) {
    scale = scale * (0.5f + float(nibble)) * 0.25f;
    bytes_to_floats(iq2_magnitudes(entry), 0.0f, x);
    bytes_to_floats(iq2_magnitudes(entry >> 8), 0.0f, x + 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale;
    apply_signs(signs, x);
}

struct IQ2_XXS : GridBlocks<66, 256, GRID_IQ2_XXS> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t* grid, float (&x)[8]) {
        const uint8_t* sub = block + 2 + v / 4 * 8;
        const uint32_t aux = word_at<2>(sub + 4);
        scaled_iq2(grid[sub[v % 4]], eight_signs(aux >> v % 4 * 7 & 127), half_at(block), aux >> 28, x);
    }
};

struct IQ2_XS : GridBlocks<74, 512, GRID_IQ2_XS> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t* grid, float (&x)[8]) {
        const uint32_t code = short_at(block + 2 + 2 * v);
        const uint32_t scale = block[66 + v / 4] >> v / 2 % 2 * 4 & 15;
        scaled_iq2(grid[code & 511], eight_signs(code >> 9), half_at(block), scale, x);
    }
};

struct IQ2_S : GridBlocks<82, 1024, GRID_IQ2_S> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t* grid, float (&x)[8]) {
        const uint32_t index = block[2 + v] | (uint32_t(block[66 + v / 4]) << (8 - v % 4 * 2) & 0x300);
        const uint32_t scale = block[74 + v / 4] >> v / 2 % 2 * 4 & 15;
        scaled_iq2(grid[index], block[34 + v], half_at(block), scale, x);
    }
};

// The magnitudes of four elements of the IQ3_XXS grid: 4 + 8 * level, but 62 for level 7.
DEVICE uint32_t iq3_xxs_magnitudes(uint32_t entry) {
    const uint32_t levels = nibbles_to_bytes(entry);
    return levels * 8 + 0x04040404 + ((levels + 0x01010101) >> 2 & 0x02020202);
}

struct IQ3_XXS : GridBlocks<98, 256, GRID_IQ3_XXS> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t* grid, float (&x)[8]) {
        const uint32_t aux = word_at<2>(block + 66 + v / 4 * 4);
        const float scale = half_at(block) * (0.5f + float(aux >> 28)) * 0.5f;
        bytes_to_floats(iq3_xxs_magnitudes(grid[block[2 + 2 * v]]), 0.0f, x);
        bytes_to_floats(iq3_xxs_magnitudes(grid[block[3 + 2 * v]]), 0.0f, x + 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= scale;
        apply_signs(eight_signs(aux >> v % 4 * 7 & 127), x);
    }
};

struct IQ3_S : GridBlocks<110, 512, GRID_IQ3_S> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t* grid, float (&x)[8]) {
        const uint32_t high = uint32_t(block[66 + v / 4]) << (8 - v % 4 * 2);
        const float scale = half_at(block) * float(1 + 2 * (block[106 + v / 8] >> v / 4 % 2 * 4 & 15));
        bytes_to_floats(nibbles_to_bytes(grid[block[2 + 2 * v] | (high & 256)]) * 2 + 0x01010101, 0.0f, x);
        bytes_to_floats(nibbles_to_bytes(grid[block[3 + 2 * v] | (high >> 1 & 256)]) * 2 + 0x01010101, 0.0f, x + 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= scale;
        apply_signs(block[74 + v], x);
    }
};

// x = scale * (level - 1 + 1/8), or scale * (level - 1 - 1/8) if `lower`.
DEVICE void scaled_iq1(uint32_t entry, bool lower, float scale, float (&x)[8]) {
    bytes_to_floats(crumbs_to_bytes(entry & 0xff) * 8, lower ? 9.0f : 7.0f, x);
    bytes_to_floats(crumbs_to_bytes(entry >> 8) * 8, lower ? 9.0f : 7.0f, x + 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale * 0.125f;
}

struct IQ1_S : GridBlocks<50, 2048, GRID_IQ1> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t* grid, float (&x)[8]) {
        const uint32_t high = short_at(block + 34 + v / 4 * 2);
        const uint32_t index = block[2 + v] | (high >> v % 4 * 3 & 7) << 8;
        scaled_iq1(grid[index], high & 0x8000, half_at(block) * float(2 * (high >> 12 & 7) + 1), x);
    }
};

struct IQ1_M : GridBlocks<56, 2048, GRID_IQ1> {
    static DEVICE void decode(const uint8_t* block, uint32_t v, const uint16_t* grid, float (&x)[8]) {
        // The high nibbles of four 16-bit words are the scale of the block; their low bits are scales of 16 elements
        // each.
        uint16_t bits = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) bits |= (short_at(block + 48 + 2 * i) >> 12) << 4 * i;
        const float d = half_at(reinterpret_cast<const uint8_t*>(&bits));
        const uint32_t scale = short_at(block + 48 + v / 8 * 2) >> v / 2 % 4 * 3 & 7;
        const uint32_t high = block[32 + v / 2] >> v % 2 * 4;
        scaled_iq1(grid[block[v] | (high & 7) << 8], high & 8, d * float(2 * scale + 1), x);
    }
};
