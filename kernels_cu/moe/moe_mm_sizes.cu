// moe_mm_sizes: problem sizes of a grouped GEMM from row counts or offsets per expert.
//
//     problem_sizes1[e]  (rows of e, first_n, k), or (first_n, rows of e, k) with SWAP
//     problem_sizes2[e]  (rows of e, k, n), or (k, rows of e, n) with SWAP
//
// Threads: one expert per thread.
//
// Constants
//     FROM_OFFSETS  rows of e = expert_first_token_offset[e + 1] - expert_first_token_offset[e], clamped to
//                   0 ... 2^31 - 1; otherwise rows of e = expert_num_tokens[e], clamped to 0 ... padded_m, and
//                   expert_offsets[e] = e * padded_m
//     SWAP          rows are the second size

#include "moe_sizes.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
moe_mm_sizes(const int64_t* expert_first_token_offset,  // [num_experts + 1]
             const int32_t* expert_num_tokens,          // [num_experts]
             int32_t* expert_offsets,                   // [num_experts]
             int32_t* problem_sizes1,                   // [num_experts, 3]
             int32_t* problem_sizes2,                   // [num_experts, 3]
             int64_t num_experts, int64_t padded_m, int first_n, int n, int k) {
    await_previous_kernel();
    const int64_t expert = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (expert >= num_experts) return;
    int64_t rows, max_rows = padded_m;
    if constexpr (FROM_OFFSETS) {
        const int64_t begin = expert_first_token_offset[expert], end = expert_first_token_offset[expert + 1];
        // Unsigned subtraction, because two arbitrary offsets may overflow; the result is unused if end < begin.
        rows = end > begin ? int64_t(uint64_t(end) - uint64_t(begin)) : 0;
        if (rows < 0) rows = 0x7fffffff;
        max_rows = 0x7fffffff;
    } else {
        rows = expert_num_tokens[expert];
        expert_offsets[expert] = int32_t(expert * padded_m);
    }
    const int count = int(max(int64_t(0), min(rows, max_rows)));
    write_sizes<SWAP>(problem_sizes1 + 3 * expert, count, first_n, k);
    write_sizes<SWAP>(problem_sizes2 + 3 * expert, count, k, n);
}
