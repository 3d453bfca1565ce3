// moe_scatter_rows: copies the row of each token to the permuted rows of its topk choices, bit for bit.
//
//     permuted_input[inv_permuted_idx[t, j]] = input[t]    for each j < TOPK
//
// An index of expert_first_token_offset[num_local], the number of rows of this device, or above is skipped.
//
// Threads: one vector of a token's row per thread (elementwise.cuh). The thread loads it once and stores it TOPK times.
//
// Constants
//     TOPK          choices of a token

#include "cache.cuh"
#include "elementwise.cuh"

constexpr int BATCH = TOPK < 8 ? TOPK : 8;  // indices loaded before the first store: later loads would wait for it

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
moe_scatter_rows(scalar_t* permuted_input,                  // [max_slots, hidden_size], bytes
                 const scalar_t* input,                     // [num_rows, hidden_size], bytes
                 const int32_t* inv_permuted_idx,           // [num_rows, TOPK]
                 const int64_t* expert_first_token_offset,  // [num_local + 1]
                 int64_t num_rows, int64_t hidden_size, int64_t input_stride, int64_t permuted_stride,
                 int64_t max_slots, int64_t num_local) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const auto words = load_words<VEC_SIZE>(input + at.row * input_stride + at.column);
    const int64_t slots = min(expert_first_token_offset[num_local], max_slots);
    const int32_t* const own = inv_permuted_idx + at.row * TOPK;
#pragma unroll 1
    for (int first = 0; first < TOPK; first += BATCH) {
        int32_t own_slots[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) own_slots[j] = own[min(first + j, TOPK - 1)];
        keep_loads();
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int64_t slot = own_slots[j];
            if (first + j >= TOPK) break;
            if (slot < slots) store_words<VEC_SIZE>(permuted_input + slot * permuted_stride + at.column, words);
        }
    }
}
