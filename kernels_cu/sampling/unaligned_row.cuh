// unaligned_row.cuh: a piece of a row that begins and ends anywhere, read in vectors that are aligned in memory.

#pragma once
#include "vec.cuh"

// A piece of `count` elements. Vector i holds the elements i * N - head + j, 0 <= j < N, of the piece. The first and
// the last vector may hold elements outside the piece: their elements are loaded one by one; other vectors are loaded
// by one access.
template <typename T, int N>
struct Span {
    const T* base;
    int head, count;
    int64_t step;  // from one element to the next; 1 if N > 1

    DEVICE Span(const T* first, int count, int64_t step = 1)
        : head(N == 1 ? 0 : int(uint64_t(first) / sizeof(T) % N)), count(count), step(step) {
        base = first - head;
    }
    DEVICE int vectors() const { return count > 0 ? (head + count + N - 1) / N : 0; }
    DEVICE int element(int i) const { return i * N - head; }
    DEVICE bool exists(int element) const { return unsigned(element) < unsigned(count); }
    DEVICE bool is_whole(int i) const { return exists(element(i)) && exists(element(i) + N - 1); }

    // Vector i, with `absent` for elements outside the piece.
    DEVICE Vec<T, N> load(int i, T absent) const {
        if (N > 1 && is_whole(i)) return Vec<T, N>::load(base + int64_t(i) * N);
        Vec<T, N> vec;
#pragma unroll
        for (int j = 0; j < N; ++j) vec.data[j] = exists(element(i) + j) ? base[(int64_t(i) * N + j) * step] : absent;
        return vec;
    }

    // Vectors first, first + NUM_THREADS and so on, BATCH of them: all loads are in flight together.
    template <int NUM_THREADS, int BATCH>
    DEVICE void load_batch(int first, T absent, Vec<T, N> (&vecs)[BATCH]) const {
        if (N > 1 && is_whole(first) && is_whole(first + NUM_THREADS * (BATCH - 1))) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b) vecs[b] = Vec<T, N>::load(base + int64_t(first + b * NUM_THREADS) * N);
        } else {
#pragma unroll
            for (int b = 0; b < BATCH; ++b) vecs[b] = load(first + b * NUM_THREADS, absent);
        }
    }

    // Calls f(vector, number of its first element) for the vectors of the calling thread, with BATCH loads in flight at
    // a time.
    template <int NUM_THREADS, int BATCH, typename F>
    DEVICE void for_each(T absent, F f) const {
        const int all = vectors();
        for (int first = threadIdx.x; first < all; first += NUM_THREADS * BATCH) {
            Vec<T, N> vecs[BATCH];
            load_batch<NUM_THREADS>(first, absent, vecs);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (first + b * NUM_THREADS < all) f(vecs[b], element(first + b * NUM_THREADS));
            }
        }
    }
};
