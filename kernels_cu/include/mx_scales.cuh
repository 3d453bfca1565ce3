// mx_scales.cuh: the scales of MXFP4 and MXFP8: a power of two for a block of 32 neighbouring values, as an exponent.

#pragma once
#include "quant.cuh"

// The scale 2^(exponent - 127) of MXFP4 and MXFP8, of which 255 is NaN.
DEVICE float e8m0_to_float(uint8_t exponent) {
    return __uint_as_float(exponent == 255 ? 0x7fffffffu : exponent == 0 ? 0x400000u : uint32_t(exponent) << 23);
}

// MXFP4: the exponent, biased by 127, of the largest power of two that is at most `a` / 6, for a block whose largest
// magnitude is `a`, and the reciprocal of that power; 0 where one of the two is no normal number.
struct Mxfp4Scale {
    uint32_t exponent;
    float factor;

    explicit DEVICE Mxfp4Scale(float a) : exponent(__float_as_uint(ieee_multiply(a, 1.0f / 6.0f)) >> 23) {
        factor = exponent == 0 || exponent == 255 ? 0.0f : __uint_as_float((254 - exponent) << 23);
    }
};

// MXFP8: the exponent, biased by 127, of the smallest power of two that is at least `a` / 448, at most 254, for a block
// whose largest magnitude is `a`, and the reciprocal of that power.
struct Mxfp8Scale {
    uint32_t exponent;
    float factor;

    explicit DEVICE Mxfp8Scale(float a) {
        const uint32_t bits = __float_as_uint(ieee_multiply(a, 1.0f / 448.0f));
        // A subnormal number is 2^-127, the scale of exponent 0, if its uppermost bit alone is set.
        exponent = min((bits + (bits < 0x800000u ? 0x3fffffu : 0x7fffffu)) >> 23, 254u);
        factor = __uint_as_float(exponent == 254 ? 0x400000u : (254 - exponent) << 23);
    }
};
