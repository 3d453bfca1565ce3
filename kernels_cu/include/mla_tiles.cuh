// mla_tiles.cuh: the tiles of mla_decode_hopper, whose constants it reads, and the warps that fill them.
//
// A tile is TOKENS entries in nine panels of 64 elements, whose rows of 128 bytes are swizzled: four panels of the left
// half of the latent vectors, four of the right, and the rotated keys. A panel lies in atoms of 8 entries; atoms follow
// each other, or, where HALF_BOXES, atoms of the other panels of the half lie between them. Tiles come in pairs; the even one of a pair lies
// in stage 0, the odd one in stage 1. A half is filled anew when the warpgroup that reads the half last has given it
// back: the left halves by warpgroup 0, the right ones by warpgroup 1. Rotated keys are filled with the half of the
// warpgroup that reads probabilities in their place.
//
// load_boxes: a warp loads boxes of BOX_TOKENS entries of a panel, or of a half, by TMA. CodeLoader: a warpgroup loads the codes of an
// fp8 cache to registers, and stores them as product_t: float16, one instruction for a pair, or, with scales, the type of
// the queries. What it needs next is in flight while it waits for the place of what it has.
#pragma once
#include "async.cuh"
#include "attention.cuh"
#include "cluster.cuh"
#include "mla_entry.cuh"
#include "mma.cuh"
#include "paged.cuh"
#include "tma.cuh"

constexpr bool IS_FP8 = is_same<cache_t, fp8_e4m3_t>;
constexpr bool CONVERTS_QUERIES = IS_FP8 && !IS_DS_MLA;
constexpr int TOKENS = 64, PANEL_SIZE = 64, ROW_BYTES = 128;
constexpr int PANELS = 9, ROPE_PANEL = 8, HALF_PANELS = 4, STAGES = 2, LEFT = 0, RIGHT = 1;
constexpr int PANEL_BYTES = TOKENS * ROW_BYTES, TILE_BYTES = PANELS * PANEL_BYTES, ATOM = 8 * ROW_BYTES;
// From 8 entries of a panel of latent vectors to the next, and from a panel to the next.
constexpr int TOKEN_STRIDE = HALF_BOXES ? HALF_PANELS * ATOM : ATOM, PANEL_STRIDE = HALF_BOXES ? ATOM : PANEL_BYTES;
// Who fills a half at once says so once, not for each of its panels.
constexpr bool HALF_BARRIERS = HALF_BOXES || IS_FP8;
constexpr int SCALES = IS_DS_MLA ? 2 * 2 * TOKENS : 1;  // that a CodeLoader keeps: of entries of two pairs of tiles
using product_t =
    conditional_t<CONVERTS_QUERIES, half_t, query_t>;  // of the products' operands; float16 has every code
static_assert(IS_FP8 ? CLUSTER == 1 && !HALF_BOXES : is_same<query_t, cache_t>);
static_assert(CLUSTER == 1 || !HALF_BOXES);

// The tiles of a block, and who waits for what of them.
struct EntryTiles {
    uint8_t* memory;
    uint64_t* full;    // [STAGES][PANELS], mbarriers
    uint64_t* empty;   // [STAGES][2], of halves
    uint64_t* exists;  // [STAGES], a bit for each token of a tile that has an entry

    DEVICE uint8_t* panel(int stage, int panel) const {
        uint8_t* const half = memory + stage * TILE_BYTES + panel / HALF_PANELS * (HALF_PANELS * PANEL_BYTES);
        return half + panel % HALF_PANELS * PANEL_STRIDE;
    }
    // Of a panel of latent vectors.
    DEVICE uint8_t* row(int stage, int of_panel, int token) const {
        return panel(stage, of_panel) + token / 8 * TOKEN_STRIDE + token % 8 * ROW_BYTES;
    }
    DEVICE uint64_t* full_of(int stage, int panel) const {
        if (IS_FP8 && panel == ROPE_PANEL) panel = (stage ^ 1) * HALF_PANELS;  // with the half they are filled with
        return full + stage * PANELS + (HALF_BARRIERS ? panel / HALF_PANELS * HALF_PANELS : panel);
    }
    // By one thread; a barrier of the cluster follows.
    DEVICE void init() const {
        for (int i = 0; i < STAGES * PANELS; ++i) {
            const bool has_copies = IS_DS_MLA && full + i == full_of(i / PANELS, ROPE_PANEL);
            mbarrier_init(full + i, (IS_FP8 ? 4 : 1) + (has_copies ? 128 : 0));
        }
        // The warps of one warpgroup of each block give a half back.
        for (int i = 0; i < STAGES * 2; ++i) mbarrier_init(empty + i, 4 * CLUSTER);
        fence_mbarrier_init();
    }
    DEVICE void await_empty(int stage, int half, int pair) const {
        mbarrier_wait(empty + stage * 2 + half, (pair & 1) ^ 1);
    }
};

// The entries of a split of a sequence: tokens from `begin` on and before `end`.
struct Split {
    const table_t* pages;  // the sequence's row of the page table
    int64_t table_step, num_pages;
    int begin, end;

    DEVICE int pairs() const { return ceil_div(end - begin, 2 * TOKENS); }
};

// Loads the queries of a block. One thread calls.
DEVICE void load_queries(uint8_t* queries, uint64_t* full, const TensorMap* nope_map, const TensorMap* pe_map,
                         int first_head, int seq) {
    mbarrier_arrive_expect_tx(full, TILE_BYTES);
    for (int panel = 0; panel < PANELS; ++panel) {
        const bool is_rope = panel == ROPE_PANEL;
        tma_load(queries + panel * PANEL_BYTES, is_rope ? pe_map : nope_map, full, is_rope ? 0 : panel * PANEL_SIZE,
                 first_head, seq);
    }
}

// Queries beside an fp8 cache become product_t in their place, relative to a power of two for each row: units[row] is what
// their products are to be multiplied by. By 256 threads, four to a row.
template <typename Q>
DEVICE void convert_queries(uint8_t* queries, float* units) {
    const int row = threadIdx.x / 4, t = threadIdx.x % 4;
    const auto at = [&](int i) {  // neighbouring rows take other halves: of all banks
        return queries + i / 2 * PANEL_BYTES + row * ROW_BYTES + (t + (i + row) % 2 * 4) * 16;
    };
    float absmax = 0.0f, x[8];
    for (int i = 0; i < 2 * PANELS; ++i) {
        Vec<Q, 8>::load(reinterpret_cast<const Q*>(at(i))).to_floats(x);
#pragma unroll
        for (int j = 0; j < 8; ++j) absmax = fmaxf(absmax, fabsf(x[j]));
    }
    absmax = fmaxf(absmax, shfl_xor(absmax, 1));
    absmax = fmaxf(absmax, shfl_xor(absmax, 2));
    const float factor = inverse_power_of_two(absmax);
    for (int i = 0; i < 2 * PANELS; ++i) {
        Vec<Q, 8>::load(reinterpret_cast<const Q*>(at(i))).to_floats(x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= factor;
        Vec<product_t, 8>::from_floats(x).store_shared(reinterpret_cast<product_t*>(at(i)));
    }
    if (t == 0) units[row] = 1.0f / factor;
}

// Loads entries by TMA. Every lane of one warp calls.
DEVICE void load_boxes(const EntryTiles& tiles, const Split& split, const TensorMap* cache_map,
                       const TensorMap* half_map, int rank) {
    constexpr int BOXES = TOKENS / BOX_TOKENS, OWN_BOXES = BOXES / CLUSTER;  // of a panel, and those of this block
    const int lane = threadIdx.x % WARP_SIZE;
    // Lane i has the page of box i of a pair, -1 where there is none: what is loaded from there are zeros.
    const auto page_at = [&](int pair) {
        const int token = split.begin + pair * 2 * TOKENS + lane % (2 * BOXES) * BOX_TOKENS;
        if (token >= split.end) return -1;
        const int64_t page = split.pages[token / PAGE_SIZE * split.table_step];
        return page >= 0 && page < split.num_pages ? int(page) : -1;
    };
    int next_page = page_at(0);
    for (int pair = 0; pair < split.pairs(); ++pair) {
        const int page = next_page;
        next_page = page_at(pair + 1);
        const uint32_t found = ballot(page >= 0);
        const auto load = [&](int stage, int half) {
            const int start = split.begin + (pair * 2 + stage) * TOKENS, box = rank * OWN_BOXES + lane % OWN_BOXES;
            const int box_page = shfl<WARP_SIZE>(page, stage * BOXES + box);
            if (lane >= OWN_BOXES) return;
            tiles.await_empty(stage, half, pair);
            if (lane == 0 && half == stage) {  // read by the warpgroup that gives this half back
                uint64_t bits = 0;
                for (int b = 0; b < BOXES; ++b) {
                    if (found >> (stage * BOXES + b) & 1) bits |= ~uint64_t(0) >> (64 - BOX_TOKENS) << b * BOX_TOKENS;
                }
                const int left = split.end - start;
                tiles.exists[stage] = left >= TOKENS ? bits : left > 0 ? bits & ~(~uint64_t(0) << left) : 0;
            }
            const int slot = (start + box * BOX_TOKENS) % PAGE_SIZE;
            if constexpr (HALF_BOXES) {
                uint64_t* const barrier = tiles.full_of(stage, half * HALF_PANELS);
                if (lane == 0) mbarrier_arrive_expect_tx(barrier, HALF_PANELS * PANEL_BYTES);
                tma_load(tiles.row(stage, half * HALF_PANELS, box * BOX_TOKENS), half_map, barrier, 0, 0,
                         half * HALF_PANELS, slot / 8, box_page);
            }
            const auto load_panel = [&](int panel) {
                uint64_t* const barrier = tiles.full_of(stage, panel);
                if (lane == 0) mbarrier_arrive_expect_tx(barrier, PANEL_BYTES);
                uint8_t* const to = tiles.panel(stage, panel) + box * BOX_TOKENS * ROW_BYTES;
                const int x = panel * PANEL_SIZE;
                if constexpr (CLUSTER == 1) tma_load(to, cache_map, barrier, x, slot, box_page);
                else tma_load_multicast(to, cache_map, barrier, (1 << CLUSTER) - 1, x, slot, box_page);
            };
            for (int panel = 0; panel < HALF_PANELS && !HALF_BOXES; ++panel) load_panel(half * HALF_PANELS + panel);
            if (half != stage) load_panel(ROPE_PANEL);
        };
        // In the order in which they are given back.
        load(0, LEFT);
        load(1, RIGHT);
        load(0, RIGHT);
        load(1, LEFT);
    }
    sync_warp();
}

// Loads the entries of an fp8 cache. Every thread of one warpgroup calls run(). A warp has 32 entries of a pair: of each
// tile 8 neighbours, and 8 half a tile further on. Four neighbouring lanes have one entry of each eight, each 16 codes
// of every panel.
struct CodeLoader {
    static constexpr int HALVES = 4;     // of a pair, in the order in which they are given back: steps
    static constexpr int CHUNK = 16;     // bytes that a thread loads at once
    static constexpr int WARP_ROWS = 8;  // neighbouring entries of a warp
    // Chunks of a thread, of a half and of rotated keys; rotated keys that are no codes are copied where they belong.
    static constexpr int LATENT_CHUNKS = 2 * HALF_PANELS, CHUNKS = LATENT_CHUNKS + (IS_DS_MLA ? 0 : 2);
    const EntryTiles& tiles;
    const Split& split;
    const cache_t* cache;
    int64_t page_stride, slot_stride;
    float4* scales;  // [4 warps][2 pairs][WARP_SIZE], shared: the scales of each entry, if IS_DS_MLA
    uint4 codes[CHUNKS];

    DEVICE void run() {
        // Each lane finds the place of one entry of the warp's, a pair ahead; its page is asked for two pairs ahead.
        const int own = lane() / WARP_ROWS * (TOKENS / 2) + warp() * WARP_ROWS + lane() % WARP_ROWS;
        const auto page_at = [&](int pair) {
            const int token = split.begin + pair * 2 * TOKENS + own;
            return token < split.end ? split.pages[token / PAGE_SIZE * split.table_step] : table_t(-1);
        };
        const auto place_on = [&](table_t page, int pair) {
            if (page < 0 || page >= split.num_pages) return NOWHERE;
            const int slot = (split.begin + pair * 2 * TOKENS + own) % PAGE_SIZE;
            const int64_t place = page * page_stride + slot * slot_stride;
            // Brought to L2 before its codes are loaded: registers hold no more than a step of what is on its way.
            for (int i = 0; i < ENTRY_BYTES; i += 128) prefetch_line(cache + place + i);
            return place;
        };
        int64_t place = place_on(page_at(0), 0);
        table_t next_page = page_at(1);
        copy_scales(0, place);
        load_step<0>(rows_of<0>(place));
        for (int pair = 0; pair < split.pairs(); ++pair) {
            const int64_t next_place = place_on(next_page, pair + 1);
            next_page = page_at(pair + 2);
            if constexpr (IS_DS_MLA) {
                cp_async_wait<0>();
                sync_warp();
                copy_scales(pair + 1, next_place);
            }
            pass<0>(pair, place, place);
            pass<1>(pair, place, place);
            pass<2>(pair, place, place);
            pass<3>(pair, place, next_place);
            place = next_place;
        }
    }

private:
    // Where the thread's codes of its rows begin.
    struct Rows { const cache_t* from[2]; };

    static DEVICE int lane() { return threadIdx.x % WARP_SIZE; }
    static DEVICE int warp() { return threadIdx.x % 128 / WARP_SIZE; }
    static constexpr DEVICE int stage_of(int step) { return step % 2; }
    static constexpr DEVICE int half_of(int step) { return step == 1 || step == 2 ? RIGHT : LEFT; }
    static constexpr DEVICE bool has_rope(int step) { return half_of(step) != stage_of(step); }
    static constexpr DEVICE int chunks_of(int step) { return has_rope(step) ? CHUNKS : LATENT_CHUNKS; }
    static constexpr DEVICE int row_of(int chunk) { return chunk < LATENT_CHUNKS ? chunk / HALF_PANELS : chunk % 2; }
    static constexpr DEVICE int panel_of(int step, int chunk) {
        return chunk < LATENT_CHUNKS ? half_of(step) * HALF_PANELS + chunk % HALF_PANELS : ROPE_PANEL;
    }
    // `place`: of the entry of each lane. An entry that is nowhere is zeroed by who multiplies, and is the first one until then.
    template <int STEP>
    DEVICE Rows rows_of(int64_t place) const {
        Rows rows;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64_t of_row = shfl<WARP_SIZE>(place, (stage_of(STEP) * 2 + i) * WARP_ROWS + lane() / 4);
            rows.from[i] = cache + max(of_row, int64_t(0)) + lane() % 4 * CHUNK;
        }
        return rows;
    }
    // Starts a copy of the scales of the lane's entry.
    DEVICE void copy_scales(int pair, int64_t place) const {
        if constexpr (IS_DS_MLA) {
            cp_async<16>(scales_of(pair) + lane(), cache + max(place, int64_t(0)) + SCALES_AT);
            cp_async_commit();
        }
    }
    DEVICE float4* scales_of(int pair) const { return scales + (warp() * 2 + pair % 2) * WARP_SIZE; }
    template <int STEP>
    DEVICE void load(int chunk, const Rows& rows) {
        const cache_t* const from = rows.from[row_of(chunk)] + panel_of(STEP, chunk) * PANEL_SIZE;
        codes[chunk] = *reinterpret_cast<const uint4*>(from);
    }
    template <int STEP>
    DEVICE void load_step(const Rows& rows) {
#pragma unroll
        for (int chunk = 0; chunk < chunks_of(STEP); ++chunk) load<STEP>(chunk, rows);
    }
    // `at`: the place of the thread's first codes in a panel. Rows half a tile apart are swizzled alike.
    template <int STEP>
    DEVICE void store(int chunk, int at, const float2 (&row_scales)[2]) const {
        uint8_t* const rows =
            tiles.panel(stage_of(STEP), panel_of(STEP, chunk)) + row_of(chunk) * (TOKENS / 2 * ROW_BYTES);
        uint4 elements[2];
        if constexpr (IS_DS_MLA) {
            const float2 of_half = row_scales[row_of(chunk)];
            const bool is_second = panel_of(STEP, chunk) * PANEL_SIZE / SCALED_SIZE % 2;
            widen_scaled_fp8<product_t>(codes[chunk], is_second ? of_half.y : of_half.x, elements);
        } else {
            widen_fp8<product_t>(codes[chunk], elements);
        }
        *reinterpret_cast<uint4*>(rows + at) = elements[0];
        *reinterpret_cast<uint4*>(rows + (at ^ 16)) = elements[1];
    }
    // Starts copies of rotated keys that are no codes, as they lie in L2 by now: two chunks of each row of the thread.
    template <int STEP>
    DEVICE void copy_rope(int64_t place) const {
        const Rows rows = rows_of<STEP>(place);
        const int at = swizzle_128b(threadIdx.x % 128 / 4, threadIdx.x % 4 * CHUNK);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const cache_t* const from = rows.from[i] + ROPE_AT;
            uint8_t* const to = tiles.panel(stage_of(STEP), ROPE_PANEL) + i * (TOKENS / 2 * ROW_BYTES);
            cp_async<16>(to + at, from);
            cp_async<16>(to + (at ^ 4 * CHUNK), from + 4 * CHUNK);
        }
        cp_async_mbarrier_arrive_noinc(tiles.full_of(stage_of(STEP), ROPE_PANEL));
    }
    // Stores what has been loaded for a step of a pair, and loads for the next step in its place. The warps that multiply
    // fence: a fence here would wait for the loads.
    template <int STEP>
    DEVICE void pass(int pair, int64_t place, int64_t next_place) {
        constexpr int NEXT = (STEP + 1) % HALVES, STAGE = stage_of(STEP), HALF = half_of(STEP);
        tiles.await_empty(STAGE, HALF, pair);
        if (STEP < 2) {  // read by the warpgroup that gives this half back
            const uint32_t found = ballot(place != NOWHERE) >> STAGE * 2 * WARP_ROWS;
            uint8_t* const exists = reinterpret_cast<uint8_t*>(tiles.exists + STAGE);
            if (lane() < 2) exists[lane() * (TOKENS / 2 / 8) + warp()] = found >> lane() * WARP_ROWS;
        }
        float2 row_scales[2] = {};
        if constexpr (IS_DS_MLA) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float4* const of_row = scales_of(pair) + (STAGE * 2 + i) * WARP_ROWS + lane() / 4;
                row_scales[i] = reinterpret_cast<const float2*>(of_row)[HALF];
            }
        }
        const Rows next = rows_of<NEXT>(next_place);
        if (IS_DS_MLA && has_rope(STEP)) copy_rope<STEP>(place);
        // Made anew in each step: the compiler would keep the 76 addresses of all steps in registers.
        const int at = made_anew(swizzle_128b(threadIdx.x % 128 / 4, threadIdx.x % 4 * 32));
        constexpr int BOTH = chunks_of(NEXT) < chunks_of(STEP) ? chunks_of(NEXT) : chunks_of(STEP);
#pragma unroll
        for (int chunk = 0; chunk < chunks_of(STEP); ++chunk) {
            store<STEP>(chunk, at, row_scales);
            if (chunk < BOTH) load<NEXT>(chunk, next);
            if (IS_DS_MLA || chunk % 2 == 1) keep_loads_of_warp();
        }
        sync_warp();
        if (lane() == 0) mbarrier_arrive(tiles.full_of(STAGE, HALF * HALF_PANELS));
#pragma unroll
        for (int chunk = BOTH; chunk < chunks_of(NEXT); ++chunk) load<NEXT>(chunk, next);
    }
};
