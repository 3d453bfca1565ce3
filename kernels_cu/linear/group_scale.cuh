// group_scale.cuh: decodes group scales to float, one function per storage format.

#pragma once
#include "arith.cuh"
#include "number.cuh"

template <typename T> DEVICE float scale_float(const T* scales, int64_t i) { return to_float(scales[i]); }
// e5m3: the upper 8 bits of a float16 after its sign.
template <typename T> DEVICE float scale_e5m3(const T* scales, int64_t i) {
    const uint16_t bits = uint16_t(uint32_t(reinterpret_cast<const uint8_t*>(scales)[i]) << 7);
    return to_float(reinterpret_cast<const half_t&>(bits));
}
// e8m0: a power of two, stored as its exponent; 255 is NaN.
template <typename T> DEVICE float scale_e8m0(const T* scales, int64_t i) {
    const uint32_t exponent = reinterpret_cast<const uint8_t*>(scales)[i];
    return __uint_as_float(exponent == 255 ? 0x7fc00000 : exponent == 0 ? 0x00400000 : exponent << 23);
}
// An int16, stored in the bits of a 16-bit float.
template <typename T> DEVICE float scale_int16(const T* scales, int64_t i) {
    return float(reinterpret_cast<const int16_t*>(scales)[i]);
}
