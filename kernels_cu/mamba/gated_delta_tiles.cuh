// gated_delta_tiles.cuh: tiles of tokens of the chunked gated delta rule, and the inverse that relates their updates.
#pragma once
#include "state_tiles.cuh"

constexpr int STEPS = KEY_SIZE / 16, BLOCKS = TOKENS / 16;
constexpr int PITCH = TOKENS + 4;  // stride between columns of L, in floats: columns begin on different banks
static_assert(TOKENS <= 32);

using key_tile = SwizzledTile<scalar_t, KEY_SIZE / 8>;  // keys or queries: one row per token
using square_tile = square_tile_t<scalar_t, TOKENS>;

// (I + L)^-1 b from L, column-major with stride PITCH, and b. Each lane computes one column of the inverse by forward
// substitution. `Tile` has the interface of SwizzledTile.
template <typename Tile>
DEVICE void solve(const float* columns, const float* strengths, const Tile& inverse) {
    const int lane = threadIdx.x % WARP_SIZE;
    if (lane >= TOKENS) return;
    float x[TOKENS];
#pragma unroll
    for (int l = 0; l < TOKENS; ++l) x[l] = l == lane ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < TOKENS - 1; ++m) {
#pragma unroll
        for (int l = (m + 1) / 4 * 4; l < TOKENS; l += 4) {
            const auto four = Vec<float, 4>::load(columns + m * PITCH + l);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (l + i > m) x[l + i] = fmaf(-four[i], x[m], x[l + i]);
            }
        }
    }
    const float strength_of_column = strengths[lane];
#pragma unroll
    for (int l = 0; l < TOKENS; ++l) {
        inverse.at(l, lane / 8)[lane % 8] = from_float<scalar_t>(x[l] * strength_of_column);
    }
}
