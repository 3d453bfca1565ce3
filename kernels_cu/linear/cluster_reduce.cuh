// cluster_reduce.cuh: split-K reduction of accumulators over the CTAs of a cluster, or the warpgroups of a CTA, through
// distributed shared memory.
//
// Accumulators are sent as fragments of four per lane. CTA f % SPLITS of the cluster reduces fragment f: it receives
// all parts and adds them in the order of their numbers, so that the result does not depend on which arrives first.
#pragma once
#include "barrier.cuh"

// A lane's accumulators of a fragment.
template <typename T> struct alignas(16) Fragment { T sums[4]; };

template <typename T, int PARTS, int SPLITS, int FRAGMENTS>
struct ClusterSums {
    static constexpr int OWN_FRAGMENTS = FRAGMENTS / SPLITS;  // fragments that a CTA reduces
    static constexpr int BYTES = PARTS > 1 ? PARTS * OWN_FRAGMENTS * WARP_SIZE * 16 : 0;
    static_assert(FRAGMENTS % SPLITS == 0 && sizeof(Fragment<T>) == 16);

    Fragment<T>* received;   // [PARTS, OWN_FRAGMENTS, lanes], in shared memory
    uint64_t* all_received;  // an mbarrier of one arrival

    // One thread calls, before the cluster starts.
    DEVICE void init() const {
        mbarrier_init(all_received, 1);
        if constexpr (PARTS > 1) mbarrier_arrive_expect_tx(all_received, BYTES);
    }
    // Sends part number `part` of a fragment. Every part of every fragment is sent once.
    DEVICE void send(int part, int fragment, const Fragment<T>& own) const {
        const int place = part * OWN_FRAGMENTS + fragment / SPLITS, lane = threadIdx.x % WARP_SIZE;
        store_async(received + place * WARP_SIZE + lane, all_received, fragment % SPLITS, own);
    }
    // Waits for all parts, reduces the fragments of CTA `split` and calls visit(fragment, total). They are dealt to the
    // `num_warps` warps round-robin.
    template <typename Visit>
    DEVICE void add_up(int split, int warp, int num_warps, Visit visit) const {
        mbarrier_wait(all_received, 0);
        for (int i = warp; i < OWN_FRAGMENTS; i += num_warps) {
            Fragment<T> total = {};
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const auto one = received[(part * OWN_FRAGMENTS + i) * WARP_SIZE + threadIdx.x % WARP_SIZE];
#pragma unroll
                for (int j = 0; j < 4; ++j) total.sums[j] += one.sums[j];
            }
            visit(i * SPLITS + split, total);
        }
    }
};
