// mqa_logits: the logits of sparse attention's indexer, by tensor cores.
//
//     logits[m, n] = s_n * sum_h weights[m, h] * max(q[m, h] . k[n], 0)
//
// q and k are e4m3 and are converted to float16, which represents them exactly.
//
// Grid: blockIdx.x counts groups of group_rows rows (PAGED: the rows of a sequence), and the CTA takes every
// gridDim.y-th tile of TILE keys.
//
// Thread mapping: a warp holds 32 keys of a tile as A operands in registers, and goes through the rows of its group.
// The heads of a row are the columns of B, in shared memory: while the CTA computes a row, it loads the next one. A
// lane has the products of two heads with two keys in each MMA. It applies the ReLU and adds them up, weighted, in
// registers; only the sum over all heads is exchanged between the four lanes of a key.
//
// K order: A words come straight from 16 adjacent bytes of a key. Element 16 t + 4 j + i of 64 is therefore column
// 2 t + i % 2 + i / 2 * 8 of step j, and queries are stored in this order.
//
// Constants
//     length_t, table_t    element types of context_lens and block_tables
//     NUM_HEADS, HEAD_SIZE heads of a row, and their elements: 64 or 128
//     PAGED                keys are in the indexer's paged cache; otherwise they are rows of a tensor
//     BLOCK_SIZE           slots of a block of the cache
//     SCALE_ACCESS         bytes of a scale in one memory access, if PAGED
//     LENGTH_PER_ROW       context_lens has a length for each row
//     COMPRESSED           column 0 of a row has its first position
//     CLEAN                columns without a logit are -inf; otherwise they are not written

#include "mqa_logits.cuh"
#include "product.cuh"

constexpr int NUM_WARPS = 6, NUM_THREADS = NUM_WARPS * 32, WARP_KEYS = 32, TILE = NUM_WARPS * WARP_KEYS;
constexpr int HEADS = (NUM_HEADS + 15) / 16 * 16, PITCH = HEAD_SIZE + 8;  // rows of B, padded; elements
constexpr int STEPS = HEAD_SIZE / 16, CHUNKS = HEAD_SIZE / 64;            // k-steps; chunks of 16 bytes of a lane's key
constexpr int ROW_CHUNKS = NUM_HEADS * HEAD_SIZE / 16, COPIES = ceil_div(ROW_CHUNKS, NUM_THREADS);
constexpr int QUERY_BYTES = HEADS * PITCH * 2, BUFFER_BYTES = QUERY_BYTES + HEADS * 4;
using queries_t = PitchedTile<half_t, PITCH>;
static_assert(HEAD_SIZE % 64 == 0 && !ON_MATRIX_CORES);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
mqa_logits(float* logits,                 // [num_rows, columns]
           const fp8_e4m3_t* q,           // [num_rows, NUM_HEADS, HEAD_SIZE]
           const float* weights,          // [num_rows, NUM_HEADS]
           const fp8_e4m3_t* k,           // as in mqa_logits.cuh, and so are the others
           const float* k_scales,         //
           const uint8_t* kv_cache,       //
           const table_t* block_tables,   // [num_rows / group_rows, max_blocks]
           const int32_t* cu_seqlen_ks,   //
           const int32_t* cu_seqlen_ke,   //
           const length_t* context_lens,  //
           int64_t num_rows, int64_t group_rows, int64_t columns, int64_t num_keys, int64_t num_blocks,
           int64_t logits_stride, int64_t q_stride, int64_t weights_stride, int64_t key_stride, int64_t block_stride,
           int64_t table_stride, int64_t table_step, int64_t length_step) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    uint8_t* const shared = reinterpret_cast<uint8_t*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t first_row = blockIdx.x * group_rows;
    const int end_row = int(min(group_rows, num_rows - first_row));
    const LogitRows rows{cu_seqlen_ks, cu_seqlen_ke, context_lens, blockIdx.x, first_row,
                         group_rows,   length_step,  num_keys,     columns};
    const Keys keys{k,          k_scales,     kv_cache,  block_tables + blockIdx.x * table_stride, num_keys, key_stride,
                    num_blocks, block_stride, table_step};
    // Rows of B and weights after the heads stay zero.
    for (int i = threadIdx.x; i < 2 * BUFFER_BYTES / 4; i += NUM_THREADS) reinterpret_cast<uint32_t*>(shared)[i] = 0;
    __syncthreads();

    uint4 values[COPIES];  // a row of queries on its way to shared memory
    float weight = 0.0f;   // and, in the first threads, its weights
    int staged = -1;       // the row in the current buffer
    uint8_t* buffer = shared;
    const auto logits_of = [&](int row) { return logits + (first_row + row) * logits_stride; };
    const auto load_row = [&](int row) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int chunk = min(int(threadIdx.x) + i * NUM_THREADS, ROW_CHUNKS - 1);
            values[i] = *reinterpret_cast<const uint4*>(q + (first_row + row) * q_stride + chunk * 16);
        }
        if (threadIdx.x < NUM_HEADS) weight = weights[(first_row + row) * weights_stride + threadIdx.x];
    };
    const auto store_row = [&] {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int chunk = threadIdx.x + i * NUM_THREADS, step_chunk = chunk % (HEAD_SIZE / 16);
            if (chunk >= ROW_CHUNKS) continue;
            uint8_t* const to =
                buffer + chunk / (HEAD_SIZE / 16) * (PITCH * 2) + step_chunk / 4 * 128 + step_chunk % 4 * 4;
            const uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32_t halves[2];
                fp8_to_half<fp8_e4m3_t>(words[j], halves);
                *reinterpret_cast<uint32_t*>(to + j * 32) = halves[0];
                *reinterpret_cast<uint32_t*>(to + j * 32 + 16) = halves[1];
            }
        }
        if (threadIdx.x < NUM_HEADS) reinterpret_cast<float*>(buffer + QUERY_BYTES)[threadIdx.x] = weight;
    };

    const int positions = int(CLEAN ? max(columns, num_keys) : num_keys);
    for (int first = blockIdx.y * TILE; first < positions; first += gridDim.y * TILE) {
        const int own = first + warp * WARP_KEYS + t * 8 + g;
        // The next row with a logit in this tile. Rows without one are cleaned on the way.
        const auto next_row = [&](int row) {
            for (++row; row < end_row; ++row) {
                const LogitRow found = rows.at(row);
                if (found.overlaps(first, TILE)) break;
                if (CLEAN) rows.write(logits_of(row), found, own, 0.0f);
            }
            return row;
        };
        int row = next_row(-1);
        if (row >= end_row) continue;
        if (row != staged) load_row(row);

        // Keys g and g + 8 of each of two MMAs; the lane stores the logit of key 8 t + g of the warp.
        uint32_t a[2][STEPS][4];
        float scale = 0.0f;
        bool exists = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Key key = keys.at(first + warp * WARP_KEYS + i * 8 + g);
            const float of_key = key.load_scale();
            if (i == t) {
                scale = of_key;
                exists = key.values != nullptr;
            }
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                uint4 chunk = make_uint4(0, 0, 0, 0);
                if (key.values) chunk = *reinterpret_cast<const uint4*>(key.values + c * 64 + t * 16);
                const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    uint32_t halves[2];
                    fp8_to_half<fp8_e4m3_t>(words[j], halves);
                    a[i / 2][c * 4 + j][i % 2] = halves[0];
                    a[i / 2][c * 4 + j][i % 2 + 2] = halves[1];
                }
            }
        }

        while (row < end_row) {
            if (row != staged) {
                // All warps have passed the barrier of the row before, so none reads this buffer any more.
                buffer = buffer == shared ? shared + BUFFER_BYTES : shared;
                store_row();
                staged = row;
                __syncthreads();
            }
            const int next = next_row(row);
            if (next < end_row) load_row(next);

            float totals[4] = {};  // of keys 8 i + g
#pragma unroll 1
            for (int head = 0; head < HEADS; head += 16) {
                float d[2][2][4] = {};
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    uint32_t b[SHORT_WORDS];
                    load_columns(b, queries_t{reinterpret_cast<half_t*>(buffer)}, head, step, lane);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        product<half_t>(d[m][0], a[m][step], b, 0);
                        product<half_t>(d[m][1], a[m][step], b, 1);
                    }
                }
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float2 of_heads =
                        *reinterpret_cast<const float2*>(buffer + QUERY_BYTES + (head + n * 8 + t * 2) * 4);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float* const pair = &d[i / 2][n][i % 2 * 2];
                        totals[i] = fmaf(of_heads.x, fmaxf(pair[0], 0.0f), totals[i]);
                        totals[i] = fmaf(of_heads.y, fmaxf(pair[1], 0.0f), totals[i]);
                    }
                }
            }
            // Lane t of the four lanes of a key keeps the sum number t, in two exchanges.
            const bool odd = t & 1, upper = t & 2;
            float even[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float kept = odd ? totals[2 * i + 1] : totals[2 * i],
                            sent = odd ? totals[2 * i] : totals[2 * i + 1];
                even[i] = kept + shfl_xor(sent, 1);
            }
            const float total = (upper ? even[1] : even[0]) + shfl_xor(upper ? even[0] : even[1], 2);
            rows.write(logits_of(row), rows.at(row), own, exists ? scale * total : minus_infinity());
            row = next;
        }
    }
}
