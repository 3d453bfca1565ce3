// masked_edit.cuh: edits the marked elements of rows of logits, in place.

#pragma once
#include "vec.cuh"

// The vectors of N elements of a thread: BATCH of them, with a stride of NUM_THREADS vectors. x of the grid counts the
// pieces of a row, y the rows; with PLANES, z continues y. With SHIFTED, rows of a packed matrix begin anywhere in a
// vector, so that the first and the last vector of a row are shared with the rows before and after it.
template <int N, int BATCH>
struct Piece {
    int64_t row, row_size;
    int64_t first;  // column of the first element of vector 0; negative where it belongs to the row before

    explicit DEVICE Piece(int64_t row_size)
        : row(PLANES ? blockIdx.y + int64_t(gridDim.y) * blockIdx.z : blockIdx.y), row_size(row_size) {
        const int head = SHIFTED ? int(row * row_size % N) : 0;
        first = (int64_t(blockIdx.x) * (NUM_THREADS * BATCH) + threadIdx.x) * N - head;
    }
    DEVICE int64_t column(int b) const { return first + b * (NUM_THREADS * N); }
    DEVICE bool exists(int b) const { return column(b) < row_size; }
    DEVICE bool is_whole(int b) const { return SHIFTED ? column(b) >= 0 && column(b) + N <= row_size : exists(b); }

    // Edits `logits`, a row. EDIT has:
    //     Marks<M> marks<M>(column)    of M elements: .any(), .at(j), and .reads(), whether their logits are needed
    //     bool operator()(x, marks)    changes the floats x; false: some of them are for `one` to change
    //     float one(x, mark)           for a single float
    // Marked logits become T(x); a vector without marks is not touched. With EAGER, logits are loaded together with
    // their marks, otherwise only those that are needed. The loads of all marks are in flight together, and those of all
    // logits.
    template <typename T, typename EDIT>
    DEVICE void operator()(T* logits, const EDIT& edit) const {
        using marks_t = typename EDIT::template Marks<N>;
        using vec_t = Vec<T, N>;
        marks_t marks[BATCH] = {};
        vec_t vecs[BATCH] = {};
        unsigned single = 0;  // bit b: the elements of vector b are edited one by one
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (is_whole(b)) {
                marks[b] = edit.template marks<N>(column(b));
                if (EAGER) vecs[b] = vec_t::load(logits + column(b));
            } else if (SHIFTED && exists(b)) {
                single |= 1u << b;
            }
        }
        if (!EAGER) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (marks[b].reads()) vecs[b] = vec_t::load(logits + column(b));
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            float x[N];
            vecs[b].to_floats(x);
            const bool edited = edit(x, marks[b]);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                if (marks[b].at(j)) vecs[b].data[j] = from_float<T>(x[j]);
            }
            if (!marks[b].any()) continue;
            if (edited) {
                vecs[b].store(logits + column(b));
            } else {
                single |= 1u << b;
            }
        }
        if (single == 0) return;
#pragma unroll 1
        for (int b = 0; b < BATCH; ++b) {
            if (single >> b & 1) edit_single(logits, column(b), edit);
        }
    }

private:
    template <typename T, typename EDIT>
    DEVICE void edit_single(T* logits, int64_t column, const EDIT& edit) const {
        typename EDIT::template Marks<1> marks[N] = {};
        T data[N] = {};
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (column + j < 0 || column + j >= row_size) continue;
            marks[j] = edit.template marks<1>(column + j);
            data[j] = logits[column + j];
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (marks[j].any()) logits[column + j] = from_float<T>(edit.one(to_float(data[j]), marks[j]));
        }
    }
};
