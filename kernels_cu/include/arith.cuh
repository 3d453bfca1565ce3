// arith.cuh: IEEE 754 float arithmetic, fast estimates, and integer instructions.
#pragma once
#include "platform.cuh"

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

DEVICE constexpr float power_of_two(int exponent) {
    return exponent == 0 ? 1.0f : exponent > 0 ? 2.0f * power_of_two(exponent - 1) : 0.5f * power_of_two(exponent + 1);
}

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;  // log2(e), log(2)

// The hardware estimates of 2^x and 1 / x, accurate to about 22 bits; correctly rounded on the host. Subnormal
// arguments and results are flushed to 0.
DEVICE float estimate_exp2(float x) {
#if PYOPS_HIP
    return __builtin_amdgcn_exp2f(x);
#elif PYOPS_HOST
    return host_flush(exp2f(host_flush(x)));
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

DEVICE float estimate_reciprocal(float x) {
#if PYOPS_HIP
    return __builtin_amdgcn_rcpf(x);
#elif PYOPS_HOST
    return host_flush(1.0f / host_flush(x));
#else
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

// IEEE arithmetic, for results that equal eager tensor arithmetic. CuPy compiles with -ftz=true: plain operators flush
// subnormal floats to 0, and the compiler may fuse a multiplication with an addition. These functions do neither.
#if PYOPS_CUDA
#define PYOPS_IEEE(NAME, INSTRUCTION, RESULT)                            \
    DEVICE float NAME(float a, float b) {                                \
        float result;                                                    \
        asm(INSTRUCTION " %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b)); \
        return result;                                                   \
    }
#elif PYOPS_HIP
// HIP's __fmul_rn and the like are plain operators, too. The pragma keeps clang from fusing the result into another
// operation.
#define PYOPS_IEEE(NAME, INSTRUCTION, RESULT) \
    DEVICE float NAME(float a, float b) { _Pragma("clang fp contract(off)") return RESULT; }
#else
#define PYOPS_IEEE(NAME, INSTRUCTION, RESULT) \
    DEVICE float NAME(float a, float b) { return RESULT; }
#endif
PYOPS_IEEE(ieee_add, "add.rn.f32", a + b)
PYOPS_IEEE(ieee_subtract, "sub.rn.f32", a - b)
PYOPS_IEEE(ieee_multiply, "mul.rn.f32", a* b)
PYOPS_IEEE(ieee_divide, "div.rn.f32", a / b)
PYOPS_IEEE(ieee_max, "max.f32", fmaxf(a, b))  // a NaN argument is ignored
PYOPS_IEEE(ieee_min, "min.f32", fminf(a, b))  // likewise
#undef PYOPS_IEEE

// a * b + c, rounded once.
DEVICE float ieee_fma(float a, float b, float c) {
#if PYOPS_CUDA
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
#else
    return __fmaf_rn(a, b, c);
#endif
}

// c - a * b, rounded once.
DEVICE float ieee_residual(float a, float b, float c) {
#if PYOPS_CUDA
    float result;
    asm("{.reg .f32 negative; neg.f32 negative, %1; fma.rn.f32 %0, negative, %2, %3;}"
        : "=f"(result)
        : "f"(a), "f"(b), "f"(c));
    return result;
#else
    return __fmaf_rn(-a, b, c);
#endif
}

// a + b, rounded down, for a sum other than 0.
DEVICE float add_down(float a, float b) {
#if PYOPS_CUDA
    return __fadd_rd(a, b);
#else
    const float nearest = float(double(a) + double(b));
    if (!(double(nearest) > double(a) + double(b))) return nearest;
    return __int_as_float(__float_as_int(nearest) + (nearest > 0.0f ? -1 : 1));
#endif
}

// |x|. It is an operand modifier of the instruction that uses it where possible.
DEVICE float ieee_abs(float x) {
#if PYOPS_CUDA
    float result;
    asm("abs.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return __uint_as_float(__float_as_uint(x) & 0x7fffffffu);
#endif
}

DEVICE bool ieee_less_equal(float a, float b) {
#if PYOPS_CUDA
    uint32_t result;
    asm("set.le.u32.f32 %0, %1, %2;" : "=r"(result) : "f"(a), "f"(b));
    return result;
#else
    return a <= b;
#endif
}

// The largest of three numbers if it is positive, otherwise any of them. The comparison is on integers, which takes one
// instruction from sm_90 on.
DEVICE float largest_if_positive(float a, float b, float c) {
    return __int_as_float(max(max(__float_as_int(a), __float_as_int(b)), __float_as_int(c)));
}

// x clamped to 0 ... 1; NaN becomes 0.
DEVICE float saturate(float x) {
#if PYOPS_CUDA
    return __saturatef(x);
#else
    return x > 0.0f ? fminf(x, 1.0f) : 0.0f;
#endif
}

// The bits of the float 2^23 + floor(a * b); their low bits are the integer floor(a * b). The product must be exact and
// 0 <= a * b < 2^23.
DEVICE uint32_t floor_bits(float a, float b) {
#if PYOPS_CUDA
    return __float_as_uint(__fmaf_rd(a, b, 0x1p23f));
#else
    return __float_as_uint(0x1p23f + floorf(a * b));
#endif
}

// floor(a * b) plus a constant, modulo 2^32, for |a * b| < 2^22; the product need not be exact in float. Subnormal
// numbers are not flushed to 0.
DEVICE uint32_t floor_of_22_bits(float a, float b) {
#if PYOPS_CUDA
    float result;
    asm("fma.rm.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(0x1.8p23f));
    return __float_as_uint(result);
#else
    return __float_as_uint(0x1.8p23f + float(floor(double(a) * double(b))));
#endif
}

// count_bits: number of set bits. used_bits: number of bits up to the highest set bit. lowest_bit: index of the lowest
// set bit.
// Whether x > 0, also for a subnormal x, which a comparison of floats flushes to 0.
DEVICE bool is_positive(float x) { return __float_as_uint(x) - 1u < 0x7f800000u; }

DEVICE int count_bits(uint32_t bits) { return __popc(bits); }
DEVICE int count_bits(uint64_t bits) { return __popcll(bits); }
DEVICE int used_bits(uint32_t bits) { return 32 - __clz(int(bits)); }
DEVICE int lowest_bit(uint32_t bits) { return __ffs(int(bits)) - 1; }
DEVICE int lowest_bit(uint64_t bits) { return __ffsll(int64_t(bits)) - 1; }

// The smallest of three integers. This and the next three functions are one instruction each from sm_90 on (DPX).
DEVICE uint32_t min_of_three(uint32_t a, uint32_t b, uint32_t c) {
#if PYOPS_CUDA
    return __vimin3_u32(a, b, c);
#else
    return min(a, min(b, c));
#endif
}

// Operations on two unsigned 16-bit integers in a word, each on its own: the smallest of three, the largest of three,
// and min(a + b, c) with the sum modulo 2^16.
DEVICE uint32_t min_of_three_pairs(uint32_t a, uint32_t b, uint32_t c) {
#if PYOPS_CUDA
    return __vimin3_u16x2(a, b, c);
#else
    return min(a >> 16, min(b >> 16, c >> 16)) << 16 | min(a & 0xffffu, min(b & 0xffffu, c & 0xffffu));
#endif
}

DEVICE uint32_t max_of_three_pairs(uint32_t a, uint32_t b, uint32_t c) {
#if PYOPS_CUDA
    return __vimax3_u16x2(a, b, c);
#else
    return max(a >> 16, max(b >> 16, c >> 16)) << 16 | max(a & 0xffffu, max(b & 0xffffu, c & 0xffffu));
#endif
}

DEVICE uint32_t min_of_sums(uint32_t a, uint32_t b, uint32_t c) {
#if PYOPS_CUDA
    return __viaddmin_u16x2(a, b, c);
#else
    return min(((a >> 16) + (b >> 16)) & 0xffffu, c >> 16) << 16 | min((a + b) & 0xffffu, c & 0xffffu);
#endif
}

// Selects bytes of `low` (numbers 0 to 3) and of `high` (4 to 7) by the hexadecimal digits of `selector`, the lowest
// byte first. HIP's own __byte_perm compiles to shifts and masks.
DEVICE uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
#if PYOPS_HIP
    const uint32_t digits =
        (selector & 7) | (selector & 0x70) << 4 | (selector & 0x700) << 8 | (selector & 0x7000) << 12;
    return __builtin_amdgcn_perm(high, low, digits);
#else
    return __byte_perm(low, high, selector);
#endif
}

// Four bytes. Each is the sign of a byte of x (0 to 3) or y (4 to 7), copied to all 8 bits; the digits of SELECTOR
// choose the bytes, the last digit first. byte_perm drops the selector bit that requests this.
template <uint32_t SELECTOR>
DEVICE uint32_t signs_of_bytes(uint32_t x, uint32_t y) {
#if PYOPS_CUDA
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "n"(SELECTOR | 0x8888));
    return result;
#else
    return (byte_perm(x, y, SELECTOR) >> 7 & 0x01010101u) * 0xff;
#endif
}
