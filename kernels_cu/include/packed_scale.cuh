// packed_scale.cuh: scales of packed weights by their entries, and codes that zero points are taken from.

#pragma once
#include "arith.cuh"
#include "number.cuh"

// Scale number i. Names are those of ScaleKind of pyops/ops/linear/packed_problem.py.
template <typename T> DEVICE float scale_float(const T* scales, int64_t i) { return to_float(scales[i]); }
// The upper bits of a float16 without its sign.
template <typename T> DEVICE float scale_e5m3(const T* scales, int64_t i) {
    const uint16_t bits = uint16_t(uint32_t(reinterpret_cast<const uint8_t*>(scales)[i]) << 7);
    return to_float(reinterpret_cast<const half_t&>(bits));
}
// A power of two by its exponent; the last is NaN.
template <typename T> DEVICE float scale_e8m0(const T* scales, int64_t i) {
    const uint32_t exponent = reinterpret_cast<const uint8_t*>(scales)[i];
    return __uint_as_float(exponent == 255 ? 0x7fffffff : exponent == 0 ? 0x00400000 : exponent << 23);
}
// An integer in the bits of a float.
template <typename T> DEVICE float scale_int16(const T* scales, int64_t i) {
    return float(reinterpret_cast<const int16_t*>(scales)[i]);
}
// The last of the eight products of a scale with -8 ... -1.
template <typename T> DEVICE float scale_products(const T* scales, int64_t i) { return -to_float(scales[i * 8 + 7]); }

// code - offset, exactly, for integers below 2^22: the last place of 2^23 is worth 1, so that or-ing a code to its bits
// adds the code.
DEVICE float difference_of_code(uint32_t code, float offset) {
    return __uint_as_float(code | 0x4b000000) - (8388608.0f + offset);
}
