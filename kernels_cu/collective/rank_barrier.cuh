// rank_barrier.cuh: the barrier across ranks for blocks with the same index, called a meeting here, and sums over
// ranks.
//
// Every rank has a `Signals` that all ranks can access. Block b of rank r arrives at rank p by storing the number of
// the meeting to flags[b][r] of p. Numbers only grow, so a flag is never reset. A flag is stored with release and read
// with acquire semantics at system scope; __syncthreads before and after extends both to the other threads of the
// block.
//
// The fence of a release costs 0.65 us. A flag that publishes no writes of its own kernel is stored relaxed: the writes
// of earlier kernels are visible since those kernels ended, and completed loads need no fence.
//
// All ranks launch the same grid, and each kernel stores the number of its last meeting to `meetings`, for every block,
// before it ends.

#pragma once
#include "vec.cuh"

constexpr int MAX_RANKS = 8;
constexpr int MAX_RANK_BLOCKS = 36;

struct Signals {
    uint32_t flags[MAX_RANK_BLOCKS][MAX_RANKS];
    uint32_t meetings[MAX_RANK_BLOCKS];
};

#if PYOPS_HOST
using host::Flagged;
#else
// What a flag publishes. ALL: the writes of its block. START: only that its kernel has begun. READS: only that the
// reads of its block are complete.
enum class Flagged { ALL, START, READS };
#endif

template <Flagged WHAT>
DEVICE void store_signal(uint32_t* flag, uint32_t value) {
#if PYOPS_CUDA
    if constexpr (WHAT == Flagged::ALL) {
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
    } else {
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
    }
#elif PYOPS_HIP
    __scoped_atomic_store_n(flag, value, __ATOMIC_RELEASE, __MEMORY_SCOPE_SYSTEM);
#else
    host::store_flag(flag, value, WHAT);
#endif
}

// The report on a rank that a kernel gave up waiting for. It is in host memory, which survives the kernel's trap.
struct LostRank {
    uint32_t block;    // 1 + the block that has waited; 0: the rank was not given up
    uint32_t meeting;  // the number of the meeting to which the rank did not come
};
DEVICE void tell_lost(LostRank* lost, uint32_t meeting) {
    lost->meeting = meeting;
    lost->block = blockIdx.x + 1;
#if PYOPS_CUDA
    asm volatile("fence.sc.sys;" ::: "memory");
#endif
}

// The timeout of a thread that waits for ranks. After SIGNAL_SECONDS the thread reports the missing ranks in `lost`.
// After TELLING_SECONDS more, in which other threads can report other ranks, the kernel ends with a trap, which the
// next CUDA runtime call returns as an error. A rank that arrives in between is taken off the report.
constexpr uint64_t SIGNAL_SECONDS = 30, TELLING_SECONDS = 1;
struct Patience {
#if PYOPS_CUDA
    uint64_t start = 0;
    uint32_t tries = 0, told = 0;  // a bit for each rank
#endif
    // Called after each poll; `missing` has a bit for each rank that has not arrived at the meeting.
    DEVICE void spend(uint32_t missing, uint32_t meeting, LostRank* lost) {
#if PYOPS_CUDA
        if (++tries % 1024) return;
        uint64_t now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (start == 0) start = now;
        const uint64_t seconds = (now - start) / 1000000000;
        if (seconds >= SIGNAL_SECONDS && !told) {
            told = missing;
            tell_all(missing, meeting, lost);
        }
        if (seconds >= SIGNAL_SECONDS + TELLING_SECONDS) asm volatile("trap;");
#elif PYOPS_HOST
        tell_all(missing, meeting, lost);
        host::give_up();
#endif
    }
    // Called once every rank has arrived: withdraws the reports.
    DEVICE void end(LostRank* lost) {
#if PYOPS_CUDA
        for (; told; told &= told - 1) lost[__ffs(told) - 1].block = 0;
#endif
    }

    DEVICE static void tell_all(uint32_t missing, uint32_t meeting, LostRank* lost) {
        for (int rank = 0; rank < MAX_RANKS; ++rank) {
            if (missing >> rank & 1) tell_lost(lost + rank, meeting);
        }
    }
};

// Waits until `flag`, which rank `from` stores, is `meeting` or more.
DEVICE void await_signal(const uint32_t* flag, uint32_t meeting, int from, LostRank* lost) {
    Patience patience;
    for (;;) {
        uint32_t seen = meeting;
#if PYOPS_CUDA
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
#elif PYOPS_HIP
        seen = __scoped_atomic_load_n(flag, __ATOMIC_ACQUIRE, __MEMORY_SCOPE_SYSTEM);
#else
        if (!host::await_flag(flag, meeting, from)) seen = meeting - 1;
#endif
        if (int32_t(seen - meeting) >= 0) break;
        patience.spend(1u << from, meeting, lost);
    }
    patience.end(lost);
}

// The ranks, from the point of view of one block of rank `rank`.
template <int WORLD_SIZE>
struct World {
    const uint64_t* addresses;  // address of the Signals of each rank
    Signals *own, *others;      // `others`: in thread t < WORLD_SIZE, the Signals of rank t
    LostRank* lost;             // [MAX_RANKS], the report on each rank
    int rank;
    uint32_t meeting;  // number of the last meeting

    DEVICE World(const uint64_t* addresses, Signals* own, LostRank* lost, int rank)
        : addresses(addresses), own(own), lost(lost), rank(rank) {
        meeting = own->meetings[blockIdx.x];
        others = of(threadIdx.x < WORLD_SIZE ? threadIdx.x : 0);
    }
    DEVICE Signals* of(int other) const { return reinterpret_cast<Signals*>(addresses[other]); }
    // Waits for the block with this index on every rank; what their flags publish is then visible. Every thread calls.
    template <Flagged WHAT>
    DEVICE void meet() {
        ++meeting;
        __syncthreads();
        if (threadIdx.x < WORLD_SIZE) {
            store_signal<WHAT>(&others->flags[blockIdx.x][rank], meeting);
            await_signal(&own->flags[blockIdx.x][threadIdx.x], meeting, threadIdx.x, lost);
        }
        __syncthreads();
    }
    // Stores the meeting number before the kernel ends. Every thread calls, after the last meeting. It also stores the
    // number for blocks beyond this grid, so that the next kernel starts from the same number in all of its blocks.
    DEVICE void leave() const {
        const uint32_t block = blockIdx.x + threadIdx.x * gridDim.x;
        if (block < MAX_RANK_BLOCKS) own->meetings[block] = meeting;
    }
    // The memory after the signals of a rank, for results that other ranks read.
    template <typename T>
    DEVICE T* scratch(int other) const {
        return reinterpret_cast<T*>(reinterpret_cast<char*>(of(other)) + SIGNAL_BYTES);
    }
};

// x = the sum of the vectors of all ranks, in float32, in the order of ranks.
template <typename T, int VEC_SIZE, int WORLD_SIZE>
DEVICE void sum_in_order(float (&x)[VEC_SIZE], const Vec<T, VEC_SIZE> (&vecs)[WORLD_SIZE]) {
    vecs[0].to_floats(x);
#pragma unroll
    for (int i = 1; i < WORLD_SIZE; ++i) {
        float other[VEC_SIZE];
        vecs[i].to_floats(other);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) x[j] += other[j];
    }
}
