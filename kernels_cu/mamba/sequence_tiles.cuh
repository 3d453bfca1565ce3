// sequence_tiles.cuh: the tiles of sequences, and their slots: a workspace has one for each tile of every sequence.
//
// Constants
//     TOKENS         tokens of a tile
//     CHECKPOINTS    a tile ends after the first checkpoint_offsets[i] tokens of sequence i
#pragma once
#include "memory.cuh"

// A sequence in tiles of TOKENS tokens. With CHECKPOINTS, a tile ends where the state is wanted.
struct SequenceTiles {
    int64_t begin, cut, end;  // tokens up to `cut` have tiles of their own
    int64_t first_slot;       // the index of the first tile among the prepared tiles of all sequences
    int before_cut, count;    // tiles up to `cut`, and all tiles

    template <typename starts_t, typename offset_t>
    DEVICE SequenceTiles(const starts_t* cu_seqlens, const offset_t* offsets, int64_t seq, int64_t seq_tokens,
                         int64_t num_tokens) {
        // Before the wait for the previous kernel (await_previous_of_call), the L1 cache may hold older values.
        begin = cu_seqlens ? int64_t(load_fresh(cu_seqlens + seq)) : seq * seq_tokens;
        end = cu_seqlens ? int64_t(load_fresh(cu_seqlens + seq + 1)) : begin + seq_tokens;
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

// The sequence that has a tile in a slot, or -1. All NUM_THREADS threads call; tiles_of(seq) gives the tiles of a
// sequence, and `found` is in shared memory.
template <int NUM_THREADS, typename Tiles>
DEVICE int sequence_of(int64_t slot, int64_t num_seqs, int& found, Tiles tiles_of) {
    if (threadIdx.x == 0) found = -1;
    __syncthreads();
    for (int64_t seq = threadIdx.x; seq < num_seqs; seq += NUM_THREADS) {
        const SequenceTiles tiles = tiles_of(seq);
        if (slot >= tiles.first_slot && slot - tiles.first_slot < tiles.count) found = int(seq);
    }
    __syncthreads();
    return found;
}
