// memory.h: shared memory, with a record of the last accesses to every byte (records.h).
//
// Each block of a cluster has an arena: a range of addresses between unmapped pages. Static arrays are at its start,
// with gaps between them; dynamic shared memory is at its end. The record of a byte holds its last write and last
// reads, and their times. Under every schedule, the records reveal reads of bytes never written, accesses of two
// threads that no barrier orders (races), and accesses to bytes that an asynchronous copy has yet to write.
//
// Time is counted in epochs. Every barrier of the block begins a new epoch of the block; every barrier of a warp begins
// a new epoch of the warp. Epochs of blocks never repeat. The blocks of a cluster run interleaved, so each of them has
// a range of epochs reserved for it.
#pragma once
#include <string.h>
#include <sys/mman.h>
#include "clocked.h"

namespace host {

constexpr size_t PAGE = 4096;
constexpr size_t STATIC_BYTES = 256 * 1024, DYNAMIC_BYTES = 256 * 1024;
constexpr size_t GAP = 128;  // bytes between two static arrays
constexpr size_t SHARED_BYTES = STATIC_BYTES + DYNAMIC_BYTES;
constexpr size_t ARENA_BYTES = SHARED_BYTES + 2 * PAGE;  // the first and the last page are unmapped
constexpr uint32_t MAX_BARRIERS = 1024;                  // epochs of each block of a cluster
constexpr uint32_t MAX_EPOCHS = UINT32_MAX / 2;          // epochs of any other block; after more, renew_epochs

// The last accesses to a byte: the threads and the times.
struct Touches {
    uint32_t write_epoch, read_epoch;            // epochs of the block; 0: never accessed
    uint32_t write_warp_epoch, read_warp_epoch;  // epochs of the warps of `writer` and `reader`
    uint16_t writer, reader;
    bool atomic;               // the last write was an atomic operation
    bool several_readers;      // other threads of the reader's warp have read in the same epoch of block and warp
    bool several_warps_read;   // threads of other warps have read in the same epoch of the block
    bool several_blocks_read;  // blocks before the reader's block have read in the same launch
};

struct Byte : Touches {
    const void *write_pc, *read_pc;
    uint32_t phase;   // state.phase when another block of the cluster last read the byte
    uint16_t copier;  // 1 + the thread with an asynchronous copy in flight to the byte; 0: no such copy
    bool allocated;
};

struct Memory {
    char* arenas;
    Byte* records;  // SHARED_BYTES records for each arena
    unsigned num_arenas;
    char* shared;  // SHARED_BYTES in the arena of the running block
    Byte* bytes;   // records of these bytes
    size_t static_used;
    char* dynamic;
    uint32_t epoch, first_epoch, launch_epoch;  // now; at the start of the block; at the start of the launch
    uint32_t max_epochs;                        // number of epochs after first_epoch that the block may use
    uint32_t reserved;                          // the last epoch reserved for a block of a cluster
    bool synchronised;                          // the block has met an atomic operation of an earlier block
    uint32_t warp_epoch[MAX_THREADS / 32];
};
inline Memory memory;

// Returns whether the address is in a shared memory arena, unmapped pages included.
inline bool in_arena(const void* address) {
    return size_t(static_cast<const char*>(address) - memory.arenas) < ARENA_BYTES * memory.num_arenas;
}

inline char* map_pages(size_t bytes) {
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return pages == MAP_FAILED ? nullptr : static_cast<char*>(pages);
}

inline void memory_release() {
    if (memory.num_arenas) {
        munmap(memory.arenas, ARENA_BYTES * memory.num_arenas);
        munmap(memory.records, SHARED_BYTES * sizeof(Byte) * memory.num_arenas);
    }
    memory.num_arenas = 0;
    memory.static_used = 0;
    memory.dynamic = nullptr;
}

inline bool memory_init(unsigned num_arenas) {
    if (memory.num_arenas >= num_arenas) return true;
    memory_release();
    memory.arenas = map_pages(ARENA_BYTES * num_arenas);
    memory.records = reinterpret_cast<Byte*>(map_pages(SHARED_BYTES * sizeof(Byte) * num_arenas));
    if (!memory.arenas || !memory.records) return false;
    for (unsigned rank = 0; rank < num_arenas; ++rank) {
        mprotect(memory.arenas + ARENA_BYTES * rank, PAGE, PROT_NONE);
        mprotect(memory.arenas + ARENA_BYTES * (rank + 1) - PAGE, PAGE, PROT_NONE);
    }
    memory.num_arenas = num_arenas;
    return true;
}

// Makes block `rank` of the cluster the running block: `shared`, `bytes` and `dynamic` point into its arena.
inline void memory_enter(unsigned rank) {
    const size_t dynamic = memory.dynamic ? memory.dynamic - memory.shared : 0;
    memory.shared = memory.arenas + ARENA_BYTES * rank + PAGE;
    memory.bytes = memory.records + SHARED_BYTES * rank;
    memory.dynamic = memory.shared + dynamic;
}

// Allows accesses to a range of every arena, and fills the range with set bits.
inline void allocate(size_t offset, size_t bytes) {
    if constexpr (CLOCKED) allocate_clocked(offset, bytes);
    for (unsigned rank = 0; rank < state.launch.cluster; ++rank) {
        for (size_t i = offset; !CLOCKED && i < offset + bytes; ++i) {
            memory.records[SHARED_BYTES * rank + i].allocated = true;
            memory.records[SHARED_BYTES * rank + i].copier = 0;
        }
        memset(memory.arenas + ARENA_BYTES * rank + PAGE + offset, 0xff, bytes);
    }
}

inline void memory_begin_launch() {
    for (unsigned rank = 0; !CLOCKED && rank < memory.num_arenas; ++rank) {
        Byte* bytes = memory.records + SHARED_BYTES * rank;
        for (size_t i = 0; i < memory.static_used; ++i) bytes[i].allocated = false;
        for (size_t i = memory.dynamic ? memory.dynamic - memory.shared : SHARED_BYTES; i < SHARED_BYTES; ++i) {
            bytes[i].allocated = false;
        }
    }
    memory.static_used = 0;
    // A fault may have ended the last launch within a cluster, before its blocks used all of their reserved epochs.
    if (memory.epoch < memory.reserved) memory.epoch = memory.reserved;
    memory.launch_epoch = memory.epoch + 1;
    ++state.phase;
    // Dynamic shared memory ends where the mapping ends, up to alignment: an access after its end hits the unmapped
    // page. In a CLOCKED runtime it begins at a multiple of 1024, which TMA boxes with a swizzle need.
    const size_t offset = (SHARED_BYTES - state.launch.shared_bytes) & ~size_t(CLOCKED ? 1023 : 15);
    memory.dynamic = nullptr;
    memory_enter(0);
    memory.dynamic = memory.shared + offset;
    allocate(offset, state.launch.shared_bytes);
}

inline void next_epoch() {
    if (memory.epoch - memory.first_epoch == memory.max_epochs) {
        raise_fault("bad launch", {}, "a block has more than %u barriers", memory.max_epochs);
    }
    ++memory.epoch;
}

// Gives the running block the epochs first to first + max_epochs.
inline void memory_enter_epochs(uint32_t first, uint32_t max_epochs) {
    memory.first_epoch = memory.epoch = first;
    memory.max_epochs = max_epochs;
    memory.synchronised = false;
}

inline void memory_begin_block() {
    // All bits set are NaN in the float formats: an uninitialised read that no check detects shows in the results.
    memset(memory.shared, 0xff, memory.static_used);
    memset(memory.dynamic, 0xff, state.launch.shared_bytes);
    if constexpr (CLOCKED) return;
    for (size_t i = 0; i < memory.static_used; ++i) memory.bytes[i].copier = 0;
    for (size_t i = 0; i < state.launch.shared_bytes; ++i) memory.bytes[memory.dynamic - memory.shared + i].copier = 0;
}

void* static_shared(Slot& slot, size_t bytes, size_t alignment) {
    if (slot.launch != state.launch_number) {
        const size_t offset = (memory.static_used + GAP + alignment - 1) / alignment * alignment;
        if (offset + bytes + GAP > STATIC_BYTES) {
            raise_fault("too much shared memory", {}, "static arrays fill 256 KiB");
        }
        slot = {state.launch_number, offset};
        memory.static_used = offset + bytes;
        allocate(offset, bytes);
    }
    return memory.shared + slot.offset;
}

void* dynamic_shared() { return memory.dynamic; }

}  // namespace host
