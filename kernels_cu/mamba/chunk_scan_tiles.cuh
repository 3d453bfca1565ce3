// chunk_scan_tiles.cuh: the token tiles of chunk_scan: their shared memory layout, the rows of a warp, and the
// epilogue. It uses the constants of chunk_scan.cu.
#pragma once
#include "chunk_scan_decays.cuh"
#include "state_tiles.cuh"

constexpr int ROWS = HEADS * HEAD_TILE, NUM_WARPS = ROWS / 16 / ROW_TILES, NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int STEPS = STATE_SIZE / 16;
static_assert((HEADS == 1 || HEAD_TILE == HEAD_SIZE) && (STAGES == 2 || HOLDS_COPIES));

using b_tile_t = SummedTile<scalar_t, STATE_SIZE, TOKENS>;
using c_tile_t = SwizzledTile<scalar_t, STATE_SIZE / 8>;  // a row for each token
using x_tile_t = SwizzledTile<scalar_t, ROWS / 8>;        // a row for each token
using weights_tile_t = square_tile_t<scalar_t, TOKENS>;   // row l, column m
using decays_t = Decays<HEADS, TOKENS>;
using result_t = Block[ROW_TILES][2];  // a warp's y, transposed: rows by tokens

// Tiles in shared memory: B, x and C of STAGES tiles; then the weights of each head for one.
struct Stages {
    static constexpr int B_BYTES = b_tile_t::BYTES, C_BYTES = c_tile_t::bytes(TOKENS),
                         X_BYTES = x_tile_t::bytes(TOKENS);
    static constexpr int BYTES = B_BYTES + X_BYTES + (SEGMENT_STATES ? 0 : C_BYTES);
    static constexpr int WEIGHT_BYTES = weights_tile_t::bytes(TOKENS);
    unsigned char* shared;

    DEVICE unsigned char* at(int stage) const { return shared + (STAGES == 1 ? 0 : stage) * BYTES; }
    DEVICE b_tile_t b(int stage) const { return {{reinterpret_cast<scalar_t*>(at(stage))}}; }
    DEVICE x_tile_t x(int stage) const { return {reinterpret_cast<scalar_t*>(at(stage) + B_BYTES)}; }
    DEVICE c_tile_t c(int stage) const { return {reinterpret_cast<scalar_t*>(at(stage) + B_BYTES + X_BYTES)}; }
    DEVICE weights_tile_t weights(int head) const {
        return {reinterpret_cast<scalar_t*>(shared + STAGES * BYTES + head * WEIGHT_BYTES)};
    }
};

// The first row, of the block's, of matrix tile r of the warp; and its head, counted in the block.
DEVICE int tile_row(int r) { return (int(threadIdx.x / WARP_SIZE) * ROW_TILES + r) * 16; }
DEVICE int head_of(int r) { return tile_row(r) / HEAD_TILE; }
// The first token of pair i of the block of tokens number n, counted in the tile.
DEVICE int token_of(int n, int i) { return n * 16 + pair_column(i) + lane_column(threadIdx.x % WARP_SIZE); }

// Stores y to `out`, which points to the block's first row at the tile's first token. y is transposed through the
// shared memory of the warp's part of x, so that a lane stores whole vectors of a token's row.
DEVICE void store_results(const result_t& y, const x_tile_t& x_tile, scalar_t* out, int64_t out_stride, int count) {
    const int lane = threadIdx.x % WARP_SIZE;
    sync_warp();
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int n = 0; n < 2; ++n) y[r][n].template store_to_tile<scalar_t>(x_tile, n * 16, tile_row(r) / 8);
    }
    sync_warp();
    // Chunks of a token, and tokens that a warp stores at once.
    constexpr int CHUNKS = ROW_TILES * 2, STEP = WARP_SIZE / CHUNKS;
    const int first = lane / CHUNKS, chunk = tile_row(0) / 8 + lane % CHUNKS;
    out += first * out_stride + chunk * 8;
#pragma unroll
    for (int l = first; l < TOKENS + first; l += STEP, out += STEP * out_stride) {
        const auto result = Vec<scalar_t, 8>::load(x_tile.at(l, chunk));
        if (l < count) result.template store<OUT_VEC>(out);
    }
}
