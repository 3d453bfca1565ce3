// packed.cuh: small integers that are packed into 32-bit words, and how they become floats.

#pragma once
#include "vec.cuh"

// The bias that raised_pair adds, once in each half of a word. Its ulp is 1, so OR-ing a small integer into its bits
// adds the integer.
template <typename T> constexpr uint32_t RAISED_PAIR = 0;
template <> constexpr uint32_t RAISED_PAIR<half_t> = 0x64006400;  // 1024
template <> constexpr uint32_t RAISED_PAIR<bf16_t> = 0x43004300;  // 128

// Converts two nibbles to T, plus the bias RAISED_PAIR, which cancels in a difference of two such numbers. `nibbles`
// has them in the low bits of its halves; its other bits are 0.
template <typename T>
DEVICE void raised_pair(T* out, uint32_t nibbles) {
    if constexpr (RAISED_PAIR<T> != 0) {
        *reinterpret_cast<uint32_t*>(out) = nibbles | RAISED_PAIR<T>;
    } else {
        store_pair<T>(out, float(nibbles & 0xffff), float(nibbles >> 16));
    }
}

// Columns first ... first + N - 1 (`first` is even) of the eight columns in an AWQ word, with the bias of raised_pair.
// The nibbles of the word, from the lowest, are columns 0 2 4 6 1 3 5 7.
template <typename T, int N>
DEVICE Vec<T, N> awq_columns(uint32_t word, int first) {
    Vec<T, N> result;
#pragma unroll
    for (int i = 0; i < N; i += 2) raised_pair<T>(result.data + i, word >> 2 * (first + i) & 0x000f000f);
    return result;
}

// Converts eight int4 values from the encoding of `marlin_int4_fp8_preprocess` (0 ... 7 for 0 ... 7, and 8 ... 15 for
// -1 ... -8) to value + 8.
DEVICE uint32_t recoded_plus_8(uint32_t codes) {
    const uint32_t signs = codes & 0x88888888;
    return codes ^ 0x88888888 ^ (signs - (signs >> 3));
}

// integer - offset, exactly, for integers below 2^22: the ulp of 2^23 is 1, so OR-ing an integer into its bits adds the
// integer.
DEVICE float integer_to_float(uint32_t integer, float offset) {
    return __uint_as_float(integer | 0x4b000000) - (8388608.0f + offset);
}

// The value of an e2m1 number. Each digit of the constant is twice a magnitude: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
DEVICE float e2m1_to_float(uint32_t code) {
    const float twice = float(int(0xc8643210u >> (code & 7u) * 4 & 15u));
    return (code & 8u ? -0.5f : 0.5f) * twice;
}

// x[i] = byte i of a word - offset, exactly; the offset is an integer.
DEVICE void bytes_to_floats(uint32_t word, float offset, float* x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // The ulp of 2^23 is 1, so OR-ing a byte into its bits adds the byte.
        x[i] = __uint_as_float(byte_perm(word, 0x4b000000, 0x7540 + i)) - (8388608.0f + offset);
    }
}

// Spreads four integers of 1, 2 or 4 bits, from the low end of a word, over the four bytes of the result.
DEVICE uint32_t bits_to_bytes(uint32_t four) { return (four & 15) * 0x00204081 & 0x01010101; }
DEVICE uint32_t crumbs_to_bytes(uint32_t four) {
    four = (four | four << 12) & 0x000f000f;
    return (four | four << 6) & 0x03030303;
}
DEVICE uint32_t nibbles_to_bytes(uint32_t four) {
    four = (four | four << 8) & 0x00ff00ff;
    return (four | four << 4) & 0x0f0f0f0f;
}

// Four look-ups in a table of 16 bytes: byte i of the result is the table entry for nibble 2 i (2 i + 1 if `upper`) of
// `word`. If a caller asks for both nibbles, the compiler computes their common part once.
DEVICE uint32_t look_up_nibbles(uint32_t word, bool upper, const uint32_t (&table)[4]) {
#if PYOPS_HIP
    // HIP's __byte_perm passes a non-constant selector through memory.
    const uint32_t indices = word >> 4 * upper & 0x0f0f0f0f, eighth = indices & 0x07070707;
    const uint32_t low = __builtin_amdgcn_perm(table[1], table[0], eighth);
    const uint32_t high = __builtin_amdgcn_perm(table[3], table[2], eighth);
    const uint32_t is_high = (indices >> 3 & 0x01010101) * 0xff;
    return (low & ~is_high) | (high & is_high);
#else
    // A selector has four nibbles. The last three bits of a nibble choose an entry of one half of the table.
    const uint32_t entries = word & 0x77777777, halves = (word >> 1 & 0x44444444) | 0x32103210;
    uint32_t found[2];  // entries of four adjacent nibbles each
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t low = __byte_perm(table[0], table[1], entries >> 16 * i);
        const uint32_t high = __byte_perm(table[2], table[3], entries >> 16 * i);
        found[i] = __byte_perm(low, high, halves >> 16 * i);
    }
    return __byte_perm(found[0], found[1], upper ? 0x7531 : 0x6420);
#endif
}

// Little-endian loads; word_at needs an address that is a multiple of ALIGNMENT bytes, 2 or more.
template <int ALIGNMENT>
DEVICE uint32_t word_at(const uint8_t* address) {
    if constexpr (ALIGNMENT >= 4) return *reinterpret_cast<const uint32_t*>(address);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(address);
    return halves[0] | uint32_t(halves[1]) << 16;
}
DEVICE uint32_t short_at(const uint8_t* address) { return *reinterpret_cast<const uint16_t*>(address); }
DEVICE float half_at(const uint8_t* address) { return to_float(*reinterpret_cast<const half_t*>(address)); }
