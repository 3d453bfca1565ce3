// kda_tiles.cuh: the tiles of sequences, and what kda_prepare.cu writes of each tile for kda_chunk.cu.
#pragma once
#include "gated_delta_tiles.cuh"

// A sequence in tiles of TOKENS tokens. With CHECKPOINTS, a tile ends where the state is wanted.
struct SequenceTiles {
    int64_t begin, cut, end;  // tokens up to `cut` have tiles of their own
    int64_t first_slot;       // the index of the first tile among the prepared tiles of all sequences
    int before_cut, count;    // tiles up to `cut`, and all tiles

    template <typename starts_t, typename offset_t>
    DEVICE SequenceTiles(const starts_t* cu_seqlens, const offset_t* offsets, int64_t seq, int64_t seq_tokens,
                         int64_t num_tokens) {
        begin = cu_seqlens ? int64_t(cu_seqlens[seq]) : seq * seq_tokens;
        end = cu_seqlens ? int64_t(cu_seqlens[seq + 1]) : begin + seq_tokens;
        if (begin < 0 || end > num_tokens || begin > end) begin = end = 0;
        const int64_t offset = CHECKPOINTS ? int64_t(offsets[seq]) : 0;
        cut = begin + (offset > 0 && offset <= end - begin ? offset : 0);
        before_cut = int((cut - begin + TOKENS - 1) / TOKENS);
        count = before_cut + int((end - cut + TOKENS - 1) / TOKENS);
        // Tiles of other sequences have other slots: one more than its whole tiles suffices for a sequence, and two if
        // it is cut.
        first_slot = begin / TOKENS + seq * (CHECKPOINTS ? 2 : 1);
    }
    DEVICE int64_t token(int tile) const {
        return tile < before_cut ? begin + int64_t(tile) * TOKENS : cut + int64_t(tile - before_cut) * TOKENS;
    }
    DEVICE int tokens(int tile) const {
        return int(min((tile < before_cut ? cut : end) - token(tile), int64_t(TOKENS)));
    }
    // Whether the state after a tile is that of the checkpoint.
    DEVICE bool ends_at_cut(int tile) const { return CHECKPOINTS && tile + 1 == before_cut; }
};

// Rows of contiguous elements in global memory, with the interface of SwizzledTile.
template <int ROW_SIZE>
struct PreparedRows {
    scalar_t* data;
    DEVICE scalar_t* at(int row, int chunk) const { return data + row * ROW_SIZE + chunk * 8; }
};

// The prepared tile of a head. With a_l the sum of the logarithms of decays up to token l of the tile, for each channel:
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
