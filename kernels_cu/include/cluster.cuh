// cluster.cuh: blocks that run at the same time, wait for each other and read each other's shared memory (sm_90 and later).
//
// A plan makes clusters only where the device has them; elsewhere a cluster is one block.
#pragma once
#include "platform.cuh"

// Before the name of a kernel: BLOCKS blocks that follow each other in y make a cluster. (The host reads it in the source.)
#if PYOPS_CUDA && __CUDA_ARCH__ >= 900
#define CLUSTER_OF(BLOCKS) __cluster_dims__(1, BLOCKS, 1)
#else
#define CLUSTER_OF(BLOCKS)
#endif

// What the blocks of the cluster wrote to shared memory before can be read by all of them afterwards. Every thread calls.
template <int BLOCKS>
DEVICE void sync_cluster() {
#if PYOPS_CUDA && __CUDA_ARCH__ >= 900
    if constexpr (BLOCKS > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
        return;
    }
#elif PYOPS_HOST
    if constexpr (BLOCKS > 1) return host_sync_cluster();
#endif
    __syncthreads();
}

// Before a block ends, so that the others have read what they want of it. It says nothing of what was written, for which
// sync_cluster would wait, nor does it wait for what the thread itself has asked of others: that must have gone into something
// that was written before. Every thread calls.
template <int BLOCKS>
DEVICE void leave_cluster() {
#if PYOPS_CUDA && __CUDA_ARCH__ >= 900
    if constexpr (BLOCKS > 1) {
        asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    }
#elif PYOPS_HOST
    if constexpr (BLOCKS > 1) host_sync_cluster();
#endif
}

#if PYOPS_CUDA && __CUDA_ARCH__ >= 900
// Where block `rank` has what this block has at `own`, in shared memory.
DEVICE uint32_t address_in_block(const void* own, unsigned rank) {
    uint32_t address = __cvta_generic_to_shared(own);
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    return address;
}
#endif

// The word that block `rank` of the cluster, counted in y, has where this one has `word`, in shared memory.
template <int BLOCKS>
DEVICE uint32_t load_of_block(const uint32_t* word, unsigned rank) {
#if PYOPS_CUDA && __CUDA_ARCH__ >= 900
    if constexpr (BLOCKS > 1) {
        uint32_t value;
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address_in_block(word, rank)) : "memory");
        return value;
    }
#elif PYOPS_HOST
    if constexpr (BLOCKS > 1) return host_load_of_block(word, rank);
#endif
    return *word;
}

template <int BLOCKS>
DEVICE float load_of_block(const float* word, unsigned rank) {
    return __uint_as_float(load_of_block<BLOCKS>(reinterpret_cast<const uint32_t*>(word), rank));
}

template <int BLOCKS>
DEVICE uint64_t load_of_block(const uint64_t* pair, unsigned rank) {
#if PYOPS_CUDA && __CUDA_ARCH__ >= 900
    if constexpr (BLOCKS > 1) {
        uint64_t value;
        asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address_in_block(pair, rank)) : "memory");
        return value;
    }
#elif PYOPS_HOST
    if constexpr (BLOCKS > 1) return host_load_of_block(pair, rank);
#endif
    return *pair;
}
