// gemma_rms_norm: rms_norm with weight 1 + weight[i], rounded once; optionally of input + residual.
//
//     z = input[r, i], or residual_out_t(input[r, i] + residual[r, i]), which is stored in residual_out
//     out[r, i] = T(z / sqrt(mean_i(z^2) + epsilon) * (1 + weight[i]))    T: dtype of out, input and weight
//
// ROW_THREADS threads share a row and hold input and residual in registers.
//
// Constants:
//     residual_t       element type of residual
//     residual_out_t   element type of residual_out
//     HAS_RESIDUAL     false when residual is null

#include "norm.cuh"

using row_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, KEEP_ROW>;
using residual_row_t = Row<residual_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, HAS_RESIDUAL && KEEP_ROW>;
using weight_t = RowWeight<row_t, KEEP_WEIGHT>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemma_rms_norm(scalar_t* out,                 // [num_rows, HIDDEN_SIZE]
               const scalar_t* input,         // [num_rows, HIDDEN_SIZE]
               const scalar_t* weight,        // [HIDDEN_SIZE]
               const residual_t* residual,    // [num_rows, HIDDEN_SIZE]
               residual_out_t* residual_out,  // [num_rows, HIDDEN_SIZE]
               int64_t num_rows, int64_t out_stride, int64_t input_stride, int64_t residual_stride,
               int64_t residual_out_stride, float epsilon) {
    await_previous_kernel();
    __shared__ float partial[NUM_THREADS / WARP_SIZE];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows);
    const row_t x = row_t::load_once(input + at.row * input_stride, at.active);
    const residual_row_t r = residual_row_t::load_once(residual + at.row * residual_stride, at.active);
    const weight_t w = weight_t::load(weight, x);

    const auto values = [&](int i, int column, float (&v)[VEC_SIZE]) {
        if constexpr (HAS_RESIDUAL) {
            add_to(v, x.get(i, column), r.get(i, column));
            Vec<residual_out_t, VEC_SIZE>::from_floats(v).to_floats(v);
        } else {
            x.get(i, column).to_floats(v);
        }
    };
    const float scale = rsqrtf(row_mean_square<ROW_THREADS>(x, values, partial) + epsilon);
    if (!at.active) return;

    out += at.row * out_stride;
    residual_out += at.row * residual_out_stride;
    x.for_each([&](int i, int column) {
        float v[VEC_SIZE];
        values(i, column, v);
        if constexpr (HAS_RESIDUAL) {
            row_t::store(residual_out, i, column, Vec<residual_out_t, VEC_SIZE>::from_floats(v));
        }
        float vec_w[VEC_SIZE];
        w.get(i, column).to_floats(vec_w);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[j] = v[j] * scale * (1.0f + vec_w[j]);
        row_t::store(out, i, column, row_t::vec_t::from_floats(v));
    });
}
