// chunk_scan: the Mamba-2 scan for prefill (structured state-space duality, SSD), by MMAs.
//
// For one head, with the time steps d_l after bias, softplus and limits:
//
//     h_l = exp(A d_l) h_{l-1} + d_l x_l (outer) B_l,    y_l = h_l . C_l + D x_l,    out_l = T(y_l silu(z_l))
//
// For a tile of tokens, with a_l the sum of A d up to token l of the tile and h the state before the tile:
//
//     y_l = exp(a_l) h C_l + sum_{m <= l} exp(a_l - a_m) d_m (C_l . B_m) x_m + D x_l
//     h  <- exp(a_end) h + sum_m (exp(a_end - a_m) d_m x_m) (outer) B_m
//
// After Dao and Gu 2024, arXiv:2405.21060. States stay in registers from tile to tile, in float32. MMA operands are
// rounded to T: h, the weights exp(a_l - a_m) d_m (C_l . B_m), and the weighted x_m.
//
// Blocks: blockIdx.x counts runs of HEADS heads of one group, and tiles of HEAD_TILE dimensions of a head; blockIdx.y
// is the segment (chunk_scan.cuh). A block walks its parts in tiles of TOKENS tokens and copies the next tile to shared
// memory (or to registers, where async.cuh holds copies) while it computes this one.
//
// Warps: the rows of a block are (head, dimension). A warp owns ROW_TILES tiles of 16 rows, with the whole state of
// each row and y transposed (rows by tokens). All warps compute the weights (tokens by tokens) together. MMAs are those
// of product.cuh.
//
// Constants
//     scalar_t       T: element type of x, B, C, z and out: half_t or bf16_t
//     dt_t, bias_t, skip_t, initial_t, state_t    element types of dt, dt_bias, D, initial_states and states
//     index_t        element type of cu_seqlens, cu_chunk_seqlens, last_chunk_indices and seq_idx
//     HEAD_SIZE      elements of a head; a multiple of HEAD_TILE
//     STATE_SIZE     elements of B and C; a multiple of 16
//     HEADS          heads of a block; 1 if HEAD_TILE < HEAD_SIZE
//     HEAD_TILE      a multiple of 16
//     TOKENS         tokens of a tile: 32, or a multiple with SEGMENT_STATES
//     ROW_TILES      16-row tiles of a warp
//     STAGES         tiles in shared memory: 2; or 1, only where registers hold copies (async.cuh)
//     OUT_VEC        elements of out in one memory access: 4 or 8
//     SOFTPLUS, HAS_Z      options of the op
//     CHUNK_STATES   write the state at the end of every chunk, not of every sequence
//     SEGMENT_STATES first launch: write only segment_states and segment_decays, neither out nor states

#include "chunk_scan_tiles.cuh"

// Whether all gates of a block are loaded before one is used. On CUDA a warp owns more rows and has no registers left.
constexpr bool GATES_AHEAD = ON_MATRIX_CORES;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
chunk_scan(scalar_t* out,                      // [num_tokens, num_heads, HEAD_SIZE]
           state_t* states,                    // [num_seqs, num_heads, HEAD_SIZE, STATE_SIZE], or of chunks
           float* segment_states,              // [num_segments - 1, num_heads, HEAD_SIZE, STATE_SIZE]
           float* segment_decays,              // [num_segments - 1, num_heads]
           const scalar_t* x,                  // [num_tokens, num_heads, HEAD_SIZE]
           const dt_t* dt,                     // [num_tokens, num_heads]
           const float* A,                     // [num_heads]
           const scalar_t* B,                  // [num_tokens, num_groups, STATE_SIZE]
           const scalar_t* C,                  // [num_tokens, num_groups, STATE_SIZE]
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
           int64_t z_stride, int64_t B_stride, int64_t C_stride, int64_t dt_stride, int64_t dt_step, int64_t D_stride,
           int64_t D_step, float dt_min, float dt_max) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ decays_t decays[2];
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int g = lane_row(lane), t = lane_column(lane);
    const int first_head = int(blockIdx.x) / (HEAD_SIZE / HEAD_TILE) * HEADS;
    const int first_dim = int(blockIdx.x) % (HEAD_SIZE / HEAD_TILE) * HEAD_TILE;
    const int group = first_head / int(heads_per_group), segment = blockIdx.y;
    const int64_t state_size = num_heads * HEAD_SIZE * STATE_SIZE;          // elements of the states of all heads
    const int64_t first_row = int64_t(first_head) * HEAD_SIZE + first_dim;  // among the rows of all heads
    const ScanChunks<index_t> chunks{cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx,     num_tokens,
                                     num_chunks, num_seqs,         chunk_size,         chunk_parts, part_tokens};
    const int end_part = chunks.first_of(segment + 1, num_segments);

    const Stages stages{reinterpret_cast<unsigned char*>(memory)};
    // The last warps compute the decays, because they have the least work on the weights.
    DecayFinder<dt_t, HEADS, TOKENS, NUM_THREADS / 32> finder;
    typename b_tile_t::copy_t<NUM_THREADS> copy_b;
    TokenCopy<STATE_SIZE / 8, TOKENS, NUM_THREADS> copy_c;
    TokenCopy<ROWS / 8, TOKENS, NUM_THREADS> copy_x;
    // Copies `count` tokens from `token` on to shared memory, padded with zeros, and loads their time steps.
    const auto load = [&](int stage, int token, int count) {
        const int64_t row = token, column = group * STATE_SIZE;
        copy_b.load(stages.b(stage).tile, B + row * B_stride + column, B_stride, count);
        if (!SEGMENT_STATES) copy_c.load(stages.c(stage), C + row * C_stride + column, C_stride, count);
        copy_x.load(stages.x(stage), x + row * x_stride + first_row, x_stride, count);
        cp_async_commit();
        finder.load(dt + row * dt_stride + first_head * dt_step, dt_stride, dt_step, count);
    };
    const auto store_held = [&](int stage) {
        copy_b.store(stages.b(stage).tile);
        if (!SEGMENT_STATES) copy_c.store(stages.c(stage));
        copy_x.store(stages.x(stage));
    };
    const auto find_decays = [&](int stage, int count) {
        finder.template find<SOFTPLUS>(decays[stage], A + first_head, dt_bias ? dt_bias + first_head : nullptr, dt_min,
                                       dt_max, count);
    };

    Block h[ROW_TILES][STEPS];
    const auto each_of_state = [&](auto visit) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int n = 0; n < STEPS; ++n) {
#pragma unroll
                for (int i = 0; i < BLOCK_PAIRS; ++i) {
                    const int64_t row = first_row + tile_row(r) + pair_row(i) + g;
                    visit(r, h[r][n].at(i, 0), h[r][n].at(i, 1), row * STATE_SIZE + n * 16 + pair_column(i) + t);
                }
            }
        }
    };
    const auto clear_state = [&]() {
        each_of_state([&](int, float& low, float& high, int64_t) { low = high = 0.0f; });
    };
    const auto begin_sequence = [&](int seq) {
        if (!initial_states || seq < 0) return clear_state();
        each_of_state([&](int, float& low, float& high, int64_t at) {
            const auto pair = Vec<initial_t, 2>::load(initial_states + int64_t(seq) * state_size + at);
            low = pair[0];
            high = pair[1];
        });
    };
    const auto store_state = [&](int64_t number) {
        each_of_state([&](int, float& low, float& high, int64_t at) {
            const float pair[2] = {low, high};
            Vec<state_t, 2>::from_floats(pair).store(states + number * state_size + at);
        });
    };

    clear_state();
    float log_decay[ROW_TILES] = {};  // log2 of the segment's total decay
    bool restarted = false;           // the segment has begun a sequence
    // D of the lane's rows.
    float skip[ROW_TILES][LANE_ROWS] = {};
    if (!SEGMENT_STATES && D) {
#pragma unroll
        for (int i = 0; i < LANE_ROWS * ROW_TILES; ++i) {
            const int row = tile_row(i / LANE_ROWS) + i % LANE_ROWS * ROW_STEP + g;
            const int64_t head = first_head + row / HEAD_TILE, dim = first_dim + row % HEAD_TILE;
            skip[i / LANE_ROWS][i % LANE_ROWS] = to_float(D[head * D_stride + dim * D_step]);
        }
    }

    ScanTile tile{chunks.first_of(segment, num_segments), 0, {}};
    if (tile.number < end_part) {
        tile.part = chunks.at(tile.number);
        tile.token = tile.part.begin;
        load(0, tile.token, tile.count());
        store_held(0);
        find_decays(0, tile.count());
        if (!SEGMENT_STATES && !tile.part.restarts) {
            each_of_state([&](int, float& low, float& high, int64_t at) {
                const auto pair = Vec<float, 2>::load(segment_states + (segment - 1) * state_size + at);
                low = pair[0];
                high = pair[1];
            });
        }
    }
    for (int stage = 0; tile.number < end_part; stage ^= 1) {
        const ScanTile next = chunks.template tile_behind<TOKENS>(tile, end_part);
        const bool more = next.number < end_part;
        const int token = tile.token, count = tile.count();

        cp_async_wait<0>();
        __syncthreads();
        if (more) load(stage ^ 1, next.token, next.count());
        if (token == tile.part.begin && tile.part.restarts) {
            begin_sequence(tile.part.seq);
            restarted = true;
        }
        const decays_t& decay = decays[stage];
        const b_tile_t b_tile = stages.b(stage);
        const x_tile_t x_tile = stages.x(stage);

        uint32_t xs[ROW_TILES][2][BLOCK_PAIRS];  // x transposed: rows by tokens
        if constexpr (!SEGMENT_STATES) {
            // Weights: the 16 x 16 token tiles on the diagonal and below it, distributed over the warps.
            const c_tile_t c_tile = stages.c(stage);
            for (int tile = warp; tile < 3; tile += NUM_WARPS) {
                const int row_tile = (tile + 1) / 2, column_tile = tile / 2;
                Block products = {};
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    order_steps(step);
                    uint32_t a[SHORT_WORDS], b[SHORT_WORDS];
                    load_rows(a, c_tile, row_tile * 16, step, lane);
                    b_tile.load_tokens(b, column_tile * 16, step, lane);
                    products.add_product<scalar_t>(a, b);
                }
#pragma unroll
                for (int head = 0; head < HEADS; ++head) {
#pragma unroll
                    for (int i = 0; i < BLOCK_PAIRS; ++i) {
                        const int l = row_tile * 16 + pair_row(i) + g, m = token_of(column_tile, i);
                        const float sum = decay.sums[head][l];
                        float weight[2];
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const float factor =
                                estimate_exp2(sum - decay.sums[head][m + j]) * decay.steps[head][m + j];
                            weight[j] = m + j <= l ? factor * products.at(i, j) : 0.0f;
                        }
                        scalar_t* const to = stages.weights(head).at(l, m / 8) + m % 8;
                        *reinterpret_cast<uint32_t*>(to) = pack_pair<scalar_t>(weight[0], weight[1]);
                    }
                }
            }

            // Y = h C, then decayed by token.
            result_t y = {};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                order_steps(step);
                uint32_t a[ROW_TILES][SHORT_WORDS];
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) h[r][step].template pack<scalar_t>(a[r]);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    uint32_t b[SHORT_WORDS];
                    load_columns(b, c_tile, n * 16, step, lane);
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r) y[r][n].template add_product<scalar_t>(a[r], b);
                }
            }
#pragma unroll
            for (int i = 0; i < ROW_TILES * 2 * BLOCK_PAIRS * 2; ++i) {
                const int r = i / (4 * BLOCK_PAIRS), n = i / (2 * BLOCK_PAIRS) % 2, pair = i / 2 % BLOCK_PAIRS;
                y[r][n].at(pair, i % 2) *= decay.kept[head_of(r)][token_of(n, pair) + i % 2];
            }

            __syncthreads();
            // Y += (causal weights) x + D x.
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    load_block(xs[r][k], x_tile, k * 16, warp * ROW_TILES + r, lane);
                    uint32_t a[SHORT_WORDS];
                    make_operand(a, xs[r][k]);
#pragma unroll
                    for (int n = k; n < 2; ++n) {
                        uint32_t b[SHORT_WORDS];
                        load_columns(b, stages.weights(head_of(r)), n * 16, k, lane);
                        y[r][n].template add_product<scalar_t>(a, b);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < ROW_TILES * 2; ++k) {
                const int r = k / 2, n = k % 2;
                const auto gate_of = [&](int pair) {
                    const int64_t row = first_row + tile_row(r) + pair_row(pair) + g;
                    return z + int64_t(token + token_of(n, pair)) * z_stride + row;
                };
                scalar_t gates[BLOCK_PAIRS][2] = {};
#pragma unroll
                for (int i = 0; HAS_Z && GATES_AHEAD && i < 2 * BLOCK_PAIRS; ++i) {
                    const bool exists = token_of(n, i / 2) + i % 2 < count;
                    if (exists) gates[i / 2][i % 2] = gate_of(i / 2)[i % 2 * z_stride];
                }
#pragma unroll
                for (int i = 0; i < BLOCK_PAIRS; ++i) {
                    float x_values[2];
                    unpack_pair<scalar_t>(xs[r][n][i], x_values[0], x_values[1]);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float& result = y[r][n].at(i, j);
                        result = fmaf(skip[r][pair_row(i) / ROW_STEP], x_values[j], result);
                        const bool exists = token_of(n, i) + j < count;
                        if (HAS_Z && GATES_AHEAD) result *= silu_of(to_float(gates[i][j]));
                        else if (HAS_Z && exists) result *= silu_of(to_float(gate_of(i)[j * z_stride]));
                    }
                }
            }
            store_results(y, x_tile, out + int64_t(token) * out_stride + first_row, out_stride, count);
        }

        // h = exp(a_end) h + (weighted x) B.
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            const float kept = decay.kept[head_of(r)][TOKENS - 1];
            if (SEGMENT_STATES) log_decay[r] += decay.sums[head_of(r)][TOKENS - 1];
#pragma unroll
            for (int i = 0; i < STEPS * BLOCK_PAIRS * 2; ++i)
                h[r][i / 2 / BLOCK_PAIRS].at(i / 2 % BLOCK_PAIRS, i % 2) *= kept;
        }
#pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) {
            uint32_t weighted[ROW_TILES][SHORT_WORDS];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                const float (&weights)[TOKENS] = decay.weights[head_of(r)];
                uint32_t pairs[BLOCK_PAIRS];
                if (SEGMENT_STATES) load_block(pairs, x_tile, k * 16, warp * ROW_TILES + r, lane);
#pragma unroll
                for (int i = 0; i < BLOCK_PAIRS; ++i) {
                    const int m = k * 16 + pair_column(i) + t;
                    float low, high;
                    unpack_pair<scalar_t>(SEGMENT_STATES ? pairs[i] : xs[r][k % 2][i], low, high);
                    pairs[i] = pack_pair<scalar_t>(low * weights[m], high * weights[m + 1]);
                }
                make_operand(weighted[r], pairs);
            }
#pragma unroll
            for (int n = 0; n < STEPS; ++n) {
                order_steps(n);
                uint32_t b[SHORT_WORDS];
                b_tile.load_elements(b, k * 16, n, lane);
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) h[r][n].template add_product<scalar_t>(weighted[r], b);
            }
        }

        if (!SEGMENT_STATES && next.number != tile.number) {
            if (CHUNK_STATES && tile.part.chunk >= 0) store_state(tile.part.chunk);
            if (!CHUNK_STATES && chunks.ends_sequence(tile.part)) store_state(tile.part.seq);
        }
        if (more) find_decays(stage ^ 1, next.count());
        if (STAGES == 1) __syncthreads();
        if (more) store_held(stage ^ 1);
        tile = next;
    }

    if constexpr (SEGMENT_STATES) {
        each_of_state([&](int, float& low, float& high, int64_t at) {
            const float pair[2] = {low, high};
            Vec<float, 2>::from_floats(pair).store(segment_states + segment * state_size + at);
        });
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            const bool first_of_head = tile_row(r) % HEAD_TILE == 0 && first_dim == 0;
            if (lane == 0 && first_of_head) {
                segment_decays[segment * num_heads + first_head + head_of(r)] =
                    restarted ? 0.0f : estimate_exp2(log_decay[r]);
            }
        }
    } else if (!CHUNK_STATES && segment == 0) {
        write_states_without_chunks(states, initial_states, chunks, state_size, first_row * STATE_SIZE,
                                    ROWS * STATE_SIZE, warp, NUM_WARPS);
    }
}
