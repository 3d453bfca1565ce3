// causal_conv1d_decode: causal convolution for decode: a few tokens per sequence, in place, with states in a cache.
//
//     h = WIDTH - 1 inputs of conv_state[slot, :, d], those from `start` on: the inputs before the sequence
//     y[t, d] = bias[d] + sum over k < WIDTH of weight[d, k] * (h, x)[t + k, d]
//     x[t, d] = T(y * sigmoid(y)) if SILU, else T(y)
//     conv_state[slot] = the last WIDTH - 1 of (h, x)
//
// start is 0. With IS_SPECULATIVE, start is num_accepted_tokens[b] - 1, and the state becomes the last WIDTH - 2 of h
// and then all of x, so that the next call can begin after any of these tokens.
//
// HAS_BLOCKS (prefix caching): the sequence has a row of slots in conv_state_indices. h comes from column
// initial_state_idx[b], the state goes to column block_idx_last_scheduled_token[b].
//
// A sequence is skipped if it has no tokens, or if the slot of h does not exist or is pad_slot_id. A state that would
// go to such a slot is not written.
//
// Threads: a thread takes VEC_SIZE channels of a sequence and walks along its tokens (causal_conv1d.cuh). No other
// thread touches these channels of the sequence's slots.
//
// Constants
//     weight_t        element type of weight and bias
//     index_t         element type of all tensors of integers
//     WIDTH           taps of a channel
//     WEIGHT_VEC      elements in one access to weight; divides VEC_SIZE * WIDTH
//     HAS_BIAS, HAS_INDICES   false when bias, conv_state_indices is null
//     HAS_STARTS      query_start_loc says where sequences begin; else each has seq_len tokens
//     HAS_BLOCKS      prefix caching
//     IS_SPECULATIVE  num_accepted_tokens is given
//     SILU            apply the activation

#include "causal_conv1d.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int HISTORY = WIDTH - 1;

// Each block prefetches its weights and, if their address does not depend on query_start_loc, its inputs.
DEVICE void prefetch_inputs(const scalar_t* x, const weight_t* weight, int64_t dim, int64_t num_groups,
                            int64_t x_sequence_stride, int64_t x_channel_stride) {
    const int64_t channel = (blockIdx.x % uint32_t(num_groups) * NUM_THREADS + threadIdx.x) * VEC_SIZE;
    if (channel >= dim) return;
    prefetch_line(weight + channel * WIDTH);
    if (!HAS_STARTS) {
        prefetch_line(x + blockIdx.x / uint32_t(num_groups) * x_sequence_stride + channel * x_channel_stride);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
causal_conv1d_decode(scalar_t* x,                         // [num_seqs, seq_len, dim] or [num_tokens, dim], any strides
                     scalar_t* conv_state,                // [num_slots, state_len, dim]
                     const weight_t* weight,              // [dim, WIDTH]
                     const weight_t* bias,                // [dim]
                     const index_t* conv_state_indices,   // [num_seqs, max_blocks]
                     const index_t* num_accepted_tokens,  // [num_seqs]
                     const index_t* query_start_loc,      // [num_seqs + 1]
                     const index_t* block_idx_last_scheduled_token,  // [num_seqs]
                     const index_t* initial_state_idx,               // [num_seqs]
                     int64_t dim, int64_t num_groups, int64_t seq_len, int64_t num_tokens, int64_t num_slots,
                     int64_t state_len, int64_t max_blocks, int64_t indices_stride, int64_t pad_slot_id,
                     int64_t x_sequence_stride, int64_t x_token_stride, int64_t x_channel_stride, int64_t slot_stride,
                     int64_t state_channel_stride, int64_t state_stride) {
    prefetch_inputs(x, weight, dim, num_groups, x_sequence_stride, x_channel_stride);
    await_previous_kernel();
    const int64_t sequence = blockIdx.x / uint32_t(num_groups), group = blockIdx.x % uint32_t(num_groups);
    const int64_t channel = (group * NUM_THREADS + threadIdx.x) * VEC_SIZE;
    if (channel >= dim) return;
    const Slots<index_t, HAS_INDICES> slots{conv_state_indices + sequence * indices_stride, sequence, max_blocks,
                                            num_slots, pad_slot_id};
    const int64_t initial_slot = slots.at(HAS_BLOCKS ? int64_t(initial_state_idx[sequence]) : 0);
    const int64_t accepted = IS_SPECULATIVE ? int64_t(num_accepted_tokens[sequence]) : 1;
    const auto taps = Taps<WIDTH, VEC_SIZE>::load<WEIGHT_VEC, HAS_BIAS>(weight, bias, channel);
    int64_t begin = 0, count = seq_len;
    if constexpr (HAS_STARTS) {
        begin = clamp(query_start_loc[sequence], num_tokens);
        count = clamp(query_start_loc[sequence + 1], num_tokens) - begin;
    }
    const int64_t final_slot = HAS_BLOCKS ? slots.at(block_idx_last_scheduled_token[sequence]) : initial_slot;
    if (initial_slot < 0 || count <= 0) return;
    x += sequence * x_sequence_stride + begin * x_token_stride + channel * x_channel_stride;
    conv_state += channel * state_channel_stride;
    scalar_t* state = conv_state + final_slot * slot_stride;

    const int64_t start = min(max(accepted, int64_t(1)) - 1, state_len - HISTORY);
    Window<WIDTH, VEC_SIZE> window;
    window.load(conv_state + initial_slot * slot_stride + start * state_stride, state_stride, [](int) { return true; });
    if (IS_SPECULATIVE && final_slot >= 0) window.store(state, state_stride, 1);
    convolve<BATCH, SILU, scalar_t>(
        window, taps, int(count), [=](int i) { return vec_t::load(x + i * x_token_stride); },
        [=](int i, const vec_t& input, const vec_t& y) {
            y.store(x + i * x_token_stride);
            const int column = HISTORY - 1 + i;
            if (IS_SPECULATIVE && final_slot >= 0 && column < state_len) input.store(state + column * state_stride);
        });
    if (!IS_SPECULATIVE && final_slot >= 0) window.store(state, state_stride);
}
