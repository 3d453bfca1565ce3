// ggml_rows.cuh: the map from a block to its rows of X and out, and to the expert that supplies its weight.
//
// A row of out is a choice, one (token, expert) pair: choice c is row c / top_k of X times the weight of its expert.
//
//     CHOICES 0    no experts: rows in order, one weight
//     CHOICES 1    ids[c] is the expert of choice c; a block has one choice
//     CHOICES 2    ids holds choices sorted by expert, TOKENS per block (moe_align_block_size); expert_ids holds the
//                  expert of each block. An out-of-range id is padding.
//
// Blocks with the same rows of out are adjacent in the grid: one for each tile of ROWS rows of the weight (columns of
// out).
#pragma once
#include "platform.cuh"

template <int ROWS> DEVICE unsigned row_tiles(int64_t n) { return unsigned((n + ROWS - 1) / ROWS); }
// The first row of the weight of the block.
template <int ROWS> DEVICE int64_t first_row_of_block(int64_t n) {
    return int64_t(blockIdx.x % row_tiles<ROWS>(n)) * ROWS;
}

template <int CHOICES, int TOKENS, typename index_t>
struct TokenRows {
    static_assert(CHOICES != 1 || TOKENS == 1);
    const index_t* ids;
    const index_t* expert_ids;
    int64_t tile, num_choices, top_k;

    // The block's expert, or -1 if the id is out of range.
    DEVICE int64_t expert(int64_t num_experts) const {
        if constexpr (CHOICES == 0) return 0;
        const int64_t number = CHOICES == 1 ? ids[tile] : expert_ids[tile];
        return number >= 0 && number < num_experts ? number : -1;
    }
    // The row of out of the block's row `i`, or -1 for padding.
    DEVICE int64_t choice(int i) const {
        const int64_t at = tile * TOKENS + i;
        if constexpr (TOKENS == 1 && CHOICES != 2) return at;  // one block per choice
        const int64_t found = CHOICES == 2 ? int64_t(ids[at]) : at;
        return found >= 0 && found < num_choices ? found : -1;
    }
    // The row of X that the choice reads.
    DEVICE int64_t row_of(int64_t choice) const { return CHOICES == 0 ? choice : choice / top_k; }
};
