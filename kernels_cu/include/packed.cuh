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
#if PYOPS_CUDA
    if constexpr (RAISED_PAIR<T> != 0) {
        as_word(out) = nibbles | RAISED_PAIR<T>;
        return;
    }
#endif
    store_pair<T>(out, float(nibbles & 0xffff), float(nibbles >> 16));
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
