// fused_add_rms_norm: adds the residual to the input, stores the sum as the new residual, and normalises the sum, in
// place.
//
//     z = T(input[r, i] + residual[r, i]);  residual[r, i] = z
//     input[r, i] = T(T(z / sqrt(mean_i(z^2) + epsilon)) * weight[i])    T: dtype of all tensors
//
// ROW_THREADS threads share a row and hold it in registers.
//
// Constants:
//     HAS_WEIGHT    false when weight is null

#include "norm.cuh"

using row_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, KEEP_ROW>;
using vec_t = row_t::vec_t;
using weight_t = RowWeight<row_t, HAS_WEIGHT && KEEP_WEIGHT>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
fused_add_rms_norm(scalar_t* input,         // [num_rows, HIDDEN_SIZE]
                   scalar_t* residual,      // [num_rows, HIDDEN_SIZE]
                   const scalar_t* weight,  // [HIDDEN_SIZE]
                   int64_t num_rows, int64_t input_stride, int64_t residual_stride, float epsilon) {
    await_previous_kernel();
    __shared__ float partial[NUM_THREADS / WARP_SIZE];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows);
    input += at.row * input_stride;
    residual += at.row * residual_stride;
    const row_t x = row_t::load(input, at.active);
    const row_t r = row_t::load(residual, at.active);
    const weight_t w = weight_t::load(weight, x);

    row_t z(residual, at.active);
    const auto add_residual = [&](int i, int column, float (&v)[VEC_SIZE]) {
        add_to(v, x.get(i, column), r.get(i, column));
        vec_t sum = vec_t::from_floats(v);
        if (at.active) row_t::store(residual, i, column, sum);
        z.set(i, sum);
        sum.to_floats(v);
    };
    const float scale = rsqrtf(row_mean_square<ROW_THREADS>(x, add_residual, partial) + epsilon);
    if (!at.active) return;

    x.for_each([&](int i, int column) {
        float v[VEC_SIZE];
        z.get(i, column).to_floats(v);
        if constexpr (HAS_WEIGHT) {
            row_t::store(input, i, column, scale_and_weigh<vec_t>(v, scale, w.get(i, column)));
        } else {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) v[j] *= scale;
            row_t::store(input, i, column, vec_t::from_floats(v));
        }
    });
}
