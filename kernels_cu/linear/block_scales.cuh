// block_scales.cuh: the block scales of a GEMM's operands, one for SCALE_BLOCK elements of K.
//
// The kernel defines before the include: a_scale_t, b_scale_t, SCALE_BLOCK, the rows of b that share a scale.
#pragma once
#include "number.cuh"

struct BlockScales {
    const a_scale_t* a_scales;
    const b_scale_t* b_scales;
    int64_t a_step, b_step, a_block_step,
        b_block_step;  // from one row or block to the next, from one k-tile to the next

    DEVICE float of_row(int64_t row, int64_t k_tile) const {
        return to_float(a_scales[row * a_step + k_tile * a_block_step]);
    }
    DEVICE float of_column(int64_t column, int64_t k_tile) const {
        const int64_t block = column / max(SCALE_BLOCK, 1);
        return to_float(b_scales[k_tile * b_block_step + block * b_step]);
    }
};
