// prefill_fp8_to_half.cuh: the converter warps of prefill_sm90: convert the fp8 tiles that the producer loads
// (prefill_loader.cuh) to tiles of product_t. Reads the constants of the kernel that includes it.
//
// Thread mapping: a warp converts eight tokens, and the next warp the next eight. Four lanes share a token; each
// converts 16 fp8 values, a chunk, of every panel. A chunk takes a load, the conversions and two stores, at constant
// offsets from the lane's first addresses.
#pragma once
#include "prefill_loader.cuh"
#include "widen.cuh"

// A lane's chunks of a tile, round by round. In a round each warp has eight tokens, and each lane a chunk of each
// panel.
template <typename Tile>
struct Chunks {
    static constexpr int EIGHTS = TOKENS / 8, ROUNDS = ceil_div(EIGHTS, WIDENERS), COUNT = ROUNDS * Tile::PANELS;
    // SWAPS: lanes of adjacent tokens take adjacent panels, so that eight lanes read 128 bytes without bank conflicts.
    // With an odd number of panels per token they do so without the swap.
    static constexpr bool SWAPS = Tile::PANELS % 2 == 0;
    int first_eight, lane;
    const uint8_t* codes[2];  // round 0: addresses in the lane's panels 0 and 1
    uint8_t* elements[2][2];  // likewise; first 8 elements of a chunk, last 8

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

// Converts an fp8 tile to product_t, together with the other converter warps. Loads run AHEAD chunks before the stores,
// because the compiler moves no load above a store.
template <typename Tile, int RING_STAGES>
DEVICE void widen_tile(Tiles& tiles, Ring<RING_STAGES>& ring, uint8_t* to_tiles, const Codes& kind) {
    constexpr int COUNT = Chunks<Tile>::COUNT, AHEAD = COUNT < 3 ? COUNT : 3;  // more would exceed the registers
    const int warp = shfl<WARP_SIZE>(int(threadIdx.x % 128 / WARP_SIZE), 0) - 1;
    // The first warps may have one round more than the others. The order of warps differs between keys and values,
    // which balances the rounds.
    const Chunks<Tile> chunks(tiles.codes + tiles.code.stage * CODE_BYTES, to_tiles + ring.stage * Tile::BYTES,
                              (warp + (kind.kind == Codes::VALUES)) % WIDENERS);
    ring.acquire();
    if (kind.kind == Codes::KEYS && warp == 0 && chunks.lane == 0) tiles.invalid_pages[ring.stage] = kind.invalid_boxes;
    const auto load = [&](int i) {
        const uint4 codes = chunks.load(i);
        if (i == COUNT - 1) {  // the next fp8 tile may arrive while this one is stored
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

// Converts all fp8 tiles that the producer loads. Every lane of the WIDENERS warps must call.
DEVICE void widen_tiles(Tiles& tiles) {
    for (;; tiles.code.advance()) {
        tiles.code.wait();
        if (tiles.kinds[tiles.code.stage].kind == Codes::END) return;
        const Codes kind = tiles.kinds[tiles.code.stage];
        if (kind.kind == Codes::KEYS) widen_tile<KeyTile>(tiles, tiles.key, tiles.keys, kind);
        else widen_tile<ValueTile>(tiles, tiles.value, tiles.values, kind);
    }
}
