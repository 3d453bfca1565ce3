// zero_rows: clears rows, and pads the blocks of an expert's slot list to more slots if padded_ids is given.
//
//     rows[m, n] = 0
//     padded_ids[b * padded_size + i] = sorted_token_ids[b * block_size + i], for i < block_size, else -1 (padding)
//     padded_count = padded_size * (num_tokens_post_pad / block_size)
//
// A thread takes eight adjacent elements of rows, and one slot of padded_ids.
//
// Constants
//     scalar_t      element type of rows

#include "vec.cuh"

constexpr int PER_THREAD = 8;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
zero_rows(scalar_t* rows,                      // [num_rows, n]
          const int32_t* sorted_token_ids,     // [num_blocks * block_size]
          const int32_t* num_tokens_post_pad,  // one element
          int32_t* padded_ids,                 // [num_blocks * padded_size]; or null
          int32_t* padded_count,               // one element; or null
          int64_t num_rows, int64_t n, int64_t stride, int64_t num_blocks, int64_t block_size, int64_t padded_size) {
    await_previous_kernel();
    const int64_t thread = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x, first = thread * PER_THREAD;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        if (first + i < num_rows * n) rows[(first + i) / n * stride + (first + i) % n] = from_float<scalar_t>(0.0f);
    }
    if (padded_ids == nullptr) return;
    if (thread < num_blocks * padded_size) {
        const int64_t block = thread / padded_size, i = thread % padded_size;
        padded_ids[thread] = i < block_size ? sorted_token_ids[block * block_size + i] : -1;
    }
    if (thread == 0) {
        const int64_t blocks = min(max(int64_t(*num_tokens_post_pad), int64_t(0)) / block_size, num_blocks);
        *padded_count = int32_t(blocks * padded_size);
    }
}
