// dequantize_packed: dequantizes a packed weight and transposes it to the dense operand of a GEMM.
//
//     dense[n, k] = T(scale * (quant[k, n] - zero)), rounded once
//     scale = 2^SCALE_EXPONENT * SCALE(scales[g, n]), or 1; zero = zeros[g, n], or 0; g = k / group_size, or g_idx[k]
//     ZEROS 3:     T(scale * quant + zero)
//     PLACES:      2:4 sparsity: of each quad of four rows, the metadata `places` gives two; the others are 0
//
// A row with an out-of-range group is 0. Differences and products are exact in float32. A thread takes VEC_SIZE rows
// of COLUMNS adjacent columns, and a block PIECES such tiles along K and NUM_THREADS / PIECES along N, so that PIECES
// threads write adjacent elements; threads that need the same words read them from the L1 cache.
//
// Constants
//     scalar_t      T: 16 bits, int8 or e4m3; a value out of range saturates
//     LAYOUT        layout of the quants: packed_layout.cuh
//     BITS          bits of a quant
//     EXPONENT      exponent bits of a quant: 0 integers, 2 e2m1, 4 e4m3
//     BIAS          bias of integers, which is subtracted
//     SIGNED        whether integers are two's complement
//     RECODED       whether `marlin_int4_fp8_preprocess` has re-encoded the quants
//     scale_t, SCALE    storage type of a scale, and the function that decodes it: group_scale.cuh
//     HAS_SCALES    whether there are scales
//     WEIGHT_SCALES    whether there is also a scale of the whole weight, of type weight_scale_t
//     SCALE_EXPONENT    a scale is the stored value times 2^SCALE_EXPONENT
//     SCALE_ORDER   column_permutation.cuh's function for the columns of scales, and of zero points that are floats
//     ZEROS         zero points. 0: none; 1: packed integers; 2: values of scale_t; 3: the same, added to scale * quant
//     ZERO_LAYOUT   the layout that has the order of packed zero points
//     ZERO_OFFSET   offset that is added to packed zero points
//     HAS_G_IDX     whether g_idx gives the group of each row
//     SHARED_GROUP  whether VEC_SIZE adjacent rows share a group
//     PLACES        whether the weight is 2:4 sparse
//     VEC_SIZE, COLUMNS    rows and columns of a thread, powers of two
//     ACCESS        elements of one access to dense: VEC_SIZE, or 1 if VEC_SIZE does not divide K

#include "group_scale.cuh"
#include "packed.cuh"
#include "LAYOUT.cuh"
#include "ZERO_LAYOUT.cuh"

constexpr int PIECES = 8;  // pieces of a block along K

// The value of a quant: an integer minus BIAS and the zero point, or a float.
DEVICE float number_of(uint32_t quant, int zero) {
    if constexpr (EXPONENT == 4) {
        // NaN counts as 480, as in the kernels that shift the bits of a quant into a 16-bit float (dequant.cuh).
        const uint8_t byte = uint8_t(quant);
        if ((byte & 0x7f) == 0x7f) return byte & 0x80 ? -480.0f : 480.0f;
        return to_float(reinterpret_cast<const fp8_e4m3_t&>(byte));
    } else if constexpr (EXPONENT == 2) {
        return e2m1_to_float(quant);
    } else {
        const int integer = SIGNED ? int(quant ^ 1 << (BITS - 1)) - (1 << (BITS - 1)) : int(quant);
        // A re-encoded quant of 15 - v stands for a v below the zero point, v - zero point for any other v.
        if constexpr (RECODED) return float(integer + zero + BIAS < 16 ? integer : 15 - zero - BIAS - integer);
        if constexpr (SIGNED) return float(integer - zero - BIAS);
        return integer_to_float(quant, float(zero + BIAS));
    }
}

// What the quants of a group and a column share.
struct Group {
    float scale, shift;
    int zero;
    bool exists;
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 2)
dequantize_packed(scalar_t* dense,                      // [N, K]
                  const uint32_t* quants,               // words, or bytes, of a weight [K, N]; PLACES: [K / 2, N]
                  const scale_t* scales,                // [groups, N]
                  const void* zeros,                    // [groups, N BITS / 32] words, or [groups, N]
                  const int32_t* g_idx,                 // [K]; values are not trusted
                  const uint16_t* places,               // [K / 32, 2 N], 2:4 metadata
                  const weight_scale_t* weight_scales,  // [weights]; blockIdx.y counts weights, contiguous
                  int64_t k, int64_t n, int64_t groups, int64_t group_size) {
    await_previous_kernel();
    const uint32_t row_blocks = uint32_t(ceil_div(k, int64_t(PIECES * VEC_SIZE)));
    const uint32_t column_block = blockIdx.x / row_blocks, row_block = blockIdx.x - column_block * row_blocks;
    const uint32_t first = (row_block * PIECES + threadIdx.x % PIECES) * VEC_SIZE;
    const uint32_t first_column = (column_block * (NUM_THREADS / PIECES) + threadIdx.x / PIECES) * COLUMNS;
    if (first >= k || first_column >= n) return;
    const int64_t weight = blockIdx.y;
    dense += weight * n * k;
    quants += weight * (k * n * BITS / 32);  // 2:4 weights have K / 2 rows, and are never batched
    scales += weight * groups * n;
    zeros =
        static_cast<const uint8_t*>(zeros) + weight * groups * n * (ZEROS == 1 ? BITS : 8 * int(sizeof(scale_t))) / 8;
    g_idx += weight * k;
    const float weight_scale = WEIGHT_SCALES ? to_float(weight_scales[WEIGHT_SCALES ? weight : 0]) : 1.0f;
    const PackedSize size{uint32_t(PLACES ? k / 2 : k), uint32_t(n), n, 1};

    const auto number_of_group = [&](uint32_t row) {
        return HAS_G_IDX ? int64_t(g_idx[row]) : int64_t(row / uint32_t(group_size));
    };
    const auto group_of = [&](int64_t g, uint32_t column) {
        Group group{1.0f, 0.0f, 0, g >= 0 && g < groups};
        if (!group.exists) return group;
        const int64_t at = g * n + SCALE_ORDER(column);
        if constexpr (HAS_SCALES) group.scale = SCALE(scales, at) * power_of_two(SCALE_EXPONENT) * weight_scale;
        if constexpr (ZEROS == 1) {
            const uint64_t bit = (uint64_t(g) * n + ZERO_LAYOUT<BITS>::zero_place(column)) * BITS;
            group.zero = int(quant_of_string<BITS>(static_cast<const uint32_t*>(zeros), bit, 1)) + ZERO_OFFSET;
        }
        if constexpr (ZEROS >= 2) group.shift = to_float(static_cast<const scale_t*>(zeros)[at]);
        return group;
    };
    const auto value = [&](uint32_t quant, const Group& group) {
        const float x = number_of(quant, group.zero);
        const float w =
            ZEROS == 3 ? fmaf(x, group.scale, group.shift) : (ZEROS == 2 ? x - group.shift : x) * group.scale;
        return group.exists ? w : 0.0f;
    };

    const int64_t first_group = number_of_group(first);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const uint32_t column = first_column | c;
        if (column >= n) return;
        float x[VEC_SIZE];
        Group group = group_of(first_group, column);
        // Rows are `first |` disjoint bits, from which the compiler sees which quants come from one word.
        if constexpr (PLACES) {
            static_assert(ACCESS == VEC_SIZE && VEC_SIZE % 4 == 0);
#pragma unroll
            for (int i = 0; i < VEC_SIZE; i += 4) {
                const uint32_t kept = places_of_quad(places, size.columns, (first | i) / 4, column);
                float two[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (!SHARED_GROUP) group = group_of(number_of_group(first | i | kept >> 2 * j & 3), column);
                    two[j] = value(LAYOUT<BITS>::quant(quants, size, first / 2 | i / 2 | j, column), group);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) x[i + j] = kept >> 2 == j ? two[1] : (kept & 3) == j ? two[0] : 0.0f;
            }
        } else {
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
                const uint32_t row = first | i;
                x[i] = 0.0f;
                if (ACCESS != VEC_SIZE && row >= k) continue;
                if (!SHARED_GROUP && i > 0) group = group_of(number_of_group(row), column);
                x[i] = value(LAYOUT<BITS>::quant(quants, size, row, column), group);
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
}
