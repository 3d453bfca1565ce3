// gated_delta_norm.cuh: 1 / sqrt(the sum of squares + 1e-6) of rows whose squares may be above the largest float.
#pragma once
#include "number.cuh"

// A row whose squares sum to more than LARGE is scaled by DOWN before it is used. The sum of what it has then is finite
// for as many as 2^20 elements, and lies far above the smallest float; 1e-6 does not count beside it. A power of two
// rounds nothing.
constexpr float LARGE = 0x1p96f, DOWN = 0x1p-80f;
constexpr bool CAN_BE_LARGE = !is_same<scalar_t, half_t>;

DEVICE float inverse_root(float sum, bool is_large) { return 1.0f / sqrtf(is_large ? sum : sum + 1e-6f); }
