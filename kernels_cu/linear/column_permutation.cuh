// column_permutation.cuh: where the entry of a column lies in a row of scales, or of a bias, whose columns are permuted.
//
// The functions are those of `column_place` of pyops/ops/_shared/packed_layouts.py, by the names of the orders. Marlin's
// are those in which lanes of a warp read neighbouring entries for the columns of their fragments.

#pragma once
#include "platform.cuh"

DEVICE constexpr int64_t column_natural(int64_t n) { return n; }
DEVICE constexpr int64_t column_marlin_64(int64_t n) { return (n & -64) + (n & 7) * 8 + (n >> 3 & 7); }
DEVICE constexpr int64_t column_marlin_32(int64_t n) {
    return (n & -32) + (n >> 1 & 3) * 8 + (n >> 3 & 3) * 2 + (n & 1);
}
// column_marlin_64, where the second and the third of four are exchanged.
DEVICE constexpr int64_t column_marlin_fp4(int64_t n) {
    const int64_t place = column_marlin_64(n);
    return (place & -4) + (place & 1) * 2 + (place >> 1 & 1);
}
DEVICE constexpr int64_t column_marlin_24(int64_t n) { return (n & -8) + (n & 3) * 2 + (n >> 2 & 1); }
DEVICE constexpr int64_t column_n32k16(int64_t n) { return (n & -32) + (n & 7) * 4 + (n >> 3 & 3); }
