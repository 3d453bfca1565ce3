// sampling.cuh: what the kernels on logits share.
#pragma once
#include "vec.cuh"

// Of a packed matrix of `size` elements in rows of ROW_SIZE, what a block works on: BATCH vectors of N elements a thread,
// NUM_THREADS vectors apart. A vector may lie in two rows, so that vectors are aligned whatever the size of a row.
template <int N, int BATCH, int ROW_SIZE, int NUM_THREADS>
struct Flat {
    static_assert(N == 1 || N <= ROW_SIZE);
    int64_t begin, first_row, size;
    int first_column;

    explicit DEVICE Flat(int64_t size) : size(size) {
        begin = int64_t(blockIdx.x) * (NUM_THREADS * BATCH * N);
        first_row = uint64_t(begin) / ROW_SIZE;
        first_column = int(begin - first_row * ROW_SIZE);
    }

    // The masks of the thread's elements by load(element, count, mask), of all vectors before the first is looked at. Then
    // x = T(f(x, mask, row)) for every element of `logits` whose mask is not 0; vectors without one are not touched.
    template <typename T, typename LOAD, typename F>
    DEVICE void edit(T* logits, LOAD load, F f) const {
        using vec_t = Vec<T, N>;
        uint32_t mask[BATCH][N] = {};
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int64_t left = size - begin - offset(b);
            if (left > 0) load(begin + offset(b), left < N ? int(left) : N, mask[b]);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            uint32_t any = 0;
#pragma unroll
            for (int j = 0; j < N; ++j) any |= mask[b][j];
            if (any == 0) continue;
            const unsigned column = unsigned(first_column) + offset(b);
            const int64_t row = first_row + column / ROW_SIZE;
            const int in_row = ROW_SIZE - int(column % ROW_SIZE);
            T* at = logits + begin + offset(b);
            if (size - begin - offset(b) >= N) {
                vec_t vec = vec_t::load(at);
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    if (mask[b][j]) vec.data[j] = from_float<T>(f(vec[j], mask[b][j], row + (j >= in_row)));
                }
                vec.store(at);
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    if (mask[b][j]) at[j] = from_float<T>(f(to_float(at[j]), mask[b][j], row + (j >= in_row)));
                }
            }
        }
    }
    static DEVICE int offset(int b) { return (b * NUM_THREADS + int(threadIdx.x)) * N; }
};

// `count` of N elements from `from` on, which is aligned for all, as they are; the others stay.
template <typename T, int N>
DEVICE void load_some(const T* from, int count, T (&x)[N]) {
    if (count == N) {
        const auto vec = Vec<T, N>::load_once(from);
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = vec.data[j];
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (j < count) x[j] = from[j];
        }
    }
}
