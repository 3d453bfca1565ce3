// causal_conv1d_states.cuh: the state updates of a convolution over sequences, done by extra blocks of its launch.
//
//     h = conv_states[slot, 0 ... WIDTH - 2, d] if has_initial_state[b], else zeros: the inputs before sequence b
//     out[t, d] for the first WIDTH - 1 tokens of b, if has_initial_state[b]: the other blocks leave them out
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
// Threads: a thread takes STATE_VEC channels of a sequence. No other thread touches these channels of the sequence's
// slots, so the thread reads the state before it is overwritten.

#pragma once
#include "causal_conv1d.cuh"

constexpr int HISTORY = WIDTH - 1;
constexpr int STATE_BATCH = 2;                   // block boundaries of a thread in flight
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

// The arguments of the op that have to do with states, and where tokens lie. Constants as causal_conv1d_tokens.cu has
// them.
template <int STATE_VEC, int STATE_WEIGHT_VEC, bool HAS_STATES, bool HAS_INDICES, bool HAS_INITIAL, bool HAS_COMPUTED,
          bool HAS_BLOCKS>
struct SequenceStates {
    scalar_t *out, *conv_states;
    const scalar_t* x;
    const weight_t *weight, *bias;
    const index_t *query_start_loc, *cache_indices;
    const bool* has_initial_state;
    const index_t *of_first, *of_last, *of_initial, *num_computed_tokens;
    int64_t num_tokens, dim, num_slots, max_blocks, indices_stride, block_size_to_align, pad_slot_id;
    int64_t x_token_stride, x_channel_stride, out_token_stride, out_channel_stride;
    int64_t slot_stride, state_channel_stride, state_stride;

    DEVICE Slots<index_t, HAS_INDICES> slots_of(int64_t sequence) const {
        return {cache_indices + sequence * indices_stride, sequence, max_blocks, num_slots, pad_slot_id};
    }
    DEVICE int64_t initial_slot(int64_t sequence) const {
        return slots_of(sequence).at(HAS_BLOCKS ? int64_t(of_initial[sequence]) : 0);
    }
    // Whether the first tokens of a sequence have a state before them.
    DEVICE bool continues(int64_t sequence) const {
        return HAS_STATES && HAS_INITIAL && has_initial_state[sequence] && initial_slot(sequence) >= 0;
    }

    // The state of one sequence, and the results of its first tokens: of STATE_VEC channels.
    DEVICE void update(int64_t sequence, int64_t channel) const {
        using vec_t = Vec<scalar_t, STATE_VEC>;
        const auto slots = slots_of(sequence);
        const int64_t slot_before = initial_slot(sequence);
        if (channel >= dim || slot_before < 0) return;
        const int64_t begin = clamp(query_start_loc[sequence], num_tokens);
        const int64_t count = clamp(query_start_loc[sequence + 1], num_tokens) - begin;
        if (count <= 0) return;
        const bool has_state = continues(sequence);
        scalar_t* const states = conv_states + channel * state_channel_stride;
        const scalar_t* const inputs_of = x + begin * x_token_stride + channel * x_channel_stride;
        scalar_t* const results = out + begin * out_token_stride + channel * out_channel_stride;

        Window<WIDTH, STATE_VEC> window;
        window.load(states + slot_before * slot_stride, state_stride, [=](int) { return has_state; });
        Boundaries boundaries{1, 0, 0, 0};
        int64_t final_slot = slot_before;
        if constexpr (HAS_BLOCKS) {
            const int64_t computed = HAS_COMPUTED ? clamp(num_computed_tokens[sequence], MAX_INDEX) : 0;
            const int64_t last_column = clamp(of_last[sequence], MAX_INDEX);
            const int64_t first_column = clamp(of_first[sequence], MAX_INDEX);
            const int64_t at_end = (computed + count - 1) / block_size_to_align * block_size_to_align;
            boundaries = {block_size_to_align, at_end - computed, last_column, first_column};
            final_slot = slots.at(last_column);
        }
        const auto save_window = [&](int64_t slot) {
            if (slot >= 0) window.store(states + slot * slot_stride, state_stride);
        };
        // The first tokens, because their windows reach back to h.
        const auto taps = Taps<WIDTH, STATE_VEC>::template load<STATE_WEIGHT_VEC, HAS_BIAS>(weight, bias, channel);
        convolve<HISTORY, SILU, scalar_t>(
            window, taps, int(min(count, int64_t(HISTORY))),
            [&](int i) { return vec_t::load(inputs_of + i * x_token_stride); },
            [&](int i, const vec_t&, const vec_t& y) {
                if (has_state) y.store(results + i * out_token_stride);
                if (i + 1 == count) save_window(final_slot);
                if constexpr (HAS_BLOCKS) save_window(slots.at(boundaries.column(i + 1)));
            });

        // Windows of inputs of the sequence alone, each the last inputs of its first `tokens` tokens.
        const auto load_inputs = [&](vec_t(&inputs)[HISTORY], int64_t tokens) {
#pragma unroll
            for (int k = 0; k < HISTORY; ++k)
                inputs[k] = vec_t::load(inputs_of + (tokens - HISTORY + k) * x_token_stride);
        };
        const auto save_inputs = [&](const vec_t(&inputs)[HISTORY], int64_t slot) {
#pragma unroll
            for (int k = 0; k < HISTORY; ++k) inputs[k].store(states + slot * slot_stride + k * state_stride);
        };
        if constexpr (HAS_BLOCKS) {
            // The range of i where the column exists and the window holds only inputs of the sequence.
            const int64_t first = max(boundaries.last_column - max_blocks, int64_t(0));
            const int64_t last = min(boundaries.last_column - boundaries.first_column - 1,
                                     (boundaries.last_boundary - HISTORY - 1) / block_size_to_align);
            for (int64_t start = first; boundaries.last_boundary > HISTORY && start <= last; start += STATE_BATCH) {
                vec_t inputs[STATE_BATCH][HISTORY];
                int64_t slot[STATE_BATCH];
#pragma unroll
                for (int b = 0; b < STATE_BATCH; ++b) {
                    slot[b] = start + b <= last ? slots.at(boundaries.last_column - 1 - start - b) : -1;
                    if (slot[b] >= 0)
                        load_inputs(inputs[b], boundaries.last_boundary - (start + b) * block_size_to_align);
                }
#pragma unroll
                for (int b = 0; b < STATE_BATCH; ++b) {
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

    // Blocks are numbered, `groups` of NUM_THREADS threads to a sequence.
    DEVICE void update_by_block(int64_t block, int64_t groups) const {
        update(uint32_t(block) / uint32_t(groups),
               (uint32_t(block) % uint32_t(groups) * NUM_THREADS + threadIdx.x) * STATE_VEC);
    }
};
