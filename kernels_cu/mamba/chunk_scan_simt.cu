// chunk_scan_simt: chunk_scan without MMAs. It serves float32, any size, stride and alignment, and warps of 64 lanes.
//
// Formula: the recurrence of chunk_scan.cu, token by token, in float32 throughout.
//
// Blocks: blockIdx.x counts heads and tiles of ROWS dimensions of a head; blockIdx.y is the segment (chunk_scan.cuh).
// A row of the block is a dimension of the head. LANES adjacent lanes share its state; lane i of them holds elements i,
// i + LANES, ... Tiles of TOKENS tokens are staged in shared memory.
//
// Constants, in addition to those of chunk_scan.cu
//     LANES, ROWS    lanes of a row and rows of a block; LANES is a power of two up to 32, the block has LANES * ROWS
//                    threads

#include "chunk_scan.cuh"
#include "reduce.cuh"
#include "vec.cuh"

constexpr int TOKENS = 16, NUM_THREADS = LANES * ROWS, TILES = ceil_div(HEAD_SIZE, ROWS);
constexpr int ITEMS = ceil_div(STATE_SIZE, LANES);  // state elements per lane

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
chunk_scan_simt(scalar_t* out,                      // [num_tokens, num_heads, HEAD_SIZE]
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
                int64_t z_stride, int64_t B_stride, int64_t C_stride, int64_t dt_stride, int64_t dt_step,
                int64_t D_stride, int64_t D_step, float dt_min, float dt_max) {
    await_previous_kernel();
    __shared__ float tile_b[TOKENS][STATE_SIZE];
    __shared__ float tile_c[TOKENS][STATE_SIZE];
    __shared__ float tile_x[TOKENS][ROWS];
    __shared__ float tile_y[TOKENS][ROWS];
    __shared__ float steps[TOKENS];
    __shared__ float kept[TOKENS];
    const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int head = blockIdx.x / TILES, first_dim = blockIdx.x % TILES * ROWS, rows = min(ROWS, HEAD_SIZE - first_dim);
    const int64_t group = head / heads_per_group, segment = blockIdx.y;
    const int64_t state_size = num_heads * HEAD_SIZE * STATE_SIZE;  // elements of the states of all heads
    const int64_t first_row = int64_t(head) * HEAD_SIZE + first_dim;
    const ScanChunks<index_t> chunks{cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx,     num_tokens,
                                     num_chunks, num_seqs,         chunk_size,         chunk_parts, part_tokens};
    const int first_part = chunks.first_of(segment, num_segments);
    const int end_part = chunks.first_of(segment + 1, num_segments);

    float h[ITEMS] = {};
    // Calls `visit` with each element of the thread's state and its offset in the states of all heads.
    const auto each_of_state = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int column = i * LANES + lane;
            if (row < rows && column < STATE_SIZE) visit(h[i], (first_row + row) * STATE_SIZE + column);
        }
    };
    const auto store_state = [&](auto* to, int64_t number) {
        each_of_state([&](float& value, int64_t at) { store_float(to + number * state_size + at, value); });
    };

    const float bias = dt_bias ? to_float(dt_bias[head]) : 0.0f, rate = A[head];
    float decay = 1.0f;  // total decay of the segment since its start; 0 once a sequence has begun in it
    for (int number = first_part; number < end_part; ++number) {
        const ScanPart part = chunks.at(number);
        if (part.restarts) {
            decay = 0.0f;
            each_of_state([&](float& value, int64_t at) {
                const bool given = initial_states && part.seq >= 0;
                value = given ? to_float(initial_states[int64_t(part.seq) * state_size + at]) : 0.0f;
            });
        } else if (!SEGMENT_STATES && number == first_part) {
            each_of_state([&](float& value, int64_t at) { value = segment_states[(segment - 1) * state_size + at]; });
        }
        for (int token = part.begin; token < part.end; token += TOKENS) {
            const int count = min(part.end - token, TOKENS);
            __syncthreads();
            for (int i = threadIdx.x; i < count * STATE_SIZE; i += NUM_THREADS) {
                const int64_t from = token + i / STATE_SIZE, column = group * STATE_SIZE + i % STATE_SIZE;
                tile_b[i / STATE_SIZE][i % STATE_SIZE] = to_float(B[from * B_stride + column]);
                if (!SEGMENT_STATES) tile_c[i / STATE_SIZE][i % STATE_SIZE] = to_float(C[from * C_stride + column]);
            }
            for (int i = threadIdx.x; i < count * rows; i += NUM_THREADS) {
                tile_x[i / rows][i % rows] = to_float(x[int64_t(token + i / rows) * x_stride + first_row + i % rows]);
            }
            if (int(threadIdx.x) < count) {
                const float raw = to_float(dt[int64_t(token + threadIdx.x) * dt_stride + head * dt_step]);
                const float step = time_step<SOFTPLUS>(raw, bias, dt_min, dt_max);
                steps[threadIdx.x] = step;
                kept[threadIdx.x] = expf(step * rate);
            }
            __syncthreads();
            for (int l = 0; l < count; ++l) {
                const float input = row < rows ? steps[l] * tile_x[l][row] : 0.0f, keep = kept[l];
                decay *= keep;
                float y = 0.0f;
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) {
                    const int column = i * LANES + lane;
                    if (STATE_SIZE % LANES == 0 || column < STATE_SIZE) {
                        h[i] = fmaf(keep, h[i], input * tile_b[l][column]);
                        if (!SEGMENT_STATES) y = fmaf(h[i], tile_c[l][column], y);
                    }
                }
                if constexpr (!SEGMENT_STATES) {
                    y = lane_reduce<Sum, LANES>(y);
                    if (lane == 0) tile_y[l][row] = y;
                }
            }
            if constexpr (!SEGMENT_STATES) {
                __syncthreads();
                for (int i = threadIdx.x; i < count * rows; i += NUM_THREADS) {
                    const int l = i / rows, dim = i % rows;
                    float y = tile_y[l][dim];
                    if (D) y = fmaf(to_float(D[head * D_stride + (first_dim + dim) * D_step]), tile_x[l][dim], y);
                    if (HAS_Z) y *= silu_of(to_float(z[int64_t(token + l) * z_stride + first_row + dim]));
                    out[int64_t(token + l) * out_stride + first_row + dim] = from_float<scalar_t>(y);
                }
            }
        }
        if constexpr (!SEGMENT_STATES) {
            if (CHUNK_STATES && part.chunk >= 0) store_state(states, part.chunk);
            if (!CHUNK_STATES && chunks.ends_sequence(part)) store_state(states, part.seq);
        }
    }
    if constexpr (SEGMENT_STATES) {
        store_state(segment_states, segment);
        if (threadIdx.x == 0 && first_dim == 0) segment_decays[segment * num_heads + head] = decay;
    } else if (!CHUNK_STATES && segment == 0) {
        write_states_without_chunks(states, initial_states, chunks, state_size, first_row * STATE_SIZE,
                                    rows * STATE_SIZE, threadIdx.x / WARP_SIZE, NUM_THREADS / WARP_SIZE);
    }
}
