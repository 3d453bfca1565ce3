// shuffle_rows: rows in any order and number, bit for bit.
//
//     output_tensor[i] = input_tensor[dst2src_map[i]], or 0 if there is no such row
//
// Threads: one vector of each of BATCH adjacent rows of output_tensor per thread (such a group of rows is one row of
// elementwise.cuh). Loads of the map, then loads of all rows, are in flight together.
//
// Constants
//     BATCH         rows of a thread

#include "cache.cuh"
#include "elementwise.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
shuffle_rows(scalar_t* output_tensor,       // [num_outputs, hidden_size], bytes
             const scalar_t* input_tensor,  // [num_sources, hidden_size], bytes
             const int32_t* dst2src_map,    // [num_outputs]
             int64_t num_rows, int64_t hidden_size, int64_t input_stride, int64_t out_stride, int64_t num_sources,
             int64_t num_outputs) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const int64_t first = at.row * BATCH;
    int32_t sources[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        sources[i] = dst2src_map[min(first + i, num_outputs - 1)];
        if (sources[i] >= num_sources) sources[i] = -1;
    }
    gather_rows<VEC_SIZE>(output_tensor, input_tensor, sources, first, num_outputs, at.column, out_stride,
                          input_stride);
}
