// selective_scan_fwd: the Mamba scan over the tokens of sequences, with states in a cache.
//
//     d    = delta[c, t] + delta_bias_[c], then softplus(d) if delta_softplus
//     h[n] = exp(d * A[c, n]) * h[n] + d * u[c, t] * B[n, t]        for each state n
//     y    = sum over n of h[n] * C[n, t] + D_[c] * u[c, t]
//     delta[c, t] = T(y),  z_[c, t] = T(y * silu(z_[c, t]))
//
// h begins as the state of the sequence's slot, or as 0. The state is stored in a slot after each block of block_size
// tokens, and after the last token.
//
// A block takes some channels of one sequence, and walks the sequence in tiles of tokens. Its threads are specialised.
// The scanning threads (consumers) come first and hold the states: LANES adjacent lanes share CHANNELS channels, and
// each lane has STATES states of every channel in registers. So one load of B or C serves CHANNELS channels, and one
// load of delta serves STATES states. The staging threads (producers) prepare the next tile in shared memory and write
// the results of the previous tile; they issue all their loads before they wait for any of them. A state is updated
// token by token, so that the result does not depend on how a sequence is split into calls.
//
// Constants
//     state_t          element type of ssm_states
//     STATE_SIZE       states of a channel
//     LANES            lanes that share the states of a channel, a power of two up to 32
//     STATES           states of a lane; LANES * STATES >= STATE_SIZE
//     CHANNELS         channels of a lane
//     TILE_TOKENS      tokens of a tile, a multiple of 8
//     SCAN_THREADS, STAGE_THREADS    scanning and staging threads of a block
//     VEC_SIZE         tokens in one memory access
//     STATE_VEC_SIZE   states in one memory access; divides STATES and STATE_SIZE

#include "selective_scan_stage.cuh"

// Reduces each of four values over LANES lanes. Afterwards x[i], i < SUMS, is the total of value first_sum() + i.
constexpr int SUMS = LANES >= 4 ? 1 : 4 / LANES;
DEVICE int first_sum(int lane) { return LANES == 1 ? 0 : LANES == 2 ? lane * 2 : (lane & 1) * 2 + (lane >> 1 & 1); }
DEVICE void add_up(float (&x)[4], int lane) {
    if constexpr (LANES >= 2) {
        const bool upper = lane & 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float given = upper ? x[i] : x[i + 2], kept = upper ? x[i + 2] : x[i];
            x[i] = kept + shfl_xor(given, 1);
        }
    }
    if constexpr (LANES >= 4) {
        const bool upper = lane & 2;
        const float given = upper ? x[0] : x[1], kept = upper ? x[1] : x[0];
        x[0] = kept + shfl_xor(given, 2);
    }
#pragma unroll
    for (int mask = 4; mask < LANES; mask *= 2) x[0] += shfl_xor(x[0], mask);
}

// The states of a scanning thread.
struct States {
    float h[CHANNELS][STATES], A[CHANNELS][STATES];
    int group, lane;

    // Calls f(i, k, n, offset) for each vector of the thread's states that exists: states n ... of its channel k.
    template <typename F>
    DEVICE void for_each_vec(int channels, int64_t stride, F f) const {
#pragma unroll
        for (int k = 0; k < CHANNELS; ++k) {
#pragma unroll
            for (int n = 0; n < STATES; n += STATE_VEC_SIZE) {
                const int channel = k * GROUPS + group, state = lane * STATES + n;
                if (channel < channels && state < STATE_SIZE) f(k, n, channel * stride + state);
            }
        }
    }

    DEVICE void load(const Rows& rows, const float* A_rows, int64_t A_stride, const state_t* state, int64_t stride) {
#pragma unroll
        for (int k = 0; k < CHANNELS; ++k) {
#pragma unroll
            for (int n = 0; n < STATES; ++n) h[k][n] = A[k][n] = 0.0f;
        }
        for_each_vec(rows.channels, A_stride, [&](int k, int n, int64_t offset) {
            const auto vec = Vec<float, STATE_VEC_SIZE>::load(A_rows + offset);
#pragma unroll
            for (int j = 0; j < STATE_VEC_SIZE; ++j) A[k][n + j] = vec[j];
        });
        if (state == nullptr) return;
        for_each_vec(rows.channels, stride, [&](int k, int n, int64_t offset) {
            const auto vec = Vec<state_t, STATE_VEC_SIZE>::load_once(state + offset);
#pragma unroll
            for (int j = 0; j < STATE_VEC_SIZE; ++j) h[k][n + j] = vec[j];
        });
    }

    DEVICE void store(const Rows& rows, state_t* state, int64_t stride) const {
        for_each_vec(rows.channels, stride, [&](int k, int n, int64_t offset) {
            float x[STATE_VEC_SIZE];
#pragma unroll
            for (int j = 0; j < STATE_VEC_SIZE; ++j) x[j] = h[k][n + j];
            Vec<state_t, STATE_VEC_SIZE>::from_floats(x).store(state + offset);
        });
    }

    // Four steps, for the tokens from `column` on; y gets the lane's partial sums. ALL: all four lie in the tile.
    template <bool ALL>
    DEVICE void scan_four(const Tile& tile, int column, const Buffer& at, float (&y)[CHANNELS][4]) {
        float rate[CHANNELS][4], scaled_u[CHANNELS][4];
#pragma unroll
        for (int k = 0; k < CHANNELS; ++k) {
            const int row = (k * GROUPS + group) * ROW + column;
            load_floats<4>(at.rate + row, rate[k]);
            load_floats<4>(at.scaled_u + row, scaled_u[k]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int k = 0; k < CHANNELS; ++k) y[k][i] = 0.0f;
            if (!ALL && !tile.has(column + i)) continue;
            constexpr int ACCESS = STATES < 4 ? STATES : 4;
            const int states = (column + i) * PADDED_STATES + lane * STATES;
            float B[STATES], C[STATES];
            load_floats<ACCESS>(at.B + states, B);
            load_floats<ACCESS>(at.C + states, C);
#pragma unroll
            for (int k = 0; k < CHANNELS; ++k) {
#pragma unroll
                for (int n = 0; n < STATES; ++n) {
                    h[k][n] = fmaf(estimate_exp2(rate[k][i] * A[k][n]), h[k][n], scaled_u[k][i] * B[n]);
                    y[k][i] = fmaf(h[k][n], C[n], y[k][i]);
                }
            }
        }
    }

    // Adds up the lanes' shares of y for the four tokens before `column`.
    DEVICE void finish_four(int column, Buffer& at, float (&y)[CHANNELS][4]) const {
#pragma unroll
        for (int k = 0; k < CHANNELS; ++k) {
            add_up(y[k], lane);
            if (LANES > 4 && lane >= 4) continue;
            float* sums = at.y + (k * GROUPS + group) * ROW + column + first_sum(lane);
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[i] = y[k][i];
        }
    }

    // Four tokens are finished while the next four are under way, so that shuffles are not waited for. The first time
    // there are none to finish: what is written then is not read.
    DEVICE void scan(const Tile& tile, Buffer& at) {
        float y[CHANNELS][4] = {};
        int column = tile.first / 4 * 4;
        if (column < tile.first) {
            scan_four<false>(tile, column, at, y);
            column += 4;
        }
        for (; column + 4 <= tile.last; column += 4) {
            float before[CHANNELS][4];
#pragma unroll
            for (int k = 0; k < CHANNELS; ++k) {
#pragma unroll
                for (int i = 0; i < 4; ++i) before[k][i] = y[k][i];
            }
            scan_four<true>(tile, column, at, y);
            finish_four(column, at, before);
        }
        if (column < tile.last) {
            finish_four(column, at, y);
            scan_four<false>(tile, column, at, y);
            column += 4;
        }
        finish_four(column, at, y);
    }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
selective_scan_fwd(const scalar_t* u,               // [batch, dim, num_tokens] or [dim, num_tokens]
                   scalar_t* delta,                 // likewise
                   const float* A,                  // [dim, STATE_SIZE]
                   const scalar_t* B,               // [batch, groups, STATE_SIZE, num_tokens] or less batch
                   const scalar_t* C,               // likewise
                   const float* D_,                 // [dim] or null
                   scalar_t* z_,                    // as u, or null
                   const float* delta_bias_,        // [dim] or null
                   const int32_t* query_start_loc,  // [batch + 1] or null
                   const int32_t* cache_indices,    // [batch] or [batch, columns] or null
                   const bool* has_initial_state,   // [batch] or null
                   state_t* ssm_states,             // [num_slots, dim, STATE_SIZE]
                   const int32_t* block_idx_first_scheduled_token,  // [batch] or null
                   const int32_t* block_idx_last_scheduled_token,   // [batch] or null
                   const int32_t* initial_state_idx,                // [batch] or null
                   const int32_t* cu_chunk_seqlen,                  // [num_chunks + 1] or null
                   const int32_t* last_chunk_indices,               // [batch] or null
                   int64_t num_tokens, int64_t num_slots, int64_t columns, int64_t num_chunks, int64_t pad_slot_id,
                   int64_t block_size, bool delta_softplus, int group_dim, int group_blocks, int num_groups,
                   int64_t u_batch_stride, int64_t u_stride, int64_t delta_batch_stride, int64_t delta_stride,
                   int64_t z_batch_stride, int64_t z_stride, int64_t A_stride, int64_t B_batch_stride,
                   int64_t B_group_stride, int64_t B_stride, int64_t C_batch_stride, int64_t C_group_stride,
                   int64_t C_stride, int64_t slots_stride, int64_t slot_stride, int64_t state_stride) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    Buffer* buffers = reinterpret_cast<Buffer*>(memory);
    const uint32_t blocks = uint32_t(group_blocks) * num_groups;
    const int64_t sequence = blockIdx.x / blocks;
    const int group = blockIdx.x % blocks / group_blocks;
    const int first_channel =
        blockIdx.x % group_blocks * BLOCK_CHANNELS;  // within the group of channels that share B and C
    const int64_t channel = int64_t(group) * group_dim + first_channel;

    const Sequence own(sequence, query_start_loc, cache_indices, block_idx_first_scheduled_token,
                       block_idx_last_scheduled_token, initial_state_idx, num_tokens, num_slots, columns, pad_slot_id,
                       block_size, slots_stride, cu_chunk_seqlen, last_chunk_indices, num_chunks);
    if (own.empty()) return;

    Rows rows;
    rows.u = u + sequence * u_batch_stride + channel * u_stride;
    rows.delta = delta + sequence * delta_batch_stride + channel * delta_stride;
    rows.z = z_ ? z_ + sequence * z_batch_stride + channel * z_stride : nullptr;
    rows.B = B + sequence * B_batch_stride + group * B_group_stride;
    rows.C = C + sequence * C_batch_stride + group * C_group_stride;
    rows.bias = delta_bias_ ? delta_bias_ + channel : nullptr;
    rows.D = D_ ? D_ + channel : nullptr;
    rows.u_stride = u_stride;
    rows.delta_stride = delta_stride;
    rows.z_stride = z_stride;
    rows.B_stride = B_stride;
    rows.C_stride = C_stride;
    rows.channels = min(group_dim - first_channel, BLOCK_CHANNELS);
    rows.softplus = delta_softplus;

    // The warp's first thread decides, so that the compiler knows that all of the warp take one way.
    const bool scans = shfl<WARP_SIZE>(int(threadIdx.x), 0) < SCAN_THREADS;
    const int thread = scans ? threadIdx.x : threadIdx.x - SCAN_THREADS;
    Tile tile = own.first_tile();
    Tile done = Tile::from(own.end, own.end);  // none
    States states;
    states.group = thread / LANES;
    states.lane = thread % LANES;
    state_t* channel_states = ssm_states + channel * state_stride;
    if (scans) {
        const bool continues = has_initial_state && has_initial_state[sequence];
        states.load(rows, A + channel * A_stride, A_stride,
                    continues ? channel_states + own.slot * slot_stride : nullptr, state_stride);
    } else {
        Stage stage;
        stage.load(rows, tile, thread);
        stage.store(rows, tile, thread, buffers[0]);
    }

    int buffer = 0;
    int64_t blocks_done = 0;
    while (!tile.empty()) {
        __syncthreads();
        const Tile next = tile.next(own.end, own.block_size);
        if (scans) {
            states.scan(tile, buffers[buffer]);
            if (tile.ends_block()) {
                const int64_t to = own.slot_behind(tile, blocks_done);
                if (to >= 0) states.store(rows, channel_states + to * slot_stride, state_stride);
                ++blocks_done;
            }
        } else {
            Stage stage;
            Results results;
            stage.load(rows, next, thread);
            results.load(rows, done, thread);
            keep_loads();
            results.write(rows, done, thread, buffers[buffer ^ 1]);
            stage.store(rows, next, thread, buffers[buffer ^ 1]);
        }
        done = tile;
        tile = next;
        buffer ^= 1;
    }
    __syncthreads();
    if (!scans) {
        Results results;
        results.load(rows, done, thread);
        results.write(rows, done, thread, buffers[buffer ^ 1]);
    }
}
