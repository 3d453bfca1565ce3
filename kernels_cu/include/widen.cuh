// widen.cuh: conversion of fp8 to pairs of float16 or bfloat16, for MMAs on devices without fp8 MMA.
#pragma once
#include "vec.cuh"

#ifdef __CUDA_ARCH__
constexpr int ARCHITECTURE = __CUDA_ARCH__;  // 900 for sm_90
#else
constexpr int ARCHITECTURE = 0;
#endif

// Packs two 16-bit elements of T into a word of a fragment, `low` in the lower half.
template <typename T>
DEVICE uint32_t pack_pair(float low, float high) {
    Vec<T, 2> pair;
    store_pair<T>(pair.data, low, high);
    return pair.template word<2>(0);
}
template <typename T>
DEVICE void unpack_pair(uint32_t word, float& low, float& high) {
    Vec<T, 2> pair;
    pair.template word<2>(0) = word;
    load_pair<T>(pair.data, low, high);
}

// Packs four 8-bit elements of T into a word, the first in the lowest byte.
template <typename T>
DEVICE uint32_t pack_four(const float (&x)[4]) {
    Vec<T, 4> four;
    store_four<T>(four.data, x);
    return four.template word<4>(0);
}

// pack_pair for floats with NaN that T represents exactly. On AMD GPUs without an instruction that rounds to bfloat16,
// such NaN need no check.
template <typename T>
DEVICE uint32_t pack_pair_of_plain_nan(float low, float high) {
#if PYOPS_HIP && !defined(__gfx950__)
    if constexpr (is_same<T, bf16_t>) {
        const uint32_t x = __float_as_uint(low), y = __float_as_uint(high);
        return byte_perm(x + (x >> 16 & 1) + 0x7fff, y + (y >> 16 & 1) + 0x7fff, 0x7632);
    }
#endif
    return pack_pair<T>(low, high);
}

// Packs the lower (HIGH: upper) halves of two words into one word, the half of `low` first.
template <bool HIGH>
DEVICE uint32_t pack_halves(uint32_t low, uint32_t high) {
    return byte_perm(low, high, HIGH ? 0x7632 : 0x5410);
}

// Packs the two lower (HIGH: upper) bytes of each of two words into one word, alternating, a byte of `low` first.
template <bool HIGH>
DEVICE uint32_t pack_bytes(uint32_t low, uint32_t high) {
    return byte_perm(low, high, HIGH ? 0x7362 : 0x5140);
}

// Whether an AMD instruction converts fp8 values of T to float32.
template <typename T> constexpr bool MAKES_FLOATS = false;
#if defined(__gfx942__)
template <> constexpr bool MAKES_FLOATS<fp8_e4m3fnuz_t> = true;
#elif defined(__gfx950__) || defined(__GFX12__)
template <> constexpr bool MAKES_FLOATS<fp8_e4m3_t> = true;
#endif

// Makes NaN of e4m3 values in T where they are 480, which NaN counts as before. `magnitude`: exponents and mantissas of
// e4m3, in the upper bytes of both halves.
template <typename T>
DEVICE uint32_t with_nan(const Vec<T, 2>& pair, uint32_t magnitude) {
    constexpr bool IS_HALF = is_same<T, half_t>;
    if constexpr (PYOPS_HIP) {
        // is_nan has the sign bit of each half that is NaN, which becomes 0x7e00 or 0x7fc0.
        const uint32_t is_nan = (magnitude + 0x01000100u) & 0x80008000u;
        return pair.template word<2>(0) | (is_nan - (is_nan >> (IS_HALF ? 6 : 9)));
    } else {
        // Of all values 480 alone becomes infinite by this factor, and infinity times zero is NaN. Logic instructions
        // have half the rate of multiplications.
        const auto large = pair * Vec<T, 2>::full(IS_HALF ? 144.0f : 0x1.2p119f), zero = Vec<T, 2>::full(0.0f);
        Vec<T, 2> result;
        multiply_add_pair<T>(result.data, large.data, zero.data, pair.data);
        return result.template word<2>(0);
    }
}

// Converts four fp8 elements to two words of float16 pairs; float16 represents every fp8 value.
template <typename T>
DEVICE void fp8_to_half(uint32_t codes, uint32_t (&halves)[2]) {
    constexpr bool IS_E5M2 = is_same<T, fp8_e5m2_t>, IS_FNUZ = is_same<T, fp8_e4m3fnuz_t>;
    constexpr bool HAS_INSTRUCTION = PYOPS_CUDA && ARCHITECTURE >= 890 && !IS_FNUZ;
    if constexpr (HAS_INSTRUCTION) {
#if PYOPS_CUDA
        // CUDA's header first shifts the upper half of a word down; the instruction can read the upper half directly.
#define PYOPS_FP8(FORMAT)                                                                                      \
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2." FORMAT " %0, low; cvt.rn.f16x2." FORMAT \
        " %1, high;}"                                                                                          \
        : "=r"(halves[0]), "=r"(halves[1])                                                                     \
        : "r"(codes))
        if constexpr (IS_E5M2) PYOPS_FP8("e5m2x2");
        else PYOPS_FP8("e4m3x2");
#undef PYOPS_FP8
#endif
    } else if constexpr (MAKES_FLOATS<T>) {
#if defined(__gfx942__) || defined(__gfx950__) || defined(__GFX12__)
#define PYOPS_FLOAT(BYTE) __builtin_amdgcn_cvt_f32_fp8(codes, BYTE)
        halves[0] = __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(PYOPS_FLOAT(0), PYOPS_FLOAT(1)));
        halves[1] = __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(PYOPS_FLOAT(2), PYOPS_FLOAT(3)));
#undef PYOPS_FLOAT
#endif
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // Two fp8 values move to the upper bytes of the halves. An e5m2 value is the upper byte of a float16.
            const uint32_t bytes = byte_perm(codes, 0, i == 0 ? 0x1404 : 0x3424);
            halves[i] = bytes;
            if constexpr (!IS_E5M2) {
                // The exponent and mantissa bits of e4m3, moved to those of float16, are 2^-8 (FNUZ: 2^-7) times the
                // value. This also holds for subnormal numbers.
                const uint32_t sign = bytes & 0x80008000u, magnitude = bytes & 0x7f007f00u;
                Vec<half_t, 2> pair;
                pair.template word<2>(0) = sign | (bytes >> 1 & 0x3f803f80u);
                pair = pair * Vec<half_t, 2>::full(IS_FNUZ ? 128.0f : 256.0f);
                // FNUZ: is_nan has the sign bit of each half that is NaN, -0, which becomes 0x7e00.
                const uint32_t is_nan = sign & ~(magnitude + 0x7f007f00u);
                if constexpr (IS_FNUZ) halves[i] = pair.template word<2>(0) | (is_nan - (is_nan >> 6));
                else halves[i] = with_nan(pair, magnitude);
            }
        }
    }
}

// Whether fp8_to_half_operand makes its result by integer operations.
template <typename T>
constexpr bool BY_INTEGERS = is_same<T, fp8_e4m3_t> && !PYOPS_HIP && ARCHITECTURE < 890;
// The factor by which the numbers of fp8_to_half_operand are too small.
template <typename T>
constexpr int OPERAND_FACTOR = BY_INTEGERS<T> ? 256 : 1;

// NaN among the e4m3 values that fp8_to_half_operand has converted to numbers: it takes NaN for 480.
struct NanCount {
    // From 2048 on the ulp of float16 is 2. The factor makes 480 / 256 more than half of it, which rounds up, and
    // 448 / 256 less. So only NaN changes the sum: one instruction for a pair.
    Vec<half_t, 2> sum = Vec<half_t, 2>::full(2048.0f);

    DEVICE void add(uint32_t magnitudes) {
        Vec<half_t, 2> pair;
        pair.template word<2>(0) = magnitudes;
        const auto factor = Vec<half_t, 2>::full(0.55f);
        multiply_add_pair<half_t>(sum.data, pair.data, factor.data, sum.data);
    }
    // `word`, or a pair of NaN if there was one.
    DEVICE uint32_t mark(uint32_t word) const {
        return sum.template word<2>(0) == Vec<half_t, 2>::full(2048.0f).template word<2>(0) ? word : 0x7fff7fffu;
    }
};

// Converts four fp8 elements to two words of float16 pairs, for MMAs with both operands from here: pairs may be of
// elements 0 and 2, and 1 and 3, too small by OPERAND_FACTOR, with NaN counted but not converted. Then they take 9
// instructions, those of fp8_to_half 14.
template <typename T>
DEVICE void fp8_to_half_operand(uint32_t quants, uint32_t (&halves)[2], NanCount& nans) {
    if constexpr (BY_INTEGERS<T>) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t magnitudes = (i == 0 ? quants << 7 : quants >> 1) & 0x3f803f80u;
            nans.add(magnitudes);
            halves[i] = ((i == 0 ? quants << 8 : quants) & 0x80008000u) | magnitudes;
        }
    } else {
        fp8_to_half<T>(quants, halves);
    }
}

// Converts four e4m3 elements (not FNUZ) to two words of bfloat16 pairs; bfloat16 represents every fp8 value.
DEVICE void fp8_to_bf16(uint32_t codes, uint32_t (&pairs)[2]) {
    if constexpr (PYOPS_CUDA && ARCHITECTURE >= 890) {
        // Four conversions of pairs take less time than the nine integer operations below.
        fp8_to_half<fp8_e4m3_t>(codes, pairs);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float low, high;
            unpack_pair<half_t>(pairs[i], low, high);
            pairs[i] = pack_pair<bf16_t>(low, high);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // The exponent and mantissa bits, moved to those of bfloat16, are 2^-120 times the value. This also holds
            // for subnormal numbers.
            const uint32_t bytes = byte_perm(codes, 0, i == 0 ? 0x1404 : 0x3424);
            const uint32_t magnitude = bytes & 0x7f007f00u;
            Vec<bf16_t, 2> pair;
            pair.template word<2>(0) = (bytes & 0x80008000u) | (bytes >> 4 & 0x07f007f0u);
            pair = pair * Vec<bf16_t, 2>::full(0x1p120f);
            pairs[i] = with_nan(pair, magnitude);
        }
    }
}

// Converts four fp8 elements of type C to two words of pairs of T, float16 or bfloat16. Both represent every fp8 value.
template <typename T, typename C>
DEVICE void fp8_to_pairs(uint32_t codes, uint32_t (&pairs)[2]) {
    if constexpr (is_same<T, bf16_t> && is_same<C, fp8_e4m3_t> && !MAKES_FLOATS<C>) return fp8_to_bf16(codes, pairs);
    fp8_to_half<C>(codes, pairs);
#pragma unroll
    for (int i = 0; i < 2 && is_same<T, bf16_t>; ++i) {
        float low, high;
        unpack_pair<half_t>(pairs[i], low, high);
        pairs[i] = pack_halves<true>(__float_as_uint(low), __float_as_uint(high));
    }
}

// Converts 8 or 16 e4m3 elements to T.
template <typename T>
DEVICE void widen_fp8(uint2 codes, uint4 (&elements)[1]) {
    const uint32_t words[2] = {codes.x, codes.y};
    uint32_t pairs[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if constexpr (is_same<T, half_t>) fp8_to_half<fp8_e4m3_t>(words[i], pairs[i]);
        else fp8_to_bf16(words[i], pairs[i]);
    }
    elements[0] = make_uint4(pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]);
}

// Converts e4m3 elements to T and multiplies them by a scale: the products are float32, rounded to T.
template <typename T>
DEVICE void widen_scaled_fp8(uint2 codes, float scale, uint4 (&elements)[1]) {
    const uint32_t words[2] = {codes.x, codes.y};
    uint32_t pairs[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i % 2 == 0) fp8_to_half<fp8_e4m3_t>(words[i / 2], pairs[i / 2]);
        uint32_t& pair = pairs[i / 2][i % 2];
        float low, high;
        unpack_pair<half_t>(pair, low, high);
        pair = pack_pair<T>(low * scale, high * scale);
    }
    elements[0] = make_uint4(pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]);
}

template <typename T>
DEVICE void widen_fp8(uint4 codes, uint4 (&elements)[2]) {
    uint4 half[1];
    widen_fp8<T>(make_uint2(codes.x, codes.y), half);
    elements[0] = half[0];
    widen_fp8<T>(make_uint2(codes.z, codes.w), half);
    elements[1] = half[0];
}

template <typename T>
DEVICE void widen_scaled_fp8(uint4 codes, float scale, uint4 (&elements)[2]) {
    uint4 half[1];
    widen_scaled_fp8<T>(make_uint2(codes.x, codes.y), scale, half);
    elements[0] = half[0];
    widen_scaled_fp8<T>(make_uint2(codes.z, codes.w), scale, half);
    elements[1] = half[0];
}
