// situ_and_mul_quant: situ_and_mul with dynamic group quantization of the result, for the rows that are valid.
//
//     y = T(situ(g, u))    where g, u = input[r, i], input[r, HIDDEN_SIZE + i];  T: element type of input; gated.cuh
//     s = max(max |y|, 1e-30) * (1 / largest value of code_t) over each group of 128 elements of a row
//     scale[r, group] = s;  out[r, i] = code_t(y * (1 / s))    for r < *num_valid_tokens * topk
//     scale[r, group] = 1    for all other rows
//
// The maximum ignores NaN. NaN becomes the largest value of code_t.
//
// Threads: the vectors of all rows are numbered row after row, and each thread has one. The lanes of a group lie in one
// warp.
//
// Constants
//     code_t        fp8_e4m3_t or fp8_e4m3fnuz_t
//     ACCESS_SIZE   elements in one memory access; divides VEC_SIZE
//     HAS_COUNT     false when num_valid_tokens is null

#include "gated.cuh"
#include "quant.cuh"
#include "reduce.cuh"

constexpr int VEC_SIZE = 8, GROUP_SIZE = 128, LANES = GROUP_SIZE / VEC_SIZE;
constexpr int ROW_VECS = HIDDEN_SIZE / VEC_SIZE;
static_assert(HIDDEN_SIZE % GROUP_SIZE == 0 && NUM_THREADS % LANES == 0);
using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
situ_and_mul_quant(code_t* out,                      // [num_rows, HIDDEN_SIZE]
                   float* scale,                     // [num_rows, HIDDEN_SIZE / 128]
                   const scalar_t* input,            // [num_rows, 2 * HIDDEN_SIZE]
                   const int32_t* num_valid_tokens,  // one element
                   int64_t num_rows, int64_t out_stride, int64_t input_stride, int64_t scale_stride, int64_t topk,
                   float beta, float linear_beta) {
    await_previous_kernel();
    const uint64_t at = uint64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    const int64_t row = at / ROW_VECS;
    const int column = int(at % ROW_VECS) * VEC_SIZE;
    const bool inside = row < num_rows, first_lane = column % GROUP_SIZE == 0;
    const bool valid = inside && (!HAS_COUNT || row < *num_valid_tokens * topk);
    vec_t y = vec_t::full(0.0f);
    if (valid) {
        const scalar_t* gate = input + row * input_stride + column;
        const vec_t g = vec_t::load<ACCESS_SIZE>(gate), u = vec_t::load<ACCESS_SIZE>(gate + HIDDEN_SIZE);
        y = situ(g, u, beta, linear_beta);
    }
    // The lanes of a group are all valid or all not.
    const float absmax = fmaxf(lane_reduce<Max, LANES>(y.absmax()), 1e-30f);
    const float group_scale = ieee_multiply(absmax, 1.0f / Codes<code_t>::largest);
    if (inside && first_lane) {
        scale[row * scale_stride + column / GROUP_SIZE] = valid ? group_scale : 1.0f;
    }
    if (!valid) return;
    const float reciprocal = ieee_divide(1.0f, group_scale);
    float v[VEC_SIZE];
    y.to_floats(v);
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) v[j] = scaled_fp8<code_t>(v[j], reciprocal);
    Vec<code_t, VEC_SIZE>::from_floats(v).template store<ACCESS_SIZE>(out + row * out_stride + column);
}
