// chunk_scan_wgmma: the scan of Mamba-2 over prompts, by asynchronous matrix products (sm_90a).
//
// chunk_scan.cu has the formulas. A tile here has 64 tokens, and a warpgroup has 64 rows of (head, dimension): their whole
// state, in the accumulators of products, and y transposed, rows by tokens. Of each tile
//
//     y = h C^T,  decayed by token          h is packed to an operand in registers
//     G = C B^T   tokens by tokens          each warpgroup a part of the columns, for the heads of all of them
//     y += x^T W^T                          W: G weighted by decays, of each head, through shared memory
//     h = exp(a_end) h + (weighted x)^T B   B runs along its rows
//
// Blocks, segments and constants are those of chunk_scan.cu, but
//     HEADS * HEAD_TILE   64 or 128: a warpgroup or two
//     STATE_SIZE          64 or 128

#include "chunk_scan_decays.cuh"
#include "state_tiles.cuh"
#include "wgmma.cuh"

constexpr int TOKENS = 64, WARPGROUP_ROWS = 64, WIDE = 64;  // elements of a row of a swizzled tile
constexpr int ROWS = HEADS * HEAD_TILE, WARPGROUPS = ROWS / WARPGROUP_ROWS, NUM_THREADS = WARPGROUPS * 128;
constexpr int HALVES = STATE_SIZE / WIDE, STATE_STEPS = STATE_SIZE / 16, TOKEN_STEPS = TOKENS / 16;
constexpr int G_COLUMNS = TOKENS / WARPGROUPS;  // of a warpgroup
static_assert(HEADS == 1 || HEAD_TILE == HEAD_SIZE);
static_assert(ROWS % WARPGROUP_ROWS == 0 && STATE_SIZE % WIDE == 0);

// 64 rows of 64 elements. B and C have a row for each token and STATE_SIZE / 64 such tiles, x has one for each
// warpgroup, and the weights, row l and column m, have one for each head.
using tile_t = SwizzledTile<scalar_t, WIDE / 8>;
constexpr int TILE_BYTES = tile_t::bytes(TOKENS);
constexpr int STAGE_TILES = (SEGMENT_STATES ? 1 : 2) * HALVES + WARPGROUPS;
constexpr int NUM_TILES = 2 * STAGE_TILES + (SEGMENT_STATES ? 0 : HEADS);  // two stages, and the weights
// Whether decays are found when products are done and registers are free, not while they run.
constexpr bool DECAYS_LAST = SEGMENT_STATES || HAS_Z;
using decays_t = Decays<HEADS, TOKENS>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
chunk_scan_wgmma(scalar_t* out,                      // [num_tokens, num_heads, HEAD_SIZE]
                 state_t* states,                    // [num_seqs, num_heads, HEAD_SIZE, STATE_SIZE], or of chunks
                 float* segment_states,              // [num_segments - 1, num_heads, HEAD_SIZE, STATE_SIZE]
                 float* segment_decays,              // [num_segments - 1, num_heads]
                 const scalar_t* x,                  // [num_tokens, num_heads, HEAD_SIZE]
                 const dt_t* dt,                     // [num_tokens, num_heads]
                 const float* A,                     // [num_heads]
                 const scalar_t* B,                  // [num_tokens, num_groups, STATE_SIZE]
                 const scalar_t* C,                  // likewise
                 const skip_t* D,                    // [num_heads] or [num_heads, HEAD_SIZE]
                 const scalar_t* z,                  // [num_tokens, num_heads, HEAD_SIZE]
                 const bias_t* dt_bias,              // [num_heads]
                 const initial_t* initial_states,    // [num_seqs, num_heads, HEAD_SIZE, STATE_SIZE]
                 const index_t* cu_seqlens,          // [num_seqs + 1]
                 const index_t* cu_chunk_seqlens,    // [num_chunks + 1]
                 const index_t* last_chunk_indices,  // [num_seqs]
                 const index_t* seq_idx,             // [num_chunks]
                 int num_tokens, int num_chunks, int num_seqs, int num_segments, int chunk_parts, int part_tokens,
                 int64_t chunk_size, int64_t num_heads, int64_t heads_per_group, int64_t out_stride, int64_t x_stride,
                 int64_t z_stride, int64_t B_stride, int64_t C_stride, int64_t dt_stride, int64_t dt_step,
                 int64_t D_stride, int64_t D_step, float dt_min, float dt_max) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];  // the swizzle counts rows from a multiple of 1024 bytes
    decays_t* const decays = reinterpret_cast<decays_t*>(shared + NUM_TILES * TILE_BYTES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warpgroup = shfl<32>(warp, 0) / 4, quarter = warp % 4;  // the compiler sees that a warp has one warpgroup
    const int first_head = int(blockIdx.x) / (HEAD_SIZE / HEAD_TILE) * HEADS;
    const int first_dim = int(blockIdx.x) % (HEAD_SIZE / HEAD_TILE) * HEAD_TILE;
    const int group = first_head / int(heads_per_group), segment = blockIdx.y;
    const int first_row = first_head * HEAD_SIZE + first_dim;                     // among the rows of all heads
    const int64_t state_size = int64_t(int(num_heads) * HEAD_SIZE) * STATE_SIZE;  // elements of the states of all heads
    const int own_head = warpgroup * WARPGROUP_ROWS / HEAD_TILE;        // of the warpgroup, counted in the block
    const int own_row = warpgroup * WARPGROUP_ROWS + quarter * 16 + g;  // of the block; the lane has row + 8, too
    const ScanChunks<index_t> chunks{cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx,     num_tokens,
                                     num_chunks, num_seqs,         chunk_size,         chunk_parts, part_tokens};
    const int end_part = chunks.first_of(segment + 1, num_segments);

    const auto tile_at = [&](int number) { return tile_t{reinterpret_cast<scalar_t*>(shared + number * TILE_BYTES)}; };
    const auto b_at = [&](int stage, int half) { return tile_at(stage * STAGE_TILES + half); };
    const auto x_at = [&](int stage, int of) { return tile_at(stage * STAGE_TILES + HALVES + of); };
    const auto c_at = [&](int stage, int half) { return tile_at(stage * STAGE_TILES + HALVES + WARPGROUPS + half); };
    const auto weights_of = [&](int head) { return tile_at(2 * STAGE_TILES + head); };

    DecayFinder<dt_t, HEADS, TOKENS, NUM_THREADS / 32> finder;
    // Copies `count` tokens from `token` on to shared memory, zeros behind them, and loads their time steps.
    const auto load = [&](int stage, int token, int count) {
        const int64_t row = token, column = group * STATE_SIZE;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const int64_t from = column + half * WIDE;
            copy_tokens<WIDE / 8, TOKENS, NUM_THREADS>(b_at(stage, half), B + row * B_stride + from, B_stride, count);
            if (!SEGMENT_STATES)
                copy_tokens<WIDE / 8, TOKENS, NUM_THREADS>(c_at(stage, half), C + row * C_stride + from, C_stride,
                                                           count);
        }
#pragma unroll
        for (int of = 0; of < WARPGROUPS; ++of) {
            const scalar_t* const from = x + row * x_stride + first_row + of * WARPGROUP_ROWS;
            copy_tokens<WIDE / 8, TOKENS, NUM_THREADS>(x_at(stage, of), from, x_stride, count);
        }
        cp_async_commit();
        finder.load(dt + row * dt_stride + first_head * dt_step, dt_stride, dt_step, count);
    };
    const auto find_decays = [&](int stage, int count) {
        finder.template find<SOFTPLUS>(decays[stage], A + first_head, dt_bias ? dt_bias + first_head : nullptr, dt_min,
                                       dt_max, count);
    };

    float h[STATE_SIZE / 2];
    const auto each_of_state = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < STATE_SIZE / 2; i += 2) {
            const int row = first_row + own_row + i / 2 % 2 * 8;
            visit(h[i], h[i + 1], int64_t(row) * STATE_SIZE + i / 4 * 8 + 2 * t);
        }
    };
    const auto begin_sequence = [&](int seq) {
        each_of_state([&](float& low, float& high, int64_t at) {
            low = high = 0.0f;
            if (!initial_states || seq < 0) return;
            const auto pair = Vec<initial_t, 2>::load(initial_states + int64_t(seq) * state_size + at);
            low = pair[0];
            high = pair[1];
        });
    };
    const auto store_state = [&](int64_t number) {
        each_of_state([&](float& low, float& high, int64_t at) {
            const float pair[2] = {low, high};
            Vec<state_t, 2>::from_floats(pair).store(states + number * state_size + at);
        });
    };

    begin_sequence(-1);
    float log_decay = 0.0f;  // of the segment, in units of log2
    bool restarted = false;  // the segment has begun a sequence
    float skip[2] = {};      // D of the lane's rows, the factors of x in the output
    if (!SEGMENT_STATES && D) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64_t head = first_head + (own_row + i * 8) / HEAD_TILE;
            skip[i] = to_float(D[head * D_stride + (first_dim + (own_row + i * 8) % HEAD_TILE) * D_step]);
        }
    }

    ScanTile tile{chunks.first_of(segment, num_segments), 0, {}};
    if (tile.number < end_part) {
        tile.part = chunks.at(tile.number);
        tile.token = tile.part.begin;
        load(0, tile.token, tile.count());
        find_decays(0, tile.count());
        if (!SEGMENT_STATES && !tile.part.restarts) {
            each_of_state([&](float& low, float& high, int64_t at) {
                const auto pair = Vec<float, 2>::load(segment_states + (segment - 1) * state_size + at);
                low = pair[0];
                high = pair[1];
            });
        }
    }
    for (int stage = 0; tile.number < end_part; stage ^= 1) {
        const ScanTile next = chunks.template tile_behind<TOKENS>(tile, end_part);
        cp_async_wait<0>();
        fence_proxy_async();
        __syncthreads();
        const bool more = next.number < end_part;
        if (more) load(stage ^ 1, next.token, next.count());
        if (tile.token == tile.part.begin && tile.part.restarts) {
            begin_sequence(tile.part.seq);
            restarted = true;
        }
        const decays_t& decay = decays[stage];
        const tile_t x_tile = x_at(stage, warpgroup);
        const uint64_t b_rows = make_smem_desc(b_at(stage, 0).data, 1024, TILE_BYTES);

        uint32_t xs[TOKEN_STEPS][4], weighted[TOKEN_STEPS][4];  // x transposed: rows by tokens
        const auto load_inputs = [&] {
#pragma unroll
            for (int k = 0; k < TOKEN_STEPS; ++k) {
                auto& inputs = SEGMENT_STATES ? weighted[k] : xs[k];
                load_transposed(inputs, x_tile, k * 16, quarter);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* const weights = decay.weights[own_head] + k * 16 + i / 2 * 8 + 2 * t;
                    float low, high;
                    unpack_pair<scalar_t>(inputs[i], low, high);
                    weighted[k][i] = pack_pair<scalar_t>(low * weights[0], high * weights[1]);
                }
            }
        };
        float y[TOKENS / 2];
        if constexpr (SEGMENT_STATES) {
            load_inputs();
        } else {
            uint32_t state[STATE_STEPS][4];
#pragma unroll
            for (int i = 0; i < STATE_SIZE / 2; i += 2) {
                state[i / 8][i / 2 % 4] = pack_pair<scalar_t>(h[i], h[i + 1]);
            }
#pragma unroll
            for (int step = 0; step < STATE_STEPS; ++step) warpgroup_fence_operand(state[step]);
            float products[G_COLUMNS / 2];  // G
            warpgroup_fence_operand(products);
            warpgroup_fence_operand(y);
            const uint64_t c_rows = make_smem_desc(c_at(stage, 0).data);
            // Of products that sum over elements of the state: where those of a step lie behind the first.
            const auto step_bytes = [](int step) { return step % 4 * 32 + step / 4 * TILE_BYTES; };
            warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < STATE_STEPS; ++step) {
                const uint64_t columns = advance_smem_desc(b_rows, warpgroup * G_COLUMNS * WIDE * 2 + step_bytes(step));
                wgmma<scalar_t, G_COLUMNS>(products, advance_smem_desc(c_rows, step_bytes(step)), columns, step > 0);
            }
            warpgroup_commit_batch();
#pragma unroll
            for (int step = 0; step < STATE_STEPS; ++step) {
                wgmma<scalar_t, TOKENS>(y, state[step], advance_smem_desc(c_rows, step_bytes(step)), step > 0);
            }
            warpgroup_commit_batch();
            load_inputs();

            warpgroup_wait<1>();
            warpgroup_fence_operand(products);
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
#pragma unroll
                for (int i = 0; i < G_COLUMNS / 2; i += 2) {
                    const int l = quarter * 16 + i / 2 % 2 * 8 + g;
                    const int m = warpgroup * G_COLUMNS + i / 4 * 8 + 2 * t;
                    float weight[2];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float factor =
                            estimate_exp2(decay.sums[head][l] - decay.sums[head][m + j]) * decay.steps[head][m + j];
                        weight[j] = m + j <= l ? factor * products[i + j] : 0.0f;
                    }
                    scalar_t* const to = weights_of(head).at(l, m / 8) + 2 * t;
                    *reinterpret_cast<uint32_t*>(to) = pack_pair<scalar_t>(weight[0], weight[1]);
                }
            }
            fence_proxy_async();
            warpgroup_wait<0>();
            warpgroup_fence_operand(y);
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) y[i] *= decay.kept[own_head][i / 4 * 8 + 2 * t + i % 2];
            __syncthreads();
        }

        const float kept = decay.kept[own_head][TOKENS - 1];
        if (SEGMENT_STATES) log_decay += decay.sums[own_head][TOKENS - 1];
#pragma unroll
        for (int i = 0; i < STATE_SIZE / 2; ++i) h[i] *= kept;
#pragma unroll
        for (int k = 0; k < TOKEN_STEPS; ++k) warpgroup_fence_operand(weighted[k]);
        if constexpr (!SEGMENT_STATES) {
#pragma unroll
            for (int k = 0; k < TOKEN_STEPS; ++k) warpgroup_fence_operand(xs[k]);
            warpgroup_fence_operand(y);
        }
        warpgroup_fence_operand(h);
        warpgroup_arrive();
        if constexpr (!SEGMENT_STATES) {
            const uint64_t weight_rows = make_smem_desc(weights_of(own_head).data);
#pragma unroll
            for (int k = 0; k < TOKEN_STEPS; ++k) {
                wgmma<scalar_t, TOKENS>(y, xs[k], advance_smem_desc(weight_rows, k * 32));
            }
            warpgroup_commit_batch();
        }
#pragma unroll
        for (int k = 0; k < TOKEN_STEPS; ++k) {
            const uint64_t tokens = advance_smem_desc(b_rows, k * 16 * WIDE * 2);
            wgmma<scalar_t, STATE_SIZE, true>(h, weighted[k], tokens);
        }
        warpgroup_commit_batch();
        if (!DECAYS_LAST && more) find_decays(stage ^ 1, next.count());

        if constexpr (!SEGMENT_STATES) {
            warpgroup_wait<1>();
            warpgroup_fence_operand(y);
#pragma unroll
            for (int i = 0; i < TOKENS / 2; i += 2) {
                const int half = i / 2 % 2, l = i / 4 * 8 + 2 * t;
                float low, high;
                unpack_pair<scalar_t>(xs[i / 8][i / 4 % 2 * 2 + half], low, high);
                y[i] = fmaf(skip[half], low, y[i]);
                y[i + 1] = fmaf(skip[half], high, y[i + 1]);
                if constexpr (HAS_Z) {
                    const scalar_t* const gate =
                        z + int64_t(tile.token + l) * z_stride + first_row + own_row + half * 8;
                    if (l < tile.count()) y[i] *= silu_of(to_float(gate[0]));
                    if (l + 1 < tile.count()) y[i + 1] *= silu_of(to_float(gate[z_stride]));
                }
            }
            // The results go through shared memory, where x of the warp's rows was: then a lane stores a row's vector.
            sync_warp();
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n += 2) {
                const uint32_t results[4] = {
                    pack_pair<scalar_t>(y[4 * n], y[4 * n + 1]), pack_pair<scalar_t>(y[4 * n + 2], y[4 * n + 3]),
                    pack_pair<scalar_t>(y[4 * n + 4], y[4 * n + 5]), pack_pair<scalar_t>(y[4 * n + 6], y[4 * n + 7])};
                stmatrix<4, true>(x_tile.at(n * 8 + lane / 16 * 8 + lane % 8, quarter * 2 + lane / 8 % 2), results);
            }
            sync_warp();
            const int first = lane / 2, chunk = quarter * 2 + lane % 2;
            scalar_t* to = out + int64_t(tile.token + first) * out_stride + first_row + warpgroup * WARPGROUP_ROWS;
#pragma unroll
            for (int l = first; l < TOKENS + first; l += 16) {
                const auto result = Vec<scalar_t, 8>::load(x_tile.at(l, chunk));
                if (l < tile.count()) result.template store<OUT_VEC>(to + chunk * 8);
                to += 16 * out_stride;
            }
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(h);
        if (DECAYS_LAST && more) find_decays(stage ^ 1, next.count());
        if (!SEGMENT_STATES && next.number != tile.number) {
            if (CHUNK_STATES && tile.part.chunk >= 0) store_state(tile.part.chunk);
            if (!CHUNK_STATES && chunks.ends_sequence(tile.part)) store_state(tile.part.seq);
        }
        tile = next;
    }

    if constexpr (SEGMENT_STATES) {
        each_of_state([&](float& low, float& high, int64_t at) {
            const float pair[2] = {low, high};
            Vec<float, 2>::from_floats(pair).store(segment_states + segment * state_size + at);
        });
        const bool first_of_head = (warpgroup * WARPGROUP_ROWS) % HEAD_TILE == 0 && first_dim == 0;
        if (quarter == 0 && lane == 0 && first_of_head) {
            segment_decays[segment * num_heads + first_head + own_head] = restarted ? 0.0f : estimate_exp2(log_decay);
        }
    } else if (!CHUNK_STATES && segment == 0) {
        write_states_without_chunks(states, initial_states, chunks, state_size, int64_t(first_row) * STATE_SIZE,
                                    ROWS * STATE_SIZE, warp, NUM_THREADS / 32);
    }
}
