// query_rows.cuh: converts queries to float16 for a matmul with keys of an fp8 cache, because float16 represents every
// fp8 value.
#pragma once
#include "attention.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "widen.cuh"

// Converts a row of queries of type Q to float16 in place. The row lies in PANELS swizzled panels at `row`, and is
// divided by a power of two. Returns that power; the caller multiplies the scores of the row by it. Four adjacent lanes
// t = 0 ... 3 call it. `number` is the index of the row: even and odd rows start with different halves of 128 bytes,
// which avoids bank conflicts.
template <typename Q, int PANELS, int PANEL_BYTES>
DEVICE float convert_query_row(uint8_t* row, int number, int t) {
    const auto at = [&](int i) { return row + i / 2 * PANEL_BYTES + (t + (i + number) % 2 * 4) * 16; };
    float absmax = 0.0f, x[8];
    Vec<Q, 8> loaded[2 * PANELS];
#pragma unroll
    for (int i = 0; i < 2 * PANELS; ++i) loaded[i] = Vec<Q, 8>::load(reinterpret_cast<const Q*>(at(i)));
#pragma unroll
    for (int i = 0; i < 2 * PANELS; ++i) {
        loaded[i].to_floats(x);
#pragma unroll
        for (int j = 0; j < 8; ++j) absmax = fmaxf(absmax, fabsf(x[j]));
    }
    absmax = fmaxf(absmax, shfl_xor(absmax, 1));
    absmax = fmaxf(absmax, shfl_xor(absmax, 2));
    const float factor = inverse_power_of_two(absmax);
#pragma unroll
    for (int i = 0; i < 2 * PANELS; ++i) {
        loaded[i].to_floats(x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= factor;
        Vec<half_t, 8>::from_floats(x).store_shared(reinterpret_cast<half_t*>(at(i)));
    }
    return 1.0f / factor;
}

// Loads 16 rows of queries of type Q, which lie in swizzled panels at `rows`, as float16 A fragments of a warp: q[i] is
// the fragment of elements 16i to 16i + 15 (mma.cuh). The lane's rows are lane / 4 and lane / 4 + 8. Each row is
// divided by its element of `powers`; float16 rows are loaded as they are, and `powers` is not written.
template <typename Q, int PANEL_BYTES, int STEPS>
DEVICE void load_query_rows(uint32_t (&q)[STEPS][4], float (&powers)[2], const uint8_t* rows) {
    const int lane = threadIdx.x % WARP_SIZE;
    float absmax[2] = {0.0f, 0.0f}, factors[2], low, high;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        ldmatrix(q[i], rows + i / 4 * PANEL_BYTES + swizzle_128b(lane % 16, i % 4 * 32 + lane / 16 * 16));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            unpack_pair<Q>(q[i][j], low, high);
            absmax[j % 2] = fmaxf(fmaxf(absmax[j % 2], fabsf(low)), fabsf(high));
        }
    }
    if constexpr (is_same<Q, half_t>) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        absmax[half] = fmaxf(absmax[half], shfl_xor(absmax[half], 1));
        absmax[half] = fmaxf(absmax[half], shfl_xor(absmax[half], 2));
        factors[half] = inverse_power_of_two(absmax[half]);
        powers[half] = 1.0f / factors[half];
    }
#pragma unroll
    for (int i = 0; i < STEPS * 4; ++i) {
        uint32_t& pair = q[i / 4][i % 4];
        unpack_pair<Q>(pair, low, high);
        pair = pack_pair<half_t>(low * factors[i % 2], high * factors[i % 2]);
    }
}
