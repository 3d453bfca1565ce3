// chunk.cuh: where a thread works when every element of a matrix is on its own.
//
// A block of NUM_THREADS covers NUM_THREADS / ROW_THREADS rows, each with ROW_THREADS neighbouring threads, and every
// thread has one vector. Blocks are numbered along the rows first, so that those that run together touch neighbouring
// memory: x counts the chunks of a row, y the groups of rows, and with PLANES z counts on where y ends.
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
