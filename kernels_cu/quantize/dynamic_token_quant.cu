// dynamic_token_quant: codes of rows, each under a scale found here; NaN is left out of the extremes.
//
//     fp8        s = max(min(a, scale_ub) / 448, smallest scale)    result = fp8(x / s), NaN the largest code
//     int8       s = a / 127                                        result = int8(x * (127 / a)), 0 if that is not finite
//                where a = max |x| of the row
//     with azp   s = (max x - min x) / 255, azp = round(-128 - min x / s)    result = int8(round(x * (1 / s)) + azp)
//
// ROW_THREADS threads share a row and hold it in registers.
//
// Constants
//     scalar_t      element type of input
//     code_t        fp8_e4m3_t, fp8_e4m3fnuz_t (224 instead of 448) or int8_t
//     HIDDEN_SIZE   elements in a row
//     VEC_SIZE      elements in one memory access; divides HIDDEN_SIZE unless SHIFTED
//     SHIFTED       rows begin anywhere in a vector's memory (row.cuh)
//     NUM_THREADS   threads in the block
//     ROW_THREADS   threads that share a row; divides NUM_THREADS
//     HAS_BOUND     false when scale_ub is null
//     HAS_AZP       false when azp is null
//     KEEP_ROW      hold the row in registers; else read it again for every use
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "quant.cuh"
#include "reduce.cuh"
#include "row.cuh"

using row_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, KEEP_ROW, SHIFTED>;

// Scale and zero point of a row that reaches from `low` to `high`. A range too small for them, as of equal values, is
// extended to 0; one that is too small all the same has scale 1.
struct Range {
    float scale, reciprocal;

    DEVICE Range(float low, float high) { find(low, high); }
    DEVICE void find(float low, float high) {
        scale = ieee_divide(ieee_residual(1.0f, low, high), 255.0f);
        reciprocal = ieee_divide(1.0f, scale);
    }
    DEVICE bool exists() const { return reciprocal <= FLOAT_MAX; }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
dynamic_token_quant(code_t* result,          // [num_rows, HIDDEN_SIZE]
                    const scalar_t* input,   // [num_rows, HIDDEN_SIZE]
                    float* scale,            // [num_rows]
                    int32_t* azp,            // [num_rows]
                    const float* scale_ub,   // one element
                    int64_t num_rows, int64_t result_stride, int64_t input_stride) {
    await_previous_kernel();
    __shared__ float partial[2][NUM_THREADS / WARP_SIZE];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows);
    const row_t x = row_t::load(input + at.row * input_stride, at.active);
    result += at.row * result_stride;

    if constexpr (HAS_AZP) {
        float low = -minus_infinity(), high = minus_infinity();
        x.for_each([&](int i, int column) {
            float v[VEC_SIZE];
            x.get(i, column).to_floats(v);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                if (j < row_t::elements(i) && row_t::exists(i)) {
                    low = ieee_min(low, v[j]);
                    high = ieee_max(high, v[j]);
                }
            }
        });
        low = row_reduce<Min, ROW_THREADS>(low, partial[0]);
        high = row_reduce<Max, ROW_THREADS>(high, partial[1]);
        if (!at.active) return;
        if (low > high) low = high = 0.0f;  // nothing but NaN
        Range range(low, high);
        if (!range.exists()) {
            low = ieee_min(low, 0.0f);
            range.find(low, ieee_max(high, 0.0f));
            if (!range.exists()) range.scale = range.reciprocal = 1.0f;
        }
        const int32_t zero = round_to_int(-128.0f - ieee_divide(low, range.scale));
        if (at.first_thread()) {
            scale[at.row] = range.scale;
            azp[at.row] = zero;
        }
        const ZeroPoint shifted(zero);
        x.for_each([&](int i, int column) {
            float v[VEC_SIZE];
            x.get(i, column).to_floats(v);
            Vec<int8_t, VEC_SIZE> codes;
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) codes.data[j] = shifted(ieee_multiply(v[j], range.reciprocal));
            row_t::store(reinterpret_cast<int8_t*>(result), i, column, codes);
        });
    } else {
        const float bound = HAS_BOUND ? *scale_ub : 0.0f;
        float a = 0.0f;
        x.for_each([&](int i, int column) { a = ieee_max(a, x.get(i, column).absmax()); });
        a = row_reduce<Max, ROW_THREADS>(a, partial[0]);
        if (!at.active) return;
        const auto write = [&](float s, auto quantize) {
            if (at.first_thread()) scale[at.row] = s;
            x.for_each([&](int i, int column) {
                float v[VEC_SIZE];
                x.get(i, column).to_floats(v);
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) v[j] = quantize(v[j]);
                row_t::store(result, i, column, Vec<code_t, VEC_SIZE>::from_floats(v));
            });
        };
        if constexpr (is_same<code_t, int8_t>) {
            float factor = ieee_divide(127.0f, a);
            if (factor > FLOAT_MAX) factor = 0.0f;
            write(ieee_divide(a, 127.0f), [=](float x) { return ieee_multiply(x, factor); });
        } else {
            const float s = dynamic_scale<code_t>(HAS_BOUND ? fminf(a, bound) : a);
            write(s, Quantizer<code_t, HAS_BOUND>(s));
        }
    }
}
