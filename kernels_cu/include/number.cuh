// number.cuh: the element types and their conversions to and from float.
//
// Conversions to a narrower type round to nearest even. fp8 conversions saturate to the largest finite value; NaN stays
// NaN. A type has one format on every platform: fp8_e4m3_t and fp8_e5m2_t have the OCP formats; fp8_e4m3fnuz_t has a
// bias of 8, a largest value of 240, 0x80 as its only NaN, and no negative zero.

#pragma once
#include "arith.cuh"
#include "memory.cuh"

#if PYOPS_HIP
#include <hip/hip_fp16.h>
#include <hip/hip_bf16.h>
#include <hip/hip_fp8.h>
using bf16_t = __hip_bfloat16;
using half_t = __half;
#elif PYOPS_HOST
using half_t = host::half;
using bf16_t = host::bf16;
using fp8_e4m3_t = host::fp8_e4m3;
using fp8_e5m2_t = host::fp8_e5m2;
using fp8_e4m3fnuz_t = host::fp8_e4m3fnuz;
#else
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#pragma nv_diag_suppress 1444
#include <cuda_fp8.h>
#pragma nv_diag_default 1444
using bf16_t = __nv_bfloat16;
using fp8_e4m3_t = __nv_fp8_e4m3;
using fp8_e5m2_t = __nv_fp8_e5m2;
using half_t = __half;
#endif

// An fp8 format that the platform does not convert in hardware, implemented with integer arithmetic. MANTISSA: mantissa
// bits. LARGEST: the encoding of the largest finite number. FNUZ: the bias is one more than in the OCP format, and the
// encoding of -0 is NaN. Otherwise 0x7f is NaN, and the encoding after LARGEST, if it is not 0x7f, is infinity.
template <int MANTISSA, uint32_t LARGEST, bool FNUZ>
struct Fp8 {
    static constexpr int BIAS = (1 << (6 - MANTISSA)) - 1 + FNUZ;
    static constexpr int DROPPED = 23 - MANTISSA;  // mantissa bits of a float that fp8 drops
    static constexpr uint32_t REBIASED = uint32_t(127 - BIAS) << 23;
    static constexpr uint32_t NOT_A_NUMBER = FNUZ ? 0x80 : 0x7f;

    uint8_t code;

    Fp8() = default;
    explicit DEVICE Fp8(float x) {
        const uint32_t bits = __float_as_uint(x), sign = bits >> 31 << 7;
        const uint32_t magnitude = min(bits & 0x7fffffffu, (LARGEST << DROPPED) + REBIASED);
        uint32_t rounded = (magnitude + (1u << (DROPPED - 1)) - 1 + (magnitude >> DROPPED & 1) - REBIASED) >> DROPPED;
        if (magnitude < REBIASED + (1u << 23)) {
            // Below the smallest normal number, a float addition does the rounding: the last bit of the float sum is
            // the last bit of the fp8 encoding.
            const uint32_t last = REBIASED + (uint32_t(24 - MANTISSA) << 23);
            rounded = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(last)) - last;
        }
        code = x != x ? NOT_A_NUMBER : FNUZ && rounded == 0 ? 0 : sign | rounded;
    }
    explicit DEVICE operator float() const {
        const uint32_t magnitude = code & 0x7fu, sign = uint32_t(code >> 7) << 31;
        if (FNUZ ? code == NOT_A_NUMBER : magnitude > LARGEST) {
            return __uint_as_float(magnitude == LARGEST + 1 && magnitude < NOT_A_NUMBER ? sign | 0x7f800000u
                                                                                        : 0x7fffffffu);
        }
        const float unit = __uint_as_float(uint32_t(128 - BIAS - MANTISSA) << 23);  // the smallest number
        const float x =
            magnitude >> MANTISSA ? __uint_as_float((magnitude << DROPPED) + REBIASED) : float(int(magnitude)) * unit;
        return __uint_as_float(sign | __float_as_uint(x));
    }
};

#if PYOPS_HIP
// hip_fp8.h defines the formats that the device converts in hardware, or both formats if the device converts neither.
#if HIP_FP8_TYPE_OCP
using fp8_e4m3_t = __hip_fp8_e4m3;
using fp8_e5m2_t = __hip_fp8_e5m2;
#else
using fp8_e4m3_t = Fp8<3, 0x7e, false>;
using fp8_e5m2_t = Fp8<2, 0x7b, false>;
#endif
#if HIP_FP8_TYPE_FNUZ
using fp8_e4m3fnuz_t = __hip_fp8_e4m3_fnuz;
#else
using fp8_e4m3fnuz_t = Fp8<3, 0x7f, true>;
#endif
#elif PYOPS_CUDA
using fp8_e4m3fnuz_t = Fp8<3, 0x7f, true>;
#endif

constexpr float FLOAT_MAX = 3.402823466e+38f;

template <typename A, typename B> struct same_type { static constexpr bool value = false; };
template <typename A> struct same_type<A, A> { static constexpr bool value = true; };
template <typename A, typename B> constexpr bool is_same = same_type<A, B>::value;
template <bool CONDITION, typename A, typename B> struct conditional_type { using type = A; };
template <typename A, typename B> struct conditional_type<false, A, B> { using type = B; };
template <bool CONDITION, typename A, typename B>
using conditional_t = typename conditional_type<CONDITION, A, B>::type;

template <typename T> DEVICE float to_float(T x) { return static_cast<float>(x); }
template <typename T> DEVICE T from_float(float x) { return T(x); }
#if !PYOPS_HOST
template <> DEVICE float to_float<half_t>(half_t x) { return __half2float(x); }
template <> DEVICE float to_float<bf16_t>(bf16_t x) { return __bfloat162float(x); }
template <> DEVICE half_t from_float<half_t>(float x) { return __float2half_rn(x); }
template <> DEVICE bf16_t from_float<bf16_t>(float x) { return __float2bfloat16(x); }
#endif
#if PYOPS_HIP
// hip_fp8.h saturates only finite numbers, so infinities are first made finite.
DEVICE float finite_or_nan(float x) { return ieee_abs(x) > FLOAT_MAX ? copysignf(FLOAT_MAX, x) : x; }
template <> DEVICE fp8_e4m3_t from_float<fp8_e4m3_t>(float x) { return fp8_e4m3_t(finite_or_nan(x)); }
template <> DEVICE fp8_e5m2_t from_float<fp8_e5m2_t>(float x) { return fp8_e5m2_t(finite_or_nan(x)); }
template <> DEVICE fp8_e4m3fnuz_t from_float<fp8_e4m3fnuz_t>(float x) { return fp8_e4m3fnuz_t(finite_or_nan(x)); }
#endif
// Rounds to nearest even and saturates; NaN becomes 0.
template <> DEVICE int8_t from_float<int8_t>(float x) {
#if PYOPS_CUDA
    int result;
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(result) : "f"(x));
    return static_cast<int8_t>(result);
#else
    return static_cast<int8_t>(x != x ? 0.0f : fminf(fmaxf(rintf(x), -128.0f), 127.0f));
#endif
}

// Rounds to nearest even and saturates; NaN becomes 0.
DEVICE int32_t round_to_int(float x) {
#if PYOPS_HIP
    return x != x ? 0 : x >= 0x1p31f ? 2147483647 : x < -0x1p31f ? -2147483647 - 1 : int32_t(rintf(x));
#else
    return __float2int_rn(x);
#endif
}

// x rounded to T.
template <typename T> DEVICE float round_to(float x) { return to_float(from_float<T>(x)); }

// Pairs and groups of four adjacent elements, the lower address first. The hardware converts pairs. Pairs of 16-bit
// elements move as 32-bit words, because the compiler would otherwise move the halves one by one.
template <typename T>
DEVICE void load_pair(const T* in, float& low, float& high) {
    low = to_float(in[0]);
    high = to_float(in[1]);
}
template <typename T>
DEVICE void store_pair(T* out, float low, float high) {
    out[0] = from_float<T>(low);
    out[1] = from_float<T>(high);
}
template <typename T>
DEVICE void store_four(T* out, const float* x) {
    store_pair<T>(out, x[0], x[1]);
    store_pair<T>(out + 2, x[2], x[3]);
}
DEVICE int8_t saturated(int32_t x) { return int8_t(min(max(x, -128), 127)); }
// Stores four integers as int8, saturating. Each of the two instructions packs two integers below the bytes of its last
// operand.
DEVICE void store_four_integers(int8_t* out, const int32_t* x) {
#if PYOPS_CUDA
    int upper;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(upper) : "r"(x[3]), "r"(x[2]));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;"
        : "=r"(*reinterpret_cast<int*>(out))
        : "r"(x[1]), "r"(x[0]), "r"(upper));
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = saturated(x[i]);
#endif
}
// multiply_pair, add_pair and subtract_pair: T(a * b), T(a + b) and T(a - b) of two pairs, element by element, each
// rounded once.
template <typename T>
DEVICE void multiply_pair(T* out, const T* a, const T* b) {
    store_pair<T>(out, ieee_multiply(to_float(a[0]), to_float(b[0])), ieee_multiply(to_float(a[1]), to_float(b[1])));
}
template <typename T>
DEVICE void add_pair(T* out, const T* a, const T* b) {
    store_pair<T>(out, ieee_add(to_float(a[0]), to_float(b[0])), ieee_add(to_float(a[1]), to_float(b[1])));
}
template <typename T>
DEVICE void subtract_pair(T* out, const T* a, const T* b) {
    store_pair<T>(out, ieee_subtract(to_float(a[0]), to_float(b[0])), ieee_subtract(to_float(a[1]), to_float(b[1])));
}
// T(a * b + c) of two pairs. Where the device has no instruction for it, the result is rounded to float32 first.
template <typename T>
DEVICE void multiply_add_pair(T* out, const T* a, const T* b, const T* c) {
    store_pair<T>(out, ieee_fma(to_float(a[0]), to_float(b[0]), to_float(c[0])),
                  ieee_fma(to_float(a[1]), to_float(b[1]), to_float(c[1])));
}
// |absmax| = max(|absmax|, |x|) for each element of a pair. The signs of `absmax` are undefined before and after the
// call. If OR_NAN, a NaN becomes the result; otherwise it is ignored.
template <bool OR_NAN, typename T>
DEVICE void absmax_pair(T* absmax, const T* x) {
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float a = ieee_abs(to_float(absmax[i])), b = ieee_abs(to_float(x[i]));
        y[i] = !OR_NAN ? ieee_max(a, b) : a != a || b < a ? a : b;
    }
    store_pair<T>(absmax, y[0], y[1]);
}

#if PYOPS_CUDA
DEVICE uint32_t& as_word(void* address) { return *reinterpret_cast<uint32_t*>(address); }
DEVICE uint32_t as_word(const void* address) { return *reinterpret_cast<const uint32_t*>(address); }
template <typename Pair> DEVICE Pair word_as(uint32_t word) { return *reinterpret_cast<Pair*>(&word); }
template <typename Pair> DEVICE uint32_t pair_word(Pair pair) { return *reinterpret_cast<uint32_t*>(&pair); }

template <> DEVICE void load_pair<half_t>(const half_t* in, float& low, float& high) {
    const float2 pair = __half22float2(word_as<__half2>(as_word(in)));
    low = pair.x;
    high = pair.y;
}
template <> DEVICE void load_pair<bf16_t>(const bf16_t* in, float& low, float& high) {
    const uint32_t word = as_word(in);  // a bfloat16 is the upper half of a float
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
}
template <> DEVICE void store_pair<half_t>(half_t* out, float low, float high) {
    as_word(out) = pair_word(__floats2half2_rn(low, high));
}
template <> DEVICE void store_pair<bf16_t>(bf16_t* out, float low, float high) {
    as_word(out) = pair_word(__floats2bfloat162_rn(low, high));
}
template <> DEVICE void multiply_pair<half_t>(half_t* out, const half_t* a, const half_t* b) {
    as_word(out) = pair_word(__hmul2_rn(word_as<__half2>(as_word(a)), word_as<__half2>(as_word(b))));
}
template <> DEVICE void multiply_pair<bf16_t>(bf16_t* out, const bf16_t* a, const bf16_t* b) {
    as_word(out) = pair_word(__hmul2_rn(word_as<__nv_bfloat162>(as_word(a)), word_as<__nv_bfloat162>(as_word(b))));
}
template <> DEVICE void add_pair<half_t>(half_t* out, const half_t* a, const half_t* b) {
    as_word(out) = pair_word(__hadd2_rn(word_as<__half2>(as_word(a)), word_as<__half2>(as_word(b))));
}
template <> DEVICE void add_pair<bf16_t>(bf16_t* out, const bf16_t* a, const bf16_t* b) {
    as_word(out) = pair_word(__hadd2_rn(word_as<__nv_bfloat162>(as_word(a)), word_as<__nv_bfloat162>(as_word(b))));
}
template <> DEVICE void subtract_pair<half_t>(half_t* out, const half_t* a, const half_t* b) {
    as_word(out) = pair_word(__hsub2_rn(word_as<__half2>(as_word(a)), word_as<__half2>(as_word(b))));
}
template <> DEVICE void subtract_pair<bf16_t>(bf16_t* out, const bf16_t* a, const bf16_t* b) {
    as_word(out) = pair_word(__hsub2_rn(word_as<__nv_bfloat162>(as_word(a)), word_as<__nv_bfloat162>(as_word(b))));
}
template <> DEVICE void multiply_add_pair<half_t>(half_t* out, const half_t* a, const half_t* b, const half_t* c) {
    as_word(out) =
        pair_word(__hfma2(word_as<__half2>(as_word(a)), word_as<__half2>(as_word(b)), word_as<__half2>(as_word(c))));
}
#if __CUDA_ARCH__ >= 800
template <> DEVICE void multiply_add_pair<bf16_t>(bf16_t* out, const bf16_t* a, const bf16_t* b, const bf16_t* c) {
    using pair_t = __nv_bfloat162;
    as_word(out) =
        pair_word(__hfma2(word_as<pair_t>(as_word(a)), word_as<pair_t>(as_word(b)), word_as<pair_t>(as_word(c))));
}
#endif
#if __CUDA_ARCH__ >= 860
// The result of the instruction is the larger magnitude with the XOR of both signs, so no instruction is spent on
// clearing signs.
#define PYOPS_ABSMAX_PAIR(T, OR_NAN, NAME)                                        \
    template <> DEVICE void absmax_pair<OR_NAN, T>(T * absmax, const T* x) {      \
        asm("max" NAME " %0, %0, %1;" : "+r"(as_word(absmax)) : "r"(as_word(x))); \
    }
PYOPS_ABSMAX_PAIR(half_t, false, ".xorsign.abs.f16x2")
PYOPS_ABSMAX_PAIR(half_t, true, ".NaN.xorsign.abs.f16x2")
PYOPS_ABSMAX_PAIR(bf16_t, false, ".xorsign.abs.bf16x2")
PYOPS_ABSMAX_PAIR(bf16_t, true, ".NaN.xorsign.abs.bf16x2")
#else
#define PYOPS_ABSMAX_PAIR(T, OR_NAN, PAIR, MAX)                                                                    \
    template <> DEVICE void absmax_pair<OR_NAN, T>(T * absmax, const T* x) {                                       \
        as_word(absmax) =                                                                                          \
            pair_word(MAX(word_as<PAIR>(as_word(absmax) & 0x7fff7fffu), word_as<PAIR>(as_word(x) & 0x7fff7fffu))); \
    }
PYOPS_ABSMAX_PAIR(half_t, false, __half2, __hmax2)
PYOPS_ABSMAX_PAIR(half_t, true, __half2, __hmax2_nan)
PYOPS_ABSMAX_PAIR(bf16_t, false, __nv_bfloat162, __hmax2)
PYOPS_ABSMAX_PAIR(bf16_t, true, __nv_bfloat162, __hmax2_nan)
#endif
#undef PYOPS_ABSMAX_PAIR

DEVICE void load_fp8_pair(const void* in, __nv_fp8_interpretation_t kind, float& low, float& high) {
    const float2 pair = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(*static_cast<const uint16_t*>(in), kind)));
    low = pair.x;
    high = pair.y;
}
template <> DEVICE void load_pair<fp8_e4m3_t>(const fp8_e4m3_t* in, float& low, float& high) {
    load_fp8_pair(in, __NV_E4M3, low, high);
}
template <> DEVICE void load_pair<fp8_e5m2_t>(const fp8_e5m2_t* in, float& low, float& high) {
    load_fp8_pair(in, __NV_E5M2, low, high);
}
DEVICE uint32_t fp8_pair(float low, float high, __nv_fp8_interpretation_t kind) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kind);
}
template <> DEVICE void store_pair<fp8_e4m3_t>(fp8_e4m3_t* out, float low, float high) {
    *reinterpret_cast<uint16_t*>(out) = fp8_pair(low, high, __NV_E4M3);
}
template <> DEVICE void store_pair<fp8_e5m2_t>(fp8_e5m2_t* out, float low, float high) {
    *reinterpret_cast<uint16_t*>(out) = fp8_pair(low, high, __NV_E5M2);
}
#if __CUDA_ARCH__ >= 890
#define PYOPS_FP8_FOUR(FORMAT, out, x)                                               \
    asm("{.reg .b16 low, high; cvt.rn.satfinite." FORMAT                             \
        "x2.f32 low, %2, %1;"                                                        \
        " cvt.rn.satfinite." FORMAT "x2.f32 high, %4, %3; mov.b32 %0, {low, high};}" \
        : "=r"(as_word(out))                                                         \
        : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]))
template <> DEVICE void store_four<fp8_e4m3_t>(fp8_e4m3_t* out, const float* x) { PYOPS_FP8_FOUR("e4m3", out, x); }
template <> DEVICE void store_four<fp8_e5m2_t>(fp8_e5m2_t* out, const float* x) { PYOPS_FP8_FOUR("e5m2", out, x); }
#undef PYOPS_FP8_FOUR
#endif
// Rounds each element like from_float<int8_t>.
template <> DEVICE void store_four<int8_t>(int8_t* out, const float* x) {
    const int32_t rounded[4] = {__float2int_rn(x[0]), __float2int_rn(x[1]), __float2int_rn(x[2]), __float2int_rn(x[3])};
    store_four_integers(out, rounded);
}
#endif

#if PYOPS_HIP
// One instruction computes two elements. Its result equals a float32 operation that is rounded to float16.
using halves_t = _Float16 __attribute__((ext_vector_type(2)));
DEVICE halves_t& as_halves(half_t* x) { return *reinterpret_cast<halves_t*>(x); }
DEVICE halves_t as_halves(const half_t* x) { return *reinterpret_cast<const halves_t*>(x); }
template <> DEVICE void multiply_pair<half_t>(half_t* out, const half_t* a, const half_t* b) {
#pragma clang fp contract(off)
    as_halves(out) = as_halves(a) * as_halves(b);
}
template <> DEVICE void subtract_pair<half_t>(half_t* out, const half_t* a, const half_t* b) {
#pragma clang fp contract(off)
    as_halves(out) = as_halves(a) - as_halves(b);
}
#endif

// x / divisor, given an approximate quotient and the correctly rounded reciprocal: the residual corrects the quotient
// (Markstein 1990).
DEVICE float nearer(float quotient, float x, float divisor, float reciprocal) {
    return fmaf(-fmaf(quotient, divisor, -x), reciprocal, quotient);
}

// 1 / x, correctly rounded, if x and 1 / x are both normal: one Newton step from the hardware estimate.
DEVICE float reciprocal_of(float x) {
    const float estimate = estimate_reciprocal(x);
    return fmaf(estimate, fmaf(-x, estimate, 1.0f), estimate);
}
