// apply_rotary_emb: rotary embedding of heads by given cosines and sines.
//
//     x' = T(T(x * cos) - T(y * sin)),   y' = T(T(y * cos) + T(x * sin))
//
// for the pairs (x, y) of the first ROTARY_DIM elements of each head (rotary.cuh). cos and sin are rounded to T before.
// With FP32_COMPUTE only the results are rounded. The other elements of a head are copied.
//
// Threads: a thread rotates PAIRS pairs of up to THREAD_HEADS heads of a token, and loads cos and sin once for all
// heads (HeadIndex in rotary.cuh).
//
// Constants
//     scalar_t       T: element type of out and x
//     angle_t        element type of cos and sin
//     NUM_HEADS      heads of a token
//     HEAD_SIZE      elements of a head
//     ROTARY_DIM     elements of a head that are rotated
//     IS_NEOX        which elements make a pair
//     FP32_COMPUTE   round only once
//     LEADING        leading dimensions of x: 2 if there are several sequences, else 1
//     PAIRS          adjacent pairs of a thread; divides ROTARY_DIM / 2
//     ACCESS_SIZE    elements of out or x in one memory access
//     CACHE_ACCESS   elements of cos or sin in one memory access
//     REST_ACCESS    elements in one memory access of the copy
//     THREAD_HEADS   the largest number of heads of a thread
//     BLOCK_GROUPS   threads of a block that share a token and an offset in its heads

#include "rotary.cuh"

constexpr int LANES = ROTARY_DIM / 2 / PAIRS;
using pairs_t = Pairs<scalar_t, PAIRS, ROTARY_DIM / 2, IS_NEOX, ACCESS_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
apply_rotary_emb(scalar_t* out,       // [num_tokens / seq_len, seq_len, NUM_HEADS, HEAD_SIZE]
                 const scalar_t* x,   // [num_tokens / seq_len, seq_len, NUM_HEADS, HEAD_SIZE]
                 const angle_t* cos,  // [seq_len, ROTARY_DIM / 2]
                 const angle_t* sin,  // [seq_len, ROTARY_DIM / 2]
                 int64_t num_tokens, int seq_len, int64_t cos_stride, int64_t sin_stride, int64_t out_stride0,
                 int64_t out_stride1, int64_t out_head_stride, int64_t x_stride0, int64_t x_stride1,
                 int64_t x_head_stride) {
    await_previous_kernel();
    const HeadIndex<NUM_THREADS, LANES, NUM_HEADS, THREAD_HEADS, BLOCK_GROUPS> at(num_tokens);
    if (!at.inside) return;
    const int first = at.lane * PAIRS;
    out += token_offset<LEADING>(at.token, seq_len, out_stride0, out_stride1);
    x += token_offset<LEADING>(at.token, seq_len, x_stride0, x_stride1);
    const int64_t row = token_offset<LEADING>(at.token, seq_len, LEADING == 1, 1);

    pairs_t pairs[THREAD_HEADS];
    at.for_each([&](int i, int head) { pairs[i] = pairs_t::load(x + head * x_head_stride, first); });
    float cosine[PAIRS], sine[PAIRS];
    load_floats<CACHE_ACCESS>(cos + row * cos_stride + first, cosine);
    load_floats<CACHE_ACCESS>(sin + row * sin_stride + first, sine);

    at.for_each([&](int i, int head) {
        scalar_t* out_head = out + head * out_head_stride;
        if constexpr (FP32_COMPUTE) {
            turn(pairs[i].x, pairs[i].y, cosine, sine);
        } else {
            turn(pairs[i].x, pairs[i].y, pairs_t::vec_t::from_floats(cosine), pairs_t::vec_t::from_floats(sine));
        }
        pairs[i].store(out_head, first);
        copy_elements<LANES, HEAD_SIZE - ROTARY_DIM, REST_ACCESS>(out_head + ROTARY_DIM,
                                                                  x + head * x_head_stride + ROTARY_DIM, at.lane);
    });
}
