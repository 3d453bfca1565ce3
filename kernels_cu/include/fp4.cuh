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

// The bits of 2^23 plus the code of a magnitude, if that is below 7; else more than those of 2^23 + 7. Adding 2^23 rounds to
// an integer, which the lowest bits then hold. Codes grow by one with every half up to 2, every 1 up to 4, and every 2 from
// there. Positive floats have the order of their bits, and NaN is more than all.
DEVICE uint32_t e2m1_bits(float x) {
    const float fine = fmaf(x, 2.0f, 0x1p23f);
    const float middle = x + (0x1p23f + 2.0f);
    const float coarse = fmaf(x, 0.5f, 0x1p23f + 4.0f);
    return min_of_three(__float_as_uint(fine), __float_as_uint(middle), __float_as_uint(coarse));
}

// The scale of sixteen values whose largest magnitude is `a`, and the factor r.
struct Fp4Scale {
    fp8_e4m3_t code;
    float factor;

    DEVICE Fp4Scale(float a, float g, float reciprocal_of_g) {
        const float scale = ieee_multiply(g, ieee_multiply(a, 1.0f / 6.0f));
        code = from_float<fp8_e4m3_t>(fminf(scale, Codes<fp8_e4m3_t>::largest));  // which takes NaN to the largest
        const float s = to_float(code);
        const float quotient = ieee_divide(1.0f, s == 0.0f ? 1.0f : ieee_multiply(s, reciprocal_of_g));
        factor = s == 0.0f ? 0.0f : quotient;
    }
};

// Sixteen values of 16 bits on their way to codes.
template <typename T>
struct Fp4Block {
    uint32_t words[8];  // two values each
    float most;         // the largest magnitude, or NaN if there is one

    explicit DEVICE Fp4Block(const uint32_t (&x)[8]) {
        Vec<T, 2> pair = Vec<T, 2>::full(0.0f);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            words[i] = x[i];
            max_pair_or_nan<T>(pair.data, magnitudes(i).data);
        }
        Vec<T, 2> turned;
        turned.template word<2>(0) = __byte_perm(pair.template word<2>(0), 0, 0x1032);
        max_pair_or_nan<T>(pair.data, turned.data);
        most = pair[0];
    }

    // The largest magnitude, NaN left out.
    DEVICE float absmax() const {
        if (most == most) return most;
        Vec<T, 2> pair = Vec<T, 2>::full(0.0f);
#pragma unroll
        for (int i = 0; i < 8; ++i) absmax_pair<T>(pair.data, magnitudes(i).data);
        return ieee_max(pair[0], pair[1]);
    }

    DEVICE Vec<T, 2> magnitudes(int i) const {
        Vec<T, 2> pair;
        pair.template word<2>(0) = words[i] & 0x7fff7fffu;
        return pair;
    }

    // The signs of the values from word `first` on, where codes have them: in bits 3, 7, ... 31.
    DEVICE uint32_t signs(int first) const {
        const uint32_t low = __byte_perm(words[first], words[first + 1], 0x7351);  // the bytes that hold them
        const uint32_t high = __byte_perm(words[first + 2], words[first + 3], 0x7351);
        const uint32_t even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
        return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
    }

    // The codes of eight values times `factor`, the first in the lowest bits. ORDINARY: all products are below 7.
    template <bool ORDINARY>
    DEVICE uint32_t eight(int half, float factor) const {
        uint32_t codes = 0, sign = signs(half * 4);
        if (!ORDINARY && __float_as_uint(factor) >> 31) sign ^= 0x88888888u;  // the factor is -0, as under g of -0
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            float x[2];
            load_pair<T>(magnitudes(half * 4 + i / 2).data, x[0], x[1]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float y = ieee_multiply(x[j], factor);
                uint32_t bits = e2m1_bits(y);
                if constexpr (!ORDINARY) {
                    bits = min(bits, __float_as_uint(0x1p23f + 7.0f));
                    if (y != y) sign &= ~(8u << (i + j) * 4);
                }
                codes = codes >> 4 | bits << 28;
            }
        }
        return codes | sign;
    }
    DEVICE Vec<uint8_t, 8> codes(float factor) const {
        Vec<uint8_t, 8> bytes;
        const bool ordinary = most * factor < 7.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            bytes.template word<4>(half * 4) = ordinary ? eight<true>(half, factor) : eight<false>(half, factor);
        }
        return bytes;
    }
};

// Two values of 16 bits in a word, the first in its lower half.
template <typename T>
DEVICE void pair_of(uint32_t word, float& low, float& high) {
    Vec<T, 2> pair;
    pair.template word<2>(0) = word;
    load_pair<T>(pair.data, low, high);
}
template <typename T>
DEVICE uint32_t word_of_pair(float low, float high) {
    Vec<T, 2> pair;
    store_pair<T>(pair.data, low, high);
    return pair.template word<2>(0);
}

// Products silu(gate) * up in bfloat16 by the hardware's estimates, and whether one of them may be another than by the
// accurate functions. In units of 2^-24, exp(-gate) is off by 4 for either's estimate and 1.24 |gate| for the argument,
// the reciprocal by 2, and six roundings by 1 each: less than STEPS float32 numbers where -gate is at most 12. So a product
// is in doubt whose lower 16 bits are so near to the middle of two bfloat16 numbers, or whose gate is below.
struct Doubt {
    static constexpr uint32_t STEPS = 32;
    static constexpr uint32_t LEAST_GATE = 0xc140;  // the bits of -12; what is below, and NaN of that sign, has larger ones
    // Of the first and the second of all pairs: the least distance above the middle less STEPS, and the largest bits.
    uint32_t apart = ~0u, gates = 0;

    DEVICE uint32_t product(uint32_t gate_word, uint32_t up_word) {
        float gate[2], up[2], y[2];
        pair_of<bf16_t>(gate_word, gate[0], gate[1]);
        pair_of<bf16_t>(up_word, up[0], up[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float share = estimate_reciprocal(1.0f + estimate_exp2(gate[j] * -1.44269504088896341f));
            y[j] = ieee_multiply(ieee_multiply(gate[j], share), up[j]);
        }
        const uint32_t lower = __byte_perm(__float_as_uint(y[0]), __float_as_uint(y[1]), 0x5410);
        apart = min_of_sums(lower, (0x8000u + STEPS) * 0x10001u, apart);
        gates = max_of_three_pairs(gate_word, gates, 0);
        return word_of_pair<bf16_t>(y[0], y[1]);
    }
    DEVICE Doubt join(const Doubt& other) const {
        Doubt both;
        both.apart = min_of_sums(other.apart, 0, apart);
        both.gates = max_of_three_pairs(other.gates, gates, 0);
        return both;
    }
    DEVICE operator bool() const {
        return min(apart >> 16, apart & 0xffffu) <= 2 * STEPS || max(gates >> 16, gates & 0xffffu) > LEAST_GATE;
    }
};

// Sixteen elements as they are read: of the input, or GATED of both its halves, whose product silu(gate) * up is computed
// in float32 and rounded to T once.
template <typename T, bool GATED, int ACCESS>
struct Fp4Input {
    uint32_t words[GATED ? 2 : 1][8];

    static DEVICE void load(uint32_t (&words)[8], const T* address) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Vec<T, 8> x = Vec<T, 8>::template load<ACCESS>(address + i * 8);
#pragma unroll
            for (int j = 0; j < 4; ++j) words[i * 4 + j] = x.template word<2>(j * 2);
        }
    }
    DEVICE void load(const T* address, int64_t to_up) {
        load(words[0], address);
        if constexpr (GATED) load(words[1], address + to_up);
    }

    DEVICE Fp4Block<T> block() const {
        if constexpr (!GATED) return Fp4Block<T>(words[0]);
        uint32_t products[8];
        if constexpr (is_same<T, bf16_t>) {
#pragma unroll
            for (int half = 0; half < 8; half += 4) {
                Doubt of_four[2];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int word = half + i;
                    products[word] = of_four[i / 2].product(words[0][word], words[GATED][word]);
                }
                if (of_four[0].join(of_four[1])) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (of_four[i / 2]) products[half + i] = exact_product(half + i);
                    }
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) products[i] = exact_product(i);
        }
        return Fp4Block<T>(products);
    }

    // The products of the two values of word i.
    DEVICE uint32_t exact_product(int i) const {
        float gate[2], up[2];
        pair_of<T>(words[0][i], gate[0], gate[1]);
        pair_of<T>(words[GATED][i], up[0], up[1]);
        Vec<float, 2> y;
        if constexpr (is_same<T, bf16_t>) {  // seldom: the same quotients, by fewer registers
#pragma unroll
            for (int j = 0; j < 2; ++j) y.data[j] = ieee_divide(gate[j], 1.0f + expf(-gate[j]));
        } else {
            y = silu(Vec<float, 2>::from_floats(gate));
        }
        return word_of_pair<T>(ieee_multiply(y[0], up[0]), ieee_multiply(y[1], up[1]));
    }
};

// Scales lie in tiles of 128 rows and 4 columns, those of rows 32 apart together (the layout that matrix products want).
constexpr int FP4_TILE_ROWS = 128;
DEVICE int64_t fp4_tiled_row(int64_t row, int tiles) {
    return row / FP4_TILE_ROWS * tiles * 512 + row % 32 * 16 + row / 32 % 4 * 4;
}

// A row of codes and scales, shared by ROW_THREADS threads, at least 4, each of which has VECS blocks at a time. TILED: the
// row's scales fill up tiles, with zeros.
template <typename T, int ROW_THREADS, int VECS, int ACCESS, int CODE_ACCESS, bool TILED, bool GATED>
struct Fp4Row {
    static constexpr int SCALES = TILED ? ROW_THREADS / 4 * 512 : ROW_THREADS;  // from one block's to the thread's next
    static_assert(ROW_THREADS % 4 == 0);

    const T* input;
    unsigned blocks, columns;  // blocks of the row, and scales that are written for it
    Fp4Input<T, GATED, ACCESS> x[VECS];

    // Begins to load the input, of which a row that does not `exist` has none.
    DEVICE Fp4Row(const T* input, int blocks, bool exist)
        : input(input), blocks(blocks), columns(TILED ? (blocks + 3) / 4 * 4 : blocks) {
        if (exist) load(first());
    }
    static DEVICE unsigned first() { return threadIdx.x % ROW_THREADS; }
    static DEVICE uint64_t column(unsigned k) { return TILED ? uint64_t(k / 4) * 512 + k % 4 : k; }

    DEVICE void load(unsigned k) {
        const T* from = input + uint64_t(k) * FP4_BLOCK;
#pragma unroll
        for (int i = 0; i < VECS; ++i) {
            if (k + i * ROW_THREADS < blocks) x[i].load(from + i * ROW_THREADS * FP4_BLOCK, int64_t(blocks) * FP4_BLOCK);
        }
    }
    DEVICE void clear(fp8_e4m3_t* scales) const {
#pragma unroll 1
        for (unsigned k = first(); k < columns; k += ROW_THREADS) scales[column(k)] = fp8_e4m3_t(0.0f);
    }
    DEVICE void write(uint8_t* codes, fp8_e4m3_t* scales, float g) {
        const float reciprocal = ieee_divide(1.0f, g);
        codes += uint64_t(first()) * (FP4_BLOCK / 2);
        scales += column(first());
#pragma unroll 1
        for (unsigned k = first(); k < columns;) {
#pragma unroll
            for (int i = 0; i < VECS; ++i) {
                if (k + i * ROW_THREADS < blocks) {
                    const Fp4Block<T> block = x[i].block();
                    const Fp4Scale scale(block.absmax(), g, reciprocal);
                    block.codes(scale.factor).template store<CODE_ACCESS>(codes + i * ROW_THREADS * (FP4_BLOCK / 2));
                    scales[i * SCALES] = scale.code;
                } else if (TILED && k + i * ROW_THREADS < columns) {
                    scales[i * SCALES] = fp8_e4m3_t(0.0f);
                }
            }
            k += VECS * ROW_THREADS;
            codes += VECS * ROW_THREADS * (FP4_BLOCK / 2);
            scales += VECS * SCALES;
            load(k);
        }
    }
};
