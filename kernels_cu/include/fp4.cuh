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

// The scale g of all values.
struct Fp4Tensor {
    float g, reciprocal;
    // Products below it are ordinary. Of a g so large or small that s / g or its reciprocal may be no normal number, none are.
    float limit;

    explicit DEVICE Fp4Tensor(float g)
        : g(g), reciprocal(ieee_divide(1.0f, g)), limit(ieee_abs(g) >= 0x1p-100f && ieee_abs(g) <= 0x1p100f ? 7.0f : 0.0f) {}
};

// The scale of sixteen values whose largest magnitude is `a`, and the factor r. ORDINARY: under a g of which products may be.
struct Fp4Scale {
    fp8_e4m3_t code;
    float factor;

    template <bool ORDINARY>
    static DEVICE Fp4Scale of(float a, const Fp4Tensor& tensor) {
        const float scale = ieee_multiply(tensor.g, ieee_multiply(a, 1.0f / 6.0f));
        Fp4Scale of;
        // The minimum takes NaN to the largest; products under it are not ordinary.
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

// Sixteen values of 16 bits on their way to codes.
template <typename T>
struct Fp4Block {
    uint32_t words[8];  // two values each
    float most;         // the largest magnitude, or NaN if there is one

    Fp4Block() = default;
    explicit DEVICE Fp4Block(const uint32_t (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i] = x[i];
        Vec<T, 2> largest = pair(words[0]);
#pragma unroll
        for (int i = 1; i < 8; ++i) absmax_pair<true>(largest.data, pair(words[i]).data);
        absmax_pair<true>(largest.data, pair(__byte_perm(largest.template word<2>(0), 0, 0x1032)).data);
        most = ieee_abs(largest[0]);
    }

    // The largest magnitude, NaN left out; `most` is the same, and costs less, where there is none.
    DEVICE float absmax() const {
        Vec<T, 2> largest = Vec<T, 2>::full(0.0f);
#pragma unroll
        for (int i = 0; i < 8; ++i) absmax_pair<false>(largest.data, pair(words[i]).data);
        return ieee_max(ieee_abs(largest[0]), ieee_abs(largest[1]));
    }

    static DEVICE Vec<T, 2> pair(uint32_t word) {
        Vec<T, 2> pair;
        pair.template word<2>(0) = word;
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
    template <int ACCESS>
    DEVICE void write(uint8_t* codes_at, fp8_e4m3_t* scale_at, const Fp4Tensor& tensor) const {
        Fp4Scale scale = Fp4Scale::of<true>(most, tensor);
        if (most * scale.factor < tensor.limit) {
            codes<true>(scale.factor).template store<ACCESS>(codes_at);
        } else {  // also where `most` is NaN
            scale = Fp4Scale::of<false>(absmax(), tensor);
            codes<false>(scale.factor).template store<ACCESS>(codes_at);
        }
        *scale_at = scale.code;
    }
};

// Products silu(gate) * up in bfloat16 by the hardware's estimates, and whether one of them may be another than by the
// accurate functions. In units of 2^-24, exp(-gate) is off by 4 for either's estimate and, where -gate is at most 5.5, by 4 for
// the argument, which is then below 8; the reciprocal by 2, and six roundings by 1 each: by no more than STEPS float32 numbers. So
// a product is in doubt whose lower 16 bits are so near to the middle of two bfloat16 numbers, or whose gate is below.
constexpr uint32_t STEPS = 20;
constexpr uint32_t LEAST_GATE = 0xc0b0;  // the bits of -5.5; what is below, and NaN of that sign, has larger ones

// Two products, and of each, in `apart`, how far its lower bits lie above the middle less STEPS, modulo 2^16.
DEVICE uint32_t estimate(uint32_t gate_word, uint32_t up_word, uint32_t& apart) {
    float gate[2], up[2], y[2];
    pair_of<bf16_t>(gate_word, gate[0], gate[1]);
    pair_of<bf16_t>(up_word, up[0], up[1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float share = estimate_reciprocal(1.0f + estimate_exp2(gate[j] * -1.44269504088896341f));
        y[j] = ieee_multiply(ieee_multiply(gate[j], share), up[j]);
    }
    const uint32_t lower = __byte_perm(__float_as_uint(y[0]), __float_as_uint(y[1]), 0x5410);
    apart = min_of_sums(lower, (0x8000u + STEPS) * 0x10001u, ~0u);
    return word_of_pair<bf16_t>(y[0], y[1]);
}
// Of one pair, or of many: the least `apart` and the largest gates.
DEVICE bool in_doubt(uint32_t apart, uint32_t gates) {
    return apart < (2 * STEPS + 1) << 16 || (apart & 0xffffu) <= 2 * STEPS || gates >= (LEAST_GATE + 1) << 16 ||
           (gates & 0xffffu) > LEAST_GATE;
}

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
    // Of a row of so many blocks.
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
                const uint32_t(&gates)[8] = words[0];
                uint32_t apart[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) products[half + i] = estimate(gates[half + i], words[GATED][half + i], apart[i]);
                const uint32_t nearest = min_of_three_pairs(apart[0], apart[1], min_of_three_pairs(apart[2], apart[3], ~0u));
                const uint32_t most = max_of_three_pairs(gates[half], gates[half + 1],
                                                         max_of_three_pairs(gates[half + 2], gates[half + 3], 0));
                if (!in_doubt(nearest, most)) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (in_doubt(apart[i], gates[half + i])) products[half + i] = exact_product(half + i);
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
DEVICE int64_t fp4_tiled_rows(int64_t rows) { return (rows + FP4_TILE_ROWS - 1) / FP4_TILE_ROWS * FP4_TILE_ROWS; }
DEVICE uint32_t fp4_row_of_tile(uint32_t row) { return row % 32 * 16 + row / 32 % 4 * 4; }
// Where a row of so many columns begins, in tiles or not.
template <bool TILED>
DEVICE uint64_t fp4_scale_row(uint32_t row, unsigned columns) {
    if constexpr (!TILED) return uint64_t(row) * columns;
    return uint64_t(row / FP4_TILE_ROWS * FP4_TILE_ROWS) * columns + fp4_row_of_tile(row);
}
DEVICE uint64_t fp4_tiled_column(unsigned column) { return uint64_t(column / 4) * 512 + column % 4; }

// What a thread has: one column of blocks, and of `rounds` rows from `row` on, STEP apart, those that are there. The blocks of
// the grid lie side by side along a row, each ROW_THREADS columns wide and STEP rows high.
template <int NUM_THREADS, int ROW_THREADS>
struct Fp4Share {
    static constexpr int STEP = NUM_THREADS / ROW_THREADS;
    unsigned column;
    int64_t row;
    int rounds;

    explicit DEVICE Fp4Share(int rounds)
        : column(blockIdx.x * ROW_THREADS + threadIdx.x % ROW_THREADS),
          row(int64_t(blockIdx.y) * rounds * STEP + (STEP == 1 ? 0 : threadIdx.x / ROW_THREADS)), rounds(rounds) {}

    // How many rows it has of `num_rows`.
    DEVICE int among(int64_t num_rows) const { return int(min(max(num_rows - row + STEP - 1, int64_t(0)) / STEP, int64_t(rounds))); }
};

// Codes and scales of a thread's share, all under one g. What comes next is asked for as soon as there are registers for it, so
// that it is on its way while there is something to compute. TILED: scales of rows and columns that are not there are 0.
template <typename T, int NUM_THREADS, int ROW_THREADS, int ACCESS, int CODE_ACCESS, bool TILED, bool GATED>
DEVICE void fp4_rows(uint8_t* output, fp8_e4m3_t* scales, const T* input, const float* g, int64_t num_rows, int64_t scale_rows,
                     int64_t output_stride, int64_t input_stride, unsigned blocks, unsigned columns, int rounds) {
    using share_t = Fp4Share<NUM_THREADS, ROW_THREADS>;
    const share_t share(rounds);
    int left = share.column < blocks ? share.among(num_rows) : 0;
    input += share.row * input_stride + uint64_t(share.column) * FP4_BLOCK;
    Fp4Input<T, GATED, ACCESS> x;
    if (left > 0) x.load(input, blocks);
    const Fp4Tensor tensor(*g);

    output += share.row * output_stride + uint64_t(share.column) * (FP4_BLOCK / 2);
    const int64_t above = TILED ? share.row / FP4_TILE_ROWS * FP4_TILE_ROWS : share.row;
    scales += above * columns + (TILED ? fp4_tiled_column(share.column) : share.column);
    uint32_t row = share.row - above;  // counted within what lies at `scales`
    for (; left > 0; --left) {
        const Fp4Block<T> block = x.block();
        input += share_t::STEP * input_stride;
        if (left > 1) x.load(input, blocks);
        block.template write<CODE_ACCESS>(output, scales + fp4_scale_row<TILED>(row, columns), tensor);
        output += share_t::STEP * output_stride;
        row += share_t::STEP;
    }
    if (!TILED || share.column >= columns) return;
    const uint32_t end = uint32_t(share.row - above) + share.among(scale_rows) * share_t::STEP;
    for (; row < end; row += share_t::STEP) {
        scales[fp4_scale_row<TILED>(row, columns)] = fp8_e4m3_t(0.0f);
    }
}
