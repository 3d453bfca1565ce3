// elementwise.cuh: the mapping of threads to elements for elementwise kernels.
//
// A block of NUM_THREADS threads covers NUM_THREADS / ROW_THREADS rows with ROW_THREADS adjacent threads each; every
// thread has one vector of VEC_SIZE elements. blockIdx.x counts the chunks of a row, blockIdx.y the groups of rows;
// with PLANES, for more rows than blockIdx.y can count, blockIdx.z continues where blockIdx.y ends. Blocks that run at
// the same time therefore access adjacent memory.

#pragma once
#include "vec.cuh"

template <int NUM_THREADS, int ROW_THREADS, int VEC_SIZE, bool PLANES>
struct Chunk {
    static constexpr int BLOCK_ROWS = NUM_THREADS / ROW_THREADS;
    int64_t row, column;
    bool inside;

    DEVICE Chunk(int64_t num_rows, int64_t row_size) {
        const unsigned group = PLANES ? blockIdx.y + gridDim.y * blockIdx.z : blockIdx.y;
        row = uint64_t(group) * BLOCK_ROWS + (BLOCK_ROWS == 1 ? 0 : threadIdx.x / ROW_THREADS);
        column = (uint64_t(blockIdx.x) * ROW_THREADS + threadIdx.x % ROW_THREADS) * VEC_SIZE;
        inside = ((BLOCK_ROWS == 1 && !PLANES) || row < num_rows) && column < row_size;
    }
};

// The input of a gated activation, out[r, i] = f(g, u) where g, u = input[r, i], input[r, hidden_size + i]: a thread's
// vector of g and its vector of u.
template <typename T, int N>
struct Gated {
    Vec<T, N> g, u;

    template <typename At>
    static DEVICE Gated load(const T* input, const At& at, int64_t hidden_size, int64_t input_stride) {
        const T* first = input + at.row * input_stride + at.column;
        return {Vec<T, N>::load(first), Vec<T, N>::load(first + hidden_size)};
    }
};
