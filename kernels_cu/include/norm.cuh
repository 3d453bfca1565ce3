// norm.cuh: helpers for normalisations of rows.
//
// Every norm of rows computes its mean of squares with row_mean_square, so that fused and plain kernels agree bit for
// bit.

#pragma once
#include "reduce.cuh"
#include "row.cuh"

// The mean of the squares of a row. values(i, column, x) fills x with the VEC_SIZE floats of vector i of the calling
// thread.
template <int ROW_THREADS, typename row_t, typename Values>
DEVICE float row_mean_square(const row_t& row, Values values, float* partial) {
    float sum = 0.0f;
    row.for_each([&](int i, int column) {
        float x[row_t::VEC];
        values(i, column, x);
#pragma unroll
        for (int j = 0; j < row_t::elements(i); ++j) sum += x[j] * x[j];
    });
    return row_reduce<Sum, ROW_THREADS>(sum, partial) / row_t::SIZE;
}

// T(T(x * scale) * weight). Both roundings are part of the specification of the norms that call this function.
template <typename vec_t>
DEVICE vec_t scale_and_weigh(const float (&x)[vec_t::SIZE], float scale, const vec_t& weight) {
    float y[vec_t::SIZE];
#pragma unroll
    for (int j = 0; j < vec_t::SIZE; ++j) y[j] = x[j] * scale;
    return vec_t::from_floats(y) * weight;
}

// v = a + b, in float32, not rounded to the element type.
template <typename A, typename B>
DEVICE void add_to(float (&v)[A::SIZE], const A& a, const B& b) {
    float other[A::SIZE];
    a.to_floats(v);
    b.to_floats(other);
#pragma unroll
    for (int j = 0; j < A::SIZE; ++j) v[j] += other[j];
}
