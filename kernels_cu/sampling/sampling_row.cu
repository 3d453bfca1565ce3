// sampling_row: draws a token of each row and reads the logits from memory once: a cluster of blocks keeps the row in
// shared memory, one piece per block.
//
//     samples[row] = the first t with sum_{i <= t} w_i > floor(r * sum w / 2^64)   r = philox(seeds[row], offsets[row])
//
// w: weights of the tokens, 0 for a token that a filter removes. r = 0 if the temperature asks for the likeliest token.
// samples[row] = -1 if all weights are 0. The filters:
//
//     top-k   keeps the top_k[row] largest logits, and logits that equal the smallest of them
//     top-p   keeps, of these, the largest whose weights add up to top_p[row] of the sum, and logits that equal the
//             smallest of them
//
// 1. Load: each block copies its piece to shared memory. Every thread computes its maximum; the cluster shares the
//    smallest and the largest of these maxima.
// 2. top-k: the k-th largest of the threads' maxima is a lower bound of the k-th largest logit. Logits from the bound
//    on are counted by key.
// 3. top-p: without top-k, a first pass adds the weights of all logits to coarse bins, with a counter per lane so that
//    the lanes of a warp never add to the same one. Then the weights of the logits in the bin that reaches top_p (or,
//    with top-k, of the logits that top-k keeps) are added up by key.
// 4. Draw: each block shares the total weight it keeps. The random number selects a block, which finds the token.
//
// Keys are floats mapped to integers of the same order. Steps 2 and 3 search for a threshold key in a range of keys.
// One refinement splits the range into BINS bins of equal width, finds the bin that holds the threshold, and makes that
// bin the new range; the search ends when the range has one key, or when all of the bin is kept. Each thread has one
// bit per logit that marks it as a candidate. All reductions are over integers, so that their order does not matter.
//
// Thread mapping: block (row, rank) has piece `rank` of a row, thread t the vectors i * NUM_THREADS + t of the piece.
// Logits beyond the piece are -inf.
//
// Constants:
//     IN_SHARED     whether blocks keep their pieces in shared memory; else every pass reads them from memory, mostly L2
//     HAS_OFFSETS, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P, HAS_TEMPERATURE   false when that argument is null
//     CLUSTER       blocks that share a row, one cluster
//     VECTORS       vectors of four logits per thread
//     BATCH         vectors of a thread in flight unless IN_SHARED: a divisor of VECTORS
//     BITS          log2 of BINS

#include "async.cuh"
#include "cluster.cuh"
#include "philox.cuh"
#include "probability.cuh"

constexpr int VEC = 4, ELEMENTS = VECTORS * VEC, WORDS = ceil_div(ELEMENTS, 32), WORD_VECS = 32 / VEC;
constexpr int BINS = 1 << BITS;
constexpr int COARSE_BINS = 2 * BINS / GROUP_BINS;  // coarse bins; their counters use the memory of two refinements
constexpr uint32_t MIN_KEY = 0x00800000u;           // key of -FLOAT_MAX, the smallest that can be drawn
constexpr int LOW_BITS = 20;                        // bits in the low part of a weight (struct PartsOf)
using weights_t = Weights<HAS_TEMPERATURE, HAS_MIN_P, LOW_BITS>;
using parts_t = PartsOf<LOW_BITS>;
// Two totals fit in 32 bits: a block's high parts, each up to 2^15, and the low parts of a coarse counter, below 2^20.
static_assert(ELEMENTS * NUM_THREADS < 1 << 17);
static_assert(IN_SHARED || VECTORS % BATCH == 0);

// Range of keys that holds the threshold key. `wanted`: count or weight to reach within the range, from its largest key
// down; 0 until the sum over the range is known.
struct KeyRange {
    uint32_t low, high;
    uint64_t wanted = 0;
    bool is_found = false;
    DEVICE bool holds(uint32_t key) const { return key - low <= high - low; }
};

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
sampling_row(int32_t* samples,          // [num_rows]
             const scalar_t* logits,    // [num_rows, vocab_size]
             const int64_t* seeds,      // [num_rows]
             const int64_t* offsets,    // [num_rows]
             const int32_t* top_k,      // [num_rows]
             const float* top_p,        // [num_rows]
             const float* min_p,        // [num_rows]
             const float* temperature,  // [num_rows]
             int64_t vocab_size, int64_t logits_stride, int64_t piece_size) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];            // [VECTORS, NUM_THREADS] if IN_SHARED
    __shared__ uint32_t bins[4 * BINS];          // low and high parts of one refinement, then of the next
    __shared__ uint64_t groups[2][COARSE_BINS];  // each the total of GROUP_BINS bins
    __shared__ uint64_t partial[2][NUM_THREADS / WARP_SIZE];
    __shared__ Found<uint64_t> found;
    __shared__ uint32_t extremes[2];  // smallest and largest of the block's thread_max_key
    __shared__ uint64_t sum_of_block;
    using vec_t = Vec<scalar_t, VEC>;
    vec_t* const vectors = reinterpret_cast<vec_t*>(memory) + threadIdx.x;
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t row = blockIdx.x, first = min(int64_t(blockIdx.y) * piece_size, vocab_size);
    const Span<scalar_t, VEC> piece(logits + row * logits_stride + first, int(min(piece_size, vocab_size - first)));

    const scalar_t absent = from_float<scalar_t>(minus_infinity());
    if constexpr (IN_SHARED) {
#pragma unroll 1
        for (int i = 0; i < VECTORS; ++i) {
            const int number = i * NUM_THREADS + int(threadIdx.x);
            if (piece.is_whole(number)) {
                cp_async<int(sizeof(vec_t))>(vectors + i * NUM_THREADS, piece.base + number * VEC);
            } else {
                vectors[i * NUM_THREADS] = piece.load(number, absent);
            }
        }
        cp_async_commit();
    }
    for (int i = threadIdx.x; i < 4 * BINS; i += NUM_THREADS) bins[i] = 0;
    if (threadIdx.x < 2) extremes[threadIdx.x] = threadIdx.x ? 0 : ~0u;
    __syncthreads();
    if constexpr (IN_SHARED) cp_async_wait<0>();

    // f(x, word, bit) for every vector of the thread: x its logits, `bit` of candidates[word] the bit of the first one.
    const auto for_each = [&](auto f) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const int end = min(WORD_VECS, VECTORS - w * WORD_VECS);
            const auto visit = [&](const vec_t& vec, int i) {
                float x[VEC];
                vec.to_floats(x);
#pragma unroll
                for (int j = 0; j < VEC; ++j) x[j] = clean(x[j]);
                f(x, w, i * VEC);
            };
            if constexpr (IN_SHARED) {
#pragma unroll 2
                for (int i = 0; i < end; ++i) visit(vectors[(w * WORD_VECS + i) * NUM_THREADS], i);
            } else {
#pragma unroll 1
                for (int i = 0; i < end; i += BATCH) {
                    vec_t batch[BATCH];
                    const int first = (w * WORD_VECS + i) * NUM_THREADS + int(threadIdx.x);
                    piece.template load_batch<NUM_THREADS>(first, absent, batch);
#pragma unroll
                    for (int b = 0; b < BATCH; ++b) visit(batch[b], i + b);
                }
            }
        }
    };
    float largest = minus_infinity();
    for_each([&](const auto& x, int, int) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) largest = ieee_max(largest, x[j]);
    });
    const uint32_t thread_max_key = key_of(largest);
    {
        // A thread with only -inf logits is left out of the minimum.
        const uint32_t low = lane_reduce<Min, WARP_SIZE>(thread_max_key >= MIN_KEY ? thread_max_key : ~0u);
        const uint32_t high = lane_reduce<Max, WARP_SIZE>(thread_max_key);
        if (lane == 0) {
            atomicMin(extremes, low);
            atomicMax(extremes + 1, high);
        }
    }
    sync_cluster<CLUSTER>();
    // The smallest and the largest of the threads' largest keys.
    const uint32_t min_thread_key = lane_reduce<Min, WARP_SIZE>(load_of_block<CLUSTER>(extremes, lane % CLUSTER));
    const uint32_t max_key = lane_reduce<Max, WARP_SIZE>(load_of_block<CLUSTER>(extremes + 1, lane % CLUSTER));
    if (max_key < MIN_KEY) {
        if (blockIdx.y == 0 && threadIdx.x == 0) samples[row] = -1;
        sync_cluster<CLUSTER>();
        return;
    }
    const weights_t weights(number_of(max_key), temperature, min_p, row);

    uint32_t candidates[WORDS];  // one bit per logit of the thread: set while the logit is a candidate
    // f(logit, key) for every candidate in `range`. Candidates outside the range are dropped; with keeps_above, those
    // above the range stay.
    const auto for_each_candidate = [&](const KeyRange& range, bool keeps_above, auto f) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
#pragma unroll 1
            for (uint32_t rest = candidates[w]; rest; rest &= rest - 1) {
                const int bit = lowest_bit(rest);
                const int i = (w * WORD_VECS + bit / VEC) * NUM_THREADS;
                const scalar_t* const vec = IN_SHARED ? vectors[i].data : piece.base + (i + int(threadIdx.x)) * VEC;
                const float x = clean(to_float(vec[bit % VEC]));
                if (range.holds(key_of(x))) {
                    f(x, key_of(x));
                } else if (!keeps_above || key_of(x) < range.low) {
                    candidates[w] &= ~(rest & -rest);
                }
            }
        }
    };
    const auto select_candidates = [&](const KeyRange& range) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) candidates[w] = 0;
        for_each([&](const auto& x, int w, int bit) {
            uint32_t bits = 0;
#pragma unroll
            for (int j = 0; j < VEC; ++j) bits |= uint32_t(range.holds(key_of(x[j]))) << j;
            candidates[w] |= bits << bit;
        });
    };

    // Each thread's share of the weight of the block's tokens with keys above the range; once the threshold is found,
    // with keys from the threshold on.
    uint64_t kept_weight = 0;
    int turn = 0;  // which half of `bins` and `groups` is in use
    // Sets `found` to the group (with in_group: the bin) where the cluster's running total, from the largest key down,
    // reaches range.wanted, or wanted_of(grand total) while range.wanted is 0.
    const auto find = [&](const uint32_t* low, const uint32_t* high, int num_groups, bool in_group,
                          const KeyRange& range, auto wanted_of) {
        uint64_t* const sums = groups[turn];
        __syncthreads();
        for (int group = threadIdx.x / GROUP_BINS; group < num_groups; group += NUM_THREADS / GROUP_BINS) {
            const int bin = group * GROUP_BINS + int(threadIdx.x) % GROUP_BINS;
            const uint64_t sum = lane_reduce<Sum, GROUP_BINS>(parts_t{low[bin], high[bin]}.whole());
            if (threadIdx.x % GROUP_BINS == 0) sums[group] = sum;
        }
        sync_cluster<CLUSTER>();  // all totals are written, and no block still reads the bins of the last refinement
        if (threadIdx.x < WARP_SIZE) {
            const auto load_group = [&](int group) {
                uint64_t sum = 0;
#pragma unroll
                for (int rank = 0; rank < CLUSTER; ++rank) sum += load_of_block<CLUSTER>(sums + group, rank);
                return sum;
            };
            auto place = find_by_lanes<COARSE_BINS / GROUP_BINS>(
                num_groups, load_group, [&](uint64_t all) { return range.wanted ? range.wanted : wanted_of(all); });
            if (in_group) {
                const uint64_t wanted = place.wanted;
                const int begin = int(place.bin) * GROUP_BINS;
                place = find_by_lanes<1>(
                    GROUP_BINS,
                    [&](int bin) {
                        parts_t sum;
                        uint64_t all = 0;
#pragma unroll
                        for (int rank = 0; rank < CLUSTER; ++rank) {
                            sum.low = load_of_block<CLUSTER>(low + begin + bin, rank);
                            sum.high = load_of_block<CLUSTER>(high + begin + bin, rank);
                            all += sum.whole();
                        }
                        return all;
                    },
                    [&](uint64_t) { return wanted; });
                place.bin += begin;
            }
            if (lane == 0) found = place;
        } else {
            // Clears the bins of the next refinement: the other half of `bins`, or all of it after the coarse pass,
            // because only the group totals are still read.
            for (int i = threadIdx.x - WARP_SIZE; i < (in_group ? 2 : 4) * BINS; i += NUM_THREADS - WARP_SIZE) {
                bins[in_group ? (turn ^ 1) * 2 * BINS + i : i] = 0;
            }
        }
        __syncthreads();
        turn ^= 1;
    };

    // Narrows `range` to one of its bins; returns whether one was found. visit(f) calls f(key, weight) for each key.
    const auto refine = [&](KeyRange& range, auto wanted_of, auto visit) {
        const int shift = max(used_bits(range.high - range.low) - BITS, 0);
        uint32_t* const low = bins + turn * 2 * BINS;
        uint32_t* const high = low + BINS;
        visit([&](uint32_t key, parts_t weight) {
            const uint32_t bin = (key - range.low) >> shift;
            // A low part that overflows carries into the high part.
            if (weight.low && atomicAdd(low + bin, weight.low) > ~weight.low) {
                atomicAdd(high + bin, 1u << (32 - LOW_BITS));
            }
            if (weight.high) atomicAdd(high + bin, weight.high);
        });
        find(low, high, BINS / GROUP_BINS, true, range, wanted_of);
        const uint32_t bin_index = found.bin;
        range.is_found = found.held == found.wanted || shift == 0;
        for (int i = threadIdx.x; i < BINS; i += NUM_THREADS) {
            if (i >= int(bin_index + !range.is_found)) kept_weight += parts_t{low[i], high[i]}.whole();
        }
        range.low += bin_index << shift;
        range.high = min(range.high, range.low + ((1u << shift) - 1));
        range.wanted = found.wanted;
        return found.held > 0;
    };

    uint32_t threshold = MIN_KEY;
    const int k = HAS_TOP_K ? top_k[row] : 0;
    const bool has_top_k = HAS_TOP_K && k > 0 && k < vocab_size, has_top_p = HAS_TOP_P && top_p[row] < 1.0f;
    if (has_top_k) {
        const auto wanted_of = [&](uint64_t all) { return min(uint64_t(k), all); };
        KeyRange range{min_thread_key, max_key};
        const auto wanted_of_maxima = [&](uint64_t all) { return uint64_t(k) <= all ? uint64_t(k) : uint64_t(0); };
        const auto visit_maximum = [&](auto f) {
            if (thread_max_key >= MIN_KEY) f(thread_max_key, parts_t{1, 0});
        };
        const bool is_bound = k <= CLUSTER * NUM_THREADS && refine(range, wanted_of_maxima, visit_maximum);
        range = {is_bound ? range.low : MIN_KEY, max_key};
        select_candidates(range);
        while (!range.is_found) {
            refine(range, wanted_of, [&](auto f) {
                for_each_candidate(range, true, [&](float, uint32_t key) { f(key, parts_t{1, 0}); });
            });
        }
        threshold = range.low;
    }
    kept_weight = 0;
    if (has_top_p) {
        const auto wanted_of = [&](uint64_t all) {
            const double share = top_p[row] > 0.0f ? ceil(double(top_p[row]) * double(all)) : 0.0;
            return share < 1.0 ? uint64_t(1) : min(uint64_t(share), all);
        };
        KeyRange range{threshold, max_key};
        if (!has_top_k) {
            const Coarse<COARSE_BINS> coarse(weights, number_of(min_thread_key));
            for_each([&](const auto& x, int, int) {
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    const parts_t weight = weights.of(x[j]);
                    uint32_t* const counter = bins + (coarse.bin(x[j]) * GROUP_BINS + threadIdx.x % GROUP_BINS);
                    if (weight.low) atomicAdd(counter, weight.low);
                    if (weight.high) atomicAdd(counter + 2 * BINS, weight.high);
                }
            });
            find(bins, bins + 2 * BINS, COARSE_BINS, false, range, wanted_of);
            const uint32_t bin_index = found.bin;
            if (threadIdx.x < COARSE_BINS && threadIdx.x > bin_index) kept_weight = groups[turn ^ 1][threadIdx.x];
            if (bin_index > 0) range.low = key_of(coarse.begin(bin_index));
            range.high = min(max_key, key_of(coarse.begin(bin_index + 1)) - 1);
            range.wanted = found.wanted;
            select_candidates(range);
        }
        while (!range.is_found) {
            refine(range, wanted_of, [&](auto f) {
                for_each_candidate(range, false, [&](float x, uint32_t key) { f(key, weights.of(x)); });
            });
        }
        threshold = range.low;
    } else if (has_top_k) {
        for_each_candidate({threshold, max_key}, false,
                           [&](float x, uint32_t) { kept_weight += weights.of(x).whole(); });
    } else {
        parts_t sum;
        for_each([&](const auto& x, int, int) {
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                const parts_t weight = weights.of(x[j]);
                sum.low += weight.low;
                sum.high += weight.high;
            }
        });
        kept_weight = sum.whole();
    }

    uint64_t own;
    sum_before<NUM_THREADS>(kept_weight, partial[0], own);
    if (threadIdx.x == 0) sum_of_block = own;
    sync_cluster<CLUSTER>();
    const uint64_t up_to = sum_to_lane(lane < CLUSTER ? load_of_block<CLUSTER>(&sum_of_block, lane) : 0);
    sync_cluster<CLUSTER>();
    const uint64_t random = weights.is_greedy() ? 0 : philox(seeds[row], HAS_OFFSETS ? offsets[row] : 0);
    const uint64_t target = multiply_high(random, shfl<WARP_SIZE>(up_to, WARP_SIZE - 1));
    const uint64_t before = shfl<WARP_SIZE>(up_to, blockIdx.y) - own;
    if (target < before || target - before >= own) return;
    const auto weigh = [&](int i, uint64_t (&w)[VEC]) {
        const vec_t vec = IN_SHARED ? reinterpret_cast<const vec_t*>(memory)[i] : piece.load(i, absent);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const float x = clean(vec[j]);
            w[j] = key_of(x) >= threshold ? weights.of(x).whole() : 0;
        }
    };
    const auto take = [&](int i, int j, uint64_t) { samples[row] = int32_t(first) + piece.element(i) + j; };
    find_by_weight<NUM_THREADS, VEC>(target - before, VECTORS * NUM_THREADS, weigh, take, partial);
}
