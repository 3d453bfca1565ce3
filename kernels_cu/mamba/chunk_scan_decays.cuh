// chunk_scan_decays.cuh: the decays of the tokens of a tile, for the MMA kernels of the chunked scan.
#pragma once
#include "chunk_scan.cuh"

// The decays of each head, with a_l the sum of A d up to token l of the tile.
template <int HEADS, int TOKENS>
struct Decays {
    float sums[HEADS][TOKENS];     // a_l * log2(e)
    float kept[HEADS][TOKENS];     // exp(a_l)
    float steps[HEADS][TOKENS];    // d_m
    float weights[HEADS][TOKENS];  // exp(a_end - a_m) d_m
};

// Computes the decays of tiles. A group of 32 lanes takes the heads first_own, first_own + NUM_GROUPS, ... of the
// block, or no head: the last groups get heads first. A lane takes every 32nd token.
template <typename dt_t, int HEADS, int TOKENS, int NUM_GROUPS>
struct DecayFinder {
    static constexpr int OWN = (HEADS + NUM_GROUPS - 1) / NUM_GROUPS, LANE_TOKENS = TOKENS / 32;
    dt_t raw[OWN][LANE_TOKENS] = {};  // time steps as loaded; converting them here would wait for the loads

    // Loads the time steps of `count` tokens; `dt` is that of the first token and of the block's first head.
    DEVICE void load(const dt_t* dt, int64_t dt_stride, int64_t dt_step, int count) {
        const int first_own = NUM_GROUPS - 1 - int(threadIdx.x / 32), lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int head = min(first_own + i * NUM_GROUPS, HEADS - 1);
#pragma unroll
            for (int k = 0; k < LANE_TOKENS; ++k) {
                const int l = k * 32 + lane;
                if (l < count) raw[i][k] = dt[l * dt_stride + head * dt_step];
            }
        }
    }
    // Finds the decays of the tokens that were loaded; A and dt_bias are those of the block's first head.
    template <bool SOFTPLUS, typename bias_t>
    DEVICE void find(Decays<HEADS, TOKENS>& decays, const float* A, const bias_t* dt_bias, float dt_min, float dt_max,
                     int count) const {
        const int first_own = NUM_GROUPS - 1 - int(threadIdx.x / 32), lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int head = first_own + i * NUM_GROUPS, own = WARP_SIZE == 32 ? head : min(head, HEADS - 1);
            if (WARP_SIZE == 32 && head >= HEADS) break;  // a warp of 64 lanes has two groups, which shuffle together
            const float rate = A[own] * LOG2_E, bias = dt_bias ? to_float(dt_bias[own]) : 0.0f;
            float steps[LANE_TOKENS], sums[LANE_TOKENS], end = 0.0f;
#pragma unroll
            for (int k = 0; k < LANE_TOKENS; ++k) {
                const bool exists = k * 32 + lane < count;
                steps[k] = exists ? time_step<SOFTPLUS>(to_float(raw[i][k]), bias, dt_min, dt_max) : 0.0f;
                sums[k] = exists ? steps[k] * rate : 0.0f;
#pragma unroll
                for (int distance = 1; distance < 32; distance *= 2) {
                    const float before = shfl<32>(sums[k], lane - distance & 31);
                    if (lane >= distance) sums[k] += before;
                }
                sums[k] += end;
                end = shfl<32>(sums[k], 31);
            }
#pragma unroll
            for (int k = 0; k < LANE_TOKENS; ++k) {
                const int l = k * 32 + lane;
                if (head >= HEADS) continue;
                decays.sums[own][l] = sums[k];
                decays.kept[own][l] = estimate_exp2(sums[k]);
                decays.steps[own][l] = steps[k];
                decays.weights[own][l] = l < count ? estimate_exp2(end - sums[k]) * steps[k] : 0.0f;
            }
        }
    }
};
