// row.cuh: a row of a matrix, distributed over the ROW_THREADS threads that share it.
//
// Vector i of a thread is vector i * ROW_THREADS + (thread in the row) of the row, so that accesses of adjacent threads
// are adjacent in memory. With KEEP the row stays in registers; otherwise every use reads it again.
//
// SHIFTED: a row has any size and starts at any element. Its vectors begin at the first address aligned for a vector,
// `head` elements into the row; `head` differs from row to row. EDGE_SIZE elements remain before and after the vectors.
// The last threads of the row take one of these elements each, as one more vector with the index EDGE and a single
// element. Row r of every tensor must have the same `head`. RowWeight reads a weight, which starts aligned for every
// row. The plan of a kernel defines SHIFTED; no kernel names it.

#pragma once
#include "vec.cuh"

#ifndef SHIFTED
#define SHIFTED false
#endif

template <typename T, int ROW_SIZE, int VEC_SIZE, int ROW_THREADS, bool KEEP = true, int ACCESS_SIZE = VEC_SIZE>
struct Row {
    using element_t = T;
    using vec_t = Vec<T, VEC_SIZE>;
    static constexpr int SIZE = ROW_SIZE;
    static constexpr int VEC = VEC_SIZE;
    static constexpr int ACCESS = ACCESS_SIZE;
    // SHIFTED: one vector less than fits in a row, so that RowWeight can read one vector of the weight after the last
    // one.
    static constexpr int ROW_VECS = ROW_SIZE / VEC_SIZE - SHIFTED;
    static constexpr int THREAD_VECS = ceil_div(ROW_VECS, ROW_THREADS);
    static constexpr int MAX_VECS = THREAD_VECS + SHIFTED;  // vectors of a thread, EDGE included
    static constexpr int EDGE = SHIFTED ? THREAD_VECS : -1;
    static constexpr int EDGE_SIZE = ROW_SIZE - ROW_VECS * VEC_SIZE;
    static constexpr bool HAVE_VECS = ROW_VECS >= ROW_THREADS;  // every thread has a vector
    static_assert(SHIFTED ? ROW_VECS >= 0 && EDGE_SIZE <= ROW_THREADS : EDGE_SIZE == 0);

    vec_t vecs[KEEP ? MAX_VECS : 1];
    const T* address;
    int head;
    bool active;

    // Calls f(i, column) for every vector of the calling thread. SHIFTED: if a thread has one vector less than other
    // threads, f is also called for the missing vector, with the column of the thread's first vector. The missing
    // vector is read as zeros and not stored. (The compiler would issue a conditional load late.)
    template <typename F>
    DEVICE void for_each(F f) const {
#pragma unroll(KEEP ? THREAD_VECS : 1)
        for (int i = 0; i < THREAD_VECS; ++i) {
            const int first = threadIdx.x % ROW_THREADS * VEC_SIZE;
            const int start = i * ROW_THREADS * VEC_SIZE + first;
            if constexpr (SHIFTED) {
                if (HAVE_VECS || exists(i)) f(i, head + (exists(i) ? start : first));
            } else {
                if (ROW_VECS % ROW_THREADS == 0 || start < ROW_SIZE) f(i, start);
            }
        }
        if constexpr (SHIFTED) {
            const int element = ROW_THREADS - 1 - threadIdx.x % ROW_THREADS;
            if (element < EDGE_SIZE) f(EDGE, element < head ? element : element + ROW_VECS * VEC_SIZE);
        }
    }

    // Whether vector i of the calling thread exists in the row.
    static DEVICE bool exists(int i) {
        return !SHIFTED || i == EDGE || i * ROW_THREADS + int(threadIdx.x % ROW_THREADS) < ROW_VECS;
    }
    // The number of elements of vector i. EDGE has one; the rest of its vector is 0.
    static DEVICE int elements(int i) { return i == EDGE ? 1 : VEC_SIZE; }
    // Calls f(j) for every element j of vector i. It skips the zeros after the element of EDGE, and vectors that do not
    // exist.
    template <typename F>
    static DEVICE void for_each_element(int i, F f) {
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            if (j < elements(i) && exists(i)) f(j);
        }
    }

    // A row with vectors that the caller sets one by one with `set`. Without KEEP, `get` reads them from `address`.
    explicit DEVICE Row(const T* address, bool active = true)
        : address(address), head(SHIFTED ? int(-(uint64_t(address) / sizeof(T)) % VEC_SIZE) : 0), active(active) {}

    // A thread that is not `active` does not use its row: other threads may be writing the row.
    static DEVICE Row load(const T* address, bool active = true) {
        Row row(address, active);
        row.template fill<false>();
        return row;
    }
    // For a row that is read once: loads have an evict-first hint.
    static DEVICE Row load_once(const T* address, bool active = true) {
        Row row(address, active);
        row.template fill<true>();
        return row;
    }
    // `fill` is separate from `load`: in `load` a lambda would capture the struct being returned, and LLVM 21 then
    // loses the address of this struct.
    template <bool ONCE>
    DEVICE void fill() {
        if constexpr (KEEP) for_each([&](int i, int column) { vecs[i] = read<ONCE>(i, column); });
    }
    DEVICE void set(int i, vec_t vec) {
        if constexpr (KEEP) vecs[i] = i == EDGE ? vec_t::single(vec.data[0]) : vec;
    }
    DEVICE vec_t get(int i, int column) const {
        if constexpr (KEEP) return vecs[i];
        return read<false>(i, column);
    }
    template <bool ONCE>
    DEVICE vec_t read(int i, int column) const {
        if (!active && !speculates(address + column, i == EDGE ? 1 : VEC_SIZE)) return vec_t::full(0.0f);
        if (i == EDGE) return vec_t::single(address[column]);
        vec_t vec = ONCE ? vec_t::template load_once<ACCESS_SIZE>(address + column)
                         : vec_t::template load<ACCESS_SIZE>(address + column);
        return exists(i) ? vec : vec_t::full(0.0f);
    }

    // Subtracts y from the elements of vector i, given as floats. A vector that does not exist keeps its zeros.
    static DEVICE void subtract(float y, int i, float (&x)[VEC_SIZE]) {
        const float subtrahend = exists(i) ? y : 0.0f;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) x[j] -= subtrahend;
    }

    // Writes vector i, which begins at `column`, to the row at `to`.
    template <typename U>
    static DEVICE void store(U* to, int i, int column, const Vec<U, VEC_SIZE>& vec) {
        if (i == EDGE) {
            to[column] = vec.data[0];
        } else if (exists(i)) {
            vec.template store<ACCESS_SIZE>(to + column);
        }
    }
};

// A weight, or another vector that applies to every row of a matrix. The weight starts aligned, whatever the `head` of
// the matrix's row.
template <typename row_t, bool KEEP>
struct RowWeight {
    using vec_t = typename row_t::vec_t;
    using element_t = typename row_t::element_t;

    vec_t vecs[KEEP ? row_t::MAX_VECS : 1];
    const element_t* address;
    int head;

    static DEVICE RowWeight load(const element_t* address, const row_t& row) {
        RowWeight weight;
        weight.address = address;
        weight.head = row.head;
        weight.fill(row);
        return weight;
    }
    DEVICE void fill(const row_t& row) {
        if constexpr (KEEP) row.for_each([&](int i, int column) { vecs[i] = read(i, column); });
    }
    DEVICE vec_t get(int i, int column) const {
        if constexpr (KEEP) return vecs[i];
        return read(i, column);
    }
    DEVICE vec_t read(int i, int column) const {
        if (i == row_t::EDGE) return vec_t::single(address[column]);
        if constexpr (SHIFTED) {
            const element_t* aligned = address + (column - head);
            return vec_t::join(vec_t::load(aligned), vec_t::load(aligned + row_t::VEC), head);
        } else {
            return vec_t::template load<row_t::ACCESS>(address + column);
        }
    }
};

// The row of a thread in a block of NUM_THREADS threads with NUM_THREADS / ROW_THREADS rows. Threads beyond the last
// row are not `active`: they process the last row again, because every lane takes part in reductions, and write
// nothing.
template <int NUM_THREADS, int ROW_THREADS>
struct RowIndex {
    static constexpr int BLOCK_ROWS = NUM_THREADS / ROW_THREADS;
    int64_t row;
    bool active;
    explicit DEVICE RowIndex(int64_t num_rows) {
        row = int64_t(blockIdx.x) * BLOCK_ROWS + (BLOCK_ROWS == 1 ? 0 : threadIdx.x / ROW_THREADS);
        active = BLOCK_ROWS == 1 || row < num_rows;
        if (!active) row = num_rows - 1;
    }
    DEVICE bool first_thread() const { return active && threadIdx.x % ROW_THREADS == 0; }
};
