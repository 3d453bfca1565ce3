// quantized_weight.cuh: the quantized weights of experts, packed along K: the scales and zero point of a group, and
// dequantization.
//
//     w[e, r, k] = T(scale[e, r, g] * (quant[e, r, k] - zero[e, r, g])), rounded once; g: k / GROUP_SIZE; T: scalar_t
//
// With SCALE_TILES, scales are stored as tensor cores of sm_100 read them, in tiles of 128 rows and 4 groups: an expert
// has ceil(rows / 128) * 128 rows of ceil(groups / 4) * 4 bytes, and the scale of row r, group g is byte
//
//     (r / 128 * ceil(groups / 4) + g / 4) * 512 + r % 32 * 16 + r / 32 % 4 * 4 + g % 4
//
// Constants
//     BITS, EXPONENT    type of a quant: dequant.cuh. 8-bit integers without HAS_SCALES are two's complement
//     HAS_SCALES    whether groups have scales; otherwise the epilogue has one for each row of w
//     scale_t, SCALE    storage type of a scale, and the function that decodes it: group_scale.cuh
//     SCALE_TILES   whether scales are in such tiles; otherwise they are [E, rows, groups]
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
static_assert(!SCALE_TILES || (HAS_SCALES && !HAS_ZEROS && sizeof(scale_t) == 1));

// The scale of row r, group g of an expert is at row_entry(r) + group_entry(g).
DEVICE uint32_t row_entry(uint32_t row, uint32_t groups) {
    return SCALE_TILES ? row / 128 * ((groups + 3) / 4 * 512) + row % 32 * 16 + row / 32 % 4 * 4 : row * groups;
}
DEVICE uint32_t group_entry(uint32_t group) { return SCALE_TILES ? group / 4 * 512 + group % 4 : group; }
// Scales in the tiles of an expert.
DEVICE int64_t tiled_scales(int64_t rows, uint32_t groups) { return (rows + 127) / 128 * ((groups + 3) / 4 * 512); }

DEVICE uint16_t scale_bits(const scale_t* scales, uint32_t entry) {
    if constexpr (is_same<scale_t, scalar_t>) return reinterpret_cast<const uint16_t*>(scales)[entry];
    const scalar_t number = from_float<scalar_t>(SCALE<scale_t>(scales, entry));
    return reinterpret_cast<const uint16_t&>(number);
}

// GROUPS 1: the scale of a group of a row of w in the low half of a word, and its zero point in the high half:
// scales[entry] and zeros[zero_entry]. With 4 bits a byte has the zero points of two rows; `nibble` is the index of the
// row in it. GROUPS 2: the scales of two adjacent groups; `entry` and the address of scales are even.
template <int GROUPS>
DEVICE uint32_t terms_of(const scale_t* scales, const uint8_t* zeros, uint32_t entry, uint32_t zero_entry, int nibble) {
    static_assert(GROUPS == 1 || (GROUPS == 2 && SCALE_TILES));
    if constexpr (!HAS_SCALES) return MIDDLE << 16;
    if constexpr (GROUPS == 2) {
        const auto both = Vec<scale_t, 2>::load(scales + entry);
        return scale_bits(both.data, 0) | uint32_t(scale_bits(both.data, 1)) << 16;
    }
    const uint16_t scale = scale_bits(scales, entry);
    uint32_t zero = MIDDLE;
    if constexpr (HAS_ZEROS) zero = uint32_t(zeros[zero_entry]) >> nibble * 4 & ((1u << BITS) - 1);
    return scale | zero << 16;
}

// The scale of group `i` among those of `terms_of`, in both halves.
DEVICE pair_t scale_of(uint32_t terms, int i) {
    return word_pair<scalar_t>(byte_perm(terms, terms, i == 0 ? 0x5410 : 0x7632));
}

// `weights_of` takes e4m3's NaN for 480. So if there is a NaN among the quants under a scale, the scale becomes NaN.
// The result is the same: all accumulators of the row of w are NaN.
template <int N>
DEVICE void mark_nan(pair_t& scale, const uint32_t (&words)[N]) {
    if constexpr (BITS == 8 && EXPONENT > 0) {
        uint32_t carries = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) carries |= (words[i] & 0x7f7f7f7f) + 0x01010101;
        if (carries & 0x80808080) scale = word_pair<scalar_t>(0x7fff7fff);
    }
}

// Dequantizes pair `i` of a word.
DEVICE uint32_t weights_of(const quants_t& decode, uint32_t word, int i, const quants_t::Zero& zero,
                           const pair_t& scale) {
    pair_t pair = decode.pair(word, i, zero);
    if constexpr (quants_t::FACTOR != 1.0f) pair = pair * pair_t::full(quants_t::FACTOR);
    if constexpr (HAS_SCALES) pair = pair * scale;
    return pair.template word<2>(0);
}
