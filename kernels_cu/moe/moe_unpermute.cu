// moe_unpermute: the weighted sum over the choices of each token, gathered from the order of experts.
//
//     hidden_states[t] = T(sum of topk_weights[t, j] * permuted_hidden_states[inv_permuted_idx[t, j]] over j < TOPK)
//
// Multiplications and additions are float32 without FMA, in the order of j. An index is skipped if it is out of range,
// or with HAS_OFFSET if it is expert_first_token_offset[num_local] or above.
//
// Threads: one vector of a row of hidden_states per thread (elementwise.cuh).
//
// Constants
//     TOPK          choices of a token
//     HAS_OFFSET    expert_first_token_offset is given

#include "elementwise.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int BATCH = TOPK < 8 ? TOPK : 8;  // vectors that are loaded before the first is used

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
moe_unpermute(const scalar_t* permuted_hidden_states,    // [num_slots, hidden_size]
              const float* topk_weights,                 // [num_rows, TOPK]
              const int32_t* inv_permuted_idx,           // [num_rows, TOPK]
              const int64_t* expert_first_token_offset,  // [num_local + 1]
              scalar_t* hidden_states,                   // [num_rows, hidden_size]
              int64_t num_rows, int64_t hidden_size, int64_t input_stride, int64_t out_stride, int64_t num_slots,
              int64_t num_local) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const int64_t slots = HAS_OFFSET ? min(expert_first_token_offset[num_local], num_slots) : num_slots;
    float sum[VEC_SIZE] = {};
#pragma unroll 1
    for (int first = 0; first < TOPK; first += BATCH) {
        vec_t vecs[BATCH];
        float weights[BATCH];
        bool exists[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int64_t choice = at.row * TOPK + min(first + j, TOPK - 1);
            const int64_t slot = inv_permuted_idx[choice];
            weights[j] = topk_weights[choice];
            exists[j] = first + j < TOPK && slot >= 0 && slot < slots;
            // A skipped row loads row 0, and its values are not used.
            vecs[j] = vec_t::load_once(permuted_hidden_states + (exists[j] ? slot : 0) * input_stride + at.column);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            float x[VEC_SIZE];
            vecs[j].to_floats(x);
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
                if (exists[j]) sum[i] = ieee_add(sum[i], ieee_multiply(weights[j], x[i]));
            }
        }
    }
    vec_t::from_floats(sum).store(hidden_states + at.row * out_stride + at.column);
}
