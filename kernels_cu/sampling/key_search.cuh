// key_search.cuh: finds the key at which a running total of the keys of a cluster, from the largest down, reaches an
// amount. Totals are counts or weights, and integers, so that their order does not matter.

#pragma once
#include "cluster.cuh"
#include "probability.cuh"

constexpr uint32_t MIN_KEY = 0x00800000u;  // key of -FLOAT_MAX, the smallest that can be drawn

// Range of keys that holds the threshold key. `wanted`: count or weight to reach within the range, from its largest key
// down; 0 until the sum over the range is known.
struct KeyRange {
    uint32_t low, high;
    uint64_t wanted = 0;
    bool is_found = false;
    DEVICE bool holds(uint32_t key) const { return key - low <= high - low; }
};

// The search. One refinement splits a range into BINS bins of equal width, finds the bin that holds the threshold, and
// makes that bin the new range; the search ends when the range has one key, or when all of the bin is kept. Every
// thread of the block has one, over the same shared memory.
template <int NUM_THREADS, int BITS, typename PARTS>
struct KeySearch {
    static constexpr int BINS = 1 << BITS;
    static constexpr int COARSE_BINS = 2 * BINS / GROUP_BINS;  // their counters use the memory of two refinements

    uint32_t* const bins;          // [2, 2, BINS]: low and high parts of one refinement, then of the next; zeros first
    uint64_t* const groups;        // [2, COARSE_BINS]: each the total of GROUP_BINS bins
    Found<uint64_t>* const found;  // the bin found last
    int half = 0;                  // which half of `bins` and `groups` is in use
    // Each thread's share of the weight of the block's tokens with keys above the range; once the threshold is found,
    // with keys from the threshold on.
    uint64_t kept_weight = 0;

    // Sets `found` to the group (with in_group: the bin) where the running total of the cluster, from the largest key
    // down, reaches range.wanted, or wanted_of(grand total) while range.wanted is 0.
    template <int CLUSTER, typename F>
    DEVICE void
    find(const uint32_t* low, const uint32_t* high, int num_groups, bool in_group, const KeyRange& range, F wanted_of) {
        uint64_t* const group_sums = groups + half * COARSE_BINS;
        __syncthreads();
        for (int group = threadIdx.x / GROUP_BINS; group < num_groups; group += NUM_THREADS / GROUP_BINS) {
            const int bin = group * GROUP_BINS + int(threadIdx.x) % GROUP_BINS;
            const uint64_t sum = lane_reduce<Sum, GROUP_BINS>(PARTS{low[bin], high[bin]}.whole());
            if (threadIdx.x % GROUP_BINS == 0) group_sums[group] = sum;
        }
        sync_cluster<CLUSTER>();  // all totals are written, and no block still reads the bins of the last refinement
        if (threadIdx.x < WARP_SIZE) {
            const auto load_group = [&](int group) {
                uint64_t sum = 0;
#pragma unroll
                for (int rank = 0; rank < CLUSTER; ++rank) sum += load_of_block<CLUSTER>(group_sums + group, rank);
                return sum;
            };
            auto result = find_by_lanes<COARSE_BINS / GROUP_BINS>(
                num_groups, load_group, [&](uint64_t all) { return range.wanted ? range.wanted : wanted_of(all); });
            if (in_group) {
                const uint64_t wanted = result.wanted;
                const int begin = int(result.bin) * GROUP_BINS;
                result = find_by_lanes<1>(
                    GROUP_BINS,
                    [&](int bin) {
                        PARTS sum;
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
                result.bin += begin;
            }
            if (threadIdx.x == 0) *found = result;
        } else {
            // Clears the bins of the next refinement: the other half of `bins`, or all of it after the coarse pass,
            // because only the group totals are still read.
            for (int i = threadIdx.x - WARP_SIZE; i < (in_group ? 2 : 4) * BINS; i += NUM_THREADS - WARP_SIZE) {
                bins[in_group ? (half ^ 1) * 2 * BINS + i : i] = 0;
            }
        }
        __syncthreads();
        half ^= 1;
    }

    // The same for the bins of one block: each thread has a few of them.
    template <typename F>
    DEVICE void find_in_block(const uint32_t* low, const uint32_t* high, const KeyRange& range, F wanted_of) {
        constexpr int THREAD_BINS = ceil_div(BINS, NUM_THREADS);
        static_assert(NUM_THREADS / WARP_SIZE <= COARSE_BINS);
        const int first = BINS - 1 - int(threadIdx.x) * THREAD_BINS;
        uint64_t held[THREAD_BINS], sum = 0, all;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < THREAD_BINS; ++i) {
            sum += held[i] = first - i >= 0 ? PARTS{low[first - i], high[first - i]}.whole() : 0;
        }
        uint64_t before = sum_before<NUM_THREADS>(sum, groups + half * COARSE_BINS, all);
        const uint64_t wanted = range.wanted ? range.wanted : wanted_of(all);
        if (threadIdx.x == 0 && wanted == 0) *found = {0, 0, 0};
#pragma unroll
        for (int i = 0; i < THREAD_BINS; ++i) {
            if (before < wanted && wanted <= before + held[i]) *found = {uint32_t(first - i), held[i], wanted - before};
            before += held[i];
        }
        for (int i = threadIdx.x; i < 2 * BINS; i += NUM_THREADS) bins[(half ^ 1) * 2 * BINS + i] = 0;
        __syncthreads();
        half ^= 1;
    }

    // Narrows `range` to one of its bins; returns whether one was found. visit(f) calls f(key, weight) for each key of
    // the block in the range.
    template <int CLUSTER, typename F, typename VISIT>
    DEVICE bool refine(KeyRange& range, F wanted_of, VISIT visit) {
        const int shift = max(used_bits(range.high - range.low) - BITS, 0);
        uint32_t* const low = bins + half * 2 * BINS;
        uint32_t* const high = low + BINS;
        visit([&](uint32_t key, PARTS weight) {
            const uint32_t bin = (key - range.low) >> shift;
            // A low part that overflows carries into the high part.
            if (weight.low && atomicAdd(low + bin, weight.low) > ~weight.low) {
                atomicAdd(high + bin, 1u << (32 - PARTS::BITS));
            }
            if (weight.high) atomicAdd(high + bin, weight.high);
        });
        if constexpr (CLUSTER == 1) {
            find_in_block(low, high, range, wanted_of);
        } else {
            find<CLUSTER>(low, high, BINS / GROUP_BINS, true, range, wanted_of);
        }
        const uint32_t bin_index = found->bin;
        range.is_found = found->held == found->wanted || shift == 0;
        for (int i = threadIdx.x; i < BINS; i += NUM_THREADS) {
            if (i >= int(bin_index + !range.is_found)) kept_weight += PARTS{low[i], high[i]}.whole();
        }
        range.low += bin_index << shift;
        range.high = min(range.high, range.low + ((1u << shift) - 1));
        range.wanted = found->wanted;
        return found->held > 0;
    }
};
