// dequant.cuh: converts packed quants to pairs of 16-bit numbers, exactly.
//
// A 32-bit word holds 32 / BITS quants, the first in its lowest bits. Pair i of a word is quants i and i + 16 / BITS:
// one shift and one mask leave them in the low bits of both halves. Formats interleave their quants so that the numbers
// of a pair are adjacent along K, as an MMA fragment needs them (mma.cuh, wgmma.cuh).
//
//     integers, EXPONENT 0, of 2, 3, 4 or 8 bits            pair * SUM_FACTOR = quant - zero point
//     e4m3, EXPONENT 4; e2m1, EXPONENT 2                   pair * FACTOR = number; e4m3's NaN counts as 480
//
// The kernel applies SUM_FACTOR, a power of two, to the accumulator; applied to a scale, it could overflow.
// `raw` leaves the subtraction and the factor to the kernel's epilogue: the value is the sum of TERMS such pairs, times
// RAW_FACTOR, minus RAW_OFFSET (and the zero point). In float16, raw integers are the bits of subnormal numbers.
//
// Nothing is rounded. An integer is or-ed into the mantissa of a constant with an ulp of 1 (RAISED_PAIR; a smaller ulp
// with a factor), and so is the zero point: their difference is exact. The exponent and mantissa of a float are shifted
// together to the position of T's. The result, also of a subnormal, is too small by FACTOR, a power of two that belongs
// in the scale.
//
// In-place quants: the mantissa and the lowest exponent bit (8 bits of bfloat16, 11 of float16) are an integer where
// all other bits are 0, since the smallest normal numbers have the same ulp as subnormals. So quants at these bits are
// only masked, and a multiplication by a power of two replaces the shift. The unit that multiplies takes one warp
// instruction per cycle, the one that shifts and masks one per two cycles.
#pragma once
#include "packed.cuh"

// Reinterprets the bits of a word as a pair.
template <typename T>
DEVICE Vec<T, 2> word_pair(uint32_t word) {
    Vec<T, 2> pair;
    pair.template word<2>(0) = word;
    return pair;
}

template <typename T, int BITS, int EXPONENT>
struct Quants {
    using pair_t = Vec<T, 2>;
    static constexpr int PAIRS = 16 / BITS;  // pairs of a word
    static constexpr bool IS_FLOAT = EXPONENT > 0, IS_HALF = is_same<T, half_t>;
    static_assert(IS_HALF || is_same<T, bf16_t>);
    static_assert(IS_FLOAT ? BITS == 2 * EXPONENT : BITS == 2 || BITS == 3 || BITS == 4 || BITS == 8);
    // 2 to the difference of the exponent biases of T and of the quants.
    static constexpr float FACTOR = !IS_FLOAT   ? 1.0f
                                    : BITS == 8 ? (IS_HALF ? 0x1p8f : 0x1p120f)
                                                : (IS_HALF ? 0x1p14f : 0x1p126f);
    // bfloat16 has an ulp of 1 only from 128 to 255, 7 mantissa bits, too few for a byte: its nibbles are converted
    // separately.
    static constexpr bool BY_NIBBLES = !IS_FLOAT && BITS == 8 && !IS_HALF;

    // Whether odd pairs are converted in place.
    static constexpr bool ODD_IN_PLACE = !IS_FLOAT && BITS == 4;
    // In place, bfloat16 integers times 2^127, its largest power of two, are still 4 times too small.
    static constexpr float SUM_FACTOR = ODD_IN_PLACE && !IS_HALF ? 4.0f : 1.0f;
    static constexpr uint32_t RAISED = ODD_IN_PLACE && !IS_HALF ? 0x42004200 : RAISED_PAIR<T>;

    // A zero point in both halves of a word, raised as quants are. BY_NIBBLES: `low` for the lower nibbles, `high` for
    // the higher ones. ODD_IN_PLACE: `high` is the number that is added to in-place quants.
    struct Zero { uint32_t low, high; };
    // Zero points are at most 16, with 8-bit quants at most 256.
    static DEVICE Zero zero(uint32_t point) {
        const uint32_t both = point * 0x10001;
        if constexpr (BY_NIBBLES) return {raised((point & 15) * 0x10001), raised((point >> 4) * 0x10001)};
        if constexpr (!ODD_IN_PLACE) return {raised(both), 0};
        if constexpr (IS_HALF) return {raised(both), 0xd400d400 | both << 4};  // -(64 + point)
        const pair_t high = word_pair<T>(RAISED) - word_pair<T>(raised(both));
        return {raised(both), high.template word<2>(0)};
    }

    // Mask of an integer's bits, in both halves of a word. blockIdx.z is always 0, but the compiler does not know it,
    // so it keeps the mask in a register; it would reload a constant for nearly every use.
    uint32_t mask = ((1 << (BY_NIBBLES ? 4 : BITS)) - 1) * 0x10001 ^ blockIdx.z;

    DEVICE pair_t pair(uint32_t word, int i, const Zero& zero) const {
        constexpr uint32_t MASK = ((1 << BITS) - 1) * 0x10001, SIGN = (1 << (BITS - 1)) * 0x10001;
        const uint32_t quants = word >> BITS * i;
        if constexpr (IS_FLOAT) {
            constexpr int SHIFT =
                (IS_HALF ? 10 : 7) - (BITS - 1 - EXPONENT);  // difference of the mantissa widths, in bits
            return word_pair<T>((quants & SIGN) << (16 - BITS) | (quants & (MASK - SIGN)) << SHIFT);
        } else if constexpr (BY_NIBBLES) {
            const pair_t low = word_pair<T>(raised(quants & mask)) - word_pair<T>(zero.low);
            const pair_t high = word_pair<T>(raised(quants >> 4 & mask)) - word_pair<T>(zero.high);
            const pair_t sixteen = word_pair<T>(0x41804180);
            return multiply_add(high, sixteen, low);
        } else if (ODD_IN_PLACE && i % 2 == 1) {
            const uint32_t in_place = word >> BITS * (i - 1) & MASK << BITS;
            // float16 quants are or-ed into 1024: a multiplication by 2^15, the largest power, would not bring them to
            // integers.
            const pair_t raised_or_not = word_pair<T>(IS_HALF ? in_place | RAISED : in_place);
            return multiply_add(raised_or_not, power_of_two_pair(IS_HALF ? -4 : 127), word_pair<T>(zero.high));
        } else {
            return word_pair<T>(raised(quants & mask)) - word_pair<T>(zero.low);
        }
    }

    static constexpr int TERMS = BY_NIBBLES ? 2 : 1;
    // Integers from `raw` are multiples of 2^-RAW_PLACES; for bfloat16 as small as a factor of 2^127 leaves them.
    static constexpr int RAW_PLACES = IS_FLOAT ? 0 : IS_HALF ? 24 : BY_NIBBLES ? 6 : 6 - BITS;
    static constexpr float RAW_OFFSET = IS_FLOAT || IS_HALF ? 0.0f : BY_NIBBLES ? 256.0f : 128.0f;
    // Floats of bfloat16 get FACTOR in `raw`: without it, their products with a could underflow.
    static constexpr float RAW_FACTOR = !IS_FLOAT ? float(1 << RAW_PLACES) : IS_HALF ? FACTOR : 1.0f;
    // bfloat16: the constant into which integers are or-ed, 2^(7 - RAW_PLACES) in both halves; not reloaded either.
    uint32_t raw_raised = IS_HALF || IS_FLOAT ? 0 : (127 + 7 - RAW_PLACES) * 0x00800080 ^ blockIdx.z;
    DEVICE uint32_t raw(uint32_t word, int i, int term) const {
        if constexpr (IS_FLOAT) {
            pair_t number = pair(word, i, {});
            if constexpr (!IS_HALF) number = number * pair_t::full(FACTOR);
            return number.template word<2>(0);
        } else {
            constexpr int QUANT_BITS = BY_NIBBLES ? 4 : BITS, IN_PLACE = (IS_HALF ? 11 : 8) / QUANT_BITS;  // quants
            constexpr uint32_t MASK = ((1 << QUANT_BITS) - 1) * 0x10001;
            const int number = BY_NIBBLES ? 2 * i + term : i, bit = number % IN_PLACE * QUANT_BITS;
            const uint32_t quants = word >> number / IN_PLACE * IN_PLACE * QUANT_BITS & MASK << bit;
            if (bit == 0) return quants | raw_raised;
            if constexpr (IS_HALF) return (word_pair<T>(quants) * power_of_two_pair(-bit)).template word<2>(0);
            // Bit 0 of a bfloat16 is worth 2^-133. The higher nibbles of bytes stay 16 times as large.
            const pair_t factor = power_of_two_pair(133 - RAW_PLACES - (BY_NIBBLES ? 0 : bit));
            return multiply_add(word_pair<T>(quants), factor, word_pair<T>(raw_raised)).template word<2>(0);
        }
    }
    // Pair i, 0 or 1, of 4-bit integers as float16, without a shift: the result is 16^i times as large.
    DEVICE uint32_t raw_in_place(uint32_t word, int i) const {
        static_assert(IS_HALF && !IS_FLOAT && BITS == 4);
        return word & mask << 4 * i;
    }

private:
    static DEVICE pair_t multiply_add(const pair_t& a, const pair_t& b, const pair_t& c) {
        pair_t result;
        multiply_add_pair<T>(result.data, a.data, b.data, c.data);
        return result;
    }
    static DEVICE pair_t power_of_two_pair(int exponent) {
        return word_pair<T>(IS_HALF ? (15 + exponent) * 0x04000400 : (127 + exponent) * 0x00800080);
    }
    static DEVICE uint32_t raised(uint32_t quants) { return quants | RAISED; }
};
