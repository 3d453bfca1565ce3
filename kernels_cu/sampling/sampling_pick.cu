// sampling_pick: the last launch of a draw: inverts the cumulative weights of the tokens at a random number.
//
//     samples[row] = the first t with sum_{i <= t} w_i > floor(r * sum w / 2^64)   r = philox(seeds[row], offsets[row])
//
// w: weights of the tokens, 0 for a token that a filter removed. r = 0 if the temperature asks for the likeliest token.
// samples[row] = -1 if all weights are 0.
//
// Block (row, piece) sums the weights of one piece of the row. The row's last block to arrive finds the piece that r
// selects, then the token in the piece.
//
// Constants:
//     HAS_MIN_P, HAS_TEMPERATURE, HAS_OFFSETS   false when min_p, temperature, offsets is null
//     FILTERED      whether launches of top-k or top-p came before
//     BACKWARDS     blocks take the rows last to first (class Piece)

#include "philox.cuh"
#include "probability.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
sampling_pick(int32_t* samples,          // [num_rows]
              const scalar_t* logits,    // [num_rows, vocab_size]
              const int64_t* seeds,      // [num_rows]
              const int64_t* offsets,    // [num_rows]
              const float* min_p,        // [num_rows]
              const float* temperature,  // [num_rows]
              const float* maxima,       // [num_rows, pieces]
              uint64_t* sums,            // [num_rows, pieces]
              uint64_t* states,          // [num_rows] RowState
              int64_t vocab_size, int64_t logits_stride, int64_t pieces, int64_t piece_size) {
    await_previous_kernel();
    __shared__ uint64_t partial[2][NUM_THREADS / WARP_SIZE];
    __shared__ uint32_t is_last;
    __shared__ uint64_t rest;
    __shared__ int piece;
    const Piece<scalar_t, BACKWARDS> at(pieces);
    RowState& state = reinterpret_cast<RowState*>(states)[at.row];
    const Weights<HAS_TEMPERATURE, HAS_MIN_P> weights(largest_of(maxima + at.row * pieces, pieces), temperature, min_p,
                                                      at.row);
    const uint32_t min_key = FILTERED ? max(state.floor, state.prefix) : 0;
    const auto weight = [&](float raw) {
        const float x = clean(raw);
        return !FILTERED || key_of(x) >= min_key ? weights.of(x) : Parts();
    };

    Parts sum;
    uint64_t all;
    const auto own_piece = at.span(logits, logits_stride, vocab_size, piece_size, at.index);
    at.template for_each<NUM_THREADS>(own_piece, [&](const auto& x, int) {
#pragma unroll
        for (float logit : x) {
            const Parts parts = weight(logit);
            sum.low += parts.low;
            sum.high += parts.high;
        }
    });
    sum_before<NUM_THREADS>(sum.whole(), partial[0], all);
    sums += at.row * pieces;
    if (threadIdx.x == 0) sums[at.index] = all;
    if (!arrives_last(&state.arrived, uint32_t(pieces), &is_last)) return;

    const auto sum_of = [&](int i) { return i < pieces ? load_fresh(sums + i) : 0; };
    uint64_t own_sum = 0, total;
    for (int i = threadIdx.x; i < pieces; i += NUM_THREADS) own_sum += sum_of(i);
    sum_before<NUM_THREADS>(own_sum, partial[0], total);
    if (total == 0) {
        if (threadIdx.x == 0) samples[at.row] = -1;
        return;
    }
    const uint64_t random = weights.is_greedy() ? 0 : philox(seeds[at.row], HAS_OFFSETS ? offsets[at.row] : 0);
    const auto weigh_piece = [&](int i, uint64_t (&w)[1]) { w[0] = sum_of(i); };
    const auto enter_piece = [&](int i, int, uint64_t left_in_piece) {
        piece = i;
        rest = left_in_piece;
    };
    find_by_weight<NUM_THREADS, 1>(multiply_high(random, total), int(pieces), weigh_piece, enter_piece, partial);
    __syncthreads();
    const auto span = at.span(logits, logits_stride, vocab_size, piece_size, piece);
    constexpr int VEC = decltype(at)::VEC;
    const auto weigh = [&](int i, uint64_t (&w)[VEC]) {
        const auto vec = span.load(i, from_float<scalar_t>(minus_infinity()));
#pragma unroll
        for (int j = 0; j < VEC; ++j) w[j] = weight(vec[j]).whole();
    };
    const auto take = [&](int i, int j, uint64_t) {
        samples[at.row] = int32_t(piece * piece_size) + span.element(i) + j;
    };
    find_by_weight<NUM_THREADS, VEC>(rest, span.vectors(), weigh, take, partial);
}
