// cluster_results.cuh: the results that the CTAs of a cluster send each other through distributed shared memory, to be
// combined.
//
// All CTAs of a cluster have partial results for the same parts of the output. CTA p % CLUSTER combines part p. It
// receives the results of every CTA for it, at places of their own, and its mbarrier counts their bytes. A cluster barrier
// would cost a fence of the device in front of it, loads from other CTAs after it, and another barrier before a CTA may
// exit. The file reads the constant CLUSTER of the kernel that includes it. GPUs without clusters have no mbarriers either.
#pragma once
#include "cluster.cuh"
#if PYOPS_CLUSTERS
#include "barrier.cuh"
#endif

// Four floats of a lane.
struct alignas(16) Quad { float x[4]; };

// PARTS: most parts; QUADS: quads of each lane in a result.
template <int PARTS, int QUADS>
struct ClusterResults {
    static constexpr int SLOTS = CLUSTER > 1 ? ceil_div(PARTS, CLUSTER) * CLUSTER : 0;  // results that a CTA receives

    Quad (*received)[QUADS][32];  // [SLOTS]
    Quad* states;                 // [SLOTS]: the row max and the row sum of each result
    uint64_t* all_received;       // an mbarrier of one arrival

    static DEVICE int slot(int part, int rank) { return part / CLUSTER * CLUSTER + rank; }

    // One thread of each CTA calls, after other mbarriers. The cluster starts (start_cluster) before a CTA sends.
    DEVICE void init() const {
#if PYOPS_CLUSTERS
        mbarrier_init(all_received, 1);
        fence_mbarrier_init();
#endif
    }
    // The warp sends its CTA's results for a part: quad(q) is quad q of the lane.
    template <typename F>
    DEVICE void send(int part, float max_logit, float exp_sum, F quad) const {
#if PYOPS_CLUSTERS
        const int lane = threadIdx.x % 32, to = slot(part, int(blockIdx.y) % CLUSTER);
#pragma unroll
        for (int q = 0; q < QUADS; ++q) store_async(&received[to][q][lane], all_received, part % CLUSTER, quad(q));
        if (lane == 0) store_async(states + to, all_received, part % CLUSTER, Quad{max_logit, exp_sum});
#endif
    }
    // One thread of the CTA calls once: the CTA combines as many of `num_parts` parts as it has to wait for.
    DEVICE void expect(int num_parts) const {
#if PYOPS_CLUSTERS
        const int own = (num_parts - int(blockIdx.y) % CLUSTER + CLUSTER - 1) / CLUSTER;
        mbarrier_arrive_expect_tx(all_received, own * CLUSTER * (QUADS * 32 + 1) * int(sizeof(Quad)));
#endif
    }
    // Waits for all results. Every thread that reads them calls.
    DEVICE void wait(uint32_t parity = 0) const {
#if PYOPS_CLUSTERS
        mbarrier_wait(all_received, parity);
#endif
    }

    DEVICE float max_logit(int part, int rank) const { return states[slot(part, rank)].x[0]; }
    DEVICE float exp_sum(int part, int rank) const { return states[slot(part, rank)].x[1]; }
    DEVICE const Quad& quad(int part, int rank, int q, int lane) const { return received[slot(part, rank)][q][lane]; }
    DEVICE float4 quad(int part, int rank) const {  // of the calling lane, if it has one
        static_assert(QUADS == 1);
        const float (&x)[4] = quad(part, rank, 0, int(threadIdx.x) % 32).x;
        return {x[0], x[1], x[2], x[3]};
    }
};
