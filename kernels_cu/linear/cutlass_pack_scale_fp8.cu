// cutlass_pack_scale_fp8: lookup tables of W4A8: the products of each scale with the quants -8 ... -1.
//
//     packed[8 i + j] = e4m3((j - 8) * scales[i]), saturating
//
// A thread takes one scale.
//
// Constants
//     ACCESS        elements of one access to packed

#include "vec.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1) cutlass_pack_scale_fp8(fp8_e4m3_t* packed,  // [8 * numel]
                                                                                const fp8_e4m3_t* scales,  // [numel]
                                                                                int64_t numel) {
    await_previous_kernel();
    const int64_t i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (i >= numel) return;
    const float scale = to_float(scales[i]);
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = float(j - 8) * scale;
    Vec<fp8_e4m3_t, 8>::from_floats(x).template store<ACCESS>(packed + i * 8);
}
