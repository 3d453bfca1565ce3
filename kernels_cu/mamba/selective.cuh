// selective.cuh: selective state-space models: softplus of a time step, SiLU as a gate, and the slots of states.

#pragma once
#include "number.cuh"

// log(1 + exp(x)), within a few ulp: max(x, 0) + log1p(t) with t = exp(-|x|). log1p is t times a polynomial of degree 9
// (minimax on 0 <= t <= 1, relative error 5e-9). NaN stays NaN.
DEVICE float softplus(float x) {
    const float magnitude = ieee_min(ieee_abs(x), 100.0f);  // exp(-100) is 0 in float32
    const float exponent = magnitude * -LOG2_E;
    const float lost = fmaf(magnitude, -LOG2_E, -exponent);  // rounding error of `exponent`
    const float estimate = estimate_exp2(exponent);
    const float t = fmaf(estimate, lost * LN_2, estimate);
    float ratio = -0.0032440228387713432f;
    ratio = fmaf(ratio, t, 0.019851455464959145f);
    ratio = fmaf(ratio, t, -0.056959524750709534f);
    ratio = fmaf(ratio, t, 0.10603655129671097f);
    ratio = fmaf(ratio, t, -0.15305593609809875f);
    ratio = fmaf(ratio, t, 0.1967594027519226f);
    ratio = fmaf(ratio, t, -0.24954134225845337f);
    ratio = fmaf(ratio, t, 0.3332996368408203f);
    ratio = fmaf(ratio, t, -0.4999990165233612f);
    ratio = fmaf(ratio, t, 1.0f);
    return fmaf(t, ratio, x <= 0.0f ? 0.0f : x);
}

// y * z / (1 + exp(-z)). For results of 16 bits the hardware's estimates are good enough. The reciprocal of a quarter
// of the divisor is taken, because it is normal for every finite divisor: the estimates flush subnormal numbers.
template <typename T>
DEVICE float gated_by_silu(float y, float z) {
    if constexpr (sizeof(T) == 2) {
        const float quarter = 0.25f + estimate_exp2(fmaf(z, -LOG2_E, -2.0f));
        return y * (z * (estimate_reciprocal(quarter) * 0.25f));
    } else {
        return y * ieee_divide(z, 1.0f + expf(-z));
    }
}

// The slots in which a cache keeps the states of a sequence.
struct Slots {
    const int32_t* indices;  // the sequence's row of slots
    int64_t columns, num_slots, pad_slot_id;

    // The element of a column; -1 for one that does not exist. The element need not be a slot.
    DEVICE int32_t load(int64_t column) const { return column < 0 || column >= columns ? -1 : indices[column]; }
    // `slot`, or -1 if it is padding or does not exist.
    DEVICE int64_t checked(int64_t slot) const {
        return slot == pad_slot_id || slot < 0 || slot >= num_slots ? -1 : slot;
    }
    // The slot in a column; -1 for one that does not exist.
    DEVICE int64_t at(int64_t column) const { return checked(load(column)); }
};
