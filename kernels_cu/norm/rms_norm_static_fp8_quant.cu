// rms_norm_static_fp8_quant: rms_norm, optionally of input + residual, written as fp8 under one given scale.
//
//     z = input[r, i], or T(input[r, i] + residual[r, i]), which is stored in residual
//     y = T(T(z / sqrt(mean_i(z^2) + epsilon)) * weight[i])    T: dtype of input, residual and weight
//     result[r, i] = fp8(clamp(y * (1 / scale)))      1 / scale is rounded to float32; NaN becomes the largest fp8
//
// ROW_THREADS threads share a row and hold it in registers.
//
// Constants:
//     code_t        fp8_e4m3_t or fp8_e4m3fnuz_t
//     HAS_RESIDUAL  false when residual is null

#include "norm.cuh"
#include "quant.cuh"

using row_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, KEEP_ROW>;
using vec_t = row_t::vec_t;
using residual_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, HAS_RESIDUAL && KEEP_ROW>;
using weight_t = RowWeight<row_t, KEEP_WEIGHT>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
rms_norm_static_fp8_quant(code_t* result,          // [num_rows, HIDDEN_SIZE]
                          const scalar_t* input,   // [num_rows, HIDDEN_SIZE]
                          scalar_t* residual,      // [num_rows, HIDDEN_SIZE]
                          const scalar_t* weight,  // [HIDDEN_SIZE]
                          const float* scale,      // one element
                          int64_t num_rows, int64_t result_stride, int64_t input_stride, int64_t residual_stride,
                          float epsilon) {
    await_previous_kernel();
    __shared__ float partial[NUM_THREADS / WARP_SIZE];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows);
    input += at.row * input_stride;
    if constexpr (HAS_RESIDUAL) residual += at.row * residual_stride;
    const row_t x = row_t::load(input, at.active);
    const residual_t r = residual_t::load(residual, at.active);
    const weight_t w = weight_t::load(weight, x);
    const float reciprocal = reciprocal_or_zero(*scale);

    row_t z(HAS_RESIDUAL ? residual : input, at.active);
    const auto load_z = [&](int i, int column, float (&v)[VEC_SIZE]) {
        vec_t sum = x.get(i, column);
        if constexpr (HAS_RESIDUAL) {
            add_to(v, sum, r.get(i, column));
            sum = vec_t::from_floats(v);
            if (at.active) row_t::store(residual, i, column, sum);
        }
        z.set(i, sum);
        sum.to_floats(v);
    };
    const float inverse_rms = rsqrtf(row_mean_square<ROW_THREADS>(x, load_z, partial) + epsilon);
    if (!at.active) return;

    result += at.row * result_stride;
    x.for_each([&](int i, int column) {
        float v[VEC_SIZE];
        z.get(i, column).to_floats(v);
        scale_and_weigh<vec_t>(v, inverse_rms, w.get(i, column)).to_floats(v);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[j] = within_codes<code_t>(v[j] * reciprocal);
        row_t::store(result, i, column, Vec<code_t, VEC_SIZE>::from_floats(v));
    });
}
