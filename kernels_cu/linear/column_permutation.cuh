// column_permutation.cuh: the index of column n in a row of permuted scales, or in a permuted bias.
//
// The functions match `column_place` of pyops/ops/_shared/packed_layouts.py, with the names of the orders. In Marlin's
// orders the lanes of a warp read adjacent scales for the columns of their fragments.

#pragma once
#include "platform.cuh"

DEVICE constexpr int64_t column_natural(int64_t n) { return n; }
DEVICE constexpr int64_t column_marlin_64(int64_t n) { return (n & -64) + (n & 7) * 8 + (n >> 3 & 7); }
DEVICE constexpr int64_t column_marlin_32(int64_t n) {
    return (n & -32) + (n >> 1 & 3) * 8 + (n >> 3 & 3) * 2 + (n & 1);
}
// column_marlin_64, with the second and third of every four columns swapped.
DEVICE constexpr int64_t column_marlin_fp4(int64_t n) {
    const int64_t place = column_marlin_64(n);
    return (place & -4) + (place & 1) * 2 + (place >> 1 & 1);
}
DEVICE constexpr int64_t column_marlin_24(int64_t n) { return (n & -8) + (n & 3) * 2 + (n >> 2 & 1); }
DEVICE constexpr int64_t column_n32k16(int64_t n) { return (n & -32) + (n & 7) * 4 + (n >> 3 & 3); }
