// top_k_short_row: where the topK largest of each segment of a row are, as top_k_per_row has it, of rows that a block's
// registers hold.
//
//     segment of row r   [rowStarts[r], rowEnds[r]), or [0, seq_lens[r / next_n] - next_n + r % next_n + 1), cut to the columns
//     indices[r]         positions in it; 0, 1, ..., -1, -1, ... if it is not longer than topK
//
// 1. All of the row is asked for before anyone knows the segment: one latency instead of two.
// 2. The k-th largest is found by its digits, from the left, with a histogram each, until a bin is wanted as a whole.
// 3. Of what equals it, the first are taken. How many are taken before, by round and thread, says what goes where.
//
// Block r has row r. Round i of thread t is vector i * NUM_THREADS + t, so that the order is that of rounds, then of threads.
//
// Constants
//     DECODE        segments are given by seq_lens
//     ROUNDS        vectors of a thread: NUM_THREADS times as many hold the row
//     NUM_THREADS   threads in the block
//     MIN_BLOCKS    blocks a multiprocessor is to hold

#include "select.cuh"
#include "span.cuh"
#include "top_k.cuh"

constexpr int VEC_SIZE = 4;
constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE;
constexpr int STEP = NUM_THREADS * VEC_SIZE;  // elements of a round, of which 16 bits count
constexpr int PAIRS = ceil_div(ROUNDS, 2);    // of rounds, whose counts share a word
static_assert(STEP < 1 << 16);

// The row, and what its segment's first bound depends on.
DEVICE void prefetch_row(const uint32_t* row, int64_t columns, const int32_t* bound) {
    for (int i = threadIdx.x * 32; i < columns; i += NUM_THREADS * 32) prefetch_line(row + i);
    if (threadIdx.x == 0) prefetch_line(bound);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
top_k_short_row(int32_t* indices,          // [numRows, topK]
                const uint32_t* logits,    // [numRows, columns], bits of float
                const int32_t* rowStarts,  // [numRows]
                const int32_t* rowEnds,    // [numRows]
                const int32_t* seq_lens,   // [ceil(numRows / next_n)]
                int next_n, int64_t columns, int64_t stride0, int64_t topK) {
    prefetch_row(logits + blockIdx.x * stride0, columns, DECODE ? seq_lens + blockIdx.x / next_n : rowStarts + blockIdx.x);
    await_previous_kernel();
    __shared__ uint4 bins[2][MOST_BINS / 4];
    __shared__ uint32_t of_warps[NUM_WARPS];
    __shared__ uint32_t of_rounds[2][PAIRS][NUM_WARPS];
    __shared__ Found<uint32_t> found;

    const int thread = thread_of<NUM_THREADS>();
    const Span<uint32_t, VEC_SIZE> row(logits + blockIdx.x * stride0, int(columns));
    Vec<uint32_t, VEC_SIZE> keys[ROUNDS];
    row.load_batch<NUM_THREADS>(thread, 0, keys);
    keep_loads();
    const Segment segment = segment_of<DECODE>(rowStarts, rowEnds, seq_lens, next_n, columns);
    const auto clear = [&](uint4* first, int vectors) {
#pragma unroll
        for (int i = thread; i < vectors; i += NUM_THREADS) first[i] = {0, 0, 0, 0};
    };
    clear(bins[0], 2 * MOST_BINS / 4);
    const int length = segment.length;
    indices += blockIdx.x * topK;
    if (length <= topK) return take_all<NUM_THREADS>(indices, length, topK);
    __syncthreads();

    // What is not in the segment has the lowest key, 0, and is counted: it is never needed for topK, and never taken below.
    const int own = row.element(thread) - int(segment.begin);  // round 0's place in the segment
    const auto exists = [&](int round, int j) { return unsigned(own + round * STEP + j) < unsigned(length); };
    const bool whole = own >= 0 && own + (ROUNDS - 1) * STEP + VEC_SIZE <= length;
    const auto for_each = [&](auto f) {
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) f(keys[round].data[j], round, j);
        }
    };
    for_each([&](uint32_t& key, int, int) { key = ordered_bits(key); });
    if (!whole) for_each([&](uint32_t& key, int round, int j) { key = exists(round, j) ? key : 0; });

    // The k-th largest begins with the digits of `threshold`. Of the keys that do, `ties` are wanted, or all.
    uint32_t threshold = 0, ties = uint32_t(topK);
    bool all;
#pragma unroll
    for (int number = 0; number < 3; ++number) {
        const Digit digit(number);
        uint32_t* const counts = reinterpret_cast<uint32_t*>(bins[number % 2]);
        if (number == 1) clear(bins[0], MOST_BINS / 4);  // for the last
        for_each([&](uint32_t key, int, int) {
            if (digit.matches(key, threshold)) atomicAdd(&counts[digit.of(key)], 1u);
        });
        __syncthreads();
        const auto place = find_from_above<NUM_THREADS>(
            MOST_BINS, [&](int bin) { return counts[bin]; }, [&](uint32_t) { return ties; }, of_warps, &found);
        threshold |= place.bin << digit.shift;
        ties = place.wanted;
        all = place.held == ties;
        if (all) break;
    }

    // For each round, how many are chosen in order before the thread's.
    const auto count_before = [&](auto chosen, uint32_t (&partial)[PAIRS][NUM_WARPS], uint32_t (&before)[ROUNDS]) {
        uint32_t counts[PAIRS] = {}, sums[PAIRS];
        for_each([&](uint32_t key, int round, int j) {
            if (chosen(key, round, j)) counts[round / 2] += 1u << round % 2 * 16;
        });
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            sums[pair] = sum_to_lane(counts[pair]);
            if (thread % WARP_SIZE == WARP_SIZE - 1) partial[pair][thread / WARP_SIZE] = sums[pair];
        }
        __syncthreads();
        uint32_t rounds_before = 0;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            uint32_t all;
            const uint32_t here = sum_of_warps_before<NUM_THREADS>(partial[pair], all) + sums[pair] - counts[pair];
#pragma unroll
            for (int round = 2 * pair; round < min(2 * pair + 2, ROUNDS); ++round) {
                before[round] = rounds_before + (here >> round % 2 * 16 & 0xffff);
                rounds_before += all >> round % 2 * 16 & 0xffff;
            }
        }
    };
    uint32_t before[ROUNDS];
    if (!all) {
        // The first of equal keys become the largest, the others the smallest; those that are not there may be equal to 0.
        const auto equal = [&](uint32_t key, int round, int j) {
            return key == threshold && (key > 0 || exists(round, j));
        };
        count_before(equal, of_rounds[0], before);
        for_each([&](uint32_t& key, int round, int j) {
            if (equal(key, round, j)) key = before[round]++ < ties ? ~0u : 0;
        });
        threshold = min(threshold, ~1u) + 1;
    }
    // Through shared memory, so that what a warp writes lies together.
    int32_t* const staged = reinterpret_cast<int32_t*>(bins);
    count_before([&](uint32_t key, int, int) { return key >= threshold; }, of_rounds[1], before);
    int32_t* to[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) to[round] = staged + before[round];
    for_each([&](uint32_t key, int round, int j) {
        if (key >= threshold) *to[round]++ = own + round * STEP + j;
    });
    __syncthreads();
#pragma unroll 4
    for (int i = thread; i < int(topK); i += NUM_THREADS) indices[i] = staged[i];
}
