// gemv_norm.cuh: the RMS norm of the token that a block of a GEMV multiplies, in shared memory.
#pragma once
#include "gemv_rows.cuh"
#include "norm.cuh"

// The largest number of vectors of a normalised row that a thread keeps in registers between sum and product.
constexpr int MAX_KEPT_VECS = 4;

// Writes the normalised row to shared memory. All threads of the block call it.
template <typename T>
DEVICE void normalise(T* normalised, const T* input, const T* norm_weight, float epsilon) {
    __shared__ float partial[NUM_WARPS];
    constexpr bool KEEP = ceil_div(VECS, NUM_THREADS) <= MAX_KEPT_VECS;
    using row_t = Row<T, HIDDEN_SIZE, VEC_SIZE, NUM_THREADS, KEEP>;
    const row_t x = row_t::load(input);
    const auto weights = RowWeight<row_t, KEEP>::load(norm_weight, x);
    const auto values = [&](int i, int column, float (&v)[VEC_SIZE]) { x.get(i, column).to_floats(v); };
    const float scale = rsqrtf(row_mean_square<NUM_THREADS>(x, values, partial) + epsilon);
    x.for_each([&](int i, int column) {
        float v[VEC_SIZE];
        values(i, column, v);
        scale_and_weigh<Vec<T, VEC_SIZE>>(v, scale, weights.get(i, column)).store_shared(normalised + column);
    });
    __syncthreads();
}
