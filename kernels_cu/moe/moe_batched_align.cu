// moe_batched_align: the rows of each expert's batch, padded to a multiple of block_size.
//
//     sorted_ids          for each expert b in order: b * max_tokens_per_batch + i for i < n, padded with num_rows to a
//                         multiple of block_size; num_rows after the last expert
//     expert_ids          the expert of each block of block_size slots; -1 after the last used block
//     num_tokens_post_pad slots of all experts, padding included
//
// n is expert_num_tokens[b], clamped to 0 ... max_tokens_per_batch; num_rows is num_experts * max_tokens_per_batch.
//
// Threads: a block writes one expert's slots and a share of the unused slots at the end. Each block sums the slots of
// the experts before its own.

#include "radix_select.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
moe_batched_align(const int32_t* expert_num_tokens,  // [num_experts]
                  int32_t* sorted_ids,               // [num_slots]
                  int32_t* expert_ids,               // [num_blocks]
                  int32_t* num_tokens_post_pad,      // one element
                  int64_t num_experts, int64_t max_tokens_per_batch, int64_t block_size, int64_t num_slots,
                  int64_t num_blocks) {
    await_previous_kernel();
    __shared__ uint32_t partial[2][NUM_THREADS / WARP_SIZE];
    const int64_t expert = blockIdx.x;
    const auto tokens_of = [&](int64_t i) {
        return max(int64_t(0), min(int64_t(expert_num_tokens[i]), max_tokens_per_batch));
    };
    uint32_t blocks_before = 0, all_blocks = 0;
    for (int64_t i = threadIdx.x; i < num_experts; i += NUM_THREADS) {
        const uint32_t blocks = uint32_t((tokens_of(i) + block_size - 1) / block_size);
        if (i < expert) blocks_before += blocks;
        all_blocks += blocks;
    }
    const int64_t tokens = expert < num_experts ? tokens_of(expert) : 0;
    const int64_t first_block = row_reduce<Sum, NUM_THREADS>(blocks_before, partial[0]);
    const int64_t used_blocks = row_reduce<Sum, NUM_THREADS>(all_blocks, partial[1]);
    if (expert == 0 && threadIdx.x == 0) *num_tokens_post_pad = int32_t(used_blocks * block_size);

    const int32_t absent = int32_t(num_experts * max_tokens_per_batch);
    const int64_t own_blocks = (tokens + block_size - 1) / block_size;
    for (int64_t i = threadIdx.x; i < own_blocks * block_size; i += NUM_THREADS) {
        const int32_t row = i < tokens ? int32_t(expert * max_tokens_per_batch + i) : absent;
        sorted_ids[first_block * block_size + i] = row;
    }
    for (int64_t i = threadIdx.x; i < own_blocks; i += NUM_THREADS) expert_ids[first_block + i] = int32_t(expert);

    const int64_t thread = expert * NUM_THREADS + threadIdx.x, threads = num_experts * NUM_THREADS;
    for (int64_t i = used_blocks * block_size + thread; i < num_slots; i += threads) sorted_ids[i] = absent;
    for (int64_t i = used_blocks + thread; i < num_blocks; i += threads) expert_ids[i] = -1;
}
