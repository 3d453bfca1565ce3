// masked_silu_mul_quant: a gated activation of the first counts[e] tokens of each expert e, as fp8 in groups of 128.
//
//     y = b(b(silu(gate)) * up)    gate, up = input[e, t, i], input[e, t, hidden_size + i]    b: rounding to bfloat16
//     s = b(max(max |y|, b(1e-10)) * b(1/448)); if POWER_OF_TWO: 2^ceil(b(log2 s))
//     y_q[e, t, i] = fp8(clamp(b(y * b(1 / s))))    for t < counts[e]
//     y_s[e, t, group] = s, or the byte group % 4 of y_s[e, t, group / 4] = the exponent of s
//
// The maximum ignores NaN, and NaN becomes -448. Counts are clamped to 0 ... num_tokens.
//
// 16 lanes share a group. A work item of a warp (counted_rows.cuh) is one chunk of a token: the adjacent groups that
// the warp holds.
//
// Constants:
//     scale_t        element type of y_s: float, or int32_t for four exponents in a word
//     POWER_OF_TWO   scales are powers of two
//     ACCESS         elements of input in one memory access, at most 8
//     CODE_ACCESS    elements of y_q in one memory access, at most 8

#include "counted_rows.cuh"
#include "math.cuh"
#include "quant.cuh"
#include "reduce.cuh"

using vec_t = Vec<bf16_t, 8>;
constexpr int GROUP_SIZE = 128;
constexpr int GROUP_THREADS = GROUP_SIZE / vec_t::SIZE;
constexpr int WARP_GROUPS = WARP_SIZE / GROUP_THREADS;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
masked_silu_mul_quant(const bf16_t* input,    // [num_experts, num_tokens, 2 * groups * 128]
                      const int32_t* counts,  // [num_experts]
                      fp8_e4m3_t* y_q,        // [num_experts, num_tokens, groups * 128]
                      scale_t* y_s,           // [num_experts, num_tokens, groups or words of four]
                      int num_experts, int num_tokens, int groups, int64_t input_expert_stride, int64_t input_stride,
                      int64_t code_expert_stride, int64_t code_stride, int64_t scale_expert_stride,
                      int64_t scale_stride, int64_t scale_column_stride) {
    await_previous_kernel();
    const int lane = threadIdx.x % WARP_SIZE;
    CountedRows<NUM_THREADS> at(counts, num_experts, num_tokens, ceil_div(groups, WARP_GROUPS));
    for (; at.remaining > 0; at.next()) {
        const int group = at.chunk * WARP_GROUPS + lane / GROUP_THREADS;
        const int column = group * GROUP_SIZE + lane % GROUP_THREADS * vec_t::SIZE;
        const bool active = group < groups;
        vec_t gate = vec_t::full(0.0f), up = gate;
        if (active) {
            const bf16_t* from = input + at.expert * input_expert_stride + at.token * input_stride + column;
            gate = vec_t::load<ACCESS>(from);
            up = vec_t::load<ACCESS>(from + int64_t(groups) * GROUP_SIZE);
        }
        const vec_t y = silu(gate) * up;
        const float max_abs = fmaxf(lane_reduce<Max, GROUP_THREADS>(y.absmax()), round_to<bf16_t>(1e-10f));
        float scale = round_to<bf16_t>(ieee_multiply(max_abs, round_to<bf16_t>(1.0f / 448.0f)));
        if (POWER_OF_TWO) scale = power_of_two_by_log(scale);
        if (active) {
            float v[vec_t::SIZE];
            (y * vec_t::full(ieee_divide(1.0f, scale))).to_floats(v);
#pragma unroll
            for (int i = 0; i < vec_t::SIZE; ++i) v[i] = fminf(fmaxf(v[i], -448.0f), 448.0f);  // NaN becomes -448
            fp8_e4m3_t* quants = y_q + at.expert * code_expert_stride + at.token * code_stride + column;
            Vec<fp8_e4m3_t, 8>::from_floats(v).template store<CODE_ACCESS>(quants);
            if (lane % GROUP_THREADS == 0) {
                scale_t* scales = y_s + at.expert * scale_expert_stride + at.token * scale_stride;
                if constexpr (is_same<scale_t, int32_t>) {
                    reinterpret_cast<uint8_t*>(scales + group / 4 * scale_column_stride)[group % 4] =
                        exponent_of(scale);
                } else {
                    scales[group * scale_column_stride] = scale;
                }
            }
        }
    }
}
