// mla_code_loader.cuh: the warpgroup of mla_decode_sm90 that loads an fp8 cache, converts it and fills the tiles
// (mla_tiles.cuh).
//
// The warpgroup loads fp8 values to registers and stores them as product_t: float16, with one instruction per pair, or,
// with block scales, the type of the queries. The loads of the next step are in flight while it waits for an empty half
// tile.
//
// The last two halves of a pair are released at about the same time, and registers hold the fp8 values of only one.
// Without block scales, the fp8 values of the last half are therefore copied to shared memory, to the half tile that
// their elements will overwrite, before the other half is stored.
//
// In a cluster, each CTA converts one half of the entries of each tile and stores the elements in both CTAs; eight
// adjacent lanes store a line of 128 bytes. A step then has half the conversions, and registers hold two steps. This
// pays only with block scales: other conversions take less time than the stores to the other CTA.
#pragma once
#include "async.cuh"
#include "mla_tiles.cuh"

constexpr int SCALES = IS_DS_MLA ? 2 * 2 * TOKENS : 1;  // scales in shared memory: those of two pairs of tiles

// Loads the entries of an fp8 cache. Every thread of one warpgroup calls run(). A warp has 32 entries of a pair of
// tiles: in each tile 8 adjacent entries, and 8 more half a tile later. In a cluster, each CTA converts one of these
// two groups of 8. LANES adjacent lanes share an entry, and each converts CHUNK fp8 values of every panel.
struct CodeLoader {
    static constexpr int HALVES = 4;                  // a pair of tiles is released in 4 steps, one per half tile
    static constexpr int AHEAD = CLUSTER;             // steps with fp8 values loaded to registers, or in flight
    static constexpr int WARP_ROWS = 8;               // adjacent entries of a warp
    static constexpr int CHUNK = 16 / CLUSTER;        // bytes per load of a thread
    static constexpr int LANES = PANEL_SIZE / CHUNK;  // lanes per entry
    using chunk_t = conditional_t<CLUSTER == 1, uint4, uint2>;
    // Chunks per thread of a half tile, and with its rotated keys. IS_DS_MLA: rotated keys are not fp8 and are copied
    // directly to the tile.
    static constexpr int LATENT_CHUNKS = 2 * HALF_PANELS, CHUNKS = LATENT_CHUNKS + (IS_DS_MLA ? 0 : 2);
    const EntryTiles& tiles;
    const Split& split;
    const cache_t* cache;
    float4* scales;  // [4 warps][2 pairs][WARP_SIZE], shared: the scales of each entry, if IS_DS_MLA
    int rank;        // rank of the CTA in its cluster
    chunk_t codes[AHEAD][CHUNKS];

private:
    // Addresses of the thread's fp8 values in its two rows, and whether the rows have an entry. Copies read nothing for
    // others: 4 us of a block without it, because all of them asked L2 for the first entry of the cache.
    struct Rows {
        const cache_t* from[2];
        bool exists[2];
    };

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
    // The index, among the 32 entries of the warp, of the thread's row `i` of a step.
    DEVICE int entry_of(int step, int i) const {
        return stage_of(step) * 2 * WARP_ROWS + (CLUSTER > 1 ? rank * WARP_ROWS : 0) + i * (WARP_SIZE / LANES) +
               lane() / LANES;
    }
    // `place`: the offset of each lane's entry. For a token without an entry the address of the first entry of the
    // cache is returned: the consumer overwrites its elements with zeros.
    DEVICE const cache_t* entry_at(int64_t place, int entry) const {
        return cache + max(shfl<WARP_SIZE>(place, entry), int64_t(0));
    }
    static DEVICE bool exists_at(int64_t offset, int entry) {
        const bool exists = offset != NOWHERE;
        // NVRTC 13.0 spills registers if both cases have the same expression.
        if constexpr (IS_DS_MLA && CLUSTER == 1) return ballot(exists) >> entry & 1;
        else return shfl<WARP_SIZE>(int(exists), entry);
    }
    template <int STEP>
    DEVICE Rows rows_of(int64_t place) const {
        Rows rows;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rows.from[i] = entry_at(place, entry_of(STEP, i)) + threadIdx.x % LANES * CHUNK;
            rows.exists[i] = exists_at(place, entry_of(STEP, i));
        }
        return rows;
    }
    // Starts a copy of the block scales of the lane's entry.
    DEVICE void copy_scales(int pair, int64_t place) const {
        if constexpr (IS_DS_MLA) {
            cp_async<16>(scales_of(pair) + lane(), cache + max(place, int64_t(0)) + SCALES_AT);
            cp_async_commit();
        }
    }
    // Loads those of an item's first pair. A wait for a copy would be one for rotated keys of the item before, too.
    DEVICE void load_scales(int pair, int64_t offset) const {
        if constexpr (IS_DS_MLA) {
            scales_of(pair)[lane()] = *reinterpret_cast<const float4*>(cache + max(offset, int64_t(0)) + SCALES_AT);
            sync_warp();
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
    // The offset in a panel of the thread's first elements in its first row.
    DEVICE int place_in_panel() const {
        const int row =
            CLUSTER == 1 ? threadIdx.x % 128 / LANES : rank * (TOKENS / 2) + warp() * WARP_ROWS + lane() / LANES;
        return swizzle_128b(row, threadIdx.x % LANES * 2 * CHUNK);
    }
    // The offset in row `i`, from the offset `at` in the first row. The rows are half a tile apart, with the same
    // swizzle, or (in a cluster) four rows.
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
    // Starts copies of rotated keys that are not fp8: two chunks of each of two rows. The prefetch has brought them to
    // L2. Each CTA of a cluster copies those of all entries.
    template <int STEP>
    DEVICE void copy_rope(int64_t place) const {
        const int at = swizzle_128b(threadIdx.x % 128 / 4, threadIdx.x % 4 * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int entry = (stage_of(STEP) * 2 + i) * WARP_ROWS + lane() / 4;
            const cache_t* const from = entry_at(place, entry) + ROPE_AT + lane() % 4 * 16;
            const bool exists = exists_at(place, entry);
            uint8_t* const to = tiles.panel(stage_of(STEP), ROPE_PANEL) + i * (TOKENS / 2 * ROW_BYTES);
            cp_async<16>(to + at, from, exists);
            cp_async<16>(to + (at ^ 4 * 16), from + 4 * 16, exists);
        }
        cp_async_mbarrier_arrive_noinc(tiles.full_of(stage_of(STEP), ROPE_PANEL));
    }
    // The staging address of the last step's fp8 values: in the warp's own rows of their half tile. Each chunk is a run
    // of 512 bytes of the warp, and the thread has 16 bytes at `at`.
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
            const int row = row_of(chunk);
            cp_async<16>(waiting(chunk, at), rows.from[row] + panel_of(HALVES - 1, chunk) * PANEL_SIZE,
                         rows.exists[row]);
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
        sync_warp();  // elements overwrite the staged values next
    }
    // Converts and stores a step of a pair, and loads the step that is AHEAD steps later into the registers that become
    // free. The consumer warps execute the proxy fence: a fence here would wait for the loads.
    template <int STEP>
    DEVICE void pass(int pair, int64_t place, int64_t next_place) {
        constexpr int NEXT = (STEP + AHEAD) % HALVES, STAGE = stage_of(STEP), HALF = half_of(STEP);
        if constexpr (waits_in_shared(STEP)) take_waiting();
        else tiles.await_empty(STAGE, HALF, pair);
        if (STEP < 2) {  // read by the warpgroup that releases this half
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
        // Recomputed in each step: otherwise the compiler keeps the 76 addresses of all steps in registers.
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
        if (lane() == 0) {  // the other CTA's warp stores the same number of bytes here as this warp stores there
            uint64_t* const full = tiles.full_of(STAGE, HALF * HALF_PANELS);
            if constexpr (CLUSTER == 1) mbarrier_arrive(full);
            else mbarrier_arrive_expect_tx(full, chunks_of(STEP) * WARP_SIZE * 2 * CHUNK);
        }
    }

public:
    // Defined after all that it calls: NVRTC 12.4 instantiates pass<0> at the call, and needs the functions that it
    // uses in constant expressions. Returns the number after that of the last pair.
    // The page table has `max_tokens` tokens: the page numbers of the first pair are loaded up to there, without a wait
    // for the length.
    DEVICE int run(int max_tokens) {
        // Each lane computes the offset of one of the warp's entries a pair ahead, and loads its page number two pairs
        // ahead.
        const int own = lane() / WARP_ROWS * (TOKENS / 2) + warp() * WARP_ROWS + lane() % WARP_ROWS;
        const auto page_at = [&](int pair, int loaded_end) {
            const int token = split.token_of(pair) + own;
            const int64_t page = token < loaded_end ? split.table.at(token) : int64_t(-1);
            return token < split.end ? page : int64_t(-1);
        };
        const auto place_on = [&](int64_t page, int pair) {
            if (!split.table.exists(page)) return NOWHERE;
            const int64_t place = split.table.offset(page, split.token_of(pair) + own);
            // Prefetch to L2 ahead of the loads: registers hold no more than AHEAD steps in flight.
            if (lane() / WARP_ROWS % CLUSTER == rank) {
                for (int i = 0; i < ENTRY_BYTES; i += 128) prefetch_line(cache + place + i);
            }
            return place;
        };
        int pair = split.first_pair;
        int64_t place = place_on(page_at(pair, max_tokens), pair);
        int64_t next_page = page_at(pair + 1, split.end);
        load_step<0>(rows_of<0>(place));
        if constexpr (AHEAD > 1) load_step<1>(rows_of<1>(place));
        load_scales(pair, place);
        for (; split.has(pair); ++pair) {
            const int64_t next_place = place_on(next_page, pair + 1);
            next_page = page_at(pair + 2, split.end);
            if constexpr (IS_DS_MLA) {
                cp_async_wait<0>();
                sync_warp();
                if (split.has(pair + 1)) copy_scales(pair + 1, next_place);
            }
            pass<0>(pair, place, next_place);
            pass<1>(pair, place, next_place);
            pass<2>(pair, place, next_place);
            pass<3>(pair, place, next_place);
            place = next_place;
        }
        return pair;
    }
};
