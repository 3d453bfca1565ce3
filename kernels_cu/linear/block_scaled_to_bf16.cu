// block_scaled_to_bf16: dequantizes block-scaled e2m1 or e4m3 matrices to bfloat16.
//
//     dense[m, k] = bf16(quant[m, k] * scale[r(m), k / SCALE_SIZE])
//
// Matrices of rows_of_matrix rows are contiguous, and the scales of each take padded_rows rows:
//
//     r(m) = m / rows_of_matrix * padded_rows + m % rows_of_matrix, or scale_rows[m] with HAS_SCALE_ROWS
//
// A scale out of range is 0. With HAS_SIZES matrix e is skipped if problem_sizes[e], (rows, rows_of_matrix, K) or
// (rows_of_matrix, rows, K), has no rows.
//
// A scale is an e4m3 value, or an e8m0 byte s: 2^(s - 127), and NaN for 255. The product is exact in float32, and in
// bfloat16 unless it is 2^128 or more, or below 2^-126.
//
// Scales are stored in tiles of 128 rows and 4 columns: the scale of row r, column c is byte
//
//     (r / 128 * (columns / 4) + c / 4) * 512 + r % 32 * 16 + r / 32 % 4 * 4 + c % 4
//
// Mapping: a thread takes sixteen elements of a row, which share a scale. blockIdx.x counts the blocks of a row.
// blockIdx.y strides over the rows of a matrix and blockIdx.z over matrices, so that no thread divides by a size, and a
// skipped matrix costs only the start of a few blocks.
//
// Constants
//     scale_t       fp8_e4m3_t, or uint8_t for e8m0
//     QUANT_BITS    bits of a quant. 4: e2m1, the first of two quants in the low half of a byte; 8: e4m3
//     SCALE_SIZE    elements that share a scale, a multiple of 16
//     QUANT_ACCESS  bytes of one access to quants; divides the bytes of sixteen elements
//     HAS_SCALE_ROWS    whether scale_rows is given
//     HAS_SIZES     whether problem_sizes is given

#include "mx_scales.cuh"
#include "packed.cuh"

constexpr int ELEMENTS = 16;  // elements of a thread
constexpr int QUANT_BYTES = ELEMENTS * QUANT_BITS / 8;

DEVICE float scale_of(fp8_e4m3_t scale) { return to_float(scale); }
DEVICE float scale_of(uint8_t exponent) { return e8m0_to_float(exponent); }

// Element j of a thread's quants.
DEVICE float quant_of(const Vec<uint8_t, QUANT_BYTES>& bytes, int j) {
    if constexpr (QUANT_BITS == 8) return to_float(reinterpret_cast<const fp8_e4m3_t&>(bytes.data[j]));
    return e2m1_to_float(bytes.data[j * QUANT_BITS / 8] >> j % 2 * 4 & 15u);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
block_scaled_to_bf16(bf16_t* dense,                 // [num_matrices * rows_of_matrix, 16 * parts]
                     const uint8_t* quants,         // [num_matrices * rows_of_matrix, QUANT_BYTES * parts]
                     const scale_t* scales,         // [num_scale_rows, columns]
                     const int32_t* scale_rows,     // [num_matrices * rows_of_matrix]
                     const int32_t* problem_sizes,  // [num_matrices, 3]
                     int64_t num_matrices, int64_t parts, int64_t columns, int64_t rows_of_matrix, int64_t padded_rows,
                     int64_t num_scale_rows, int64_t quants_stride) {
    await_previous_kernel();
    const int64_t part = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (part >= parts) return;
    for (int64_t matrix = blockIdx.z; matrix < num_matrices; matrix += gridDim.z) {
        if constexpr (HAS_SIZES) {
            const int32_t* const sizes = problem_sizes + matrix * 3;
            if ((sizes[1] == rows_of_matrix ? sizes[0] : sizes[1]) <= 0) continue;
        }
        for (int64_t m = blockIdx.y; m < rows_of_matrix; m += gridDim.y) {
            const int64_t row = matrix * rows_of_matrix + m;
            const int64_t at = HAS_SCALE_ROWS ? scale_rows[row] : matrix * padded_rows + m;
            float scale = 0.0f;
            if (at >= 0 && at < num_scale_rows) {
                const int64_t column = part / (SCALE_SIZE / ELEMENTS);
                const int64_t tile = (at / 128 * (columns / 4) + column / 4) * 512;
                scale = scale_of(scales[tile + at % 32 * 16 + at / 32 % 4 * 4 + column % 4]);
            }
            const auto bytes = Vec<uint8_t, QUANT_BYTES>::template load<QUANT_ACCESS>(quants + row * quants_stride +
                                                                                      part * QUANT_BYTES);
#pragma unroll
            for (int half = 0; half < ELEMENTS; half += 8) {
                float x[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = ieee_multiply(quant_of(bytes, half + j), scale);
                Vec<bf16_t, 8>::from_floats(x).store(dense + (row * parts + part) * ELEMENTS + half);
            }
        }
    }
}
