// gated.cuh: gated activations of a vector of gates and a vector of factors, for kernels with and without padding rows.
//
// Every function computes in float32 and rounds to T once, unless its comment says otherwise.

#pragma once
#include "math.cuh"

// SwiGLU of clamped halves: T(T(g / (1 + exp(-alpha * g))) * (u + beta)) with g at most T(limit) and u between
// -T(limit) and T(limit). NaN stays NaN, and a NaN limit means no limit.
template <typename T, int N>
DEVICE Vec<T, N> clamped_swiglu(const Vec<T, N>& gate, const Vec<T, N>& up, float limit, float alpha, float beta) {
    const float bound = round_to<T>(limit);
    float g[N], u[N];
    swish<true>(map(gate, [=](float x) { return at_most(x, bound); }), alpha).to_floats(g);
    up.to_floats(u);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = ieee_multiply(g[i], clamped(u[i], bound) + beta);
    return Vec<T, N>::from_floats(g);
}

// SwiGLU of clamped pairs: T((u + 1) * g / (1 + exp(-alpha * g))) with g at most `limit` and u between -limit and
// limit. NaN becomes limit. `first` and `second` hold 2 * N adjacent elements: the even ones are g, the odd ones u.
template <typename T, int N>
DEVICE Vec<T, N> swigluoai(const Vec<T, N>& first, const Vec<T, N>& second, float alpha, float limit) {
    float x[2][N], y[N];
    first.to_floats(x[0]);
    second.to_floats(x[1]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int even = 2 * j, odd = 2 * j + 1;
        const float g = fminf(x[even / N][even % N], limit);
        const float u = fmaxf(fminf(x[odd / N][odd % N], limit), -limit);
        // The share of g comes first: u + 1 times a large g may overflow, and 0 times infinity would be NaN.
        float share;
        if constexpr (sizeof(T) == 2) {
            share = logistic_share(g, g * alpha);
        } else {
            share = ieee_divide(g, 1.0f + expf(-g * alpha));
        }
        y[j] = ieee_multiply(u + 1.0f, share);
    }
    return Vec<T, N>::from_floats(y);
}

// SwiGLU with both factors clamped: T(min(g / (1 + exp(-g)), limit) * min(max(u, -limit), limit)). NaN stays NaN.
template <typename T, int N>
DEVICE Vec<T, N> swiglustep(const Vec<T, N>& gate, const Vec<T, N>& up, float limit) {
    float y[N], u[N];
    swish<false>(y, gate, 1.0f);
    up.to_floats(u);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        y[j] = ieee_multiply(at_most(y[j], limit), at_most(-at_most(-u[j], limit), limit));
    }
    return Vec<T, N>::from_floats(y);
}

// tanh(x) = numerator / divisor, accurate to about 17 bits, for 16-bit results. Where the numerator 1 - exp(-2|x|)
// would cancel, it is the Taylor polynomial of tanh instead, also of a subnormal x.
struct TanhFraction {
    float numerator, divisor;

    explicit DEVICE TanhFraction(float x) {
        const float decay = estimate_exp2(ieee_abs(x) * (-2.0f * LOG2_E));
        const bool small = ieee_abs(x) < 0x1p-6f;  // the next term of the series is below 2^-26
        numerator = small ? ieee_fma(x * x, x * (-1.0f / 3.0f), x) : copysignf(1.0f - decay, x);
        divisor = small ? 1.0f : 1.0f + decay;
    }
};

// SituGLU of a gate g and a factor u: beta * tanh(g / beta) / (1 + exp(-g)) * u; BOUNDED: with linear_beta * tanh(u /
// linear_beta) for u. 16-bit results take one reciprocal for all three quotients, and keep factors that are subnormal:
// they may be multiplied by large ones.
template <bool BOUNDED, typename T, int N>
DEVICE Vec<T, N> situ(const Vec<T, N>& gate, const Vec<T, N>& up, float beta, float linear_beta) {
    float g[N], u[N];
    gate.to_floats(g);
    up.to_floats(u);
    if constexpr (is_same<T, float>) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float bounded = BOUNDED ? linear_beta * tanhf(ieee_divide(u[i], linear_beta)) : u[i];
            g[i] = beta * tanhf(ieee_divide(g[i], beta)) * logistic<T>(1.0f, g[i]) * bounded;
        }
    } else {
        const float over_beta = ieee_divide(1.0f, beta), over_linear = BOUNDED ? ieee_divide(1.0f, linear_beta) : 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const TanhFraction of_gate(ieee_multiply(g[i], over_beta));
            const float decay = estimate_exp2(ieee_abs(g[i]) * -LOG2_E);  // the sigmoid is 1 or decay over 1 + decay
            float share = ieee_multiply(of_gate.numerator, g[i] < 0.0f ? decay : 1.0f);
            float divisor = of_gate.divisor * (1.0f + decay);
            if constexpr (BOUNDED) {
                const TanhFraction of_up(ieee_multiply(u[i], over_linear));
                divisor *= of_up.divisor;
                u[i] = ieee_multiply(linear_beta, of_up.numerator);
            }
            share = ieee_multiply(share, estimate_reciprocal(divisor));
            g[i] = ieee_multiply(ieee_multiply(beta, share), u[i]);
        }
    }
    return Vec<T, N>::from_floats(g);
}

template <typename T, int N>
DEVICE Vec<T, N> situ(const Vec<T, N>& gate, const Vec<T, N>& up, float beta, float linear_beta) {
    return linear_beta > 0.0f ? situ<true>(gate, up, beta, linear_beta) : situ<false>(gate, up, beta, linear_beta);
}
