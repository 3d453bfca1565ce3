// convert_fp8: quantizes floats to fp8 with one scale, or dequantizes fp8 values.
//
//     output = e4m3(input / scale), or T(input * scale)
//
// Threads: one vector per thread and row. blockIdx.x counts along a row, blockIdx.y counts rows; a thread goes on to
// row blockIdx.y + gridDim.y.
//
// Constants
//     out_t         element type of output: T or fp8
//     in_t          element type of input: fp8 or T
//     VEC_SIZE      divides row_size

#include "cache.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
convert_fp8(out_t* output,      // [num_rows, row_size]
            const in_t* input,  // [num_rows, row_size]
            int64_t num_rows, int64_t row_size, int64_t output_stride, int64_t input_stride, float scale) {
    await_previous_kernel();
    const int64_t column = (int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x) * VEC_SIZE;
    if (column >= row_size) return;
    const Quotient over_scale(scale);
    for (int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
        const auto x = Vec<in_t, VEC_SIZE>::load(input + row * input_stride + column);
        out_t* to = output + row * output_stride + column;
        if constexpr (sizeof(out_t) == 1) {
            encode<out_t>(x, over_scale).store(to);
        } else {
            decode<out_t>(x, scale).store(to);
        }
    }
}
