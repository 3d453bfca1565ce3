// prefill_panels.cuh: tiles of queries, keys and values of prefill_sm90 in shared memory. Reads the constants of the
// kernel that includes it.
//
// A tile has panels: columns of PANEL_SIZE elements, with rows of ROW_BYTES, swizzled. Queries have one panel after the
// other. Keys and values lie in swizzle atoms, 8 tokens of a panel. The next atom is that of the next panel
// (WHOLE_HEADS), or of the next 8 tokens.
//
// WHOLE_HEADS: a TMA box has all panels of its tokens, so a head consists of panels without padding. Heads of an odd
// multiple of 32 elements have panels of 64 bytes. Other heads of 72 to 120 elements have two panels that overlap: the
// second one has the last PANEL_SIZE elements of the head. Its first OVERLAP columns repeat elements of the first
// panel. Q K^T skips them, and O has columns for them that no one reads.
#pragma once
#include "wgmma.cuh"

// IS_E4M3: WGMMA takes the fp8 values as they are (prefill_sm90_fp8). IS_FP8: they are converted to float16 first.
constexpr bool IS_E4M3 = sizeof(product_t) == 1, IS_FP8 = !IS_E4M3 && !is_same<cache_t, scalar_t>;
constexpr int ROW_BYTES = WHOLE_HEADS && (HEAD_SIZE | VALUE_SIZE) * sizeof(product_t) % 128 == 64 ? 64 : 128;
constexpr int PANEL_SIZE = ROW_BYTES / sizeof(product_t), ROW_CHUNKS = ROW_BYTES / 16;  // chunks of 16 bytes
constexpr int PANEL_SLICES = ROW_BYTES / 32;  // slices of a panel: the 32 bytes of K of an MMA
constexpr SmemSwizzle PANEL_SWIZZLE = ROW_BYTES == 128 ? SWIZZLE_128B : SWIZZLE_64B;
constexpr int ATOM = 8 * ROW_BYTES, PANEL_STRIDE = WHOLE_HEADS ? ATOM : TOKENS * ROW_BYTES;

// A tile of keys or values with HEAD elements per token.
template <int HEAD>
struct CacheTile {
    static constexpr int SIZE = HEAD, PANELS = ceil_div(SIZE, PANEL_SIZE), BYTES = PANELS * TOKENS * ROW_BYTES;
    static constexpr int TOKEN_STRIDE = WHOLE_HEADS ? PANELS * ATOM : ATOM;  // bytes from 8 tokens to the next 8
    static constexpr int LOADED_BYTES = IS_FP8 ? TOKENS * SIZE : BYTES;      // bytes of the fp8 tile, or of the tile
    static constexpr int OVERLAP = WHOLE_HEADS ? PANELS * PANEL_SIZE - SIZE : 0;
    static_assert(OVERLAP == 0 || (PANELS == 2 && SIZE % 16 == 0));

    // The column of an element.
    DEVICE static constexpr int column_of(int element) { return element + (element < PANEL_SIZE ? 0 : OVERLAP); }
    // Bytes from the tile to its i-th slice of K.
    DEVICE static constexpr int slice(int i) {
        return i / PANEL_SLICES * PANEL_STRIDE + i % PANEL_SLICES * 32 +
               (i < PANEL_SLICES ? 0 : OVERLAP * int(sizeof(product_t)));
    }
};
using KeyTile = CacheTile<HEAD_SIZE>;
using ValueTile = CacheTile<VALUE_SIZE>;
static_assert(VALUE_SIZE <= HEAD_SIZE);

// VALUE_COLUMNS: N of P V, a multiple of 16. Without an overlap, the last 8 columns may be zeros.
constexpr int VALUE_COLUMNS = ValueTile::OVERLAP ? ValueTile::PANELS * PANEL_SIZE : ceil_div(VALUE_SIZE, 16) * 16;
