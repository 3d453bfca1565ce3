// group_scale.cuh: what an entry of the scales of groups is, as a float.

#pragma once
#include "number.cuh"

template <typename T> DEVICE float scale_float(T entry) { return to_float(entry); }
// The upper bits of a float16 without its sign.
template <typename T> DEVICE float scale_e5m3(T entry) {
    const uint16_t bits = uint16_t(uint32_t(reinterpret_cast<const uint8_t&>(entry)) << 7);
    return to_float(reinterpret_cast<const half_t&>(bits));
}
// A power of two by its exponent; the last is NaN.
template <typename T> DEVICE float scale_e8m0(T entry) {
    const uint32_t exponent = reinterpret_cast<const uint8_t&>(entry);
    return __uint_as_float(exponent == 255 ? 0x7fffffff : exponent == 0 ? 0x00400000 : exponent << 23);
}
// An integer in the bits of a float.
template <typename T> DEVICE float scale_int16(T entry) { return float(reinterpret_cast<const int16_t&>(entry)); }
