// selective_scan_tokens: the Mamba scan for prefill with few channels and many tokens, parallel over tokens.
//
//     d    = delta[c, t] + delta_bias_[c], then softplus(d) if delta_softplus
//     h[n] = exp(d * A[c, n]) * h[n] + d * u[c, t] * B[n, t]        for each state n
//     y    = sum over n of h[n] * C[n, t] + D_[c] * u[c, t]
//     delta[c, t] = T(y),  z_[c, t] = T(y * silu(z_[c, t]))
//
// States and slots are handled as in selective_scan_fwd.cu. There a lane walks along the tokens; here LANES adjacent
// lanes share the tokens of a channel, UNIT tokens per lane. For each state a lane computes `own`, the state after its
// tokens from a state of 0, and `factor`, the product of their decays:
//
//     h after = factor * h before + own
//
// A prefix scan over the lanes gives each lane its h before; a second pass over the tokens computes the results.
// Splitting a sequence into calls or tiles differently changes only roundings.
//
// With very few channels, a tile has several parts, each of LANES lanes. A part writes its factor and own to shared
// memory, and every lane combines those of the parts before its own.
//
// Constants
//     state_t          element type of ssm_states
//     STATE_SIZE       states of a channel
//     LANES            lanes that share a part of a channel's tile, a power of two up to 32
//     PARTS            parts of a tile
//     GROUP            states whose scans overlap; divides STATE_SIZE
//     VEC_SIZE         tokens in one memory access

constexpr int TILE_TOKENS = PARTS * LANES * (VEC_SIZE > 4 ? VEC_SIZE : 4);
#include "selective_scan.cuh"

constexpr int CHANNEL_THREADS = PARTS * LANES, BLOCK_CHANNELS = NUM_THREADS / CHANNEL_THREADS;

// What tokens make of a state before them: factor * state + own.
struct Total { float factor, own; };

// What the threads of a channel share.
struct Channel {
    float rates[STATE_SIZE];        // A
    float h_before[STATE_SIZE];     // the states before the tile
    Total totals[2][PARTS][GROUP];  // of every part, double-buffered over groups of states
};

// Waits for all threads of the channel. All threads of the block call.
DEVICE void sync_channel() {
    if (PARTS > 1) __syncthreads();
    else sync_warp();
}

// The tokens of a lane: rates are in units of log2, inputs are delta * u.
struct Tokens {
    float rate[UNIT], input[UNIT], y[UNIT];
    float sum;  // sum of the rates

    // Loops over the states of the channel: adds to y, and writes the states after the tile to h_before. WHOLE: every
    // token of every calling lane lies in the tile.
    template <bool WHOLE>
    DEVICE void scan(const Rows& rows, const Tile& tile, Channel& shared, int part, int lane) {
        const int column = (part * LANES + lane) * UNIT;
        const auto load = [&](const scalar_t* row) {
            return WHOLE ? LoadedUnit::load(row + tile.origin + column) : tile.load(row, column);
        };
        // B and C of the next states are loaded before these states are scanned.
        LoadedUnit next_B[GROUP], next_C[GROUP];
        const scalar_t *B_row = rows.B, *C_row = rows.C;
        const auto load_group = [&] {
#pragma unroll
            for (int i = 0; i < GROUP; ++i, B_row += rows.B_stride, C_row += rows.C_stride) {
                next_B[i] = load(B_row);
                next_C[i] = load(C_row);
            }
        };
        load_group();
#pragma unroll 1
        for (int group = 0; group < STATE_SIZE; group += GROUP) {
            LoadedUnit B_units[GROUP], C_units[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                B_units[i] = next_B[i];
                C_units[i] = next_C[i];
            }
            if (group + GROUP < STATE_SIZE) load_group();
            float decay[GROUP][UNIT], added[GROUP][UNIT], before[GROUP], behind[GROUP], factor[GROUP], h[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const float rate_of_state = shared.rates[group + i];
                before[i] = PARTS > 1 || lane == 0 ? shared.h_before[group + i] : 0.0f;
                behind[i] = PARTS > 1 ? 0.0f : before[i];
                factor[i] = estimate_exp2(sum * rate_of_state);
                B_units[i].unit().to_floats(added[i]);
#pragma unroll
                for (int j = 0; j < UNIT; ++j) {
                    decay[i][j] = estimate_exp2(rate[j] * rate_of_state);
                    added[i][j] *= input[j];
                    behind[i] = fmaf(decay[i][j], behind[i], added[i][j]);
                }
            }
#pragma unroll
            for (int step = 1; step < LANES; step *= 2) {
                const int from = max(lane - step, 0);
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    const float h_from = shfl<LANES>(behind[i], from), factor_from = shfl<LANES>(factor[i], from);
                    behind[i] = lane < step ? behind[i] : fmaf(factor[i], h_from, behind[i]);
                    factor[i] = lane < step ? factor[i] : factor[i] * factor_from;
                }
            }
            if constexpr (PARTS > 1) add_parts(shared.totals[group / GROUP % 2], factor, behind, before, part, lane);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const float h_from = shfl<LANES>(behind[i], max(lane - 1, 0));
                h[i] = lane == 0 ? before[i] : h_from;
                float C[UNIT];
                C_units[i].unit().to_floats(C);
#pragma unroll
                for (int j = 0; j < UNIT; ++j) {
                    h[i] = fmaf(decay[i][j], h[i], added[i][j]);
                    y[j] = fmaf(h[i], C[j], y[j]);
                }
            }
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const float last = shfl<LANES>(h[i], LANES - 1);
                if (lane == 0 && part == PARTS - 1) shared.h_before[group + i] = last;
            }
        }
        if (PARTS > 1) sync_channel();  // before others are written
    }

private:
    // Replaces `before`, the states before the tile, by the states before the part, and updates `behind`, the states
    // after the lane's last token, from a start at 0 to a start at these states.
    DEVICE static void add_parts(Total (&totals)[PARTS][GROUP], const float (&factor)[GROUP], float (&behind)[GROUP],
                                 float (&before)[GROUP], int part, int lane) {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            if (lane == LANES - 1) totals[part][i] = {factor[i], behind[i]};
        }
        sync_channel();
#pragma unroll
        for (int earlier = 0; earlier < PARTS - 1; ++earlier) {
            if (earlier >= part) break;
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                before[i] = fmaf(totals[earlier][i].factor, before[i], totals[earlier][i].own);
            }
        }
#pragma unroll
        for (int i = 0; i < GROUP; ++i) behind[i] = fmaf(factor[i], before[i], behind[i]);
    }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
selective_scan_tokens(const scalar_t* u,               // [batch, dim, num_tokens] or [dim, num_tokens]
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

    const int thread = threadIdx.x % CHANNEL_THREADS, number = threadIdx.x / CHANNEL_THREADS, column = thread * UNIT;
    const int lane = thread % LANES, part = thread / LANES;
    const bool exists = number < rows.channels;
    // A channel that does not exist has rates and states of the last one, and no inputs; nothing is written for it.
    const int64_t c = min(number, rows.channels - 1);
    const scalar_t* const u_row = rows.u + c * rows.u_stride;
    scalar_t* const delta_row = rows.delta + c * rows.delta_stride;
    scalar_t* const z_row = rows.z ? rows.z + c * rows.z_stride : nullptr;
    const float bias = rows.bias ? rows.bias[c] : 0.0f, skip = rows.D ? rows.D[c] : 0.0f;
    state_t* const states = ssm_states + (channel + c) * state_stride;

    Channel& shared = reinterpret_cast<Channel*>(memory)[number];
    const bool continues = has_initial_state && has_initial_state[sequence];
    for (int n = thread; n < STATE_SIZE; n += CHANNEL_THREADS) {
        shared.rates[n] = A[(channel + c) * A_stride + n];
        shared.h_before[n] = continues && exists ? to_float(states[own.slot * slot_stride + n]) : 0.0f;
    }
    sync_channel();

    Tile tile = own.first_tile();
    LoadedUnit delta_unit, u_unit, z_unit;
    const auto load_inputs = [&](const Tile& of) {
        if (!exists || of.empty()) return;
        delta_unit = of.load(delta_row, column);
        u_unit = of.load(u_row, column);
    };
    load_inputs(tile);
    for (int64_t blocks_done = 0; !tile.empty();) {
        const Tile next = tile.next(own.end, own.block_size);
        if (rows.z && exists) z_unit = tile.load(z_row, column);
        Tokens tokens;
        auto& [rate, input, y, sum] = tokens;
        delta_unit.unit().to_floats(rate);
        u_unit.unit().to_floats(input);
        sum = 0.0f;
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
            const float biased = rate[j] + bias, step = rows.softplus ? softplus(biased) : biased;
            y[j] = rows.D ? skip * input[j] : 0.0f;
            // A token outside of the tile is no step.
            rate[j] = tile.has(column + j) ? step * LOG2_E : 0.0f;
            input[j] = tile.has(column + j) ? step * input[j] : 0.0f;
            sum += rate[j];
        }
        load_inputs(next);

        // Threads that wait for each other go the same way.
        if (PARTS > 1 ? !tile.has_all(0, TILE_TOKENS) : any_lane(!tile.has_all(column, UNIT))) {
            tokens.scan<false>(rows, tile, shared, part, lane);
        } else {
            tokens.scan<true>(rows, tile, shared, part, lane);
        }

        if (exists && !tile.has_none(column, UNIT)) {
            tile.store(delta_row, column, y);
            if (rows.z) {
                const unit_t z = z_unit.unit();
#pragma unroll
                for (int j = 0; j < UNIT; ++j) y[j] = gated_by_silu<scalar_t>(y[j], z[j]);
                tile.store(z_row, column, y);
            }
        }
        if (tile.ends_block()) {
            sync_channel();
            const int64_t to = own.slot_behind(tile, blocks_done++);
            for (int n = thread; n < STATE_SIZE && exists && to >= 0; n += CHANNEL_THREADS) {
                states[to * slot_stride + n] = from_float<state_t>(shared.h_before[n]);
            }
            sync_channel();
        }
        tile = next;
    }
}
