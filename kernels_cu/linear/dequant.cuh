// dequant.cuh: the codes of quantised weights, packed in 32-bit words, become pairs of 16-bit numbers, exactly.
//
// A word holds 32 / BITS codes, from its lowest bits on. Pair i of a word is codes i and i + 16 / BITS: what one shift
// and one mask leave in the low bits of both halves. Formats interleave their codes so that the numbers of a pair are
// neighbours along K, as a fragment of a product has them (mma.cuh, wgmma.cuh).
//
//     integers, EXPONENT 0, of 2, 3, 4 or 8 bits            pair * SUM_FACTOR = code - zero point
//     e4m3, EXPONENT 4; e2m1, EXPONENT 2                   pair * FACTOR = number; e4m3's NaN counts as 480
//
// SUM_FACTOR, a power of two, is left to who sums products: scales might become infinite by it.
// `raw` leaves the difference, and the factor, to who sums products: the number is the sum of TERMS such pairs, times
// RAW_FACTOR, less RAW_OFFSET (and the zero point). Of float16, integers are then the bits of subnormal numbers.
//
// Nothing is rounded. An integer is or-ed to the bits of a number whose last place is worth 1 (RAISED_PAIR; less, with a
// factor), and so is the zero point: the difference of the two is exact. The bits of a float are moved to where T has its
// own, exponent and mantissa together. The number, a subnormal one too, is then smaller by FACTOR, a power of two that
// belongs into the scale.
//
// Codes in place: the bits of the mantissa and the lowest bit of the exponent, 8 of bfloat16 and 11 of float16, are an
// integer where all other bits are 0, since the first normal numbers have the last place of subnormal ones. So the codes
// there are masked where they are, and a power of two brings them to the last place of the lowest code. The unit that
// multiplies takes an instruction of a warp in each cycle, and the one that shifts and masks in two.
#pragma once
#include "packed.cuh"

// The pair with the bits of a word.
template <typename T>
DEVICE Vec<T, 2> word_pair(uint32_t word) {
    Vec<T, 2> pair;
    pair.template word<2>(0) = word;
    return pair;
}

template <typename T, int BITS, int EXPONENT>
struct Codes {
    using pair_t = Vec<T, 2>;
    static constexpr int PAIRS = 16 / BITS;  // of a word
    static constexpr bool IS_FLOAT = EXPONENT > 0, IS_HALF = is_same<T, half_t>;
    static_assert(IS_HALF || is_same<T, bf16_t>);
    static_assert(IS_FLOAT ? BITS == 2 * EXPONENT : BITS == 2 || BITS == 3 || BITS == 4 || BITS == 8);
    // 2 to the power of the difference of the exponents' biases.
    static constexpr float FACTOR = !IS_FLOAT   ? 1.0f
                                    : BITS == 8 ? (IS_HALF ? 0x1p8f : 0x1p120f)
                                                : (IS_HALF ? 0x1p14f : 0x1p126f);
    // Below 128, the only place of bfloat16 worth 1, is no room for a byte: its nibbles are converted apart.
    static constexpr bool BY_NIBBLES = !IS_FLOAT && BITS == 8 && !IS_HALF;

    // Whether odd pairs are codes in place.
    static constexpr bool ODD_IN_PLACE = !IS_FLOAT && BITS == 4;
    // In place, 2^127 leaves quarters of bfloat16's integers: the largest power of two there is.
    static constexpr float SUM_FACTOR = ODD_IN_PLACE && !IS_HALF ? 4.0f : 1.0f;
    static constexpr uint32_t RAISED = ODD_IN_PLACE && !IS_HALF ? 0x42004200 : RAISED_PAIR<T>;

    // A zero point twice, raised as codes are. BY_NIBBLES: of the lower and of the higher nibbles. ODD_IN_PLACE: `high` is
    // what is added to codes in place.
    struct Zero { uint32_t low, high; };
    // Zero points are at most 16, and of 8 bits at most 256.
    static DEVICE Zero zero(uint32_t point) {
        const uint32_t both = point * 0x10001;
        if constexpr (BY_NIBBLES) return {raised((point & 15) * 0x10001), raised((point >> 4) * 0x10001)};
        if constexpr (!ODD_IN_PLACE) return {raised(both), 0};
        if constexpr (IS_HALF) return {raised(both), 0xd400d400 | both << 4};  // -(64 + point)
        const pair_t high = word_pair<T>(RAISED) - word_pair<T>(raised(both));
        return {raised(both), high.template word<2>(0)};
    }

    // Of an integer's bits, in both halves of a word. A grid has a single plane: blockIdx.z is 0, and the compiler, which
    // would load a constant anew for nearly every use, does not know it.
    uint32_t mask = ((1 << (BY_NIBBLES ? 4 : BITS)) - 1) * 0x10001 ^ blockIdx.z;

    DEVICE pair_t pair(uint32_t word, int i, const Zero& zero) const {
        constexpr uint32_t MASK = ((1 << BITS) - 1) * 0x10001, SIGN = (1 << (BITS - 1)) * 0x10001;
        const uint32_t codes = word >> BITS * i;
        if constexpr (IS_FLOAT) {
            constexpr int SHIFT = (IS_HALF ? 10 : 7) - (BITS - 1 - EXPONENT);  // the mantissas' difference in bits
            return word_pair<T>((codes & SIGN) << (16 - BITS) | (codes & (MASK - SIGN)) << SHIFT);
        } else if constexpr (BY_NIBBLES) {
            const pair_t low = word_pair<T>(raised(codes & mask)) - word_pair<T>(zero.low);
            const pair_t high = word_pair<T>(raised(codes >> 4 & mask)) - word_pair<T>(zero.high);
            const pair_t sixteen = word_pair<T>(0x41804180);
            return multiply_add(high, sixteen, low);
        } else if (ODD_IN_PLACE && i % 2 == 1) {
            const uint32_t in_place = word >> BITS * (i - 1) & MASK << BITS;
            // Of float16 they are or-ed to 1024, as 2^15 at most would leave smaller parts.
            const pair_t raised_or_not = word_pair<T>(IS_HALF ? in_place | RAISED : in_place);
            return multiply_add(raised_or_not, power_of_two_pair(IS_HALF ? -4 : 127), word_pair<T>(zero.high));
        } else {
            return word_pair<T>(raised(codes & mask)) - word_pair<T>(zero.low);
        }
    }

    static constexpr int TERMS = BY_NIBBLES ? 2 : 1;
    // Integers of `raw` are multiples of 2^-RAW_PLACES, of bfloat16 as 2^127 at most leaves them.
    static constexpr int RAW_PLACES = IS_FLOAT ? 0 : IS_HALF ? 24 : BY_NIBBLES ? 6 : 6 - BITS;
    static constexpr float RAW_OFFSET = IS_FLOAT || IS_HALF ? 0.0f : BY_NIBBLES ? 256.0f : 128.0f;
    // Floats of bfloat16 are multiplied here: their products with other numbers might be too small.
    static constexpr float RAW_FACTOR = !IS_FLOAT ? float(1 << RAW_PLACES) : IS_HALF ? FACTOR : 1.0f;
    // What is or-ed to bfloat16's, 2^(7 - RAW_PLACES) twice; not loaded anew either.
    uint32_t raw_raised = IS_HALF || IS_FLOAT ? 0 : (127 + 7 - RAW_PLACES) * 0x00800080 ^ blockIdx.z;
    DEVICE uint32_t raw(uint32_t word, int i, int term) const {
        if constexpr (IS_FLOAT) {
            pair_t number = pair(word, i, {});
            if constexpr (!IS_HALF) number = number * pair_t::full(FACTOR);
            return number.template word<2>(0);
        } else {
            constexpr int CODE_BITS = BY_NIBBLES ? 4 : BITS, IN_PLACE = (IS_HALF ? 11 : 8) / CODE_BITS;  // codes
            constexpr uint32_t MASK = ((1 << CODE_BITS) - 1) * 0x10001;
            const int number = BY_NIBBLES ? 2 * i + term : i, bit = number % IN_PLACE * CODE_BITS;
            const uint32_t codes = word >> number / IN_PLACE * IN_PLACE * CODE_BITS & MASK << bit;
            if (bit == 0) return codes | raw_raised;
            if constexpr (IS_HALF) return (word_pair<T>(codes) * power_of_two_pair(-bit)).template word<2>(0);
            // The place of bit 0 is worth 2^-133. Higher nibbles of bytes stay 16 times as large.
            const pair_t factor = power_of_two_pair(133 - RAW_PLACES - (BY_NIBBLES ? 0 : bit));
            return multiply_add(word_pair<T>(codes), factor, word_pair<T>(raw_raised)).template word<2>(0);
        }
    }
    // Pair i, 0 or 1, of integers of 4 bits of float16 without a shift: 16^i times as large.
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
    static DEVICE uint32_t raised(uint32_t codes) { return codes | RAISED; }
};
