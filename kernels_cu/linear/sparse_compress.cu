// sparse_compress: compresses a 2:4 sparse matrix to its non-zero elements and the metadata, their positions.
//
//     each group a[m, 4 g] ... a[m, 4 g + 3] keeps two elements, in order:
//     nzs[m, 2 g + i] = a[m, 4 g + p]    p: bits 2 i and 2 i + 1 of half g % 2 of byte meta[m, g / 2]
//
// If a group has more than two non-zero elements, the first two are kept; if it has fewer, zeros fill up. A thread
// takes two groups.
//
// Constants
//     scalar_t      element type of a and nzs
//     A_ACCESS, NZS_ACCESS    elements of one access to a and nzs

#include "arith.cuh"
#include "vec.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
sparse_compress(scalar_t* nzs,      // [num_rows, 4 * bytes]
                uint8_t* meta,      // [num_rows, bytes]
                const scalar_t* a,  // [num_rows, 8 * bytes]
                int64_t num_rows, int64_t bytes, int64_t a_stride, int64_t nzs_stride, int64_t meta_stride) {
    await_previous_kernel();
    const int64_t i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (i >= num_rows * bytes) return;
    const int64_t row = i / bytes, column = i % bytes;
    const auto x = Vec<scalar_t, 8>::template load<A_ACCESS>(a + row * a_stride + column * 8);
    Vec<scalar_t, 4> kept;
    uint32_t places = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const scalar_t* const group = x.data + half * 4;
        const auto is_set = [&](int p) { return !ieee_less_equal(ieee_abs(to_float(group[p])), 0.0f); };
        const int low = is_set(0) ? 0 : is_set(1) ? 1 : 2;
        const int high = low < 1 && is_set(1) ? 1 : low < 2 && is_set(2) ? 2 : 3;
        kept.data[half * 2] = low == 0 ? group[0] : low == 1 ? group[1] : group[2];
        kept.data[half * 2 + 1] = high == 1 ? group[1] : high == 2 ? group[2] : group[3];
        places |= uint32_t(low | high << 2) << half * 4;
    }
    kept.template store<NZS_ACCESS>(nzs + row * nzs_stride + column * 4);
    meta[row * meta_stride + column] = places;
}
