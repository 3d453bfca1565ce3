// zero_rows: rows[m, n] = 0.
//
// A thread takes eight neighbours of all elements.
//
// Constants
//     scalar_t      element type of rows

#include "vec.cuh"

constexpr int PER_THREAD = 8;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1) zero_rows(scalar_t* rows,  // [num_rows, n]
                                                                   int64_t num_rows, int64_t n, int64_t stride) {
    await_previous_kernel();
    const int64_t first = (int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x) * PER_THREAD;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        if (first + i < num_rows * n) rows[(first + i) / n * stride + (first + i) % n] = from_float<scalar_t>(0.0f);
    }
}
