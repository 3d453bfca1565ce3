// fp4_input.cuh: loads the sixteen values of a block of fp4.cuh: elements of a row, or silu(gate) * up of its halves.

#pragma once
#include "fp4.cuh"
#include "math.cuh"

// silu(gate) * up in bfloat16 by the hardware's approximate exp and reciprocal, and a test whether the accurate
// functions might round to a different bfloat16.
//
// Error bound, in units of 2^-24: the estimate of exp(-gate) is off by 4, and its argument by 4 more where -gate <=
// 5.5, because the argument is below 8; the reciprocal is off by 2, and six roundings are off by 1 each. So the
// estimate is off by no more than STEPS ulp of float32. A result is in doubt if it is within STEPS ulp of the midpoint
// between two bfloat16 numbers (by its lower 16 bits), or if gate < -5.5.
constexpr uint32_t STEPS = 20;
constexpr uint32_t MIN_GATE = 0xc0b0;  // the bits of -5.5; a smaller number and a negative NaN have larger bits

// Two bfloat16 results in a word. Each half of `distance` becomes (lower 16 bits of the float32 result) - (the
// midpoint) + STEPS, modulo 2^16.
DEVICE uint32_t estimate(uint32_t gate_word, uint32_t up_word, uint32_t& distance) {
    float gate[2], up[2], y[2];
    pair_of<bf16_t>(gate_word, gate[0], gate[1]);
    pair_of<bf16_t>(up_word, up[0], up[1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float share = estimate_reciprocal(1.0f + estimate_exp2(gate[j] * -LOG2_E));
        y[j] = ieee_multiply(ieee_multiply(gate[j], share), up[j]);
    }
    const uint32_t lower = __byte_perm(__float_as_uint(y[0]), __float_as_uint(y[1]), 0x5410);
    distance = min_of_sums(lower, (0x8000u + STEPS) * 0x10001u, ~0u);
    return word_of_pair<bf16_t>(y[0], y[1]);
}
// Whether a result of a pair is in doubt. Several pairs are tested at once by their smallest distances and largest gate
// bits.
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

    // silu(gate) * up of the two values of word i.
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
