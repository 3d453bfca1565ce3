// top_k.cuh: the segment of each row in which the top-k kernels search. A block takes row blockIdx.x.

#pragma once
#include "platform.cuh"

DEVICE int64_t clamped(int64_t x, int64_t low, int64_t high) { return x < low ? low : x < high ? x : high; }

struct Segment {
    int64_t begin;
    int length;
};

// The segment of row r: [rowStarts[r], rowEnds[r]), or, if DECODE, [0, seq_lens[r / next_n] - next_n + r % next_n + 1);
// cut to the columns of the matrix.
template <bool DECODE>
DEVICE Segment segment_of(const int32_t* rowStarts, const int32_t* rowEnds, const int32_t* seq_lens, int next_n,
                          int64_t columns) {
    int64_t begin = 0, end;
    if constexpr (DECODE) {
        const unsigned sequence = blockIdx.x / unsigned(next_n);
        end = int64_t(seq_lens[sequence]) - next_n + (blockIdx.x - sequence * unsigned(next_n)) + 1;
    } else {
        begin = clamped(rowStarts[blockIdx.x], 0, columns);
        end = rowEnds[blockIdx.x];
    }
    return {begin, int(clamped(end, begin, columns) - begin)};
}

// The indices of a segment with at most topK elements: all of them, then -1.
template <int NUM_THREADS>
DEVICE void take_all(int32_t* indices, int length, int64_t topK) {
#pragma unroll 1
    for (int64_t i = threadIdx.x; i < topK; i += NUM_THREADS) indices[i] = i < length ? int(i) : -1;
}
