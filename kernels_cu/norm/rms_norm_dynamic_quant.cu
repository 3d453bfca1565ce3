// rms_norm_dynamic_quant: rms_norm, optionally of input + residual, with dynamic quantisation of the result.
//
//     z = input[r, i] (+ residual[r, i]) in float32;  residual[r, i] = T(z)
//     y = T(T(z / sqrt(mean_i(z^2) + epsilon)) * weight[i])    T: dtype of input, residual and weight
//     a = max |y| over the row, or over each group of GROUP_SIZE elements; at most *scale_ub
//     s = max(a / largest value of code_t, smallest scale);  scale = s;  result[r, i] = code_t(y / s)
//
// ROW_THREADS threads share a row. The row stays in registers: first as z, then as y. A group lies within a warp, so
// that with groups only the mean needs a barrier.
//
// Constants:
//     code_t          fp8_e4m3_t, fp8_e4m3fnuz_t or int8_t
//     ACCESS_SIZE     elements in one memory access; divides VEC_SIZE
//     GROUP_SIZE      elements under one scale: HIDDEN_SIZE, or a divisor of it that a warp holds
//     HAS_RESIDUAL    false when residual is null
//     HAS_BOUND       false when scale_ub is null
//     GROUP_MAJOR     scale[group, row] instead of scale[row, group]

#include "norm.cuh"
#include "quant.cuh"

using row_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, KEEP_ROW, ACCESS_SIZE>;
using vec_t = row_t::vec_t;
using residual_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, HAS_RESIDUAL && KEEP_ROW, ACCESS_SIZE>;
using weight_t = RowWeight<row_t, KEEP_WEIGHT>;
using quantizer_t = Quantizer<code_t, HAS_BOUND>;
constexpr bool WHOLE_ROW = GROUP_SIZE == HIDDEN_SIZE;
constexpr int LANES = WHOLE_ROW ? 1 : GROUP_SIZE / VEC_SIZE;  // lanes that share a group
static_assert(HIDDEN_SIZE % GROUP_SIZE == 0 && LANES <= 32 && ROW_THREADS % LANES == 0);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
rms_norm_dynamic_quant(code_t* result,          // [num_rows, HIDDEN_SIZE]
                       const scalar_t* input,   // [num_rows, HIDDEN_SIZE]
                       const scalar_t* weight,  // [HIDDEN_SIZE]
                       float* scale,            // [num_rows], [num_rows, groups] or [groups, num_rows]
                       const float* scale_ub,   // one element
                       scalar_t* residual,      // [num_rows, HIDDEN_SIZE]
                       int64_t num_rows, int64_t result_stride, int64_t input_stride, int64_t residual_stride,
                       int64_t scale_stride, float epsilon) {
    await_previous_kernel();
    __shared__ float partial[2][NUM_THREADS / WARP_SIZE];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows);
    result += at.row * result_stride;
    if constexpr (HAS_RESIDUAL) residual += at.row * residual_stride;
    row_t x = row_t::load_once(input + at.row * input_stride, at.active);
    const residual_t r = residual_t::load_once(residual, at.active);
    const weight_t w = weight_t::load(weight, x);
    const float bound = HAS_BOUND ? *scale_ub : 0.0f;

    const auto load_z = [&](int i, int column, float (&v)[VEC_SIZE]) {
        if constexpr (HAS_RESIDUAL) {
            add_to(v, x.get(i, column), r.get(i, column));
        } else {
            x.get(i, column).to_floats(v);
        }
    };
    const float inverse_rms = rsqrtf(row_mean_square<ROW_THREADS>(x, load_z, partial[0]) + epsilon);

    const auto store_z = [&](int i, int column, const float (&v)[VEC_SIZE]) {
        if (HAS_RESIDUAL && at.active) row_t::store(residual, i, column, vec_t::from_floats(v));
    };
    // y of vector i. Each vector is normalised twice. With KEEP_ROW, the first call stores z in residual and overwrites
    // x with y for the second call. Otherwise both calls compute y, and only the second call stores z, because
    // residual is read until then.
    const auto normalise = [&](int i, int column, bool first) {
        if (KEEP_ROW && !first) return x.get(i, column);
        float v[VEC_SIZE];
        load_z(i, column, v);
        if (KEEP_ROW || !first) store_z(i, column, v);
        const vec_t y = scale_and_weigh<vec_t>(v, inverse_rms, w.get(i, column));
        x.set(i, y);
        return y;
    };
    const auto scale_of = [&](float max_abs) {
        return dynamic_scale<code_t>(HAS_BOUND ? fminf(max_abs, bound) : max_abs);
    };
    const auto write_codes = [&](int i, int column, const vec_t& y, const quantizer_t& quantize) {
        float v[VEC_SIZE];
        y.to_floats(v);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[j] = quantize(v[j]);
        row_t::store(result, i, column, Vec<code_t, VEC_SIZE>::from_floats(v));
    };

    if constexpr (WHOLE_ROW) {
        float max_abs = 0.0f;
        x.for_each([&](int i, int column) { max_abs = fmaxf(max_abs, normalise(i, column, true).absmax()); });
        const float row_scale = scale_of(row_reduce<Max, ROW_THREADS>(max_abs, partial[1]));
        if (!at.active) return;
        if (at.first_thread()) scale[at.row * scale_stride] = row_scale;
        const quantizer_t quantize(row_scale);
        x.for_each([&](int i, int column) { write_codes(i, column, normalise(i, column, false), quantize); });
    } else {
#pragma unroll(KEEP_ROW ? row_t::THREAD_VECS : 1)
        for (int i = 0; i < row_t::THREAD_VECS; ++i) {
            const int column = (i * ROW_THREADS + threadIdx.x % ROW_THREADS) * VEC_SIZE;
            const bool inside = row_t::ROW_VECS % ROW_THREADS == 0 || column < HIDDEN_SIZE;
            vec_t y;
            float max_abs = 0.0f;
            if (inside) {
                float v[VEC_SIZE];
                load_z(i, column, v);
                store_z(i, column, v);
                y = scale_and_weigh<vec_t>(v, inverse_rms, w.get(i, column));
                max_abs = y.absmax();
            }
            // Lanes beyond the row take part in the reduction and do not change its result: the lanes of a group are
            // all inside the row, or all beyond it.
            const float group_scale = scale_of(lane_reduce<Max, LANES>(max_abs));
            if (!inside || !at.active) continue;
            const int group = column / GROUP_SIZE;
            if (column % GROUP_SIZE == 0) {
                scale[GROUP_MAJOR ? group * scale_stride + at.row : at.row * scale_stride + group] = group_scale;
            }
            write_codes(i, column, y, quantizer_t(group_scale));
        }
    }
}
