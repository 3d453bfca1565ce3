// selective_state_update: one step of the recurrence of Mamba, or a few, for each sequence of a batch.
//
//     d    = dt[t, r] + dt_bias[r], then softplus(d) if dt_softplus
//     h[n] = exp(d * A[r, n]) * h[n] + d * x[t, r] * B[t, n]        for each state n
//     y    = sum over n of h[n] * C[t, n] + D[r] * x[t, r]
//     out[t, r] = T(y * silu(z[t, r])), or T(y) without z
//
// h begins as row r of the source slot. It is stored in one slot behind the last token of the sequence, or, where drafts
// are verified (num_accepted_tokens), in a slot of its own behind each token.
//
// LANES neighbouring lanes share a row, and a thread works on ROWS rows of one head, so that the loads of several states
// are in flight and vectors of B and C are loaded once for them.
//
// Constants
//     state_t dt_t D_t bias_t  element types of state, dt, D and dt_bias
//     STATE_SIZE               states of a row
//     LANES                    lanes that share a row, a power of two up to 32
//     VEC_SIZE                 states in one access to `state`; divides STATE_SIZE
//     ROWS                     rows of a thread
//     TIED                     A has one number for all states of a row

#include "reduce.cuh"
#include "selective.cuh"
#include "vec.cuh"

constexpr int GROUPS = NUM_THREADS / LANES;
constexpr int VECS = ceil_div(STATE_SIZE, VEC_SIZE* LANES);  // of a lane

// VEC_SIZE neighbouring elements as floats, by accesses of 16 bytes where they are wider.
template <typename T>
DEVICE void load_vec(const T* address, float (&x)[VEC_SIZE]) {
    constexpr int WIDEST = 16 / int(sizeof(T));
    load_floats<(VEC_SIZE < WIDEST ? VEC_SIZE : WIDEST)>(address, x);
}

// Calls f(v, n) for each vector of a lane's states that exists: vector v, which begins at state n.
template <typename F>
DEVICE void for_each_vec(int lane, F f) {
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
        const int n = (v * LANES + lane) * VEC_SIZE;
        if (n < STATE_SIZE) f(v, n);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
selective_state_update(state_t* state,                          // [num_slots, heads, head_size, STATE_SIZE]
                       const scalar_t* x,                       // [num_tokens, heads, head_size]
                       const dt_t* dt,                          // [num_tokens, heads, head_size]
                       const float* A,                          // [heads, head_size, STATE_SIZE]
                       const scalar_t* B,                       // [num_tokens, groups, STATE_SIZE]
                       const scalar_t* C,                       // [num_tokens, groups, STATE_SIZE]
                       const D_t* D,                            // [heads, head_size] or null
                       const scalar_t* z,                       // [num_tokens, heads, head_size] or null
                       const bias_t* dt_bias,                   // [heads, head_size] or null
                       const int32_t* state_batch_indices,      // [batch, columns] or null
                       const int32_t* dst_state_batch_indices,  // [batch, dst_columns] or null
                       scalar_t* out,                           // [num_tokens, heads, head_size]
                       const int32_t* num_accepted_tokens,      // [batch] or null
                       const int32_t* cu_seqlens,               // [batch + 1] or null
                       bool dt_softplus, int64_t pad_slot_id, int64_t num_slots, int64_t num_tokens, int64_t columns,
                       int64_t dst_columns, int64_t slots_stride, int64_t dst_stride, int heads, int head_size,
                       int head_blocks, int group_heads, int64_t slot_stride, int64_t state_head_stride,
                       int64_t state_row_stride, int64_t x_stride, int64_t x_head_stride, int64_t x_row_stride,
                       int64_t dt_stride, int64_t dt_head_stride, int64_t dt_row_stride, int64_t A_head_stride,
                       int64_t A_row_stride, int64_t B_stride, int64_t B_group_stride, int64_t C_stride,
                       int64_t C_group_stride, int64_t D_head_stride, int64_t D_row_stride, int64_t z_stride,
                       int64_t z_head_stride, int64_t z_row_stride, int64_t bias_head_stride, int64_t bias_row_stride,
                       int64_t out_stride, int64_t out_head_stride, int64_t out_row_stride) {
    await_previous_kernel();
    const uint32_t blocks = uint32_t(heads) * head_blocks;
    const int64_t sequence = blockIdx.x / blocks;
    const int64_t head = blockIdx.x % blocks / head_blocks, group = head / group_heads;
    const int lane = threadIdx.x % LANES;
    const int first_row =
        blockIdx.x % head_blocks * GROUPS * ROWS + threadIdx.x / LANES;  // the others follow at GROUPS

    int64_t begin = sequence, end = sequence + 1;
    if constexpr (HAS_STARTS) {
        begin = cu_seqlens[sequence];
        end = cu_seqlens[sequence + 1];
        if (begin < 0 || end > num_tokens || begin >= end) return;
    }
    const bool drafts = num_accepted_tokens != nullptr;
    const Slots sources{state_batch_indices + sequence * slots_stride, columns, num_slots, pad_slot_id};
    const Slots targets =
        dst_columns < 0 ? sources
                        : Slots{dst_state_batch_indices + sequence * dst_stride, dst_columns, num_slots, pad_slot_id};
    const int64_t accepted = drafts ? num_accepted_tokens[sequence] : 1;
    const int64_t source = columns < 0 ? sequence : sources.at(max(accepted - 1, int64_t(0)));
    if (source < 0) return;

    // A row beyond the last has the inputs of the last row. It neither reads nor writes a state.
    state_t* const states = state + head * state_head_stride;
    float h[ROWS][VECS][VEC_SIZE], a[ROWS][VECS][VEC_SIZE];
    float skip[ROWS], bias[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = first_row + i * GROUPS;
#pragma unroll
        for (int v = 0; v < VECS; ++v) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) h[i][v][j] = 0.0f;
        }
        if (row >= head_size) continue;
        for_each_vec(lane, [&](int v, int n) {
            const auto vec =
                Vec<state_t, VEC_SIZE>::load_once(states + source * slot_stride + row * state_row_stride + n);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) h[i][v][j] = vec[j];
        });
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int64_t row = min(first_row + i * GROUPS, head_size - 1);
        const float* A_row = A + head * A_head_stride + row * A_row_stride;
#pragma unroll
        for (int v = 0; v < VECS; ++v) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) a[i][v][j] = 0.0f;
        }
        if constexpr (TIED) {
            a[i][0][0] = *A_row;
        } else {
            for_each_vec(lane, [&](int v, int n) { load_vec(A_row + n, a[i][v]); });
        }
        skip[i] = D ? to_float(D[head * D_head_stride + row * D_row_stride]) : 0.0f;
        bias[i] = dt_bias ? to_float(dt_bias[head * bias_head_stride + row * bias_row_stride]) : 0.0f;
    }

    const auto store = [&](int64_t slot) {
        if (slot < 0) return;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = first_row + i * GROUPS;
            if (row >= head_size) continue;
            for_each_vec(lane, [&](int v, int n) {
                Vec<state_t, VEC_SIZE>::from_floats(h[i][v]).store(states + slot * slot_stride +
                                                                   row * state_row_stride + n);
            });
        }
    };

    for (int64_t token = begin; token < end; ++token) {
        float b[VECS][VEC_SIZE] = {}, c[VECS][VEC_SIZE] = {};
        for_each_vec(lane, [&](int v, int n) {
            load_vec(B + token * B_stride + group * B_group_stride + n, b[v]);
            load_vec(C + token * C_stride + group * C_group_stride + n, c[v]);
        });
        float y[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int64_t row = min(first_row + i * GROUPS, head_size - 1);
            const float input = to_float(x[token * x_stride + head * x_head_stride + row * x_row_stride]);
            const float biased =
                to_float(dt[token * dt_stride + head * dt_head_stride + row * dt_row_stride]) + bias[i];
            const float step = dt_softplus ? softplus(biased) : biased;
            const float rate = step * LOG2_E, tied_decay = estimate_exp2(rate * a[i][0][0]);
            float sum = 0.0f;
#pragma unroll
            for (int v = 0; v < VECS; ++v) {
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) {
                    const float decay = TIED ? tied_decay : estimate_exp2(rate * a[i][v][j]);
                    h[i][v][j] = fmaf(decay, h[i][v][j], step * input * b[v][j]);
                    sum = fmaf(h[i][v][j], c[v][j], sum);
                }
            }
            y[i] = lane_reduce<Sum, LANES>(sum);
            if (D) y[i] = fmaf(skip[i], input, y[i]);
        }
        if (drafts) store(targets.at(token - begin));
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int64_t row = first_row + i * GROUPS;
            if (lane != 0 || row >= head_size) continue;
            if (z) {
                y[i] = gated_by_silu<scalar_t>(
                    y[i], to_float(z[token * z_stride + head * z_head_stride + row * z_row_stride]));
            }
            out[token * out_stride + head * out_head_stride + row * out_row_stride] = from_float<scalar_t>(y[i]);
        }
    }
    if (!drafts) store(dst_columns < 0 ? source : targets.at(0));
}
