// nvfp4_to_bf16: the elements of a matrix of NVFP4, times their scales, as bfloat16. Nothing is rounded: a code of e2m1
// and a scale of e4m3 have six significant bits together.
//
//     dense[m, k] = e2m1(codes[m, k]) * scales[r(m), k / 16]
//
// r(m) is m, where matrices of rows_of_matrix rows follow each other, whose scales take padded_rows rows each. With
// HAS_SCALE_ROWS it is scale_rows[m], and scales that do not exist are zeros.
//
// A thread takes the sixteen elements under one scale. Scales lie in tiles of 128 rows and 4 columns: that of row r,
// column c is byte (r / 128 * (columns / 4) + c / 4) * 512 + r % 32 * 16 + r / 32 % 4 * 4 + c % 4.
//
// Constants
//     CODE_ACCESS   bytes of codes in one memory access; divides 8
//     HAS_SCALE_ROWS    scale_rows are given

#include "packed.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
nvfp4_to_bf16(bf16_t* dense,              // [num_rows, 16 * blocks]
              const uint8_t* codes,       // [num_rows, 8 * blocks], the first of two codes in the lower half of a byte
              const fp8_e4m3_t* scales,   // [num_scale_rows, columns]
              const int32_t* scale_rows,  // [num_rows]
              int64_t num_rows, int64_t blocks, int64_t columns, int64_t rows_of_matrix, int64_t padded_rows,
              int64_t num_scale_rows, int64_t codes_stride) {
    await_previous_kernel();
    const int64_t i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (i >= num_rows * blocks) return;
    const int64_t row = i / blocks, column = i % blocks;
    const int64_t at = HAS_SCALE_ROWS ? scale_rows[row] : row / rows_of_matrix * padded_rows + row % rows_of_matrix;
    float scale = 0.0f;
    if (at >= 0 && at < num_scale_rows) {
        const int64_t tile = (at / 128 * (columns / 4) + column / 4) * 512;
        scale = to_float(scales[tile + at % 32 * 16 + at / 32 % 4 * 4 + column % 4]);
    }
    const auto bytes = Vec<uint8_t, 8>::template load<CODE_ACCESS>(codes + row * codes_stride + column * 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint32_t code = bytes.data[half * 4 + j / 2] >> j % 2 * 4 & 15u;
            x[j] = e2m1_to_float(code) * scale;
        }
        Vec<bf16_t, 8>::from_floats(x).store(dense + i * 16 + half * 8);
    }
}
