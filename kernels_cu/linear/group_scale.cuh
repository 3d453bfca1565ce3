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
// Table i of scale * -8 ... scale * -1 in e4m3, which gives scale * quant for quants of 4 bits in two's complement.
struct ScaleProducts {
    uint32_t words[2];

    template <typename T> DEVICE void load(const T* products, int64_t i) {
        static_assert(sizeof(T) == 1);
        const auto* const bytes = reinterpret_cast<const uint8_t*>(products) + i * 8;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            words[j] = bytes[4 * j] | bytes[4 * j + 1] << 8 | bytes[4 * j + 2] << 16 | uint32_t(bytes[4 * j + 3]) << 24;
        }
    }
    // A positive quant takes the entry of the negative one, with the sign flipped.
    DEVICE float of(uint32_t quant) const {
        const uint32_t positive = quant < 8 ? 0x80 : 0, index = (quant < 8 ? 0 - quant : quant) & 7;
        const uint8_t entry = uint8_t(quant == 0 ? 0 : byte_perm(words[0], words[1], index) & 0xff ^ positive);
        return to_float(reinterpret_cast<const fp8_e4m3_t&>(entry));
    }
};
