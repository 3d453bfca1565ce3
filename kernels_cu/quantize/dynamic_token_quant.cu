// dynamic_token_quant: dynamic per-token quantisation, one scale per row; maxima and minima ignore NaN.
//
//     a = max |x| over the row
//     fp8        s = max(min(a, scale_ub) / 448, smallest scale)    result = fp8(x / s), NaN becomes the largest fp8
//     int8       s = a / 127                                        result = int8(x * (127 / a)), 0 if 127 / a is inf
//     with azp   s = (max x - min x) / 255, azp = round(-128 - min x / s)    result = int8(round(x * (1 / s)) + azp)
//
// ROW_THREADS threads share a row and hold it in registers.
//
// Constants:
//     code_t        fp8_e4m3_t, fp8_e4m3fnuz_t (224 instead of 448) or int8_t
//     HAS_BOUND     false when scale_ub is null
//     HAS_AZP       false when azp is null

#include "quant.cuh"
#include "reduce.cuh"
#include "row.cuh"

using row_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, KEEP_ROW>;

// Scale of int8 values that span min_x to max_x.
struct Range {
    float scale, reciprocal;

    DEVICE Range(float min_x, float max_x) { find(min_x, max_x); }
    DEVICE void find(float min_x, float max_x) {
        scale = ieee_divide(ieee_residual(1.0f, min_x, max_x), 255.0f);
        reciprocal = ieee_divide(1.0f, scale);
    }
    // Whether 1 / scale is finite. It is not if the range is tiny, as that of equal values is.
    DEVICE bool is_valid() const { return reciprocal <= FLOAT_MAX; }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
dynamic_token_quant(code_t* result,         // [num_rows, HIDDEN_SIZE]
                    const scalar_t* input,  // [num_rows, HIDDEN_SIZE]
                    float* scale,           // [num_rows]
                    int32_t* azp,           // [num_rows]
                    const float* scale_ub,  // one element
                    int64_t num_rows, int64_t result_stride, int64_t input_stride) {
    await_previous_kernel();
    __shared__ float partial[2][NUM_THREADS / WARP_SIZE];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows);
    const row_t x = row_t::load(input + at.row * input_stride, at.active);
    result += at.row * result_stride;

    if constexpr (HAS_AZP) {
        float min_x = -minus_infinity(), max_x = minus_infinity();
        x.for_each([&](int i, int column) {
            float v[VEC_SIZE];
            x.get(i, column).to_floats(v);
            row_t::for_each_element(i, [&](int j) {
                min_x = ieee_min(min_x, v[j]);
                max_x = ieee_max(max_x, v[j]);
            });
        });
        min_x = row_reduce<Min, ROW_THREADS>(min_x, partial[0]);
        max_x = row_reduce<Max, ROW_THREADS>(max_x, partial[1]);
        if (!at.active) return;
        if (min_x > max_x) min_x = max_x = 0.0f;  // every element is NaN
        Range range(min_x, max_x);
        if (!range.is_valid()) {  // extend the range to 0; if the range still is too small, the scale is 1
            min_x = ieee_min(min_x, 0.0f);
            range.find(min_x, ieee_max(max_x, 0.0f));
            if (!range.is_valid()) range.scale = range.reciprocal = 1.0f;
        }
        const int32_t zero_point = round_to_int(-128.0f - ieee_divide(min_x, range.scale));
        if (at.first_thread()) {
            scale[at.row] = range.scale;
            azp[at.row] = zero_point;
        }
        const ZeroPoint to_code(zero_point);
        x.for_each([&](int i, int column) {
            float v[VEC_SIZE];
            x.get(i, column).to_floats(v);
            Vec<int8_t, VEC_SIZE> quantized;
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) quantized.data[j] = to_code(ieee_multiply(v[j], range.reciprocal));
            row_t::store(reinterpret_cast<int8_t*>(result), i, column, quantized);
        });
    } else {
        const float bound = HAS_BOUND ? *scale_ub : 0.0f;
        float max_abs = 0.0f;
        x.for_each([&](int i, int column) { max_abs = ieee_max(max_abs, x.get(i, column).absmax()); });
        max_abs = row_reduce<Max, ROW_THREADS>(max_abs, partial[0]);
        if (!at.active) return;
        const auto write_row = [&](float row_scale, auto quantize) {
            if (at.first_thread()) scale[at.row] = row_scale;
            x.for_each([&](int i, int column) {
                float v[VEC_SIZE];
                x.get(i, column).to_floats(v);
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) v[j] = quantize(v[j]);
                row_t::store(result, i, column, Vec<code_t, VEC_SIZE>::from_floats(v));
            });
        };
        if constexpr (is_same<code_t, int8_t>) {
            float factor = ieee_divide(127.0f, max_abs);
            if (factor > FLOAT_MAX) factor = 0.0f;
            write_row(ieee_divide(max_abs, 127.0f), [=](float x) { return ieee_multiply(x, factor); });
        } else {
            const float row_scale = dynamic_scale<code_t>(HAS_BOUND ? fminf(max_abs, bound) : max_abs);
            write_row(row_scale, Quantizer<code_t, HAS_BOUND>(row_scale));
        }
    }
}
