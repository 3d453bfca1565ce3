// order_columns: permutes a value per column (a bias) to the order of permuted columns.
//
//     ordered[COLUMN_ORDER(n)] = entries[n], or 0 for n >= N
//
// A thread takes one column.
//
// Constants
//     COLUMN_ORDER  a name of column_permutation.cuh

#include "column_permutation.cuh"
#include "number.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1) order_columns(scalar_t* ordered,        // [columns]
                                                                       const scalar_t* entries,  // [N]
                                                                       int64_t n, int64_t columns) {
    await_previous_kernel();
    const int64_t i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (i < columns) ordered[COLUMN_ORDER(i)] = i < n ? entries[i] : from_float<scalar_t>(0.0f);
}
