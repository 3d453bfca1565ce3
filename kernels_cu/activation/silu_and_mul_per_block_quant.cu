// silu_and_mul_per_block_quant: silu_and_mul with dynamic group quantisation of the result.
//
//     y = T(T(silu(g)) * u)    where g, u = input[r, i], input[r, HIDDEN_SIZE + i];  T: element type of input
//     a = max |y| over each group of GROUP_SIZE elements of a row
//     s = max(min(a / largest value of code_t, *scale_ub), smallest scale);  scales[r, group] = s
//     out[r, i] = code_t(y / s)
//
// Threads: the vectors of all rows are numbered row after row, and each thread has one. The lanes of a group lie in one
// warp.
//
// Constants
//     code_t        fp8_e4m3_t, fp8_e4m3fnuz_t or int8_t
//     HIDDEN_SIZE   elements of a row of out; a multiple of GROUP_SIZE
//     GROUP_SIZE    elements under one scale
//     ACCESS_SIZE   elements in one memory access; divides VEC_SIZE
//     HAS_BOUND     false when scale_ub is null

#include "math.cuh"
#include "quant.cuh"
#include "reduce.cuh"

constexpr int VEC_SIZE = 8;
constexpr int ROW_VECS = HIDDEN_SIZE / VEC_SIZE, LANES = GROUP_SIZE / VEC_SIZE;
static_assert(HIDDEN_SIZE % GROUP_SIZE == 0 && GROUP_SIZE % VEC_SIZE == 0 && LANES <= 32 && NUM_THREADS % LANES == 0);
using vec_t = Vec<scalar_t, VEC_SIZE>;
using quantizer_t = Quantizer<code_t, HAS_BOUND>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
silu_and_mul_per_block_quant(code_t* out,            // [num_rows, HIDDEN_SIZE]
                             const scalar_t* input,  // [num_rows, 2 * HIDDEN_SIZE]
                             float* scales,          // [num_rows, HIDDEN_SIZE / GROUP_SIZE]
                             const float* scale_ub,  // one element
                             int64_t num_rows, int64_t out_stride, int64_t input_stride, int64_t scale_stride,
                             int64_t scale_group_stride) {
    await_previous_kernel();
    const uint64_t at = uint64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    const int64_t row = at / ROW_VECS;
    const int column = int(at % ROW_VECS) * VEC_SIZE;
    const bool inside = row < num_rows;
    vec_t y = vec_t::full(0.0f);
    if (inside) {
        const scalar_t* gate = input + row * input_stride + column;
        const vec_t g = vec_t::load<ACCESS_SIZE>(gate), u = vec_t::load<ACCESS_SIZE>(gate + HIDDEN_SIZE);
        y = silu(g) * u;
    }
    // The lanes of a group are all inside or all outside.
    float scale = dynamic_scale<code_t>(lane_reduce<Max, LANES>(y.absmax()));
    if (!inside) return;
    if (HAS_BOUND) scale = fmaxf(fminf(scale, *scale_ub), Codes<code_t>::smallest_scale);
    if (column % GROUP_SIZE == 0) scales[row * scale_stride + column / GROUP_SIZE * scale_group_stride] = scale;
    const quantizer_t quantize(scale);
    float v[VEC_SIZE];
    y.to_floats(v);
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) v[j] = quantize(v[j]);
    Vec<code_t, VEC_SIZE>::from_floats(v).template store<ACCESS_SIZE>(out + row * out_stride + column);
}
