// memory.cuh: loads, stores and prefetches with cache hints, and communication between blocks of one launch.
#pragma once
#include "platform.cuh"

// word_of<BYTES>::type is the unsigned word (or vector of two or four words) that one memory access of BYTES bytes
// moves.
template <int BYTES> struct word_of;
template <> struct word_of<1> { using type = uint8_t; };
template <> struct word_of<2> { using type = uint16_t; };
template <> struct word_of<4> { using type = uint32_t; };
template <> struct word_of<8> { using type = uint2; };
template <> struct word_of<16> { using type = uint4; };

// Checks the address for instructions that take only global memory: the host backend reports other addresses.
DEVICE void expect_global(const void* address) {
#if PYOPS_HOST
    host::expect_global(address);
#endif
}

// Prefetches the line of memory at `address` into L2. The whole device shares L2, so a later load still sees writes of
// the previous kernel to the line. Therefore a kernel may call this before `await_previous_kernel`.
DEVICE void prefetch_line(const void* address) {
    expect_global(address);
#if PYOPS_CUDA
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Prefetches 128 bytes, line number `line`, of the array with elements 0 to `last`, if the array has that line.
template <typename T>
DEVICE void prefetch_part(const T* elements, int64_t last, int64_t line) {
    const int64_t first = line * (128 / int(sizeof(T)));
    if (first <= last) prefetch_line(elements + first);
}

// Prefetches rows that a later kernel reads, or a part of each, into L2: `num_lines` lines of 128 bytes, `row_lines` of
// each row. A thread takes every line at a stride of the threads of the grid.
template <typename T>
DEVICE void prefetch_rows(const T* rows, int num_lines, int row_lines, int64_t stride) {
    const int block = int((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x);
    const int num_threads = int(gridDim.x * gridDim.y * gridDim.z * blockDim.x);
    for (int i = block * int(blockDim.x) + int(threadIdx.x); i < num_lines; i += num_threads) {
        prefetch_line(rows + i / row_lines * stride + i % row_lines * (128 / int(sizeof(T))));
    }
}

// Keeps the compiler from sinking loads above this call below it. Otherwise the compiler moves a load with only a
// conditional use under the condition, where it is issued late.
DEVICE void keep_loads() {
#if !PYOPS_HOST
    asm volatile("" ::: "memory");
#endif
}

// Returns x as an integer opaque to the compiler, so that values derived from it are recomputed where they are used
// instead of being hoisted out of a loop, and x itself is computed before a wait that follows.
DEVICE int made_anew(int x) {
#if PYOPS_CUDA
    asm volatile("" : "+r"(x));
#elif PYOPS_HIP
    asm volatile("" : "+v"(x));
#endif
    return x;
}

// Returns x as bits opaque to the HIP compiler, so that it does not split one mask of several packed fields into a mask
// per field.
DEVICE uint32_t unknown_bits(uint32_t x) {
#if PYOPS_HIP
    asm("" : "+v"(x));
#endif
    return x;
}

// As keep_loads, but also for ptxas, which ignores the asm of keep_loads and moves no load across a warp barrier. Every
// lane of the warp takes part. The barrier costs no instruction.
DEVICE void keep_loads_of_warp() {
#if !PYOPS_HOST
    sync_warp();
#endif
}

// Whether a thread that does not need the `count` elements at `address` loads them all the same, even though another
// thread may be writing them: an unconditional load is issued earlier. The host backend would report the race, so on
// the host the thread does not load and only the address is checked.
template <typename T>
DEVICE bool speculates(const T* address, int count) {
#if PYOPS_HOST
    host::check_load(address, sizeof(T) * count);
    return false;
#else
    return true;
#endif
}

// Streaming accesses, for data that is read once or written once: it is evicted from the caches first.
template <typename W>
DEVICE W load_streaming(const W* address) {
    expect_global(address);
#if PYOPS_CUDA
    return __ldcs(address);
#else
    return *address;
#endif
}

template <typename W>
DEVICE void store_streaming(W* address, W value) {
    expect_global(address);
#if PYOPS_CUDA
    __stcs(address, value);
#else
    *address = value;
#endif
}

// A store to a word that other threads may store to at the same time: one of the values remains.
DEVICE void store_relaxed(uint32_t* address, uint32_t value) {
#if PYOPS_CUDA
    asm volatile("st.relaxed.gpu.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
#else
    atomicExch(address, value);
#endif
}

// Words by which blocks of a launch pass values to each other. What a thread has written, and what others have written
// before a barrier with it, can be read with load_fresh by a block that finds its word: by the thread that finds it,
// and by others after a barrier with that one.
DEVICE uint32_t exchange_acq_rel(uint32_t* address, uint32_t value) {
#if PYOPS_CUDA
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.exch.b32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
#else
    __threadfence();
    const uint32_t before = atomicExch(address, value);
    __threadfence();
#endif
    return before;
}

DEVICE uint32_t load_acquire(uint32_t* address) {
#if PYOPS_CUDA
    uint32_t value;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
#else
    const uint32_t value = atomicAdd(address, 0u);
    __threadfence();
#endif
    return value;
}

// Whether the calling block is the last of `blocks` blocks to arrive at `counter`. The last block can read with
// load_fresh what the other blocks wrote before they arrived. Every thread calls. `counter` is 0 before the first block
// arrives and after the last; `is_last` is in shared memory.
DEVICE bool arrives_last(uint32_t* counter, uint32_t blocks, uint32_t* is_last) {
#if !PYOPS_CUDA
    __threadfence();
#endif
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t before;
#if PYOPS_CUDA
        // After the barrier, a release by one thread releases the writes of the whole block. It is cheaper than a fence
        // by every thread.
        asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
#else
        before = atomicAdd(counter, 1u);
#endif
        *is_last = before == blocks - 1;
        if (before == blocks - 1) atomicExch(counter, 0u);
#if !PYOPS_CUDA
        __threadfence();
#endif
    }
    __syncthreads();
    return *is_last;
}

// A load of a value that another block of the launch may have written.
template <typename T>
DEVICE T load_fresh(const T* address) {
    expect_global(address);
#if PYOPS_CUDA
    return __ldcg(address);
#elif PYOPS_HIP
    // The type of the pointer says global memory: a flat load would also wait for shared memory.
    using word_t = typename word_of<sizeof(T) < 4 ? int(sizeof(T)) : 4>::type;
    T value;
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / sizeof(word_t)); ++i) {
        reinterpret_cast<word_t*>(&value)[i] = ((const volatile __attribute__((address_space(1))) word_t*)address)[i];
    }
    return value;
#else
    if constexpr (sizeof(T) <= 4) {
        return *const_cast<const volatile T*>(address);
    } else {
        T value;
#pragma unroll
        for (int i = 0; i < int(sizeof(T) / 4); ++i) {
            reinterpret_cast<uint32_t*>(&value)[i] = reinterpret_cast<const volatile uint32_t*>(address)[i];
        }
        return value;
    }
#endif
}

// Loads an index. With FRESH, the load may execute before the previous kernel has ended, so it bypasses the L1 cache,
// which would keep a stale value.
template <bool FRESH, typename index_t>
DEVICE index_t load_index(const index_t* address) {
    return FRESH ? load_fresh(address) : *address;
}

// N floats that one block of a launch passes to another through memory that held zeros. A word is a float, and never
// zero, because 0 is passed as -0: a word that is not zero has arrived, and neither block needs a fence. A reader that
// knows from a counter that the other block has issued its stores polls `load` until they arrive. On the host blocks run
// one after another, so the first `load` has them (PASSES_AT_ONCE).
constexpr bool PASSES_AT_ONCE = PYOPS_HOST;
template <int N>
struct alignas(4 * N) Passed {
    static_assert(N == 2 || N == 4);
    uint32_t words[N];

    DEVICE void store(const float (&x)[N]) {
        uint32_t own[N];
        for (int i = 0; i < N; ++i) own[i] = word_of(x[i]);
#if PYOPS_CUDA
        if constexpr (N == 2) {
            asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(words), "r"(own[0]), "r"(own[1])
                         : "memory");
        } else {
            asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(words), "r"(own[0]), "r"(own[1]),
                         "r"(own[2]), "r"(own[3])
                         : "memory");
        }
#elif PYOPS_HIP
        for (int i = 0; i < N; ++i) __scoped_atomic_store_n(words + i, own[i], __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
#else
        for (int i = 0; i < N; ++i) words[i] = own[i];
#endif
    }
    static DEVICE float float_of(uint32_t word) { return __uint_as_float(word); }
    // The words as they are now; 0: that float has not arrived.
    DEVICE void load(uint32_t (&now)[N]) const {
#if PYOPS_CUDA
        if constexpr (N == 2) {
            asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                         : "=r"(now[0]), "=r"(now[1])
                         : "l"(words)
                         : "memory");
        } else {
            asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(now[0]), "=r"(now[1]), "=r"(now[2]), "=r"(now[3])
                         : "l"(words)
                         : "memory");
        }
#elif PYOPS_HIP
        for (int i = 0; i < N; ++i) now[i] = __scoped_atomic_load_n(words + i, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
#else
        for (int i = 0; i < N; ++i) now[i] = words[i];
#endif
    }

private:
    static DEVICE uint32_t word_of(float x) {
        const uint32_t bits = __float_as_uint(x);
        return bits ? bits : 0x80000000u;
    }
};
