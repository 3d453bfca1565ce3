// top_k_per_row: positions of the topK largest elements of each row's segment, from left to right; of equal ones the
// first.
//
//     segment of row r   [rowStarts[r], rowEnds[r]), if DECODE [0, seq_lens[r / next_n] - next_n + r % next_n + 1),
//                        cut to the columns
//     indices[r]         positions in the segment; 0, 1, ..., -1, -1, ... if it is not longer than topK
//
// A block has a segment; in a cluster, each block has a piece of the segment, and the blocks add up their histograms.
//
// 1. Candidates go to shared memory as keys: the whole piece if it fits, else the elements above a threshold estimated
//    from a sample. If these turn out to be fewer than topK, or more than fit, the steps below read the piece from
//    memory again.
// 2. Radix select: the k-th largest key is found digit by digit, 11, 11 and 10 bits from the left, with a histogram for
//    each. The search ends early if all keys that begin with the digits found are taken.
// 3. Compaction: one bit per index says that its element is above the threshold, another that it is equal. A prefix
//    count of the bits gives each taken element its slot in indices. Blocks of a cluster first add the counts of
//    lower-ranked blocks.
//
// `index` in the code counts the elements of the piece from its first aligned vector: index = piece.head + element.
// Shared memory holds a whole piece in index order; otherwise candidate i of thread t, with its index, is at
// i * NUM_THREADS + t.
//
// Constants:
//     DECODE        true: seq_lens gives the segments; false: rowStarts and rowEnds
//     CLUSTER       blocks that share a row, one cluster
//     VEC_SIZE      elements in one memory access: 4, or 1 where stride1 is not 1

#include "cluster.cuh"
#include "reduce.cuh"
#include "radix_select.cuh"
#include "unaligned_row.cuh"
#include "top_k.cuh"

using vec_t = Vec<uint32_t, VEC_SIZE>;
constexpr int SAMPLES = CLUSTER * NUM_THREADS * VEC_SIZE;  // one vector of each thread
constexpr uint32_t ABSENT = ~0u;                           // an element beyond the piece; its key is 0, the smallest
constexpr int TILE = 32 * NUM_THREADS;                     // elements compacted together, at most 32 per thread
static_assert(TILE <= 1 << 15);                            // two counts share a word in step 3

DEVICE vec_t keys_of(vec_t vec) {
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) vec.data[j] = ordered_bits(vec.data[j]);
    return vec;
}

// Prefetches the row's first elements before the segment is known. Only where a block has a whole row of stride 1.
DEVICE void prefetch_row(const uint32_t* row, int64_t columns) {
    constexpr int LINE = 32, MAX_ELEMENTS = 8192;
    for (int i = threadIdx.x * LINE; CLUSTER == 1 && VEC_SIZE > 1 && i < min(columns, int64_t(MAX_ELEMENTS));
         i += NUM_THREADS * LINE) {
        prefetch_line(row + i);
    }
}

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, 1)
top_k_per_row(int32_t* indices,          // [numRows, topK]
              const uint32_t* logits,    // [numRows, columns], bits of float
              const int32_t* rowStarts,  // [numRows]
              const int32_t* rowEnds,    // [numRows]
              const int32_t* seq_lens,   // [ceil(numRows / next_n)]
              int next_n, int64_t columns, int64_t stride0, int64_t stride1, int64_t topK,
              int64_t capacity) {  // candidates per thread; shared memory holds one more, 8 bytes each
    prefetch_row(logits + blockIdx.x * stride0, columns);
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ uint32_t bins[2][MAX_BINS];  // histograms of this digit and of the next
    __shared__ uint32_t groups[CLUSTER > 1 ? 2 : 1][MAX_BINS / GROUP_BINS];
    __shared__ uint32_t larger[NUM_THREADS];
    __shared__ uint32_t equal[NUM_THREADS];
    __shared__ uint32_t partial[2][NUM_THREADS / WARP_SIZE];
    __shared__ Found<uint32_t> found;
    __shared__ uint32_t totals[4];  // candidates; whether they are too many; elements above and equal to threshold
    const int64_t row = blockIdx.x;

    const Segment segment = segment_of<DECODE>(rowStarts, rowEnds, seq_lens, next_n, columns);
    const int length = segment.length;
    for (int i = threadIdx.x; i < MAX_BINS; i += NUM_THREADS) bins[0][i] = bins[1][i] = 0;
    if (threadIdx.x < 4) totals[threadIdx.x] = 0;
    indices += row * topK;
    if (length <= topK) {
        if (blockIdx.y == 0) take_all<NUM_THREADS>(indices, length, topK);
        return;
    }

    // The block's piece of the segment.
    const int piece_size = ceil_div(length, CLUSTER), from = min(int(blockIdx.y) * piece_size, length);
    const Span<uint32_t, VEC_SIZE> piece(logits + row * stride0 + (segment.begin + from) * stride1,
                                         min(piece_size, length - from), stride1);
    const int vectors = piece.vectors(), num_indices = vectors * VEC_SIZE;

    // The bin of `digit` that holds the wanted-th largest key, among the cluster's keys that begin with `prefix`.
    // visit(f) calls f(key, index) for every key of the block.
    int turn = 0;  // which of the two histograms is in use
    const auto find = [&](const Digit digit, uint32_t prefix, uint32_t wanted, auto visit) {
        uint32_t* const own = bins[turn];
        uint32_t* const next = bins[turn ^ 1];
        visit([&](uint32_t key, int) {
            if (digit.matches(key, prefix)) atomicAdd(&own[digit.of(key)], 1u);
        });
        __syncthreads();
        if constexpr (CLUSTER == 1) {
            turn ^= 1;
            for (int i = threadIdx.x; i < MAX_BINS; i += NUM_THREADS) next[i] = 0;
            return find_from_above<NUM_THREADS>(
                digit.bins, [&](int bin) { return own[bin]; }, [&](uint32_t) { return wanted; }, partial[0], &found);
        } else {
            uint32_t* const sums = groups[turn];
            turn ^= 1;
            for (int group = threadIdx.x / 32; group < digit.bins / GROUP_BINS; group += NUM_THREADS / 32) {
                const uint32_t sum = lane_reduce<Sum, 32>(own[group * GROUP_BINS + threadIdx.x % 32]);
                if (threadIdx.x % 32 == 0) sums[group] = sum;
            }
            sync_cluster<CLUSTER>();  // all totals are written, and no block still reads the last digit's histogram
            for (int i = threadIdx.x - WARP_SIZE; i >= 0 && i < MAX_BINS; i += NUM_THREADS - WARP_SIZE) next[i] = 0;
            const auto sum_over_cluster = [&](const uint32_t* word) {
                uint32_t sum = 0;
#pragma unroll
                for (int rank = 0; rank < CLUSTER; ++rank) sum += load_of_block<CLUSTER>(word, rank);
                return sum;
            };
            return find_in_groups(
                digit.bins, [&](int group) { return sum_over_cluster(sums + group); },
                [&](int bin) { return sum_over_cluster(own + bin); }, wanted, &found);
        }
    };

    // Rank of the threshold in the sample: its expected rank, topK * SAMPLES / length, and a margin, so that fewer than
    // topK elements reach the threshold only in rare cases.
    const float wanted = float(topK) * SAMPLES / float(length) * 1.25f + 16.0f;
    const bool fits = ceil_div(num_indices, NUM_THREADS) <= 2 * capacity;
    const bool holds_piece = fits && (wanted > SAMPLES / 8 || piece_size <= 4 * NUM_THREADS * VEC_SIZE);
    uint32_t* const keys = reinterpret_cast<uint32_t*>(memory);
    int* const candidate_indices = reinterpret_cast<int*>(keys + (capacity + 1) * NUM_THREADS);  // unless holds_piece
    int num_candidates = 0;
    uint32_t min_key = 0;  // smallest key of a candidate; 0 if the block collects none
    if (!holds_piece && wanted <= SAMPLES / 2) {
        const vec_t sample = piece.load(int(int64_t(threadIdx.x) * vectors / NUM_THREADS), ABSENT);
        __syncthreads();
        const auto visit_sample = [&](auto f) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) f(ordered_bits(sample.data[j]), 0);
        };
        const uint32_t bin = find(Digit(0), 0, uint32_t(wanted), visit_sample).bin;
        min_key = max(bin << Digit(0).shift, 1u);  // at least 1, so that ABSENT is no candidate
    }
    if (holds_piece || min_key > 0) {
        piece.template for_each<NUM_THREADS, 4>(ABSENT, [&](const vec_t& vec, int first) {
            const vec_t vec_keys = keys_of(vec);
            const int index = first + piece.head;
            if (holds_piece) {
                *reinterpret_cast<vec_t*>(keys + index) = vec_keys;
                return;
            }
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                // Every element is stored, without a branch; the next one overwrites it unless it is a candidate.
                const int slot = min(num_candidates, int(capacity)) * NUM_THREADS + threadIdx.x;
                keys[slot] = vec_keys.data[j];
                candidate_indices[slot] = index + j;
                num_candidates += vec_keys.data[j] >= min_key;
            }
        });
    }
    bool use_candidates = min_key > 0;  // false if some block has too many, or the cluster too few
    if (use_candidates) {
        if (num_candidates > capacity) atomicOr(&totals[1], 1u);
        const uint32_t count = lane_reduce<Sum, WARP_SIZE>(uint32_t(num_candidates));
        if (threadIdx.x % WARP_SIZE == 0) atomicAdd(&totals[0], count);
        sync_cluster<CLUSTER>();
        int64_t all = 0;
        for (int rank = 0; rank < CLUSTER; ++rank) {
            all += load_of_block<CLUSTER>(totals, rank);
            use_candidates = use_candidates && !load_of_block<CLUSTER>(totals + 1, rank);
        }
        use_candidates = use_candidates && all >= topK;
    } else {
        __syncthreads();
    }

    // f(key, index) for every candidate of the thread, or for every element of its vectors, with key 0 beyond the
    // piece.
    const auto for_each = [&](auto f) {
        const auto of_vector = [&](const vec_t& vec, int index) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) f(vec.data[j], index + j);
        };
        if (holds_piece) {
#pragma unroll 1
            for (int i = threadIdx.x; i < vectors; i += NUM_THREADS) {
                of_vector(*reinterpret_cast<const vec_t*>(keys + i * VEC_SIZE), i * VEC_SIZE);
            }
        } else if (use_candidates) {
#pragma unroll 1
            for (int i = 0; i < num_candidates; ++i) {
                f(keys[i * NUM_THREADS + threadIdx.x], candidate_indices[i * NUM_THREADS + threadIdx.x]);
            }
        } else {
#pragma unroll 1
            for (int i = threadIdx.x; i < vectors; i += NUM_THREADS) {
                of_vector(keys_of(piece.load(i, ABSENT)), i * VEC_SIZE);
            }
        }
    };
    // Result: all keys above `threshold` are taken, and of the keys equal to it the first `ties`.
    uint32_t threshold = 0, ties = uint32_t(topK);
#pragma unroll 1
    for (int number = 0; number < 3; ++number) {
        const Digit digit(number);
        const auto found = find(digit, threshold, ties, for_each);
        threshold |= found.bin << digit.shift;
        ties = found.wanted;
        if (found.held == found.wanted && threshold > 0) {
            threshold -= 1;  // every key that begins with the digits found is above this, and taken
            ties = 0;
            break;
        }
    }

    uint32_t larger_before = 0, equal_before = 0;  // counts in the pieces and tiles before
    if constexpr (CLUSTER > 1) {
        uint32_t above = 0, same = 0;
        for_each([&](uint32_t key, int index) {
            above += key > threshold;
            same += key == threshold && piece.exists(index - piece.head);
        });
        above = lane_reduce<Sum, WARP_SIZE>(above);
        same = lane_reduce<Sum, WARP_SIZE>(same);
        if (threadIdx.x % WARP_SIZE == 0) {
            atomicAdd(&totals[2], above);
            atomicAdd(&totals[3], same);
        }
        sync_cluster<CLUSTER>();
        for (unsigned rank = 0; rank < blockIdx.y; ++rank) {
            larger_before += load_of_block<CLUSTER>(totals + 2, rank);
            equal_before += load_of_block<CLUSTER>(totals + 3, rank);
        }
    }

    turn = 0;
#pragma unroll 1
    for (int tile = 0; tile < num_indices; tile += TILE) {
        // Elements per thread: the smallest of 8, 16 and 32 that covers the tile.
        const int tile_indices = min(num_indices - tile, TILE);
        const int bits = tile_indices <= 8 * NUM_THREADS ? 8 : tile_indices <= 16 * NUM_THREADS ? 16 : 32;
        const int first = int(threadIdx.x) * bits;
        uint32_t own_larger = 0, own_equal = 0;
        if (holds_piece) {
            for (int i = 0; i < bits && first + i < tile_indices; i += VEC_SIZE) {
                const int index = tile + first + i;
                const vec_t vec = *reinterpret_cast<const vec_t*>(keys + index);
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) {
                    own_larger |= uint32_t(vec.data[j] > threshold) << (i + j);
                    own_equal |= uint32_t(vec.data[j] == threshold && piece.exists(index + j - piece.head)) << (i + j);
                }
            }
        } else {
            larger[threadIdx.x] = equal[threadIdx.x] = 0;
            __syncthreads();
            for_each([&](uint32_t key, int index) {
                const unsigned bit = index - tile;
                if (bit >= TILE || key < threshold || !piece.exists(index - piece.head)) return;
                atomicOr((key > threshold ? larger : equal) + bit / 32, 1u << bit % 32);
            });
            __syncthreads();
            own_larger = larger[first / 32] >> first % 32 & ~0u >> (32 - bits);
            own_equal = equal[first / 32] >> first % 32 & ~0u >> (32 - bits);
            __syncthreads();
        }
        uint32_t all;
        const uint32_t held = sum_before<NUM_THREADS>(uint32_t(count_bits(own_larger) | count_bits(own_equal) << 16),
                                                      partial[turn ^= 1], all);
        uint32_t seen = equal_before + (held >> 16), slot = larger_before + (held & 0xffff) + min(seen, ties);
        for (uint32_t rest = own_larger | own_equal; rest; rest &= rest - 1) {
            const int bit = lowest_bit(rest);
            if (own_equal >> bit & 1 && seen++ >= ties) continue;
            indices[slot++] = from + tile + first + bit - piece.head;
        }
        larger_before += all & 0xffff;
        equal_before += all >> 16;
    }
    if constexpr (CLUSTER > 1) sync_cluster<CLUSTER>();  // other blocks may still read this block's totals
}
