// mx_scales.cuh: block scales of MXFP4 and MXFP8: each block of 32 adjacent values has a power of two as its scale,
// stored as an exponent (E8M0).

#pragma once
#include "quant.cuh"

// The scale 2^(exponent - 127) of MXFP4 and MXFP8. Exponent 255 is NaN; exponent 0 is 2^-127, a subnormal float.
DEVICE float e8m0_to_float(uint8_t exponent) {
    return __uint_as_float(exponent == 255 ? 0x7fffffffu : exponent == 0 ? 0x400000u : uint32_t(exponent) << 23);
}

// MXFP4: for a block with absmax `a`, `exponent` is the exponent, biased by 127, of the largest power of two that is at
// most `a` / 6; 6 is the largest e2m1 value. `factor` is the reciprocal of that power, by which the block is multiplied
// before it is rounded. It is 0 if the power or its reciprocal is not a normal number.
struct Mxfp4Scale {
    uint32_t exponent;
    float factor;

    explicit DEVICE Mxfp4Scale(float a) : exponent(__float_as_uint(ieee_multiply(a, 1.0f / 6.0f)) >> 23) {
        factor = exponent == 0 || exponent == 255 ? 0.0f : __uint_as_float((254 - exponent) << 23);
    }
};

// MXFP8: for a block with absmax `a`, `exponent` is the exponent, biased by 127 and at most 254, of the smallest power
// of two that is at least `a` / 448; 448 is the largest e4m3 value. `factor` is the reciprocal of that power.
struct Mxfp8Scale {
    uint32_t exponent;
    float factor;

    explicit DEVICE Mxfp8Scale(float a) {
        const uint32_t bits = __float_as_uint(ieee_multiply(a, 1.0f / 448.0f));
        // Rounds up: the addition carries into the exponent unless the quotient is a power of two. The smallest scale,
        // 2^-127 with exponent 0, is the subnormal number 0x400000. A subnormal quotient above it needs exponent 1.
        exponent = min((bits + (bits < 0x800000u ? 0x3fffffu : 0x7fffffu)) >> 23, 254u);
        factor = __uint_as_float(exponent == 254 ? 0x400000u : (254 - exponent) << 23);
    }
};
