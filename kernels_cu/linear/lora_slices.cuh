// lora_slices.cuh: slices of a layer that share a launch, such as queries, keys and values; its tokens.
//
// The columns of slices follow each other, padded: each slice begins at a multiple of SLICE_STEP.
// The kernels explain the constants.
#pragma once
#include "reduce.cuh"
#include "vec.cuh"

constexpr int MAX_SLICES = 4;

struct Slices {
    const scalar_t* weights[MAX_SLICES];  // [num_loras, columns, size]
    int columns[MAX_SLICES];

    // A padded column: its slice, the column there, and the columns of all slices before.
    struct Column {
        const scalar_t* weight;
        int slice, columns, column;
        int64_t before;
        DEVICE bool exists() const { return column < columns; }
    };
    DEVICE Column at(int padded) const {
        Column found = {weights[0], 0, columns[0], padded, 0};
        int first = 0;
        int64_t before = 0;
#pragma unroll
        for (int i = 1; i < NUM_SLICES; ++i) {
            first += ceil_div(columns[i - 1], SLICE_STEP) * SLICE_STEP;
            before += columns[i - 1];
            if (padded >= first) found = {weights[i], i, columns[i], padded - first, before};
        }
        return found;
    }
    // Tiles of TILE padded columns; SLICE_STEP divides TILE, or is a multiple of it.
    template <int TILE>
    DEVICE int tiles() const {
        int padded = 0;
#pragma unroll
        for (int i = 0; i < NUM_SLICES; ++i) padded += ceil_div(columns[i], SLICE_STEP) * SLICE_STEP;
        return ceil_div(padded, TILE);
    }
};

// A row of a product: its number in out, the number of its weight, -1 for none, and whether there is such a row.
struct LoraRow {
    int64_t row;
    int weight;
    bool exists;
};

// The tokens of a call with an order: `order` names the first of them, as many as `num_tokens_per_lora` counts. The
// others, padding of a CUDA graph, have no adapter. Every lane of the warp takes part.
template <typename index_t>
DEVICE int64_t num_ordered(const index_t* num_tokens_per_lora, int num_counts, int64_t num_tokens) {
    int64_t sum = 0;
    for (int i = threadIdx.x % WARP_SIZE; i < num_counts; i += WARP_SIZE) {
        sum += min(max(int64_t(num_tokens_per_lora[i]), int64_t(0)), num_tokens);
    }
    return min(lane_reduce<Sum, WARP_SIZE>(sum), num_tokens);
}
