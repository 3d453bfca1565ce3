// mla_row_loader.cuh: the warpgroup of mla_decode_sm90 that copies the entries of a 16-bit cache to the tiles
// (mla_tiles.cuh) one by one: entries of a list of slots, or of pages too small for a TMA box.
#pragma once
#include "async.cuh"
#include "mla_tiles.cuh"

// Every thread of one warpgroup calls run(). A warp has ROWS adjacent entries of each tile of a pair: lane i has the
// offset of entry i % ROWS of tile i / ROWS. Eight adjacent lanes copy the 128 bytes of an entry in a panel. A token
// without an entry is copied as zeros, and nothing is read for it.
struct RowLoader {
    static constexpr int ROWS = TOKENS / 4, ROW_LANES = 8, CHUNK = PANEL_SIZE / ROW_LANES;  // CHUNK: elements of a copy
    const EntryTiles& tiles;
    const Split& split;
    const cache_t* cache;

private:
    static DEVICE int lane() { return threadIdx.x % WARP_SIZE; }
    static DEVICE int warp() { return threadIdx.x % 128 / WARP_SIZE; }

    // Fills a half of a tile. `offset`: that of each lane's entry.
    template <int STAGE, int HALF>
    DEVICE void copy(int pair, int64_t offset) const {
        tiles.await_empty(STAGE, HALF, pair);
        if (HALF == STAGE) {  // read by the warpgroup that releases this half
            const uint32_t found = ballot(offset != NOWHERE) >> STAGE * ROWS;
            if (lane() == 0) reinterpret_cast<uint16_t*>(tiles.exists + STAGE)[warp()] = uint16_t(found);
        }
        uint64_t* const full = tiles.full_of(STAGE, HALF * HALF_PANELS);
#pragma unroll
        for (int i = 0; i < ROWS; i += WARP_SIZE / ROW_LANES) {
            const int row = i + lane() / ROW_LANES;
            const int64_t from = shfl<WARP_SIZE>(offset, STAGE * ROWS + row);
            const cache_t* const entry = cache + max(from, int64_t(0)) + lane() % ROW_LANES * CHUNK;
            const int at = swizzle_128b(warp() * ROWS + row, lane() % ROW_LANES * 16);
            const auto copy_panel = [&](int panel) {
                cp_async<16>(tiles.panel(STAGE, panel) + at, entry + panel * PANEL_SIZE, from != NOWHERE);
            };
#pragma unroll
            for (int panel = 0; panel < HALF_PANELS; ++panel) copy_panel(HALF * HALF_PANELS + panel);
            if (HALF != STAGE) copy_panel(ROPE_PANEL);
        }
        cp_async_mbarrier_arrive_noinc(full);
        if (lane() == 0) mbarrier_arrive(full);  // the arrival of a copy does not release `exists`
    }

public:
    // Returns the number after that of the last pair.
    DEVICE int run() const {
        const int own = lane() / ROWS * TOKENS + warp() * ROWS + lane() % ROWS;
        // Each lane loads the page or slot number of its entry a pair ahead.
        const auto page_at = [&](int pair) {
            const int token = split.token_of(pair) + own;
            return token < split.end ? split.table.at(token) : int64_t(-1);
        };
        int pair = split.first_pair;
        int64_t next_page = page_at(pair);
        for (; split.has(pair); ++pair) {
            const int64_t offset = split.table.find(next_page, split.token_of(pair) + own);
            next_page = page_at(pair + 1);
            copy<0, LEFT>(pair, offset);
            copy<1, RIGHT>(pair, offset);
            copy<0, RIGHT>(pair, offset);
            copy<1, LEFT>(pair, offset);
        }
        return pair;
    }
};
