// sampling_filter: one digit of the least logit that top-k, or top-p, leaves.
//
//     top-k   as many tokens as top_k[row], and those that equal the last of them
//     top-p   of these, the likeliest whose weights reach top_p[row] of all, and those that equal the last of them
//
// Keys are floats as integers of the same order. The blocks of a row add up how many tokens, or which weight, each value of
// the digit has among keys with the digits found before; the last to come finds the value with which enough is reached. All
// sums are of integers. A row without the filter, or whose result is exact already, is passed over.
//
// Constants
//     scalar_t      element type of logits
//     TOP_P         the filter: top-p, or top-k
//     NUMBER        of the digit
//     HAS_MIN_P, HAS_TEMPERATURE   false when min_p, temperature is null
//     BACKWARDS     the last row first (weights.cuh)
//     NUM_THREADS   threads in the block

#include "probability.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
sampling_filter(const scalar_t* logits,        // [num_rows, vocab_size]
                const int32_t* top_k,          // [num_rows]
                const float* top_p,            // [num_rows]
                const float* min_p,            // [num_rows]
                const float* temperature,      // [num_rows]
                const float* maxima,           // [num_rows, pieces]
                uint64_t* bins,                // [num_rows, MOST_BINS]
                uint64_t* states,              // [num_rows] of RowState
                int64_t vocab_size, int64_t logits_stride, int64_t pieces, int64_t piece_size) {
    await_previous_kernel();
    __shared__ uint32_t low[(TOP_P ? 2 : 1) * MOST_BINS];
    __shared__ uint64_t partial[NUM_THREADS / WARP_SIZE];
    __shared__ Found<uint64_t> found;
    __shared__ uint32_t is_last;
    uint32_t* const high = low + (TOP_P ? MOST_BINS : 0);
    const Digit digit(NUMBER);
    const Piece<scalar_t, BACKWARDS> at(pieces);
    RowState& state = reinterpret_cast<RowState*>(states)[at.row];
    const uint32_t floor = state.floor, prefix = TOP_P ? state.prefix : floor;
    if (state.is_exact >> TOP_P & 1) return;
    if (!TOP_P && (top_k[at.row] <= 0 || top_k[at.row] >= vocab_size)) return;
    if (TOP_P && !(top_p[at.row] < 1.0f)) return;
    const Weights<HAS_TEMPERATURE, HAS_MIN_P> weights(largest_of(maxima + at.row * pieces, pieces), temperature, min_p, at.row);
    if (weights.largest == minus_infinity()) return;

    for (int i = threadIdx.x; i < digit.bins; i += NUM_THREADS) {
        low[i] = 0;
        if (TOP_P) high[i] = 0;
    }
    __syncthreads();
    at.template for_each<NUM_THREADS>(at.span(logits, logits_stride, vocab_size, piece_size, at.index), [&](const auto& x, int) {
        constexpr int VEC = decltype(at)::VEC;
        Parts weight[VEC];
        uint32_t bin[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const float one = clean(x[j]);
            const uint32_t key = key_of(one);
            const bool counts = digit.matches(key, prefix) && (TOP_P ? key >= floor : one != minus_infinity());
            bin[j] = digit.of(key);
            if constexpr (!TOP_P) {
                weight[j].low = counts;
            } else if (NUMBER == 0 || counts) {  // where few count, a branch
                weight[j] = weights.of(counts ? one : minus_infinity());
            }
        }
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            if (weight[j].low) atomicAdd(low + bin[j], TOP_P ? weight[j].low : 1u);
            if (weight[j].high) atomicAdd(high + bin[j], weight[j].high);
        }
    });
    __syncthreads();
    bins += at.row * MOST_BINS;
    for (int i = threadIdx.x; i < digit.bins; i += NUM_THREADS) {
        const uint64_t sum = Parts{low[i], TOP_P ? high[i] : 0}.whole();
        if (sum) atomicAdd(&bins[i], sum);
    }
    if (!arrives_last(&state.arrived, uint32_t(pieces), &is_last)) return;

    const auto wanted = [&](uint64_t all) {
        if (NUMBER > 0) return state.wanted;
        if (!TOP_P) return min(uint64_t(top_k[at.row]), all);
        const double share = top_p[at.row] > 0.0f ? ceil(double(top_p[at.row]) * double(all)) : 0.0;
        return share < 1.0 ? uint64_t(1) : min(uint64_t(share), all);
    };
    const auto place = find_from_above<NUM_THREADS>(
        digit.bins, [&](int bin) { return load_fresh(bins + bin); }, wanted, partial, &found);
    for (int i = threadIdx.x; i < digit.bins; i += NUM_THREADS) bins[i] = 0;
    if (threadIdx.x == 0) {
        (TOP_P ? state.prefix : state.floor) = prefix | place.bin << digit.shift;
        state.wanted = place.wanted;
        if (place.held == place.wanted) state.is_exact |= 1u << TOP_P;
    }
}
