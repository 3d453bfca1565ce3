// prefill_fp8_to_half.cuh: the warps of prefill_sm90, whose constants it reads, that make tiles of product_t of the
// tiles of codes that the producer loads from an fp8 cache (prefill_loader.cuh).
//
// A warp widens eight tokens, and leaves the next eight to the next warp. Four lanes have a token, each 16 codes of every
// panel: a chunk. A chunk takes a load, conversions and two stores, whose addresses are constants beside the lane's first
// ones.
#pragma once
#include "prefill_loader.cuh"
#include "widen.cuh"

// A lane's chunks of a tile, round by round: a round is eight tokens to each warp, and a chunk of each panel to a lane.
template <typename Tile>
struct Chunks {
    static constexpr int EIGHTS = TOKENS / 8, ROUNDS = ceil_div(EIGHTS, WIDENERS), COUNT = ROUNDS * Tile::PANELS;
    // Of neighbouring tokens, lanes take neighbouring panels: eight lanes then read 128 bytes of all banks. Where an odd
    // number of panels lies between two tokens, they do so anyway.
    static constexpr bool SWAPS = Tile::PANELS % 2 == 0;
    int first_eight, lane;
    const uint8_t* codes[2];  // of the first round: of the lane's panel 0 and of its panel 1
    uint8_t* elements[2][2];  // likewise; the first 8 elements of a chunk and the others

    DEVICE Chunks(const uint8_t* from, uint8_t* to, int first_eight)
        : first_eight(first_eight), lane(threadIdx.x % WARP_SIZE) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            codes[i] = from + token_of(0) * Tile::SIZE + panel_of(i) * PANEL_SIZE + lane % 4 * 16;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = swizzle_128b(lane / 4, lane % 4 * 32 + half * 16);
                elements[i][half] = to + panel_of(i) * PANEL_STRIDE + first_eight * ATOM + at;
            }
        }
    }
    DEVICE uint4 load(int chunk) const {
        constexpr int ROUND = WIDENERS * 8 * Tile::SIZE;
        const int panel = chunk % Tile::PANELS;
        const uint8_t* const from = codes[panel % 2] + chunk / Tile::PANELS * ROUND + panel / 2 * (2 * PANEL_SIZE);
        return exists(chunk) ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    }
    DEVICE void store(int chunk, const uint4 (&of)[2]) const {
        if (!exists(chunk)) return;
        const int panel = chunk % Tile::PANELS,
                  at = chunk / Tile::PANELS * (WIDENERS * ATOM) + panel / 2 * (2 * PANEL_STRIDE);
        *reinterpret_cast<uint4*>(elements[panel % 2][0] + at) = of[0];
        *reinterpret_cast<uint4*>(elements[panel % 2][1] + at) = of[1];
    }
    DEVICE int token_of(int chunk) const { return (first_eight + chunk / Tile::PANELS * WIDENERS) * 8 + lane / 4; }

private:
    DEVICE int panel_of(int chunk) const {
        return SWAPS ? chunk % Tile::PANELS ^ (lane / 4 % 2) : chunk % Tile::PANELS;
    }
    DEVICE bool exists(int chunk) const {
        const bool in_tile = EIGHTS % WIDENERS == 0 || chunk / Tile::PANELS < ROUNDS - 1 ||
                             first_eight + chunk / Tile::PANELS * WIDENERS < EIGHTS;
        const bool in_head = Tile::SIZE % PANEL_SIZE == 0 || panel_of(chunk) * PANEL_SIZE + lane % 4 * 16 < Tile::SIZE;
        return in_tile && in_head;
    }
};

// Makes a tile of product_t of a tile of codes, with the other WIDENERS. Chunks are loaded AHEAD of the one that is stored: the
// compiler moves no load ahead of a store.
template <typename Tile, int RING_STAGES>
DEVICE void widen_tile(Tiles& tiles, Ring<RING_STAGES>& ring, uint8_t* to_tiles, const Codes& kind) {
    constexpr int COUNT = Chunks<Tile>::COUNT, AHEAD = COUNT < 3 ? COUNT : 3;  // for more there are no registers
    const int warp = shfl<WARP_SIZE>(int(threadIdx.x % 128 / WARP_SIZE), 0) - 1;
    // The first warps may have a round more than the others: of values those that have one less of keys.
    const Chunks<Tile> chunks(tiles.codes + tiles.code.stage * CODE_BYTES, to_tiles + ring.stage * Tile::BYTES,
                              (warp + (kind.kind == Codes::VALUES)) % WIDENERS);
    ring.acquire();
    if (kind.kind == Codes::KEYS && warp == 0 && chunks.lane == 0) tiles.holes[ring.stage] = kind.missing;
    const auto load = [&](int i) {
        const uint4 codes = chunks.load(i);
        if (i == COUNT - 1) {  // the next tile of codes may come while this one is stored
            sync_warp();
            tiles.code.release(tiles.code.stage);
        }
        return codes;
    };
    uint4 codes[AHEAD], elements[2];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) codes[i] = load(i);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        widen_fp8<product_t>(codes[i % AHEAD], elements);
        if (i + AHEAD < COUNT) codes[i % AHEAD] = load(i + AHEAD);
        chunks.store(i, elements);
    }
    if (kind.begin > 0 || kind.end < TOKENS) {
        elements[0] = elements[1] = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int token = chunks.token_of(i);
            if (token < kind.begin || token >= kind.end) chunks.store(i, elements);
        }
    }
    fence_proxy_async();
    sync_warp();
    if (chunks.lane == 0) mbarrier_arrive(ring.full());
    ring.advance();
}

// Widens all tiles of codes that the producer loads. Every lane of WIDENERS warps calls.
DEVICE void widen_tiles(Tiles& tiles) {
    for (;; tiles.code.advance()) {
        tiles.code.wait();
        if (tiles.kinds[tiles.code.stage].kind == Codes::END) return;
        const Codes kind = tiles.kinds[tiles.code.stage];
        if (kind.kind == Codes::KEYS) widen_tile<KeyTile>(tiles, tiles.key, tiles.keys, kind);
        else widen_tile<ValueTile>(tiles, tiles.value, tiles.values, kind);
    }
}
