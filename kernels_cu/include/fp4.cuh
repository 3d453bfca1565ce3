// fp4.cuh: quantisation to NVFP4: e2m1 codes of blocks of sixteen neighbouring values under one e4m3 scale, and the
// layout of scales.
//
//     a = max |x| of the sixteen values, NaN ignored
//     s = e4m3(g * (a * (1/6))), saturating, where g is the scale of the whole tensor
//     code = e2m1(x * r),   r = 1 / (s * (1 / g)), or 0 if s is 0
//
// so that x is about code * s / g. Every step is a float32 operation, rounded to nearest even; so are e4m3 and e2m1. A
// code has four bits: the uppermost is the sign, the others number 0, 0.5, 1, 1.5, 2, 3, 4, 6. NaN becomes 6. The code
// is computed by float32 arithmetic that every architecture has; it equals the conversions of the few architectures
// that have them.

#pragma once
#include "math.cuh"
#include "quant.cuh"

constexpr int FP4_BLOCK = 16;  // elements under one scale

// The bits of the float 2^23 + code for a magnitude x < 7; for larger x and NaN, bits above those of 2^23 + 7. Adding
// 2^23 rounds to an integer, which is in the lowest bits of the sum. Codes grow by one every 0.5 up to 2, every 1 up to
// 4, and every 2 from there: the smallest of three sums is the right one. Positive floats have the order of their bits,
// and NaN comes last.
DEVICE uint32_t e2m1_bits(float x) {
    const float fine = fmaf(x, 2.0f, 0x1p23f);
    const float middle = x + (0x1p23f + 2.0f);
    const float coarse = fmaf(x, 0.5f, 0x1p23f + 4.0f);
    return min_of_three(__float_as_uint(fine), __float_as_uint(middle), __float_as_uint(coarse));
}

// The scale g of all values.
struct Fp4Tensor {
    float g, reciprocal;
    // Products x * r below the limit are ordinary. The limit is 0 if g is so large or so small that s / g or its
    // reciprocal may be no normal number.
    float limit;

    explicit DEVICE Fp4Tensor(float g)
        : g(g),
          reciprocal(ieee_divide(1.0f, g)),
          limit(ieee_abs(g) >= 0x1p-100f && ieee_abs(g) <= 0x1p100f ? 7.0f : 0.0f) {}
};

// The scale s of sixteen values whose largest magnitude is `a`, and the factor r. ORDINARY: the tensor's limit is not
// 0.
struct Fp4Scale {
    fp8_e4m3_t code;
    float factor;

    template <bool ORDINARY>
    static DEVICE Fp4Scale of(float a, const Fp4Tensor& tensor) {
        const float scale = ieee_multiply(tensor.g, ieee_multiply(a, 1.0f / 6.0f));
        Fp4Scale of;
        // fminf turns NaN into the largest code; such products are not ordinary.
        of.code = from_float<fp8_e4m3_t>(ORDINARY ? scale : fminf(scale, Codes<fp8_e4m3_t>::largest));
        const float s = to_float(of.code);
        const float divisor = ieee_multiply(s, tensor.reciprocal);
        const float quotient = ORDINARY ? reciprocal_of(divisor) : ieee_divide(1.0f, s == 0.0f ? 1.0f : divisor);
        of.factor = s == 0.0f ? 0.0f : quotient;
        return of;
    }
};

// MXFP4: the exponent, biased by 127, of a block whose largest magnitude is `a`, and the factor r.
struct Mxfp4Scale {
    uint32_t exponent;
    float factor;

    explicit DEVICE Mxfp4Scale(float a) : exponent(__float_as_uint(ieee_multiply(a, 1.0f / 6.0f)) >> 23) {
        factor = exponent == 0 || exponent == 255 ? 0.0f : __uint_as_float((254 - exponent) << 23);
    }
};

// The scale 2^(exponent - 127) of MXFP4 and MXFP8, of which 255 is NaN.
DEVICE float e8m0_to_float(uint8_t exponent) {
    return __uint_as_float(exponent == 255 ? 0x7fffffffu : exponent == 0 ? 0x400000u : uint32_t(exponent) << 23);
}

// MXFP8: the exponent, biased by 127, of the smallest power of two that is at least `a` / 448, at most 254, for a block
// whose largest magnitude is `a`, and the reciprocal of that power.
struct Mxfp8Scale {
    uint32_t exponent;
    float factor;

    explicit DEVICE Mxfp8Scale(float a) {
        const uint32_t bits = __float_as_uint(ieee_multiply(a, 1.0f / 448.0f));
        // A subnormal number is 2^-127, the scale of exponent 0, if its uppermost bit alone is set.
        exponent = min((bits + (bits < 0x800000u ? 0x3fffffu : 0x7fffffu)) >> 23, 254u);
        factor = __uint_as_float(exponent == 254 ? 0x400000u : (254 - exponent) << 23);
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

// A block of sixteen 16-bit values that become codes.
template <typename T>
struct Fp4Block {
    uint32_t words[8];  // two values each
    float max_or_nan;   // the largest magnitude, or NaN if a value is NaN

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

    // The largest magnitude, NaN ignored. If no value is NaN, max_or_nan is the same number and costs less.
    DEVICE float absmax() const {
        Vec<T, 2> largest = Vec<T, 2>::full(0.0f);
#pragma unroll
        for (int i = 0; i < 8; ++i) absmax_pair<false>(largest.data, pair_of<T>(words[i]).data);
        return ieee_max(ieee_abs(largest[0]), ieee_abs(largest[1]));
    }

    // The signs of eight values, from word `first` on, at the sign bits of their codes: bits 3, 7 to 31.
    DEVICE uint32_t signs(int first) const {
        const uint32_t low = __byte_perm(words[first], words[first + 1], 0x7351);  // the bytes that hold signs
        const uint32_t high = __byte_perm(words[first + 2], words[first + 3], 0x7351);
        const uint32_t even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
        return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
    }

    // The codes of eight values times `factor`; the code of the first value is in the lowest bits. ORDINARY: all
    // products are below 7.
    template <bool ORDINARY>
    DEVICE uint32_t eight(int half, float factor) const {
        uint32_t codes = 0, sign = signs(half * 4);
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
                codes = codes * 16 + bits;
            }
        }
        return codes + (sign - 0x11111111u * __float_as_uint(0x1p23f));
    }
    template <bool ORDINARY>
    DEVICE Vec<uint8_t, 8> codes(float factor) const {
        Vec<uint8_t, 8> bytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) bytes.template word<4>(half * 4) = eight<ORDINARY>(half, factor);
        return bytes;
    }
    // Writes the codes and returns the byte of the scale.
    template <int ACCESS>
    DEVICE uint8_t write(uint8_t* address, const Fp4Tensor& tensor) const {
        Fp4Scale scale = Fp4Scale::of<true>(max_or_nan, tensor);
        if (max_or_nan * scale.factor < tensor.limit) {
            codes<true>(scale.factor).template store<ACCESS>(address);
        } else {  // also where max_or_nan is NaN
            scale = Fp4Scale::of<false>(absmax(), tensor);
            codes<false>(scale.factor).template store<ACCESS>(address);
        }
        return reinterpret_cast<const uint8_t&>(scale.code);
    }
};

// silu(gate) * up in bfloat16 by the hardware's estimates, and a test whether the accurate functions might round to
// another number.
//
// Error bound, in units of 2^-24: the estimate of exp(-gate) is off by 4, and its argument by 4 more where -gate <=
// 5.5, because the argument is below 8; the reciprocal is off by 2, and six roundings are off by 1 each. So the
// estimate is off by no more than STEPS float32 numbers. A product is in doubt if its lower 16 bits are that near to
// the middle between two bfloat16 numbers, or if gate < -5.5.
constexpr uint32_t STEPS = 20;
constexpr uint32_t MIN_GATE = 0xc0b0;  // the bits of -5.5; a smaller number and a negative NaN have larger bits

// Two products in a word. Each half of `distance` becomes (lower 16 bits of the float32 product) - (the middle) +
// STEPS, modulo 2^16.
DEVICE uint32_t estimate(uint32_t gate_word, uint32_t up_word, uint32_t& distance) {
    float gate[2], up[2], y[2];
    pair_of<bf16_t>(gate_word, gate[0], gate[1]);
    pair_of<bf16_t>(up_word, up[0], up[1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float share = estimate_reciprocal(1.0f + estimate_exp2(gate[j] * -1.44269504088896341f));
        y[j] = ieee_multiply(ieee_multiply(gate[j], share), up[j]);
    }
    const uint32_t lower = __byte_perm(__float_as_uint(y[0]), __float_as_uint(y[1]), 0x5410);
    distance = min_of_sums(lower, (0x8000u + STEPS) * 0x10001u, ~0u);
    return word_of_pair<bf16_t>(y[0], y[1]);
}
// Whether a product of a pair is in doubt. For several pairs at once: the smallest distances and the largest bits of
// gates.
DEVICE bool in_doubt(uint32_t distance, uint32_t gates) {
    return distance < (2 * STEPS + 1) << 16 || (distance & 0xffffu) <= 2 * STEPS || gates >= (MIN_GATE + 1) << 16 ||
           (gates & 0xffffu) > MIN_GATE;
}

// Sixteen elements of the input. GATED: sixteen elements of both halves of a row, gate and up; the values to be
// quantised are silu(gate) * up, computed in float32 and rounded to T once.
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
    // `blocks` is the number of blocks in a row of values.
    DEVICE void load(const T* address, unsigned blocks) {
        load(words[0], address);
        if constexpr (GATED) load(words[1], address + uint64_t(blocks) * FP4_BLOCK);
    }

    DEVICE Fp4Block<T> block() const {
        if constexpr (!GATED) return Fp4Block<T>(words[0]);
        uint32_t products[8];
        if constexpr (is_same<T, bf16_t>) {
#pragma unroll
            for (int half = 0; half < 8; half += 4) {
                const uint32_t (&gates)[8] = words[0];
                uint32_t distance[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    products[half + i] = estimate(gates[half + i], words[GATED][half + i], distance[i]);
                const uint32_t nearest =
                    min_of_three_pairs(distance[0], distance[1], min_of_three_pairs(distance[2], distance[3], ~0u));
                const uint32_t max_gate = max_of_three_pairs(gates[half], gates[half + 1],
                                                             max_of_three_pairs(gates[half + 2], gates[half + 3], 0));
                if (!in_doubt(nearest, max_gate)) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (in_doubt(distance[i], gates[half + i])) products[half + i] = exact_product(half + i);
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
        if constexpr (is_same<T, bf16_t>) {  // rare: the quotients of silu, with fewer registers
#pragma unroll
            for (int j = 0; j < 2; ++j) y.data[j] = ieee_divide(gate[j], 1.0f + expf(-gate[j]));
        } else {
            y = silu(Vec<float, 2>::from_floats(gate));
        }
        return word_of_pair<T>(ieee_multiply(y[0], up[0]), ieee_multiply(y[1], up[1]));
    }
};

// Scales lie in tiles of 128 rows and 4 columns, the layout that matrix products want: row m of a tile begins at byte
// m % 32 * 16 + m / 32 * 4, so the scales of rows 32 apart are neighbours.
constexpr int FP4_TILE_ROWS = 128, FP4_TILE_COLUMNS = 4;

// The share of a thread: one column of blocks, in `rounds` rows. A unit is UNIT rows whose scales are neighbours and
// are written at once: one row, or four rows 32 apart. Consecutive units of a thread lie STEP units apart.
template <int NUM_THREADS, int ROW_THREADS, int UNIT_ROWS>
struct Fp4Share {
    static constexpr int UNIT = UNIT_ROWS;
    static constexpr int STEP = NUM_THREADS / ROW_THREADS;  // units that a block takes at a time
    static constexpr int UNITS = FP4_TILE_ROWS / UNIT;      // of a tile

    static DEVICE unsigned column() { return blockIdx.x * ROW_THREADS + threadIdx.x % ROW_THREADS; }
    // The first unit of the block.
    static DEVICE int64_t unit(int rounds) {
        return (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * (rounds / UNIT * STEP);
    }
    // The thread's row in round i of a block that begins with `unit`.
    static DEVICE uint32_t row(uint32_t unit, int i) {
        unit += (STEP == 1 ? 0 : threadIdx.x / ROW_THREADS) + i / UNIT * STEP;
        return UNIT == 1 ? unit : unit / UNITS * FP4_TILE_ROWS + unit % UNITS + i % UNIT * UNITS;
    }
};

// Transposes 4 x 4 bytes over four neighbouring lanes: before, byte i of lane j is row i, column j; after, lane i has
// row i.
DEVICE uint32_t turn_four(uint32_t word) {
    const unsigned lane = threadIdx.x % 4;
    word = __byte_perm(word, shfl_xor(word, 1), lane & 1 ? 0x3715 : 0x6240);
    return __byte_perm(word, shfl_xor(word, 2), lane & 2 ? 0x3276 : 0x5410);
}

// Writes the codes and scales of a thread's share of a matrix under one g; the block begins with unit `begin`. The next
// row is loaded as soon as registers are free, while this row is computed. TILED: scales lie in tiles, and the scales
// of rows and columns that do not exist are 0. Every thread of the block takes part.
template <typename T, typename Share, int ACCESS, int CODE_ACCESS, int SCALE_ACCESS, bool TILED, bool GATED>
DEVICE void
fp4_rows(uint8_t* output, uint8_t* scales, const T* input, const float& g, int64_t num_rows, int64_t scale_rows,
         int64_t output_stride, int64_t input_stride, unsigned blocks, unsigned columns, int64_t begin, int rounds) {
    const unsigned column = Share::column();
    // From here on, rows are counted from the beginning of the block's first tile.
    const int64_t above = uint64_t(begin) / Share::UNITS * FP4_TILE_ROWS;
    const uint32_t unit = uint64_t(begin) % Share::UNITS;
    const uint32_t rows = column < blocks ? min(max(num_rows - above, int64_t(0)), int64_t(1) << 31) : 0;
    const uint32_t padded = column < columns ? min(max(scale_rows - above, int64_t(0)), int64_t(1) << 31) : 0;
    input += above * input_stride + uint64_t(column) * FP4_BLOCK;
    output += above * output_stride + uint64_t(column) * (FP4_BLOCK / 2);
    scales +=
        above * columns + (TILED ? uint64_t(column / FP4_TILE_COLUMNS) * (FP4_TILE_ROWS * FP4_TILE_COLUMNS) : column);

    Fp4Input<T, GATED, ACCESS> x;
    uint32_t row = Share::row(unit, 0);
    bool exists = row < rows;
    if (exists) x.load(input + row * input_stride, blocks);
    const Fp4Tensor tensor(g);
    uint32_t word = 0;  // scales of a unit, the last row's in the uppermost byte
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) {
        const uint32_t next = Share::row(unit, i + 1);
        const bool more = i + 1 < rounds && next < rows;
        uint32_t scale = 0;
        if (exists) {
            const Fp4Block<T> block = x.block();
            if (more) x.load(input + next * input_stride, blocks);
            scale = block.template write<CODE_ACCESS>(output + row * output_stride, tensor);
        } else if (more) {
            x.load(input + next * input_stride, blocks);
        }
        uint8_t* at = scales + uint64_t(TILED ? row / FP4_TILE_ROWS * FP4_TILE_ROWS : row) * columns;
        if constexpr (TILED) at += row % 32 * 16;
        if constexpr (Share::UNIT == 1) {
            if (row < padded) at[TILED ? row % FP4_TILE_ROWS / 32 * 4 + column % FP4_TILE_COLUMNS : 0] = scale;
        } else {
            word = word >> 8 | scale << 24;
            if (i % Share::UNIT == Share::UNIT - 1) {
                Vec<uint8_t, 4> turned;
                turned.template word<4>(0) = turn_four(word);
                if (row < padded) turned.template store<SCALE_ACCESS>(at + threadIdx.x % 4 * 4);
            }
        }
        row = next;
        exists = more;
    }
}
