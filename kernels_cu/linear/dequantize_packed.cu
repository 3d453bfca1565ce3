// dequantize_packed: the numbers of a packed weight, transposed: what a matrix product takes.
//
//     dense[n, k] = T(scale * (number(code[k, n]) - zero)), rounded once
//     scale = 2^SCALE_EXPONENT * SCALE(scales[g, n]), or 1; zero = zeros[g, n], or 0; g = k / group_size, or g_idx[k]
//     ZEROS 3:     T(scale * number + zero)
//     PLACES:      row k is one of the two of its quad of four that `places` names, or 0
//
// A row whose group is out of range is 0. Differences and products are exact in float32. A thread has VEC_SIZE rows of a
// column, a block eight such pieces of 32 columns: it writes 64 neighbours at once, and reads words that threads share
// by way of the L1 cache.
//
// Constants
//     scalar_t      T: 16 bits, int8 or e4m3; a number that does not fit saturates
//     LAYOUT        of the codes: a name of packed_layout.cuh
//     BITS          of a code
//     EXPONENT      bits of a code's exponent: 0 integers, 2 e2m1, 4 e4m3
//     BIAS          taken from integers
//     SIGNED        integers are two's complement
//     RECODED       integers of 4 bits are what marlin_int4_fp8_preprocess has made of them
//     scale_t, SCALE    type of an entry of scales and what it is: group_scale.cuh
//     HAS_SCALES    there are scales
//     WEIGHT_SCALES    a scale is multiplied by one of the whole weight, too, of weight_scale_t
//     PRODUCTS      scales are tables of their products with codes, and SCALE is none
//     SCALE_EXPONENT    a scale is its entry times two to this
//     SCALE_ORDER   of the columns of scales, and of zero points that are floats: a name of column_permutation.cuh
//     ZEROS         0: none; 1: codes; 2: floats of scale_t; 3: the same, added to scale * number
//     ZERO_LAYOUT   of zero points that are codes: a name of packed_layout.cuh
//     ZERO_OFFSET   added to these
//     HAS_G_IDX     groups of rows are those of g_idx
//     SHARED_GROUP  VEC_SIZE neighbouring rows are of one group
//     PLACES        two of four rows are kept
//     ACCESS        elements of one access to dense: VEC_SIZE, or 1 where it does not divide K

#include "group_scale.cuh"
#include "packed.cuh"
#include "packed_layout.cuh"

constexpr int PIECES = 8;  // of a block's columns

// A code as an integer less BIAS and a zero point, or as a float.
DEVICE float number_of(uint32_t code, int zero) {
    if constexpr (EXPONENT == 4) {
        // NaN counts as 480, as in the kernels that move the bits of a code to where 16-bit numbers have theirs.
        const uint8_t byte = uint8_t(code);
        if ((byte & 0x7f) == 0x7f) return byte & 0x80 ? -480.0f : 480.0f;
        return to_float(reinterpret_cast<const fp8_e4m3_t&>(byte));
    } else if constexpr (EXPONENT == 2) {
        return e2m1_to_float(code);
    } else {
        const int integer = SIGNED ? int(code ^ 1 << (BITS - 1)) - (1 << (BITS - 1)) : int(code);
        // 15 - v stands for a v below the zero point, v less the zero point for any other.
        if constexpr (RECODED) return float(integer + zero + BIAS < 16 ? integer : 15 - zero - BIAS - integer);
        if constexpr (SIGNED) return float(integer - zero - BIAS);
        return integer_to_float(code, float(zero + BIAS));
    }
}

// What the codes of a group and a column have in common.
struct Group {
    int64_t entry;  // of the scales
    float scale, shift;
    int zero;
    bool exists;
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 2) dequantize_packed(
    scalar_t* dense,                      // [N, K]
    const uint32_t* codes,                // words, or bytes, of a weight [K, N]; PLACES: [K / 2, N]
    const scale_t* scales,                // [groups, N], or [groups, N, 8]
    const void* zeros,                    // [groups, N BITS / 32] words, or [groups, N]
    const int32_t* g_idx,                 // [K], any numbers
    const uint16_t* places,               // [K / 32, 2 N]
    const weight_scale_t* weight_scales,  // [weights]; blockIdx.y counts weights, which lie one after another
    int64_t k, int64_t n, int64_t groups, int64_t group_size) {
    await_previous_kernel();
    const int64_t row_blocks = ceil_div(k, int64_t(PIECES * VEC_SIZE));
    const uint32_t first = uint32_t(blockIdx.x % row_blocks) * (PIECES * VEC_SIZE) + threadIdx.x % PIECES * VEC_SIZE;
    const uint32_t column = uint32_t(blockIdx.x / row_blocks) * (NUM_THREADS / PIECES) + threadIdx.x / PIECES;
    if (first >= k || column >= n) return;
    const int64_t weight = blockIdx.y;
    dense += weight * n * k;
    codes += weight * (k * n * BITS / 32);  // of PLACES, with half as many codes, there is one weight
    scales += weight * groups * n * (PRODUCTS ? 8 : 1);
    zeros =
        static_cast<const uint8_t*>(zeros) + weight * groups * n * (ZEROS == 1 ? BITS : 8 * int(sizeof(scale_t))) / 8;
    g_idx += weight * k;
    const float weight_scale = WEIGHT_SCALES ? to_float(weight_scales[WEIGHT_SCALES ? weight : 0]) : 1.0f;
    const PackedSize size{uint32_t(PLACES ? k / 2 : k), uint32_t(n), n, 1};

    const auto group_of = [&](uint32_t row) {
        const int64_t g = HAS_G_IDX ? int64_t(g_idx[row]) : int64_t(row / uint32_t(group_size));
        Group group{0, 1.0f, 0.0f, 0, g >= 0 && g < groups};
        if (!group.exists) return group;
        const int64_t at = g * n + SCALE_ORDER(column);
        group.entry = at;
        if constexpr (HAS_SCALES && !PRODUCTS) {
            group.scale = SCALE(scales, at) * power_of_two(SCALE_EXPONENT) * weight_scale;
        }
        if constexpr (ZEROS == 1) {
            const uint64_t bit = (uint64_t(g) * n + ZERO_LAYOUT<BITS>(column)) * BITS;
            group.zero = int(code_of_string<BITS>(static_cast<const uint32_t*>(zeros), bit, 1)) + ZERO_OFFSET;
        }
        if constexpr (ZEROS >= 2) group.shift = to_float(static_cast<const scale_t*>(zeros)[at]);
        return group;
    };
    const auto value = [&](uint32_t code, const Group& group) {
        if (!group.exists) return 0.0f;
        const float x = number_of(code, group.zero);
        if constexpr (PRODUCTS) return scale_product(scales, group.entry, int(x));
        if constexpr (ZEROS == 3) return fmaf(x, group.scale, group.shift);
        return (ZEROS == 2 ? x - group.shift : x) * group.scale;
    };

    float x[VEC_SIZE];
    Group group = group_of(first);
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) {
        const uint32_t row = first + i;
        x[i] = 0.0f;
        if (row >= k) continue;
        if (!SHARED_GROUP && i > 0) group = group_of(row);
        if constexpr (PLACES) {
            const uint32_t kept = places_of_quad(places, size.columns, row / 4, column);
            const bool is_first = (kept & 3) == row % 4, is_second = kept >> 2 == row % 4;
            if (!is_first && !is_second) continue;
            x[i] = value(LAYOUT<BITS>::code(codes, size, row / 4 * 2 + is_second, column), group);
        } else {
            x[i] = value(LAYOUT<BITS>::code(codes, size, row, column), group);
        }
    }
    scalar_t* out = dense + int64_t(column) * k + first;
    if (ACCESS == VEC_SIZE) {
        Vec<scalar_t, VEC_SIZE>::from_floats(x).store(out);
    } else {
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
            if (first + i < k) out[i] = from_float<scalar_t>(x[i]);
        }
    }
}
