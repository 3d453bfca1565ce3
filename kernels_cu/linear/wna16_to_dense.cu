// wna16_to_dense: weights of 4 or 8 bits with zero points and scales of groups, as 16-bit floats.
//
//     dense[r, k] = T((code(r, k) - zero(r, k / group_size)) * scale(r, k / group_size)), rounded once
//
// Codes of 4 bits lie two to a byte, the first of them in its lower half: those of a row along k, those of zero points
// along r. Without zero points, zero is the middle of the codes. Codes of EXPONENT 2 are numbers of e2m1 and have no zero
// points; codes of 8 bits without scales are two's complement.
//
// A thread takes four bytes of codes.
//
// Constants
//     scalar_t      T: half_t or bf16_t
//     BITS          of a code: 4 or 8
//     EXPONENT      bits of a code's exponent: 0 integers, 2 e2m1
//     HAS_SCALES    scales are given
//     scale_t, SCALE    type of an entry of scales and what it is: group_scale.cuh
//     HAS_ZEROS     zero points are given
//     CODE_ACCESS   bytes of codes in one memory access; divides 4

#include "group_scale.cuh"
#include "packed.cuh"

constexpr int CODES = 32 / BITS, MASK = (1 << BITS) - 1;
constexpr bool IS_SIGNED = BITS == 8 && !HAS_SCALES;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
wna16_to_dense(scalar_t* dense,        // [rows, words * CODES]
               const uint8_t* codes,   // [rows, 4 * words]
               const scale_t* scales,  // [rows, groups]
               const uint8_t* zeros,   // [rows * BITS / 8, groups]
               int64_t rows, int64_t words, int64_t groups, int64_t group_size) {
    await_previous_kernel();
    const int64_t thread = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
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
        if constexpr (EXPONENT > 0) x[i] = e2m1_to_float(code);
        else x[i] = float((IS_SIGNED ? code ^ zero : code) - zero);
        if constexpr (HAS_SCALES) x[i] *= SCALE<scale_t>(scales, row * groups + group);
    }
    Vec<scalar_t, CODES>::from_floats(x).store(dense + thread * CODES);
}
