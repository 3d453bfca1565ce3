// gated_delta_sm90_tiles.cuh: what gated_delta_prepare.cu writes of each tile of tokens for gated_delta_sm90.cu, and
// what this writes of each segment. The header of gated_delta_chunk.cu gives the formulas.
#pragma once
#include "state_tiles.cuh"

constexpr int TOKENS = 64;           // tokens of a tile
constexpr bool CHECKPOINTS = false;  // of sequence_tiles.cuh
#include "sequence_tiles.cuh"
#include "wgmma.cuh"

constexpr int STEPS = KEY_SIZE / 16;
constexpr int WIDE = 64, PANELS = KEY_SIZE / WIDE;  // elements of a row of a swizzled tile; tiles of keys
static_assert(KEY_SIZE % WIDE == 0);
using tile_t = SwizzledTile<scalar_t, WIDE / 8>;  // a row for each token
constexpr int TILE_BYTES = tile_t::bytes(TOKENS);
DEVICE tile_t tile_at(uint8_t* bytes) { return {reinterpret_cast<scalar_t*>(bytes)}; }
constexpr int TOKEN_STEPS = TOKENS / 16;

// Matrices that relate tokens to each other are lower triangular. A panel has 16 of their columns as WGMMA reads them
// without a swizzle: groups of 8 rows, of two chunks of 8 columns, of 8 times 16 bytes.
struct Panel {
    static constexpr int GROUP_BYTES = 256, CHUNK_BYTES = 128;
    uint8_t* bytes;

    DEVICE scalar_t* at(int group, int row, int chunk) const {
        return reinterpret_cast<scalar_t*>(bytes + group * GROUP_BYTES + chunk * CHUNK_BYTES + row * 16);
    }
    DEVICE static uint64_t desc(const uint8_t* from) {
        return make_smem_desc<SWIZZLE_NONE>(from, GROUP_BYTES, CHUNK_BYTES);
    }
};

// The weights of u in o: a panel has all rows in shared memory. In global memory it has none above its block of the
// diagonal: two launches move these bytes, and memory bounds both.
struct Weights {
    static constexpr int PANEL_BYTES = TOKENS * 32, BYTES = TOKEN_STEPS * PANEL_BYTES;
    static constexpr int PACKED_BYTES = TOKENS * (TOKENS + 16);

    // Bytes of the rows of panel `step` that are above the diagonal, of its other rows, and before these in global
    // memory.
    DEVICE static constexpr int zeros(int step) { return step * 16 * 32; }
    DEVICE static constexpr int packed(int step) { return PANEL_BYTES - zeros(step); }
    DEVICE static constexpr int offset(int step) { return step * PANEL_BYTES - step * (step - 1) / 2 * 16 * 32; }
};

// (I + L)^-1 b. The first half of the rows and the second are separate products, so that the first half has no panels
// of the last tokens.
struct Inverse {
    static constexpr int ROWS = TOKENS / 2, FIRST_PANELS = ROWS / 16, PANEL_BYTES = ROWS * 32;
    static constexpr int BYTES = (FIRST_PANELS + TOKEN_STEPS) * PANEL_BYTES;

    DEVICE static constexpr int offset(int half, int step) { return (half * FIRST_PANELS + step) * PANEL_BYTES; }
};

struct alignas(16) TileFactors {
    uint8_t inverse[Inverse::BYTES];
    float of_keys[TOKENS];     // exp(a_l) / |k_l|
    float of_queries[TOKENS];  // exp(a_l) * scale / |q_l|
    float of_changes[TOKENS];  // exp(a_end - a_m) / |k_m|, and 0 for tokens that do not exist
    uint32_t large_rows[4];    // a bit for each row that is to be scaled by DOWN: keys, then queries
    float kept[4];             // exp(a_end), and padding
};

struct alignas(16) PreparedTile {
    uint8_t weights[Weights::PACKED_BYTES];
    TileFactors factors;
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
