// tma.cuh: TMA copies between global and shared memory: boxes of tensors, and contiguous runs of bytes.
//
// A plan passes a TensorMap to a parameter `const __grid_constant__ TensorMap name_map`: the tensor, the box, and the
// swizzle of the rows of the box. Coordinates count elements, the fastest dimension first: x, y, z, w, v. Elements of a
// box outside the tensor are loaded as zeros and are not stored; they count among the bytes of a load all the same.
//
// A swizzle permutes the 16-byte chunks of shared memory: bits 4 to 6 of a chunk's address are combined by exclusive
// or with bits 7 to 9 (128 bytes); bits 4 and 5 with bits 7 and 8 (64 bytes); bit 4 with bit 7 (32 bytes). A row of a
// swizzled box is no longer than the swizzle.
//
// One thread issues a copy. An mbarrier counts the bytes of a load: one thread calls mbarrier_arrive_expect_tx(barrier,
// bytes), and the threads that read the box call mbarrier_wait. Stores form groups of the thread that issues them, as
// cp_async does. Shared memory addresses are multiples of 128 for boxes (of 1024, 512 and 256 where a box swizzled by
// 128, 64 and 32 bytes begins), and multiples of 16 for runs of bytes.
#pragma once
#include "barrier.cuh"

struct alignas(64) TensorMap { uint64_t words[16]; };

// Offset of byte `column` of row `row` in a box of 128-byte rows with the 128-byte swizzle.
DEVICE int swizzle_128b(int row, int column) { return row * 128 + ((column >> 4 ^ row) & 7) * 16 + column % 16; }

// Offset of 16-byte chunk `chunk` of a row in a box with a swizzle as wide as its rows.
template <int ROW_BYTES>
DEVICE int swizzle_chunk(int row, int chunk) {
    return row * ROW_BYTES + (chunk ^ row * ROW_BYTES / 128 % (ROW_BYTES / 16)) * 16;
}

// Loads a box.
#if PYOPS_CUDA
#define PYOPS_TMA_LOAD(RANK, COORDINATES, MULTICAST, MASK, ...)                                                     \
    asm volatile("cp.async.bulk.tensor." RANK ".shared::cluster.global.tile.mbarrier::complete_tx::bytes" MULTICAST \
                 " [%0], [%1, " COORDINATES "], [%2]" MASK ";" ::"r"(shared_address(to)),                           \
                 "l"(map), "r"(shared_address(barrier)), __VA_ARGS__                                                \
                 : "memory")
#endif
DEVICE void tma_load(void* to, const TensorMap* map, uint64_t* barrier, int x, int y) {
#if PYOPS_CUDA
    PYOPS_TMA_LOAD("2d", "{%3, %4}", "", "", "r"(x), "r"(y));
#elif PYOPS_HOST
    const int at[] = {x, y};
    host::tma_load(to, map, barrier, at, 2);
#endif
}
DEVICE void tma_load(void* to, const TensorMap* map, uint64_t* barrier, int x, int y, int z) {
#if PYOPS_CUDA
    PYOPS_TMA_LOAD("3d", "{%3, %4, %5}", "", "", "r"(x), "r"(y), "r"(z));
#elif PYOPS_HOST
    const int at[] = {x, y, z};
    host::tma_load(to, map, barrier, at, 3);
#endif
}
DEVICE void tma_load(void* to, const TensorMap* map, uint64_t* barrier, int x, int y, int z, int w) {
#if PYOPS_CUDA
    PYOPS_TMA_LOAD("4d", "{%3, %4, %5, %6}", "", "", "r"(x), "r"(y), "r"(z), "r"(w));
#elif PYOPS_HOST
    const int at[] = {x, y, z, w};
    host::tma_load(to, map, barrier, at, 4);
#endif
}
DEVICE void tma_load(void* to, const TensorMap* map, uint64_t* barrier, int x, int y, int z, int w, int v) {
#if PYOPS_CUDA
    PYOPS_TMA_LOAD("5d", "{%3, %4, %5, %6, %7}", "", "", "r"(x), "r"(y), "r"(z), "r"(w), "r"(v));
#elif PYOPS_HOST
    const int at[] = {x, y, z, w, v};
    host::tma_load(to, map, barrier, at, 5);
#endif
}

// Loads a box to the address of `to` in each CTA of the cluster that has its bit set in `blocks`. In each of these CTAs
// the mbarrier at the address of `barrier` counts the bytes.
DEVICE void tma_load_multicast(void* to, const TensorMap* map, uint64_t* barrier, uint16_t blocks, int x, int y) {
#if PYOPS_CUDA
    PYOPS_TMA_LOAD("2d", "{%3, %4}", ".multicast::cluster", ", %5", "r"(x), "r"(y), "h"(blocks));
#elif PYOPS_HOST
    const int at[] = {x, y};
    host::tma_load_multicast(to, map, barrier, at, 2, blocks);
#endif
}
DEVICE void
tma_load_multicast(void* to, const TensorMap* map, uint64_t* barrier, uint16_t blocks, int x, int y, int z) {
#if PYOPS_CUDA
    PYOPS_TMA_LOAD("3d", "{%3, %4, %5}", ".multicast::cluster", ", %6", "r"(x), "r"(y), "r"(z), "h"(blocks));
#elif PYOPS_HOST
    const int at[] = {x, y, z};
    host::tma_load_multicast(to, map, barrier, at, 3, blocks);
#endif
}
#undef PYOPS_TMA_LOAD

// Stores a box. The threads that wrote it to shared memory call fence_proxy_async() first. The box may be overwritten
// after tma_store_wait_read; the issuing thread calls one of the two waits before it exits.
DEVICE void tma_store(const TensorMap* map, const void* from, int x, int y) {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y)
                 : "memory");
#elif PYOPS_HOST
    const int at[] = {x, y};
    host::tma_store(map, from, at, 2);
#endif
}
DEVICE void tma_store(const TensorMap* map, const void* from, int x, int y, int z) {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
#elif PYOPS_HOST
    const int at[] = {x, y, z};
    host::tma_store(map, from, at, 3);
#endif
}

// Closes the group of stores that the thread has issued since the last call.
DEVICE void tma_store_commit() {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#elif PYOPS_HOST
    host::bulk_commit();
#endif
}

// Waits until all but the GROUPS_IN_FLIGHT newest groups of the thread have read their shared memory.
template <int GROUPS_IN_FLIGHT>
DEVICE void tma_store_wait_read() {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS_IN_FLIGHT) : "memory");
#elif PYOPS_HOST
    host::bulk_wait(GROUPS_IN_FLIGHT);
#endif
}

// Waits until all but the GROUPS_IN_FLIGHT newest groups have also been written to global memory.
template <int GROUPS_IN_FLIGHT>
DEVICE void tma_store_wait() {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(GROUPS_IN_FLIGHT) : "memory");
#elif PYOPS_HOST
    host::bulk_wait(GROUPS_IN_FLIGHT);
#endif
}

// One thread prefetches tensor maps, parameters of the kernel, so that the first load by each does not wait for it. All
// threads call.
template <typename... Maps>
DEVICE void prefetch_tensor_maps(const Maps&... maps) {
#if PYOPS_CUDA
    if (threadIdx.x != 32) return;
    (..., [](const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }(maps));
#endif
}

// Prefetches a box into the L2 cache.
DEVICE void tma_prefetch(const TensorMap* map, int x, int y, int z) {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y),
                 "r"(z)
                 : "memory");
#endif
}

// The functions below copy `bytes` bytes; addresses and `bytes` are multiples of 16.

// Loads bytes from global memory to shared memory.
DEVICE void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#elif PYOPS_HOST
    host::bulk_load(to, from, bytes, barrier);
#endif
}

// Loads bytes to the CTAs of the cluster that have their bits set in `blocks`, as tma_load_multicast does.
DEVICE void bulk_load_multicast(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint16_t blocks) {
#if PYOPS_CUDA
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier)), "h"(blocks)
        : "memory");
#elif PYOPS_HOST
    host::bulk_load_multicast(to, from, bytes, barrier, blocks);
#endif
}

// Stores bytes to global memory, as one of the thread's groups of stores (tma_store_commit, tma_store_wait).
DEVICE void bulk_store(void* to, const void* from, uint32_t bytes) {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
#elif PYOPS_HOST
    host::bulk_store(to, from, bytes);
#endif
}

// Copies shared memory of this CTA to the address of `to` in CTA `rank` of the cluster. The mbarrier at the address of
// `barrier` in the other CTA counts the bytes; when a wait on it returns, `from` has been read, too.
DEVICE void bulk_copy_to_block(void* to, const void* from, uint32_t bytes, uint64_t* barrier, unsigned rank) {
#if PYOPS_CUDA
    asm volatile(
        "{.reg .b32 remote, counts; mapa.shared::cluster.u32 remote, %0, %4; mapa.shared::cluster.u32 counts, %3, %4; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [remote], [%1], %2, [counts];}" ::"r"(
            shared_address(to)),
        "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank)
        : "memory");
#elif PYOPS_HOST
    host::bulk_copy_to_block(to, from, bytes, barrier, rank);
#endif
}

// Prefetches global memory into the L2 cache.
DEVICE void bulk_prefetch(const void* from, uint32_t bytes) {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
#endif
}
