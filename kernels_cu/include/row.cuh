// row.cuh: a row of a matrix, spread over the threads that share it.
//
// Vector i of a thread is vector i * ROW_THREADS + (thread in the row) of the row, so neighbouring threads touch
// neighbouring memory. With KEEP the row stays in registers; otherwise it is read where it is needed.
#pragma once
#include "vec.cuh"

template <typename T, int ROW_SIZE, int VEC_SIZE, int ROW_THREADS, bool KEEP = true, int ACCESS_SIZE = VEC_SIZE>
struct Row {
    static_assert(ROW_SIZE % VEC_SIZE == 0);
    using vec_t = Vec<T, VEC_SIZE>;
    static constexpr int SIZE = ROW_SIZE;
    static constexpr int VEC = VEC_SIZE;
    static constexpr int ROW_VECS = ROW_SIZE / VEC_SIZE;
    static constexpr int THREAD_VECS = ceil_div(ROW_VECS, ROW_THREADS);

    vec_t vecs[KEEP ? THREAD_VECS : 1];
    const T* address;

    // Call f(i, column) for every vector of the calling thread.
    template <typename F>
    static DEVICE void for_each(F f) {
#pragma unroll (KEEP ? THREAD_VECS : 1)
        for (int i = 0; i < THREAD_VECS; ++i) {
            const int column = (i * ROW_THREADS + threadIdx.x % ROW_THREADS) * VEC_SIZE;
            if (ROW_VECS % ROW_THREADS == 0 || column < ROW_SIZE) f(i, column);
        }
    }

    // A row whose vectors are given one by one with `set`; `address` is where they can be read again.
    explicit DEVICE Row(const T* address) : address(address) {}

    static DEVICE Row load(const T* address) {
        Row row(address);
        if constexpr (KEEP) {
            for_each([&](int i, int column) { row.vecs[i] = vec_t::template load<ACCESS_SIZE>(address + column); });
        }
        return row;
    }
    // For a row that nobody else reads.
    static DEVICE Row load_once(const T* address) {
        Row row(address);
        if constexpr (KEEP) {
            for_each([&](int i, int column) { row.vecs[i] = vec_t::template load_once<ACCESS_SIZE>(address + column); });
        }
        return row;
    }
    DEVICE void set(int i, vec_t vec) {
        if constexpr (KEEP) vecs[i] = vec;
    }
    DEVICE vec_t get(int i, int column) const {
        if constexpr (KEEP) return vecs[i];
        return vec_t::template load<ACCESS_SIZE>(address + column);
    }
};

// Where a thread works when a block of NUM_THREADS holds NUM_THREADS / ROW_THREADS rows. Threads beyond the last row do
// the last row again, because every lane takes part in reductions, and write nothing.
template <int NUM_THREADS, int ROW_THREADS>
struct RowIndex {
    static constexpr int BLOCK_ROWS = NUM_THREADS / ROW_THREADS;
    int64_t row;
    bool active;
    explicit DEVICE RowIndex(int64_t num_rows) {
        row = int64_t(blockIdx.x) * BLOCK_ROWS + threadIdx.x / ROW_THREADS;
        active = BLOCK_ROWS == 1 || row < num_rows;
        if (!active) row = num_rows - 1;
    }
    DEVICE bool first_thread() const { return active && threadIdx.x % ROW_THREADS == 0; }
};
