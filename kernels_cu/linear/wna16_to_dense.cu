// wna16_to_dense: dequantizes weights of 4 or 8 bits, with group scales and zero points, to 16-bit floats.
//
//     dense[r, k] = T((quant[r, k] - zero[r, g]) * scale[r, g]), rounded once    g: k / group_size
//
// A byte has two 4-bit values, the first in its low half: quants that are adjacent along k, zero points that are
// adjacent along r. Without zero points, zero is 2^(BITS - 1). With EXPONENT 2, quants are e2m1 values and have no zero
// points. 8-bit quants without scales are two's complement.
//
// Mapping: a thread takes four bytes of quants in each of ROWS rows, and the threads of a block take adjacent words.
// blockIdx.x counts groups of ROWS rows, blockIdx.y blocks of words. All divisions are by constants.
//
// Constants
//     scalar_t      T: half_t or bf16_t
//     BITS          bits of a quant: 4 or 8
//     EXPONENT      exponent bits of a quant: 0 integers, 2 e2m1
//     HAS_SCALES    whether there are scales
//     scale_t, SCALE    storage type of a scale, and the function that decodes it: group_scale.cuh
//     HAS_ZEROS     whether there are zero points
//     GROUP_SIZE    elements of a row that share a scale and a zero point
//     ROWS          rows of a thread; their loads are in flight together
//     QUANT_ACCESS  bytes of one access to quants; divides 4

#include "group_scale.cuh"
#include "packed.cuh"

constexpr int QUANTS = 32 / BITS, MASK = (1 << BITS) - 1;
constexpr bool IS_SIGNED = BITS == 8 && !HAS_SCALES, ONE_GROUP = GROUP_SIZE % QUANTS == 0;  // of a thread
constexpr int GROUPS = ONE_GROUP ? 1 : QUANTS;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
wna16_to_dense(scalar_t* dense,        // [rows, words * QUANTS]
               const uint8_t* quants,  // [rows, 4 * words]
               const scale_t* scales,  // [rows, groups]
               const uint8_t* zeros,   // [rows * BITS / 8, groups]
               int64_t rows, int64_t words, int64_t groups) {
    await_previous_kernel();
    const int64_t first_row = int64_t(blockIdx.x) * ROWS, word = int64_t(blockIdx.y) * NUM_THREADS + threadIdx.x;
    if (word >= words) return;
    const uint32_t first = uint32_t(word) * QUANTS;
    Vec<uint8_t, 4> bytes[ROWS];
    float scale[ROWS][GROUPS];
    int zero[ROWS][GROUPS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int64_t row = min(first_row + i, rows - 1);
        bytes[i] = Vec<uint8_t, 4>::template load<QUANT_ACCESS>(quants + (row * words + word) * 4);
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const int64_t group = (first + j) / GROUP_SIZE;
            zero[i][j] = 1 << (BITS - 1);
            if constexpr (HAS_ZEROS) {
                zero[i][j] = zeros[row * BITS / 8 * groups + group] >> (BITS == 4 ? row % 2 * 4 : 0) & MASK;
            }
            if constexpr (HAS_SCALES) scale[i][j] = SCALE<scale_t>(scales, row * groups + group);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (first_row + i >= rows) return;
        float x[QUANTS];
#pragma unroll
        for (int j = 0; j < QUANTS; ++j) {
            const int quant = bytes[i].data[j * BITS / 8] >> j * BITS % 8 & MASK, of = ONE_GROUP ? 0 : j;
            if constexpr (EXPONENT > 0) x[j] = e2m1_to_float(quant);
            else x[j] = float((IS_SIGNED ? quant ^ zero[i][of] : quant) - zero[i][of]);
            if constexpr (HAS_SCALES) x[j] *= scale[i][of];
        }
        Vec<scalar_t, QUANTS>::from_floats(x).store(dense + ((first_row + i) * words + word) * QUANTS);
    }
}
