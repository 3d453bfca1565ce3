// mqa_logits_sm90: the logits of sparse attention's indexer by WGMMA (sm_90a).
//
//     logits[m, n] = s_n * sum_h weights[m, h] * max(q[m, h] . k[n], 0)
//
// q and k are e4m3 and are converted to float16, which represents them exactly.
//
// Work: a group of ROWS rows (PAGED: the rows of a sequence) has the tiles of TILE keys that lie between the first and
// the last key of its rows. The tiles of all groups, one group after another, are split evenly among the CTAs.
//
// Thread mapping: a warpgroup holds 64 keys of a tile as operand A in registers; the heads are the columns of B. A
// thread applies the ReLU to its accumulators and adds them up, weighted; only the sum over all heads is exchanged
// between the four lanes of a key. The queries of a group stay in shared memory, so that warpgroups are synchronized
// only where the group changes.
//
// Overlap: the MMAs go through chunks of CHUNK columns, a row or half a row. While the tensor cores multiply a chunk,
// the warpgroup adds up the one before, also if that is the last chunk of the tile before. Without this, the warpgroups
// of an SM fall into step: all multiply, then all add up.
//
// Keys: each thread copies the bytes of its A registers STAGES tiles ahead to slots of shared memory that no other
// thread reads, and loads block numbers a tile earlier. These are 16-byte pieces of two keys: element 16 t + 4 j + i of
// 64 is therefore column 2 t + i % 2 + i / 2 * 8 of k-step j, and queries are stored in this order.
//
// Constants
//     length_t, table_t      element types of context_lens and block_tables
//     NUM_HEADS, HEAD_SIZE   heads of a row, and their elements: 64 or 128
//     ROWS                   rows of a group
//     NUM_THREADS            a multiple of 128
//     PAGED                  keys are in the indexer's paged cache; otherwise they are rows of a tensor
//     BLOCK_SIZE             slots of a block of the cache
//     SCALE_ACCESS           bytes of a scale in one memory access, if PAGED: 4, because keys are aligned
//     LENGTH_PER_ROW         context_lens has a length for each row
//     COMPRESSED             column 0 of a row has its first position
//     CLEAN                  columns without a logit are -inf; otherwise they are not written

#include "async.cuh"
#include "mqa_logits.cuh"
#include "swizzle.cuh"
#include "wgmma.cuh"

constexpr int NUM_WARPS = NUM_THREADS / 32, TILE = NUM_THREADS / 128 * 64, STAGES = 3;
constexpr int HEADS = (NUM_HEADS + 31) / 32 * 32;                            // columns of B for a row
constexpr int CHUNK = MIN_BLOCKS == 1 && ROWS % 2 == 0 ? HEADS : HEADS / 2;  // columns of an MMA
constexpr int PARTS = HEADS / CHUNK, CHUNKS = ROWS * PARTS;                  // chunks of a row, and of a tile
constexpr int PANELS = HEAD_SIZE / 64, STEPS = HEAD_SIZE / 16;               // panels of B, 64 elements wide; k-steps
constexpr int KEY_PIECES = HEAD_SIZE / 64, QUERY_PIECES = HEAD_SIZE / 16;    // pieces of a thread's key, and of a query
constexpr int CLEANED = 4096;                                                // columns that a CTA cleans at a time
static_assert(HEAD_SIZE % 64 == 0);

using panel_t = SwizzledTile<half_t, 8>;

// The swizzle of a panel counts rows from a multiple of 1024 bytes.
struct alignas(1024) Shared {
    uint8_t queries[CHUNKS][PANELS][panel_t::bytes(CHUNK)];
    uint4 keys[STAGES][2 * KEY_PIECES][NUM_THREADS];
    float4 weights[CHUNKS][CHUNK / 16][4];  // the weights of the columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16
    float scales[STAGES][NUM_THREADS];
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

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
mqa_logits_sm90(float* logits,                 // [num_rows, columns]
                const fp8_e4m3_t* q,           // [num_rows, NUM_HEADS, HEAD_SIZE]
                const float* weights,          // [num_rows, NUM_HEADS]
                const fp8_e4m3_t* k,           // as in mqa_logits.cuh, and so are the others
                const float* k_scales,         //
                const uint8_t* kv_cache,       //
                const table_t* block_tables,   // [num_rows / ROWS, max_blocks]
                const int32_t* cu_seqlen_ks,   //
                const int32_t* cu_seqlen_ke,   //
                const length_t* context_lens,  //
                int64_t num_rows, int64_t columns, int64_t num_keys, int64_t num_blocks, int64_t logits_stride,
                int64_t q_stride, int64_t weights_stride, int64_t key_stride, int64_t block_stride,
                int64_t table_stride, int64_t table_step, int64_t length_step) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_groups = int((num_rows + ROWS - 1) / ROWS);
    const auto rows_of = [&](int group) {
        return LogitRows{cu_seqlen_ks, cu_seqlen_ke, context_lens, group,  int64_t(group) * ROWS,
                         ROWS,         length_step,  num_keys,     columns};
    };
    const auto row_of = [&](int group, int row) {
        return int64_t(group) * ROWS + row < num_rows ? rows_of(group).at(row) : LogitRow{0, 0, 0};
    };
    // Two keys of a thread are in one block of the cache if tiles begin at multiples of 16.
    const auto range_of = [&](int group) {
        Range range{int(num_keys), 0};
#pragma unroll 2
        for (int i = 0; i < ROWS; ++i) {
            const LogitRow row = row_of(group, i);
            if (row.begin >= row.end) continue;
            range = {min(range.begin, row.begin), max(range.end, row.end)};
        }
        return range.end > 0 ? Range{range.begin / 16 * 16, range.end} : Range{0, 0};
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

    // The thread's keys of a tile are `offset` and `offset` + 8. If it is one of the first two lanes of a key, it has
    // the scale of key own_offset and writes its logit.
    constexpr int LOOKUPS = BLOCK_SIZE % 16 == 0 ? 1 : 2;
    const int offset = warp * 16 + g, own_offset = offset + t * 8;
    Keys keys{k, k_scales, kv_cache, block_tables, num_keys, key_stride, num_blocks, block_stride, table_step};
    Cursor ahead = current;    // the next tile to copy
    table_t entries[LOOKUPS];  // of the block table, for this tile
    uint32_t existing = 0;     // bit i: whether key own_offset exists in the tile that was copied i tiles before
    const auto find_blocks = [&] {
        if constexpr (PAGED) keys.blocks = block_tables + ahead.group * table_stride;
#pragma unroll
        for (int i = 0; i < LOOKUPS; ++i) {
            entries[i] = keys.entry_of(min(ahead.first + offset + i * 8, ahead.range.end - 1));
        }
    };
    const auto copy_keys = [&](int stage) {
        existing <<= 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int n = ahead.first + offset + i * 8;
            const int64_t block = entries[i % LOOKUPS];
            const bool exists = ahead.left > 0 && n < ahead.range.end && keys.has_block(block);
            const Key key = keys.in_block(exists ? block : 0, n);
#pragma unroll
            for (int c = 0; c < KEY_PIECES; ++c) {
                uint4* const to = &shared.keys[stage][i * KEY_PIECES + c][threadIdx.x];
                cp_async<16>(to, key.values + c * 64 + t * 16, exists);
            }
            if (i == t) {
                cp_async<4>(&shared.scales[stage][threadIdx.x], key.scale, exists);
                existing |= exists;
            }
        }
        cp_async_commit();
        advance(ahead);
        find_blocks();
    };
    find_blocks();
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) copy_keys(stage);

    // Stores the queries of a group as float16. Heads after the last one are zeros, and so are their weights.
    const auto load_queries = [&](int group) {
        const int64_t first_row = int64_t(group) * ROWS;
#pragma unroll 2
        for (int i = threadIdx.x; i < ROWS * HEADS * QUERY_PIECES; i += NUM_THREADS) {
            const int piece = i % QUERY_PIECES, column = i / QUERY_PIECES, head = column % HEADS, row = column / HEADS;
            uint4 values = make_uint4(0, 0, 0, 0);
            if (head < NUM_HEADS && first_row + row < num_rows) {
                const fp8_e4m3_t* const from = q + (first_row + row) * q_stride + head * HEAD_SIZE + piece * 16;
                values = *reinterpret_cast<const uint4*>(from);
            }
            const uint32_t words[4] = {values.x, values.y, values.z, values.w};
            const panel_t panel{reinterpret_cast<half_t*>(shared.queries[column / CHUNK][piece / 4])};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32_t halves[2];
                fp8_to_half<fp8_e4m3_t>(words[j], halves);
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    reinterpret_cast<uint32_t*>(panel.at(column % CHUNK, 2 * j + odd))[piece % 4] = halves[odd];
                }
            }
        }
        float* const of_columns = reinterpret_cast<float*>(shared.weights);
        for (int i = threadIdx.x; i < ROWS * HEADS; i += NUM_THREADS) {
            const int head = i % HEADS, row = i / HEADS;
            const bool exists = head < NUM_HEADS && first_row + row < num_rows;
            of_columns[i / 16 * 16 + i % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2] =
                exists ? weights[(first_row + row) * weights_stride + head] : 0.0f;
        }
        if (threadIdx.x < ROWS) shared.rows[threadIdx.x] = row_of(group, threadIdx.x);
        fence_proxy_async();
        __syncthreads();
    };

    uint32_t a[STEPS][4];
    float scale;
    bool exists;
    int stage = 0;
    const auto convert_keys = [&] {
        cp_async_wait<STAGES - 1>();
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
        scale = t < 2 ? shared.scales[stage][threadIdx.x] : 0.0f;
        exists = existing >> (STAGES - 1) & 1;
    };
    // A row that has been multiplied: where the logit of key own_offset goes, or null, and what it takes to make it.
    struct Output {
        float* logit;
        float scale;
        bool exists;
    };
    const auto output_of = [&](int row) {
        LogitRow bounds = shared.rows[row];
        if constexpr (PAGED) bounds.begin = 0;
        if constexpr (!COMPRESSED) bounds.shift = 0;
        const int n = current.first + own_offset;
        float* const to = logits + (int64_t(current.group) * ROWS + row) * logits_stride + (n - bounds.shift);
        return Output{t < 2 && bounds.has(n) ? to : nullptr, scale, exists};
    };
    float4 of_products[CHUNK / 16] = {};             // their weights
    float products[CHUNK / 2] = {}, totals[2] = {};  // the last chunk after the ReLU; of keys `offset`, `offset` + 8
    const auto add = [&] {
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n) {
            const float4& four = of_products[n / 2];
            const float2 pair = n % 2 ? make_float2(four.z, four.w) : make_float2(four.x, four.y);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                totals[i] = fmaf(pair.x, products[n * 4 + i * 2], totals[i]);
                totals[i] = fmaf(pair.y, products[n * 4 + i * 2 + 1], totals[i]);
            }
        }
    };
    // Writes the logit of the last row, and returns what the logit is before the scale.
    const auto finish_row = [&](const Output& output) {
        const bool odd = t & 1;
        float total = (odd ? totals[1] : totals[0]) + shfl_xor(odd ? totals[0] : totals[1], 1);
        total += shfl_xor(total, 2);
        if (output.logit) *output.logit = output.exists ? output.scale * total : minus_infinity();
        totals[0] = totals[1] = 0.0f;
        return total;
    };

    Output last{};
    int group = -1;  // of the queries
    for (; current.left > 0; advance(current)) {
        if (current.group != group) {
            group = current.group;
            __syncthreads();
            load_queries(group);
        }
        convert_keys();
#pragma unroll 1
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const int chunk = row * PARTS + part;
                float d[CHUNK / 2];
                warpgroup_arrive();
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    const uint64_t b = make_smem_desc(shared.queries[chunk][step / 4]);
                    wgmma<half_t, CHUNK>(d, a[step], advance_smem_desc(b, step % 4 * 32), step > 0);
                }
                warpgroup_commit_batch();
                if (part == PARTS - 1 && row == 0) {
                    // The stage that has just been converted is free: the keys are in registers.
                    copy_keys(stage);
                    stage = stage == STAGES - 1 ? 0 : stage + 1;
                }
                add();
                float added = totals[0];
                if (part == 0) {
                    added = finish_row(last);
                    last = output_of(row);
                }
#pragma unroll
                for (int i = 0; i < CHUNK / 16; ++i) of_products[i] = shared.weights[chunk][i][t];
                hold_next_wait(fabsf(added));
                warpgroup_wait<0>();
                warpgroup_fence_operand(d);
#pragma unroll
                for (int i = 0; i < CHUNK / 2; ++i) products[i] = fmaxf(d[i], 0.0f);
            }
        }
    }
    add();
    finish_row(last);
    cp_async_wait<0>();
}
