// sequence_search.cuh: the sequence of a tile, where tiles are numbered through all sequences.
#pragma once
#include "arith.cuh"

// The last sequence that begins at this tile or before; -1 if there is none. Sequence s begins at first_tile_of(s). If
// these numbers do not ascend, any sequence may be returned. Each lane probes one sequence, so that a load narrows the
// range by a factor of WARP_SIZE. Every lane of the warp must call.
template <typename F>
DEVICE int find_sequence(int64_t tile, int num_seqs, const F& first_tile_of) {
    int low = 0, high = num_seqs;  // the number of sequences that begin at the tile or before lies in [low, high]
    while (low < high) {
        const int step = ceil_div(high - low, WARP_SIZE);
        const int probe = min(low + (int(threadIdx.x % WARP_SIZE) + 1) * step, high);
        const int steps = count_bits(ballot(first_tile_of(probe - 1) <= tile));
        high = min(low + (steps + 1) * step - 1, high);
        low = min(low + steps * step, high);
    }
    return low - 1;
}
