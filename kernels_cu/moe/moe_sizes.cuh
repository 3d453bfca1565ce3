// moe_sizes.cuh: the problem size of one expert, as a grouped GEMM reads it.

#pragma once
#include "platform.cuh"

// (rows, n, k), or (n, rows, k) with SWAP.
template <bool SWAP>
DEVICE void write_sizes(int32_t* sizes, int rows, int n, int k) {
    sizes[0] = SWAP ? n : rows;
    sizes[1] = SWAP ? rows : n;
    sizes[2] = k;
}
