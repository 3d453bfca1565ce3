// awq_dequantize: dequantises a packed 4-bit AWQ weight to floating point.
//
//     out[k, n] = (q[k, n] - z[k / group_size, n]) * scales[k / group_size, n], rounded once
//     q[k, 8 w + (0 2 4 6 1 3 5 7)[t]] = nibble t of qweight[k, w]; z[g, n] is unpacked the same way from zeros
//
// A thread dequantises one word (eight columns) of ROWS consecutive rows of one group, so that it loads scales and
// zeros once. Adjacent threads take adjacent words. All packed words are loaded before the first is used.
//
// Constants:
//     ROWS            rows per thread; divides group_size
//     GROUP_CHUNKS    group_size / ROWS
//     ACCESS          elements in one access to out and scales

#include "elementwise.cuh"
#include "packed.cuh"

constexpr int VEC_SIZE = 16 / sizeof(scalar_t);

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
awq_dequantize(scalar_t* out,            // [num_chunks * ROWS, 8 * num_words]
               const uint32_t* qweight,  // [num_chunks * ROWS, num_words]
               const scalar_t* scales,   // [num_groups, 8 * num_words]
               const uint32_t* zeros,    // [num_groups, num_words]
               int64_t num_chunks, int64_t num_words) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, 1, PLANES> at(num_chunks, num_words);
    if (!at.inside) return;
    const int64_t first = at.row * ROWS * num_words + at.column;
    uint32_t words[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) words[i] = qweight[first + i * num_words];
    const int64_t group = int64_t(uint64_t(at.row) / GROUP_CHUNKS) * num_words + at.column;
    const uint32_t zero = zeros[group];
#pragma unroll
    for (int j = 0; j < 8; j += VEC_SIZE) {
        const vec_t z = awq_columns<scalar_t, VEC_SIZE>(zero, j);
        const vec_t s = vec_t::load<ACCESS>(scales + group * 8 + j);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const vec_t q = awq_columns<scalar_t, VEC_SIZE>(words[i], j);
            ((q - z) * s).store<ACCESS>(out + (first + i * num_words) * 8 + j);
        }
    }
}
