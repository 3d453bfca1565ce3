// tma.cuh: copies between global and shared memory by the copy engine (TMA): boxes of tensors, and runs of bytes.
//
// A plan gives a parameter `const __grid_constant__ TensorMap name_map` a TensorMap: the tensor, the box, and how rows
// of the box are swizzled. Coordinates count elements from the fastest dimension on: x, y, z, w, v. Of a box, what lies
// outside the tensor is loaded as zeros and is not stored; it counts among the bytes of a load all the same.
//
// A swizzle permutes the 16-byte chunks of shared memory: bits 4 to 6 of a chunk's address are combined by exclusive
// or with bits 7 to 9 (128 bytes); bits 4 and 5 with bits 7 and 8 (64 bytes); bit 4 with bit 7 (32 bytes). A row of a
// swizzled box is no longer than the swizzle.
//
// One thread starts a copy. An mbarrier counts the bytes of a load: mbarrier_arrive_expect_tx(barrier, bytes) by one
// thread, mbarrier_wait by those that read. Stores form groups of the thread that starts them, as cp_async does.
// Addresses of shared memory are multiples of 128 for boxes (of 1024, 512 and 256 where a box that begins there is
// swizzled by 128, 64 and 32 bytes), of 16 for bytes.
#pragma once
#include "barrier.cuh"

struct alignas(64) TensorMap { uint64_t words[16]; };

// Offset of byte `column` of row `row` in a box of rows of 128 bytes, swizzled by 128 bytes.
DEVICE int swizzle_128b(int row, int column) { return row * 128 + ((column >> 4 ^ row) & 7) * 16 + column % 16; }

// Offset of the 16 bytes `chunk` of a row in a box whose rows are swizzled by their size.
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

// Loads a box to the address of `to` in each block of the cluster whose bit is set in `blocks`. The mbarrier that each
// of them has at the address of `barrier` counts the bytes.
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

// Stores a box. The threads that wrote it call fence_proxy_async() before. It may be written again after
// tma_store_wait_read; the thread waits for its stores by one of the waits before it exits.
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

// Closes the group of stores that the thread has started since the last call.
DEVICE void tma_store_commit() {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#elif PYOPS_HOST
    host::bulk_commit();
#endif
}

// Waits until at most the GROUPS_IN_FLIGHT newest groups of the thread have yet to read shared memory.
template <int GROUPS_IN_FLIGHT>
DEVICE void tma_store_wait_read() {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS_IN_FLIGHT) : "memory");
#elif PYOPS_HOST
    host::bulk_wait(GROUPS_IN_FLIGHT);
#endif
}

// The same, and until the other groups have been written to global memory.
template <int GROUPS_IN_FLIGHT>
DEVICE void tma_store_wait() {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(GROUPS_IN_FLIGHT) : "memory");
#elif PYOPS_HOST
    host::bulk_wait(GROUPS_IN_FLIGHT);
#endif
}

// Brings a box into the L2 cache.
DEVICE void tma_prefetch(const TensorMap* map, int x, int y, int z) {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y),
                 "r"(z)
                 : "memory");
#endif
}

// Copies of `bytes` bytes; addresses and `bytes` are multiples of 16.

// Loads from global memory.
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

// Loads to the blocks of the cluster whose bits are set in `blocks`, as tma_load_multicast does.
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

// Stores to global memory, as one of the thread's groups of stores (tma_store_commit, tma_store_wait).
DEVICE void bulk_store(void* to, const void* from, uint32_t bytes) {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
#elif PYOPS_HOST
    host::bulk_store(to, from, bytes);
#endif
}

// Copies shared memory of this block to the address of `to` in block `rank` of the cluster. The mbarrier that the other
// block has at the address of `barrier` counts the bytes; a wait there tells that `from` has been read, too.
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

// Brings global memory into the L2 cache.
DEVICE void bulk_prefetch(const void* from, uint32_t bytes) {
#if PYOPS_CUDA
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
#endif
}
