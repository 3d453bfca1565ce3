// signals.cuh: how the blocks of one index of several ranks wait for each other, and sums over ranks.
//
// Every rank has a `Signals` that all ranks can access. Block b of rank r tells rank p that it has come by storing the
// number of the meeting to flags[b][r] of p. Numbers only grow, so a flag need not be reset. A flag is stored with release
// and read with acquire, in the scope of the system; the barriers of the block carry both from and to its other threads.
// A release costs 0.65 us for its fence. A flag that publishes no writes of its own kernel does without: what earlier kernels
// wrote is visible since they ended, and loads whose values were used need no fence.
// All ranks launch the same grid, and each kernel counts its meetings in `meetings`, for every block, before it ends.

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
// What a flag publishes: ALL that its block did; that its kernel has begun (START); that its block's reads are over (READS).
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

// What a kernel says of a rank that it gives up waiting for, in memory of the host, which outlives the kernel's trap.
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

// How long a thread has waited for ranks. One that has not come after SIGNAL_SECONDS will not come: the thread says so in
// `lost`, and after TELLING_SECONDS, in which other threads may say so of other ranks, the kernel ends with a trap, which
// the next call of the device's runtime reports. A rank that comes meanwhile is not lost.
constexpr uint64_t SIGNAL_SECONDS = 30, TELLING_SECONDS = 1;
struct Patience {
#if PYOPS_CUDA
    uint64_t start = 0;
    uint32_t tries = 0, told = 0;  // a bit for each rank
#endif
    // After each look: `missing` has a bit for each rank that has not come to the meeting.
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
    // When every rank has come.
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

// The ranks, as the block of one of them sees them.
template <int WORLD_SIZE>
struct World {
    const uint64_t* addresses;  // of the signals of each rank
    Signals *own, *others;      // `others`: thread t < WORLD_SIZE has those of rank t
    LostRank* lost;             // [MAX_RANKS], of each rank
    int rank;
    uint32_t meeting;  // number of the last meeting

    DEVICE World(const uint64_t* addresses, Signals* own, LostRank* lost, int rank)
        : addresses(addresses), own(own), lost(lost), rank(rank) {
        meeting = own->meetings[blockIdx.x];
        others = of(threadIdx.x < WORLD_SIZE ? threadIdx.x : 0);
    }
    DEVICE Signals* of(int other) const { return reinterpret_cast<Signals*>(addresses[other]); }
    // Waits for the block of this index of every rank, and sees what their flags publish. Every thread calls.
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
    // Before the kernel ends. Every thread calls, behind the last meeting. Blocks that a launch lacks are counted, too, so
    // that the next kernel has the same number in all of its blocks.
    DEVICE void leave() const {
        const uint32_t block = blockIdx.x + threadIdx.x * gridDim.x;
        if (block < MAX_RANK_BLOCKS) own->meetings[block] = meeting;
    }
    // Memory behind the signals of a rank, for results that other ranks fetch.
    template <typename T>
    DEVICE T* scratch(int other) const {
        return reinterpret_cast<T*>(reinterpret_cast<char*>(of(other)) + SIGNAL_BYTES);
    }
};

// x = the sum of vectors, one of every rank, in float32, in the order of ranks.
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
