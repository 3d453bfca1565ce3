// sparse_expand: expands the output of sparse_compress to the dense matrix.
//
//     dense[m, 4 g + p] = nzs[m, 2 g + i] if meta has position p for element i of group g, else 0
//
// If meta has one position for both elements of a group, the second is used. A thread takes two groups of four.
//
// Constants
//     scalar_t      element type of nzs and dense
//     NZS_ACCESS    elements of one access to nzs

#include "vec.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
sparse_expand(scalar_t* dense,      // [num_rows, 8 * bytes]
              const scalar_t* nzs,  // [num_rows, 4 * bytes]
              const uint8_t* meta,  // [num_rows, bytes]
              int64_t num_rows, int64_t bytes, int64_t nzs_stride, int64_t meta_stride) {
    await_previous_kernel();
    const int64_t i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (i >= num_rows * bytes) return;
    const int64_t row = i / bytes, column = i % bytes;
    const auto kept = Vec<scalar_t, 4>::template load<NZS_ACCESS>(nzs + row * nzs_stride + column * 4);
    const uint32_t places = meta[row * meta_stride + column];
    auto x = Vec<scalar_t, 8>::full(0.0f);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int first = j / 4 * 2;
        const uint32_t low = places >> first * 2 & 3u, high = places >> (first * 2 + 2) & 3u;
        if (low == j % 4) x.data[j] = kept.data[first];
        if (high == j % 4) x.data[j] = kept.data[first + 1];
    }
    x.store(dense + i * 8);
}
