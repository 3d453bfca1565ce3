// selective_state_update: the Mamba recurrence for decode: one or a few tokens for each sequence of a batch.
//
//     d    = dt[t, r] + dt_bias[r], then softplus(d) if dt_softplus
//     h[n] = exp(d * A[r, n]) * h[n] + d * x[t, r] * B[t, n]        for each state n
//     y    = sum over n of h[n] * C[t, n] + D[r] * x[t, r]
//     out[t, r] = T(y * silu(z[t, r])), or T(y) without z
//
// h begins as row r of the source slot. It is stored in one slot after the last token of the sequence or, to verify
// drafts (num_accepted_tokens), in a separate slot after each token.
//
// LANES adjacent lanes form a group. A group works on ROWS rows of a head for each of SEQUENCES sequences, in one pass,
// so that the loads of several states are in flight. A row of one sequence is an item. Every lane holds some states of
// all items. Scalars of an item (x, dt, z, out, softplus, SiLU) are handled by one lane, its owner: a shuffle
// broadcasts the decay rate to the group, and the reduction of y ends in the owner. Rows of a warp are adjacent, so
// that owners load adjacent elements. All loads that do not depend on a slot come before the first that does.
//
// Constants
//     state_t dt_t D_t bias_t  element types of state, dt, D and dt_bias
//     STATE_SIZE               states of a row
//     LANES                    lanes of a group, a power of two up to 32
//     VEC_SIZE                 states in one access to `state`; divides STATE_SIZE
//     ROWS SEQUENCES           rows and sequences of a group, powers of two; SEQUENCES is 1 with HAS_STARTS
//     HAS_STARTS               sequences have several tokens
//     DRAFTS                   num_accepted_tokens is given
//     TIED                     A has one number for all states of a row

#include "reduce.cuh"
#include "selective.cuh"
#include "vec.cuh"

constexpr int GROUPS = WARP_SIZE / LANES;                    // groups of a warp
constexpr int VECS = ceil_div(STATE_SIZE, VEC_SIZE* LANES);  // vectors of a lane for one item
constexpr int ITEMS = ROWS * SEQUENCES;                      // item s * ROWS + i is row i of sequence s
constexpr int OWNERS = ITEMS < LANES ? ITEMS : LANES;        // lanes that own items: lane l owns l, l + OWNERS, ...
constexpr int OWNED = ITEMS / OWNERS;                        // items of an owner
static_assert(SEQUENCES == 1 || !HAS_STARTS);

// VEC_SIZE adjacent elements as floats, in accesses of at most 16 bytes.
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

// Adds up y of each item over the group's lanes. The sum of item l + k * OWNERS ends as y[k * OWNERS] in lane l: each
// round of shuffles halves the items that a lane still has.
DEVICE void sum_to_owners(float (&y)[ITEMS], int lane) {
#pragma unroll
    for (int k = 0; k < ITEMS; k += OWNERS) {
#pragma unroll
        for (int half = OWNERS / 2; half > 0; half /= 2) {
            const bool upper = lane & half;
#pragma unroll
            for (int i = k; i < k + half; ++i) {
                const float given = upper ? y[i] : y[i + half], kept = upper ? y[i + half] : y[i];
                y[i] = kept + shfl_xor(given, half);
            }
        }
#pragma unroll
        for (int mask = OWNERS; mask < LANES; mask *= 2) y[k] += shfl_xor(y[k], mask);
    }
}

// VEC_SIZE adjacent elements of B or C, in accesses of at most 16 bytes.
struct StateVector {
    static constexpr int ACCESS = VEC_SIZE * int(sizeof(scalar_t)) < 16 ? VEC_SIZE : 16 / int(sizeof(scalar_t));
    Vec<scalar_t, ACCESS> parts[VEC_SIZE / ACCESS];

    DEVICE void load(const scalar_t* address) {
#pragma unroll
        for (int i = 0; i < VEC_SIZE / ACCESS; ++i) parts[i] = Vec<scalar_t, ACCESS>::load(address + i * ACCESS);
    }
    DEVICE float operator[](int i) const { return parts[i / ACCESS][i % ACCESS]; }
};

// What one token of each sequence brings: to an owner of items, and to a lane of a group. Nothing is converted before
// its use, so that no load is waited for before the others are under way.
struct Token {
    scalar_t x[OWNED], z[OWNED];
    dt_t dt[OWNED];
    StateVector B[SEQUENCES][VECS], C[SEQUENCES][VECS];
};

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
                       int64_t dst_columns, int64_t slots_stride, int64_t dst_stride, int batch, int heads,
                       int head_size, int head_blocks, int group_heads, int64_t slot_stride, int64_t state_head_stride,
                       int64_t state_row_stride, int64_t x_stride, int64_t x_head_stride, int64_t x_row_stride,
                       int64_t dt_stride, int64_t dt_head_stride, int64_t dt_row_stride, int64_t A_head_stride,
                       int64_t A_row_stride, int64_t B_stride, int64_t B_group_stride, int64_t C_stride,
                       int64_t C_group_stride, int64_t D_head_stride, int64_t D_row_stride, int64_t z_stride,
                       int64_t z_head_stride, int64_t z_row_stride, int64_t bias_head_stride, int64_t bias_row_stride,
                       int64_t out_stride, int64_t out_head_stride, int64_t out_row_stride) {
    await_previous_kernel();
    const uint32_t blocks = uint32_t(heads) * head_blocks;
    const int64_t first_sequence = int64_t(blockIdx.x / blocks) * SEQUENCES;
    const uint32_t head = blockIdx.x % blocks / head_blocks, group = head / uint32_t(group_heads);
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / WARP_SIZE;
    const int block_rows = NUM_THREADS / LANES * ROWS;
    // A group's other rows follow at GROUPS.
    const int first_row =
        blockIdx.x % head_blocks * block_rows + warp * GROUPS * ROWS + threadIdx.x % WARP_SIZE / LANES;

    // Without HAS_STARTS the token `begin` + s is that of sequence s.
    int64_t begin = first_sequence, end = first_sequence + 1;
    if constexpr (HAS_STARTS) {
        begin = cu_seqlens[first_sequence];
        end = cu_seqlens[first_sequence + 1];
        if (begin < 0 || end > num_tokens || begin >= end) return;
    }
    const int last_sequence = int(min(batch - first_sequence, int64_t(SEQUENCES))) - 1;
    Slots targets[SEQUENCES];
    int32_t source_index[SEQUENCES], target_index[SEQUENCES];
#pragma unroll
    for (int s = 0; s < SEQUENCES; ++s) {
        const int64_t sequence = first_sequence + min(s, last_sequence);
        const Slots sources{state_batch_indices + sequence * slots_stride, columns, num_slots, pad_slot_id};
        targets[s] = dst_columns < 0
                         ? sources
                         : Slots{dst_state_batch_indices + sequence * dst_stride, dst_columns, num_slots, pad_slot_id};
        source_index[s] = sources.load(DRAFTS ? max(int64_t(num_accepted_tokens[sequence]) - 1, int64_t(0)) : 0);
        target_index[s] = DRAFTS || dst_columns < 0 ? -1 : targets[s].load(0);
    }

    // Sequence and row of the items that the lane owns. A sequence or a row beyond the last has the inputs of the last;
    // neither states nor results are written for it.
    int own_sequence[OWNED], own_row[OWNED];
    D_t skip[OWNED];
    bias_t bias[OWNED];
    float own_A[OWNED];
    float a[TIED ? 1 : ROWS][VECS][VEC_SIZE] = {};
    const float* const A_head = A + head * A_head_stride;
#pragma unroll
    for (int k = 0; k < OWNED; ++k) {
        const int item = k * OWNERS + lane % OWNERS;
        own_sequence[k] = item / ROWS;
        own_row[k] = first_row + item % ROWS * GROUPS;
        const int64_t row = min(own_row[k], head_size - 1);
        own_A[k] = TIED ? A_head[row * A_row_stride] : 0.0f;
        if (D) skip[k] = D[head * D_head_stride + row * D_row_stride];
        if (dt_bias) bias[k] = dt_bias[head * bias_head_stride + row * bias_row_stride];
    }
    if constexpr (!TIED) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int64_t row = min(first_row + i * GROUPS, head_size - 1);
            for_each_vec(lane, [&](int v, int n) { load_vec(A_head + row * A_row_stride + n, a[i][v]); });
        }
    }

    const auto load_token = [&](int64_t first) {
        Token token;
#pragma unroll
        for (int k = 0; k < OWNED; ++k) {
            const int64_t t = first + min(own_sequence[k], last_sequence), row = min(own_row[k], head_size - 1);
            token.x[k] = x[t * x_stride + head * x_head_stride + row * x_row_stride];
            token.dt[k] = dt[t * dt_stride + head * dt_head_stride + row * dt_row_stride];
            if (z) token.z[k] = z[t * z_stride + head * z_head_stride + row * z_row_stride];
        }
#pragma unroll
        for (int s = 0; s < SEQUENCES; ++s) {
            const int64_t t = first + min(s, last_sequence);
            for_each_vec(lane, [&](int v, int n) {
                token.B[s][v].load(B + t * B_stride + group * B_group_stride + n);
                token.C[s][v].load(C + t * C_stride + group * C_group_stride + n);
            });
        }
        return token;
    };
    Token next = load_token(begin);

    uint32_t live = 0;  // bit s: sequence s has a state
    int64_t target[SEQUENCES];
    Vec<state_t, VEC_SIZE> loaded[ITEMS][VECS];
    state_t* const states = state + head * state_head_stride + first_row * state_row_stride;
#pragma unroll
    for (int s = 0; s < SEQUENCES; ++s) {
        const int64_t source = columns < 0 ? first_sequence + s : targets[s].checked(source_index[s]);
        if (s > last_sequence || source < 0) continue;
        live |= 1u << s;
        target[s] = dst_columns < 0 ? source : targets[s].checked(target_index[s]);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (first_row + i * GROUPS >= head_size) continue;
            for_each_vec(lane, [&](int v, int n) {
                loaded[s * ROWS + i][v] = Vec<state_t, VEC_SIZE>::load_once(states + source * slot_stride +
                                                                            i * GROUPS * state_row_stride + n);
            });
        }
    }
    if (!live) return;

    float h[ITEMS][VECS][VEC_SIZE];
    for (int64_t t = begin; t < end; ++t) {
        const Token token = next;
        if (t + 1 < end) next = load_token(t + 1);
        float own_decay[OWNED], own_input[OWNED], y[ITEMS];  // own_decay: log2 of the decay per unit of A, unless TIED
#pragma unroll
        for (int k = 0; k < OWNED; ++k) {
            const float biased = to_float(token.dt[k]) + (dt_bias ? to_float(bias[k]) : 0.0f);
            const float step = dt_softplus ? softplus(biased) : biased;
            own_input[k] = step * to_float(token.x[k]);
            own_decay[k] = TIED ? estimate_exp2(step * LOG2_E * own_A[k]) : step * LOG2_E;
        }
#pragma unroll
        for (int s = 0; s < SEQUENCES; ++s) {
            if constexpr (DRAFTS) target[s] = targets[s].at(t - begin);
            const bool stores = live >> s & 1 && target[s] >= 0 && (DRAFTS || t + 1 == end);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int item = s * ROWS + i;
                const float of_item = shfl<LANES>(own_decay[item / OWNERS], item % OWNERS);
                const float input = shfl<LANES>(own_input[item / OWNERS], item % OWNERS);
                y[item] = 0.0f;
                for_each_vec(lane, [&](int v, int) {
                    if (t == begin) loaded[item][v].to_floats(h[item][v]);
#pragma unroll
                    for (int j = 0; j < VEC_SIZE; ++j) {
                        const float decay = TIED ? of_item : estimate_exp2(of_item * a[TIED ? 0 : i][v][j]);
                        h[item][v][j] = fmaf(decay, h[item][v][j], input * token.B[s][v][j]);
                        y[item] = fmaf(h[item][v][j], token.C[s][v][j], y[item]);
                    }
                });
                if (!stores || first_row + i * GROUPS >= head_size) continue;
                for_each_vec(lane, [&](int v, int n) {
                    Vec<state_t, VEC_SIZE>::from_floats(h[item][v])
                        .store(states + target[s] * slot_stride + i * GROUPS * state_row_stride + n);
                });
            }
        }
        sum_to_owners(y, lane);
#pragma unroll
        for (int k = 0; k < OWNED; ++k) {
            float result = y[k * OWNERS];
            if (D) result = fmaf(to_float(skip[k]), to_float(token.x[k]), result);
            if (z) result = gated_by_silu<scalar_t>(result, to_float(token.z[k]));
            if (lane >= OWNERS || !(live >> own_sequence[k] & 1) || own_row[k] >= head_size) continue;
            const int64_t to = t + own_sequence[k];
            out[to * out_stride + head * out_head_stride + own_row[k] * out_row_stride] = from_float<scalar_t>(result);
        }
    }
}
