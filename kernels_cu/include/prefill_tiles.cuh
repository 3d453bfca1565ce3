// prefill_tiles.cuh: the queries, keys and values of attention_varlen_hopper, whose constants it reads: where they lie in
// shared memory, and the warps that bring them there.
//
// One warp, the finder, finds work, and another, the producer, loads by TMA. A tile of keys or values is loaded in boxes
// of BOX_TOKENS tokens, which never lie in two blocks of the cache; a lane has a box. A block number that is out of range
// becomes num_blocks, of which TMA makes zeros, and a bit of `holes`. Values of tokens that no row of the item attends
// to, in the first and last tile, may be NaN: the producer overwrites them with zeros.
//
// Codes of an fp8 cache are loaded to tiles of their own. The other WIDENERS warps of the producer's warpgroup make
// tiles of T of them. Products of e4m3 (product_t) take codes of keys as they are, and values from transposed tiles, which
// these warps make: prefill_transpose.cuh.
#pragma once
#include "gemm_pipeline.cuh"
#include "mma.cuh"
#include "prefill_work.cuh"

// Whether codes are widened before they are multiplied; whether they are multiplied as they are.
constexpr bool IS_FP8 = !is_same<cache_t, product_t>, IS_E4M3 = sizeof(product_t) == 1;
constexpr int ROW_BYTES = 128, PANEL_SIZE = ROW_BYTES / sizeof(product_t);  // a panel: rows of 128 bytes, swizzled
constexpr int PANELS = ceil_div(HEAD_SIZE, PANEL_SIZE), BOXES = TOKENS / BOX_TOKENS;
constexpr int QUERY_PANEL = ITEM_ROWS * ROW_BYTES, QUERY_BYTES = PANELS * QUERY_PANEL;
constexpr int QUERY_BOX_BYTES = PANELS * USED_ROWS * ROW_BYTES;
// Keys and values lie in atoms: 8 tokens of a panel. The next atom is that of the next panel, or of the next 8 tokens.
constexpr int ATOM = 8 * ROW_BYTES, TILE_BYTES = PANELS * TOKENS * ROW_BYTES;
constexpr int TOKEN_STRIDE = WHOLE_HEADS ? PANELS * ATOM : ATOM;  // from 8 tokens to the next
constexpr int PANEL_STRIDE = WHOLE_HEADS ? ATOM : TOKENS * ROW_BYTES;
constexpr int CODE_BYTES = IS_FP8 ? TOKENS * HEAD_SIZE : IS_E4M3 ? TILE_BYTES : 0, CODE_STAGES = 2, WIDENERS = 3;

// Whether the queries of the next item are loaded from an item's last product with its own on, and behind their first
// keys. Two stages of queries do without; heads of more than 192 elements lack the registers.
constexpr bool EARLY_QUERIES = QUERY_STAGES == 1 && HEAD_SIZE <= 192;

// Whether a warp of its own finds items of work, the next one while the producer loads this one. A split is taken only
// when the one before is loaded: taken earlier it would wait for this block, while another has nothing to do. Codes leave
// no warp.
constexpr bool HAS_FINDER = !IS_FP8 && !IS_E4M3 && !HAS_SPLITS;

// An item of work that is found.
struct Found {
    Work work;
    int seq, length;
    int blocks[WARP_SIZE];  // of the cache, of the boxes of the last tile
};

// What a tile of codes is.
struct Codes {
    enum Kind { KEYS, VALUES, END } kind;  // END: no tile, and there is no more work
    uint32_t missing;                      // of keys: becomes `holes`
    int begin, end;                        // of values: tokens of the tile that are not overwritten with zeros
};

// Shared memory, as its stages are at hand to one thread.
struct Tiles {
    uint8_t *queries, *keys, *values, *codes;
    Ring<QUERY_STAGES> query;
    Ring<STAGES> key, value;
    Ring<CODE_STAGES> code;
    uint64_t* landed;  // values that are to be overwritten
    Work* works;       // [QUERY_STAGES]
    uint32_t* holes;   // [STAGES], of keys, a bit for each box
    Codes* kinds;      // [CODE_STAGES]
    Ring<1> next;
    Found* found;

    DEVICE Tiles(uint8_t* shared, Work* works, uint32_t* holes, Codes* kinds, Found* found)
        : queries(shared),
          keys(queries + QUERY_STAGES * QUERY_BYTES),
          values(keys + STAGES * TILE_BYTES),
          codes(values + STAGES * TILE_BYTES),
          query(codes + CODE_STAGES * CODE_BYTES),
          key(query.barriers + 2 * QUERY_STAGES),
          value(key.barriers + 2 * STAGES),
          code(value.barriers + 2 * STAGES),
          landed(code.barriers + 2 * CODE_STAGES),
          works(works),
          holes(holes),
          kinds(kinds),
          next(landed + 1),
          found(found) {}

    // By all threads of the block, of which __syncthreads() follows.
    template <int NUM_THREADS>
    DEVICE void init() const {
        if (threadIdx.x == 0) {
            mbarrier_init(landed, 1);
            query.init(4 * CONSUMERS);
            key.init(4 * CONSUMERS, IS_FP8 ? WIDENERS : 1);
            value.init(4 * CONSUMERS, IS_FP8 || IS_E4M3 ? WIDENERS : 1);
            code.init(WIDENERS);
            next.init(1);
        }
        if constexpr (USED_ROWS < ITEM_ROWS) {  // rows that no box reaches
            constexpr int CHUNKS = (ITEM_ROWS - USED_ROWS) * 8;
            for (int i = threadIdx.x; i < QUERY_STAGES * PANELS * CHUNKS; i += NUM_THREADS) {
                uint8_t* const rows = queries + i / CHUNKS * QUERY_PANEL + USED_ROWS * ROW_BYTES;
                *reinterpret_cast<uint4*>(rows + i % CHUNKS * 16) = make_uint4(0, 0, 0, 0);
            }
            fence_proxy_async();
        }
    }
};

// The lane, and the box of a tile that is the lane's: made anew, as registers are few.
DEVICE int own_lane() { return made_anew(threadIdx.x) % WARP_SIZE; }
DEVICE int own_box() { return own_lane() % BOXES; }

// Finds the items of work of a block.
struct Finder {
    const Sequences& sequences;
    const Window& window;
    const table_t* block_tables;
    int64_t table_stride, table_step, num_blocks;
    uint32_t* items_taken;
    int num_items;
    int number = blockIdx.x;

    // Finds the work of `number`, or of the next number that has work; false if there is none, and `work` then is the end:
    // zeros are loaded, and no values.
    DEVICE bool find(Work& work, int& seq, int& length) {
        for (; number < num_items; take()) {
            if (sequences.find(num_items - 1 - number, window, work, seq, length)) return true;
        }
        work = Work{int(sequences.num_tokens), 0, -1, 0, 0, 0, 0, 1};
        seq = length = 0;
        return false;
    }
    DEVICE void take() { number = next_item(items_taken, num_items); }
    // The block of the lane's box; num_blocks if no row sees a key of the box, negative if there is no such block.
    DEVICE int block_of(const Work& work, int seq, int tile) const {
        const int token = tile * TOKENS + own_box() * BOX_TOKENS;
        if (tile < work.first_tile || token > work.limit_of(ITEM_ROWS - 1)) return int(num_blocks);
        const int64_t block = block_tables[seq * table_stride + token / BLOCK_SIZE * table_step];
        return block < 0 || block >= num_blocks ? -1 : int(block);
    }
    // Of a warp of its own: one item after another to the producer, each found while the one before is loaded.
    DEVICE void run(Tiles& tiles) {
        const int lane = threadIdx.x % WARP_SIZE;
        for (;;) {
            Work work;
            int seq, length;
            const bool more = find(work, seq, length);
            tiles.found->blocks[own_lane()] = block_of(work, seq, work.last_tile);
            if (lane == 0) {
                tiles.found->work = work;
                tiles.found->seq = seq;
                tiles.found->length = length;
            }
            sync_warp();
            if (lane == 0) mbarrier_arrive(tiles.next.full());
            if (!more) return;
            tiles.next.advance();
            tiles.next.acquire();
            sync_warp();
            take();
        }
    }
};

// The producer.
struct Producer {
    Tiles& tiles;
    Finder& finder;
    const Window& window;
    const TensorMap *query_map, *key_map, *value_map;
    int lane, box;  // `box`: of a tile, the lane's
    uint32_t landings = 0;

    DEVICE void run() {
        for (bool more = true; more;) {
            Work work;
            int seq, length, block;
            if constexpr (HAS_FINDER) {
                tiles.next.wait();
                work = tiles.found->work;
                seq = tiles.found->seq;
                length = tiles.found->length;
                block = tiles.found->blocks[own_lane()];
                more = work.tokens > 0;
                sync_warp();
                tiles.next.release(0);
                tiles.next.advance();
            } else {
                more = finder.find(work, seq, length);
                if (!HAS_SPLITS && more) finder.take();
                block = finder.block_of(work, seq, work.last_tile);
            }
            if (!EARLY_QUERIES) load_queries(work);
            // The keys of a tile, and then the values of the tile before.
            int values_block = 0;
            for (int tile = work.last_tile; tile >= work.first_tile - 1; --tile) {
                const int next_block = finder.block_of(work, seq, tile - 1);
                if (tile >= work.first_tile) load_keys(work, tile, block);
                if (tile < work.last_tile && more) load_values(work, tile + 1, values_block, length);
                if (EARLY_QUERIES && tile == work.last_tile) load_queries(work);
                values_block = block;
                block = next_block;
            }
            if (HAS_SPLITS && more) finder.take();
        }
        if constexpr (IS_FP8 || IS_E4M3) {
            tiles.code.acquire();
            if (lane == 0) {
                tiles.kinds[tiles.code.stage].kind = Codes::END;
                mbarrier_arrive(tiles.code.full());
            }
        }
    }

private:
    DEVICE void load_queries(const Work& work) {
        auto& ring = tiles.query;
        ring.acquire();
        sync_warp();  // the queries may be used and given back, for another phase, before a lane has seen this one
        if (lane == 0) {
            tiles.works[ring.stage] = work;
            mbarrier_arrive_expect_tx(ring.full(), QUERY_BOX_BYTES);
            for (int panel = 0; panel < PANELS; ++panel) {
                tma_load(tiles.queries + ring.stage * QUERY_BYTES + panel * QUERY_PANEL, query_map, ring.full(),
                         panel * PANEL_SIZE, work.kv_head * GROUP, work.token);
            }
        }
        ring.advance();
    }
    DEVICE void load_keys(const Work& work, int tile, int block) {
        const uint32_t missing = ballot(block < 0 && lane < BOXES);
        if constexpr (IS_FP8) return load_codes(key_map, {Codes::KEYS, missing, 0, TOKENS}, work, tile, block);
        auto& ring = tiles.key;
        ring.acquire();
        if (lane == 0) tiles.holes[ring.stage] = missing;
        load(tiles.keys + ring.stage * TILE_BYTES, key_map, ring.full(), work, tile, block);
        ring.advance();
    }
    DEVICE void load_values(const Work& work, int tile, int block, int length) {
        const int start = tile * TOKENS, begin = window.first_seen(work.limit) - start, end = length - start;
        if constexpr (IS_FP8 || IS_E4M3)
            return load_codes(value_map, {Codes::VALUES, 0, begin, end}, work, tile, block);
        auto& ring = tiles.value;
        ring.acquire();
        uint8_t* const to = tiles.values + ring.stage * TILE_BYTES;
        const bool whole = begin <= 0 && end >= TOKENS;
        load(to, value_map, whole ? ring.full() : tiles.landed, work, tile, block);
        if (!whole) {
            mbarrier_wait(tiles.landed, landings++ & 1);
            for (int i = lane; i < PANELS * TOKENS * 8; i += WARP_SIZE) {  // chunks of 16 bytes
                const int atom = i / 64, eight = WHOLE_HEADS ? atom / PANELS : atom % (TOKENS / 8);
                const int token = eight * 8 + i / 8 % 8;
                if (token >= begin && token < end) continue;
                *reinterpret_cast<uint4*>(to + i * 16) = make_uint4(0, 0, 0, 0);
            }
            fence_proxy_async();
            sync_warp();
            if (lane == 0) mbarrier_arrive(ring.full());
        }
        ring.advance();
    }
    DEVICE void load_codes(const TensorMap* map, const Codes& kind, const Work& work, int tile, int block) {
        auto& ring = tiles.code;
        ring.acquire();
        if (lane == 0) tiles.kinds[ring.stage] = kind;
        load(tiles.codes + ring.stage * CODE_BYTES, map, ring.full(), work, tile, block);
        ring.advance();
    }
    DEVICE void load(uint8_t* to, const TensorMap* map, uint64_t* full, const Work& work, int tile, int block) const {
        if (lane == 0) mbarrier_arrive_expect_tx(full, IS_FP8 ? CODE_BYTES : TILE_BYTES);
        sync_warp();
        const int slot = (tile * TOKENS + box * BOX_TOKENS) % BLOCK_SIZE;
        const int from = block < 0 ? int(finder.num_blocks) : block;
        if constexpr (IS_FP8) {
            uint8_t* const to_box = to + box * (BOX_TOKENS * HEAD_SIZE);
            if (lane < BOXES) tma_load(to_box, map, full, 0, work.kv_head, slot, from);
        } else {
            uint8_t* const to_box = to + box * (BOX_TOKENS / 8) * TOKEN_STRIDE;
            if constexpr (WHOLE_HEADS) {
                if (lane < BOXES) tma_load(to_box, map, full, 0, 0, work.kv_head * PANELS, slot / 8, from);
            } else {
                constexpr int LOADERS = WARP_SIZE / BOXES * BOXES;
                for (int i = lane; i < PANELS * BOXES && lane < LOADERS; i += LOADERS) {
                    const int panel = i / BOXES;
                    tma_load(to_box + panel * PANEL_STRIDE, map, full, panel * PANEL_SIZE, work.kv_head, slot, from);
                }
            }
        }
    }
};

// Makes a tile of T of a tile of codes, with the other warps of 1 to WIDENERS of the warpgroup.
template <int RING_STAGES>
DEVICE void widen_tile(Tiles& tiles, Ring<RING_STAGES>& ring, uint8_t* to_tiles, const Codes& kind) {
    constexpr int CHUNKS = HEAD_SIZE / 16, PANEL_CHUNKS = PANEL_SIZE / 16, EIGHTS = TOKENS / 8;  // chunks of 16 codes
    const int warp = shfl<WARP_SIZE>(int(threadIdx.x % 128 / WARP_SIZE), 0) - 1, lane = threadIdx.x % WARP_SIZE;
    const uint8_t* const from = tiles.codes + tiles.code.stage * CODE_BYTES;
    uint8_t* const to = to_tiles + ring.stage * TILE_BYTES;
    ring.acquire();
    if (kind.kind == Codes::KEYS && warp == 0 && lane == 0) tiles.holes[ring.stage] = kind.missing;
    // A warp takes eight tokens of a panel at a time, four lanes a token. Of neighbouring tokens, lanes take neighbouring
    // panels: eight of them then read 128 bytes of all banks.
    const int own_token = lane / 4, own_chunk = lane % 4;
    const int at = swizzle_128b(own_token, own_chunk * 32);
    const bool whole = kind.begin <= 0 && kind.end >= TOKENS;
#pragma unroll 4
    for (int i = warp; i < PANELS * EIGHTS; i += WIDENERS) {
        const int panel = i / EIGHTS ^ (PANELS % 2 == 0 ? own_token % 2 : 0), token = i % EIGHTS * 8 + own_token;
        const int chunk = panel * PANEL_CHUNKS + own_chunk;
        if (HEAD_SIZE % PANEL_SIZE != 0 && chunk >= CHUNKS) continue;
        uint4 elements[2];
        widen_fp8<scalar_t>(*reinterpret_cast<const uint4*>(from + token * HEAD_SIZE + chunk * 16), elements);
        if (!whole && (token < kind.begin || token >= kind.end)) elements[0] = elements[1] = make_uint4(0, 0, 0, 0);
        uint8_t* const eight = to + panel * PANEL_STRIDE + i % EIGHTS * ATOM;
        *reinterpret_cast<uint4*>(eight + at) = elements[0];
        *reinterpret_cast<uint4*>(eight + (at ^ 16)) = elements[1];
    }
    fence_proxy_async();
    sync_warp();
    if (lane == 0) mbarrier_arrive(ring.full());
    tiles.code.release(tiles.code.stage);
    ring.advance();
}

// Widens all tiles of codes that the producer loads.
DEVICE void widen_tiles(Tiles& tiles) {
    for (;; tiles.code.advance()) {
        tiles.code.wait();
        if (tiles.kinds[tiles.code.stage].kind == Codes::END) return;
        const Codes kind = tiles.kinds[tiles.code.stage];
        if (kind.kind == Codes::KEYS) widen_tile(tiles, tiles.key, tiles.keys, kind);
        else widen_tile(tiles, tiles.value, tiles.values, kind);
    }
}
