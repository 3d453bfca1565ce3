// number.cuh: the element types and their conversions to and from float.
//
// Conversions to a narrower type round to nearest even. fp8 conversions saturate to the largest finite value; NaN stays
// NaN. Pairs are converted together because the hardware packs two at a time.
#pragma once
#include "platform.cuh"

#if PYOPS_HIP
#include <hip/hip_fp16.h>
#include <hip/hip_bf16.h>
#include <hip/hip_fp8.h>
using bf16_t = __hip_bfloat16;
#if defined(__gfx942__)
using fp8_e4m3_t = __hip_fp8_e4m3_fnuz;
using fp8_e5m2_t = __hip_fp8_e5m2_fnuz;
#else
using fp8_e4m3_t = __hip_fp8_e4m3;
using fp8_e5m2_t = __hip_fp8_e5m2;
#endif
#else
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#pragma nv_diag_suppress 1444
#include <cuda_fp8.h>
#pragma nv_diag_default 1444
using bf16_t = __nv_bfloat16;
using fp8_e4m3_t = __nv_fp8_e4m3;
using fp8_e5m2_t = __nv_fp8_e5m2;
#endif
using half_t = __half;

constexpr float FLOAT_MAX = 3.402823466e+38f;

template <typename A, typename B> struct same_type { static constexpr bool value = false; };
template <typename A> struct same_type<A, A> { static constexpr bool value = true; };
template <typename A, typename B> constexpr bool is_same = same_type<A, B>::value;

template <typename T> DEVICE float to_float(T x) { return static_cast<float>(x); }
template <> DEVICE float to_float<half_t>(half_t x) { return __half2float(x); }
template <> DEVICE float to_float<bf16_t>(bf16_t x) { return __bfloat162float(x); }

template <typename T> DEVICE T from_float(float x) { return T(x); }
template <> DEVICE half_t from_float<half_t>(float x) { return __float2half_rn(x); }
template <> DEVICE bf16_t from_float<bf16_t>(float x) { return __float2bfloat16_rn(x); }
// Ties to even, saturating; NaN becomes 0.
template <> DEVICE int8_t from_float<int8_t>(float x) {
#if PYOPS_HIP
    return static_cast<int8_t>(x != x ? 0.0f : fminf(fmaxf(rintf(x), -128.0f), 127.0f));
#else
    int result;
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(result) : "f"(x));
    return static_cast<int8_t>(result);
#endif
}

// x as a T would hold it.
template <typename T> DEVICE float round_to(float x) { return to_float(from_float<T>(x)); }

// Two values at once, lower address first.
template <typename T>
DEVICE void store_pair(T* out, float low, float high) {
    out[0] = from_float<T>(low);
    out[1] = from_float<T>(high);
}
template <> DEVICE void store_pair<half_t>(half_t* out, float low, float high) {
    *reinterpret_cast<__half2*>(out) = __floats2half2_rn(low, high);
}
#if !PYOPS_HIP
template <> DEVICE void store_pair<bf16_t>(bf16_t* out, float low, float high) {
    *reinterpret_cast<__nv_bfloat162*>(out) = __floats2bfloat162_rn(low, high);
}
template <> DEVICE void store_pair<fp8_e4m3_t>(fp8_e4m3_t* out, float low, float high) {
    *reinterpret_cast<__nv_fp8x2_storage_t*>(out) =
        __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}
template <> DEVICE void store_pair<fp8_e5m2_t>(fp8_e5m2_t* out, float low, float high) {
    *reinterpret_cast<__nv_fp8x2_storage_t*>(out) =
        __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E5M2);
}
#endif

// T(a * b) for two pairs: exact products, rounded once.
template <typename T>
DEVICE void multiply_pair(T* out, const T* a, const T* b) {
    store_pair<T>(out, to_float(a[0]) * to_float(b[0]), to_float(a[1]) * to_float(b[1]));
}
// The larger magnitude of each of two pairs, NaN dropped.
template <typename T>
DEVICE void absmax_pair(T* a, const T* b) {
    store_pair<T>(a, fmaxf(fabsf(to_float(a[0])), fabsf(to_float(b[0]))), fmaxf(fabsf(to_float(a[1])), fabsf(to_float(b[1]))));
}
#if !PYOPS_HIP
#define PYOPS_PACKED(T, PAIR)                                                                                    \
    template <> DEVICE void multiply_pair<T>(T * out, const T* a, const T* b) {                                  \
        *reinterpret_cast<PAIR*>(out) =                                                                          \
            __hmul2(*reinterpret_cast<const PAIR*>(a), *reinterpret_cast<const PAIR*>(b));                       \
    }                                                                                                            \
    template <> DEVICE void absmax_pair<T>(T * a, const T* b) {                                                  \
        PAIR& m = *reinterpret_cast<PAIR*>(a);                                                                   \
        m = __hmax2(__habs2(m), __habs2(*reinterpret_cast<const PAIR*>(b)));                                     \
    }
PYOPS_PACKED(half_t, __half2)
PYOPS_PACKED(bf16_t, __nv_bfloat162)
#undef PYOPS_PACKED
#endif
