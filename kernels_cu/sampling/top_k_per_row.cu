// top_k_per_row: where the topK largest of each segment of a row are, from left to right; of equal ones the first.
//
//     segment of row r   [rowStarts[r], rowEnds[r]), or [0, seq_lens[r / next_n] - next_n + r % next_n + 1), cut to the columns
//     indices[r]         positions in it; 0, 1, ..., -1, -1, ... if it is not longer than topK
//
// A block finds the k-th largest by its digits, 11, 11 and 10 bits from the left, with a histogram each; the last digits are
// not looked at if all with the first ones are taken. Then it writes the positions of what is larger, and of what is equal
// so many as are missing, in order.
//
// Where devices have clusters, a row is cut into as many pieces as a cluster has blocks, which add up their histograms and
// count what the pieces before theirs have.
//
// Elsewhere a long row is cut into pieces, a block for each, which leave their largest as candidates, in order; a second launch,
// MERGE, selects among them. Any of the topK largest is among those of its piece, also of equal ones the first.
//
// Constants
//     DECODE        segments are given by seq_lens
//     CLUSTER       blocks that share a row and run together; 1: none do
//     PIECE_SIZE    elements of a piece at most, without clusters; 0: rows are not cut
//     MERGE         rows are those of candidates
//     STAGED        the block's elements fit into shared memory; else they are read again for every digit
//     VEC_SIZE      elements in one memory access: 4, or 1 where elements lie apart
//     NUM_THREADS   threads in the block

#include "async.cuh"
#include "cluster.cuh"
#include "reduce.cuh"
#include "select.cuh"
#include "span.cuh"

using vec_t = Vec<uint32_t, VEC_SIZE>;
constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE;
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

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, 1)
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
    __shared__ uint32_t bins[CLUSTER > 1 ? 2 : 1][MOST_BINS];  // the other blocks still read one while this writes the other
    __shared__ uint32_t groups[CLUSTER > 1 ? 2 : 1][MOST_BINS / GROUP_BINS];
    __shared__ Found<uint32_t> found;
    __shared__ uint32_t above_of[NUM_WARPS];
    __shared__ uint32_t equal_of[NUM_WARPS];
    __shared__ uint32_t totals[2];
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
    const int pieces = PIECE_SIZE ? length / PIECE_SIZE + (length % PIECE_SIZE > 0) : CLUSTER;
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
    const int count = MERGE ? pieces * int(topK) : max(0, min(piece_size, length - from));
    Elements elements{{first, count, MERGE ? 1 : stride1}, nullptr};
    if constexpr (STAGED) elements.stage(reinterpret_cast<vec_t*>(memory));

    Threshold threshold{0, uint32_t(topK)};
#pragma unroll 1
    for (int number = 0; number < 3; ++number) {
        const Digit digit(number);
        uint32_t* own = bins[CLUSTER > 1 ? number % 2 : 0];
        for (int i = threadIdx.x; i < digit.bins; i += NUM_THREADS) own[i] = 0;
        __syncthreads();
        elements.for_each([&](const uint32_t (&key)[VEC_SIZE], int) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                if (digit.matches(key[j], threshold.key)) atomicAdd(&own[digit.of(key[j])], 1u);
            }
        });
        __syncthreads();
        uint32_t* sums = groups[CLUSTER > 1 ? number % 2 : 0];
        for (int group = threadIdx.x / 32; group < digit.bins / GROUP_BINS; group += NUM_THREADS / 32) {
            const uint32_t sum = lane_reduce<Sum, 32>(own[group * GROUP_BINS + threadIdx.x % 32]);
            if (threadIdx.x % 32 == 0) sums[group] = sum;
        }
        sync_cluster<CLUSTER>();
        const auto of_all = [&](const uint32_t* word) {
            uint32_t sum = 0;
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) sum += load_of_block<CLUSTER>(word, rank);
            return sum;
        };
        const auto place = find_in_groups(
            digit.bins, [&](int group) { return of_all(sums + group); }, [&](int bin) { return of_all(own + bin); },
            threshold.ties, &found);
        threshold = {threshold.key | place.bin << digit.shift, place.wanted};
        if (place.held == place.wanted && threshold.key > 0) {
            threshold = {threshold.key - 1, 0};
            break;
        }
    }

    // A warp has a stretch of the vectors. It counts first, so that it knows where what it writes begins.
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int vectors = elements.span.vectors(), stretch = ceil_div(vectors, NUM_WARPS);
    const int stretch_end = min(vectors, (warp + 1) * stretch);
    // Keys of vector i, and how many are above the threshold, and from bit 16 on how many equal it.
    const auto look = [&](int i, vec_t& vec) {
        uint32_t counts = 0;
        if (i >= stretch_end) return counts;
        vec = STAGED ? elements.staged[i] : elements.span.load(i, ABSENT);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            vec.data[j] = key_of(vec.data[j]);
            if (!elements.span.exists(elements.span.element(i) + j)) continue;
            counts += vec.data[j] > threshold.key ? 1 : vec.data[j] == threshold.key ? 1 << 16 : 0;
        }
        return counts;
    };
    uint32_t above = 0, equal = 0;
    for (int i = warp * stretch + lane; i < stretch_end; i += WARP_SIZE) {
        vec_t vec;
        const uint32_t counts = look(i, vec);
        above += counts & 0xffff;
        equal += counts >> 16;
    }
    above = lane_reduce<Sum, WARP_SIZE>(above);
    equal = lane_reduce<Sum, WARP_SIZE>(equal);
    if (lane == 0) {
        above_of[warp] = above;
        equal_of[warp] = equal;
    }
    __syncthreads();
    above = equal = 0;
    uint32_t all_above = 0, all_equal = 0;
#pragma unroll
    for (int w = 0; w < NUM_WARPS; ++w) {
        if (w == warp) above = all_above, equal = all_equal;
        all_above += above_of[w];
        all_equal += equal_of[w];
    }
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x == 0) totals[0] = all_above, totals[1] = all_equal;
        sync_cluster<CLUSTER>();
        for (unsigned rank = 0; rank < blockIdx.y; ++rank) {
            above += load_of_block<CLUSTER>(totals, rank);
            equal += load_of_block<CLUSTER>(totals + 1, rank);
        }
    }

    const bool is_last = MERGE || PIECE_SIZE == 0 || pieces == 1;
    for (int first = warp * stretch; first < stretch_end; first += WARP_SIZE) {
        const int i = first + lane;
        vec_t vec;
        const uint32_t counts = look(i, vec);
        uint32_t sum = counts;
#pragma unroll
        for (int step = 1; step < WARP_SIZE; step *= 2) {
            const uint32_t other = shfl<WARP_SIZE>(sum, max(lane - step, 0));
            if (lane >= step) sum += other;
        }
        uint32_t more = above + ((sum - counts) & 0xffff), ties = equal + ((sum - counts) >> 16);
        const uint32_t total = shfl<WARP_SIZE>(sum, WARP_SIZE - 1);
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
    if constexpr (CLUSTER > 1) sync_cluster<CLUSTER>();  // the blocks behind may still read what this one counted
}
