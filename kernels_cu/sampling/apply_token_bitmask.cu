// apply_token_bitmask: sets the logits of tokens that a grammar forbids to -inf, in place.
//
//     logits[r, t] = -inf where bit t % 32 of bitmask[r, t / 32] is 0    for every row r, or only the rows in indices
//
// x of the grid and the threads of a block cover a row, one vector per thread; y of the grid strides over rows. No
// logit is read, and a vector of allowed tokens only is not written. With indices, each warp searches them for
// its row.
//
// Constants:
//     VEC_SIZE      logits in one memory access; divides 32, so that the bits of a vector lie in one word
//     HAS_INDICES   false when indices is null

#include "vec.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
apply_token_bitmask(scalar_t* logits,        // [num_rows, vocab_size]
                    const int32_t* bitmask,  // [num_masks, ceil(vocab_size / 32)]
                    const int32_t* indices,  // [num_indices]
                    int64_t num_rows, int64_t vocab_size, int64_t num_indices, int64_t logits_stride,
                    int64_t bitmask_stride) {
    await_previous_kernel();
    const int64_t column = (int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x) * VEC_SIZE;
    for (int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
        bool edited = !HAS_INDICES;
        for (int64_t i = threadIdx.x % WARP_SIZE; HAS_INDICES && i < num_indices; i += WARP_SIZE) {
            edited |= indices[i] == row;
        }
        if (HAS_INDICES) edited = any_lane(edited);
        if (!edited || column >= vocab_size) continue;
        const uint32_t word = bitmask[row * bitmask_stride + column / 32];
        const uint32_t forbidden = ~word >> (column % 32) & ((1u << VEC_SIZE) - 1);
        scalar_t* out = logits + row * logits_stride + column;
        if (forbidden == (1u << VEC_SIZE) - 1) {
            Vec<scalar_t, VEC_SIZE>::full(minus_infinity()).store(out);
        } else {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                if (forbidden >> j & 1) out[j] = from_float<scalar_t>(minus_infinity());
            }
        }
    }
}
