// fp4.cuh: NVFP4, codes of e2m1 for sixteen neighbouring values under one scale of e4m3, and where the scales lie.
//
//     a = max |x| of the sixteen, NaN left out    s = e4m3(g * (a * (1/6))), saturating, g the scale of the whole tensor
//     code = e2m1(x * r)                          r = 1 / (s * (1 / g)), or 0 where s is 0
//
// so that x is about code * s / g. Every step is a float32 operation, rounded to nearest even; so are e4m3 and e2m1. Of a
// code of four bits the upper one is the sign and the others number 0, 0.5, 1, 1.5, 2, 3, 4, 6. NaN becomes 6. The bits
// are found by arithmetic that every architecture has; it equals the conversions of the few that have them.
#pragma once
#include "math.cuh"
#include "quant.cuh"

constexpr int FP4_BLOCK = 16;  // elements under one scale

// The code of a magnitude, in the lowest four bits. Adding 2^23 rounds to an integer, which the lowest bits then hold.
// Codes grow by one with every half up to 2, every 1 up to 4, and every 2 from there.
DEVICE uint32_t e2m1_bits(float x) {
    const float fine = fmaf(x, 2.0f, 0x1p23f);
    const float middle = x + (0x1p23f + 2.0f);
    const float coarse = fmaf(x, 0.5f, 0x1p23f + 4.0f);
    return __float_as_uint(fminf(fminf(fine, middle), fminf(coarse, 0x1p23f + 7.0f)));  // the last takes NaN to 7
}

// The scale of sixteen values whose largest magnitude is `a`, and the factor r.
struct Fp4Scale {
    fp8_e4m3_t code;
    float factor;

    DEVICE Fp4Scale(float a, float g, float reciprocal_of_g) {
        const float scale = ieee_multiply(g, ieee_multiply(a, 1.0f / 6.0f));
        code = from_float<fp8_e4m3_t>(fminf(scale, Codes<fp8_e4m3_t>::largest));  // which takes NaN to the largest
        const float s = to_float(code);
        factor = s == 0.0f ? 0.0f : ieee_divide(1.0f, ieee_multiply(s, reciprocal_of_g));
    }
};

// Sixteen values of 16 bits on their way to codes.
template <typename T>
struct Fp4Block {
    Vec<T, 8> magnitudes[2];
    uint32_t signs[2];  // as in a word of codes: bits 3, 7, ... 31

    explicit DEVICE Fp4Block(const Vec<T, 8> (&x)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                words[i] = x[half].template word<2>(2 * i);
                magnitudes[half].template word<2>(2 * i) = words[i] & 0x7fff7fffu;
            }
            // The bytes that hold signs: of the even elements, then of the odd ones.
            const uint32_t low = __byte_perm(words[0], words[1], 0x7351), high = __byte_perm(words[2], words[3], 0x7351);
            const uint32_t even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
            signs[half] = (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
        }
    }

    // The largest magnitude, NaN left out. NaN becomes infinity here: it has the code that NaN is to have.
    DEVICE float absmax() {
        T most[2] = {T(0.0f), T(0.0f)};
#pragma unroll
        for (int i = 0; i < FP4_BLOCK; i += 2) max_pair_or_nan<T>(most, magnitudes[i / 8].data + i % 8);
        const float low = to_float(most[0]), high = to_float(most[1]);
        if (low == low && high == high) return ieee_max(low, high);
        const float others = ieee_max(magnitudes[0].absmax(), magnitudes[1].absmax());
#pragma unroll
        for (int i = 0; i < FP4_BLOCK; ++i) {
            if (magnitudes[i / 8][i % 8] == magnitudes[i / 8][i % 8]) continue;
            magnitudes[i / 8].data[i % 8] = from_float<T>(-minus_infinity());
            signs[i / 8] &= ~(8u << i % 8 * 4);
        }
        return others;
    }

    // The codes of eight of them times `factor`, the first in the lowest bits.
    DEVICE uint32_t codes(int half, float factor) const {
        float x[8];
        magnitudes[half].to_floats(x);
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) word = word >> 4 | e2m1_bits(ieee_multiply(x[j], factor)) << 28;
        return word | signs[half];
    }
};

// Sixteen elements as they are read: of the input, or GATED of both its halves, whose product silu(gate) * up is computed
// in float32 and rounded to T once.
template <typename T, bool GATED, int ACCESS>
struct Fp4Input {
    Vec<T, 8> x[GATED ? 4 : 2];

    static DEVICE Fp4Input load(const T* address, int64_t to_up) {
        Fp4Input input;
#pragma unroll
        for (int i = 0; i < (GATED ? 4 : 2); ++i) {
            input.x[i] = Vec<T, 8>::template load<ACCESS>(address + i % 2 * 8 + (i < 2 ? 0 : to_up));
        }
        return input;
    }
    DEVICE Fp4Block<T> block() const {
        Vec<T, 8> y[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (GATED) {
                float gate[8], up[8];
                x[half].to_floats(gate);
                x[half + 2].to_floats(up);
#pragma unroll
                for (int j = 0; j < 8; j += 4) {
                    const auto four = silu(Vec<float, 4>::from_floats({gate[j], gate[j + 1], gate[j + 2], gate[j + 3]}));
#pragma unroll
                    for (int i = 0; i < 4; ++i) gate[j + i] = ieee_multiply(four[i], up[j + i]);
                }
                y[half] = Vec<T, 8>::from_floats(gate);
            } else {
                y[half] = x[half];
            }
        }
        return Fp4Block<T>(y);
    }
};

// Scales lie in tiles of 128 rows and 4 columns, those of rows 32 apart together (the layout that matrix products want).
constexpr int FP4_TILE_ROWS = 128;
DEVICE int64_t fp4_tiled_row(int64_t row, int tiles) {
    return row / FP4_TILE_ROWS * tiles * 512 + row % 32 * 16 + row / 32 % 4 * 4;
}

// A row of codes and scales, shared by ROW_THREADS threads. TILED: its scales fill up tiles, with zeros.
template <typename T, int ROW_THREADS, int ACCESS, int CODE_ACCESS, bool TILED, bool GATED>
struct Fp4Row {
    using input_t = Fp4Input<T, GATED, ACCESS>;

    const T* input;
    int blocks, k;
    input_t next;

    // Begins to load the input, which a row beyond it (not `exists`) has none of.
    DEVICE Fp4Row(const T* input, int blocks, bool exists) : input(input), blocks(blocks), k(threadIdx.x % ROW_THREADS) {
        if (exists) load();
    }
    DEVICE void load() {
        if (k < blocks) next = input_t::load(input + int64_t(k) * FP4_BLOCK, int64_t(blocks) * FP4_BLOCK);
    }

    static DEVICE int64_t column(int k) { return TILED ? int64_t(k / 4) * 512 + k % 4 : k; }
    DEVICE int columns() const { return TILED ? (blocks + 3) / 4 * 4 : blocks; }

    DEVICE void clear(fp8_e4m3_t* scales) const {
        for (int i = threadIdx.x % ROW_THREADS; i < columns(); i += ROW_THREADS) scales[column(i)] = fp8_e4m3_t(0.0f);
    }
    DEVICE void write(uint8_t* codes, fp8_e4m3_t* scales, float g) {
        const float reciprocal = ieee_divide(1.0f, g);
        while (k < blocks) {
            Fp4Block<T> block = next.block();
            uint8_t* out = codes + int64_t(k) * (FP4_BLOCK / 2);
            fp8_e4m3_t* scale_at = scales + column(k);
            k += ROW_THREADS;
            load();
            const Fp4Scale scale(block.absmax(), g, reciprocal);
            Vec<uint8_t, 8> bytes;
#pragma unroll
            for (int half = 0; half < 2; ++half) bytes.template word<4>(half * 4) = block.codes(half, scale.factor);
            bytes.template store<CODE_ACCESS>(out);
            *scale_at = scale.code;
        }
        for (; k < columns(); k += ROW_THREADS) scales[column(k)] = fp8_e4m3_t(0.0f);
    }
};
