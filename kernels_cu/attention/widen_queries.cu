// widen_queries: converts e4m3 queries to T for kernels that take T, and folds the scale of queries into that of keys.
//
//     widened = T(query)          exact
//     key_scales[h] = q_scale[h] * k_scale[h]
//
// Thread mapping: each thread converts one vector of queries and computes at most a few scales (grid stride).
//
// Constants
//     scalar_t       T: float, half_t or bf16_t
//     VEC_SIZE       divides row_size

#include "widen.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
widen_queries(scalar_t* widened,        // [num_tokens, num_heads, head_size]
              float* key_scales,        // [num_scales]
              const fp8_e4m3_t* query,  // [num_tokens, num_heads, head_size]
              const float* q_scale,     // [1] or [num_scales], stride q_scale_step; null: 1
              const float* k_scale,     // [num_scales]
              int64_t count, int64_t row_size, int64_t query_stride, int64_t num_scales, int64_t q_scale_step) {
    await_previous_kernel();
    const int64_t thread = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    for (int64_t i = thread; i < num_scales; i += int64_t(gridDim.x) * NUM_THREADS) {
        key_scales[i] = (q_scale ? q_scale[i * q_scale_step] : 1.0f) * k_scale[i];
    }
    const int64_t at = thread * VEC_SIZE;
    if (at >= count) return;
    const auto codes = Vec<fp8_e4m3_t, VEC_SIZE>::load(query + at / row_size * query_stride + at % row_size);
    Vec<scalar_t, VEC_SIZE> elements;
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) elements.data[i] = from_float<scalar_t>(to_float(codes.data[i]));
    elements.store(widened + at);
}
