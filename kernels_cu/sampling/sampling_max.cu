// sampling_max: the first launch of a draw: the maximum of each piece of a row. It also clears the accumulators of
// later launches.
//
//     maxima[row, piece] = max clean(logits[row, piece])    bins = 0 if FILTERED, states = 0    clean: NaN becomes -inf
//
// Block (row, piece) reduces one piece of the row, one vector of each thread at a time.
//
// Constants:
//     FILTERED      whether launches of top-k or top-p follow
//     BACKWARDS     blocks take the rows last to first (class Piece)

#include "probability.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
sampling_max(const scalar_t* logits,  // [num_rows, vocab_size]
             float* maxima,           // [num_rows, pieces]
             uint64_t* bins,          // [num_rows, MAX_BINS]
             uint64_t* states,        // [num_rows] RowState
             int64_t vocab_size, int64_t logits_stride, int64_t pieces, int64_t piece_size) {
    await_previous_kernel();
    __shared__ float partial[NUM_THREADS / WARP_SIZE];
    const Piece<scalar_t, BACKWARDS> at(pieces);
    float largest = minus_infinity();
    const auto own_piece = at.span(logits, logits_stride, vocab_size, piece_size, at.index);
    at.for_each<NUM_THREADS>(own_piece, [&](const auto& x, int) {
        for (float logit : x) largest = ieee_max(largest, logit);
    });
    largest = row_reduce<Max, NUM_THREADS>(largest, partial);
    for (int i = at.index * NUM_THREADS + threadIdx.x; FILTERED && i < MAX_BINS; i += int(pieces) * NUM_THREADS) {
        bins[at.row * MAX_BINS + i] = 0;
    }
    if (threadIdx.x == 0) {
        maxima[at.row * pieces + at.index] = clean(largest);
        if (at.index == 0) reinterpret_cast<RowState*>(states)[at.row] = RowState{0, 0, 0, 0, 0};
    }
}
