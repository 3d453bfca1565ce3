// permute_cols: permutes the columns of a matrix, bit for bit.
//
//     out[i, j] = a[i, perm[j]], or 0 if there is no such column
//
// A block has ROWS rows. It stages them in shared memory; each thread then gathers the vectors of a few columns from
// all rows, so that it loads perm once. Rows too long for shared memory are gathered from global memory.
//
// Constants:
//     scalar_t      a type of the elements' size; only bits are moved
//     ROWS          rows of a block
//     STAGED        the rows go through shared memory

#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 2)
permute_cols(scalar_t* out,        // [num_rows, row_size]
             const scalar_t* a,    // [num_rows, row_size]
             const int32_t* perm,  // [row_size]: columns of a, any number
             int64_t num_rows, int64_t row_size, int64_t out_stride, int64_t a_stride) {
    await_previous_kernel();
    extern __shared__ uint4 shared[];
    scalar_t* staged = reinterpret_cast<scalar_t*>(shared);
    const int64_t first = int64_t(blockIdx.x) * ROWS;
    const int rows = ROWS == 1 ? 1 : int(min(num_rows - first, int64_t(ROWS)));
    a += first * a_stride;
    out += first * out_stride;
    if constexpr (STAGED) {
        for (int64_t column = threadIdx.x * VEC_SIZE; column < row_size; column += NUM_THREADS * VEC_SIZE) {
            vec_t vecs[ROWS];
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                if (row < rows) vecs[row] = vec_t::load_once(a + row * a_stride + column);
            }
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                if (row < rows) *reinterpret_cast<vec_t*>(staged + row * row_size + column) = vecs[row];
            }
        }
        __syncthreads();
        a = staged;
        a_stride = row_size;
    }
    for (int64_t column = threadIdx.x * VEC_SIZE; column < row_size; column += NUM_THREADS * VEC_SIZE) {
        int32_t source[VEC_SIZE];
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) source[j] = perm[column + j];
#pragma unroll 1
        for (int row = 0; row < rows; ++row) {
            vec_t vec = vec_t::full(0.0f);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                if (source[j] >= 0 && source[j] < row_size) vec.data[j] = a[row * a_stride + source[j]];
            }
            vec.store(out + row * out_stride + column);
        }
    }
}
