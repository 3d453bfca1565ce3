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
#if PYOPS_HIP && defined(__gfx942__)
    static constexpr float largest = 224.0f;
#else
    static constexpr float largest = 448.0f;
#endif
    static constexpr float smallest_scale = 1.0f / (largest * 512.0f);
};

// Clamp to +-limit; NaN becomes +limit.
DEVICE float clamp(float x, float limit) { return fmaxf(-limit, fminf(x, limit)); }

// The scale of a row or group whose largest magnitude is `absmax`.
template <typename Q>
DEVICE float dynamic_scale(float absmax) {
    return fmaxf(absmax / Codes<Q>::largest, Codes<Q>::smallest_scale);
}

// Codes of values under one scale. int8 multiplies by the reciprocal, fp8 divides, each as the specification says.
template <typename Q>
struct Quantizer {
    float scale, reciprocal, limit;

    explicit DEVICE Quantizer(float scale) : scale(scale), reciprocal(1.0f / scale) {
        // Beyond 512 * scale every quotient saturates. Clamping there first keeps the division below exact.
        limit = fminf(scale * 512.0f, FLOAT_MAX);
    }

    // The clamped quotient as a float, ready to be converted to Q.
    DEVICE float operator()(float x) const {
        if constexpr (is_same<Q, int8_t>) {
            return x * reciprocal;
        } else {
            if (scale > FLOAT_MAX) return clamp(x / scale, Codes<Q>::largest);
            // x / scale, correctly rounded: the residual of the first quotient corrects it (Markstein 1990).
            x = clamp(x, limit);
            const float quotient = x * reciprocal;
            return clamp(fmaf(fmaf(-quotient, scale, x), reciprocal, quotient), Codes<Q>::largest);
        }
    }
};
