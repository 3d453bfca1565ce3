// quantized_weight.cuh: the quantized weights of experts, packed along K: the scale and zero point of a group, and
// dequantization.
//
//     w[e, r, k] = T(scale[e, r, g] * (quant[e, r, k] - zero[e, r, g])), rounded once; g: k / GROUP_SIZE; T: scalar_t
//
// Constants
//     BITS, EXPONENT    type of a quant: dequant.cuh. 8-bit integers without HAS_SCALES are two's complement
//     HAS_SCALES    whether groups have scales; otherwise the epilogue has one for each row of w
//     scale_t, SCALE    storage type of a scale, and the function that decodes it: group_scale.cuh
//     HAS_ZEROS     whether groups have zero points; otherwise the zero point of integers is 2^(BITS - 1)
//     GROUP_SIZE    elements of K that share a scale
#pragma once
#include "dequant.cuh"
#include "group_scale.cuh"

using quants_t = Quants<scalar_t, BITS, EXPONENT>;
using pair_t = Vec<scalar_t, 2>;
constexpr uint32_t MIDDLE = EXPONENT > 0 ? 0 : 1u << (BITS - 1);
static_assert(BITS == 4 || BITS == 8);
static_assert(HAS_SCALES || !HAS_ZEROS);
static_assert(EXPONENT == 0 || (HAS_SCALES && !HAS_ZEROS));

// The scale of a group of a row of w in the low half of a word, and its zero point in the high half: scales[entry] and
// zeros[zero_entry]. With 4 bits a byte has the zero points of two rows; `nibble` is the index of the row in it.
DEVICE uint32_t terms_of(const scale_t* scales, const uint8_t* zeros, uint32_t entry, uint32_t zero_entry, int nibble) {
    if constexpr (!HAS_SCALES) return MIDDLE << 16;
    uint16_t scale;
    if constexpr (is_same<scale_t, scalar_t>) {
        scale = reinterpret_cast<const uint16_t*>(scales)[entry];
    } else {
        const scalar_t number = from_float<scalar_t>(SCALE<scale_t>(scales, entry));
        scale = reinterpret_cast<const uint16_t&>(number);
    }
    uint32_t zero = MIDDLE;
    if constexpr (HAS_ZEROS) zero = uint32_t(zeros[zero_entry]) >> nibble * 4 & ((1u << BITS) - 1);
    return scale | zero << 16;
}

// Dequantizes pair `i` of a word.
DEVICE uint32_t weights_of(const quants_t& decode, uint32_t word, int i, const quants_t::Zero& zero,
                           const pair_t& scale) {
    pair_t pair = decode.pair(word, i, zero);
    if constexpr (quants_t::FACTOR != 1.0f) pair = pair * pair_t::full(quants_t::FACTOR);
    if constexpr (HAS_SCALES) pair = pair * scale;
    return pair.template word<2>(0);
}
