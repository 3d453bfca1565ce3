// cluster.cuh: clusters: blocks that run at the same time, wait for each other and read each other's shared memory.
//
// Clusters exist from sm_90 on. A plan makes clusters only where the device has them; elsewhere a cluster is one block.

#pragma once
#include "platform.cuh"

// Stands before the name of a kernel: every BLOCKS consecutive blocks of blockIdx.y are a cluster. The host emulation
// reads BLOCKS from the source text.
#if PYOPS_CUDA && __CUDA_ARCH__ >= 900
#define CLUSTER_OF(BLOCKS) __cluster_dims__(1, BLOCKS, 1)
#else
#define CLUSTER_OF(BLOCKS)
#endif

// Barrier of the cluster. What its blocks wrote to shared memory before can be read by all of them afterwards. Every
// thread of the cluster calls.
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

// Barrier before a block of the cluster ends, so that its shared memory lives until the other blocks have read it.
// Unlike sync_cluster it makes no writes visible, and does not wait for loads of the calling thread that are in flight:
// their values must have been used, by a store for example, before. Every thread of the cluster calls.
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

// Barrier of the cluster behind fence_mbarrier_init(). It makes no other writes visible, and so needs no fence of the
// device.
template <int BLOCKS>
DEVICE void start_cluster() {
    if constexpr (BLOCKS > 1) leave_cluster<BLOCKS>();
    else __syncthreads();
}

#if PYOPS_CUDA && __CUDA_ARCH__ >= 900
// The address in the shared memory of block `rank` of what this block has at `own`.
DEVICE uint32_t address_in_block(const void* own, unsigned rank) {
    uint32_t address = __cvta_generic_to_shared(own);
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    return address;
}
#endif

// Loads from the shared memory of block `rank` of the cluster what this block has at `word`. Ranks count in blockIdx.y.
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
