// pipeline.cuh: a ring of stages in shared memory, through which one thread feeds tiles to warpgroups that
// multiply.
//
// Stage i has two mbarriers: full[i] ends a phase when the tiles of a step of K are there, empty[i] when every warp
// that multiplies, in all blocks that a multicast reaches, has done with the tiles. The producer and the consumers
// walk around the ring each with a Ring of their own, in the same order.
#pragma once
#include "cluster.cuh"
#include "tma.cuh"

// Loads rows of a tile that all BLOCKS blocks of a cluster need. The block number `rank` brings a part for all of them, of
// which boxes of the map are; x and y are where the tile begins.
template <int BLOCKS, int ROWS, int ROW_BYTES>
DEVICE void load_rows(uint8_t* to, const TensorMap* map, uint64_t* barrier, int rank, int x, int y) {
    constexpr int PART = ROWS / BLOCKS;
    uint8_t* const part = to + rank * PART * ROW_BYTES;
    if constexpr (BLOCKS > 1) tma_load_multicast(part, map, barrier, (1 << BLOCKS) - 1, x, y + rank * PART);
    else tma_load(to, map, barrier, x, y);
}

template <int STAGES>
struct Ring {
    uint64_t* barriers;  // full, then empty
    int stage = 0;
    uint32_t phase = 0;

    DEVICE explicit Ring(void* shared) : barriers(static_cast<uint64_t*>(shared)) {}

    // By one thread; start_cluster() follows. `releases`: warps that release a stage. `fills`: threads that say that a
    // stage is full, beside the bytes that one of them announces.
    DEVICE void init(int releases, int fills = 1) const {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(barriers + i, fills);
            mbarrier_init(barriers + STAGES + i, releases);
        }
        fence_mbarrier_init();
    }
    DEVICE uint64_t* full() const { return barriers + stage; }
    // Of the producer: until the stage is free. The first time round, every stage is.
    DEVICE void acquire() const { mbarrier_wait(barriers + STAGES + stage, phase ^ 1); }
    // Of the producer, last: until every stage is free. No block of the cluster sends to one that has ended.
    DEVICE void drain() {
        for (int i = 0; i < STAGES; ++i, advance()) acquire();
    }
    // Of a consumer: until the tiles of the stage are there.
    DEVICE void wait() const { mbarrier_wait(full(), phase); }
    // Of each consuming warp: it does not read stage `which` any more. BLOCKS lanes tell one block of the cluster
    // each.
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
    // Passes over `steps` steps, which others take.
    DEVICE void skip(int steps) {
        const int end = stage + steps;
        stage = end % STAGES;
        phase ^= end / STAGES % 2;
    }
};
