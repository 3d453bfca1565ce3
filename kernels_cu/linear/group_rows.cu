// group_rows: sorts rows by expert, as moe_align_block_size does, given the offset and the problem size of each expert.
//
//     sorted_token_ids    for each expert e in order: expert_offsets[e] + i for i < rows, then num_rows (padding) up to
//                         a multiple of block_size
//     expert_ids          the expert of each block of block_size slots
//     num_tokens_post_pad slots in use
//     scale_rows[row]     HAS_SCALE_ROWS: sf_offsets[e] + i, the row of the scales
//
// A problem size is (rows, n, k) or, if the second number is not n, (n, rows, k). A row out of range becomes num_rows.
// Slots and blocks beyond the capacity of the lists are not written.
//
// Mapping: one block per expert. It counts the blocks of slots of the experts before its own.
//
// Constants
//     offset_t      element type of expert_offsets
//     HAS_SCALE_ROWS    whether scale_rows is written

#include "radix_select.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
group_rows(const offset_t* expert_offsets,  // [num_experts]
           const int32_t* problem_sizes,    // [num_experts, 3]
           const int32_t* sf_offsets,       // [num_experts]
           int32_t* sorted_token_ids,       // [num_blocks * block_size]
           int32_t* expert_ids,             // [num_blocks]
           int32_t* num_tokens_post_pad,    // one element
           int32_t* scale_rows,             // [num_rows]
           int64_t num_experts, int64_t num_rows, int64_t n, int64_t block_size, int64_t num_blocks) {
    await_previous_kernel();
    __shared__ uint32_t partial[2][NUM_THREADS / WARP_SIZE];
    const int64_t expert = blockIdx.x;
    const auto rows_of = [&](int64_t e) {
        const int32_t* const sizes = problem_sizes + e * 3;
        return max(int64_t(0), min(int64_t(sizes[1] == n ? sizes[0] : sizes[1]), num_rows));
    };
    uint32_t blocks_before = 0, all_blocks = 0;
    for (int64_t e = threadIdx.x; e < num_experts; e += NUM_THREADS) {
        const uint32_t blocks = uint32_t((rows_of(e) + block_size - 1) / block_size);
        if (e < expert) blocks_before += blocks;
        all_blocks += blocks;
    }
    const int64_t first_block = row_reduce<Sum, NUM_THREADS>(blocks_before, partial[0]);
    const int64_t used_blocks = min(int64_t(row_reduce<Sum, NUM_THREADS>(all_blocks, partial[1])), num_blocks);
    if (expert == 0 && threadIdx.x == 0) *num_tokens_post_pad = int32_t(used_blocks * block_size);

    const int64_t rows = rows_of(expert), first_row = expert_offsets[expert];
    const int64_t own_blocks = min((rows + block_size - 1) / block_size, num_blocks - first_block);
    for (int64_t i = threadIdx.x; i < own_blocks * block_size; i += NUM_THREADS) {
        // Written without first_row + i, which could overflow: offsets are not trusted.
        const bool exists = i < rows && first_row >= 0 && first_row < num_rows - i;
        const int32_t row = exists ? int32_t(first_row + i) : int32_t(num_rows);
        sorted_token_ids[first_block * block_size + i] = row;
        if constexpr (HAS_SCALE_ROWS) {
            if (exists) scale_rows[row] = int32_t(uint32_t(sf_offsets[expert]) + uint32_t(i));
        }
    }
    for (int64_t i = threadIdx.x; i < own_blocks; i += NUM_THREADS) expert_ids[first_block + i] = int32_t(expert);
}
