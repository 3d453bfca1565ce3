// barrier.cuh: barriers of parts of a block and of a cluster: mbarriers, which count arrivals and bytes, and named
// barriers.
//
// An mbarrier is a uint64_t in shared memory. It goes through phases 0, 1, 2, ... A phase ends when the number of
// arrivals given to mbarrier_init has been reached and all announced bytes have been copied. `mbarrier_wait(barrier,
// parity)` returns once the latest phase of this parity has ended; on a new mbarrier it returns at once for parity 1.
// Writes of a thread before its arrival are visible to the threads that the end of the phase releases.
//
// Loads and stores of threads use the generic proxy; TMA and wgmma access memory through the async proxy. They see what
// threads have written to shared memory only after fence_proxy_async().
//
// Kernels that include this file require sm_90; AMD GPUs do not run them.
#pragma once
#include "platform.cuh"

static_assert(!PYOPS_HIP, "AMD has no mbarriers");
#if PYOPS_CUDA
static_assert(__CUDA_ARCH__ >= 900, "mbarriers that are waited for by phase exist from sm_90 on");

// The 32-bit address in the shared window that PTX instructions take.
DEVICE uint32_t shared_address(const void* shared) { return __cvta_generic_to_shared(shared); }
#endif

// Whether the lane is the elected one of its warp; it is always the same lane. Every lane of the warp calls.
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

// Begins phase 0 of an mbarrier with `arrivals` arrivals per phase. One thread initialises the mbarriers of a block and
// calls fence_mbarrier_init(). A barrier of the block, or of the cluster, follows before their first use.
DEVICE void mbarrier_init(uint64_t* barrier, int arrivals) {
#if PYOPS_CUDA
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#elif PYOPS_HOST
    host::mbarrier_init(barrier, arrivals);
#endif
}

// Makes the mbarriers that the thread has initialised visible to TMA and to the other CTAs of the cluster.
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

// Arrives at the mbarrier at the address of `barrier` in CTA `rank` of the cluster. The arrival tells that CTA that
// this thread has read some data, or waited for an MMA that has read it, so the data may be overwritten. It does not
// make writes of this thread visible there: `.release.cluster` would, by waiting for the whole GPU's memory.
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

// Arrives, and announces the bytes that copies will deliver in the open phase (expect_tx).
DEVICE void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
#if PYOPS_CUDA
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#elif PYOPS_HOST
    host::mbarrier_arrive(barrier, bytes);
#endif
}

// Stores a 16-byte value at the address of `to` in CTA `rank` of the cluster. The mbarrier at the address of `barrier`
// in that CTA counts the bytes; only a wait on it makes them visible.
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

// Arrives for the thread as soon as all its cp_async copies so far have completed (async.cuh). The thread does not wait
// and needs no cp_async_wait. The arrival counts among those given to mbarrier_init. The threads that the mbarrier
// releases see the copies, but no other writes of the thread.
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

// Makes shared memory that the thread has written, or seen written, visible to TMA and wgmma. Each thread that writes
// calls this before the barrier on which the thread waits that issues the copy or the MMA.
DEVICE void fence_proxy_async() {
#if PYOPS_CUDA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#elif PYOPS_HOST
    host::fence_proxy_async();
#endif
}

// Named barriers, numbers 1 to 15 of a block: `threads` threads, a multiple of 32, arrive, by whole warps. Threads that
// call named_barrier_sync wait for all of them. Number 0 belongs to __syncthreads. With a number that is not a
// constant, ptxas reserves all 16, and an SM may not have enough for several blocks.
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
