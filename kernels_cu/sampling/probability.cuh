// probability.cuh: token probabilities from the logits of a row, as integer weights, because integer addition does not
// depend on the order.
//
// A row is split into pieces, which several blocks and launches process.

#pragma once
#include "reduce.cuh"
#include "radix_select.cuh"
#include "unaligned_row.cuh"

// The weight of the likeliest token. A block sums up at most 2^14 weights.
constexpr uint64_t WHOLE = uint64_t(1) << 35;

// State of a row, in a workspace that the launches share.
struct RowState {
    uint64_t wanted;    // the weight or count still to be reached within the bin of `prefix`
    uint32_t floor;     // tokens with smaller keys are not drawn
    uint32_t prefix;    // the digits found so far of the smallest key within top-p
    uint32_t arrived;   // blocks that have arrived
    uint32_t is_exact;  // bit 0: top-k needs no more digits; bit 1: top-p needs no more digits
};

// A logit that can be ordered: NaN becomes -inf, which is never drawn; +inf becomes the largest number; -0 becomes 0.
DEVICE float clean(float x) { return ieee_min(ieee_max(ieee_add(x, 0.0f), minus_infinity()), FLOAT_MAX); }
// An integer key that has the order of clean logits, and back.
DEVICE uint32_t key_of(float x) { return ordered_bits(__float_as_uint(x)); }
DEVICE float number_of(uint32_t key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : ~0u)); }

// A weight, or a sum of weights, as high * 2^LOW_BITS + low. A weight has low < 2^LOW_BITS; a sum may have more.
template <int LOW_BITS>
struct PartsOf {
    static constexpr int BITS = LOW_BITS;
    uint32_t low = 0, high = 0;
    DEVICE uint64_t whole() const { return (uint64_t(high) << LOW_BITS) + low; }
};
using Parts = PartsOf<18>;

// Below this temperature, only tokens with the row max are drawn. Its inverse times 2^28 is a finite float.
constexpr float MIN_TEMPERATURE = 0x1p-98f;

// The weights of the clean logits x of a row: WHOLE * exp((x - largest) / temperature), rounded down, or 0 if that is
// less than min_p * WHOLE. If the temperature is below MIN_TEMPERATURE, or NaN, only the largest logits have a weight;
// if it is infinite, all finite logits weigh the same. A temperature that is not GIVEN is 1; a min_p that is not GIVEN
// is 0.
template <bool TEMPERATURE_GIVEN, bool MIN_P_GIVEN, int LOW_BITS = 18>
struct Weights {
    // Logits are scaled down before they are subtracted, because FLOAT_MAX - -FLOAT_MAX would overflow.
    // 1 / temperature is SHRINK * inverse.
    static constexpr float SHRINK = TEMPERATURE_GIVEN ? 0x1p-28f : 1.0f;
    float largest, inverse = 1.0f, min_share = 0.0f;

    DEVICE Weights(float largest, const float* temperature, const float* min_p, int64_t row) : largest(largest) {
        if constexpr (TEMPERATURE_GIVEN) {
            const float t = temperature[row];
            inverse = t >= MIN_TEMPERATURE ? ieee_divide(1.0f, t * SHRINK) : -1.0f;
        }
        if constexpr (MIN_P_GIVEN) {
            const float p = min_p[row];
            if (p > 0.0f) min_share = ceilf((p < 1.0f ? p : 1.0f) * float(WHOLE)) / float(WHOLE);
        }
    }
    DEVICE bool is_greedy() const { return TEMPERATURE_GIVEN && inverse < 0.0f; }
    // exp((x - largest) / temperature), from 0 to 1. saturate maps NaN to 0: the difference is NaN if x = largest =
    // -inf, and -inf * 0 is NaN at an infinite temperature.
    DEVICE float share(float x) const {
        const float difference = x * SHRINK - largest * SHRINK;
        const float below = TEMPERATURE_GIVEN ? ieee_multiply(difference, inverse) : difference;
        float share = saturate(expf(below));
        if (is_greedy()) share = x == largest && x != minus_infinity() ? 1.0f : 0.0f;
        return !MIN_P_GIVEN || share >= min_share ? share : 0.0f;
    }
    DEVICE PartsOf<LOW_BITS> of(float x) const {
        constexpr float HIGH = float(WHOLE >> LOW_BITS), LOW = float(1 << LOW_BITS);
        const float all = share(x);
        const uint32_t high = floor_bits(all, HIGH);
        const float rest = fmaf(all, HIGH, 0x1p23f - __uint_as_float(high));
        return {floor_bits(rest, LOW) - __float_as_uint(0x1p23f), high - __float_as_uint(0x1p23f)};
    }
};

// BINS bins of clean logits of equal width, except that bin 0 holds every logit below bin 1; the last bin holds the row
// max. `near` is the smallest of many threads' maxima: the bins cover three times its distance from the row max, but at
// most 16 at temperature 1, because smaller logits weigh little.
template <int BINS>
struct Coarse {
    float width, inverse, first;

    template <typename WEIGHTS>
    DEVICE Coarse(const WEIGHTS& weights, float near) {
        const float all = 3.0f * (weights.largest - near), inverse_temperature = weights.inverse * WEIGHTS::SHRINK;
        const float range = inverse_temperature > 0.0f ? ieee_min(all, 16.0f / inverse_temperature) : all;
        // The width is a power of two, so that bin bounds are exact floats, and large enough that bin numbers fit in 22
        // bits.
        const float wide = ieee_max(range / BINS, ieee_max(ieee_abs(weights.largest) * 0x1p-20f, 0x1p-100f));
        const uint32_t exponent = __float_as_uint(ieee_min(wide, 0x1p108f)) & 0x7f800000u;
        width = __uint_as_float(exponent);
        inverse = __uint_as_float((254u << 23) - exponent);
        first = ieee_multiply(floorf(weights.largest * inverse) - (BINS - 1), width);
    }
    DEVICE uint32_t bin(float x) const {
        return floor_of_22_bits(ieee_max(x, first), inverse) - floor_of_22_bits(first, inverse);
    }
    DEVICE float begin(uint32_t bin) const { return ieee_add(first, ieee_multiply(float(bin), width)); }
};

// The row max from the maxima of the pieces. Every lane of the warp calls it.
DEVICE float largest_of(const float* maxima, int64_t pieces) {
    float largest = minus_infinity();
    for (int64_t i = threadIdx.x % WARP_SIZE; i < pieces; i += WARP_SIZE) largest = ieee_max(largest, maxima[i]);
    return lane_reduce<Max, WARP_SIZE>(largest);
}

// The piece of a row that a block works on. BACKWARDS: the first blocks take the last pieces. Consecutive launches go
// in opposite directions, so that each begins with what L2 still holds.
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
    // Calls f(x, element) for every vector of the thread: x are the logits from number `element` on, -inf outside the
    // piece.
    template <int NUM_THREADS, typename F>
    static DEVICE void for_each(const Span<T, VEC>& span, F f) {
        span.template for_each<NUM_THREADS, 4>(from_float<T>(minus_infinity()), [&](const Vec<T, VEC>& vec, int first) {
            float x[VEC];
            vec.to_floats(x);
            f(x, first);
        });
    }
};
