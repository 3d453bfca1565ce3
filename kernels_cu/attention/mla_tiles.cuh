// mla_tiles.cuh: the shared memory tiles of mla_decode_sm90, and the warps that fill them by TMA. Reads the constants
// of the kernel that includes it.
//
// A tile is TOKENS entries in nine panels of 64 elements, with swizzled rows of 128 bytes: four panels for the left
// half of the latent vectors, four for the right half, and one for the rotated keys. A panel consists of atoms of 8
// entries. The atoms of a panel are contiguous, or, with HALF_BOXES, interleaved with those of the half's other panels.
//
// Tiles come in pairs; the even one is stage 0, the odd one stage 1. A half is filled again when the warpgroup that
// reads it last has released it: warpgroup 0 releases the left halves, warpgroup 1 the right ones. Rotated keys are
// filled together with the half of the warpgroup that reads the probabilities which overwrite them.
//
// load_boxes: warps load boxes of BOX_TOKENS entries of a panel, or of a half, by TMA. Without boxes, a warpgroup loads
// one entry after another: it copies those of a 16-bit cache (mla_row_loader.cuh), and converts those of an fp8 cache to
// product_t (mla_code_loader.cuh).
#pragma once
#include "attention.cuh"
#include "cluster.cuh"
#include "mla_entry.cuh"
#include "mla_tokens.cuh"
#include "mma.cuh"
#include "query_rows.cuh"
#include "tma.cuh"

constexpr bool IS_FP8 = is_same<cache_t, fp8_e4m3_t>;
constexpr bool CONVERTS_QUERIES = IS_FP8 && !IS_DS_MLA;
constexpr int TOKENS = 64, PANEL_SIZE = 64, ROW_BYTES = 128;
constexpr int PANELS = 9, ROPE_PANEL = 8, HALF_PANELS = 4, STAGES = 2, LEFT = 0, RIGHT = 1;
constexpr int PANEL_BYTES = TOKENS * ROW_BYTES, TILE_BYTES = PANELS * PANEL_BYTES, ATOM = 8 * ROW_BYTES;
// Strides between groups of 8 entries of a panel of latent vectors, and between panels.
constexpr int TOKEN_STRIDE = HALF_BOXES ? HALF_PANELS * ATOM : ATOM, PANEL_STRIDE = HALF_BOXES ? ATOM : PANEL_BYTES;
// HAS_BOXES: a warp loads boxes by TMA. COPIES_ROWS: a warpgroup copies entries of a 16-bit cache.
constexpr bool HAS_BOXES = BOX_TOKENS > 1, COPIES_ROWS = !HAS_BOXES && !IS_FP8;
// HALF_BARRIERS: a half is filled at once and has one full barrier, instead of one per panel.
constexpr bool HALF_BARRIERS = HALF_BOXES || !HAS_BOXES;
using product_t = conditional_t<CONVERTS_QUERIES, half_t, query_t>;  // MMA operands; float16 represents every fp8 value
static_assert(IS_FP8 ? !HAS_BOXES : is_same<query_t, cache_t>);
static_assert(HAS_BOXES || !HALF_BOXES);
static_assert(CLUSTER == 1 || IS_DS_MLA);

// The tiles of a CTA and their barriers.
struct EntryTiles {
    uint8_t* memory;
    uint64_t* full;    // [STAGES][PANELS], mbarriers
    uint64_t* empty;   // [STAGES][2], one per half
    uint64_t* exists;  // [STAGES], a bit for each token of a tile that has an entry

    DEVICE uint8_t* panel(int stage, int panel) const {
        uint8_t* const half = memory + stage * TILE_BYTES + panel / HALF_PANELS * (HALF_PANELS * PANEL_BYTES);
        return half + panel % HALF_PANELS * PANEL_STRIDE;
    }
    // The row of a token in a panel of latent vectors.
    DEVICE uint8_t* row(int stage, int of_panel, int token) const {
        return panel(stage, of_panel) + token / 8 * TOKEN_STRIDE + token % 8 * ROW_BYTES;
    }
    DEVICE uint64_t* full_of(int stage, int panel) const {
        if (!HAS_BOXES && panel == ROPE_PANEL)
            panel = (stage ^ 1) * HALF_PANELS;  // rotated keys share the barrier of the half that they are filled with
        return full + stage * PANELS + (HALF_BARRIERS ? panel / HALF_PANELS * HALF_PANELS : panel);
    }
    // One thread calls it; a cluster barrier must follow.
    DEVICE void init() const {
        for (int i = 0; i < STAGES * PANELS; ++i) {
            const bool has_copies = COPIES_ROWS || (IS_DS_MLA && full + i == full_of(i / PANELS, ROPE_PANEL));
            mbarrier_init(full + i, (HAS_BOXES ? 1 : 4) + (has_copies ? 128 : 0));
        }
        // One warpgroup of each CTA releases a half.
        for (int i = 0; i < STAGES * 2; ++i) mbarrier_init(empty + i, 4 * CLUSTER);
        fence_mbarrier_init();
    }
    DEVICE void await_empty(int stage, int half, int pair) const {
        mbarrier_wait(empty + stage * 2 + half, (pair & 1) ^ 1);
    }
};

// The tokens of an item in pairs of tiles, from pair number `first_pair` on: the parity of a pair's number is the phase
// of its mbarriers.
struct Split {
    TokenTable table;
    int origin, end, first_pair;  // origin: the first token less `first_pair` pairs

    DEVICE int token_of(int pair) const { return origin + pair * 2 * TOKENS; }
    DEVICE bool has(int pair) const { return token_of(pair) < end; }
};

// Loads the queries of a CTA. One thread calls it.
DEVICE void load_queries(uint8_t* queries, uint64_t* full, const TensorMap* nope_map, const TensorMap* pe_map,
                         int first_head, int seq) {
    mbarrier_arrive_expect_tx(full, TILE_BYTES);
    for (int panel = 0; panel < PANELS; ++panel) {
        const bool is_rope = panel == ROPE_PANEL;
        tma_load(queries + panel * PANEL_BYTES, is_rope ? pe_map : nope_map, full, is_rope ? 0 : panel * PANEL_SIZE,
                 first_head, seq);
    }
}

// Converts the queries for an fp8 cache to product_t in place. Each row is divided by a power of two, units[row]; the
// kernel multiplies the row's scores by it. 256 threads call it, four per row.
template <typename Q>
DEVICE void convert_queries(uint8_t* queries, float* units) {
    const int row = threadIdx.x / 4, t = threadIdx.x % 4;
    const float unit = convert_query_row<Q, PANELS, PANEL_BYTES>(queries + row * ROW_BYTES, row, t);
    if (t == 0) units[row] = unit;
}

// Loads a half of one tile of each pair by TMA. Each of four warps has another half, since a warp issues its boxes one
// after another: the next half that is released does not wait for them. Every lane calls. Returns the number after that
// of the last pair. The page table has max_tokens tokens: the page numbers of the first pair are loaded up to there,
// without a wait for the length.
DEVICE int load_boxes(const EntryTiles& tiles, const Split& split, int max_tokens, const TensorMap* cache_map,
                      const TensorMap* half_map) {
    constexpr int BOXES = TOKENS / BOX_TOKENS;  // boxes of a panel
    const int lane = threadIdx.x % WARP_SIZE, warp = shfl<WARP_SIZE>(int(threadIdx.x / WARP_SIZE % 4), 0);
    const int stage = warp % 2, half = warp / 2, box = lane % BOXES;
    const auto start_of = [&](int pair) { return split.token_of(pair) + stage * TOKENS; };
    // The page of the lane's box, or -1 if it is invalid: TMA then fills zeros.
    const auto page_at = [&](int pair, int loaded_end) {
        const int token = start_of(pair) + box * BOX_TOKENS;
        const int64_t page = token < loaded_end ? split.table.at(token) : int64_t(-1);
        return token < split.end && split.table.exists(page) ? int(page) : -1;
    };
    int pair = split.first_pair, next_page = page_at(pair, max_tokens);
    for (; split.has(pair); ++pair) {
        const int page = next_page, start = start_of(pair), slot = (start + box * BOX_TOKENS) % PAGE_SIZE;
        next_page = page_at(pair + 1, split.end);
        const uint32_t found = ballot(page >= 0);
        if (lane >= BOXES) continue;
        tiles.await_empty(stage, half, pair);
        if (lane == 0 && half == stage) {  // read by the warpgroup that releases this half
            uint64_t bits = 0;
            for (int b = 0; b < BOXES; ++b) {
                if (found >> b & 1) bits |= ~uint64_t(0) >> (64 - BOX_TOKENS) << b * BOX_TOKENS;
            }
            const int left = split.end - start;
            tiles.exists[stage] = left >= TOKENS ? bits : left > 0 ? bits & ~(~uint64_t(0) << left) : 0;
        }
        if constexpr (HALF_BOXES) {
            uint64_t* const barrier = tiles.full_of(stage, half * HALF_PANELS);
            if (lane == 0) mbarrier_arrive_expect_tx(barrier, HALF_PANELS * PANEL_BYTES);
            tma_load(tiles.row(stage, half * HALF_PANELS, box * BOX_TOKENS), half_map, barrier, 0, 0,
                     half * HALF_PANELS, slot / 8, page);
        }
        const auto load_panel = [&](int panel) {
            uint64_t* const barrier = tiles.full_of(stage, panel);
            if (lane == 0) mbarrier_arrive_expect_tx(barrier, PANEL_BYTES);
            uint8_t* const to = tiles.panel(stage, panel) + box * BOX_TOKENS * ROW_BYTES;
            tma_load(to, cache_map, barrier, panel * PANEL_SIZE, slot, page);
        };
        for (int panel = 0; panel < HALF_PANELS && !HALF_BOXES; ++panel) load_panel(half * HALF_PANELS + panel);
        if (half != stage) load_panel(ROPE_PANEL);
    }
    sync_warp();
    return pair;
}
