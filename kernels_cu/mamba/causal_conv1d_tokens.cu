// causal_conv1d_tokens: causal convolution of sequences stored token-major: rows of the matrix are tokens.
//
//     y[t, d] = bias[d] + sum over k < WIDTH of weight[d, k] * x[t - (WIDTH - 1) + k, d]
//     out[t, d] = T(y * sigmoid(y)) if SILU, else T(y)
//
// Sequence b has the tokens query_start_loc[b] <= t < query_start_loc[b + 1]. What lies before its first token counts
// as 0 here: the first blocks do the tokens that need a state (causal_conv1d_states.cuh). Tokens of no sequence get 0.
//
// Threads: a block takes `tile_size` tokens of NUM_THREADS * VEC_SIZE channels; a thread walks along the tokens with
// VEC_SIZE channels (causal_conv1d.cuh). Adjacent blocks take adjacent channels of the same tokens.
//
// Constants
//     weight_t      element type of weight and bias
//     index_t       element type of all tensors of integers
//     HAS_STATES, HAS_INDICES, HAS_INITIAL, HAS_COMPUTED   false when conv_states, cache_indices, has_initial_state,
//                   num_computed_tokens is null
//     HAS_BLOCKS    prefix caching (causal_conv1d_states.cuh)
//     STATE_VEC     channels of a thread that has states
//     STATE_WEIGHT_VEC   elements in its accesses to weight; divides STATE_VEC * WIDTH
//     WIDTH         taps of a channel
//     WEIGHT_VEC    elements in one access to weight; divides VEC_SIZE * WIDTH
//     HAS_BIAS      false when bias is null
//     SILU          apply the activation

#include "causal_conv1d_states.cuh"
#include "paged.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
using states_t =
    SequenceStates<STATE_VEC, STATE_WEIGHT_VEC, HAS_STATES, HAS_INDICES, HAS_INITIAL, HAS_COMPUTED, HAS_BLOCKS>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
causal_conv1d_tokens(scalar_t* out,                                   // [num_tokens, dim]
                     scalar_t* conv_states,                           // [num_slots, state_len, dim], or null
                     const scalar_t* x,                               // [num_tokens, dim]
                     const weight_t* weight,                          // [dim, WIDTH]
                     const weight_t* bias,                            // [dim]
                     const index_t* query_start_loc,                  // [num_seqs + 1]
                     const index_t* cache_indices,                    // [num_seqs, max_blocks]
                     const bool* has_initial_state,                   // [num_seqs]
                     const index_t* block_idx_first_scheduled_token,  // [num_seqs]
                     const index_t* block_idx_last_scheduled_token,   // [num_seqs]
                     const index_t* initial_state_idx,                // [num_seqs]
                     const index_t* num_computed_tokens,              // [num_seqs]
                     int64_t num_tokens, int64_t dim, int64_t num_seqs, int64_t state_groups, int64_t tile_size,
                     int64_t num_groups, int64_t num_slots, int64_t max_blocks, int64_t indices_stride,
                     int64_t block_size_to_align, int64_t pad_slot_id, int64_t x_stride, int64_t out_stride,
                     int64_t slot_stride, int64_t state_channel_stride, int64_t state_stride) {
    await_previous_kernel();
    const states_t states{out,
                          conv_states,
                          x,
                          weight,
                          bias,
                          query_start_loc,
                          cache_indices,
                          has_initial_state,
                          block_idx_first_scheduled_token,
                          block_idx_last_scheduled_token,
                          initial_state_idx,
                          num_computed_tokens,
                          num_tokens,
                          dim,
                          num_slots,
                          max_blocks,
                          indices_stride,
                          block_size_to_align,
                          pad_slot_id,
                          x_stride,
                          1,
                          out_stride,
                          1,
                          slot_stride,
                          state_channel_stride,
                          state_stride};
    const int64_t state_blocks = HAS_STATES ? num_seqs * state_groups : 0, block = blockIdx.x - state_blocks;
    if (HAS_STATES && block < 0) return states.update_by_block(blockIdx.x, state_groups);
    const int64_t tile = uint32_t(block) / uint32_t(num_groups), group = uint32_t(block) % uint32_t(num_groups);
    const int64_t channel = (group * NUM_THREADS + threadIdx.x) * VEC_SIZE;
    if (channel >= dim) return;
    const auto taps = Taps<WIDTH, VEC_SIZE>::load<WEIGHT_VEC, HAS_BIAS>(weight, bias, channel);
    // Tokens are counted from the first of the tile; none is needed that lies before its window.
    const int64_t origin = tile * tile_size;
    const int last = int(min(tile_size, num_tokens - origin));
    const auto place = [=](int64_t token) { return int(min(max(token, origin - HISTORY), origin + last) - origin); };
    x += origin * x_stride + channel;
    out += origin * out_stride + channel;
    int64_t sequence = count_up_to(query_start_loc + 1, num_seqs, 1, origin);
    for (int t = 0; t < last;) {
        int begin = last, end = last;  // one past the last sequence
        if (sequence < num_seqs) {
            begin = place(max(int64_t(query_start_loc[sequence]), int64_t(0)));
            end = place(query_start_loc[sequence + 1]);
        }
        for (; t < begin; ++t) vec_t::full(0.0f).store(out + t * out_stride);
        const bool needs_state = t < min(begin + HISTORY, end) && states.continues(sequence);
        if (needs_state) t = min(begin + HISTORY, end);
        ++sequence;
        if (t >= end) continue;
        Window<WIDTH, VEC_SIZE> window;
        const int oldest = t - HISTORY;
        window.load(x + oldest * x_stride, x_stride, [=](int k) { return oldest + k >= begin; });
        const scalar_t* from = x + t * x_stride;
        scalar_t* to = out + t * out_stride;
        convolve<BATCH, SILU, scalar_t>(
            window, taps, end - t,
            [&](int) {
                const vec_t input = vec_t::load_once(from);
                from += x_stride;
                return input;
            },
            [&](int, const vec_t&, const vec_t& y) {
                y.store(to);
                to += out_stride;
            });
        t = end;
    }
}
