// static_quant: quantises elements with given scales.
//
//     fp8        result = fp8(clamp(x * r))    r = 1 / s, or 0 where that is not finite; NaN becomes the largest fp8
//     int8       result = int8(x / s)
//     with azp   result = int8(round(x * (1 / s)) + azp)
//     s = scale[i / group_rows, j / GROUP_COLUMNS] for the element x = input[i, j]
//
// One vector of quantized values per thread (elementwise.cuh); its input may take two accesses.
//
// Constants:
//     code_t          fp8_e4m3_t, fp8_e4m3fnuz_t or int8_t
//     GROUP_COLUMNS   elements of a row under one scale; 0 for a whole row
//     GROUPED_ROWS    false: group_rows is 1, and i / group_rows needs no division
//     HAS_AZP         false when azp is null

#include "elementwise.cuh"
#include "quant.cuh"

constexpr int MAX_ACCESS = 16 / sizeof(scalar_t);  // elements of input
constexpr int ACCESS_SIZE = VEC_SIZE < MAX_ACCESS ? VEC_SIZE : MAX_ACCESS;
constexpr bool SCALE_PER_VECTOR = GROUP_COLUMNS % VEC_SIZE == 0;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
static_quant(code_t* result,         // [num_rows, hidden_size]
             const scalar_t* input,  // [num_rows, hidden_size]
             const float* scale,     // [num_rows / group_rows, hidden_size / GROUP_COLUMNS], or one element
             const int32_t* azp,     // one element
             int64_t num_rows, int64_t hidden_size, int64_t result_stride, int64_t input_stride, int64_t group_rows,
             int64_t scale_row_stride, int64_t scale_column_stride) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    float v[VEC_SIZE];
    load_floats<ACCESS_SIZE>(input + at.row * input_stride + at.column, v);
    scale += (GROUPED_ROWS ? int64_t(uint64_t(at.row) / uint64_t(group_rows)) : at.row) * scale_row_stride;
    const auto scale_at = [&](int64_t column) {
        return scale[GROUP_COLUMNS == 0 ? 0 : column / GROUP_COLUMNS * scale_column_stride];
    };
    const float s = SCALE_PER_VECTOR ? scale_at(at.column) : 0.0f;

    result += at.row * result_stride + at.column;
    if constexpr (HAS_AZP) {
        const float reciprocal = ieee_divide(1.0f, s);
        const ZeroPoint to_code(*azp);
        Vec<int8_t, VEC_SIZE> quantized;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) quantized.data[j] = to_code(ieee_multiply(v[j], reciprocal));
        quantized.store(reinterpret_cast<int8_t*>(result));
        return;
    } else if constexpr (is_same<code_t, int8_t>) {
        const Quotient over_scale(s);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[j] = over_scale(v[j]);
    } else if constexpr (SCALE_PER_VECTOR) {
        const float reciprocal = reciprocal_or_zero(s);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[j] = scaled_fp8<code_t>(v[j], reciprocal);
    } else {
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[j] = scaled_fp8<code_t>(v[j], reciprocal_or_zero(scale_at(at.column + j)));
    }
    Vec<code_t, VEC_SIZE>::from_floats(v).store(result);
}
