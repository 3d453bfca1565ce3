// masked_silu_mul_quant: a gated activation of the first counts[e] tokens of each expert e, as fp8 in groups of 128.
//
//     y = b(b(silu(gate)) * up)    gate, up = input[e, t, i], input[e, t, hidden_size + i]    b: rounding to bfloat16
//     s = b(max(max |y|, b(1e-10)) * b(1/448)); if POWER_OF_TWO: 2^ceil(b(log2 s))
//     y_q[e, t, i] = fp8(clamp(b(y * b(1 / s))))    for t < counts[e]
//     y_s[e, t, group] = s, or the byte group % 4 of y_s[e, t, group / 4] = the exponent of s
//
// The maximum ignores NaN, and NaN becomes -448. Counts are clamped to 0 ... num_tokens.
//
// 16 lanes share a group. A work item is one chunk of a token: the adjacent groups that one warp holds. The items of
// all experts form one sequence, split evenly among warps. Each warp computes the prefix sum of counts, finds the
// expert, token and chunk where its share begins, and walks its items from there.
//
// Constants:
//     scale_t        element type of y_s: float, or int32_t for four exponents in a word
//     POWER_OF_TWO   scales are powers of two
//     ACCESS         elements of input in one memory access, at most 8
//     CODE_ACCESS    elements of y_q in one memory access, at most 8

#include "math.cuh"
#include "quant.cuh"
#include "reduce.cuh"

using vec_t = Vec<bf16_t, 8>;
constexpr int GROUP_SIZE = 128;
constexpr int GROUP_THREADS = GROUP_SIZE / vec_t::SIZE;
constexpr int WARP_GROUPS = WARP_SIZE / GROUP_THREADS;
constexpr int WARPS = NUM_THREADS / WARP_SIZE;

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
    const auto count_of = [&](int expert) { return min(max(counts[expert], 0), num_tokens); };

    // Each lane sums up the tokens of its consecutive experts, and adds the tokens of all lower lanes.
    const int lane_experts = ceil_div(num_experts, WARP_SIZE);
    const int first = min(lane * lane_experts, num_experts), end = min(first + lane_experts, num_experts);
    int64_t tokens_until = 0;
#pragma unroll 4
    for (int expert = first; expert < end; ++expert) tokens_until += count_of(expert);
    const int64_t own_tokens = tokens_until;
#pragma unroll
    for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
        const int64_t before = shfl<WARP_SIZE>(tokens_until, lane < distance ? lane : lane - distance);
        if (lane >= distance) tokens_until += before;
    }
    const int chunks = ceil_div(groups, WARP_GROUPS);
    const int64_t items = shfl<WARP_SIZE>(tokens_until, WARP_SIZE - 1) * chunks;
    const int64_t num_warps = int64_t(gridDim.x) * WARPS, warp = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP_SIZE;
    int64_t remaining = items * (warp + 1) / num_warps - items * warp / num_warps;
    if (remaining == 0) return;

    // Only the lane that counted the first item's token finds expert and token; they stay 0 in all other lanes.
    const int64_t row = items * warp / num_warps / chunks;
    int chunk = items * warp / num_warps % chunks, expert = 0, token = 0;
    if (row >= tokens_until - own_tokens && row < tokens_until) {
        int64_t rest = row - (tokens_until - own_tokens);
#pragma unroll 1
        for (expert = first; rest >= count_of(expert); ++expert) rest -= count_of(expert);
        token = rest;
    }
    expert = lane_reduce<Sum, WARP_SIZE>(expert);
    token = lane_reduce<Sum, WARP_SIZE>(token);

    for (int count = count_of(expert);;) {
        const int group = chunk * WARP_GROUPS + lane / GROUP_THREADS;
        const int column = group * GROUP_SIZE + lane % GROUP_THREADS * vec_t::SIZE;
        const bool active = group < groups;
        vec_t gate = vec_t::full(0.0f), up = gate;
        if (active) {
            const bf16_t* from = input + expert * input_expert_stride + token * input_stride + column;
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
            fp8_e4m3_t* codes = y_q + expert * code_expert_stride + token * code_stride + column;
            Vec<fp8_e4m3_t, 8>::from_floats(v).template store<CODE_ACCESS>(codes);
            if (lane % GROUP_THREADS == 0) {
                scale_t* scales = y_s + expert * scale_expert_stride + token * scale_stride;
                if constexpr (is_same<scale_t, int32_t>) {
                    reinterpret_cast<uint8_t*>(scales + group / 4 * scale_column_stride)[group % 4] =
                        exponent_of(scale);
                } else {
                    scales[group * scale_column_stride] = scale;
                }
            }
        }
        if (--remaining == 0) return;
        if (++chunk < chunks) continue;
        chunk = 0;
        ++token;
#pragma unroll 1
        while (token >= count) {
            token = 0;
            count = count_of(++expert);
        }
    }
}
