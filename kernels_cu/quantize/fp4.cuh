// fp4.cuh: quantisation to NVFP4: blocks of sixteen adjacent e2m1 values with one e4m3 scale per block, and the layout
// of the scales.
//
//     a = max |x| of the sixteen values, NaN ignored
//     s = e4m3(g * (a * (1/6))), saturating, where g is the scale of the whole tensor
//     q = e2m1(x * r),   r = 1 / (s * (1 / g)), or 0 if s is 0
//
// so that x is about q * s / g. Every operation is float32, rounded to nearest even; so are e4m3 and e2m1. The bits of
// e2m1 are the sign, then the index of the magnitude in 0, 0.5, 1, 1.5, 2, 3, 4, 6. NaN becomes 6. The conversion uses
// float32 arithmetic, which every architecture has, and gives the same bits as the e2m1 conversion instructions of the
// few architectures that have them.

#pragma once
#include "quant.cuh"
#include "vec.cuh"

constexpr int FP4_BLOCK = 16;  // elements under one scale

// Scales are stored in tiles of 128 rows and 4 columns, the layout of block-scaled MMAs: row m of a tile begins at byte
// m % 32 * 16 + m / 32 * 4, so that the scales of rows m, m + 32, m + 64 and m + 96 are contiguous.
constexpr int FP4_TILE_ROWS = 128, FP4_TILE_COLUMNS = 4;

// The bits of the float 2^23 + (e2m1 bits of x) for a magnitude x < 7; for larger x and NaN, bits above those of
// 2^23 + 7. Adding 2^23 rounds x to an integer in the low mantissa bits. The e2m1 spacing is 0.5 up to 2, 1 up to 4 and
// 2 above: each of the three lines below is exact in its range and never smaller elsewhere, so their minimum is right.
// Positive floats compare like their bits, and NaN compares above all.
DEVICE uint32_t e2m1_bits(float x) {
    const float fine = fmaf(x, 2.0f, 0x1p23f);
    const float middle = x + (0x1p23f + 2.0f);
    const float coarse = fmaf(x, 0.5f, 0x1p23f + 4.0f);
    return min_of_three(__float_as_uint(fine), __float_as_uint(middle), __float_as_uint(coarse));
}

// The scale g of all values.
struct Fp4Tensor {
    float g, reciprocal;
    // If absmax * r is below the limit, the block takes the fast path (ORDINARY). The limit is 0, which disables the
    // fast path, if g is so large or small that s / g or its reciprocal may be subnormal or infinite.
    float limit;

    explicit DEVICE Fp4Tensor(float g)
        : g(g),
          reciprocal(ieee_divide(1.0f, g)),
          limit(ieee_abs(g) >= 0x1p-100f && ieee_abs(g) <= 0x1p100f ? 7.0f : 0.0f) {}
};

// The scale s of sixteen values with largest magnitude `a`, and the factor r. ORDINARY: the tensor's limit is not 0.
struct Fp4Scale {
    fp8_e4m3_t code;
    float factor;

    template <bool ORDINARY>
    static DEVICE Fp4Scale of(float a, const Fp4Tensor& tensor) {
        const float scale = ieee_multiply(tensor.g, ieee_multiply(a, 1.0f / 6.0f));
        Fp4Scale of;
        // fminf turns NaN into the largest e4m3 value.
        of.code = from_float<fp8_e4m3_t>(ORDINARY ? scale : fminf(scale, Codes<fp8_e4m3_t>::largest));
        const float s = to_float(of.code);
        const float divisor = ieee_multiply(s, tensor.reciprocal);
        const float quotient = ORDINARY ? reciprocal_of(divisor) : ieee_divide(1.0f, s == 0.0f ? 1.0f : divisor);
        of.factor = s == 0.0f ? 0.0f : quotient;
        return of;
    }
};

// Two values of 16 bits in a word, the first in its lower half.
template <typename T>
DEVICE Vec<T, 2> pair_of(uint32_t word) {
    Vec<T, 2> pair;
    pair.template word<2>(0) = word;
    return pair;
}
template <typename T>
DEVICE void pair_of(uint32_t word, float& low, float& high) {
    load_pair<T>(pair_of<T>(word).data, low, high);
}
template <typename T>
DEVICE uint32_t word_of_pair(float low, float high) {
    Vec<T, 2> pair;
    store_pair<T>(pair.data, low, high);
    return pair.template word<2>(0);
}

// A block of sixteen 16-bit values to be quantised.
template <typename T>
struct Fp4Block {
    uint32_t words[8];  // two values per word
    float max_or_nan;   // the largest magnitude, or NaN if any value is NaN

    Fp4Block() = default;
    explicit DEVICE Fp4Block(const uint32_t (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i] = x[i];
        Vec<T, 2> largest = pair_of<T>(words[0]);
#pragma unroll
        for (int i = 1; i < 8; ++i) absmax_pair<true>(largest.data, pair_of<T>(words[i]).data);
        absmax_pair<true>(largest.data, pair_of<T>(__byte_perm(largest.template word<2>(0), 0, 0x1032)).data);
        max_or_nan = ieee_abs(largest[0]);
    }

    // The largest magnitude, NaN ignored. Without NaN it equals max_or_nan, which is cheaper.
    DEVICE float absmax() const {
        Vec<T, 2> largest = Vec<T, 2>::full(0.0f);
#pragma unroll
        for (int i = 0; i < 8; ++i) absmax_pair<false>(largest.data, pair_of<T>(words[i]).data);
        return ieee_max(ieee_abs(largest[0]), ieee_abs(largest[1]));
    }

    // The signs of eight values, from word `first` on, at the sign bits of their e2m1 nibbles: bits 3, 7, ..., 31.
    DEVICE uint32_t signs(int first) const {
        const uint32_t low = __byte_perm(words[first], words[first + 1], 0x7351);  // the bytes that hold signs
        const uint32_t high = __byte_perm(words[first + 2], words[first + 3], 0x7351);
        const uint32_t even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
        return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
    }

    // Eight values times `factor` as e2m1, the first value in the lowest nibble. ORDINARY: all scaled magnitudes are
    // below 7.
    template <bool ORDINARY>
    DEVICE uint32_t eight(int half, float factor) const {
        uint32_t quantized = 0, sign = signs(half * 4);
        if (!ORDINARY && __float_as_uint(factor) >> 31) sign ^= 0x88888888u;  // the factor is -0, because g is
#pragma unroll
        for (int i = 6; i >= 0; i -= 2) {
            float x[2];
            pair_of<T>(words[half * 4 + i / 2], x[0], x[1]);
#pragma unroll
            for (int j = 1; j >= 0; --j) {
                const float y = ieee_multiply(ieee_abs(x[j]), factor);
                uint32_t bits = e2m1_bits(y);
                if constexpr (!ORDINARY) {
                    bits = min(bits, __float_as_uint(0x1p23f + 7.0f));
                    if (y != y) sign &= ~(8u << (i + j) * 4);
                }
                quantized = quantized * 16 + bits;
            }
        }
        return quantized + (sign - 0x11111111u * __float_as_uint(0x1p23f));
    }
    template <bool ORDINARY>
    DEVICE Vec<uint8_t, 8> quantized(float factor) const {
        Vec<uint8_t, 8> bytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) bytes.template word<4>(half * 4) = eight<ORDINARY>(half, factor);
        return bytes;
    }
    // Writes the e2m1 values and returns the scale's byte.
    template <int ACCESS>
    DEVICE uint8_t write(uint8_t* address, const Fp4Tensor& tensor) const {
        Fp4Scale scale = Fp4Scale::of<true>(max_or_nan, tensor);
        if (max_or_nan * scale.factor < tensor.limit) {
            quantized<true>(scale.factor).template store<ACCESS>(address);
        } else {  // also where max_or_nan is NaN
            scale = Fp4Scale::of<false>(absmax(), tensor);
            quantized<false>(scale.factor).template store<ACCESS>(address);
        }
        return reinterpret_cast<const uint8_t&>(scale.code);
    }
};
