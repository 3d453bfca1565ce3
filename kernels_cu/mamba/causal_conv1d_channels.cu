// causal_conv1d_channels: causal convolution of sequences stored channel-major: rows of the matrix are channels.
//
//     y[d, t] = bias[d] + sum over k < WIDTH of weight[d, k] * x[d, t - HISTORY + k]
//     out[d, t] = T(y * sigmoid(y)) if SILU, else T(y)
//
// Sequence b has the tokens query_start_loc[b] <= t < query_start_loc[b + 1]. What lies before its first token counts
// as 0 here: the first blocks do the tokens that need a state (causal_conv1d_states.cuh). Tokens of no sequence get 0.
//
// Threads: a thread takes VEC_SIZE adjacent tokens of `channels` channels, BATCH channels at a time. Adjacent threads
// take adjacent tokens. A thread also loads the vectors of the threads before it, for the inputs before its first
// token.
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
//     WEIGHT_VEC    elements in one access to weight; divides WIDTH
//     HAS_BIAS      false when bias is null
//     SILU          apply the activation

#include "causal_conv1d_states.cuh"
#include "paged.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
using states_t =
    SequenceStates<STATE_VEC, STATE_WEIGHT_VEC, HAS_STATES, HAS_INDICES, HAS_INITIAL, HAS_COMPUTED, HAS_BLOCKS>;
constexpr int EARLIER_VECS = ceil_div(HISTORY, VEC_SIZE);  // vectors of earlier tokens that a thread also loads
constexpr int EARLIER = EARLIER_VECS * VEC_SIZE;

// For each token of a thread: how many inputs before the token belong to the token's sequence, HISTORY at most. -1
// stands for a token of no sequence, -2 for one that needs a state.
struct Reach {
    int before[VEC_SIZE];
    bool whole = true;  // every token has all HISTORY inputs before it

    DEVICE Reach(const states_t& states, const index_t* query_start_loc, int64_t num_seqs, int64_t first) {
        int64_t sequence = count_up_to(query_start_loc + 1, num_seqs, 1, first), begin = 0, end = 0;
        const auto read = [&] {
            if (sequence >= num_seqs) return;
            begin = max(int64_t(query_start_loc[sequence]), int64_t(0));
            end = query_start_loc[sequence + 1];
        };
        read();
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            const int64_t t = first + j;
            for (; sequence < num_seqs && end <= t; read()) ++sequence;
            before[j] = sequence >= num_seqs || t < begin ? -1 : int(min(t - begin, int64_t(HISTORY)));
            if (before[j] >= 0 && before[j] < HISTORY && states.continues(sequence)) before[j] = -2;
            whole = whole && before[j] == HISTORY;
        }
    }
    DEVICE bool needs_state() const {
        bool any = false;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) any = any || before[j] == -2;
        return any;
    }
};

// The results of one channel. `x` holds the EARLIER inputs before the first token, then those of the tokens.
template <bool WHOLE>
DEVICE vec_t convolved(const float (&x)[EARLIER + VEC_SIZE], const Taps<WIDTH, 1>& taps, const Reach& reach) {
    float y[VEC_SIZE];
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) {
        float sum = taps.bias[0];
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            const float input = x[EARLIER + j - HISTORY + k];
            sum = fmaf(taps.at(0, k), WHOLE || k + reach.before[j] >= HISTORY ? input : 0.0f, sum);
        }
        y[j] = activated<SILU, scalar_t>(sum);
        if (!WHOLE && reach.before[j] < 0) y[j] = 0.0f;
    }
    return vec_t::from_floats(y);
}

// Convolves the channels `channel` ... `end` - 1 for the thread's tokens; column 0 of x and out is its first token.
template <bool WHOLE>
DEVICE void
convolve_channels(scalar_t* out, const scalar_t* x, const weight_t* weight, const weight_t* bias, const Reach& reach,
                  int64_t first, int64_t channel, int64_t end, int64_t x_stride, int64_t out_stride) {
    for (; channel < end; channel += BATCH) {
        vec_t vecs[BATCH][EARLIER_VECS + 1];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            // Past the last channel, the last one is loaded again: an unconditional load is not waited for here.
            const scalar_t* row = x + min(channel + b, end - 1) * x_stride;
#pragma unroll
            for (int i = 0; i <= EARLIER_VECS; ++i) {
                const int offset = i * VEC_SIZE - EARLIER;
                if (WHOLE || first + offset >= 0) vecs[b][i] = vec_t::load(row + offset);
                else vecs[b][i] = vec_t::full(0.0f);
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (channel + b >= end) break;
            const auto taps = Taps<WIDTH, 1>::load<WEIGHT_VEC, HAS_BIAS>(weight, bias, channel + b);
            float inputs[EARLIER + VEC_SIZE];
#pragma unroll
            for (int i = 0; i <= EARLIER_VECS; ++i) {
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) inputs[i * VEC_SIZE + j] = vecs[b][i][j];
            }
            const vec_t results = convolved<WHOLE>(inputs, taps, reach);
            scalar_t* const to = out + (channel + b) * out_stride;
            if (WHOLE || !reach.needs_state()) {
                results.store(to);
            } else {
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) {
                    if (reach.before[j] != -2) to[j] = results.data[j];
                }
            }
        }
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
causal_conv1d_channels(scalar_t* out,                                   // [dim, num_tokens]
                       scalar_t* conv_states,                           // [num_slots, state_len, dim], or null
                       const scalar_t* x,                               // [dim, num_tokens]
                       const weight_t* weight,                          // [dim, WIDTH]
                       const weight_t* bias,                            // [dim]
                       const index_t* query_start_loc,                  // [num_seqs + 1]
                       const index_t* cache_indices,                    // [num_seqs, max_blocks]
                       const bool* has_initial_state,                   // [num_seqs]
                       const index_t* block_idx_first_scheduled_token,  // [num_seqs]
                       const index_t* block_idx_last_scheduled_token,   // [num_seqs]
                       const index_t* initial_state_idx,                // [num_seqs]
                       const index_t* num_computed_tokens,              // [num_seqs]
                       int64_t num_tokens, int64_t dim, int64_t num_seqs, int64_t state_groups, int64_t channels,
                       int64_t num_slots, int64_t max_blocks, int64_t indices_stride, int64_t block_size_to_align,
                       int64_t pad_slot_id, int64_t x_stride, int64_t out_stride, int64_t slot_stride,
                       int64_t state_channel_stride, int64_t state_stride) {
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
                          1,
                          x_stride,
                          1,
                          out_stride,
                          slot_stride,
                          state_channel_stride,
                          state_stride};
    const int64_t state_blocks = HAS_STATES ? num_seqs * state_groups : 0, block = blockIdx.x - state_blocks;
    if (HAS_STATES && block < 0) return states.update_by_block(blockIdx.x, state_groups);
    const int64_t row_vecs = num_tokens / VEC_SIZE;
    const int64_t thread = block * NUM_THREADS + threadIdx.x;
    const int64_t group = thread / row_vecs, first = thread % row_vecs * VEC_SIZE;
    const int64_t end = min((group + 1) * channels, dim);
    if (group * channels >= dim) return;
    const Reach reach(states, query_start_loc, num_seqs, first);
    x += first;
    out += first;
    // Whole tokens have all vectors before theirs.
    if (reach.whole) {
        convolve_channels<true>(out, x, weight, bias, reach, first, group * channels, end, x_stride, out_stride);
    } else {
        convolve_channels<false>(out, x, weight, bias, reach, first, group * channels, end, x_stride, out_stride);
    }
}
