// cluster_reduce.cuh: sums of a matrix product of which the blocks of a cluster, or warpgroups of a block, have parts.
//
// Sums travel in fragments, four of them in each lane of a warp. Fragment f belongs to block f % SPLITS of the cluster: all
// of its parts are sent there, and added up in their order, so that results do not depend on which comes first.
#pragma once
#include "barrier.cuh"

// A lane's sums in a fragment.
template <typename T> struct alignas(16) Fragment { T sums[4]; };

template <typename T, int PARTS, int SPLITS, int FRAGMENTS>
struct ClusterSums {
    static constexpr int OWN_FRAGMENTS = FRAGMENTS / SPLITS;  // that a block adds up
    static constexpr int BYTES = PARTS > 1 ? PARTS * OWN_FRAGMENTS * WARP_SIZE * 16 : 0;
    static_assert(FRAGMENTS % SPLITS == 0 && sizeof(Fragment<T>) == 16);

    Fragment<T>* received;   // [PARTS, OWN_FRAGMENTS, lanes], in shared memory
    uint64_t* all_received;  // an mbarrier of one arrival

    // By one thread, before the cluster starts.
    DEVICE void init() const {
        mbarrier_init(all_received, 1);
        if constexpr (PARTS > 1) mbarrier_arrive_expect_tx(all_received, BYTES);
    }
    // Sends part number `part` of a fragment. Every part of every fragment is sent once.
    DEVICE void send(int part, int fragment, const Fragment<T>& own) const {
        const int place = part * OWN_FRAGMENTS + fragment / SPLITS, lane = threadIdx.x % WARP_SIZE;
        store_async(received + place * WARP_SIZE + lane, all_received, fragment % SPLITS, own);
    }
    // Calls visit(fragment, total) for the fragments of block `split`, by `num_warps` warps in turn.
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
