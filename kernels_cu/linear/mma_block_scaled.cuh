// mma_block_scaled.cuh: MMA of a warp with block scales (mma.sync, .block_scale), on sm_120a and sm_121a.
//
// The fragments are those of mma.cuh for 8-bit elements: 32 bytes of K, which are 32 values of e4m3 or 64 of e2m1, the
// first of two in the lower half of a byte. A lane also gives a word of scales for A and one for B:
//
//     A    the scales of row lane / 4 + lane % 2 * 8, in the lanes with lane % 4 / 2 == a_pair
//     B    the scales of column lane / 4, in the lanes with lane % 4 == b_lane
//
// Other lanes may hold scales of other MMAs. A word has the scales of four adjacent blocks of K; those of the MMA begin
// at byte `byte`.
//
//     values       block    scales of an MMA
//     fp8_e4m3_t   32       1: e8m0
//     fp4_e2m1_t   32       2: e8m0
//     fp4_e2m1_t   16       4: e4m3 without sign
#pragma once
#include "mma.cuh"

#if PYOPS_HOST
using fp4_e2m1_t = host::fp4_e2m1;
#else
struct fp4_e2m1_t;
#endif

// D += (A * scales) * (B * scales). byte, a_pair and b_lane must be constants after inlining.
template <typename T, int BLOCK>
DEVICE void mma_block_scaled(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scales,
                             uint32_t b_scales, int byte, int a_pair, int b_lane) {
    static_assert(is_same<T, fp4_e2m1_t> ? BLOCK == 16 || BLOCK == 32 : is_same<T, fp8_e4m3_t> && BLOCK == 32);
#if PYOPS_CUDA
#define PYOPS_MMA(SHAPE, KIND, SCALES, VALUES, SCALE)                                                                \
    asm("mma.sync.aligned." SHAPE ".row.col.kind::" KIND ".block_scale.scale_vec::" SCALES ".f32." VALUES "." VALUES \
        ".f32." SCALE                                                                                                \
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10},"                                    \
        " {%11, %12}, {%13}, {%11, %14};"                                                                            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                             \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales), "h"(uint16_t(byte)),      \
          "h"(uint16_t(a_pair)), "r"(b_scales), "h"(uint16_t(b_lane)))
    if constexpr (is_same<T, fp8_e4m3_t>) PYOPS_MMA("m16n8k32", "mxf8f6f4", "1X", "e4m3", "ue8m0");
    else if constexpr (BLOCK == 32) PYOPS_MMA("m16n8k64", "mxf4nvf4", "2X", "e2m1", "ue8m0");
    else PYOPS_MMA("m16n8k64", "mxf4nvf4", "4X", "e2m1", "ue4m3");
#undef PYOPS_MMA
#elif PYOPS_HOST
    host_mma_block_scaled<T, BLOCK>({a, b, d, a_scales, b_scales, byte, a_pair, b_lane});
#endif
}
