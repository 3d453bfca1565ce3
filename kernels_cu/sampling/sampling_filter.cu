// sampling_filter: finds one digit of the smallest logit that top-k, or top-p, keeps (a radix select over several
// launches).
//
//     top-k   keeps the top_k[row] largest logits, and logits that equal the smallest of them
//     top-p   keeps, of these, the largest whose weights add up to top_p[row] of the sum, and logits that equal the
//             smallest of them
//
// Keys are floats mapped to integers of the same order. Block (row, piece) adds one piece of the row to the row's
// histogram: for each value of the digit, the number of tokens (top-k) or their weight (top-p), of keys that begin with
// the digits found by earlier launches. The row's last block to arrive scans the histogram from above until the wanted
// amount is reached. All additions are of integers, so their order does not matter. Rows without the filter, and rows
// with an exact result already, are skipped.
//
// Constants:
//     TOP_P         true: the filter is top-p; false: top-k
//     DIGIT         number of the digit, 0 the highest
//     HAS_MIN_P, HAS_TEMPERATURE   false when min_p, temperature is null
//     BACKWARDS     blocks take the rows last to first (class Piece)

#include "probability.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
sampling_filter(const scalar_t* logits,    // [num_rows, vocab_size]
                const int32_t* top_k,      // [num_rows]
                const float* top_p,        // [num_rows]
                const float* min_p,        // [num_rows]
                const float* temperature,  // [num_rows]
                const float* maxima,       // [num_rows, pieces]
                uint64_t* bins,            // [num_rows, MAX_BINS]
                uint64_t* states,          // [num_rows] RowState
                int64_t vocab_size, int64_t logits_stride, int64_t pieces, int64_t piece_size) {
    await_previous_kernel();
    __shared__ uint32_t low[(TOP_P ? 2 : 1) * MAX_BINS];
    __shared__ uint64_t partial[NUM_THREADS / WARP_SIZE];
    __shared__ Found<uint64_t> found;
    __shared__ uint32_t is_last;
    uint32_t* const high = low + (TOP_P ? MAX_BINS : 0);
    const Digit digit(DIGIT);
    const Piece<scalar_t, BACKWARDS> at(pieces);
    RowState& state = reinterpret_cast<RowState*>(states)[at.row];
    const uint32_t min_key = state.floor, prefix = TOP_P ? state.prefix : min_key;
    if (state.is_exact >> TOP_P & 1) return;
    if (!TOP_P && (top_k[at.row] <= 0 || top_k[at.row] >= vocab_size)) return;
    if (TOP_P && !(top_p[at.row] < 1.0f)) return;
    const Weights<HAS_TEMPERATURE, HAS_MIN_P> weights(largest_of(maxima + at.row * pieces, pieces), temperature, min_p,
                                                      at.row);
    if (weights.largest == minus_infinity()) return;

    for (int i = threadIdx.x; i < digit.bins; i += NUM_THREADS) {
        low[i] = 0;
        if (TOP_P) high[i] = 0;
    }
    __syncthreads();
    const auto own_piece = at.span(logits, logits_stride, vocab_size, piece_size, at.index);
    at.template for_each<NUM_THREADS>(own_piece, [&](const auto& x, int) {
        constexpr int VEC = decltype(at)::VEC;
        Parts weight[VEC];
        uint32_t bin[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const float logit = clean(x[j]);
            const uint32_t key = key_of(logit);
            const bool counts = digit.matches(key, prefix) && (TOP_P ? key >= min_key : logit != minus_infinity());
            bin[j] = digit.of(key);
            if constexpr (!TOP_P) {
                weight[j].low = counts;
            } else if (DIGIT == 0 || counts) {  // after digit 0 few keys count: skip the exponential
                weight[j] = weights.of(counts ? logit : minus_infinity());
            }
        }
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            if (weight[j].low) atomicAdd(low + bin[j], TOP_P ? weight[j].low : 1u);
            if (weight[j].high) atomicAdd(high + bin[j], weight[j].high);
        }
    });
    __syncthreads();
    bins += at.row * MAX_BINS;
    for (int i = threadIdx.x; i < digit.bins; i += NUM_THREADS) {
        const uint64_t sum = Parts{low[i], TOP_P ? high[i] : 0}.whole();
        if (sum) atomicAdd(&bins[i], sum);
    }
    if (!arrives_last(&state.arrived, uint32_t(pieces), &is_last)) return;

    const auto wanted = [&](uint64_t all) {
        if (DIGIT > 0) return state.wanted;
        if (!TOP_P) return min(uint64_t(top_k[at.row]), all);
        const double share = top_p[at.row] > 0.0f ? ceil(double(top_p[at.row]) * double(all)) : 0.0;
        return share < 1.0 ? uint64_t(1) : min(uint64_t(share), all);
    };
    const auto result = find_from_above<NUM_THREADS>(
        digit.bins, [&](int bin) { return load_fresh(bins + bin); }, wanted, partial, &found);
    for (int i = threadIdx.x; i < digit.bins; i += NUM_THREADS) bins[i] = 0;
    if (threadIdx.x == 0) {
        (TOP_P ? state.prefix : state.floor) = prefix | result.bin << digit.shift;
        state.wanted = result.wanted;
        if (result.held == result.wanted) state.is_exact |= 1u << TOP_P;
    }
}
