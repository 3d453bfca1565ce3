// pipeline.cuh: a ring of stages in shared memory. One producer thread feeds it with TMA; consumer warpgroups execute
// the MMAs.
//
// Stage i has two mbarriers. full[i] completes a phase when the stage holds the tiles of a k-tile; empty[i] when every
// consumer warp, in all CTAs that a multicast reaches, has released the stage. The producer and the consumers each have
// their own Ring and visit the stages in the same order.
#pragma once
#include "cluster.cuh"
#include "tma.cuh"

// Loads a box for all BLOCKS CTAs of a cluster.
template <int BLOCKS>
DEVICE void load_box(uint8_t* to, const TensorMap* map, uint64_t* barrier, int x, int y) {
    if constexpr (BLOCKS > 1) tma_load_multicast(to, map, barrier, (1 << BLOCKS) - 1, x, y);
    else tma_load(to, map, barrier, x, y);
}

// Zeroes bytes [begin, end) of each stage, multiples of 16, that no load fills but WGMMAs read. All `threads` threads
// call; start_cluster() or __syncthreads() follows.
template <int STAGES, int STAGE_BYTES>
DEVICE void zero_stages(uint8_t* shared, int begin, int end, int threads) {
    const int vectors = max(0, end - begin) / 16;
    for (int i = threadIdx.x; i < STAGES * vectors; i += threads) {
        const int stage = i / vectors;
        *reinterpret_cast<uint4*>(shared + stage * STAGE_BYTES + begin + (i - stage * vectors) * 16) = {0, 0, 0, 0};
    }
    fence_proxy_async();
}

template <int STAGES>
struct Ring {
    uint64_t* barriers;  // [2, STAGES]: full, then empty
    int stage = 0;
    uint32_t phase = 0;

    DEVICE explicit Ring(void* shared) : barriers(static_cast<uint64_t*>(shared)) {}

    // One thread calls this; start_cluster() follows. `releases`: number of warps that release a stage. `fills`: number
    // of arrivals that fill a stage, in addition to the announced bytes.
    DEVICE void init(int releases, int fills = 1) const {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(barriers + i, fills);
            mbarrier_init(barriers + STAGES + i, releases);
        }
        fence_mbarrier_init();
    }
    DEVICE uint64_t* full() const { return barriers + stage; }
    // The producer waits until the stage is free. In the first round every stage is free.
    DEVICE void acquire() const { mbarrier_wait(barriers + STAGES + stage, phase ^ 1); }
    // The producer waits, as its last action, until every stage is free: no CTA of the cluster may arrive at an
    // mbarrier of a CTA that has exited.
    DEVICE void drain() {
        for (int i = 0; i < STAGES; ++i, advance()) acquire();
    }
    // A consumer waits until the stage is full.
    DEVICE void wait() const { mbarrier_wait(full(), phase); }
    // Each consumer warp calls this after its last read of stage `which`. Lane i arrives at the empty barrier of CTA i
    // of the cluster, for i < BLOCKS.
    template <int BLOCKS = 1>
    DEVICE void release(int which) const {
        const int lane = threadIdx.x % 32;
        if (lane >= BLOCKS) return;
        if constexpr (BLOCKS > 1) mbarrier_arrive_cluster(barriers + STAGES + which, lane);
        else mbarrier_arrive(barriers + STAGES + which);
    }
    DEVICE void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    // Advances by `steps` stages, which other warps consume.
    DEVICE void skip(int steps) {
        const int end = stage + steps;
        stage = end % STAGES;
        phase ^= end / STAGES % 2;
    }
};
