// chunk.cuh: where a thread works when every element of a matrix is on its own.
//
// A block of NUM_THREADS covers NUM_THREADS >> row_shift rows, each with 1 << row_shift neighbouring threads, and every
// thread has one vector. Blocks are numbered along the rows first, so that those that run together touch neighbouring
// memory: x counts the chunks of a row, y and z the groups of rows.
#pragma once
#include "vec.cuh"

template <int NUM_THREADS, int VEC_SIZE>
struct Chunk {
    int64_t row, column;
    bool inside;

    DEVICE Chunk(int64_t num_rows, int64_t row_size, int row_shift) {
        const unsigned row_threads = 1u << row_shift;
        const unsigned block_rows = unsigned(NUM_THREADS) >> row_shift;
        const unsigned group = blockIdx.y + gridDim.y * blockIdx.z;
        row = uint64_t(group) * block_rows + (threadIdx.x >> row_shift);
        column = (uint64_t(blockIdx.x) * row_threads + (threadIdx.x & (row_threads - 1))) * VEC_SIZE;
        inside = row < num_rows && column < row_size;
    }
};
