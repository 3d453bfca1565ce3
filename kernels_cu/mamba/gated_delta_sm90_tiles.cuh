// gated_delta_sm90_tiles.cuh: what gated_delta_prepare.cu writes of each tile of tokens for gated_delta_sm90.cu, and
// what this writes of each segment. The header of gated_delta_chunk.cu gives the formulas.
#pragma once
#include "state_tiles.cuh"

constexpr int TOKENS = 64;           // tokens of a tile
constexpr bool CHECKPOINTS = false;  // of sequence_tiles.cuh
#include "sequence_tiles.cuh"

constexpr int STEPS = KEY_SIZE / 16;
constexpr int WIDE = 64, PANELS = KEY_SIZE / WIDE;  // elements of a row of a swizzled tile; tiles of keys
static_assert(KEY_SIZE % WIDE == 0);
using tile_t = SwizzledTile<scalar_t, WIDE / 8>;  // a row for each token
constexpr int TILE_BYTES = tile_t::bytes(TOKENS);
DEVICE tile_t tile_at(uint8_t* bytes) { return {reinterpret_cast<scalar_t*>(bytes)}; }
using square_tile = SwizzledTile<scalar_t, TOKENS / 8>;  // a matrix that relates tokens to each other: row l, column m
constexpr int SQUARE_BYTES = square_tile::bytes(TOKENS);

// Token-by-token matrices are swizzled as WGMMA reads them; the swizzle counts rows from a multiple of 1024 bytes.
struct alignas(16) PreparedTile {
    uint8_t weights[SQUARE_BYTES];  // of u in o
    uint8_t inverse[SQUARE_BYTES];  // (I + L)^-1 b
    float of_keys[TOKENS];          // exp(a_l) / |k_l|
    float of_queries[TOKENS];       // exp(a_l) * scale / |q_l|
    float of_changes[TOKENS];       // exp(a_end - a_m) / |k_m|, and 0 for tokens that do not exist
    uint32_t large_rows[4];         // a bit for each row that is to be scaled by DOWN: keys, then queries
    float kept[4];                  // exp(a_end), and padding
};

// The transition of a segment of gated_delta_sm90.cu as the sum of two matrices of bf16_t: what it rounds to, and the
// rest. Rows are the elements of a key before the segment, columns those after it, in tiles of WIDE columns.
struct alignas(16) Transition {
    uint8_t parts[2][PANELS][KEY_SIZE * WIDE * 2];

    // Elements (row, column) and the next of a part; `column` is even.
    DEVICE uint32_t* pair_at(int part, int row, int column) {
        const SwizzledTile<bf16_t, WIDE / 8> tile{reinterpret_cast<bf16_t*>(parts[part][column / WIDE])};
        return reinterpret_cast<uint32_t*>(tile.at(row, column % WIDE / 8) + column % 8);
    }
};
