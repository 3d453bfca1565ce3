// math.cuh: activation functions of a vector of elements of type T, and the divisions that they need.
//
// Each function computes in float32 and rounds to T once, and uses the accurate exp, erf, tanh and division, unless its
// comment says otherwise. A multiplication and an addition are fused only where fmaf is written. So results equal those
// of eager PyTorch bit for bit.

#pragma once
#include "vec.cuh"

// min(x, limit), and x between -limit and limit; NaN stays NaN.
DEVICE float at_most(float x, float limit) { return x > limit ? limit : x; }
DEVICE float clamped(float x, float limit) { return -at_most(-at_most(x, limit), limit); }

// x / divisor, correctly rounded, for a finite x and 1 <= divisor < 2^126; where x is tiny, the divisor must be 2. The
// residual of a first quotient corrects that quotient (Markstein 1990). Unlike ieee_divide it has no branch. copysignf
// keeps the sign of 0.
DEVICE float quotient(float x, float divisor) {
    const float reciprocal = reciprocal_of(divisor);
    const float first = ieee_multiply(x, reciprocal);
    return copysignf(ieee_fma(ieee_residual(divisor, first, x), reciprocal, first), x);
}

// numerator / (1 + exp(-x)), accurate enough for 16-bit results. The function takes the reciprocal of a quarter of the
// divisor, because this is normal for every finite divisor: the hardware estimates flush subnormal numbers.
DEVICE float logistic_share(float numerator, float x) {
    const float quarter = 0.25f + estimate_exp2(fmaf(x, -LOG2_E, -2.0f));
    return ieee_multiply(numerator, ieee_multiply(estimate_reciprocal(quarter), 0.25f));
}

// numerator / (1 + exp(-x)), for a result that is rounded to T.
template <typename T>
DEVICE float logistic(float numerator, float x) {
    if constexpr (is_same<T, float>) {
        return ieee_divide(numerator, 1.0f + expf(-x));
    } else {
        return logistic_share(numerator, x);
    }
}

// y = x / (1 + exp(-beta * x)), not rounded to T (Ramachandran et al. 2017). EXACT: rounded to T, the result equals
// eager's.
//
// bfloat16 uses the hardware estimates: for each of the 65536 values, silu rounds to the result of eager PyTorch. For
// float16 two values do not, so an EXACT float16 result is computed accurately, like float32. If an element of the
// vector is outside the range of `quotient`, all N elements use ieee_divide.
template <bool EXACT, typename T, int N>
DEVICE void swish(float (&y)[N], const Vec<T, N>& vec, float beta) {
    float x[N];
    vec.to_floats(x);
    if constexpr (is_same<T, bf16_t> || (is_same<T, half_t> && !EXACT)) {
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = logistic_share(x[i], beta * x[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = quotient(x[i], 1.0f + expf(-beta * x[i]));
        if (ieee_abs(beta) * vec.absmax() < 87.0f) return;  // exp(87) < 2^126
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = ieee_divide(x[i], 1.0f + expf(-beta * x[i]));
    }
}

template <bool EXACT, typename T, int N>
DEVICE Vec<T, N> swish(const Vec<T, N>& x, float beta) {
    float y[N];
    swish<EXACT>(y, x, beta);
    return Vec<T, N>::from_floats(y);
}

template <typename T, int N> DEVICE Vec<T, N> silu(const Vec<T, N>& x) { return swish<true>(x, 1.0f); }

// x * sigmoid(1.702 * x), an approximation of GELU.
template <typename T, int N> DEVICE Vec<T, N> gelu_quick(const Vec<T, N>& x) { return swish<true>(x, 1.702f); }

// GELU: x times the standard normal distribution function (Hendrycks and Gimpel 2016), with the error function.
template <typename T, int N>
DEVICE Vec<T, N> gelu(const Vec<T, N>& x) {
    return map(x,
               [](float v) { return ieee_multiply(ieee_multiply(v, 0.5f), 1.0f + erff(v * 0.707106781186547524f)); });
}

// GELU, tanh approximation.
template <typename T, int N>
DEVICE Vec<T, N> gelu_tanh(const Vec<T, N>& x) {
    return map(x, [](float v) {
        const float cube = v * v * v;
        const float inner = 0.797884560802865356f * fmaf(0.044715f, cube, v);
        return ieee_multiply(ieee_multiply(0.5f, v), 1.0f + tanhf(inner));
    });
}

// T(c * x) with a float32 factor.
template <typename T, int N>
DEVICE Vec<T, N> scaled(float c, const Vec<T, N>& x) {
    return map(x, [=](float v) { return ieee_multiply(c, v); });
}

// tanh for a sum T(1 + T(tanh(x))) of an x of type T. An absolute error of 2^-19 does not change that sum for any
// bfloat16 x, and this formula has less.
template <typename T>
DEVICE float tanh_for_sum_with_1(float x) {
    if constexpr (!is_same<T, bf16_t>) return tanhf(x);
    return fmaf(-2.0f, estimate_reciprocal(1.0f + estimate_exp2(x * (2.0f * LOG2_E))), 1.0f);
}

// gelu_tanh, given the argument of tanh; every operation rounds to T.
template <typename T, int N>
DEVICE Vec<T, N> gelu_from_inner(const Vec<T, N>& x, const Vec<T, N>& inner) {
    using vec_t = Vec<T, N>;
    const vec_t tanh = map(inner, [](float v) { return tanh_for_sum_with_1<T>(v); });
    return vec_t::full(0.5f) * x * (vec_t::full(1.0f) + tanh);
}

// gelu_tanh as GPT-2 writes it; every operation rounds to T.
template <typename T, int N>
DEVICE Vec<T, N> gelu_new(const Vec<T, N>& x) {
    return gelu_from_inner(x, scaled(0.79788456f, x + scaled(0.044715f, x * x * x)));
}

// gelu_tanh with the cube factored out; every operation rounds to T.
template <typename T, int N>
DEVICE Vec<T, N> gelu_fast(const Vec<T, N>& x) {
    return gelu_from_inner(x, scaled(0.79788456f, x) * (Vec<T, N>::full(1.0f) + scaled(0.044715f, x) * x));
}

// max(x, 0); NaN stays NaN.
template <typename T, int N>
DEVICE Vec<T, N> relu(const Vec<T, N>& x) {
    return map(x, [](float v) { return v <= 0.0f ? 0.0f : v; });
}

// max(x, 0)^2; NaN stays NaN.
template <typename T, int N>
DEVICE Vec<T, N> relu2(const Vec<T, N>& x) {
    const Vec<T, N> positive = relu(x);
    return positive * positive;
}
