// mqa_logits_sm90: the logits of sparse attention's indexer by WGMMA (sm_90a).
//
//     logits[m, n] = s_n * sum_h weights[m, h] * max(q[m, h] . k[n], 0)
//
// q . k is an fp8 MMA. Its accumulators have 14 bits (wgmma.cuh), as in DeepGEMM.
//
// Work: a group of ROWS rows (PAGED: the rows of a sequence) has the tiles of TILE keys that lie between the first and
// the last key of its rows. The tiles of all groups, one group after another, are split evenly among the CTAs.
//
// Warp specialisation: KEY_WARPS warps load tiles by TMA, STAGES of them ahead, each warp its share of the keys. A lane
// keeps the block number of a box, so a warp reads those of BATCH tiles at once, a batch ahead. Another warp loads the
// queries, weights and bounds of groups, up to QUERY_STAGES of them. A consumer warpgroup multiplies 64 keys, the rows of
// the MMA, with the heads of a chunk of rows, its columns. It has two accumulators: the tensor cores compute one while
// the warpgroup applies the ReLU to the other and adds it up, weighted; only the sum over all heads is exchanged between
// the four lanes of a key. If the chunks divide by the consumers, each consumer has its share of them and all keys of a
// tile; otherwise it has all chunks of its part of the keys. The weights of a single chunk stay in registers.
//
// Constants
//     length_t, table_t      element types of context_lens and block_tables
//     NUM_HEADS, HEAD_SIZE   heads of a row, and their elements: 64 or 128
//     ROWS                   rows of a group
//     STAGES                 tiles in flight
//     QUERY_STAGES           groups with queries in shared memory
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
#include "wgmma.cuh"

constexpr int CONSUMERS = 2, NUM_THREADS = 128 * (CONSUMERS + 1), NUM_WARPS = NUM_THREADS / 32;
constexpr int PARTS = 4, TILE = PARTS * 64, TILE_BYTES = TILE * HEAD_SIZE;     // a tile of keys: parts of 64
constexpr int BOXES = TILE / BOX_KEYS, SCALE_BYTES = BOX_KEYS * 4;             // TMA boxes of a tile; scales of a box
constexpr int HEADS = (NUM_HEADS + 31) / 32 * 32;                              // columns of B for a row
constexpr int QUERY_BYTES = ROWS * HEADS * HEAD_SIZE, STEPS = HEAD_SIZE / 32;  // queries of a group; k-steps
// A chunk: a divisor of ROWS with up to 128 columns.
constexpr int CHUNK_ROWS = ROWS % (128 / HEADS) == 0 ? 128 / HEADS : ROWS % 2 == 0 ? 2 : 1;
constexpr int CHUNK = CHUNK_ROWS * HEADS, CHUNKS = ROWS / CHUNK_ROWS;  // columns of an MMA; chunks of a group
constexpr bool BY_CHUNKS = CHUNKS % CONSUMERS == 0;                    // consumers divide the chunks, not the keys
constexpr int OWN_CHUNKS = BY_CHUNKS ? CHUNKS / CONSUMERS : CHUNKS;    // chunks of a consumer
constexpr int OWN_PARTS = BY_CHUNKS ? PARTS : PARTS / CONSUMERS;       // parts of a tile of a consumer, 64 keys each
constexpr int PAIR = CHUNK_ROWS % 2 == 0 ? 2 : 1, PAIRS = CHUNK_ROWS / PAIR;  // a lane keeps one row of a pair
constexpr int KEY_WARPS = 2, OWN_BOXES = BOXES / KEY_WARPS;  // warps that load keys; boxes of each in a tile
constexpr int BATCH = 32 / OWN_BOXES;                        // tiles with block numbers that a warp reads at once
constexpr int CLEANED = 4096;                                // columns that a CTA cleans at a time
constexpr int PRODUCER_REGISTERS = 56, REGISTERS = 224;
constexpr SmemSwizzle SWIZZLE = HEAD_SIZE == 128 ? SWIZZLE_128B : SWIZZLE_64B;
static_assert(HEAD_SIZE == 64 || HEAD_SIZE == 128);
static_assert(BOX_KEYS % 8 == 0 && 64 % BOX_KEYS == 0 && BOXES % KEY_WARPS == 0 && OWN_BOXES <= 32 &&
              (!PAGED || BLOCK_SIZE % BOX_KEYS == 0) && ROWS <= 32);

// A group's positions.
struct Range {
    int begin, end;

    DEVICE int tiles() const { return (end - begin + TILE - 1) / TILE; }
};

// Tiles of a group, of the keys from `first` on; `end` is that of the group's keys.
struct Tiles { int group, first, end, count; };

// A tile on its way to the consumers.
struct Tile {
    int group, first;
    uint32_t boxes[KEY_WARPS];  // bit i: whether box i of the warp exists
};

// The swizzles of queries and keys count rows from a multiple of 1024 bytes.
struct alignas(1024) Shared {
    uint8_t queries[QUERY_STAGES][QUERY_BYTES];
    uint8_t keys[STAGES][TILE_BYTES];
    // The weights of the columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16.
    float4 weights[QUERY_STAGES][ROWS][HEADS / 16][4];
    float scales[STAGES][TILE];
    uint64_t barriers[2 * STAGES], query_barriers[2 * QUERY_STAGES];
    Tile tiles[STAGES];
    LogitRow rows[QUERY_STAGES][ROWS];
    int totals[NUM_WARPS];  // tiles of the threads' groups
    Tiles start;            // of the CTA's first group; the count is not set
    // 2^32 cta / gridDim.x, rounded up, of this CTA and the next: all CTAs wait for their first tiles, total * cta /
    // gridDim.x, so the division comes before the sum.
    uint32_t shares[2];
};

// Prefetches lengths and block tables, which the CTAs read one after the other before their first key: a thread of the
// grid has a line.
DEVICE void prefetch_indices(const length_t* context_lens, const table_t* block_tables, int64_t num_rows,
                             int64_t num_keys, int64_t table_stride, int64_t table_step, int64_t length_step) {
    constexpr int LINE = 128 / int(sizeof(table_t));
    const uint32_t lines = ceil_div(num_keys, int64_t(BLOCK_SIZE) * LINE);
    if (lines == 0) return;
    const uint32_t item = blockIdx.x * NUM_THREADS + threadIdx.x, row = item / lines, line = item % lines;
    if (row < num_rows / ROWS) prefetch_line(block_tables + row * table_stride + line * LINE * table_step);
    if (item < num_rows / (LENGTH_PER_ROW ? 1 : ROWS)) prefetch_line(context_lens + item * length_step);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
mqa_logits_sm90(const __grid_constant__ TensorMap key_map,    // [blocks, keys, HEAD_SIZE]; 1 x BOX_KEYS x HEAD_SIZE
                const __grid_constant__ TensorMap query_map,  // [num_rows, NUM_HEADS, HEAD_SIZE]; a group's
                float* logits,                                // [num_rows, columns]
                const float* weights,                         // [num_rows, NUM_HEADS]
                const fp8_e4m3_t* k,                          // as in mqa_logits.cuh, and so are the others
                const float* k_scales,                        //
                const uint8_t* kv_cache,                      //
                const table_t* block_tables,                  // [num_rows / ROWS, max_blocks]
                const int32_t* cu_seqlen_ks,                  //
                const int32_t* cu_seqlen_ke,                  //
                const length_t* context_lens,                 //
                int64_t num_rows, int64_t columns, int64_t num_keys, int64_t num_blocks, int64_t logits_stride,
                int64_t weights_stride, int64_t key_stride, int64_t block_stride, int64_t table_stride,
                int64_t table_step, int64_t length_step) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    Ring<STAGES> ring(shared.barriers);
    Ring<QUERY_STAGES> queries(shared.query_barriers);
    if (threadIdx.x == 0) {
        // Boxes fill a stage, and a warp's copies of weights, or of scales that are not in the cache.
        ring.init(CONSUMERS * 4, KEY_WARPS * (PAGED ? 1 : 1 + 32));
        queries.init(CONSUMERS * 4, 1 + 32);
    }
    if (threadIdx.x < 2) {
        const uint32_t cta = blockIdx.x + threadIdx.x, least = ~0u / gridDim.x, rest = ~0u % gridDim.x + 1;
        shared.shares[threadIdx.x] = least * cta + (rest * cta + gridDim.x - 1) / gridDim.x;
    }
    prefetch_tensor_maps(key_map, query_map);
    if constexpr (PAGED) {
        prefetch_indices(context_lens, block_tables, num_rows, num_keys, table_stride, table_step, length_step);
    }
    await_previous_kernel();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_groups = int((num_rows + ROWS - 1) / ROWS);
    const auto row_of = [&](int group, int row) {
        const LogitRows rows{cu_seqlen_ks, cu_seqlen_ke, context_lens, group,  int64_t(group) * ROWS,
                             ROWS,         length_step,  num_keys,     columns};
        return int64_t(group) * ROWS + row < num_rows ? rows.at(row) : LogitRow{0, 0, 0};
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
    const Range own_range = range_of(own_group);
    int own_tiles = own_range.tiles();
#pragma unroll 1
    for (int group = own_group + 1; group < end_group; ++group) own_tiles += range_of(group).tiles();
    int until = own_tiles;  // of the groups of this thread and the ones before
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = shfl<32>(until, max(lane - distance, 0));
        if (lane >= distance) until += before;
    }
    if (lane == 31) shared.totals[warp] = until;
    __syncthreads();
    uint32_t total = 0;
#pragma unroll
    for (int i = 0; i < NUM_WARPS; ++i) {
        total += shared.totals[i];
        if (i < warp) until += shared.totals[i];
    }
    const int begin_tile = int(uint64_t(total) * shared.shares[0] >> 32);
    const int end_tile = int(blockIdx.x + 1 < gridDim.x ? uint64_t(total) * shared.shares[1] >> 32 : total);
    if (begin_tile == end_tile) return;
    if (begin_tile >= until - own_tiles && begin_tile < until) {
        Range range = own_range;
        int group = own_group, tile = begin_tile - (until - own_tiles);
        for (; tile >= range.tiles(); range = range_of(++group)) tile -= range.tiles();
        shared.start = {group, range.begin + tile * TILE, range.end, 0};
    }
    __syncthreads();

    if (warp >= CONSUMERS * 4) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        const int producer = warp - CONSUMERS * 4;
        if (producer > KEY_WARPS) return;
        // The tiles of the CTA that the warp has not taken. Lane i has the positions of group window + i; the first group
        // of the CTA needs none, and with the next one the window moves.
        int group = shared.start.group, first = shared.start.first, end = shared.start.end;
        int window = group - 31, left = end_tile - begin_tile;
        Range ranges{0, 0};
        const auto take = [&](int limit) {
            while (left > 0 && first >= end) {
                if (++group == window + 32) {
                    window = group;
                    ranges = range_of(window + lane);
                }
                first = shfl<32>(ranges.begin, group - window);
                end = shfl<32>(ranges.end, group - window);
            }
            const Tiles taken{group, first, end, min(min(ceil_div(end - first, TILE), limit), left)};
            first += taken.count * TILE;
            left -= taken.count;
            return taken;
        };

        if (producer == KEY_WARPS) {
            for (Tiles tiles = take(left); tiles.count > 0; tiles = take(left), queries.advance()) {
                const int64_t first_row = int64_t(tiles.group) * ROWS;
                queries.acquire();
                if (lane == 0) {
                    tma_load(shared.queries[queries.stage], &query_map, queries.full(), 0, 0, int(first_row));
                }
                // Heads after the last one are zeros, and so are their weights.
                float* const to = reinterpret_cast<float*>(shared.weights[queries.stage]);
#pragma unroll 4
                for (int column = lane; column < ROWS * HEADS; column += 32) {
                    const int head = column % HEADS;
                    const int64_t row = first_row + column / HEADS;
                    const int place = column / 16 * 16 + column % 8 / 2 * 4 + column % 16 / 8 * 2 + column % 2;
                    cp_async<4>(to + place, weights + row * weights_stride + head, head < NUM_HEADS && row < num_rows);
                }
                if (lane < ROWS) shared.rows[queries.stage][lane] = row_of(tiles.group, lane);
                sync_warp();
                if (lane == 0) mbarrier_arrive_expect_tx(queries.full(), QUERY_BYTES);
                cp_async_mbarrier_arrive_noinc(queries.full());
            }
            cp_async_wait<0>();
            return;
        }

        Keys keys{k, k_scales, kv_cache, block_tables, num_keys, key_stride, num_blocks, block_stride, table_step};
        const int own_box = lane % OWN_BOXES, own_key = (producer * OWN_BOXES + own_box) * BOX_KEYS;
        // Lane i has the entry of box i % OWN_BOXES in tile i / OWN_BOXES. A box without a key is that of the last key.
        const auto entry_of = [&](const Tiles& tiles) {
            if (!PAGED || tiles.count == 0) return table_t(0);
            keys.blocks = block_tables + tiles.group * table_stride;
            return keys.entry_of(min(tiles.first + lane / OWN_BOXES * TILE + own_key, tiles.end - 1));
        };
        Tiles next = take(BATCH);
        table_t entry = entry_of(next);
        while (next.count > 0) {
            const Tiles tiles = next;
            const int numbers = keys.has_block(entry) ? int(entry) : -1;
            for (int i = 0; i < tiles.count; ++i, ring.advance()) {
                const int block = shfl<32>(numbers, i * OWN_BOXES + own_box), of_tile = tiles.first + i * TILE;
                const uint32_t boxes = ballot(block >= 0 && lane < OWN_BOXES);
                float* const scales = shared.scales[ring.stage];
                const int n = of_tile + own_key;
                ring.acquire();
                if (lane == 0) {
                    Tile& tile = shared.tiles[ring.stage];
                    if (producer == 0) tile.group = tiles.group, tile.first = of_tile;
                    tile.boxes[producer] = boxes;
                    mbarrier_arrive_expect_tx(ring.full(),
                                              TILE_BYTES / KEY_WARPS + (PAGED ? count_bits(boxes) * SCALE_BYTES : 0));
                }
                sync_warp();
                if (lane < OWN_BOXES) {
                    tma_load(shared.keys[ring.stage] + own_key * HEAD_SIZE, &key_map, ring.full(), 0,
                             PAGED ? n % BLOCK_SIZE : n, max(block, 0));
                }
                if constexpr (PAGED) {
                    if (boxes >> lane & 1) {
                        bulk_load(scales + own_key, keys.in_block(block, n).scale, SCALE_BYTES, ring.full());
                    }
                } else {
#pragma unroll
                    for (int i = producer * TILE / KEY_WARPS + lane; i < (producer + 1) * TILE / KEY_WARPS; i += 32) {
                        cp_async<4>(scales + i, k_scales + of_tile + i, of_tile + i < tiles.end);
                    }
                    cp_async_mbarrier_arrive_noinc(ring.full());
                }
                if (i == 0) {
                    next = take(BATCH);
                    entry = entry_of(next);
                }
            }
        }
        cp_async_wait<0>();
        return;
    }

    warpgroup_reg_alloc<REGISTERS>();
    // The thread's keys of 64 are `key` and `key` + 8, and own_key is the one with the logit that it writes. Of a pair
    // of rows it writes the logit of row t % 2; of a single row it does if t is even.
    const int consumer = shfl<WARP_SIZE>(warp / 4, 0), own_key = warp % 4 * 16 + g + t / 2 * 8;
    LogitRow rows[OWN_CHUNKS][PAIRS];
    float* of_rows[OWN_CHUNKS][PAIRS];  // the column of position 0
    float4 of_heads[CHUNK_ROWS][HEADS / 16];
    const auto load_weights = [&](int chunk) {
#pragma unroll
        for (int row = 0; row < CHUNK_ROWS; ++row) {
#pragma unroll
            for (int i = 0; i < HEADS / 16; ++i) {
                of_heads[row][i] = shared.weights[queries.stage][chunk * CHUNK_ROWS + row][i][t];
            }
        }
    };

    int group = -1;  // of the queries
    for (int tile = begin_tile; tile < end_tile; ++tile, ring.advance()) {
        ring.wait();
        const Tile now = shared.tiles[ring.stage];
        if (now.group != group) {
            if (group >= 0) {
                queries.release(queries.stage);
                queries.advance();
            }
            group = now.group;
            queries.wait();
#pragma unroll
            for (int i = 0; i < OWN_CHUNKS; ++i) {
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
                    const int row = ((BY_CHUNKS ? consumer * OWN_CHUNKS + i : i) * PAIRS + pair) * PAIR + t % PAIR;
                    rows[i][pair] = shared.rows[queries.stage][row];
                    if constexpr (PAGED) rows[i][pair].begin = 0;
                    of_rows[i][pair] = logits + (int64_t(group) * ROWS + row) * logits_stride;
                    if constexpr (COMPRESSED) of_rows[i][pair] -= rows[i][pair].shift;
                }
            }
            if (OWN_CHUNKS == 1) load_weights(BY_CHUNKS ? consumer : 0);
            sync_warp();
        }
        constexpr int ITEMS = OWN_CHUNKS * OWN_PARTS;
        const auto part_of = [&](int item) {
            return BY_CHUNKS ? item % OWN_PARTS : consumer + CONSUMERS * (item % OWN_PARTS);
        };
        const auto chunk_of = [&](int item) { return (BY_CHUNKS ? consumer * OWN_CHUNKS : 0) + item / OWN_PARTS; };
        float even[CHUNK / 2], odd[CHUNK / 2];  // accumulators of even and odd items
        const auto multiply = [&](int item, float (&d)[CHUNK / 2]) {
            const uint64_t a =
                make_smem_desc<SWIZZLE>(shared.keys[ring.stage] + part_of(item) * 64 * HEAD_SIZE, 8 * HEAD_SIZE);
            const uint64_t b = make_smem_desc<SWIZZLE>(
                shared.queries[queries.stage] + chunk_of(item) * CHUNK * HEAD_SIZE, 8 * HEAD_SIZE);
            warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                wgmma<fp8_e4m3_t, CHUNK>(d, advance_smem_desc(a, step * 32), advance_smem_desc(b, step * 32), step > 0);
            }
            warpgroup_commit_batch();
        };
        const auto add_up = [&](int item, float (&d)[CHUNK / 2], float (&next)[CHUNK / 2]) {
            const int part = part_of(item), own = item / OWN_PARTS;
            if (item + 1 < ITEMS) multiply(item + 1, next);
            if (OWN_CHUNKS > 1 && item % OWN_PARTS == 0) load_weights(chunk_of(item));
            // A block that does not exist has no scales.
            const int box = (part * 64 + own_key) / BOX_KEYS;
            const bool exists = !PAGED || (shared.tiles[ring.stage].boxes[box / OWN_BOXES] >> box % OWN_BOXES & 1);
            const float scale = exists ? shared.scales[ring.stage][part * 64 + own_key] : 0.0f;
            if (item + 1 < ITEMS) warpgroup_wait<1>();
            else warpgroup_wait<0>();
            warpgroup_fence_operand(d);
            if (item == ITEMS - 1) {
                sync_warp();
                ring.release(ring.stage);
            }
            const int n = now.first + part * 64 + own_key;
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                float totals[PAIR][2];  // of keys `key` and `key` + 8
#pragma unroll
                for (int i = 0; i < PAIR; ++i) {
                    const int row = pair * PAIR + i;
                    float parts[2][2] = {};  // of these keys, of even and odd heads
#pragma unroll
                    for (int j = 0; j < HEADS / 8; ++j) {
                        const float4& four = of_heads[row][j / 2];
                        const float2 two = j % 2 ? make_float2(four.z, four.w) : make_float2(four.x, four.y);
#pragma unroll
                        for (int upper = 0; upper < 2; ++upper) {
                            const float* const x = d + (row * HEADS / 8 + j) * 4 + upper * 2;
                            parts[upper][0] = fmaf(two.x, fmaxf(x[0], 0.0f), parts[upper][0]);
                            parts[upper][1] = fmaf(two.y, fmaxf(x[1], 0.0f), parts[upper][1]);
                        }
                    }
#pragma unroll
                    for (int upper = 0; upper < 2; ++upper) totals[i][upper] = parts[upper][0] + parts[upper][1];
                }
                const bool is_odd = t % 2, upper = t / 2;
                float both[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    both[i] = (is_odd ? totals[PAIR - 1][i] : totals[0][i]) +
                              shfl_xor(is_odd ? totals[0][i] : totals[PAIR - 1][i], 1);
                }
                const float sum = (upper ? both[1] : both[0]) + shfl_xor(upper ? both[0] : both[1], 2);
                if (rows[own][pair].has(n) && (PAIR == 2 || !is_odd)) {
                    of_rows[own][pair][n] = exists ? scale * sum : minus_infinity();
                }
            }
        };
        multiply(0, even);
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            if (item % 2 == 0) add_up(item, even, odd);
            else add_up(item, odd, even);
        }
    }
}
