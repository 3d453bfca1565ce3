// mqa_logits_sm90: the logits of sparse attention's indexer by WGMMA (sm_90a).
//
//     logits[m, n] = s_n * sum_h weights[m, h] * max(q[m, h] . k[n], 0)
//
// q and k are e4m3 and are converted to float16, which represents them exactly.
//
// Work: a group of ROWS rows (PAGED: the rows of a sequence) has the tiles of TILE keys that lie between the first and
// the last key of its rows. The tiles of all groups, one group after another, are split evenly among the CTAs.
//
// Warp specialisation: one warp loads tiles by TMA, STAGES of them ahead. Each consumer warpgroup multiplies 64 keys of
// a tile, operand A in registers, with the heads of the rows, the columns of B in shared memory. A thread applies the
// ReLU to its accumulators and adds them up, weighted; only the sum over all heads is exchanged between the four lanes
// of a key.
//
// Ping-pong: the consumers issue the MMAs of a chunk, up to 128 columns, one after another. So the tensor cores finish
// the chunk of one warpgroup while the others add up and convert keys. Without the order, the tensor cores alternate
// between the warpgroups, which then end at the same time, and all add up while no MMA runs. Nothing is computed
// between the MMAs of a chunk and the wait for them: ptxas takes operand A for dead as soon as an MMA is issued, and
// its registers for free.
//
// Keys: a lane converts HEAD_SIZE / 4 adjacent elements of two keys. Element 4 j + i of its 16-byte piece c is column
// 2 t + i % 2 + i / 2 * 8 of k-step 4 c + j, and queries are stored in this order.
//
// Constants
//     length_t, table_t      element types of context_lens and block_tables
//     NUM_HEADS, HEAD_SIZE   heads of a row, and their elements: 64 or 128
//     ROWS                   rows of a group
//     STAGES                 tiles in flight
//     PAGED                  keys are in the indexer's paged cache; otherwise they are rows of a tensor
//     BLOCK_SIZE             slots of a block of the cache
//     BOX_KEYS               keys of a TMA box: a multiple of 8 that divides 64 and, if PAGED, BLOCK_SIZE
//     SCALE_ACCESS           bytes of a scale in one memory access, if PAGED: 4, because keys are aligned
//     LENGTH_PER_ROW         context_lens has a length for each row
//     COMPRESSED             column 0 of a row has its first position
//     CLEAN                  columns without a logit are -inf; otherwise they are not written

#include "async.cuh"
#include "mqa_logits.cuh"
#include "pipeline.cuh"
#include "swizzle.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 3, NUM_THREADS = 128 * (CONSUMERS + 1), NUM_WARPS = NUM_THREADS / 32;
constexpr int TILE = CONSUMERS * 64, TILE_BYTES = TILE * HEAD_SIZE, BOXES = TILE / BOX_KEYS;
constexpr int HEADS = (NUM_HEADS + 31) / 32 * 32;  // columns of B for a row
// An MMA has up to 128 columns: the chunk is as many rows.
constexpr int CHUNK_ROWS = ROWS % (128 / HEADS) == 0 ? 128 / HEADS : ROWS % 2 == 0 ? 2 : 1;
constexpr int CHUNK = CHUNK_ROWS * HEADS, CHUNKS = ROWS / CHUNK_ROWS;      // columns of an MMA; chunks of a tile
constexpr int PANELS = HEAD_SIZE / 64, STEPS = HEAD_SIZE / 16;             // panels of B, 64 elements wide; k-steps
constexpr int KEY_PIECES = HEAD_SIZE / 64, QUERY_PIECES = HEAD_SIZE / 16;  // pieces of a thread's key, and of a query
constexpr int CLEANED = 4096;                                              // columns that a CTA cleans at a time
constexpr int ALL_CONSUMERS = 1, ORDER = 2;  // named barriers; ORDER + i: consumer i may issue its MMAs
constexpr int PRODUCER_REGISTERS = 32, REGISTERS = 160;
// Rows of weights in a thread's registers: all, or those of a chunk, which the chunk loads from shared memory. A thread
// also has CHUNK / 2 accumulators, and HEAD_SIZE / 4 words of keys.
constexpr int KEPT_ROWS = CHUNK / 2 + HEAD_SIZE / 4 + ROWS * HEADS / 4 <= 128 ? ROWS : CHUNK_ROWS;
static_assert(HEAD_SIZE % 64 == 0 && BOX_KEYS % 8 == 0 && 64 % BOX_KEYS == 0 && (!PAGED || BLOCK_SIZE % BOX_KEYS == 0));

using panel_t = SwizzledTile<half_t, 8>;

// The swizzles of a panel and of keys count rows from a multiple of 1024 bytes.
struct alignas(1024) Shared {
    uint8_t queries[CHUNKS][PANELS][panel_t::bytes(CHUNK)];
    uint8_t keys[STAGES][TILE_BYTES];
    float4 weights[ROWS][HEADS / 16][4];  // the weights of the columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16
    float scales[STAGES][TILE];
    uint64_t barriers[2 * STAGES];
    uint32_t boxes[STAGES];  // bit i: whether box i exists
    LogitRow rows[ROWS];
    int tiles[NUM_WARPS], group, tile;  // of the threads' groups; where the work of the CTA begins
};

// A group's positions.
struct Range {
    int begin, end;

    DEVICE int tiles() const { return (end - begin + TILE - 1) / TILE; }
};

// A tile of the CTA's work.
struct Cursor {
    int left;  // tiles until the end of the work, this one included
    int group, first;
    Range range;
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
mqa_logits_sm90(const __grid_constant__ TensorMap key_map,  // [blocks, keys, HEAD_SIZE]; 1 x BOX_KEYS x HEAD_SIZE
                float* logits,                              // [num_rows, columns]
                const fp8_e4m3_t* q,                        // [num_rows, NUM_HEADS, HEAD_SIZE]
                const float* weights,                       // [num_rows, NUM_HEADS]
                const fp8_e4m3_t* k,                        // as in mqa_logits.cuh, and so are the others
                const float* k_scales,                      //
                const uint8_t* kv_cache,                    //
                const table_t* block_tables,                // [num_rows / ROWS, max_blocks]
                const int32_t* cu_seqlen_ks,                //
                const int32_t* cu_seqlen_ke,                //
                const length_t* context_lens,               //
                int64_t num_rows, int64_t columns, int64_t num_keys, int64_t num_blocks, int64_t logits_stride,
                int64_t q_stride, int64_t weights_stride, int64_t key_stride, int64_t block_stride,
                int64_t table_stride, int64_t table_step, int64_t length_step) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    Ring<STAGES> ring(shared.barriers);
    if (threadIdx.x == 0) ring.init(CONSUMERS * 4, 1 + 32);  // a stage is filled by boxes, and by a warp's scales
    prefetch_tensor_maps(key_map);
    await_previous_kernel();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_groups = int((num_rows + ROWS - 1) / ROWS);
    const auto rows_of = [&](int group) {
        return LogitRows{cu_seqlen_ks, cu_seqlen_ke, context_lens, group,  int64_t(group) * ROWS,
                         ROWS,         length_step,  num_keys,     columns};
    };
    const auto row_of = [&](int group, int row) {
        return int64_t(group) * ROWS + row < num_rows ? rows_of(group).at(row) : LogitRow{0, 0, 0};
    };
    const auto range_of = [&](int group) {
        Range range{int(num_keys), 0};
#pragma unroll 2
        for (int i = 0; i < ROWS; ++i) {
            const LogitRow row = row_of(group, i);
            if (row.begin >= row.end) continue;
            range = {min(range.begin, row.begin), max(range.end, row.end)};
        }
        return range.end > 0 ? range : Range{0, 0};
    };

    if constexpr (CLEAN) {
        const int64_t parts = ceil_div(columns, int64_t(CLEANED));
        for (int64_t item = blockIdx.x; item < num_rows * parts; item += gridDim.x) {
            const int64_t m = item / parts;
            const LogitRow row = row_of(int(m / ROWS), int(m % ROWS));
            const int from = int(item % parts * CLEANED), to = int(min(from + int64_t(CLEANED), columns));
            for (int n = from + threadIdx.x; n < to; n += NUM_THREADS) {
                if (!row.has(n)) logits[m * logits_stride + n] = minus_infinity();
            }
        }
    }

    // The share of the CTA. Each thread counts the tiles of some adjacent groups.
    const int groups = ceil_div(num_groups, NUM_THREADS), own_group = min(int(threadIdx.x) * groups, num_groups);
    const int end_group = min(own_group + groups, num_groups);
    int own_tiles = 0;
    for (int group = own_group; group < end_group; ++group) own_tiles += range_of(group).tiles();
    int until = own_tiles;  // of the groups of this thread and the ones before
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = shfl<32>(until, max(lane - distance, 0));
        if (lane >= distance) until += before;
    }
    if (lane == 31) shared.tiles[warp] = until;
    __syncthreads();
    int64_t total = 0;
#pragma unroll
    for (int i = 0; i < NUM_WARPS; ++i) {
        total += shared.tiles[i];
        if (i < warp) until += shared.tiles[i];
    }
    const int begin_tile = int(total * blockIdx.x / gridDim.x), end_tile = int(total * (blockIdx.x + 1) / gridDim.x);
    if (begin_tile == end_tile) return;
    if (begin_tile >= until - own_tiles && begin_tile < until) {
        int group = own_group, tile = begin_tile - (until - own_tiles);
        for (int tiles = range_of(group).tiles(); tile >= tiles; tiles = range_of(++group).tiles()) tile -= tiles;
        shared.group = group;
        shared.tile = tile;
    }
    __syncthreads();
    Cursor current{end_tile - begin_tile, shared.group, 0, range_of(shared.group)};
    current.first = current.range.begin + shared.tile * TILE;
    const auto advance = [&](Cursor& cursor) {
        if (--cursor.left <= 0) return;
        cursor.first += TILE;
        if (cursor.first < cursor.range.end) return;
        do cursor.range = range_of(++cursor.group);
        while (cursor.range.end == 0);
        cursor.first = cursor.range.begin;
    };

    if (warp >= CONSUMERS * 4) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (warp > CONSUMERS * 4) return;
        Keys keys{k, k_scales, kv_cache, block_tables, num_keys, key_stride, num_blocks, block_stride, table_step};
        // Lane i has box i of a tile. A box without a key is that of the last key.
        const auto find_block = [&] {
            if constexpr (PAGED) keys.blocks = block_tables + current.group * table_stride;
            return keys.entry_of(min(current.first + lane % BOXES * BOX_KEYS, current.range.end - 1));
        };
        table_t entry = find_block();
        for (; current.left > 0; ring.advance()) {
            const bool exists = keys.has_block(entry);
            const int block = exists ? int(entry) : 0, first = current.first, end = current.range.end;
            const uint32_t found = ballot(exists);
            advance(current);
            entry = find_block();
            ring.acquire();
            if (lane == 0) {
                shared.boxes[ring.stage] = found;
                mbarrier_arrive_expect_tx(ring.full(), TILE_BYTES);
            }
            sync_warp();
            if (lane < BOXES) {
                const int n = first + lane * BOX_KEYS;
                tma_load(shared.keys[ring.stage] + lane * BOX_KEYS * HEAD_SIZE, &key_map, ring.full(), 0,
                         PAGED ? n % BLOCK_SIZE : n, block);
            }
#pragma unroll
            for (int i = 0; i < TILE; i += 32) {
                const int n = first + i + lane, box = (i + lane) / BOX_KEYS;
                const Key key = keys.in_block(shfl<32>(block, box), n);
                cp_async<4>(&shared.scales[ring.stage][i + lane], key.scale, n < end && (found >> box & 1));
            }
            cp_async_mbarrier_arrive_noinc(ring.full());
        }
        cp_async_wait<0>();
        return;
    }

    warpgroup_reg_alloc<REGISTERS>();
    // Stores the queries of a group as float16. Heads after the last one are zeros, and so are their weights. The loads
    // of weights and bounds precede the wait for other warpgroups.
    const auto load_queries = [&](int group) {
        constexpr int THREADS = CONSUMERS * 128, WEIGHTS = ceil_div(ROWS * HEADS, THREADS);
        const int64_t first_row = int64_t(group) * ROWS;
        float own_weights[WEIGHTS];
#pragma unroll
        for (int i = 0; i < WEIGHTS; ++i) {
            const int column = i * THREADS + threadIdx.x, head = column % HEADS, row = column / HEADS;
            const bool exists = row < ROWS && head < NUM_HEADS && first_row + row < num_rows;
            own_weights[i] = exists ? weights[(first_row + row) * weights_stride + head] : 0.0f;
        }
        const LogitRow own_row = threadIdx.x < ROWS ? row_of(group, threadIdx.x) : LogitRow{0, 0, 0};
        named_barrier_sync<ALL_CONSUMERS>(THREADS);
#pragma unroll 2
        for (int i = threadIdx.x; i < ROWS * HEADS * QUERY_PIECES; i += THREADS) {
            const int piece = i % QUERY_PIECES, column = i / QUERY_PIECES, head = column % HEADS, row = column / HEADS;
            uint4 values = make_uint4(0, 0, 0, 0);
            if (head < NUM_HEADS && first_row + row < num_rows) {
                const fp8_e4m3_t* const from = q + (first_row + row) * q_stride + head * HEAD_SIZE + piece * 16;
                values = *reinterpret_cast<const uint4*>(from);
            }
            const uint32_t words[4] = {values.x, values.y, values.z, values.w};
            const panel_t panel{reinterpret_cast<half_t*>(shared.queries[column / CHUNK][piece % KEY_PIECES])};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32_t halves[2];
                fp8_to_half<fp8_e4m3_t>(words[j], halves);
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    reinterpret_cast<uint32_t*>(panel.at(column % CHUNK, 2 * j + odd))[piece / KEY_PIECES] =
                        halves[odd];
                }
            }
        }
        float* const of_columns = reinterpret_cast<float*>(shared.weights);
#pragma unroll
        for (int i = 0; i < WEIGHTS; ++i) {
            const int column = i * THREADS + threadIdx.x;
            if (column >= ROWS * HEADS) break;
            of_columns[column / 16 * 16 + column % 8 / 2 * 4 + column % 16 / 8 * 2 + column % 2] = own_weights[i];
        }
        if (threadIdx.x < ROWS) shared.rows[threadIdx.x] = own_row;
        fence_proxy_async();
        named_barrier_sync<ALL_CONSUMERS>(THREADS);
    };

    // The thread's keys of a tile are `key` and `key` + 8. If it is one of the first two lanes of a key, it has the
    // scale of key own_key and writes its logit.
    const int consumer = shfl<WARP_SIZE>(warp / 4, 0), key = warp * 16 + g, own_key = key + t * 8;
    uint32_t a[STEPS][4];
    const auto convert_keys = [&] {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int c = 0; c < KEY_PIECES; ++c) {
                const int at = swizzle_chunk<HEAD_SIZE>(key + i * 8, t * KEY_PIECES + c);
                const uint4 piece = *reinterpret_cast<const uint4*>(shared.keys[ring.stage] + at);
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
    };
    const auto await_order = [&] { named_barrier_sync(ORDER + consumer, 256); };
    const auto release_order = [&] { named_barrier_arrive(ORDER + (consumer + 1) % CONSUMERS, 256); };
    LogitRow rows[ROWS];
    float4 kept[KEPT_ROWS][HEADS / 16];
    const auto load_weights = [&](int first_row) {
#pragma unroll
        for (int row = 0; row < KEPT_ROWS; ++row) {
#pragma unroll
            for (int i = 0; i < HEADS / 16; ++i) kept[row][i] = shared.weights[first_row + row][i][t];
        }
    };

    int group = -1;  // of the queries
    float* of_group = nullptr;
    if (consumer == CONSUMERS - 1) release_order();
    for (; current.left > 0; advance(current), ring.advance()) {
        if (current.group != group) {
            group = current.group;
            of_group = logits + int64_t(group) * ROWS * logits_stride;
            load_queries(group);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                rows[row] = shared.rows[row];
                if constexpr (PAGED) rows[row].begin = 0;
                if constexpr (!COMPRESSED) rows[row].shift = 0;
            }
            if (KEPT_ROWS == ROWS) load_weights(0);
        }
        ring.wait();
        convert_keys();
        const float scale = shared.scales[ring.stage][t < 2 ? own_key : key];
        const bool exists = !PAGED || (shared.boxes[ring.stage] >> (t < 2 ? own_key : key) / BOX_KEYS & 1);
        sync_warp();
        ring.release(ring.stage);
        const int n = current.first + own_key;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            float d[CHUNK / 2];
            if (KEPT_ROWS < ROWS) load_weights(chunk * CHUNK_ROWS);
            await_order();
            warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const uint64_t b = make_smem_desc(shared.queries[chunk][step / 4]);
                wgmma<half_t, CHUNK>(d, a[step], advance_smem_desc(b, step % 4 * 32), step > 0);
            }
            warpgroup_commit_batch();
            release_order();
            warpgroup_wait<0>();
            warpgroup_fence_operand(d);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) warpgroup_fence_operand(a[step]);  // otherwise A is overwritten
#pragma unroll
            for (int i = 0; i < CHUNK_ROWS; ++i) {
                const int row = chunk * CHUNK_ROWS + i;
                float totals[2][2] = {};  // of keys `key` and `key` + 8, of even and odd heads
#pragma unroll
                for (int j = 0; j < HEADS / 8; ++j) {
                    const float4& four = kept[row % KEPT_ROWS][j / 2];
                    const float2 pair = j % 2 ? make_float2(four.z, four.w) : make_float2(four.x, four.y);
#pragma unroll
                    for (int upper = 0; upper < 2; ++upper) {
                        const float* const x = d + (i * HEADS / 8 + j) * 4 + upper * 2;
                        totals[upper][0] = fmaf(pair.x, fmaxf(x[0], 0.0f), totals[upper][0]);
                        totals[upper][1] = fmaf(pair.y, fmaxf(x[1], 0.0f), totals[upper][1]);
                    }
                }
                const float lower = totals[0][0] + totals[0][1], upper = totals[1][0] + totals[1][1];
                const bool odd = t & 1;
                float total = (odd ? upper : lower) + shfl_xor(odd ? lower : upper, 1);
                total += shfl_xor(total, 2);
                if (t < 2 && rows[row].has(n)) {
                    of_group[row * logits_stride + (n - rows[row].shift)] = exists ? scale * total : minus_infinity();
                }
            }
        }
    }
}
