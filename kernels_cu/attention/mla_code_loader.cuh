// mla_code_loader.cuh: the warpgroup that fills the tiles of mla_decode_sm90 (mla_tiles.cuh) from an fp8 cache.
//
// Codes are loaded to registers, and stored as product_t: float16, one instruction for a pair, or, with scales, the type of
// the queries. The codes of the next step are in flight while the warpgroup waits for the place of those it has.
//
// The last two halves of a pair are given back at about the same time, and registers hold codes of one of them. Unless codes have
// scales, those of the last half are copied to shared memory, where their elements are to be, before the other half is stored.
//
// Of a cluster, each block widens one half of the entries of each tile, and stores the elements in both blocks, a line of
// 128 bytes by eight neighbouring lanes. So a step has half the conversions, and registers hold two steps. It pays where codes
// have scales: other conversions take less time than the way to the other block.
#pragma once
#include "async.cuh"
#include "mla_tiles.cuh"
#include "paged.cuh"

constexpr int SCALES = IS_DS_MLA ? 2 * 2 * TOKENS : 1;  // that a CodeLoader keeps: of entries of two pairs of tiles

// Loads the entries of an fp8 cache. Every thread of one warpgroup calls run(). A warp has 32 entries of a pair: of each
// tile 8 neighbours, and 8 half a tile further on, of which a block of a cluster widens one or the other. LANES neighbouring
// lanes have one entry, each CHUNK codes of every panel.
struct CodeLoader {
    static constexpr int HALVES = 4;                  // of a pair, in the order in which they are given back: steps
    static constexpr int AHEAD = CLUSTER;             // steps whose codes are in registers, or on their way there
    static constexpr int WARP_ROWS = 8;               // neighbouring entries of a warp
    static constexpr int CHUNK = 16 / CLUSTER;        // bytes that a thread loads at once
    static constexpr int LANES = PANEL_SIZE / CHUNK;  // that have one entry
    using chunk_t = conditional_t<CLUSTER == 1, uint4, uint2>;
    // Chunks of a thread, of a half and of rotated keys; rotated keys that are no codes are copied where they belong.
    static constexpr int LATENT_CHUNKS = 2 * HALF_PANELS, CHUNKS = LATENT_CHUNKS + (IS_DS_MLA ? 0 : 2);
    const EntryTiles& tiles;
    const Split& split;
    const cache_t* cache;
    int64_t page_stride, slot_stride;
    float4* scales;  // [4 warps][2 pairs][WARP_SIZE], shared: the scales of each entry, if IS_DS_MLA
    int rank;        // of the block, in its cluster
    chunk_t codes[AHEAD][CHUNKS];

private:
    // Where the thread's codes of its rows begin.
    struct Rows { const cache_t* from[2]; };

    static DEVICE int lane() { return threadIdx.x % WARP_SIZE; }
    static DEVICE int warp() { return threadIdx.x % 128 / WARP_SIZE; }
    static constexpr DEVICE int stage_of(int step) { return step % 2; }
    static constexpr DEVICE int half_of(int step) { return step == 1 || step == 2 ? RIGHT : LEFT; }
    static constexpr DEVICE bool has_rope(int step) { return half_of(step) != stage_of(step); }
    static constexpr DEVICE bool waits_in_shared(int step) { return !IS_DS_MLA && step == HALVES - 1; }
    static constexpr DEVICE int chunks_of(int step) { return has_rope(step) ? CHUNKS : LATENT_CHUNKS; }
    static constexpr DEVICE int row_of(int chunk) { return chunk < LATENT_CHUNKS ? chunk / HALF_PANELS : chunk % 2; }
    static constexpr DEVICE int panel_of(int step, int chunk) {
        return chunk < LATENT_CHUNKS ? half_of(step) * HALF_PANELS + chunk % HALF_PANELS : ROPE_PANEL;
    }
    // Which of the 32 entries of the warp is the thread's row `i` of a step.
    DEVICE int entry_of(int step, int i) const {
        return stage_of(step) * 2 * WARP_ROWS + (CLUSTER > 1 ? rank * WARP_ROWS : 0) + i * (WARP_SIZE / LANES) +
               lane() / LANES;
    }
    // `place`: of the entry of each lane. An entry that is nowhere is zeroed by who multiplies, and is the first one until then.
    DEVICE const cache_t* entry_at(int64_t place, int entry) const {
        return cache + max(shfl<WARP_SIZE>(place, entry), int64_t(0));
    }
    template <int STEP>
    DEVICE Rows rows_of(int64_t place) const {
        Rows rows;
#pragma unroll
        for (int i = 0; i < 2; ++i) rows.from[i] = entry_at(place, entry_of(STEP, i)) + threadIdx.x % LANES * CHUNK;
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
        codes[STEP % AHEAD][chunk] = *reinterpret_cast<const chunk_t*>(from);
    }
    template <int STEP>
    DEVICE void load_step(const Rows& rows) {
#pragma unroll
        for (int chunk = 0; chunk < chunks_of(STEP); ++chunk) load<STEP>(chunk, rows);
    }
    // The place of the thread's first elements in its first row of a panel.
    DEVICE int place_in_panel() const {
        const int row =
            CLUSTER == 1 ? threadIdx.x % 128 / LANES : rank * (TOKENS / 2) + warp() * WARP_ROWS + lane() / LANES;
        return swizzle_128b(row, threadIdx.x % LANES * 2 * CHUNK);
    }
    // The same in row `i` by that in the first one, `at`: half a tile further on, where rows are swizzled alike, or four rows.
    static DEVICE int place_in_row(int i, int at) {
        if (CLUSTER == 1) return at + i * (TOKENS / 2 * ROW_BYTES);
        return i ? (at ^ 4 * 16) + 4 * ROW_BYTES : at;
    }
    template <int STEP>
    DEVICE void store(int chunk, int at, const float2 (&row_scales)[2]) const {
        const int panel = panel_of(STEP, chunk), place = place_in_row(row_of(chunk), at);
        uint4 elements[2 / CLUSTER];
        if constexpr (IS_DS_MLA) {
            const float2 of_half = row_scales[row_of(chunk)];
            const bool is_second = panel * PANEL_SIZE / SCALED_SIZE % 2;
            widen_scaled_fp8<product_t>(codes[STEP % AHEAD][chunk], is_second ? of_half.y : of_half.x, elements);
        } else {
            widen_fp8<product_t>(codes[STEP % AHEAD][chunk], elements);
        }
#pragma unroll
        for (int i = 0; i < 2 / CLUSTER; ++i) {
            uint4* const to = reinterpret_cast<uint4*>(tiles.panel(stage_of(STEP), panel) + (place ^ 16 * i));
            *to = elements[i];
            if constexpr (CLUSTER > 1) store_async(to, tiles.full_of(stage_of(STEP), panel), rank ^ 1, elements[i]);
        }
    }
    // Starts copies of rotated keys that are no codes, as they lie in L2 by now: two chunks of each of two rows. Each block
    // of a cluster copies those of all entries.
    template <int STEP>
    DEVICE void copy_rope(int64_t place) const {
        const int at = swizzle_128b(threadIdx.x % 128 / 4, threadIdx.x % 4 * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int entry = (stage_of(STEP) * 2 + i) * WARP_ROWS + lane() / 4;
            const cache_t* const from = entry_at(place, entry) + ROPE_AT + lane() % 4 * 16;
            uint8_t* const to = tiles.panel(stage_of(STEP), ROPE_PANEL) + i * (TOKENS / 2 * ROW_BYTES);
            cp_async<16>(to + at, from);
            cp_async<16>(to + (at ^ 4 * 16), from + 4 * 16);
        }
        cp_async_mbarrier_arrive_noinc(tiles.full_of(stage_of(STEP), ROPE_PANEL));
    }
    // Where the codes of the last step wait: in the warp's own rows of the half that they belong to, each chunk a run of 512
    // bytes of the warp, of which the thread has those from `at` on.
    DEVICE uint4* waiting(int chunk, int at) const {
        constexpr int LAST = HALVES - 1;
        const int panel = chunk < LATENT_CHUNKS ? half_of(LAST) * HALF_PANELS + chunk / 4 : ROPE_PANEL;
        uint8_t* const run = tiles.panel(stage_of(LAST), panel) + chunk / 2 % 2 * (4 * ATOM) + chunk % 2 * (ATOM / 2);
        return reinterpret_cast<uint4*>(run + at);
    }
    DEVICE int place_of_waiting() const { return made_anew(warp() * ATOM + lane() * 16); }
    DEVICE void copy_waiting(const Rows& rows) const {
        const int at = place_of_waiting();
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            cp_async<16>(waiting(chunk, at), rows.from[row_of(chunk)] + panel_of(HALVES - 1, chunk) * PANEL_SIZE);
        }
        cp_async_commit();
    }
    DEVICE void take_waiting() {
        cp_async_wait<0>();
        const int at = place_of_waiting();
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            codes[0][chunk] = *reinterpret_cast<const chunk_t*>(waiting(chunk, at));
        }
        sync_warp();  // elements are stored there next
    }
    // Stores what has been loaded for a step of a pair, and loads for the step AHEAD of it in its place. The warps that
    // multiply fence: a fence here would wait for the loads.
    template <int STEP>
    DEVICE void pass(int pair, int64_t place, int64_t next_place) {
        constexpr int NEXT = (STEP + AHEAD) % HALVES, STAGE = stage_of(STEP), HALF = half_of(STEP);
        if constexpr (waits_in_shared(STEP)) take_waiting();
        else tiles.await_empty(STAGE, HALF, pair);
        if (STEP < 2) {  // read by the warpgroup that gives this half back
            const uint32_t found = ballot(place != NOWHERE) >> STAGE * 2 * WARP_ROWS;
            uint8_t* const exists = reinterpret_cast<uint8_t*>(tiles.exists + STAGE);
            if (lane() < 2) exists[lane() * (TOKENS / 2 / 8) + warp()] = found >> lane() * WARP_ROWS;
        }
        float2 row_scales[2] = {};
        if constexpr (IS_DS_MLA) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                row_scales[i] = reinterpret_cast<const float2*>(scales_of(pair) + entry_of(STEP, i))[HALF];
            }
        }
        const Rows next = rows_of<NEXT>(NEXT > STEP ? place : next_place);
        if (IS_DS_MLA && has_rope(STEP)) copy_rope<STEP>(place);
        if constexpr (waits_in_shared(NEXT)) {
            tiles.await_empty(stage_of(NEXT), half_of(NEXT), pair);
            copy_waiting(next);
        }
        // Made anew in each step: the compiler would keep the 76 addresses of all steps in registers.
        const int at = made_anew(place_in_panel());
        constexpr int BOTH = chunks_of(NEXT) < chunks_of(STEP) ? chunks_of(NEXT) : chunks_of(STEP);
#pragma unroll
        for (int chunk = 0; chunk < chunks_of(STEP); ++chunk) {
            store<STEP>(chunk, at, row_scales);
            if (chunk < BOTH && !waits_in_shared(NEXT)) load<NEXT>(chunk, next);
            if (IS_DS_MLA || chunk % 2 == 1) keep_loads_of_warp();
        }
#pragma unroll
        for (int chunk = BOTH; chunk < chunks_of(NEXT) && !waits_in_shared(NEXT); ++chunk) load<NEXT>(chunk, next);
        sync_warp();
        if (lane() == 0) {  // the other block's warp stores as much here as this one there
            uint64_t* const full = tiles.full_of(STAGE, HALF * HALF_PANELS);
            if constexpr (CLUSTER == 1) mbarrier_arrive(full);
            else mbarrier_arrive_expect_tx(full, chunks_of(STEP) * WARP_SIZE * 2 * CHUNK);
        }
    }

public:
    // Behind all that it calls: NVRTC 12.4 makes pass<0> where it is called, and needs what that counts by constants.
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
            // Brought to L2 before its codes are loaded: registers hold no more than AHEAD steps of what is on its way.
            if (lane() / WARP_ROWS % CLUSTER == rank) {
                for (int i = 0; i < ENTRY_BYTES; i += 128) prefetch_line(cache + place + i);
            }
            return place;
        };
        int64_t place = place_on(page_at(0), 0);
        table_t next_page = page_at(1);
        copy_scales(0, place);
        load_step<0>(rows_of<0>(place));
        if constexpr (AHEAD > 1) load_step<1>(rows_of<1>(place));
        for (int pair = 0; pair < split.pairs(); ++pair) {
            const int64_t next_place = place_on(next_page, pair + 1);
            next_page = page_at(pair + 2);
            if constexpr (IS_DS_MLA) {
                cp_async_wait<0>();
                sync_warp();
                copy_scales(pair + 1, next_place);
            }
            pass<0>(pair, place, next_place);
            pass<1>(pair, place, next_place);
            pass<2>(pair, place, next_place);
            pass<3>(pair, place, next_place);
            place = next_place;
        }
    }
};
