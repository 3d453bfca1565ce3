// packed.cuh: small integers that are packed in words of 32 bits, as numbers.
#pragma once
#include "vec.cuh"

// What raised_pair adds. The number's last place is then worth 1, so that codes are bits to put there.
template <typename T> constexpr uint32_t RAISED_PAIR = 0;
template <> constexpr uint32_t RAISED_PAIR<half_t> = 0x64006400;  // 1024
template <> constexpr uint32_t RAISED_PAIR<bf16_t> = 0x43004300;  // 128

// The nibbles in the low bits of both halves of a word whose other bits are 0, all raised by one number, which a difference
// of two loses again.
template <typename T>
DEVICE void raised_pair(T* out, uint32_t nibbles) {
    if constexpr (RAISED_PAIR<T> != 0) {
        *reinterpret_cast<uint32_t*>(out) = nibbles | RAISED_PAIR<T>;
    } else {
        store_pair<T>(out, float(nibbles & 0xffff), float(nibbles >> 16));
    }
}

// N columns from the even column `first` of the eight in a word of AWQ, whose nibbles hold columns 0 2 4 6 1 3 5 7 from the
// lowest; raised.
template <typename T, int N>
DEVICE Vec<T, N> awq_columns(uint32_t word, int first) {
    Vec<T, N> result;
#pragma unroll
    for (int i = 0; i < N; i += 2) raised_pair<T>(result.data + i, word >> 2 * (first + i) & 0x000f000f);
    return result;
}

// The four bytes of a word, each less by an integer: exactly.
DEVICE void bytes_to_floats(uint32_t word, float less, float* x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // The last place of 2^23 is worth 1, so that a byte is bits to put there.
        x[i] = __uint_as_float(__byte_perm(word, 0x4b000000, 0x7540 + i)) - (8388608.0f + less);
    }
}

// Four bits, levels of two bits or nibbles from the low end of a word, each to a byte of its own.
DEVICE uint32_t bits_to_bytes(uint32_t four) { return (four & 15) * 0x00204081 & 0x01010101; }
DEVICE uint32_t crumbs_to_bytes(uint32_t four) {
    four = (four | four << 12) & 0x000f000f;
    return (four | four << 6) & 0x03030303;
}
DEVICE uint32_t nibbles_to_bytes(uint32_t four) {
    four = (four | four << 8) & 0x00ff00ff;
    return (four | four << 4) & 0x0f0f0f0f;
}

// Entries of a table of 16 bytes, four in each of its words: what the bytes of `indices`, 0 to 15, say.
DEVICE uint32_t look_up_bytes(uint32_t indices, const uint32_t (&table)[4]) {
    uint32_t selector = (indices | indices >> 4) & 0x00ff00ff;
    selector |= selector >> 8;
    const uint32_t low = __byte_perm(table[0], table[1], selector & 0x7777);
    const uint32_t high = __byte_perm(table[2], table[3], selector & 0x7777);
    const uint32_t is_high = (indices >> 3 & 0x01010101) * 0xff;
    return (low & ~is_high) | (high & is_high);
}

// Little-endian words from addresses that are multiples of ALIGNMENT bytes.
template <int ALIGNMENT>
DEVICE uint32_t word_at(const uint8_t* address) {
    if constexpr (ALIGNMENT >= 4) return *reinterpret_cast<const uint32_t*>(address);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(address);
    return halves[0] | uint32_t(halves[1]) << 16;
}
DEVICE uint32_t short_at(const uint8_t* address) { return *reinterpret_cast<const uint16_t*>(address); }
DEVICE float half_at(const uint8_t* address) { return to_float(*reinterpret_cast<const half_t*>(address)); }
