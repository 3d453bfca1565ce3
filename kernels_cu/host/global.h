// global.h: global memory that knows who touched it in the launch.
//
// Blocks run in no order that a kernel may count on, so what one writes no other may touch. Atomic operations, and reads of
// what they write, may meet; within a block, barriers order accesses as they do for shared memory. A block that meets an
// atomic operation of an earlier one may have waited for what that block wrote: from there on nothing that it does is held
// against the blocks before it.
//
// Barriers of a cluster order accesses of its blocks.
//
// The record of a byte lives in a page of records, found by the number of its page of memory. Epochs never repeat, so
// records of earlier launches are told by their age and nothing is cleared between two.
#pragma once
#include "cluster.h"

namespace host {

struct Records {
    uintptr_t page;
    Touches bytes[PAGE];
};
constexpr size_t MOST_PAGES = 1 << 16;  // a power of two; half of them are used before all are dropped

struct Global {
    Records** table;  // of MOST_PAGES, by open addressing
    size_t num_pages;
    Records* recent;
};
inline Global global_memory;

inline void drop_records() {
    for (size_t i = 0; i < MOST_PAGES; ++i) {
        if (global_memory.table[i]) munmap(global_memory.table[i], sizeof(Records));
        global_memory.table[i] = nullptr;
    }
    global_memory.num_pages = 0;
    global_memory.recent = nullptr;
}

// Epochs are few enough to be told apart for another launch.
inline void renew_epochs() {
    if (memory.epoch <= MOST_EPOCHS && memory.reserved <= MOST_EPOCHS) return;
    if (global_memory.table) drop_records();
    memory_release();
    memory.epoch = memory.reserved = 0;
}

// The records of a page; null if there is no memory for them.
inline Records* records_of(uintptr_t page) {
    Global& global = global_memory;
    if (global.recent && global.recent->page == page) return global.recent;
    if (!global.table) global.table = reinterpret_cast<Records**>(map_pages(MOST_PAGES * sizeof(Records*)));
    if (!global.table) return nullptr;
    if (global.num_pages >= MOST_PAGES / 2) drop_records();
    size_t slot = page * 0x9e3779b97f4a7c15u >> 48;
    while (global.table[slot] && global.table[slot]->page != page) slot = (slot + 1) % MOST_PAGES;
    if (!global.table[slot]) {
        auto* made = reinterpret_cast<Records*>(map_pages(sizeof(Records)));
        if (!made) return nullptr;
        made->page = page;
        global.table[slot] = made;
        ++global.num_pages;
    }
    return global.recent = global.table[slot];
}

[[noreturn]] inline void global_race(Access kind, const char* before, bool same_block, uint16_t other, const void* pc) {
    const Where where = {nullptr, 0, pc, nullptr};
    if (!same_block) {
        raise_fault("global memory race", where, "%s of global memory that another block has %s", verb_of(kind), before);
    }
    const Index& index = threads[other].index;
    raise_fault("global memory race", where, "%s of global memory that thread (%u, %u, %u) has %s since the last barrier",
                verb_of(kind), index.x, index.y, index.z, before);
}

// Whether another block of the cluster has passed its last barrier since.
inline bool before_barrier_of_cluster(uint32_t epoch) {
    const uint32_t since = epoch - cluster[0].first_epoch;
    return since < state.launch.cluster * MOST_BARRIERS && state.launch.cluster > 1 && epoch <= cluster[since / MOST_BARRIERS].barrier_epoch;
}

inline void check_global(const char* address, size_t bytes, Access kind, const void* pc) {
    if (address >= scheduler.stacks && address < scheduler.stacks + STACK_BYTES * scheduler.room) return;
    for (const char* at = address; at < address + bytes; ++at) {
        const uintptr_t number = reinterpret_cast<uintptr_t>(at);
        Records* records = records_of(number / PAGE);
        if (!records) return;
        Touches& byte = records->bytes[number % PAGE];
        const bool written = byte.write_epoch >= memory.launch_epoch;
        const bool by_this_block = is_own(byte.write_epoch);
        if (written && kind != Access::WRITE && byte.atomic) {
            if (!by_this_block) memory.synchronised = true;
        } else if (written && by_this_block && !ordered(byte.writer, byte.write_epoch, byte.write_warp_epoch)) {
            global_race(kind, "written", true, byte.writer, pc);
        } else if (written && !by_this_block && !memory.synchronised && !before_barrier_of_cluster(byte.write_epoch)) {
            global_race(kind, "written", false, 0, pc);
        }
        if (kind == Access::READ) {
            record_read(byte);
            continue;
        }
        if (kind == Access::WRITE && byte.read_epoch >= memory.launch_epoch) {
            const bool by_others = (!is_own(byte.read_epoch) && !before_barrier_of_cluster(byte.read_epoch)) || byte.many_blocks_read;
            if (!reads_are_over(byte)) global_race(kind, "read", true, byte.reader, pc);
            if (by_others && !memory.synchronised) global_race(kind, "read", false, 0, pc);
        }
        record_write(byte, kind == Access::ATOMIC);
    }
}

}  // namespace host
