// quant.cuh: from a float and a scale to a code, exactly as the specification rounds.
#pragma once
#include "number.cuh"

// Largest magnitude of a code, and the smallest scale a dynamic quantisation may choose.
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
    static constexpr float largest = 224.0f;  // by convention: the type goes on to 240
    static constexpr float smallest_scale = 1.0f / (largest * 512.0f);
};

// Clamp to +-limit; NaN becomes +limit.
DEVICE float clamp(float x, float limit) { return fmaxf(-limit, fminf(x, limit)); }

// What to convert to a code of fp8 so that it is no larger than the largest; the minimum takes NaN to that. Where it is the
// type's own largest number, the conversion saturates.
template <typename Q>
DEVICE float within_codes(float x) {
    if constexpr (is_same<Q, fp8_e4m3fnuz_t>) return clamp(x, Codes<Q>::largest);
    return fminf(x, Codes<Q>::largest);
}

// x / divisor, correctly rounded, given the correctly rounded reciprocal: the residual of the first quotient corrects it.
// For quotients that are neither subnormal nor too large; a zero keeps its sign if the divisor is positive.
DEVICE float divide(float x, float divisor, float reciprocal) { return nearer(x * reciprocal, x, divisor, reciprocal); }

// Quotients by one divisor, for fp8: correctly rounded wherever that can change a code, with the sign of a zero. A residual
// corrects the product with the reciprocal (Markstein 1990); where that is not a number, the product is infinite or NaN.
struct Quotient {
    float divisor, reciprocal;
    bool ordinary;  // neither the reciprocal nor a residual that counts leaves the normal numbers

    explicit DEVICE Quotient(float divisor)
        : divisor(divisor), reciprocal(reciprocal_of(divisor)), ordinary(fabsf(divisor) >= 0x1p-64f && fabsf(divisor) <= 0x1p64f) {}

    DEVICE float operator()(float x) const {
        if (!ordinary) return ieee_divide(x, divisor);
        const float product = x * reciprocal;
        const float quotient = divide(x, divisor, reciprocal);
        return quotient == quotient ? copysignf(quotient, product) : product;
    }

    // The same of all of x, whose largest magnitude is `most`. Where no residual is infinite and a divisor is positive, there is
    // neither NaN nor the sign of a zero to put right; where one may be, division does it.
    template <int N>
    DEVICE void of_each(float (&x)[N], float most) const {
        if (ordinary && divisor > 0.0f && most <= 0x1p62f) {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = divide(x[i], divisor, reciprocal);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = ieee_divide(x[i], divisor);
        }
    }
};

// 1 / scale, correctly rounded, or 0 where that is not finite: under such a scale every code is that of 0. NaN stays NaN.
DEVICE float reciprocal_or_zero(float scale) {
    const float reciprocal = ieee_divide(1.0f, scale);
    return ieee_abs(reciprocal) > FLOAT_MAX ? 0.0f : reciprocal;
}

// What to convert to a code of fp8: a product with such a reciprocal.
template <typename Q>
DEVICE float scaled_fp8(float x, float reciprocal) {
    return within_codes<Q>(ieee_multiply(x, reciprocal));
}

// int8 codes of integers that are shifted by a zero point, which may be any: the sum saturates.
struct ZeroPoint {
    int32_t azp, low, high;  // between low and high lie the integers whose codes do not saturate

    explicit DEVICE ZeroPoint(int32_t azp)
        : azp(azp), low(max(int64_t(-128) - azp, int64_t(-2147483647 - 1))), high(min(int64_t(127) - azp, int64_t(2147483647))) {}
    DEVICE int8_t operator()(float x) const { return int8_t(min(max(round_to_int(x), low), high) + azp); }
};

// The scale of a row or group whose largest magnitude is `absmax`.
template <typename Q>
DEVICE float dynamic_scale(float absmax) {
    constexpr float largest = Codes<Q>::largest;
    const float scale = absmax > FLOAT_MAX ? absmax : divide(absmax, largest, 1.0f / largest);
    return fmaxf(scale, Codes<Q>::smallest_scale);
}

// The least power of two that is no smaller; x is normal, or infinite and stays so.
DEVICE float power_of_two_above(float x) { return __uint_as_float((__float_as_uint(x) + 0x7fffffu) & 0x7f800000u); }

// The same by the logarithm in bfloat16, 2^ceil(b(log2 x)), which now and then is the power below.
DEVICE float power_of_two_by_log(float x) {
    if (x > FLOAT_MAX) return x;
    return __uint_as_float(uint32_t(int(ceilf(round_to<bf16_t>(log2f(x)))) + 127) << 23);
}

// The biased exponent of a positive number: a power of two in UE8M0.
DEVICE uint8_t exponent_of(float x) { return uint8_t(__float_as_uint(x) >> 23); }

// Codes of values under one scale. int8 multiplies by the reciprocal, fp8 divides, each as the specification says.
// BOUNDED: values may exceed the magnitude that the scale was made for.
template <typename Q, bool BOUNDED>
struct Quantizer {
    float divisor, reciprocal, limit;

    explicit DEVICE Quantizer(float scale) : divisor(scale), reciprocal(reciprocal_of(scale)) {
        limit = fminf(scale * 512.0f, FLOAT_MAX);  // beyond it every quotient saturates
        if (scale > FLOAT_MAX) {  // infinite: what is finite becomes 0, what is not the largest code
            divisor = 0.0f;
            reciprocal = 0.0f;
            limit = scale;
        }
    }

    // What to convert to Q; that conversion saturates.
    DEVICE float operator()(float x) const {
        if constexpr (is_same<Q, int8_t>) return x * reciprocal;
        if constexpr (BOUNDED) x = clamp(x, limit);
        return within_codes<Q>(divide(x, divisor, reciprocal));
    }
};
