// kda_tiles.cuh: what kda_prepare.cu writes of each tile of a sequence for kda_chunk.cu.
#pragma once
#include "gated_delta_tiles.cuh"
#include "sequence_tiles.cuh"

// Rows of contiguous elements in global memory, with the interface of SwizzledTile.
template <int ROW_SIZE>
struct PreparedRows {
    scalar_t* data;
    DEVICE scalar_t* at(int row, int chunk) const { return data + row * ROW_SIZE + chunk * 8; }
};

// The prepared tile of a head. With a_l the sum of the logarithms of decays up to token l of the tile, for each
// channel:
struct PreparedTile {
    using key_rows = PreparedRows<KEY_SIZE>;
    using square_rows = PreparedRows<TOKENS>;
    static constexpr int SIZE = TOKENS * (3 * KEY_SIZE + 2 * TOKENS) + 2 * KEY_SIZE;  // in elements of scalar_t
    scalar_t* data;

    DEVICE PreparedTile(scalar_t* prepared, int64_t slot, int64_t head, int64_t heads)
        : data(prepared + (slot * heads + head) * SIZE) {}
    DEVICE key_rows keys() const { return {data}; }                             // exp(a_l) k_l
    DEVICE key_rows queries() const { return {data + TOKENS * KEY_SIZE}; }      // exp(a_l) q_l
    DEVICE key_rows changes() const { return {data + 2 * TOKENS * KEY_SIZE}; }  // exp(a_end - a_l) k_l
    DEVICE square_rows inverse() const { return {data + 3 * TOKENS * KEY_SIZE}; }
    DEVICE square_rows weights() const { return {inverse().data + TOKENS * TOKENS}; }
    DEVICE float* kept() const { return reinterpret_cast<float*>(weights().data + TOKENS * TOKENS); }  // exp(a_end)
};
