// permute_cols: the columns of a matrix in another order, bit for bit.
//
//     out[i, j] = a[i, perm[j]], or 0 where there is no such column
//
// A block takes ROWS rows at a time: it copies them to shared memory, and each thread gathers the vectors of a few columns
// from all of them, with indices that it reads once. Rows that are too long for shared memory are gathered where they lie.
//
// Constants
//     scalar_t      element type, of which only the bits count
//     VEC_SIZE      elements in one memory access; divides row_size
//     ROWS          rows that a block takes at a time
//     STAGED        the rows go through shared memory
//     NUM_THREADS   threads in the block

#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 2)
permute_cols(scalar_t* out,          // [num_rows, row_size]
             const scalar_t* a,      // [num_rows, row_size]
             const int32_t* perm,    // [row_size]
             int64_t num_rows, int64_t row_size) {
    await_previous_kernel();
    extern __shared__ uint4 shared[];
    scalar_t* staged = reinterpret_cast<scalar_t*>(shared);
    const int64_t first = int64_t(blockIdx.x) * ROWS;
    const int rows = int(min(num_rows - first, int64_t(ROWS)));
    a += first * row_size;
    out += first * row_size;
    if constexpr (STAGED) {
        for (int64_t i = threadIdx.x * VEC_SIZE; i < rows * row_size; i += NUM_THREADS * VEC_SIZE) {
            *reinterpret_cast<vec_t*>(staged + i) = vec_t::load_once(a + i);
        }
        __syncthreads();
        a = staged;
    }
    for (int64_t column = threadIdx.x * VEC_SIZE; column < row_size; column += NUM_THREADS * VEC_SIZE) {
        int32_t from[VEC_SIZE];
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) from[j] = perm[column + j];
#pragma unroll 1
        for (int row = 0; row < rows; ++row) {
            vec_t vec = vec_t::full(0.0f);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                if (from[j] >= 0 && from[j] < row_size) vec.data[j] = a[row * row_size + from[j]];
            }
            vec.store(out + row * row_size + column);
        }
    }
}
