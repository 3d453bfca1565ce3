// sampling_max: the first launch of a draw: the largest logit of each piece of a row, NaN left out, and memory for what follows.
//
//     maxima[row, piece] = max clean(logits[row, piece])    bins = 0 if FILTERED, states = nothing known
//
// Constants
//     scalar_t      element type of logits
//     FILTERED      whether top-k or top-p follows
//     BACKWARDS     the last row first (weights.cuh)
//     NUM_THREADS   threads in the block

#include "probability.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
sampling_max(const scalar_t* logits,   // [num_rows, vocab_size]
             float* maxima,            // [num_rows, pieces]
             uint64_t* bins,           // [num_rows, MOST_BINS]
             uint64_t* states,         // [num_rows] of RowState
             int64_t vocab_size, int64_t logits_stride, int64_t pieces, int64_t piece_size) {
    await_previous_kernel();
    __shared__ float partial[NUM_THREADS / WARP_SIZE];
    const Piece<scalar_t, BACKWARDS> at(pieces);
    float largest = minus_infinity();
    at.for_each<NUM_THREADS>(at.span(logits, logits_stride, vocab_size, piece_size, at.index), [&](const auto& x, int) {
        for (float one : x) largest = ieee_max(largest, one);
    });
    largest = row_reduce<Max, NUM_THREADS>(largest, partial);
    for (int i = at.index * NUM_THREADS + threadIdx.x; FILTERED && i < MOST_BINS; i += int(pieces) * NUM_THREADS) {
        bins[at.row * MOST_BINS + i] = 0;
    }
    if (threadIdx.x == 0) {
        maxima[at.row * pieces + at.index] = clean(largest);
        if (at.index == 0) reinterpret_cast<RowState*>(states)[at.row] = RowState{0, 0, 0, 0, 0};
    }
}
