// rms_norm: scales each row to unit root mean square, then by weight.
//
//     out[r, i] = T(T(input[r, i] / sqrt(mean_i(input[r, i]^2) + epsilon)) * weight[i])    T: dtype of all tensors
//
// ROW_THREADS threads share a row and hold it in registers, so that the row is read once. Rows are numbered by up to
// three leading dimensions of any strides.
//
// Constants:
//     LEADING       leading dimensions that number the rows, 1 to 3
//     HAS_WEIGHT    false when weight is null

#include "norm.cuh"

using row_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, KEEP_ROW>;
using vec_t = row_t::vec_t;
using weight_t = RowWeight<row_t, HAS_WEIGHT && KEEP_WEIGHT>;

// Offset of a row in a tensor with leading dimensions [.., size1, size2].
DEVICE int64_t row_offset(int64_t row, int64_t stride0, int64_t stride1, int64_t stride2, int size1, int size2) {
    if constexpr (LEADING == 1) return row * stride0;
    if constexpr (LEADING == 2) return row / size1 * stride0 + row % size1 * stride1;
    return row / size2 / size1 * stride0 + row / size2 % size1 * stride1 + row % size2 * stride2;
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
rms_norm(scalar_t* out,           // [num_rows, HIDDEN_SIZE]
         const scalar_t* input,   // [num_rows, HIDDEN_SIZE]
         const scalar_t* weight,  // [HIDDEN_SIZE]
         int64_t num_rows, int size1, int size2, int64_t out_stride0, int64_t out_stride1, int64_t out_stride2,
         int64_t input_stride0, int64_t input_stride1, int64_t input_stride2, float epsilon) {
    await_previous_kernel();
    __shared__ float partial[NUM_THREADS / WARP_SIZE];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows);
    const row_t x = row_t::load_once(
        input + row_offset(at.row, input_stride0, input_stride1, input_stride2, size1, size2), at.active);
    const weight_t w = weight_t::load(weight, x);

    const auto values = [&](int i, int column, float (&v)[VEC_SIZE]) { x.get(i, column).to_floats(v); };
    const float scale = rsqrtf(row_mean_square<ROW_THREADS>(x, values, partial) + epsilon);
    if (!at.active) return;

    scalar_t* out_row = out + row_offset(at.row, out_stride0, out_stride1, out_stride2, size1, size2);
    x.for_each([&](int i, int column) {
        float v[VEC_SIZE];
        values(i, column, v);
        if constexpr (HAS_WEIGHT) {
            row_t::store(out_row, i, column, scale_and_weigh<vec_t>(v, scale, w.get(i, column)));
        } else {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) v[j] *= scale;
            row_t::store(out_row, i, column, vec_t::from_floats(v));
        }
    });
}
