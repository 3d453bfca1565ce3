// head_rotation.cuh: RoPE of a head in registers, after a norm. Each of LANES adjacent lanes holds 8 consecutive floats
// of the head; its first 2 * HALF elements rotate in pairs, (j, j + HALF) if IS_NEOX, else (2j, 2j + 1).

#pragma once
#include "reduce.cuh"
#include "vec.cuh"

template <int LANES, int HALF, bool IS_NEOX>
struct HeadRotation {
    static constexpr int VEC_SIZE = 8, ROTARY_DIM = 2 * HALF;
    // The other element of a NeoX pair lies in another lane. It comes by shuffle if HALF is a multiple of 8, else
    // through LANES * 8 floats of shared memory.
    static constexpr bool VIA_SHARED = IS_NEOX && HALF % VEC_SIZE != 0;

    // cos or sin of HALF angles for the 8 elements from `element` on; 0 beyond ROTARY_DIM.
    template <int ACCESS, typename angle_t>
    static DEVICE void load_angles(const angle_t* angles, int element, float (&angle)[VEC_SIZE]) {
        if constexpr (IS_NEOX && !VIA_SHARED) {
            load_floats<ACCESS>(angles + element % HALF, angle);
        } else {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                const int index = element + j;
                angle[j] = index < ROTARY_DIM ? to_float(angles[IS_NEOX ? index % HALF : index / 2]) : 0.0f;
            }
        }
    }

    // partner[j] = the other element of the pair to which element + j belongs. n: the lane's elements. All lanes take
    // part.
    static DEVICE void
    load_partners(const float (&n)[VEC_SIZE], int element, float* shared, float (&partner)[VEC_SIZE]) {
        if constexpr (!IS_NEOX) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) partner[j] = n[j ^ 1];
        } else if constexpr (!VIA_SHARED) {
            const int other = element < HALF ? element + HALF : element < ROTARY_DIM ? element - HALF : element;
            const int source = other / VEC_SIZE;
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) partner[j] = shfl<LANES>(n[j], source);
        } else {
            sync_warp();
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) shared[element + j] = n[j];
            sync_warp();
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                const int index = element + j;
                partner[j] = index < ROTARY_DIM ? shared[index < HALF ? index + HALF : index - HALF] : 0.0f;
            }
        }
    }

    // Rotates the lane's elements. Subnormal numbers are kept.
    static DEVICE void rotate(float (&n)[VEC_SIZE], int element, const float (&cosine)[VEC_SIZE],
                              const float (&sine)[VEC_SIZE], const float (&partner)[VEC_SIZE]) {
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            const bool low = IS_NEOX ? element + j < HALF : j % 2 == 0;
            const float product = ieee_multiply(low ? -partner[j] : partner[j], sine[j]);
            const float rotated = ieee_fma(n[j], cosine[j], product);
            if (element + j < ROTARY_DIM) n[j] = rotated;
        }
    }
};
