// gated_delta_tiles.cuh: tiles of tokens of the chunked gated delta rule, and the inverse that relates their updates.
#pragma once
#include "state_tiles.cuh"
#include "unit_triangular.cuh"

constexpr int STEPS = KEY_SIZE / 16, BLOCKS = TOKENS / 16;
constexpr int PITCH = TOKENS + 4;  // stride between columns of L, in floats: columns begin on different banks
static_assert(TOKENS <= 32);

using key_tile = SwizzledTile<scalar_t, KEY_SIZE / 8>;  // keys or queries: one row per token
using square_tile = square_tile_t<scalar_t, TOKENS>;

// (I + L)^-1 b from L, column-major with stride PITCH, and b. `Tile` has the interface of SwizzledTile.
template <typename Tile>
DEVICE void solve(const float* columns, const float* strengths, const Tile& inverse) {
    const int lane = threadIdx.x % WARP_SIZE;
    if (lane >= TOKENS) return;
    float x[TOKENS];
    invert_column<PITCH>(x, columns, lane);
    const float strength_of_column = strengths[lane];
#pragma unroll
    for (int l = 0; l < TOKENS; ++l) {
        inverse.at(l, lane / 8)[lane % 8] = from_float<scalar_t>(x[l] * strength_of_column);
    }
}
