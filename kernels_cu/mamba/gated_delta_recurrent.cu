// gated_delta_recurrent: the gated delta rule, token by token, in float32.
//
//     S_l = exp(g_l) S_{l-1} + b_l (v_l - exp(g_l) S_{l-1} k_l) (outer) k_l,    o_l = T(scale * S_l q_l)
//
// S has a row for each element of v and a column for each element of k. g_l is a number, or with CHANNEL_DECAYS has an
// element for each column. With QK_NORM, q and k are first divided by sqrt(their sum of squares + 1e-6). (Yang et al.
// 2024, arXiv:2412.06464; with a decay for each column: Kimi Team 2025, arXiv:2510.26692)
//
// Blocks: blockIdx.x counts sequences, value heads and tiles of ROWS rows. LANES threads share four rows, and a thread
// holds every LANES-th run of four columns of them, so that an access takes adjacent elements of either order. Adjacent
// threads take adjacent elements: runs of the same rows, or the same columns of the next rows. In the second case the
// threads of a row are in all warps, and add their totals through shared memory. Tiles of TOKENS tokens are staged in
// shared memory.
//
// SLOTS: sequence i begins with the state in slot indices[i, max(accepted[i], 1) - 1]. PER_TOKEN: the state after token
// t goes to slot indices[i, t]; otherwise the last state goes back to its slot. A sequence is skipped if its first slot
// is out of range; a state is not stored if its slot is out of range. Without SLOTS, sequence i has state i, and a
// sequence without tokens keeps it.
//
// Constants
//     scalar_t       T: element type of q, k, v and o
//     g_t, beta_t, initial_t, state_t    element types of g, beta, initial_state, and state or final_state
//     starts_t, index_t, accepted_t      element types of cu_seqlens, ssm_state_indices and num_accepted_tokens
//     KEY_SIZE, VALUE_SIZE    elements of a head of k and of v
//     STATE_V_FIRST  the columns of a row of the state are contiguous, otherwise the rows of a column
//     LANES, ROWS    threads of a row and rows of a block, powers of two; with STATE_V_FIRST LANES is at most a warp
//     STATE_VEC      elements of a state in one memory access: 4 or 1
//     QK_NORM, SLOTS, PER_TOKEN, CHANNEL_DECAYS    as above
//     PREFETCH       states are prefetched into L2 before the previous kernel ends
//     CHECKPOINTS    the state after the first checkpoint_offsets[i] tokens of sequence i goes to checkpoint_state[i]
//     checkpoint_t, offset_t    element types of checkpoint_state and checkpoint_offsets
//     A_t, bias_t, HAS_GATE, BOUNDED, BETA_SIGMOID    of delta_gate.cuh; A_log and dt_bias have the types A_t and bias_t

#include "delta_gate.cuh"
#include "gated_delta_norm.cuh"
#include "reduce.cuh"
#include "vec.cuh"

constexpr int VALUES = 4;  // rows of a thread
constexpr int TOKENS = 8, GROUPS = ROWS / VALUES, NUM_THREADS = LANES * GROUPS, TILES = ceil_div(VALUE_SIZE, ROWS);
constexpr int RUNS = ceil_div(KEY_SIZE, 4 * LANES);  // runs of columns per thread
constexpr int KEYS = RUNS * 4 * LANES;               // columns, padded to whole runs of all threads of a row
constexpr int DECAYS = CHANNEL_DECAYS ? KEYS : 1;    // decays of a token
constexpr int ROW_STRIDE = STATE_V_FIRST ? KEY_SIZE : 1, COLUMN_STRIDE = STATE_V_FIRST ? 1 : VALUE_SIZE;
constexpr int WARPS = NUM_THREADS / WARP_SIZE;

template <typename T, int N>
DEVICE void store_floats(T* to, const float (&x)[N]) {
    Vec<T, N>::from_floats(x).store(to);
}

// The first row of a thread, its number among the threads of the row, its column i, and where it holds an element.
DEVICE int row_of(int thread) { return (STATE_V_FIRST ? thread / LANES : thread % GROUPS) * VALUES; }
DEVICE int lane_of(int thread) { return STATE_V_FIRST ? thread % LANES : thread / GROUPS; }
DEVICE int column_of(int i, int lane) { return (i / 4 * LANES + lane) * 4 + i % 4; }
DEVICE constexpr int place_of(int i, int value) { return STATE_V_FIRST ? value * 4 * RUNS + i : i * VALUES + value; }

// Adds the totals of the threads that share rows. Every thread calls it, alternately with both buffers `partial`.
DEVICE void add_lanes(float (&totals)[VALUES], float (&partial)[WARPS][ROWS]) {
    if constexpr (STATE_V_FIRST) {
#pragma unroll
        for (int n = 0; n < VALUES; ++n) totals[n] = lane_reduce<Sum, LANES>(totals[n]);
    } else {
        const int group = threadIdx.x % GROUPS, warp = threadIdx.x / WARP_SIZE;
#pragma unroll
        for (int n = 0; n < VALUES; ++n) {
#pragma unroll
            for (int distance = GROUPS; distance < WARP_SIZE; distance *= 2) totals[n] += shfl_xor(totals[n], distance);
        }
        if (threadIdx.x % WARP_SIZE < GROUPS) {
#pragma unroll
            for (int n = 0; n < VALUES; ++n) partial[warp][group * VALUES + n] = totals[n];
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < VALUES; ++n) {
            totals[n] = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) totals[n] += partial[w][group * VALUES + n];
        }
    }
}

// The sum of squares of a token's row scaled by `by`. A whole warp calls it.
DEVICE float squares(const scalar_t* from, float by) {
    float sum = 0.0f;
    for (int i = threadIdx.x % WARP_SIZE; i < KEY_SIZE; i += WARP_SIZE) {
        const float value = to_float(from[i]) * by;
        sum = fmaf(value, value, sum);
    }
    return lane_reduce<Sum, WARP_SIZE>(sum);
}

// Loads a token's row of KEY_SIZE elements to shared memory, divided by its norm and times `factor`. A whole warp calls
// it.
DEVICE void load_key(float* to, const scalar_t* from, float factor) {
    float by = 1.0f;
    if (QK_NORM) {
        float sum = squares(from, 1.0f);
        const bool is_large = CAN_BE_LARGE && sum > LARGE;
        if (is_large) {
            by = DOWN;
            sum = squares(from, DOWN);
        }
        factor *= inverse_root(sum, is_large);
    }
    for (int i = threadIdx.x % WARP_SIZE; i < KEYS; i += WARP_SIZE) {
        to[i] = i < KEY_SIZE ? to_float(from[i]) * by * factor : 0.0f;
    }
}

// Computes the decays of a token from its row of g. A whole warp calls it.
DEVICE void
load_decays(float* to, const g_t* from, int head, const A_t* A_log, const bias_t* dt_bias, float lower_bound) {
    const int lane = threadIdx.x % WARP_SIZE;
    if constexpr (!CHANNEL_DECAYS) {
        if (lane == 0) *to = expf(to_float(*from));
        return;
    }
    const DeltaGate gate{HAS_GATE ? expf(to_float(A_log[head])) : 0.0f, lower_bound};
    for (int i = lane; i < KEYS; i += WARP_SIZE) {
        const bool exists = i < KEY_SIZE;
        const float bias = exists && HAS_GATE && dt_bias ? to_float(dt_bias[head * KEY_SIZE + i]) : 0.0f;
        to[i] = expf(gate.log_decay(exists ? to_float(from[i]) : 0.0f, bias));
    }
}

// Prefetches what the block will load of a state, by a slot that it reads again after the wait.
DEVICE void prefetch_state(const state_t* state, const index_t* ssm_state_indices,
                           const accepted_t* num_accepted_tokens, int64_t value_heads, int64_t num_slots,
                           int64_t index_stride, int64_t index_columns, int64_t state_stride) {
    const unsigned item = blockIdx.x / TILES, heads = unsigned(value_heads);
    const int64_t seq = item / heads, head = item % heads, first_row = blockIdx.x % TILES * ROWS;
    int64_t column = 0;
    if (num_accepted_tokens) column = max(int64_t(load_fresh(num_accepted_tokens + seq)), int64_t(1)) - 1;
    if (column >= index_columns) return;
    const int64_t slot = ssm_state_indices ? int64_t(load_fresh(ssm_state_indices + seq * index_stride + column)) : seq;
    if (slot < 0 || slot >= num_slots) return;
    const state_t* const from = state + slot * state_stride + head * (VALUE_SIZE * KEY_SIZE) + first_row * ROW_STRIDE;
    const int rows = int(min(int64_t(ROWS), VALUE_SIZE - first_row));
    // Contiguous elements, and how far they are from the next ones.
    const int run = STATE_V_FIRST ? rows * KEY_SIZE : rows, runs = STATE_V_FIRST ? 1 : KEY_SIZE;
    constexpr int RUN_LINES = ceil_div((STATE_V_FIRST ? ROWS * KEY_SIZE : ROWS) * int(sizeof(state_t)), 128);
    for (int i = threadIdx.x; i < runs * RUN_LINES; i += NUM_THREADS) {
        prefetch_part(from + i / RUN_LINES * COLUMN_STRIDE, run - 1, i % RUN_LINES);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gated_delta_recurrent(scalar_t* o,                            // [num_tokens, value_heads, VALUE_SIZE]
                      state_t* state,                         // SLOTS: [num_slots, value_heads, VALUE_SIZE, KEY_SIZE],
                                                              // the last two in either order
                      state_t* final_state,                   // else: [num_seqs, ...], likewise
                      const initial_t* initial_state,         // likewise
                      const scalar_t* q,                      // [num_tokens, key_heads, KEY_SIZE]
                      const scalar_t* k,                      // likewise
                      const scalar_t* v,                      // [num_tokens, value_heads, VALUE_SIZE]
                      const g_t* g,                           // [num_tokens, value_heads], or with CHANNEL_DECAYS
                                                              // [num_tokens, value_heads, KEY_SIZE]
                      const beta_t* beta,                     // [num_tokens, value_heads]
                      const A_t* A_log,                       // [value_heads]
                      const bias_t* dt_bias,                  // [value_heads, KEY_SIZE]
                      const starts_t* cu_seqlens,             // [num_seqs + 1]
                      const index_t* ssm_state_indices,       // [num_seqs, index_columns]
                      const accepted_t* num_accepted_tokens,  // [num_seqs]
                      checkpoint_t* checkpoint_state,         // as final_state
                      const offset_t* checkpoint_offsets,     // [num_seqs]
                      int64_t num_tokens, int64_t seq_tokens, int64_t value_heads, int64_t heads_per_key,
                      int64_t num_slots, int64_t index_stride, int64_t index_columns, int64_t o_stride,
                      int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t g_stride, int64_t g_step,
                      int64_t beta_stride, int64_t beta_step, int64_t state_stride, float scale, float lower_bound) {
    if (SLOTS && PREFETCH) {
        prefetch_state(state, ssm_state_indices, num_accepted_tokens, value_heads, num_slots, index_stride,
                       index_columns, state_stride);
    }
    await_previous_kernel();
    __shared__ alignas(16) float keys[TOKENS][KEYS];
    __shared__ alignas(16) float queries[TOKENS][KEYS];
    __shared__ float values[TOKENS][ROWS];
    __shared__ float outputs[TOKENS][ROWS];
    __shared__ alignas(16) float kept[TOKENS][DECAYS];
    __shared__ float strengths[TOKENS];
    __shared__ float partial[2][WARPS][ROWS];
    const int lane = lane_of(threadIdx.x), row = row_of(threadIdx.x);
    const unsigned item = blockIdx.x / TILES, heads = unsigned(value_heads);
    const int head = int(item % heads), first_row = int(blockIdx.x % TILES) * ROWS;
    const int rows = VALUE_SIZE % ROWS ? min(ROWS, VALUE_SIZE - first_row) : ROWS,
              first_key = head / int(heads_per_key) * KEY_SIZE;
    const int64_t seq = item / heads;
    int64_t begin = cu_seqlens ? int64_t(cu_seqlens[seq]) : seq * seq_tokens;
    int64_t end = cu_seqlens ? int64_t(cu_seqlens[seq + 1]) : begin + seq_tokens;
    if (begin < 0 || end > num_tokens || begin > end) begin = end = 0;

    const auto slot_at = [&](int64_t column) {
        if (!SLOTS) return seq;
        if (column >= index_columns) return int64_t(-1);
        return ssm_state_indices ? int64_t(ssm_state_indices[seq * index_stride + column]) : seq;
    };
    int64_t column = 0;
    if (SLOTS && num_accepted_tokens) column = max(int64_t(num_accepted_tokens[seq]), int64_t(1)) - 1;
    const int64_t first_slot = slot_at(column);
    const auto is_slot = [&](int64_t slot) { return slot >= 0 && slot < num_slots; };
    if (SLOTS && (!is_slot(first_slot) || begin == end)) return;

    float s[RUNS * 4 * VALUES] = {};
    // Calls `visit` with each STATE_VEC adjacent elements of the thread, and their offset in a state of all heads.
    const auto each_of_state = [&](auto visit) {
        // A thread computes its addresses again for each state, so that no registers hold them meanwhile.
        const int own_row = row_of(made_anew(threadIdx.x)), own_lane = lane_of(made_anew(threadIdx.x));
        const int64_t own = int64_t(made_anew(head)) * (VALUE_SIZE * KEY_SIZE) + (first_row + own_row) * ROW_STRIDE;
#pragma unroll
        for (int i = 0; i < RUNS * 4 * VALUES; i += STATE_VEC) {
            const int column = STATE_V_FIRST ? i % (4 * RUNS) : i / VALUES, key = column_of(column, own_lane);
            const int value = STATE_V_FIRST ? i / (4 * RUNS) : i % VALUES;
            if (own_row + value < rows && key < KEY_SIZE)
                visit(&s[i], own + (value * ROW_STRIDE + key * COLUMN_STRIDE));
        }
    };
    const auto store_to = [&](auto* to) {
        each_of_state(
            [&](float* run, int64_t at) { store_floats(to + at, *reinterpret_cast<float (*)[STATE_VEC]>(run)); });
    };
    const auto store_state = [&](int64_t slot) { store_to((SLOTS ? state : final_state) + slot * state_stride); };
    const auto load_state = [&](const auto* from) {
        each_of_state([&](float* run, int64_t at) {
            load_floats<STATE_VEC>(from + first_slot * state_stride + at, *reinterpret_cast<float (*)[STATE_VEC]>(run));
        });
    };
    if (SLOTS) load_state(state);
    else if (initial_state) load_state(initial_state);
    const int64_t checkpoint = CHECKPOINTS ? int64_t(checkpoint_offsets[seq]) : 0;  // tokens before it

#pragma unroll 1
    for (int64_t token = begin; token < end; token += TOKENS) {
        const int count = int(min(end - token, int64_t(TOKENS)));
        __syncthreads();
        // A warp stages one of four parts of a token, so that the parts of a single token are loaded at the same time.
#pragma unroll 1
        for (int i = threadIdx.x / WARP_SIZE; i < 4 * count; i += WARPS) {
            const int l = i / 4, part = i % 4;
            const int64_t at = token + l;
            if (part < 2) {
                const scalar_t* const from = part ? q + at * q_stride : k + at * k_stride;
                load_key(part ? queries[l] : keys[l], from + first_key, part ? scale : 1.0f);
            }
            if (part == 2) load_decays(kept[l], g + at * g_stride + head * g_step, head, A_log, dt_bias, lower_bound);
            if (part != 3) continue;
            const scalar_t* const from = v + at * v_stride + int64_t(head) * VALUE_SIZE + first_row;
            for (int own = threadIdx.x % WARP_SIZE; own < ROWS; own += WARP_SIZE) {
                values[l][own] = own < rows ? to_float(from[own]) : 0.0f;
            }
            if (threadIdx.x % WARP_SIZE == 0) {
                strengths[l] = beta ? update_strength(to_float(beta[at * beta_stride + head * beta_step])) : 1.0f;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int l = 0; l < count; ++l) {
            const float decay = kept[l][0];
            float predicted[VALUES] = {}, result[VALUES] = {}, change[VALUES];
#pragma unroll
            for (int i = 0; i < RUNS; ++i) {
                const auto key = Vec<float, 4>::load(keys[l] + column_of(i * 4, lane));
                float keep[4] = {decay, decay, decay, decay};
                if constexpr (CHANNEL_DECAYS) Vec<float, 4>::load(kept[l] + column_of(i * 4, lane)).to_floats(keep);
#pragma unroll
                for (int n = 0; n < 4 * VALUES; ++n) {
                    float& state = s[place_of(i * 4 + n / VALUES, n % VALUES)];
                    state *= keep[n / VALUES];
                    predicted[n % VALUES] = fmaf(state, key[n / VALUES], predicted[n % VALUES]);
                }
            }
            add_lanes(predicted, partial[0]);
#pragma unroll
            for (int n = 0; n < VALUES; ++n) change[n] = strengths[l] * (values[l][row + n] - predicted[n]);
#pragma unroll
            for (int i = 0; i < RUNS; ++i) {
                const auto key = Vec<float, 4>::load(keys[l] + column_of(i * 4, lane));
                const auto query = Vec<float, 4>::load(queries[l] + column_of(i * 4, lane));
#pragma unroll
                for (int n = 0; n < 4 * VALUES; ++n) {
                    float& state = s[place_of(i * 4 + n / VALUES, n % VALUES)];
                    state = fmaf(change[n % VALUES], key[n / VALUES], state);
                    result[n % VALUES] = fmaf(state, query[n / VALUES], result[n % VALUES]);
                }
            }
            add_lanes(result, partial[1]);
            if (lane == 0) {
#pragma unroll
                for (int n = 0; n < VALUES; ++n) outputs[l][row + n] = result[n];
            }
            if constexpr (PER_TOKEN) {
                const int64_t slot = slot_at(token - begin + l);
                if (is_slot(slot)) store_state(slot);
            }
            if constexpr (CHECKPOINTS) {
                if (token - begin + l + 1 == checkpoint) store_to(checkpoint_state + seq * state_stride);
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < count * ROWS; i += NUM_THREADS) {
            const int l = i / ROWS, own = i % ROWS;
            scalar_t* const to = o + (token + l) * o_stride + int64_t(head) * VALUE_SIZE + first_row;
            if (own < rows) to[own] = from_float<scalar_t>(outputs[l][own]);
        }
    }
    if (SLOTS ? !PER_TOKEN : final_state != nullptr) store_state(first_slot);
}
