// mqa_logits_sm90: the logits of sparse attention's indexer for the last tokens of sequences, by WGMMA (sm_90a).
//
//     logits[m, n] = s_n * sum_h weights[m, h] * max(q[m, h] . k[n], 0)
//
// q and k are e4m3 and are converted to float16, which represents them exactly.
//
// Grid: blockIdx.x counts sequences, and the CTA takes every gridDim.y-th tile of TILE keys. The queries of a sequence
// stay in shared memory, so that nothing synchronizes warpgroups in the main loop.
//
// Thread mapping: a warpgroup holds 64 keys of a tile as operand A in registers; the heads of a row are the columns of
// B. A thread applies the ReLU to its accumulators and adds them up, weighted; only the sum over all heads is exchanged
// between the four lanes of a key.
//
// Keys: each thread copies the bytes of its A registers STAGES - 1 tiles ahead to slots of shared memory that no other
// thread reads. These are 16-byte pieces of two keys: element 16 t + 4 j + i of 64 is therefore column
// 2 t + i % 2 + i / 2 * 8 of k-step j, and queries are stored in this order.
//
// Constants
//     length_t, table_t    element types of context_lens and block_tables
//     NUM_HEADS, HEAD_SIZE heads of a row, and their elements: 64 or 128
//     ROWS                 rows of a sequence
//     BLOCK_SIZE           slots of a block of the cache
//     LENGTH_PER_ROW       context_lens has a length for each row
//     CLEAN                columns without a logit are -inf; otherwise they are not written

#include "wgmma.cuh"
constexpr bool PAGED = true, COMPRESSED = false;
constexpr int SCALE_ACCESS = 4;
#include "async.cuh"
#include "mqa_logits.cuh"
#include "swizzle.cuh"

constexpr int NUM_THREADS = 256, TILE = NUM_THREADS / 128 * 64, STAGES = 3, MIN_BLOCKS = 2;
constexpr int HEADS = (NUM_HEADS + 15) / 16 * 16;                          // columns of B
constexpr int PANELS = HEAD_SIZE / 64, STEPS = HEAD_SIZE / 16;             // panels of B, 64 elements wide; k-steps
constexpr int KEY_PIECES = HEAD_SIZE / 64, QUERY_PIECES = HEAD_SIZE / 16;  // pieces of a thread's key, and of a query
static_assert(HEAD_SIZE % 64 == 0);

using panel_t = SwizzledTile<half_t, 8>;

// The swizzle of a panel counts rows from a multiple of 1024 bytes.
struct alignas(1024) Shared {
    uint8_t queries[ROWS][PANELS][panel_t::bytes(HEADS)];
    uint4 keys[STAGES][2 * KEY_PIECES][NUM_THREADS];
    float scales[STAGES][NUM_THREADS], weights[ROWS][HEADS];
    int ends[ROWS];  // of the rows
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
mqa_logits_sm90(float* logits,                 // [num_rows, columns]
                const fp8_e4m3_t* q,           // [num_rows, NUM_HEADS, HEAD_SIZE]
                const float* weights,          // [num_rows, NUM_HEADS]
                const uint8_t* kv_cache,       // as in mqa_logits.cuh
                const table_t* block_tables,   // [num_rows / ROWS, max_blocks]
                const length_t* context_lens,  // as in mqa_logits.cuh
                int64_t columns, int64_t num_keys, int64_t num_blocks, int64_t logits_stride, int64_t weights_stride,
                int64_t block_stride, int64_t table_stride, int64_t table_step, int64_t length_step) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t first_row = int64_t(blockIdx.x) * ROWS;
    const LogitRows rows{nullptr, nullptr, context_lens, blockIdx.x, first_row, ROWS, length_step, num_keys, columns};
    const Keys keys{nullptr,    nullptr,      kv_cache,  block_tables + blockIdx.x * table_stride, num_keys, 0,
                    num_blocks, block_stride, table_step};
    int end = 0;  // of the longest row
#pragma unroll
    for (int row = 0; row < ROWS; ++row) end = max(end, rows.at(row).end);
    const int positions = CLEAN ? int(columns) : end, distance = gridDim.y * TILE;
    const int first_tile = blockIdx.y * TILE;
    if (first_tile >= positions) return;

    // The thread's keys of a tile are `offset` and `offset` + 8, often in one block of the cache. If it is one of the
    // first two lanes of a key, it has the scale of key own_offset and writes its logit.
    constexpr int LOOKUPS = BLOCK_SIZE % 16 == 0 ? 1 : 2;
    const int offset = warp * 16 + g, own_offset = offset + t * 8;
    int64_t blocks[LOOKUPS];  // of the next keys to copy
    uint32_t existing = 0;    // bit i: whether key own_offset of stage i exists
    const auto find_blocks = [&](int first) {
#pragma unroll
        for (int i = 0; i < LOOKUPS; ++i) {
            const int n = first + offset + i * 8;
            blocks[i] = n < end ? keys.block_of(n) : -1;
        }
    };
    const auto copy_keys = [&](int first, int stage) {
        Key key;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i < LOOKUPS) key = keys.in_block(blocks[i], first + offset + i * 8);
            else if (key.values) key = {key.values + 8 * HEAD_SIZE, key.scale + 8 * sizeof(float)};
            const bool exists = key.values != nullptr;
#pragma unroll
            for (int c = 0; c < KEY_PIECES; ++c) {
                uint4* const to = &shared.keys[stage][i * KEY_PIECES + c][threadIdx.x];
                cp_async<16>(to, key.values + c * 64 + t * 16, exists);
            }
            if (i == t) {
                cp_async<4>(&shared.scales[stage][threadIdx.x], key.scale, exists);
                existing = (existing & ~(1u << stage)) | uint32_t(exists) << stage;
            }
        }
        cp_async_commit();
    };
    find_blocks(first_tile);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        copy_keys(first_tile + stage * distance, stage);
        find_blocks(first_tile + (stage + 1) * distance);
    }

    // Queries as float16. Heads after the last one are zeros, and so are their weights.
    for (int i = threadIdx.x; i < ROWS * HEADS * QUERY_PIECES; i += NUM_THREADS) {
        const int piece = i % QUERY_PIECES, head = i / QUERY_PIECES % HEADS, row = i / (QUERY_PIECES * HEADS);
        uint4 values = make_uint4(0, 0, 0, 0);
        if (head < NUM_HEADS) {
            values =
                *reinterpret_cast<const uint4*>(q + ((first_row + row) * NUM_HEADS + head) * HEAD_SIZE + piece * 16);
        }
        const uint32_t words[4] = {values.x, values.y, values.z, values.w};
        const panel_t panel{reinterpret_cast<half_t*>(shared.queries[row][piece / 4])};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t halves[2];
            fp8_to_half<fp8_e4m3_t>(words[j], halves);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                reinterpret_cast<uint32_t*>(panel.at(head, 2 * j + k))[piece % 4] = halves[k];
            }
        }
    }
    for (int i = threadIdx.x; i < ROWS * HEADS; i += NUM_THREADS) {
        const int head = i % HEADS, row = i / HEADS;
        shared.weights[row][head] = head < NUM_HEADS ? weights[(first_row + row) * weights_stride + head] : 0.0f;
    }
    if (threadIdx.x < ROWS) shared.ends[threadIdx.x] = rows.at(threadIdx.x).end;
    fence_proxy_async();
    __syncthreads();

    int stage = 0;
    for (int first = first_tile; first < positions; first += distance) {
        cp_async_wait<STAGES - 2>();
        uint32_t a[STEPS][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int c = 0; c < KEY_PIECES; ++c) {
                const uint4 piece = shared.keys[stage][i * KEY_PIECES + c][threadIdx.x];
                const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    uint32_t halves[2];
                    fp8_to_half<fp8_e4m3_t>(words[j], halves);
                    a[c * 4 + j][i] = halves[0];
                    a[c * 4 + j][i + 2] = halves[1];
                }
            }
        }
        const float scale = t < 2 ? shared.scales[stage][threadIdx.x] : 0.0f;
        const bool exists = existing >> stage & 1;
        // The thread has read what the next copies overwrite in the iteration before.
        copy_keys(first + (STAGES - 1) * distance, stage == 0 ? STAGES - 1 : stage - 1);
        find_blocks(first + STAGES * distance);

#pragma unroll 1
        for (int row = 0; row < ROWS; ++row) {
            float total = 0.0f;
            if (first < end) {
                float d[HEADS / 2];
                warpgroup_arrive();
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    const uint64_t b = make_smem_desc(shared.queries[row][step / 4]);
                    wgmma<half_t, HEADS>(d, a[step], advance_smem_desc(b, step % 4 * 32), step > 0);
                }
                warpgroup_commit_batch();
                warpgroup_wait<0>();
                warpgroup_fence_operand(d);
                float totals[2] = {};  // of keys offset and offset + 8
#pragma unroll
                for (int n = 0; n < HEADS / 8; ++n) {
                    const float2 of_heads = *reinterpret_cast<const float2*>(&shared.weights[row][n * 8 + t * 2]);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        totals[i] = fmaf(of_heads.x, fmaxf(d[n * 4 + i * 2], 0.0f), totals[i]);
                        totals[i] = fmaf(of_heads.y, fmaxf(d[n * 4 + i * 2 + 1], 0.0f), totals[i]);
                    }
                }
                const bool odd = t & 1;
                total = (odd ? totals[1] : totals[0]) + shfl_xor(odd ? totals[0] : totals[1], 1);
                total += shfl_xor(total, 2);
            }
            if (t < 2) {
                rows.write(logits + (first_row + row) * logits_stride, {0, shared.ends[row], 0}, first + own_offset,
                           exists ? scale * total : minus_infinity());
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    cp_async_wait<0>();
}
