// masked_moe_activation: an activation, gated or plain, of the first counts[e] rows of each expert e.
//
//     out[e, t, i] = f(input[e, t, i])              FORM plain: T(ACT(x))
//     out[e, t, i] = f(g, u)                        g, u = input[e, t, i], input[e, t, hidden_size + i]
//                                                   FORM gated: T(T(ACT(g)) * u); clamped, step, situ: gated.cuh
//     out[e, t, i] = f(g, u)                        g, u = input[e, t, 2i], input[e, t, 2i + 1]
//                                                   FORM interleaved: swigluoai of gated.cuh
//     for t < counts[e], clamped to 0 ... num_tokens;  T: dtype of out and input
//
// A work item of a warp (counted_rows.cuh) is one vector of results per lane.
//
// Constants:
//     FORM          plain, gated, clamped, interleaved, step or situ
//     ACT           activation of math.cuh: silu, gelu, gelu_tanh or relu2; used by the forms plain and gated

#include "counted_rows.cuh"
#include "gated.cuh"

enum class Form { plain, gated, clamped, interleaved, step, situ };
constexpr Form form = Form::FORM;
using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
masked_moe_activation(scalar_t* out,                      // [num_experts, num_tokens, hidden_size]
                      const scalar_t* input,              // [num_experts, num_tokens, one or two times hidden_size]
                      const int32_t* valid_token_counts,  // [num_experts]
                      int num_experts, int num_tokens, int hidden_size, int64_t out_expert_stride, int64_t out_stride,
                      int64_t input_expert_stride, int64_t input_stride, float clamp_limit, float alpha, float beta,
                      float situ_beta, float situ_linear_beta) {
    await_previous_kernel();
    constexpr int WARP_ELEMENTS = WARP_SIZE * VEC_SIZE;
    CountedRows<NUM_THREADS> at(valid_token_counts, num_experts, num_tokens, ceil_div(hidden_size, WARP_ELEMENTS));
    for (; at.remaining > 0; at.next()) {
        const int column = at.chunk * WARP_ELEMENTS + int(threadIdx.x) % WARP_SIZE * VEC_SIZE;
        if (column >= hidden_size) continue;
        const scalar_t* row = input + at.expert * input_expert_stride + at.token * input_stride;
        constexpr bool interleaved = form == Form::interleaved;
        const vec_t x = vec_t::load_once(row + (interleaved ? 2 : 1) * column);
        vec_t y = x;
        if constexpr (form == Form::plain) {
            y = ACT(x);
        } else {
            const vec_t u = vec_t::load_once(row + (interleaved ? 2 * column + VEC_SIZE : hidden_size + column));
            if constexpr (form == Form::gated) y = ACT(x) * u;
            if constexpr (form == Form::clamped) y = clamped_swiglu(x, u, clamp_limit, alpha, beta);
            if constexpr (form == Form::interleaved) y = swigluoai(x, u, alpha, clamp_limit);
            if constexpr (form == Form::step) y = swiglustep(x, u, clamp_limit);
            if constexpr (form == Form::situ) y = situ(x, u, situ_beta, situ_linear_beta);
        }
        y.store(out + at.expert * out_expert_stride + at.token * out_stride + column);
    }
}
