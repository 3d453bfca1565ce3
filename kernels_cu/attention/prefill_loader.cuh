// prefill_loader.cuh: the producer of prefill_sm90: shared memory layout and rings of queries, keys and values, and the
// warps that load them by TMA. Reads the constants of the kernel that includes it.
//
// One warp, the finder, finds work items; another, the producer, issues TMA loads. A KV tile is loaded in boxes of
// BOX_TOKENS tokens, and a box never spans two pages of the cache. Each lane of the producer finds the block number of
// one box, and one lane issues all boxes. An invalid block number is replaced by num_blocks, for which TMA fills zeros,
// and sets a bit of `invalid_pages`. In the first and last tile of an item, values of tokens that no row sees may be
// NaN, so a third warp overwrites them with zeros.
//
// RAGGED: the box is the tile and may start at any row of the tensor; it may include rows of the next sequence.
//
// FP8 cache: fp8 tiles have a ring of their own. The other WIDENERS warps of the producer's warpgroup convert them to
// tiles of T (prefill_fp8_to_half.cuh). prefill_sm90_fp8 takes the fp8 keys as they are, and values from transposed
// tiles, which these warps write (prefill_transpose.cuh).
#pragma once
#include "pipeline.cuh"
#include "mma.cuh"
#include "prefill_panels.cuh"
#include "prefill_scheduler.cuh"

constexpr int PANELS = KeyTile::PANELS, BOXES = TOKENS / BOX_TOKENS;  // panels of a query or key
constexpr int QUERY_PANEL = ITEM_ROWS * ROW_BYTES, QUERY_BYTES = PANELS * QUERY_PANEL;
constexpr int QUERY_BOX_BYTES = PANELS * USED_ROWS * ROW_BYTES;
// A stage of CODE_BYTES holds fp8 keys or fp8 values, which have no more elements.
constexpr int CODE_BYTES = IS_FP8 ? KeyTile::LOADED_BYTES : IS_E4M3 ? ValueTile::BYTES : 0, WIDENERS = 3;

// EARLY_QUERIES: the single query stage is released after an item's last S = Q K^T, and the next item's queries are
// loaded after its first keys. It is not needed with two query stages. Values of more than 192 elements leave no
// registers for it.
constexpr bool EARLY_QUERIES = QUERY_STAGES == 1 && VALUE_SIZE <= 192;

// HAS_FINDER: a separate warp finds the next work item while the producer loads the last tiles of the current one. With
// an fp8 cache all other warps convert or transpose, and items of split-KV are short.
constexpr bool HAS_FINDER = !IS_FP8 && !IS_E4M3 && !HAS_SPLITS;
// TILES_AFTER_TAKE: KV tiles that the producer loads after its CTA has taken the next item, which hide the search. An
// item taken earlier would wait for this CTA while another CTA is idle ("An item is taken late" in
// docs/performance/prefill.md).
constexpr int TILES_AFTER_TAKE = HAS_SPLITS ? 0 : 4;

// BOXES_AT_ONCE: boxes that one lane of the producer issues, one after another: eight without splits from fp8 pages of
// 8, where boxes are the bound ("Where an fp8 cache loses" in docs/performance/prefill.md), else four, or else the
// largest divisor of BOXES that registers allow. 1: a lane for each box, because divisors are small, or there are no
// registers for block numbers.
constexpr int boxes_at_once(int most) {
    if (IS_FP8 && BOX_TOKENS == 8 && BOXES % most == 0) return most;
    if (BOXES % 4 == 0) return 4;
    while (BOXES % most) --most;
    return most < 4 && most < BOXES ? 1 : most;
}
constexpr int BOXES_AT_ONCE = VALUE_SIZE > 192 && !IS_FP8 && !IS_E4M3 ? 1 : boxes_at_once(8);

// HAS_INVALID_PAGES: the block table may have invalid block numbers. Ragged tensors have no block table.
constexpr bool HAS_INVALID_PAGES = !RAGGED;
static_assert(!RAGGED || (BOXES == 1 && BLOCK_SIZE == 1 && !WHOLE_HEADS));

// A work item and the first block numbers of its keys.
struct Found {
    Work work;
    int origin, length;
    int blocks[WARP_SIZE];  // block numbers of the last tile's boxes
};

// The description of an fp8 tile.
struct Codes {
    enum Kind { KEYS, VALUES, END } kind;  // END: no tile; there is no more work
    uint32_t invalid_boxes;                // keys: copied to `invalid_pages`
    int begin, end;                        // values: tokens outside of begin ... end - 1 become zeros
};

// A tile of values with tokens that no row sees.
struct PartialTile {
    int stage;       // of the value ring; negative: there is no more work
    int begin, end;  // tokens outside of begin ... end - 1 become zeros
};

// Shared memory and one thread's view of its rings.
struct Tiles {
    uint8_t *queries, *keys, *values, *codes;
    Ring<QUERY_STAGES> query;
    Ring<STAGES> key, value;
    Ring<CODE_STAGES> code;
    Ring<1> partial;          // full: the values of a partial tile have arrived
    Work* works;              // [QUERY_STAGES]
    uint32_t* invalid_pages;  // [STAGES], for keys: a bit for each box
    Codes* kinds;             // [CODE_STAGES]
    Ring<1> next;
    Found* found;
    PartialTile* partial_tile;

    DEVICE
    Tiles(uint8_t* shared, Work* works, uint32_t* invalid_pages, Codes* kinds, Found* found, PartialTile* partial_tile)
        : queries(shared),
          keys(queries + QUERY_STAGES * QUERY_BYTES),
          values(keys + STAGES * KeyTile::BYTES),
          codes(values + STAGES * ValueTile::BYTES),
          query(codes + CODE_STAGES * CODE_BYTES),
          key(query.barriers + 2 * QUERY_STAGES),
          value(key.barriers + 2 * STAGES),
          code(value.barriers + 2 * STAGES),
          partial(code.barriers + 2 * CODE_STAGES),
          works(works),
          invalid_pages(invalid_pages),
          kinds(kinds),
          next(partial.barriers + 2),
          found(found),
          partial_tile(partial_tile) {}

    // Initialises barriers. All threads of the CTA call it, and __syncthreads() after it.
    template <int NUM_THREADS>
    DEVICE void init() const {
        if (threadIdx.x == 0) {
            query.init(4 * CONSUMERS);
            key.init(4 * CONSUMERS, IS_FP8 ? WIDENERS : 1);
            value.init(4 * CONSUMERS, IS_FP8 || IS_E4M3 ? WIDENERS : 1);
            code.init(WIDENERS);
            partial.init(1);
            next.init(1);
        }
        if constexpr (USED_ROWS < ITEM_ROWS) {  // zeros for the rows that no box covers
            constexpr int CHUNKS = (ITEM_ROWS - USED_ROWS) * ROW_CHUNKS;
            for (int i = threadIdx.x; i < QUERY_STAGES * PANELS * CHUNKS; i += NUM_THREADS) {
                uint8_t* const rows = queries + i / CHUNKS * QUERY_PANEL + USED_ROWS * ROW_BYTES;
                *reinterpret_cast<uint4*>(rows + i % CHUNKS * 16) = make_uint4(0, 0, 0, 0);
            }
            fence_proxy_async();
        }
    }
};

// The lane and its box of a tile. They are recomputed at each use, which saves registers.
DEVICE int own_lane() { return made_anew(threadIdx.x) % WARP_SIZE; }
DEVICE int own_box() { return own_lane() % BOXES; }

// Finds the work items of a CTA.
struct Finder {
    const Sequences& sequences;
    const Window& window;
    const table_t* block_tables;
    int64_t table_stride, table_step, num_blocks;
    uint32_t* items_taken;
    int number = blockIdx.x;

    // Finds the work of `number`, or of the next number that has work. Returns false at the end of all work. `work` is
    // then the end marker: its queries and keys are loaded as zeros, and no values are loaded.
    DEVICE bool find(Work& work, int& origin, int& length) {
        for (; number < sequences.count(); take()) {
            if (sequences.find(sequences.count() - 1 - number, window, work, origin, length)) return true;
        }
        work = Work{int(sequences.num_tokens), 0, -1, 0, 0, 0, 0, 0, 1};
        origin = length = 0;
        return false;
    }
    DEVICE void take() { number = next_item(items_taken, sequences.count()); }
    // The block number of the lane's box; num_blocks if no row sees a key of the box, negative if the block number is
    // invalid.
    DEVICE int block_of(const Work& work, int origin, int tile) const {
        const int token = tile * TOKENS + own_box() * BOX_TOKENS;
        if (tile < work.first_tile || token > work.limit_of(ITEM_ROWS - 1)) return int(num_blocks);
        const int64_t block =
            RAGGED ? int64_t(origin) + token : block_tables[origin * table_stride + token / BLOCK_SIZE * table_step];
        return block < 0 || block >= num_blocks ? -1 : int(block);
    }
    // The finder warp: passes one item after another to the producer, and finds the next one meanwhile.
    DEVICE void run(Tiles& tiles) {
        const int lane = threadIdx.x % WARP_SIZE;
        for (;;) {
            Work work;
            int origin, length;
            const bool more = find(work, origin, length);
            tiles.found->blocks[own_lane()] = block_of(work, origin, work.last_tile);
            if (lane == 0) {
                tiles.found->work = work;
                tiles.found->origin = origin;
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

// The end of the tokens of a tile that TMA loads. It fills whole boxes after the last key with zeros, but not what is
// left of a box.
DEVICE int box_end_of(int end) { return min(ceil_div(max(end, 0), BOX_TOKENS) * BOX_TOKENS, TOKENS); }

// Writes zeros to the values first ... end - 1 of a tile.
DEVICE void clear_values(uint8_t* values, int first, int end) {
    constexpr int ATOM_CHUNKS = ATOM / 16, EIGHT_CHUNKS = ValueTile::PANELS * ATOM_CHUNKS;  // chunks of 16 bytes
    const int lane = threadIdx.x % WARP_SIZE;
    for (int i = first / 8 * EIGHT_CHUNKS + lane; i < ceil_div(end, 8) * EIGHT_CHUNKS; i += WARP_SIZE) {
        const int eight = i / EIGHT_CHUNKS, panel = i % EIGHT_CHUNKS / ATOM_CHUNKS, chunk = i % ATOM_CHUNKS;
        const int atom = WHOLE_HEADS ? eight * ValueTile::PANELS + panel : panel * (TOKENS / 8) + eight;
        const int token = eight * 8 + chunk / ROW_CHUNKS;
        if (token < first || token >= end) continue;
        *reinterpret_cast<uint4*>(values + atom * ATOM + chunk * 16) = make_uint4(0, 0, 0, 0);
    }
}

// The warp that clears partial tiles, so that the producer need not wait for their values.
DEVICE void clear_partial_tiles(Tiles& tiles) {
    for (;;) {
        tiles.partial.wait();
        const PartialTile tile = *tiles.partial_tile;
        if (tile.stage < 0) return;
        uint8_t* const values = tiles.values + tile.stage * ValueTile::BYTES;
        clear_values(values, 0, min(tile.begin, TOKENS));
        clear_values(values, max(tile.end, 0), box_end_of(tile.end));
        fence_proxy_async();
        sync_warp();
        if (threadIdx.x % WARP_SIZE == 0) mbarrier_arrive(tiles.value.barriers + tile.stage);
        tiles.partial.release(0);
        tiles.partial.advance();
    }
}

// The key or the value cache in global memory.
struct MappedCache {
    const TensorMap* map;
    int64_t head_pitch;  // WHOLE_HEADS: panels from one head of a token to the next; elements if panels overlap
};

// The producer.
struct Producer {
    Tiles& tiles;
    Finder& finder;
    const Window& window;
    const TensorMap* query_map;
    MappedCache key_cache, value_cache;
    int lane, box;  // `box`: the lane's box of a tile

    DEVICE void run() {
        for (bool more = true; more;) {
            Work work;
            int origin, length, block;
            if constexpr (HAS_FINDER) {
                tiles.next.wait();
                work = tiles.found->work;
                origin = tiles.found->origin;
                length = tiles.found->length;
                block = tiles.found->blocks[own_lane()];
                more = work.tokens > 0;
            } else {
                more = finder.find(work, origin, length);
                block = finder.block_of(work, origin, work.last_tile);
            }
            if (!EARLY_QUERIES) load_queries(work);
            // Each iteration loads the keys of a tile and the values of the previous tile.
            const int take_at = min(work.first_tile + TILES_AFTER_TAKE - 1, work.last_tile);
            int values_block = 0;
            for (int tile = work.last_tile; tile >= work.first_tile - 1; --tile) {
                const int next_block = finder.block_of(work, origin, tile - 1);
                if (tile >= work.first_tile) load_keys(work, tile, block);
                if (tile < work.last_tile && more) load_values(work, tile + 1, values_block, length);
                if (EARLY_QUERIES && tile == work.last_tile) load_queries(work);
                values_block = block;
                block = next_block;
                if (tile == take_at) take_next(more);
            }
        }
        if constexpr (IS_FP8 || IS_E4M3) {
            tiles.code.acquire();
            if (lane == 0) {
                tiles.kinds[tiles.code.stage].kind = Codes::END;
                mbarrier_arrive(tiles.code.full());
            }
        } else {
            tiles.partial.acquire();
            if (lane == 0) {
                *tiles.partial_tile = {-1, 0, 0};
                mbarrier_arrive(tiles.partial.full());
            }
        }
    }

private:
    // Takes the next item, or lets the finder take it. more: there may be one.
    DEVICE void take_next(bool more) {
        if constexpr (HAS_FINDER) {
            sync_warp();
            tiles.next.release(0);
            tiles.next.advance();
        } else if (more) {
            finder.take();
        }
    }
    DEVICE void load_queries(const Work& work) {
        auto& ring = tiles.query;
        ring.acquire();
        sync_warp();  // all lanes must have seen this phase before the stage can be filled and released again
        if (lane == 0) {
            tiles.works[ring.stage] = work;
            mbarrier_arrive_expect_tx(ring.full(), QUERY_BOX_BYTES);
            for (int panel = 0; panel < PANELS; ++panel) {
                tma_load(tiles.queries + ring.stage * QUERY_BYTES + panel * QUERY_PANEL, query_map, ring.full(),
                         panel * PANEL_SIZE, work.head, work.token);
            }
        }
        ring.advance();
    }
    DEVICE void load_keys(const Work& work, int tile, int block) {
        const uint32_t invalid_boxes = ballot(HAS_INVALID_PAGES && block < 0 && lane < BOXES);
        if constexpr (IS_FP8)
            return load_codes<KeyTile>(key_cache, {Codes::KEYS, invalid_boxes, 0, TOKENS}, work, tile, block);
        auto& ring = tiles.key;
        ring.acquire();
        if (lane == 0) tiles.invalid_pages[ring.stage] = invalid_boxes;
        load<KeyTile>(tiles.keys + ring.stage * KeyTile::BYTES, key_cache, ring.full(), work, tile, block);
        ring.advance();
    }
    DEVICE void load_values(const Work& work, int tile, int block, int length) {
        const int start = tile * TOKENS, begin = window.first_seen(work.limit) - start, end = length - start;
        const Codes kind{Codes::VALUES, 0, begin, end};
        if constexpr (IS_FP8 || IS_E4M3) return load_codes<ValueTile>(value_cache, kind, work, tile, block);
        auto& ring = tiles.value;
        ring.acquire();
        uint8_t* const to = tiles.values + ring.stage * ValueTile::BYTES;
        const bool whole = begin <= 0 && end >= box_end_of(end);
        if (!whole) {
            tiles.partial.acquire();
            if (lane == 0) *tiles.partial_tile = {ring.stage, begin, end};
        }
        load<ValueTile>(to, value_cache, whole ? ring.full() : tiles.partial.full(), work, tile, block);
        if (!whole) tiles.partial.advance();
        ring.advance();
    }
    template <typename Tile>
    DEVICE void load_codes(const MappedCache& cache, const Codes& kind, const Work& work, int tile, int block) {
        auto& ring = tiles.code;
        ring.acquire();
        if (lane == 0) tiles.kinds[ring.stage] = kind;
        load<Tile>(tiles.codes + ring.stage * CODE_BYTES, cache, ring.full(), work, tile, block);
        ring.advance();
    }
    template <typename Tile>
    DEVICE void
    load(uint8_t* to, const MappedCache& cache, uint64_t* full, const Work& work, int tile, int block) const {
        if (lane == 0) mbarrier_arrive_expect_tx(full, Tile::LOADED_BYTES);
        sync_warp();
        const int from = block < 0 ? int(finder.num_blocks) : block;
        constexpr int BOX_BYTES = IS_FP8 ? BOX_TOKENS * Tile::SIZE : BOX_TOKENS / 8 * Tile::TOKEN_STRIDE;
        const int first = work.kv_head * int(cache.head_pitch);
        for_each_box(from, [&](int i, int of) {
            uint8_t* const to_box = to + i * BOX_BYTES;
            const int of_box = BOX_TOKENS == BLOCK_SIZE ? 0 : (tile * TOKENS + i * BOX_TOKENS) % BLOCK_SIZE;
            if constexpr (IS_FP8) {
                tma_load(to_box, cache.map, full, 0, work.kv_head, of_box, of);
            } else if constexpr (WHOLE_HEADS) {
                const int element = Tile::OVERLAP ? first : 0, panel = Tile::OVERLAP ? 0 : first;
                tma_load(to_box, cache.map, full, element, 0, panel, of_box / 8, of);
            } else {
#pragma unroll
                for (int panel = 0; panel < Tile::PANELS; ++panel) {
                    uint8_t* const to_panel = to_box + panel * PANEL_STRIDE;
                    if constexpr (RAGGED) tma_load(to_panel, cache.map, full, panel * PANEL_SIZE, work.kv_head, of);
                    else tma_load(to_panel, cache.map, full, panel * PANEL_SIZE, work.kv_head, of_box, of);
                }
            }
        });
    }
    // Calls load(i, block number of box i) for each box of a tile. `block`: the block number of the lane's box.
    //
    // TMA instructions take uniform registers. A lane for each box is a loop in which ptxas elects a lane, copies its
    // registers, and branches. One lane with the block numbers of BOXES_AT_ONCE boxes has no branch between them ("A
    // lane for all boxes" in docs/performance/prefill.md).
    template <typename F>
    DEVICE void for_each_box(int block, const F& load) const {
        if constexpr (BOXES_AT_ONCE == 1) {
            if (lane < BOXES) load(box, block);
            return;
        }
#pragma unroll 1
        for (int first = 0; first < BOXES; first += BOXES_AT_ONCE) {
            int blocks[BOXES_AT_ONCE];
#pragma unroll
            for (int i = 0; i < BOXES_AT_ONCE; ++i) blocks[i] = shfl<WARP_SIZE>(block, first + i);
            if (elect_one()) {
#pragma unroll
                for (int i = 0; i < BOXES_AT_ONCE; ++i) load(first + i, blocks[i]);
            }
        }
    }
};
