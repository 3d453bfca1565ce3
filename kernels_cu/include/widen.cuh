// widen.cuh: fp8 elements as pairs of float16 or bfloat16, the operands of products where a device multiplies no fp8.
#pragma once
#include "vec.cuh"

#ifdef __CUDA_ARCH__
constexpr int ARCHITECTURE = __CUDA_ARCH__;  // 900 for sm_90
#else
constexpr int ARCHITECTURE = 0;
#endif

// Two 16-bit elements of T in a word of a fragment, `low` in the lower half.
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

// Four 8-bit elements of T in a word, the first in the lowest byte.
template <typename T>
DEVICE uint32_t pack_four(const float (&x)[4]) {
    Vec<T, 4> four;
    store_four<T>(four.data, x);
    return four.template word<4>(0);
}

// The same of numbers whose NaN are those of T: on AMD, where no instruction rounds to bfloat16, NaN costs none then.
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

// A word of the lower (HIGH: upper) halves of two words, the half of `low` first.
template <bool HIGH>
DEVICE uint32_t pack_halves(uint32_t low, uint32_t high) {
    return byte_perm(low, high, HIGH ? 0x7632 : 0x5410);
}

// A word of the two lower (HIGH: upper) bytes of each of two words, alternating, a byte of `low` first.
template <bool HIGH>
DEVICE uint32_t pack_bytes(uint32_t low, uint32_t high) {
    return byte_perm(low, high, HIGH ? 0x7362 : 0x5140);
}

// Whether an instruction of AMD's makes float32 of a code of T.
template <typename T> constexpr bool MAKES_FLOATS = false;
#if defined(__gfx942__)
template <> constexpr bool MAKES_FLOATS<fp8_e4m3fnuz_t> = true;
#elif defined(__gfx950__) || defined(__GFX12__)
template <> constexpr bool MAKES_FLOATS<fp8_e4m3_t> = true;
#endif

// Four fp8 elements as two words of float16 pairs; float16 holds every fp8 number.
template <typename T>
DEVICE void fp8_to_half(uint32_t codes, uint32_t (&halves)[2]) {
    constexpr bool IS_E5M2 = is_same<T, fp8_e5m2_t>, IS_FNUZ = is_same<T, fp8_e4m3fnuz_t>;
    constexpr bool HAS_INSTRUCTION = PYOPS_CUDA && ARCHITECTURE >= 890 && !IS_FNUZ;
    if constexpr (HAS_INSTRUCTION) {
#if PYOPS_CUDA
        // CUDA's header shifts the upper half of a word down first; the instruction can read it where it is.
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
            // Two codes in the upper bytes of halves. One of e5m2 is float16 without its last bits.
            const uint32_t bytes = byte_perm(codes, 0, i == 0 ? 0x1404 : 0x3424);
            halves[i] = bytes;
            if constexpr (!IS_E5M2) {
                // Exponent and mantissa of e4m3, in their places in float16, are a number 2^-8 (FNUZ: 2^-7) times as
                // large, and so are those of subnormal numbers.
                const uint32_t sign = bytes & 0x80008000u, magnitude = bytes & 0x7f007f00u;
                Vec<half_t, 2> pair;
                pair.template word<2>(0) = sign | magnitude >> 1;
                pair = pair * Vec<half_t, 2>::full(IS_FNUZ ? 128.0f : 256.0f);
                // The sign bit of each half that is NaN: of -0, or of the largest magnitude. It becomes 0x7e00.
                const uint32_t is_nan =
                    IS_FNUZ ? sign & ~(magnitude + 0x7f007f00u) : (magnitude + 0x01000100u) & 0x80008000u;
                halves[i] = pair.template word<2>(0) | (is_nan - (is_nan >> 6));
            }
        }
    }
}

// Four e4m3 elements (not FNUZ) as two words of bfloat16 pairs; bfloat16 holds every fp8 number.
DEVICE void fp8_to_bf16(uint32_t codes, uint32_t (&pairs)[2]) {
    if constexpr (PYOPS_CUDA && ARCHITECTURE >= 890) {
        // Four conversions of a pair take less time than the nine integer operations below.
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
            // Exponent and mantissa, in their places in bfloat16, are a number 2^-120 times as large, and so are those
            // of subnormal numbers.
            const uint32_t bytes = byte_perm(codes, 0, i == 0 ? 0x1404 : 0x3424);
            const uint32_t magnitude = bytes & 0x7f007f00u;
            Vec<bf16_t, 2> pair;
            pair.template word<2>(0) = (bytes & 0x80008000u) | magnitude >> 4;
            pair = pair * Vec<bf16_t, 2>::full(0x1p120f);
            // The sign bit of each half that is NaN: of the largest magnitude. It becomes 0x7fc0.
            const uint32_t is_nan = (magnitude + 0x01000100u) & 0x80008000u;
            pairs[i] = pair.template word<2>(0) | (is_nan - (is_nan >> 9));
        }
    }
}

// Four fp8 elements of type C as two words of pairs of T, float16 or bfloat16, of which either holds every fp8 number.
template <typename T, typename C>
DEVICE void fp8_to_pairs(uint32_t codes, uint32_t (&pairs)[2]) {
    fp8_to_half<C>(codes, pairs);
#pragma unroll
    for (int i = 0; i < 2 && is_same<T, bf16_t>; ++i) {
        float low, high;
        unpack_pair<half_t>(pairs[i], low, high);
        pairs[i] = pack_halves<true>(__float_as_uint(low), __float_as_uint(high));
    }
}

// 8, or 16, e4m3 elements as elements of T.
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

// The same times a scale: products of float32, rounded to T.
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
