// chunk_scan_states: the states of segments of the chunked scan (chunk_scan.cuh), by WGMMA (sm_90a).
//
//     h <- exp(a_end) h + sum_m (exp(a_end - a_m) d_m x_m) (outer) B_m        for each tile of 64 tokens
//
// as chunk_scan.cu with SEGMENT_STATES; the header of chunk_scan.cu defines a, d and the blocks. A segment begins with
// a state of zeros, and each sequence that begins in it restarts from its initial state.
//
// Warpgroups: each holds 64 rows of (head, dimension) with their whole state in WGMMA accumulators. Operand A is x,
// transposed and weighted, in registers; operand B is B in shared memory, with tokens as K. Tiles are copied to shared
// memory two tiles ahead.
//
// Constants
//     scalar_t             element type of x and B: half_t or bf16_t
//     dt_t, bias_t, initial_t   element types of dt, dt_bias and initial_states
//     index_t              element type of cu_seqlens, cu_chunk_seqlens, last_chunk_indices and seq_idx
//     HEAD_SIZE            elements of a head; a multiple of HEAD_TILE
//     STATE_SIZE           elements of B: 64 or 128
//     HEADS, HEAD_TILE     heads of a block, and dimensions of each; HEADS * HEAD_TILE is 64 or 128
//     SOFTPLUS             option of the op

#include "chunk_scan_decays.cuh"
#include "state_tiles.cuh"
#include "wgmma.cuh"

constexpr int TOKENS = 64, WARPGROUP_ROWS = 64, WIDE = 64;  // elements of a row of a swizzled tile
constexpr int STAGES = 3, STEPS = TOKENS / 16;
constexpr int ROWS = HEADS * HEAD_TILE, WARPGROUPS = ROWS / WARPGROUP_ROWS, NUM_THREADS = WARPGROUPS * 128;
constexpr int PARTS = STATE_SIZE / WIDE;  // tiles of B
static_assert(HEADS == 1 || HEAD_TILE == HEAD_SIZE);
static_assert(ROWS % WARPGROUP_ROWS == 0 && STATE_SIZE % WIDE == 0);

using tile_t = SwizzledTile<scalar_t, WIDE / 8>;  // a row for each token
constexpr int TILE_BYTES = tile_t::bytes(TOKENS);
using decays_t = Decays<HEADS, TOKENS>;
using finder_t = DecayFinder<dt_t, HEADS, TOKENS, NUM_THREADS / 32>;

// What a block has in shared memory. The swizzle counts rows from a multiple of 1024 bytes.
struct alignas(1024) Shared {
    struct Stage { uint8_t b[PARTS][TILE_BYTES], x[WARPGROUPS][TILE_BYTES]; } stages[STAGES];
    decays_t decays[2];
};
DEVICE tile_t tile_at(uint8_t* bytes) { return {reinterpret_cast<scalar_t*>(bytes)}; }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
chunk_scan_states(float* segment_states,              // [num_segments - 1, num_heads, HEAD_SIZE, STATE_SIZE]
                  float* segment_decays,              // [num_segments - 1, num_heads]
                  const scalar_t* x,                  // [num_tokens, num_heads, HEAD_SIZE]
                  const dt_t* dt,                     // [num_tokens, num_heads]
                  const float* A,                     // [num_heads]
                  const scalar_t* B,                  // [num_tokens, num_groups, STATE_SIZE]
                  const bias_t* dt_bias,              // [num_heads]
                  const initial_t* initial_states,    // [num_seqs, num_heads, HEAD_SIZE, STATE_SIZE]
                  const index_t* cu_seqlens,          // [num_seqs + 1]
                  const index_t* cu_chunk_seqlens,    // [num_chunks + 1]
                  const index_t* last_chunk_indices,  // [num_seqs]
                  const index_t* seq_idx,             // [num_chunks]
                  int num_tokens, int num_chunks, int num_seqs, int num_segments, int chunk_parts, int part_tokens,
                  int64_t chunk_size, int64_t num_heads, int64_t heads_per_group, int64_t x_stride, int64_t B_stride,
                  int64_t dt_stride, int64_t dt_step, float dt_min, float dt_max) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warpgroup = shfl<32>(warp, 0) / 4, quarter = warp % 4;  // the compiler sees that a warp has one warpgroup
    const int first_head = int(blockIdx.x) / (HEAD_SIZE / HEAD_TILE) * HEADS;
    const int first_dim = int(blockIdx.x) % (HEAD_SIZE / HEAD_TILE) * HEAD_TILE;
    const int group = first_head / int(heads_per_group), segment = blockIdx.y;
    const int64_t first_row = int64_t(first_head) * HEAD_SIZE + first_dim;  // among the rows of all heads
    const int64_t state_size = num_heads * HEAD_SIZE * STATE_SIZE;          // elements of the states of all heads
    const int own_head = warpgroup * WARPGROUP_ROWS / HEAD_TILE;            // the warpgroup's head within the block
    const int own_row =
        warpgroup * WARPGROUP_ROWS + quarter * 16 + g;  // the lane's row within the block; it also holds row + 8
    const ScanChunks<index_t> chunks{cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx,     num_tokens,
                                     num_chunks, num_seqs,         chunk_size,         chunk_parts, part_tokens};
    const int end_part = chunks.first_of(segment + 1, num_segments);

    // Copies a tile to shared memory, pads its tokens with zeros, and loads its time steps. After the last tile it only
    // commits an empty copy group.
    const auto load = [&](int stage, const ScanTile& tile, finder_t& finder) {
        if (tile.number < end_part) {
            auto& to = shared.stages[stage];
            const int64_t token = tile.token;
            const int count = tile.count();
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const scalar_t* const from = B + token * B_stride + group * STATE_SIZE + part * WIDE;
                TokenCopy<WIDE / 8, TOKENS, NUM_THREADS>{}.load(tile_at(to.b[part]), from, B_stride, count);
            }
#pragma unroll
            for (int of = 0; of < WARPGROUPS; ++of) {
                const scalar_t* const from = x + token * x_stride + first_row + of * WARPGROUP_ROWS;
                TokenCopy<WIDE / 8, TOKENS, NUM_THREADS>{}.load(tile_at(to.x[of]), from, x_stride, count);
            }
            finder.load(dt + token * dt_stride + first_head * dt_step, dt_stride, dt_step, count);
        }
        cp_async_commit();
    };
    const auto find_decays = [&](decays_t& decays, const ScanTile& tile, const finder_t& finder) {
        finder.template find<SOFTPLUS>(decays, A + first_head, dt_bias ? dt_bias + first_head : nullptr, dt_min, dt_max,
                                       tile.count());
    };
    const auto behind = [&](const ScanTile& tile) {
        return tile.number < end_part ? chunks.template tile_behind<TOKENS>(tile, end_part) : tile;
    };

    float h[STATE_SIZE / 2] = {};
    const auto each_of_state = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < STATE_SIZE / 2; i += 2) {
            visit(h[i], h[i + 1], (first_row + own_row + i / 2 % 2 * 8) * STATE_SIZE + i / 4 * 8 + 2 * t);
        }
    };
    const auto begin_sequence = [&](int seq) {
        each_of_state([&](float& low, float& high, int64_t at) {
            low = high = 0.0f;
            if (!initial_states || seq < 0) return;
            const auto pair = Vec<initial_t, 2>::load(initial_states + seq * state_size + at);
            low = pair[0];
            high = pair[1];
        });
    };

    float log_decay = 0.0f;  // log2 of the segment's total decay
    bool restarted = false;  // the segment has begun a sequence
    ScanTile tile{chunks.first_of(segment, num_segments), 0, {}};
    if (tile.number < end_part) {
        tile.part = chunks.at(tile.number);
        tile.token = tile.part.begin;
    }
    ScanTile next = behind(tile);
    finder_t finder, later_finder;
    load(0, tile, finder);
    load(1, next, later_finder);
    find_decays(shared.decays[0], tile, finder);
    for (int stage = 0, parity = 0; tile.number < end_part; parity ^= 1) {
        cp_async_wait<1>();
        fence_proxy_async();
        __syncthreads();
        finder = later_finder;
        const ScanTile later = behind(next);
        load((stage + 2) % STAGES, later, later_finder);
        if (tile.token == tile.part.begin && tile.part.restarts) {
            begin_sequence(tile.part.seq);
            restarted = true;
        }
        const decays_t& decays = shared.decays[parity];
        auto& from = shared.stages[stage];
        uint32_t weighted[STEPS][4];  // x transposed: rows by tokens
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            load_block(weighted[k], tile_at(from.x[warpgroup]), k * 16, quarter, lane);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const weights = decays.weights[own_head] + k * 16 + i / 2 * 8 + 2 * t;
                float low, high;
                unpack_pair<scalar_t>(weighted[k][i], low, high);
                weighted[k][i] = pack_pair<scalar_t>(low * weights[0], high * weights[1]);
            }
            warpgroup_fence_operand(weighted[k]);
        }
        const float kept = decays.kept[own_head][TOKENS - 1];
        log_decay += decays.sums[own_head][TOKENS - 1];
#pragma unroll
        for (int i = 0; i < STATE_SIZE / 2; ++i) h[i] *= kept;
        warpgroup_fence_operand(h);
        warpgroup_arrive();
        const uint64_t tokens = make_smem_desc(from.b[0], 1024, TILE_BYTES);
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            wgmma<scalar_t, STATE_SIZE, true>(h, weighted[k], advance_smem_desc(tokens, k * 16 * WIDE * 2));
        }
        warpgroup_commit_batch();
        if (next.number < end_part) find_decays(shared.decays[parity ^ 1], next, finder);
        warpgroup_wait<0>();
        warpgroup_fence_operand(h);
        tile = next;
        next = later;
        stage = (stage + 1) % STAGES;
    }
    cp_async_wait<0>();

    each_of_state([&](float& low, float& high, int64_t at) {
        const float pair[2] = {low, high};
        Vec<float, 2>::from_floats(pair).store(segment_states + segment * state_size + at);
    });
    const bool first_of_head = warpgroup * WARPGROUP_ROWS % HEAD_TILE == 0 && first_dim == 0;
    if (quarter == 0 && lane == 0 && first_of_head) {
        segment_decays[segment * num_heads + first_head + own_head] = restarted ? 0.0f : estimate_exp2(log_decay);
    }
}
