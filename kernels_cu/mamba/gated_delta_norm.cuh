// gated_delta_norm.cuh: 1 / sqrt(sum of squares + 1e-6) of rows, even if the squares overflow float32.
#pragma once
#include "number.cuh"

// A row with a sum of squares above LARGE is scaled by DOWN first. The scaled sum is finite for up to 2^20 elements and
// far from underflow, and the 1e-6 is negligible in it. Scaling by a power of two is exact.
constexpr float LARGE = 0x1p96f, DOWN = 0x1p-80f;
constexpr bool CAN_BE_LARGE = !is_same<scalar_t, half_t>;

DEVICE float inverse_root(float sum, bool is_large) { return 1.0f / sqrtf(is_large ? sum : sum + 1e-6f); }
