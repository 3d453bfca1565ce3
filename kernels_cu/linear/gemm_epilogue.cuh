// gemm_epilogue.cuh: the epilogue of a GEMM: zero points, scales, bias and activation on the accumulators.
//
//     x[m, n] = a_scales[m] * (b_scales[n] * float(sum[m, n] - z)) + bias
//     sum is the accumulator; operands that the op is not given drop out
//     SCALE_EXPONENT: the scale applied first (b's; a's without B_SCALES) is the stored value times 2^SCALE_EXPONENT
//     COLUMN_ORDER: b_scales[n] and bias[n] are stored at index COLUMN_ORDER(n) (column_permutation.cuh)
//     z = 0;   AZP 1: azp_adj[n];   AZP 2: azp[m] * azp_adj[n]                   (int32 accumulators: exact)
//     bias = 0;   BIAS 1: bias[n];   BIAS 2: bias[m, n]
//     out[m, n] = out_t(x[m, n]);   with ACTIVATION f: out_t(f(x[m, n]))
//     GATED: out[m, n] = out_t(f(x[m, n]) * x[m, N + n]); row n of the weight is a gate row, row N + n an up row
//
// A thread loads the operands of a row and of a column once, and applies them to each accumulator. A per-tensor scale
// has stride 0 (a_scale_step, b_scale_step).

#pragma once
#include "column_permutation.cuh"
#include "gemm_activation.cuh"

template <typename out_t, bool A_SCALES, bool B_SCALES, int AZP, int BIAS, int SCALE_EXPONENT>
struct Epilogue {
    const a_scale_t* a_scales;  // [M] or [1]
    const b_scale_t* b_scales;  // [N] or [1]
    const int32_t* azp_adj;     // [N]
    const int32_t* azp;         // [M]
    const out_t* bias;          // [N], or [M, N]
    int64_t a_scale_step, b_scale_step, bias_stride;

    static constexpr float FACTOR = power_of_two(SCALE_EXPONENT);

    struct Row {
        int64_t row;
        float scale;
        int32_t azp;
    };
    struct Column {
        int64_t column;
        float scale, bias;
        int32_t azp;
    };

    // The operands of row m and of column n; both must be in range.
    DEVICE Row row(int64_t m) const {
        const float scale = A_SCALES ? to_float(a_scales[m * a_scale_step]) : 1.0f;
        return {m, A_SCALES && !B_SCALES ? scale * FACTOR : scale, AZP == 2 ? azp[m] : 1};
    }
    DEVICE Column column(int64_t n) const {
        const int64_t place = COLUMN_ORDER(n);
        return {n, B_SCALES ? to_float(b_scales[place * b_scale_step]) * FACTOR : 1.0f,
                BIAS == 1 ? to_float(bias[place]) : 0.0f, AZP > 0 ? azp_adj[n] : 0};
    }

    // x[m, n] from the accumulator `sum`, float or int32_t.
    template <typename Sum>
    DEVICE float value(const Row& row, const Column& column, Sum sum) const {
        // The subtraction wraps modulo 2^32: the difference is right if it fits in int32, even where the product does
        // not.
        if constexpr (AZP > 0) sum = int32_t(uint32_t(sum) - uint32_t(row.azp) * column.azp);
        float x = float(sum);
        if constexpr (B_SCALES) x = ieee_multiply(column.scale, x);
        const float shift = BIAS == 2 ? to_float(bias[row.row * bias_stride + column.column]) : column.bias;
        if constexpr (A_SCALES) return BIAS ? fmaf(row.scale, x, shift) : ieee_multiply(row.scale, x);
        return BIAS ? x + shift : x;
    }
    // The element of out for x[m, n], with GATED for a gate and its up.
    static DEVICE float activated(float gate, float up) {
        const float x = ACTIVATION<out_t>(gate);
        return GATED ? x * up : x;
    }
};
