// group_quant: dynamic group quantisation: computes one scale per group of consecutive elements and quantises them.
//
//     s = max(max |x|, eps) / code_max; if POWER_OF_TWO: the smallest power of two not below max(s, 1e-10)
//     output_q = code_t(min(max(x / s, code_min), code_max)), rounded to nearest even; int8 toward zero unless NEAREST
//     output_s[token, group] = s; if PACKED: byte group % 4 of output_s_packed[token, group / 4] = the exponent of s
//
// The maximum ignores NaN, and NaN becomes code_min. ROW_THREADS threads share a group, the row of row.cuh. With
// PADDED, groups are padded to whole words and tokens to num_rows. Padding threads write zeros: quantized values up to
// row num_code_rows, scales up to row num_scale_rows in the last column and up to row num_gap_rows in the earlier
// columns.
//
// Constants:
//     code_t          fp8_e4m3_t, fp8_e4m3fnuz_t or int8_t
//     GROUP_SIZE      elements per scale
//     GROUPS          groups of a token
//     SCALES          scales of a token, padding included
//     VEC_SIZE        elements in one memory access; divides GROUP_SIZE
//     POWER_OF_TWO    scales are powers of two
//     NEAREST         int8 values are rounded to nearest even
//     PACKED          scales are bytes of output_s_packed
//     PADDED          PACKED, and output_q or output_s_packed has padding; otherwise the padding checks compile away

#include "quant.cuh"
#include "reduce.cuh"
#include "row.cuh"

using row_t = Row<scalar_t, GROUP_SIZE, VEC_SIZE, ROW_THREADS, KEEP_ROW>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
group_quant(const scalar_t* input,     // [num_tokens, GROUPS * GROUP_SIZE]
            code_t* output_q,          // [num_code_rows, GROUPS * GROUP_SIZE]
            float* output_s,           // [num_tokens, GROUPS]
            int32_t* output_s_packed,  // [num_scale_rows, SCALES / 4]
            int64_t num_tokens, int64_t num_rows, int64_t num_code_rows, int64_t num_scale_rows, int64_t num_gap_rows,
            int64_t input_stride, int64_t output_stride, int64_t scale_stride, int64_t scale_column_stride, float eps,
            float code_min, float code_max) {
    await_previous_kernel();
    __shared__ float partial[NUM_THREADS / WARP_SIZE];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows * SCALES);
    int64_t token = uint64_t(at.row) / SCALES;
    int group = uint64_t(at.row) % SCALES;
    const bool exists = !PADDED || (token < num_tokens && group < GROUPS);
    const bool has_codes = exists || (token < num_code_rows && group < GROUPS);
    output_q += token * output_stride + group * GROUP_SIZE;
    uint8_t* packed_scale = nullptr;
    if constexpr (PACKED) {
        if (!PADDED || token < (group < SCALES - 4 ? num_gap_rows : num_scale_rows)) {
            int32_t* word = output_s_packed + token * scale_stride + group / 4 * scale_column_stride;
            packed_scale = reinterpret_cast<uint8_t*>(word) + group % 4;
        }
    }
    if constexpr (PADDED) {
        token = min(token, num_tokens - 1);
        group = min(group, GROUPS - 1);
    }
    const row_t x = row_t::load_once(input + token * input_stride + group * GROUP_SIZE, at.active && exists);
    float max_abs = 0.0f;
    x.for_each([&](int i, int column) { max_abs = ieee_max(max_abs, x.get(i, column).absmax()); });
    max_abs = row_reduce<Max, ROW_THREADS>(max_abs, partial);
    float scale = ieee_divide(fmaxf(max_abs, eps), code_max);
    if (POWER_OF_TWO) scale = power_of_two_above(fmaxf(scale, 1e-10f));
    if (at.first_thread()) {
        if constexpr (PACKED) {
            if (packed_scale) *packed_scale = exists ? exponent_of(scale) : 0;
        } else {
            output_s[token * scale_stride + group * scale_column_stride] = scale;
        }
    }
    if (!at.active || !has_codes) return;

    const Quotient over_scale(scale);
    x.for_each([&](int i, int column) {
        float v[VEC_SIZE];
        x.get(i, column).to_floats(v);
        over_scale.of_each(v, max_abs);
        int32_t toward_zero[VEC_SIZE];
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            v[j] = exists ? fminf(fmaxf(v[j], code_min), code_max) : 0.0f;
            toward_zero[j] = int32_t(v[j]);
        }
        using codes_t = Vec<code_t, VEC_SIZE>;
        if constexpr (is_same<code_t, int8_t> && !NEAREST) {
            row_t::store(output_q, i, column, codes_t::from_integers(toward_zero));
        } else {
            row_t::store(output_q, i, column, codes_t::from_floats(v));
        }
    });
}
