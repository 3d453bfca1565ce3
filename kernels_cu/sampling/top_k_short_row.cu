// top_k_short_row: top_k_per_row for rows that fit in the registers of one block: positions of the topK largest
// elements of each row's segment, from left to right; of equal ones the first.
//
//     segment of row r   [rowStarts[r], rowEnds[r]), if DECODE [0, seq_lens[r / next_n] - next_n + r % next_n + 1),
//                        cut to the columns
//     indices[r]         positions in the segment; 0, 1, ..., -1, -1, ... if it is not longer than topK
//
// Block r has row r. Round i of thread t is vector i * NUM_THREADS + t, so the order of elements is by round, then by
// thread.
//
// 1. Load the whole row before the segment is known: one memory latency instead of two.
// 2. Radix select: the k-th largest key is found digit by digit, from the left, with a histogram for each. The search
//    ends early if all keys that begin with the digits found are taken.
// 3. Compaction: of the keys equal to the k-th largest, the first are taken. The number of elements taken before each
//    round and thread gives every taken element its slot.
//
// Constants:
//     DECODE        true: seq_lens gives the segments; false: rowStarts and rowEnds
//     ROUNDS        vectors per thread: ROUNDS * NUM_THREADS vectors hold the row

#include "radix_select.cuh"
#include "unaligned_row.cuh"
#include "top_k.cuh"

constexpr int VEC_SIZE = 4;
constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE;
constexpr int ROUND_SIZE = NUM_THREADS * VEC_SIZE;  // elements of a round
constexpr int PAIRS = ceil_div(ROUNDS, 2);          // the counts of two rounds share a word, 16 bits each
static_assert(ROUND_SIZE < 1 << 16);

// Prefetches the row and the first value that determines its segment.
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
    prefetch_row(logits + blockIdx.x * stride0, columns,
                 DECODE ? seq_lens + blockIdx.x / next_n : rowStarts + blockIdx.x);
    await_previous_kernel();
    __shared__ uint4 bins[2][MAX_BINS / 4];
    __shared__ uint32_t warp_counts[NUM_WARPS];
    __shared__ uint32_t round_counts[2][PAIRS][NUM_WARPS];
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
    clear(bins[0], 2 * MAX_BINS / 4);
    const int length = segment.length;
    indices += blockIdx.x * topK;
    if (length <= topK) return take_all<NUM_THREADS>(indices, length, topK);
    __syncthreads();

    // Elements outside the segment get the smallest key, 0. The histograms count them, but topK is reached before them.
    const int own_position = row.element(thread) - int(segment.begin);  // position of the thread's first element
    const auto exists = [&](int round, int j) {
        return unsigned(own_position + round * ROUND_SIZE + j) < unsigned(length);
    };
    const bool in_segment = own_position >= 0 && own_position + (ROUNDS - 1) * ROUND_SIZE + VEC_SIZE <= length;
    const auto for_each = [&](auto f) {
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) f(keys[round].data[j], round, j);
        }
    };
    for_each([&](uint32_t& key, int, int) { key = ordered_bits(key); });
    if (!in_segment) for_each([&](uint32_t& key, int round, int j) { key = exists(round, j) ? key : 0; });

    // The k-th largest key begins with the digits in `threshold`; `ties` of the keys that begin with them are taken.
    uint32_t threshold = 0, ties = uint32_t(topK);
    bool takes_all;  // whether every key that begins with these digits is taken
#pragma unroll
    for (int number = 0; number < 3; ++number) {
        const Digit digit(number);
        uint32_t* const counts = reinterpret_cast<uint32_t*>(bins[number % 2]);
        if (number == 1) clear(bins[0], MAX_BINS / 4);  // for digit 2
        for_each([&](uint32_t key, int, int) {
            if (digit.matches(key, threshold)) atomicAdd(&counts[digit.of(key)], 1u);
        });
        __syncthreads();
        const auto found_bin = find_from_above<NUM_THREADS>(
            MAX_BINS, [&](int bin) { return counts[bin]; }, [&](uint32_t) { return ties; }, warp_counts, &found);
        threshold |= found_bin.bin << digit.shift;
        ties = found_bin.wanted;
        takes_all = found_bin.held == ties;
        if (takes_all) break;
    }

    // before[round] = the number of taken elements before the thread's first one in that round.
    const auto count_before = [&](auto is_taken, uint32_t (&partial)[PAIRS][NUM_WARPS], uint32_t (&before)[ROUNDS]) {
        uint32_t counts[PAIRS] = {}, sums[PAIRS];
        for_each([&](uint32_t key, int round, int j) {
            if (is_taken(key, round, j)) counts[round / 2] += 1u << round % 2 * 16;
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
            uint32_t total;
            const uint32_t pair_before =
                sum_of_warps_before<NUM_THREADS>(partial[pair], total) + sums[pair] - counts[pair];
#pragma unroll
            for (int round = 2 * pair; round < min(2 * pair + 2, ROUNDS); ++round) {
                before[round] = rounds_before + (pair_before >> round % 2 * 16 & 0xffff);
                rounds_before += total >> round % 2 * 16 & 0xffff;
            }
        }
    };
    uint32_t before[ROUNDS];
    if (!takes_all) {
        // The first `ties` of the equal keys become the largest key, the others 0, so that one comparison decides
        // below. Keys outside the segment are 0, too: if the threshold is 0, exists() leaves them out.
        const auto equal = [&](uint32_t key, int round, int j) {
            return key == threshold && (key > 0 || exists(round, j));
        };
        count_before(equal, round_counts[0], before);
        for_each([&](uint32_t& key, int round, int j) {
            if (equal(key, round, j)) key = before[round]++ < ties ? ~0u : 0;
        });
        threshold = min(threshold, ~1u) + 1;
    }
    // Positions are gathered in shared memory, so that a warp's stores to indices are contiguous.
    int32_t* const staging = reinterpret_cast<int32_t*>(bins);
    count_before([&](uint32_t key, int, int) { return key >= threshold; }, round_counts[1], before);
    int32_t* slots[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) slots[round] = staging + before[round];
    for_each([&](uint32_t key, int round, int j) {
        if (key >= threshold) *slots[round]++ = own_position + round * ROUND_SIZE + j;
    });
    __syncthreads();
#pragma unroll 4
    for (int i = thread; i < int(topK); i += NUM_THREADS) indices[i] = staging[i];
}
