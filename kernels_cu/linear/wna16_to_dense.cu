// wna16_to_dense: weights of 4 or 8 bits with zero points and scales of groups, as 16-bit floats; and zeros for results.
//
//     dense[r, k] = T((code(r, k) - zero(r, k / group_size)) * scales[r, k / group_size]), rounded once
//     result[m, n] = 0
//
// Codes of 4 bits lie two to a byte, the first of them in its lower half: those of a row along k, those of zero points
// along r. Without zero points, zero is the middle of the codes.
//
// A thread takes four bytes of codes. All threads zero the result.
//
// Constants
//     scalar_t      T: half_t or bf16_t
//     BITS          of a code: 4 or 8
//     HAS_ZEROS     zero points are given
//     CODE_ACCESS   bytes of codes in one memory access; divides 4

#include "vec.cuh"

constexpr int CODES = 32 / BITS, MASK = (1 << BITS) - 1;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
wna16_to_dense(scalar_t* dense,         // [rows, words * CODES]
               const uint8_t* codes,    // [rows, 4 * words]
               const scalar_t* scales,  // [rows, groups]
               const uint8_t* zeros,    // [rows * BITS / 8, groups]
               scalar_t* result,        // [result_rows, n]
               int64_t rows, int64_t words, int64_t groups, int64_t group_size, int64_t result_rows, int64_t n,
               int64_t result_stride) {
    await_previous_kernel();
    const int64_t thread = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    for (int64_t i = thread; i < result_rows * n; i += int64_t(gridDim.x) * NUM_THREADS) {
        result[i / n * result_stride + i % n] = from_float<scalar_t>(0.0f);
    }
    if (thread >= rows * words) return;
    const int64_t row = thread / words, first = thread % words * CODES;
    const auto bytes = Vec<uint8_t, 4>::template load<CODE_ACCESS>(codes + thread * 4);
    float x[CODES];
#pragma unroll
    for (int i = 0; i < CODES; ++i) {
        const int64_t group = (first + i) / group_size;
        const int code = bytes.data[i * BITS / 8] >> i * BITS % 8 & MASK;
        int zero = 1 << (BITS - 1);
        if constexpr (HAS_ZEROS) {
            zero = zeros[row * BITS / 8 * groups + group] >> (BITS == 4 ? row % 2 * 4 : 0) & MASK;
        }
        x[i] = float(code - zero) * to_float(scales[row * groups + group]);
    }
    Vec<scalar_t, CODES>::from_floats(x).store(dense + thread * CODES);
}
