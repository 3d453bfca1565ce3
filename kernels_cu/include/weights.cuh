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
DEVICE float clean(float x) {
    if (__float_as_uint(x) == 0x80000000u) return 0.0f;
    return x != x ? minus_infinity() : ieee_min(x, FLOAT_MAX);
}
DEVICE uint32_t key_of(float x) { return ordered_bits(__float_as_uint(x)); }

// Weights of clean logits of a row: WHOLE * exp((x - largest) / temperature), rounded down; 0 below min_p * WHOLE. With a
// temperature that has no finite positive inverse, the largest alone have a weight.
struct Weights {
    float largest, inverse;
    uint64_t least;

    DEVICE Weights(float largest, float temperature, float min_p) : largest(largest) {
        inverse = ieee_divide(1.0f, temperature);
        if (!(inverse >= 0.0f && inverse <= FLOAT_MAX && temperature > 0.0f)) inverse = -1.0f;
        least = min_p > 0.0f ? uint64_t(ceilf((min_p < 1.0f ? min_p : 1.0f) * float(WHOLE))) : 0;
    }
    DEVICE bool is_greedy() const { return inverse < 0.0f; }
    DEVICE uint64_t of(float x) const {
        if (x == minus_infinity()) return 0;
        if (is_greedy()) return x == largest ? WHOLE : 0;
        const float share = expf(ieee_multiply(x - largest, inverse));
        if (!(share > 0.0f)) return 0;
        const uint64_t weight = uint64_t(share * float(WHOLE));
        return weight >= least ? weight : 0;
    }
};

// The largest of what the pieces of a row have left. Every lane calls.
DEVICE float largest_of(const float* maxima, int64_t pieces) {
    float largest = minus_infinity();
    for (int64_t i = threadIdx.x % WARP_SIZE; i < pieces; i += WARP_SIZE) largest = ieee_max(largest, maxima[i]);
    return lane_reduce<Max, WARP_SIZE>(largest);
}

// Which piece of which row a block works on.
template <typename T>
struct Piece {
    static constexpr int VEC = 16 / sizeof(T);
    int64_t row;
    int index;

    explicit DEVICE Piece(int64_t pieces) {
        const unsigned quotient = blockIdx.x / unsigned(pieces);
        row = quotient;
        index = int(blockIdx.x - quotient * unsigned(pieces));
    }
    DEVICE Span<T, VEC> span(const T* logits, int64_t stride, int64_t vocab_size, int64_t size, int number) const {
        const int64_t begin = number * size;
        return {logits + row * stride + begin, int(min(size, vocab_size - begin))};
    }
    // f(x, vec, element) for every vector of the thread, x the clean logits, -inf where there is none.
    template <int NUM_THREADS, typename F>
    static DEVICE void for_each(const Span<T, VEC>& span, F f) {
        span.template for_each<NUM_THREADS, 4>(from_float<T>(minus_infinity()), [&](const Vec<T, VEC>& vec, int first) {
            float x[VEC];
            vec.to_floats(x);
#pragma unroll
            for (int j = 0; j < VEC; ++j) x[j] = clean(x[j]);
            f(x, first);
        });
    }
};
