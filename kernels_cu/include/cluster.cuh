// cluster.cuh: thread block clusters: CTAs that run at the same time, synchronise and read each other's shared memory.
//
// Clusters require sm_90. A plan launches clusters only on devices that have them; elsewhere a cluster is one CTA.

#pragma once
#include "platform.cuh"

// This macro precedes the name of a kernel: every BLOCKS consecutive CTAs of blockIdx.y form a cluster. The host
// emulation reads BLOCKS from the source text.
#if PYOPS_CUDA && __CUDA_ARCH__ >= 900
#define CLUSTER_OF(BLOCKS) __cluster_dims__(1, BLOCKS, 1)
#else
#define CLUSTER_OF(BLOCKS)
#endif

// Barrier of the cluster. All CTAs of the cluster see afterwards what each of them wrote to shared memory before. Every
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

// Barrier before a CTA of the cluster exits, so that its shared memory stays valid until the other CTAs have read it.
// Unlike sync_cluster it makes no writes visible, and does not wait for loads of the calling thread that are in flight:
// the thread must have used the loaded values before, by a store for example. Every thread of the cluster calls.
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

// Barrier of the cluster after fence_mbarrier_init(). It makes no other writes visible, and so needs no fence of the
// device.
template <int BLOCKS>
DEVICE void start_cluster() {
    if constexpr (BLOCKS > 1) leave_cluster<BLOCKS>();
    else __syncthreads();
}

#if PYOPS_CUDA && __CUDA_ARCH__ >= 900
// The address, in the shared memory of CTA `rank`, that corresponds to `own` in this CTA.
DEVICE uint32_t address_in_block(const void* own, unsigned rank) {
    uint32_t address = __cvta_generic_to_shared(own);
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    return address;
}
#endif

// Loads a word from the shared memory of CTA `rank` of the cluster, at the address that corresponds to `word` in this
// CTA. Ranks count in blockIdx.y.
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
DEVICE float4 load_of_block(const float4* four, unsigned rank) {
#if PYOPS_CUDA && __CUDA_ARCH__ >= 900
    if constexpr (BLOCKS > 1) {
        float4 x;
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                     : "r"(address_in_block(four, rank))
                     : "memory");
        return x;
    }
#elif PYOPS_HOST
    if constexpr (BLOCKS > 1) return host_load_of_block(four, rank);
#endif
    return *four;
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
