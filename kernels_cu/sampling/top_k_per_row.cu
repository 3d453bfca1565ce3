// top_k_per_row: where the topK largest of each segment of a row are, from left to right; of equal ones the first.
//
//     segment of row r   [rowStarts[r], rowEnds[r]), or [0, seq_lens[r / next_n] - next_n + r % next_n + 1), cut to the columns
//     indices[r]         positions in it; 0, 1, ..., -1, -1, ... if it is not longer than topK
//
// A block finds the k-th largest by its digits, 11, 11 and 10 bits from the left, with a histogram each; the last digits are
// not looked at if all with the first ones are taken. Then it writes the positions of what is larger, and of what is equal
// so many as are missing, in order.
//
// A long row is cut into pieces, a block for each, which leave their largest as candidates, in order; a second launch, MERGE,
// selects among them. Any of the topK largest is among those of its piece, also of equal ones the first.
//
// Constants
//     DECODE        segments are given by seq_lens
//     PIECE_SIZE    elements of a piece at most; 0: rows are not cut
//     MERGE         rows are those of candidates
//     STAGED        the block's elements fit into shared memory; else they are read again for every digit
//     VEC_SIZE      elements in one memory access: 4, or 1 where elements lie apart
//     NUM_THREADS   threads in the block

#include "async.cuh"
#include "select.cuh"
#include "span.cuh"

using vec_t = Vec<uint32_t, VEC_SIZE>;
constexpr uint32_t ABSENT = MERGE ? 0 : ~0u;  // whose key is 0, below all others

DEVICE uint32_t key_of(uint32_t element) { return MERGE ? element : ordered_bits(element); }

// Keys above `key` are taken, and the first `ties` that equal it.
struct Threshold {
    uint32_t key, ties;
};

// The elements that a block selects from, in aligned vectors.
struct Elements {
    Span<uint32_t, VEC_SIZE> span;
    const vec_t* staged;

    // f(keys, number of the first) for every vector of the thread, of the block from left to right, round by round.
    template <typename F>
    DEVICE void for_each(F f) const {
        const auto of_keys = [&](vec_t vec, int first) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) vec.data[j] = key_of(vec.data[j]);
            f(vec.data, first);
        };
        if constexpr (STAGED) {
            for (int i = threadIdx.x; i < span.vectors(); i += NUM_THREADS) of_keys(staged[i], span.element(i));
        } else {
            span.template for_each<NUM_THREADS, 4>(ABSENT, of_keys);
        }
    }
    DEVICE void stage(vec_t* to) {
        for (int i = threadIdx.x; i < span.vectors(); i += NUM_THREADS) {
            if (span.is_whole(i)) {
                cp_async<4 * VEC_SIZE>(to + i, span.base + int64_t(i) * VEC_SIZE * span.step);
            } else {
                to[i] = span.load(i, ABSENT);
            }
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        staged = to;
    }
};

DEVICE int64_t clamped(int64_t x, int64_t low, int64_t high) { return x < low ? low : x < high ? x : high; }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
top_k_per_row(int32_t* indices,             // [numRows, topK]
              const uint32_t* logits,       // [numRows, columns], bits of float
              const int32_t* rowStarts,     // [numRows]
              const int32_t* rowEnds,       // [numRows]
              const int32_t* seq_lens,      // [ceil(numRows / next_n)]
              uint32_t* keys,               // [numRows, most_pieces, topK]
              int32_t* positions,           // [numRows, most_pieces, topK]
              int next_n, int64_t columns, int64_t stride0, int64_t stride1, int64_t topK, int64_t most_pieces) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ uint32_t bins[MOST_BINS];
    __shared__ uint32_t partial[2][NUM_THREADS / WARP_SIZE];
    __shared__ Found<uint32_t> found;
    const int64_t row = blockIdx.x;

    int64_t begin = 0, end;
    if constexpr (DECODE) {
        const unsigned sequence = blockIdx.x / unsigned(next_n);
        end = int64_t(seq_lens[sequence]) - next_n + (blockIdx.x - sequence * unsigned(next_n)) + 1;
    } else {
        begin = clamped(rowStarts[row], 0, columns);
        end = rowEnds[row];
    }
    const int length = int(clamped(end, begin, columns) - begin);
    const int pieces = PIECE_SIZE ? length / PIECE_SIZE + (length % PIECE_SIZE > 0) : 1;
    indices += row * topK;
    if (length <= topK) {
        if (MERGE || blockIdx.y > 0) return;
        for (int64_t i = threadIdx.x; i < topK; i += NUM_THREADS) indices[i] = i < length ? int(i) : -1;
        return;
    }
    if (MERGE ? pieces < 2 : blockIdx.y >= pieces) return;

    // What this block selects from, and where it writes what.
    const int piece_size = length / pieces + (length % pieces > 0), from = MERGE ? 0 : blockIdx.y * piece_size;
    const int64_t candidates = row * most_pieces * topK;
    keys += candidates;
    positions += candidates;
    const uint32_t* first = MERGE ? keys : logits + row * stride0 + (begin + from) * stride1;
    const int count = MERGE ? pieces * int(topK) : min(piece_size, length - from);
    Elements elements{{first, count, MERGE ? 1 : stride1}, nullptr};
    if constexpr (STAGED) elements.stage(reinterpret_cast<vec_t*>(memory));

    Threshold threshold{0, uint32_t(topK)};
    int turn = 0;
#pragma unroll 1
    for (int number = 0; number < 3; ++number) {
        const Digit digit(number);
        for (int i = threadIdx.x; i < digit.bins; i += NUM_THREADS) bins[i] = 0;
        __syncthreads();
        elements.for_each([&](const uint32_t (&key)[VEC_SIZE], int) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                if (digit.matches(key[j], threshold.key)) atomicAdd(&bins[digit.of(key[j])], 1u);
            }
        });
        __syncthreads();
        const auto place = find_from_above<NUM_THREADS>(
            digit.bins, [&](int bin) { return bins[bin]; }, [&](uint32_t) { return threshold.ties; }, partial[turn ^= 1],
            &found);
        threshold = {threshold.key | place.bin << digit.shift, place.wanted};
        if (place.held == place.wanted && threshold.key > 0) {
            threshold = {threshold.key - 1, 0};
            break;
        }
    }

    const bool is_last = MERGE || pieces == 1;
    uint32_t above = 0, equal = 0;  // so many before this round
    const int rounds = ceil_div(elements.span.vectors(), NUM_THREADS);
    for (int round = 0; round < rounds; ++round) {
        const int i = round * NUM_THREADS + threadIdx.x;
        vec_t vec = vec_t();
        uint32_t counts = 0;  // above, and from bit 16 on equal
        if (i < elements.span.vectors()) {
            vec = STAGED ? elements.staged[i] : elements.span.load(i, ABSENT);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                vec.data[j] = key_of(vec.data[j]);
                if (!elements.span.exists(elements.span.element(i) + j)) continue;
                counts += vec.data[j] > threshold.key ? 1 : vec.data[j] == threshold.key ? 1 << 16 : 0;
            }
        }
        uint32_t total;
        const uint32_t before = sum_before<NUM_THREADS>(counts, partial[turn ^= 1], total);
        uint32_t more = above + (before & 0xffff), ties = equal + (before >> 16);
        above += total & 0xffff;
        equal += total >> 16;
        if (counts == 0) continue;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            const int element = elements.span.element(i) + j;
            if (!elements.span.exists(element) || vec.data[j] < threshold.key) continue;
            const bool is_tie = vec.data[j] == threshold.key;
            const uint32_t slot = more + min(ties, threshold.ties);
            if (!is_tie || ties < threshold.ties) {
                const int position = MERGE ? positions[element] : from + element;
                if (is_last) {
                    indices[slot] = position;
                } else {
                    keys[blockIdx.y * topK + slot] = vec.data[j];
                    positions[blockIdx.y * topK + slot] = position;
                }
            }
            more += !is_tie;
            ties += is_tie;
        }
    }
}
