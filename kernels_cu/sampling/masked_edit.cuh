// masked_edit.cuh: edits the masked elements of a packed matrix of logits.

#pragma once
#include "vec.cuh"

// Whether x > 0, also for a subnormal x, which a float comparison flushes to 0.
DEVICE bool is_positive(float x) { return __float_as_uint(x) - 1u < 0x7f800000u; }

// Whether 2^-60 <= x <= 2^60.
DEVICE bool is_ordinary(float x) { return __float_as_uint(x) - 0x21800000u <= 0x5d800000u - 0x21800000u; }

template <typename T, int N>
DEVICE constexpr int length(const T (&)[N]) {
    return N;
}

// The part of a packed matrix that a block edits. The matrix has `size` elements in rows of ROW_SIZE. A thread takes
// BATCH vectors of N elements, with a stride of NUM_THREADS vectors. A vector may span two rows, so that vectors are
// aligned for any row size.
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

    // Edits `logits`. load(element, count, mask) fills the masks of `count` elements from number `element` on. f(x,
    // mask, row) then changes x, the values of one element or of N elements of one row; logits whose mask is not 0
    // become T(x). A vector with only zero masks is not touched. The loads of all masks are in flight together, and
    // then the loads of all vectors.
    template <typename T, typename LOAD, typename F>
    DEVICE void edit(T* logits, LOAD load, F f) const {
        using vec_t = Vec<T, N>;
        uint32_t mask[BATCH][N] = {};
        bool any[BATCH];
        vec_t vecs[BATCH];
        logits += begin;
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int elements = count(b);
            if (elements > 0) load(begin + offset(b), elements, mask[b]);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            any[b] = false;
#pragma unroll
            for (int j = 0; j < N; ++j) any[b] |= mask[b][j] != 0;
            if (any[b] && count(b) == N) vecs[b] = vec_t::load(logits + offset(b));
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (!any[b]) continue;
            const unsigned column = unsigned(first_column) + offset(b);
            const int64_t row = first_row + column / ROW_SIZE;
            const int in_row = ROW_SIZE - int(column % ROW_SIZE);
            T* at = logits + offset(b);
            if (count(b) == N && in_row >= N) {
                float x[N];
                vecs[b].to_floats(x);
                f(x, mask[b], row);
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    if (mask[b][j]) vecs[b].data[j] = from_float<T>(x[j]);
                }
                vecs[b].store(at);
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    if (!mask[b][j]) continue;
                    float x[1] = {to_float(at[j])};
                    const uint32_t of_x[1] = {mask[b][j]};
                    f(x, of_x, row + (j >= in_row));
                    at[j] = from_float<T>(x[0]);
                }
            }
        }
    }
    // The number of elements of vector b within the matrix.
    DEVICE int count(int b) const {
        const int64_t left = size - begin - offset(b);
        return left >= N ? N : left > 0 ? int(left) : 0;
    }
    static DEVICE int offset(int b) { return (b * NUM_THREADS + int(threadIdx.x)) * N; }
};

// Loads the first `count` of N elements into x; the other elements of x stay. `from` is aligned for all N.
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
