// quant.cuh: quantization of floats to int8 and fp8, rounded exactly as the ops specify.

#pragma once
#include "number.cuh"

// Limits of a quantized type Q: the largest magnitude of a quantized value, and the smallest scale of dynamic
// quantization.
template <typename Q> struct Codes;
template <> struct Codes<int8_t> {
    static constexpr float largest = 127.0f;
    static constexpr float smallest_scale = 1.1920928955078125e-07f;  // 2^-23
};
template <> struct Codes<fp8_e4m3_t> {
    static constexpr float largest = 448.0f;
    static constexpr float smallest_scale = 1.0f / (largest * 512.0f);
};
template <> struct Codes<fp8_e4m3fnuz_t> {
    static constexpr float largest = 224.0f;  // by convention; the type's largest number is 240
    static constexpr float smallest_scale = 1.0f / (largest * 512.0f);
};

// x clamped to -limit ... limit; NaN becomes limit.
DEVICE float clamp(float x, float limit) { return fmaxf(-limit, fminf(x, limit)); }

// Limits x to at most Codes<Q>::largest before a conversion to fp8; NaN becomes Codes<Q>::largest. Where that is the
// largest number of the type, the fminf only handles NaN: the conversion saturates.
template <typename Q>
DEVICE float within_codes(float x) {
    if constexpr (is_same<Q, fp8_e4m3fnuz_t>) return clamp(x, Codes<Q>::largest);
    return fminf(x, Codes<Q>::largest);
}

// x / divisor, correctly rounded, given the correctly rounded reciprocal: the residual of a first quotient corrects
// that quotient. The quotient must be neither subnormal nor near the largest float. A zero keeps its sign if the
// divisor is positive.
DEVICE float divide(float x, float divisor, float reciprocal) { return nearer(x * reciprocal, x, divisor, reciprocal); }

// Quotients by one divisor, for conversion to a quantized type. They are correctly rounded wherever rounding can change
// the quantized value. The residual corrects the product with the reciprocal (Markstein 1990).
struct Quotient {
    float divisor, reciprocal;
    bool ordinary;  // the reciprocal, and every residual that can change a quantized value, are normal numbers

    explicit DEVICE Quotient(float divisor)
        : divisor(divisor),
          reciprocal(reciprocal_of(divisor)),
          ordinary(fabsf(divisor) >= 0x1p-64f && fabsf(divisor) <= 0x1p64f) {}

    // For int8: a zero may lose its sign. If the corrected quotient is NaN, the result is the product x * reciprocal,
    // which is then infinite or NaN itself.
    DEVICE float operator()(float x) const {
        if (!ordinary) return ieee_divide(x, divisor);
        const float product = x * reciprocal;
        const float quotient = divide(x, divisor, reciprocal);
        return quotient == quotient ? quotient : product;
    }

    // For fp8: replaces each x by its quotient and keeps the sign of a zero; absmax is the largest magnitude of x. If
    // the divisor is positive and no residual can be infinite, `divide` handles NaN and zeros correctly; otherwise
    // ieee_divide is used.
    template <int N>
    DEVICE void of_each(float (&x)[N], float absmax) const {
        if (ordinary && divisor > 0.0f && absmax <= 0x1p62f) {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = divide(x[i], divisor, reciprocal);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = ieee_divide(x[i], divisor);
        }
    }
};

// 1 / scale, correctly rounded; 0 if the reciprocal is infinite, so that every value is quantized to 0 under such a
// scale. NaN stays NaN.
DEVICE float reciprocal_or_zero(float scale) {
    const float reciprocal = ieee_divide(1.0f, scale);
    return ieee_abs(reciprocal) > FLOAT_MAX ? 0.0f : reciprocal;
}

// x * reciprocal, clamped for a conversion to fp8; `reciprocal` comes from reciprocal_or_zero.
template <typename Q>
DEVICE float scaled_fp8(float x, float reciprocal) {
    return within_codes<Q>(ieee_multiply(x, reciprocal));
}

// int8 quantization with a zero point: round(x) + azp, saturating, for any int32 azp.
struct ZeroPoint {
    int32_t azp, low, high;  // rounded values in low ... high do not saturate

    explicit DEVICE ZeroPoint(int32_t azp)
        : azp(azp),
          low(max(int64_t(-128) - azp, int64_t(-2147483647 - 1))),
          high(min(int64_t(127) - azp, int64_t(2147483647))) {}
    DEVICE int8_t operator()(float x) const { return int8_t(min(max(round_to_int(x), low), high) + azp); }
};

// The dynamic scale of a row or group with largest magnitude absmax.
template <typename Q>
DEVICE float dynamic_scale(float absmax) {
    constexpr float largest = Codes<Q>::largest;
    const float scale = absmax > FLOAT_MAX ? absmax : divide(absmax, largest, 1.0f / largest);
    return fmaxf(scale, Codes<Q>::smallest_scale);
}

// The smallest power of two that is at least x, for a normal x > 0; infinity stays infinite.
DEVICE float power_of_two_above(float x) { return __uint_as_float((__float_as_uint(x) + 0x7fffffu) & 0x7f800000u); }

// 2^ceil(bf16(log2 x)). It equals power_of_two_above except where the rounding of log2 x to bf16 gives the power of two
// below x.
DEVICE float power_of_two_by_log(float x) {
    if (x > FLOAT_MAX) return x;
    return __uint_as_float(uint32_t(int(ceilf(round_to<bf16_t>(log2f(x)))) + 127) << 23);
}

// The biased exponent of x > 0. For a power of two this is its UE8M0 encoding.
DEVICE uint8_t exponent_of(float x) { return uint8_t(__float_as_uint(x) >> 23); }

// Quantizes under one scale. int8 multiplies by the reciprocal, fp8 divides, as the ops specify. BOUNDED: values may be
// larger than the magnitude that the scale was made for, so they are clamped.
template <typename Q, bool BOUNDED>
struct Quantizer {
    float divisor, reciprocal, limit;

    explicit DEVICE Quantizer(float scale) : divisor(scale), reciprocal(reciprocal_of(scale)) {
        limit = fminf(scale * 512.0f, FLOAT_MAX);  // quotients of larger values saturate
        if (scale > FLOAT_MAX) {  // infinite scale: finite values become 0, infinite values the largest quantized value
            divisor = 0.0f;
            reciprocal = 0.0f;
            limit = scale;
        }
    }

    // A float to be converted to Q; the conversion saturates.
    DEVICE float operator()(float x) const {
        if constexpr (is_same<Q, int8_t>) return x * reciprocal;
        if constexpr (BOUNDED) x = clamp(x, limit);
        return within_codes<Q>(divide(x, divisor, reciprocal));
    }
};
