// async.cuh: asynchronous copies from global to shared memory (cp.async).
//
// A thread's copies form groups: cp_async adds a copy to the open group, cp_async_commit closes the group, and
// cp_async_wait<N> waits until at most the N newest closed groups are in flight. Then the thread sees the copies of the
// other groups; other threads see them after a barrier. On AMD and before sm_80 copies are synchronous: to hide their
// latency, a thread loads into registers first and stores later (HOLDS_COPIES).

#pragma once
#include "vec.cuh"

// Whether a copy is a load into registers that a thread stores to shared memory later, after the work that hides its
// latency. The emulation of AMD's matrix cores sets this, too.
#if defined(PYOPS_HOST_CORE)
constexpr bool HOLDS_COPIES = true;
#else
constexpr bool HOLDS_COPIES = PYOPS_HIP || (PYOPS_HOST && WARP_SIZE == 64) || PYOPS_TURING;
#endif
#define PYOPS_CP_ASYNC (PYOPS_CUDA && __CUDA_ARCH__ >= 800)

// Loads BYTES bytes (4, 8 or 16) from an address that is a multiple of BYTES. If not `valid`, nothing is read and the
// result is zeros.
template <int BYTES>
DEVICE void hold(uint32_t* words, const void* global, bool valid) {
#if PYOPS_HIP
    // A clang vector type stays in registers; a struct, such as uint4, would go through scratch memory.
    using words_t = uint32_t __attribute__((ext_vector_type(BYTES / 4)));
    words_t loaded = 0;
    if (valid) loaded = *static_cast<const words_t*>(global);
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) words[i] = loaded[i];
#else
    Vec<uint32_t, BYTES / 4> loaded{};
    if (valid) loaded = *static_cast<const Vec<uint32_t, BYTES / 4>*>(global);
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) words[i] = loaded.data[i];
#endif
}

// Stores 16 bytes that `hold` has loaded.
DEVICE void store_held(void* shared, const uint32_t (&words)[4]) {
    Vec<uint32_t, 4> chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.data[i] = words[i];
    *static_cast<Vec<uint32_t, 4>*>(shared) = chunk;
}

// Copies BYTES bytes (4, 8 or 16); both addresses are multiples of BYTES. If not `valid`, nothing is read and zeros are
// written.
template <int BYTES>
DEVICE void cp_async(void* shared, const void* global, bool valid = true) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
#if PYOPS_CP_ASYNC
    const uint32_t to = __cvta_generic_to_shared(shared);
    const uint64_t from = __cvta_generic_to_global(global);
    // The size is selected by a predicate: ptxas makes the predicate an operand of the copy. For a size in a register
    // it also computes an address that depends on the size, in nine instructions.
#define PYOPS_COPY(CACHE)                                                                                  \
    asm volatile("{.reg .pred p; .reg .u32 n; setp.ne.u32 p, %2, 0; selp.u32 n, %3, 0, p; cp.async." CACHE \
                 ".shared.global [%0], [%1], %3, n;}"                                                      \
                 :                                                                                         \
                 : "r"(to), "l"(from), "r"(uint32_t(valid)), "n"(BYTES)                                    \
                 : "memory")
    if constexpr (BYTES == 16) PYOPS_COPY("cg");
    else PYOPS_COPY("ca");
#undef PYOPS_COPY
#elif PYOPS_HOST
    host::copy_async(shared, global, BYTES, valid ? BYTES : 0);
#else
    uint32_t words[BYTES / 4];
    hold<BYTES>(words, global, valid);
    *static_cast<Vec<uint32_t, BYTES / 4>*>(shared) = *reinterpret_cast<Vec<uint32_t, BYTES / 4>*>(words);
#endif
}

// Copies 16 bytes like cp_async, and has L2 fetch the whole 128-byte line, for callers that copy the rest of it soon.
DEVICE void cp_async_of_line(void* shared, const void* global, bool valid) {
#if PYOPS_CP_ASYNC
    const uint32_t to = __cvta_generic_to_shared(shared);
    const uint64_t from = __cvta_generic_to_global(global);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
#else
    cp_async<16>(shared, global, valid);
#endif
}

// Copies like cp_async, from `global` + OFFSET bytes to `shared` + OFFSET bytes, if `wanted`; otherwise does nothing.
// The copy is predicated instead of branched around, and the offset is part of the instruction: the compiler would
// otherwise compute each address separately.
template <int BYTES, int OFFSET>
DEVICE void cp_async_if(bool wanted, void* shared, const void* global) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
#if PYOPS_CP_ASYNC
    const uint32_t to = __cvta_generic_to_shared(shared), is_wanted = wanted;
    const uint64_t from = __cvta_generic_to_global(global);
#define PYOPS_COPY(CACHE, SIZE)                                            \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async." CACHE \
                 ".shared.global [%0 + %3], [%1 + %3], " SIZE ";}"         \
                 :                                                         \
                 : "r"(to), "l"(from), "r"(is_wanted), "n"(OFFSET)         \
                 : "memory")
    if constexpr (BYTES == 16) PYOPS_COPY("cg", "16");
    else if constexpr (BYTES == 8) PYOPS_COPY("ca", "8");
    else PYOPS_COPY("ca", "4");
#undef PYOPS_COPY
#else
    if (wanted) cp_async<BYTES>(static_cast<char*>(shared) + OFFSET, static_cast<const char*>(global) + OFFSET);
#endif
}

DEVICE void cp_async_commit() {
#if PYOPS_CP_ASYNC
    asm volatile("cp.async.commit_group;" : : : "memory");
#elif PYOPS_HOST
    host::commit_copies();
#endif
}

template <int GROUPS_IN_FLIGHT>
DEVICE void cp_async_wait() {
#if PYOPS_CP_ASYNC
    asm volatile("cp.async.wait_group %0;" : : "n"(GROUPS_IN_FLIGHT) : "memory");
#elif PYOPS_HOST
    host::wait_for_copies(GROUPS_IN_FLIGHT);
#endif
}
#undef PYOPS_CP_ASYNC
