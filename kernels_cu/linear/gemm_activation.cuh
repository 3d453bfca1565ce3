// gemm_activation.cuh: the activation functions of GEMMs, in float32; T is the type to which the result is rounded.
#pragma once
#include "math.cuh"

template <typename T> DEVICE float silu_of(float x) { return logistic<T>(x, x); }
DEVICE float gelu_of(float x) { return 0.5f * x * (1.0f + erff(x * 0.707106781186547524f)); }

// Of an element; with GATED, of a gate that is then multiplied by its up.
template <typename T> DEVICE float gemm_silu(float x) { return silu_of<T>(x); }
template <typename T> DEVICE float gemm_gelu(float x) { return gelu_of(x); }
template <typename T> DEVICE float gemm_none(float x) { return x; }

// Of grouped GEMMs: of an element, or of a gate and its up.
constexpr float SWIGLU_LIMIT = 7.0f, SWIGLU_ALPHA = 1.702f;
template <typename T> DEVICE float expert_none(float x, float) { return x; }
template <typename T> DEVICE float expert_silu_no_mul(float x, float) { return silu_of<T>(x); }
template <typename T> DEVICE float expert_gelu_no_mul(float x, float) { return gelu_of(x); }
template <typename T> DEVICE float expert_relu2_no_mul(float x, float) { return x < 0.0f ? 0.0f : x * x; }
template <typename T> DEVICE float expert_silu(float gate, float up) { return silu_of<T>(gate) * up; }
template <typename T> DEVICE float expert_gelu(float gate, float up) { return gelu_of(gate) * up; }
template <typename T>
DEVICE float expert_swigluoai(float gate, float up) {
    const float g = at_most(gate, SWIGLU_LIMIT);
    return (clamped(up, SWIGLU_LIMIT) + 1.0f) * logistic<T>(g, SWIGLU_ALPHA * g);
}
template <typename T>
DEVICE float expert_swiglustep(float gate, float up) {
    return at_most(silu_of<T>(gate), SWIGLU_LIMIT) * clamped(up, SWIGLU_LIMIT);
}
