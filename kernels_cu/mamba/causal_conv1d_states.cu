// causal_conv1d_states: what a convolution of sequences has to do with states, after the convolution itself.
//
//     h = conv_states[slot, 0 ... WIDTH - 2, d] if has_initial_state[b], else zeros: the inputs before sequence b
//     out[t, d] anew for the first WIDTH - 1 tokens of b, if has_initial_state[b], with h in the place of zeros
//     conv_states[slot at the end] = the last WIDTH - 1 of (h, inputs of b)
//
// HAS_BLOCKS (prefix caching): the sequence has a row of slots in cache_indices. h comes from column
// initial_state_idx[b], the last inputs go to column block_idx_last_scheduled_token[b] = last. For i = 0, 1, ..., the
// WIDTH - 1 inputs before the i-th block boundary, counted backwards from the last one before the end, go to column
// last - 1 - i, down to column block_idx_first_scheduled_token[b]. At a boundary, num_computed_tokens[b] + tokens of b
// before it is a multiple of block_size_to_align.
//
// A sequence is skipped if it has no tokens, or if the slot of h does not exist or is pad_slot_id. Inputs that would go
// to such a slot are not kept.
//
// Threads: a thread takes VEC_SIZE channels of a sequence. No other thread touches these channels of the sequence's
// slots, so the thread reads the state before it is overwritten.
//
// Constants
//     weight_t      element type of weight and bias
//     index_t       element type of all tensors of integers
//     WIDTH         taps of a channel
//     WEIGHT_VEC    elements in one access to weight; divides VEC_SIZE * WIDTH
//     HAS_BIAS, HAS_INDICES, HAS_INITIAL   false when bias, cache_indices, has_initial_state is null
//     HAS_COMPUTED  false when num_computed_tokens is null, which stands for zeros
//     HAS_BLOCKS    prefix caching
//     SILU          apply the activation

#include "causal_conv1d.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int HISTORY = WIDTH - 1;
constexpr int64_t MAX_INDEX = int64_t(1) << 40;  // beyond every column and every count of tokens

// The columns of the block boundaries in a sequence. A boundary is a number of tokens of the sequence before it.
struct Boundaries {
    int64_t block_size, last_boundary, last_column, first_column;

    // The column of boundary `tokens`; -1 if `tokens` is no boundary or has no column.
    DEVICE int64_t column(int64_t tokens) const {
        const int64_t behind = last_boundary - tokens;
        if (tokens < 1 || behind < 0 || behind % block_size) return -1;
        const int64_t column = last_column - 1 - behind / block_size;
        return column < first_column ? -1 : column;
    }
};

// The convolution before this kernel has swept all this out of L2.
DEVICE void prefetch_inputs(const weight_t* weight, const index_t* query_start_loc, const index_t* cache_indices,
                            int64_t dim, int64_t num_groups, int64_t indices_stride) {
    const int64_t sequence = blockIdx.x / uint32_t(num_groups), group = blockIdx.x % uint32_t(num_groups);
    const int64_t channel = (group * NUM_THREADS + threadIdx.x) * VEC_SIZE;
    if (channel < dim) prefetch_line(weight + channel * WIDTH);
    if (threadIdx.x) return;
    prefetch_line(query_start_loc + sequence);
    if (HAS_INDICES) prefetch_line(cache_indices + sequence * indices_stride);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
causal_conv1d_states(scalar_t* out,                                   // [num_tokens, dim] or [dim, num_tokens]
                     scalar_t* conv_states,                           // [num_slots, state_len, dim]
                     const scalar_t* x,                               // as out
                     const weight_t* weight,                          // [dim, WIDTH]
                     const weight_t* bias,                            // [dim]
                     const index_t* query_start_loc,                  // [num_seqs + 1]
                     const index_t* cache_indices,                    // [num_seqs, max_blocks]
                     const bool* has_initial_state,                   // [num_seqs]
                     const index_t* block_idx_first_scheduled_token,  // [num_seqs]
                     const index_t* block_idx_last_scheduled_token,   // [num_seqs]
                     const index_t* initial_state_idx,                // [num_seqs]
                     const index_t* num_computed_tokens,              // [num_seqs]
                     int64_t num_tokens, int64_t dim, int64_t num_groups, int64_t num_slots, int64_t max_blocks,
                     int64_t indices_stride, int64_t block_size_to_align, int64_t pad_slot_id, int64_t x_token_stride,
                     int64_t x_channel_stride, int64_t out_token_stride, int64_t out_channel_stride,
                     int64_t slot_stride, int64_t state_channel_stride, int64_t state_stride) {
    prefetch_inputs(weight, query_start_loc, cache_indices, dim, num_groups, indices_stride);
    await_previous_kernel();
    const int64_t sequence = blockIdx.x / uint32_t(num_groups), group = blockIdx.x % uint32_t(num_groups);
    const int64_t channel = (group * NUM_THREADS + threadIdx.x) * VEC_SIZE;
    if (channel >= dim) return;
    const Slots<index_t, HAS_INDICES> slots{cache_indices + sequence * indices_stride, sequence, max_blocks, num_slots,
                                            pad_slot_id};
    const int64_t initial_slot = slots.at(HAS_BLOCKS ? int64_t(initial_state_idx[sequence]) : 0);
    if (initial_slot < 0) return;
    const int64_t begin = clamp(query_start_loc[sequence], num_tokens);
    const int64_t count = clamp(query_start_loc[sequence + 1], num_tokens) - begin;
    if (count <= 0) return;
    const bool continues = HAS_INITIAL && has_initial_state[sequence];
    conv_states += channel * state_channel_stride;
    x += begin * x_token_stride + channel * x_channel_stride;
    out += begin * out_token_stride + channel * out_channel_stride;

    Window<WIDTH, VEC_SIZE> window;
    window.load(conv_states + initial_slot * slot_stride, state_stride, [=](int) { return continues; });
    Boundaries boundaries{1, 0, 0, 0};
    int64_t final_slot = initial_slot;
    if constexpr (HAS_BLOCKS) {
        const int64_t computed = HAS_COMPUTED ? clamp(num_computed_tokens[sequence], MAX_INDEX) : 0;
        const int64_t last_column = clamp(block_idx_last_scheduled_token[sequence], MAX_INDEX);
        const int64_t first_column = clamp(block_idx_first_scheduled_token[sequence], MAX_INDEX);
        const int64_t at_end = (computed + count - 1) / block_size_to_align * block_size_to_align;
        boundaries = {block_size_to_align, at_end - computed, last_column, first_column};
        final_slot = slots.at(last_column);
    }
    const auto save_window = [&](int64_t slot) {
        if (slot >= 0) window.store(conv_states + slot * slot_stride, state_stride);
    };
    // The first tokens, whose windows reach back to h.
    const auto taps = Taps<WIDTH, VEC_SIZE>::load<WEIGHT_VEC, HAS_BIAS>(weight, bias, channel);
    convolve<HISTORY, SILU, scalar_t>(
        window, taps, int(min(count, int64_t(HISTORY))), [=](int i) { return vec_t::load(x + i * x_token_stride); },
        [&](int i, const vec_t&, const vec_t& y) {
            if (continues) y.store(out + i * out_token_stride);
            if (i + 1 == count) save_window(final_slot);
            if constexpr (HAS_BLOCKS) save_window(slots.at(boundaries.column(i + 1)));
        });

    // Windows of inputs of the sequence alone, each the last inputs of its first `tokens` tokens.
    const auto load_inputs = [&](vec_t(&inputs)[HISTORY], int64_t tokens) {
#pragma unroll
        for (int k = 0; k < HISTORY; ++k) inputs[k] = vec_t::load(x + (tokens - HISTORY + k) * x_token_stride);
    };
    const auto save_inputs = [&](const vec_t(&inputs)[HISTORY], int64_t slot) {
#pragma unroll
        for (int k = 0; k < HISTORY; ++k) inputs[k].store(conv_states + slot * slot_stride + k * state_stride);
    };
    if constexpr (HAS_BLOCKS) {
        // The smallest and the largest i whose column exists and whose window holds inputs of the sequence alone.
        const int64_t first = max(boundaries.last_column - max_blocks, int64_t(0));
        const int64_t last = min(boundaries.last_column - boundaries.first_column - 1,
                                 (boundaries.last_boundary - HISTORY - 1) / block_size_to_align);
        for (int64_t start = first; boundaries.last_boundary > HISTORY && start <= last; start += BATCH) {
            vec_t inputs[BATCH][HISTORY];
            int64_t slot[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                slot[b] = start + b <= last ? slots.at(boundaries.last_column - 1 - start - b) : -1;
                if (slot[b] >= 0) load_inputs(inputs[b], boundaries.last_boundary - (start + b) * block_size_to_align);
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (slot[b] >= 0) save_inputs(inputs[b], slot[b]);
            }
        }
    }
    if (count > HISTORY && final_slot >= 0) {
        vec_t inputs[HISTORY];
        load_inputs(inputs, count);
        save_inputs(inputs, final_slot);
    }
}
