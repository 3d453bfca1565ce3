// gemv_columns.cuh: the product of a row of the input and COLUMNS contiguous columns of a weight by a block, for decode.
//
// COLUMN_THREADS adjacent threads load the columns of a row k, a vector each; the SLICES groups of such threads take every
// SLICES-th row, BATCH rows at a time, and issue the loads of the next ones before they multiply. At the end their sums
// are added in shared memory. Constants: those of gemv_batch_columns.cu.
#pragma once
#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int SLICES = NUM_THREADS / COLUMN_THREADS, COLUMNS = COLUMN_THREADS * VEC_SIZE;
constexpr int CHUNK = SLICES * BATCH, CHUNKS = ceil_div(HIDDEN_SIZE, CHUNK);

// The thread's row number b of a chunk.
DEVICE int row_of(int chunk, int b) { return chunk * CHUNK + b * SLICES + int(threadIdx.x) / COLUMN_THREADS; }
DEVICE bool row_exists(int chunk, int b) { return HIDDEN_SIZE % CHUNK == 0 || row_of(chunk, b) < HIDDEN_SIZE; }

// Loads the thread's vectors of a chunk. Rows out of range are replaced by the first one; their results are not used.
DEVICE void load_chunk(vec_t (&w)[BATCH], const scalar_t* column, int64_t stride, int chunk) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        w[b] = vec_t::load_once(column + (row_exists(chunk, b) ? row_of(chunk, b) : 0) * stride);
    }
}

// The block's columns of a matrix, from column `first` of `output_size` on.
struct ColumnProduct {
    const scalar_t* weight;  // [HIDDEN_SIZE, output_size]
    int64_t weight_stride, output_size, first;

    // The thread's first column of the block.
    static DEVICE int own() { return threadIdx.x % COLUMN_THREADS * VEC_SIZE; }
    DEVICE const scalar_t* column() const { return weight + (first + own() < output_size ? first + own() : 0); }

    // Loads the first chunk.
    DEVICE void load_first(vec_t (&w)[BATCH]) const { load_chunk(w, column(), weight_stride, 0); }

    // Multiplies and stores. `next` holds the first chunk. All threads of the block call.
    DEVICE void multiply(vec_t (&next)[BATCH], const scalar_t* x, scalar_t* out) const {
        __shared__ float partial[SLICES][COLUMNS];
        float acc[VEC_SIZE] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            vec_t w[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) w[b] = next[b];
            if (chunk + 1 < CHUNKS) load_chunk(next, column(), weight_stride, chunk + 1);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (!row_exists(chunk, b)) continue;
                const float factor = to_float(x[row_of(chunk, b)]);
                float v[VEC_SIZE];
                w[b].to_floats(v);
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) acc[j] = fmaf(v[j], factor, acc[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) partial[threadIdx.x / COLUMN_THREADS][own() + j] = acc[j];
        __syncthreads();
        for (int i = threadIdx.x; i < COLUMNS && first + i < output_size; i += NUM_THREADS) {
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < SLICES; ++s) sum += partial[s][i];
            out[first + i] = from_float<scalar_t>(sum);
        }
    }
};

// Loads the block's first chunk to registers before the previous kernel has ended.
DEVICE void prefetch_chunk(vec_t (&w)[BATCH], const scalar_t* weight, int64_t weight_stride, int64_t output_size) {
    ColumnProduct{weight, weight_stride, output_size, int64_t(blockIdx.x) * COLUMNS}.load_first(w);
}
