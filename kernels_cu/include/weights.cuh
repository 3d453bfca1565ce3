// weights.cuh: logits of a row, piece by piece, as weights of tokens that are integers: sums of them have no order.
#pragma once
#include "reduce.cuh"
#include "select.cuh"
#include "span.cuh"

// Of the likeliest token. A block sums up at most 2^14 weights.
constexpr uint64_t WHOLE = uint64_t(1) << 35;

// What is known of a row, in memory that launches share.
struct RowState {
    uint64_t wanted;      // what is left to find in the bin that `prefix` names
    uint32_t floor;       // tokens whose keys are less are not drawn
    uint32_t prefix;      // digits found so far of the key that top-p ends with
    uint32_t arrived;     // blocks
    uint32_t is_exact;    // bit 0: top-k needs no more digits; bit 1: top-p
};

// A logit that has an order: NaN is -inf, which is never drawn; inf is the largest number, and -0 is 0.
DEVICE float clean(float x) { return ieee_min(ieee_max(ieee_add(x, 0.0f), minus_infinity()), FLOAT_MAX); }
DEVICE uint32_t key_of(float x) { return ordered_bits(__float_as_uint(x)); }
DEVICE float number_of(uint32_t key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : ~0u)); }

// A weight in two parts, or a sum of weights: `low` counts ones, of which a weight has less than 2^LOW_BITS, `high` the rest.
template <int LOW_BITS>
struct PartsOf {
    uint32_t low = 0, high = 0;
    DEVICE uint64_t whole() const { return (uint64_t(high) << LOW_BITS) + low; }
};
using Parts = PartsOf<18>;

// Weights of clean logits of a row: WHOLE * exp((x - largest) / temperature), rounded down; 0 below min_p * WHOLE. With a
// temperature that has no finite positive inverse, the largest alone have a weight. What is not GIVEN is 1, or 0 for min_p.
template <bool TEMPERATURE_GIVEN, bool MIN_P_GIVEN, int LOW_BITS = 18>
struct Weights {
    float largest, inverse = 1.0f, least = 0.0f;

    DEVICE Weights(float largest, const float* temperature, const float* min_p, int64_t row) : largest(largest) {
        if constexpr (TEMPERATURE_GIVEN) {
            const float t = temperature[row];
            inverse = ieee_divide(1.0f, t);
            if (!(inverse >= 0.0f && inverse <= FLOAT_MAX && t > 0.0f)) inverse = -1.0f;
        }
        if constexpr (MIN_P_GIVEN) {
            const float p = min_p[row];
            if (p > 0.0f) least = ceilf((p < 1.0f ? p : 1.0f) * float(WHOLE)) / float(WHOLE);
        }
    }
    DEVICE bool is_greedy() const { return TEMPERATURE_GIVEN && inverse < 0.0f; }
    // exp((x - largest) / temperature). -inf less -inf is NaN, which saturate takes to 0, as it takes what -inf leads to.
    DEVICE float share(float x) const {
        const float below = TEMPERATURE_GIVEN ? ieee_multiply(x - largest, inverse) : x - largest;
        float share = saturate(expf(below));
        if (is_greedy()) share = x == largest && x != minus_infinity() ? 1.0f : 0.0f;
        return !MIN_P_GIVEN || share >= least ? share : 0.0f;
    }
    DEVICE PartsOf<LOW_BITS> of(float x) const {
        constexpr float HIGH = float(WHOLE >> LOW_BITS), LOW = float(1 << LOW_BITS);
        const float all = share(x);
        const uint32_t high = floor_bits(all, HIGH);
        const float rest = fmaf(all, HIGH, 0x1p23f - __uint_as_float(high));
        return {floor_bits(rest, LOW) - __float_as_uint(0x1p23f), high - __float_as_uint(0x1p23f)};
    }
};

// BINS coarse bins of clean logits, the last for the largest, all as wide but the first, which has all below: few have much,
// and it is known of each logit which they are. Where logits are says the least of many threads' largest, `near`; what lies
// 16 below the largest at temperature 1 weighs little.
template <int BINS>
struct Coarse {
    float width, inverse, least;

    template <typename WEIGHTS>
    DEVICE Coarse(const WEIGHTS& weights, float near) {
        const float spread = weights.inverse > 0.0f ? ieee_min(3.0f * (weights.largest - near), 16.0f / weights.inverse)
                                                    : 3.0f * (weights.largest - near);
        // A power of two, so that bins begin with numbers; not so small that these have no place in 22 bits.
        const float wide = ieee_max(spread / BINS, ieee_max(ieee_abs(weights.largest) * 0x1p-20f, 0x1p-100f));
        const uint32_t exponent = __float_as_uint(ieee_min(wide, 0x1p108f)) & 0x7f800000u;
        width = __uint_as_float(exponent);
        inverse = __uint_as_float((254u << 23) - exponent);
        least = ieee_multiply(floorf(weights.largest * inverse) - (BINS - 1), width);
    }
    DEVICE uint32_t bin(float x) const { return floor_of_22_bits(ieee_max(x, least), inverse) - floor_of_22_bits(least, inverse); }
    DEVICE float begin(uint32_t bin) const { return ieee_add(least, ieee_multiply(float(bin), width)); }
};

// The largest of what the pieces of a row have left. Every lane calls.
DEVICE float largest_of(const float* maxima, int64_t pieces) {
    float largest = minus_infinity();
    for (int64_t i = threadIdx.x % WARP_SIZE; i < pieces; i += WARP_SIZE) largest = ieee_max(largest, maxima[i]);
    return lane_reduce<Max, WARP_SIZE>(largest);
}

// Which piece of which row a block works on. BACKWARDS: blocks that come first have the last. A launch goes the other way than
// the one before, so that it begins with what L2 still holds.
template <typename T, bool BACKWARDS>
struct Piece {
    static constexpr int VEC = 16 / sizeof(T);
    int64_t row;
    int index;

    explicit DEVICE Piece(int64_t pieces) {
        const unsigned block = BACKWARDS ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        const unsigned quotient = block / unsigned(pieces);
        row = quotient;
        index = int(block - quotient * unsigned(pieces));
    }
    DEVICE Span<T, VEC> span(const T* logits, int64_t stride, int64_t vocab_size, int64_t size, int number) const {
        const int64_t begin = number * size;
        return {logits + row * stride + begin, int(min(size, vocab_size - begin))};
    }
    // f(x, element) for every vector of the thread, x the logits as they are, -inf where there is none.
    template <int NUM_THREADS, typename F>
    static DEVICE void for_each(const Span<T, VEC>& span, F f) {
        span.template for_each<NUM_THREADS, 4>(from_float<T>(minus_infinity()), [&](const Vec<T, VEC>& vec, int first) {
            float x[VEC];
            vec.to_floats(x);
            f(x, first);
        });
    }
};
