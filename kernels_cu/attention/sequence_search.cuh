// sequence_search.cuh: the sequence of a tile, or of a split, where these are numbered through all sequences.
#pragma once
#include "arith.cuh"
#include "vec.cuh"

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

// The sequence with item `number`, if sequence s has count_of(s) items, which follow those of sequence s - 1. `number`
// becomes the item's index within its sequence. Returns -1 if there is no such item. Every lane of the warp must call.
template <typename F>
DEVICE int find_item(int& number, int num_seqs, const F& count_of) {
    const int lane = threadIdx.x % WARP_SIZE;
    for (int first = 0; first < num_seqs; first += WARP_SIZE) {
        const int count = first + lane < num_seqs ? count_of(first + lane) : 0;
        int prefix_sum = count;
#pragma unroll
        for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
            const int before = shfl<WARP_SIZE>(prefix_sum, max(lane - distance, 0));
            if (lane >= distance) prefix_sum += before;
        }
        const int total = shfl<WARP_SIZE>(prefix_sum, WARP_SIZE - 1);
        if (number < total) {
            // The minimum over lanes is the first lane with a prefix sum above `number`.
            int hit = number < prefix_sum ? lane : WARP_SIZE;
#pragma unroll
            for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) hit = min(hit, shfl_xor(hit, mask));
            number -= shfl<WARP_SIZE>(prefix_sum - count, hit);
            return first + hit;
        }
        number -= total;
    }
    return -1;
}
