// layer_norm: normalises groups of a row to mean 0 and variance 1 (or to unit root mean square), with an optional gate.
//
//     x = input[r, i] * ACT(z[r, i]) if GATE is 1, else input[r, i]
//     m = mean(x);  s = 1 / sqrt(mean((x - m)^2) + epsilon)      over each group; IS_RMS: m = 0
//     y = (x - m) * s * weight[i] + bias[i];  out[r, i] = T(y * ACT(z[r, i])) if GATE is 2, else T(y)
//
// T is the dtype of all tensors but mean and rstd; all arithmetic is in float32. ROW_THREADS threads share a group, the
// row of row.cuh, and hold it in registers.
//
// Constants:
//     GROUP_SIZE     elements in a group
//     IS_RMS         divide by the root mean square, subtract nothing
//     GATE           0: none, 1: before the norm, 2: after it
//     ACT            activation of the gate: silu or sigmoid
//     HAS_WEIGHT, HAS_BIAS, HAS_MEAN, HAS_RSTD   false when that pointer is null

#include "math.cuh"
#include "norm.cuh"

using row_t = Row<scalar_t, GROUP_SIZE, VEC_SIZE, ROW_THREADS, KEEP_ROW>;
using vec_t = row_t::vec_t;
using gate_t = Row<scalar_t, GROUP_SIZE, VEC_SIZE, ROW_THREADS, GATE != 0 && KEEP_ROW>;
using weight_t = RowWeight<row_t, HAS_WEIGHT && KEEP_WEIGHT>;
using bias_t = RowWeight<row_t, HAS_BIAS && KEEP_WEIGHT>;

DEVICE float silu(float x) { return logistic<scalar_t>(x, x); }
DEVICE float sigmoid(float x) { return logistic<scalar_t>(1.0f, x); }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
layer_norm(scalar_t* out,           // [num_rows, num_groups * GROUP_SIZE]
           const scalar_t* input,   // [num_rows, num_groups * GROUP_SIZE]
           const scalar_t* weight,  // [num_groups * GROUP_SIZE]
           const scalar_t* bias,    // [num_groups * GROUP_SIZE]
           const scalar_t* z,       // [num_rows, num_groups * GROUP_SIZE]
           float* mean,             // [num_groups, num_rows]
           float* rstd,             // [num_groups, num_rows]
           int64_t num_rows, int num_groups, int64_t out_stride, int64_t input_stride, int64_t z_stride,
           float epsilon) {
    await_previous_kernel();
    __shared__ float partial[2][NUM_THREADS / WARP_SIZE];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows * num_groups);
    const int64_t row = at.row / num_groups;
    const int group = at.row % num_groups;
    const int64_t start = int64_t(group) * GROUP_SIZE;
    const row_t x = row_t::load_once(input + row * input_stride + start, at.active);
    const gate_t gate = gate_t::load_once(z + row * z_stride + start, at.active);
    const weight_t w = weight_t::load(weight + start, x);
    const bias_t b = bias_t::load(bias + start, x);

    // With the gate before the norm, x = input * ACT(z) is not rounded to T: it stays in registers as floats.
    constexpr bool KEEP_GATED = GATE == 1 && KEEP_ROW;
    float gated[KEEP_GATED ? row_t::MAX_VECS : 1][VEC_SIZE];
    const auto load_gated = [&](int i, int column, float (&v)[VEC_SIZE]) {
        x.get(i, column).to_floats(v);
        float z_values[VEC_SIZE];
        gate.get(i, column).to_floats(z_values);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[j] *= ACT(z_values[j]);
    };
    if constexpr (KEEP_GATED) x.for_each([&](int i, int column) { load_gated(i, column, gated[i]); });

    float m = 0.0f;
    const auto values = [&](int i, int column, float (&v)[VEC_SIZE]) {
        if constexpr (KEEP_GATED) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) v[j] = gated[i][j];
        } else if constexpr (GATE == 1) {
            load_gated(i, column, v);
        } else {
            x.get(i, column).to_floats(v);
        }
        row_t::subtract(m, i, v);
    };
    if constexpr (!IS_RMS) {
        float sum = 0.0f;
        x.for_each([&](int i, int column) {
            float v[VEC_SIZE];
            values(i, column, v);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) sum += v[j];
        });
        m = row_reduce<Sum, ROW_THREADS>(sum, partial[0]) / GROUP_SIZE;
    }
    const float scale = rsqrtf(row_mean_square<ROW_THREADS>(x, values, partial[1]) + epsilon);
    if (!at.active) return;
    if (at.first_thread()) {
        if constexpr (HAS_MEAN) mean[group * num_rows + row] = m;
        if constexpr (HAS_RSTD) rstd[group * num_rows + row] = scale;
    }

    out += row * out_stride + start;
    x.for_each([&](int i, int column) {
        float v[VEC_SIZE];
        values(i, column, v);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[j] *= scale;
        const auto apply = [&](const vec_t& vec, auto f) {
            float other[VEC_SIZE];
            vec.to_floats(other);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) v[j] = f(v[j], other[j]);
        };
        if constexpr (HAS_WEIGHT) apply(w.get(i, column), [](float y, float other) { return y * other; });
        if constexpr (HAS_BIAS) apply(b.get(i, column), [](float y, float other) { return y + other; });
        if constexpr (GATE == 2) apply(gate.get(i, column), [](float y, float other) { return y * ACT(other); });
        row_t::store(out, i, column, vec_t::from_floats(v));
    });
}
