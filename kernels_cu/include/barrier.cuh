// barrier.cuh: barriers of parts of a block and of a cluster: mbarriers, which count arrivals and bytes, and named
// barriers.
//
// An mbarrier is a uint64_t in shared memory. It goes through phases 0, 1, 2, ... A phase ends when as many threads
// have arrived as mbarrier_init was told, and all bytes that were announced have been copied. `mbarrier_wait(barrier,
// parity)` returns once the latest phase of this parity has ended; on a new mbarrier it returns at once for parity 1.
// What a thread did before it arrived is visible to the threads whose wait the arrival ends.
//
// Loads and stores of threads go through the generic proxy; TMA and wgmma access memory through the asynchronous proxy.
// They see what threads have written to shared memory only after fence_proxy_async().
//
// Kernels that include this file run from sm_90 on, and not on AMD.
#pragma once
#include "platform.cuh"

static_assert(!PYOPS_HIP, "AMD has no mbarriers");
#if PYOPS_CUDA
static_assert(__CUDA_ARCH__ >= 900, "mbarriers that are waited for by phase exist from sm_90 on");

// The address of shared memory as instructions take it.
DEVICE uint32_t shared_address(const void* shared) { return __cvta_generic_to_shared(shared); }
#endif

// Whether the lane is the elected one of its warp, always the same. Every lane of the warp calls.
DEVICE bool elect_one() {
#if PYOPS_CUDA
    uint32_t elected;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
    return elected;
#elif PYOPS_HOST
    return host::lane_index() == host::elected_lane();
#else
    return false;
#endif
}

// Begins phase 0 of a barrier whose phases take `arrivals` arrivals. One thread initialises the mbarriers of a block
// and calls fence_mbarrier_init(). A barrier of the block, or of the cluster, comes before their first use.
DEVICE void mbarrier_init(uint64_t* barrier, int arrivals) {
#if PYOPS_CUDA
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#elif PYOPS_HOST
    host::mbarrier_init(barrier, arrivals);
#endif
}

// Makes the mbarriers that the thread has initialised known to TMA and to the other blocks of the cluster.
DEVICE void fence_mbarrier_init() {
#if PYOPS_CUDA
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#elif PYOPS_HOST
    host::fence_mbarrier_init();
#endif
}

DEVICE void mbarrier_arrive(uint64_t* barrier) {
#if PYOPS_CUDA
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#elif PYOPS_HOST
    host::mbarrier_arrive(barrier, 0);
#endif
}

// Arrives at the mbarrier that block `rank` of the cluster has at the address of `barrier`. The arrival tells the other
// block that this thread has read something, or waited for a product that has, and may be overwritten. It does not make
// writes of this thread visible there: `.release.cluster` would, by waiting for the whole GPU's memory.
DEVICE void mbarrier_arrive_cluster(uint64_t* barrier, unsigned rank) {
#if PYOPS_CUDA
    asm volatile(
        "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; mbarrier.arrive.shared::cluster.b64 _, "
        "[remote];}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
#elif PYOPS_HOST
    host::mbarrier_arrive_cluster(barrier, rank);
#endif
}

// Announces bytes that copies will bring in the open phase, and arrives.
DEVICE void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
#if PYOPS_CUDA
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#elif PYOPS_HOST
    host::mbarrier_arrive(barrier, bytes);
#endif
}

// Stores a value of 16 bytes at the address of `to` in block `rank` of the cluster. The mbarrier that this block has at
// the address of `barrier` counts the bytes; a wait there, and nothing else, makes them visible.
template <typename T>
DEVICE void store_async(T* to, uint64_t* barrier, unsigned rank, const T& value) {
    static_assert(sizeof(T) == 16 && alignof(T) == 16);
    const auto& words = reinterpret_cast<const uint32_t (&)[4]>(value);
#if PYOPS_CUDA
    asm volatile(
        "{.reg .b32 remote, counts; mapa.shared::cluster.u32 remote, %0, %2; mapa.shared::cluster.u32 counts, %1, %2; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [remote], {%3, %4, %5, %6}, "
        "[counts];}" ::"r"(shared_address(to)),
        "r"(shared_address(barrier)), "r"(rank), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
#elif PYOPS_HOST
    host::store_async(to, barrier, rank, words);
#endif
}

// Arrives, in the thread's name, as soon as all cp_async of the thread so far have been copied (async.cuh). The thread
// does not wait and needs no cp_async_wait. The arrival is one of those that mbarrier_init was told. Its copies are
// visible to the threads that the mbarrier lets go on; nothing else of the thread is.
DEVICE void cp_async_mbarrier_arrive_noinc(uint64_t* barrier) {
#if PYOPS_CUDA
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#elif PYOPS_HOST
    host::copies_arrive(barrier);
#endif
}

// Waits until the latest phase of this parity has ended.
DEVICE void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
#if PYOPS_CUDA
    const uint32_t address = shared_address(barrier);
    uint32_t ended;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(ended)
                     : "r"(address), "r"(parity)
                     : "memory");
    } while (!ended);
#elif PYOPS_HOST
    host::mbarrier_wait(barrier, parity);
#endif
}

// Makes what the thread has written or seen of shared memory visible to TMA and wgmma. Each thread that writes calls
// this before the barrier that the thread which starts the copy or the product waits at.
DEVICE void fence_proxy_async() {
#if PYOPS_CUDA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#elif PYOPS_HOST
    host::fence_proxy_async();
#endif
}

// Named barriers, numbers 1 to 15 of a block: `threads`, a multiple of 32, arrive, by whole warps. Those that call
// named_barrier_sync wait for all. Number 0 is that of __syncthreads. A number that is no constant makes the assembler
// reserve all 16, of which several blocks on a multiprocessor may not have enough.
template <int NUMBER>
DEVICE void named_barrier_sync(int threads) {
    static_assert(NUMBER > 0 && NUMBER < 16);
#if PYOPS_CUDA
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "r"(threads) : "memory");
#elif PYOPS_HOST
    host::named_barrier(NUMBER, threads, true);
#endif
}
template <int NUMBER>
DEVICE void named_barrier_arrive(int threads) {
    static_assert(NUMBER > 0 && NUMBER < 16);
#if PYOPS_CUDA
    asm volatile("bar.arrive %0, %1;" ::"n"(NUMBER), "r"(threads) : "memory");
#elif PYOPS_HOST
    host::named_barrier(NUMBER, threads, false);
#endif
}
DEVICE void named_barrier_sync(int number, int threads) {
#if PYOPS_CUDA
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
#elif PYOPS_HOST
    host::named_barrier(number, threads, true);
#endif
}
DEVICE void named_barrier_arrive(int number, int threads) {
#if PYOPS_CUDA
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
#elif PYOPS_HOST
    host::named_barrier(number, threads, false);
#endif
}
