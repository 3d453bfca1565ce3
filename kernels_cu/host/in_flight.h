// in_flight.h: copies in flight: TMA loads and stores, and cp_async copies that an mbarrier waits for.
//
// The schedule decides when a load lands: at once (GREEDY); when no thread can run, the oldest (FIFO) or the newest
// (REVERSED) first; or at a random time (SHUFFLED). Until then its bytes of shared memory are claimed. A store reads
// shared memory only when a thread waits for it; GREEDY, at once. cp_async copies with an mbarrier arrival land as
// loads do.
#pragma once
#include "boxes.h"

namespace host {

constexpr unsigned MAX_BULK = 4096;  // bulk copies in flight in a cluster; 128 threads x 16 stages of cp_async are 2048

enum class BulkKind : uint8_t { LOAD, STORE, TO_BLOCK, ARRIVAL };

struct Bulk {
    BulkKind kind;
    bool landed;                // for stores: the store has happened, and stays listed until a thread waits for it
    unsigned rank;              // the block with the destination or, for a store, the source
    size_t offset;              // offset in the shared memory of that block
    unsigned from_rank, index;  // TO_BLOCK: the source block; index of the mbarrier of block `rank`
    size_t from_offset;
    unsigned thread, group;  // the thread that issued the copy; STORE: its group; ARRIVAL: its number
    const void* pc;
    Box box;
};
struct BulkCopies {
    Bulk list[MAX_BULK];
    unsigned count;
};
inline BulkCopies bulk;

inline Bulk remove_bulk(unsigned number) {
    const Bulk removed = bulk.list[number];
    --bulk.count;
    memmove(bulk.list + number, bulk.list + number + 1, (bulk.count - number) * sizeof(Bulk));
    return removed;
}

inline char* shared_of(unsigned rank) { return memory.arenas + ARENA_BYTES * rank + PAGE; }

// Moves the bytes of a load or a store.
inline void move(const Bulk& one) {
    char* shared = shared_of(one.rank);
    one.box.each_row([&](size_t row, uint64_t address, unsigned first, unsigned bytes) {
        for (unsigned i = 0; i < one.box.pitch(); i += CHUNK) {
            char* here = shared + swizzled(one.offset + row + i, one.box.map.swizzle);
            const unsigned begin = i > first ? i : first;
            const unsigned end = i + CHUNK < first + bytes ? i + CHUNK : first + bytes;
            char* there = reinterpret_cast<char*>(address) + begin;
            if (one.kind == BulkKind::LOAD) memset(here, 0, CHUNK);
            if (begin >= end) continue;
            if (one.kind == BulkKind::LOAD) memcpy(here + (begin - i), there, end - begin);
            else memcpy(there, here + (begin - i), end - begin);
        }
    });
}

// Performs the cp_async copies that this arrival covers.
inline void land_copies_of_thread(const Bulk& one) {
    Thread& thread = all_threads[one.rank][one.thread];
    const Mbarrier& barrier = barriers[one.rank].mbarriers[one.index];
    Copy* list = copies[one.rank][one.thread];
    unsigned kept = 0;
    for (unsigned i = 0; i < thread.num_copies; ++i) {
        const Copy copy = list[i];
        if (copy.arrival != one.group) {
            list[kept++] = copy;
            continue;
        }
        carry_out(copy);
        for (unsigned j = 0; j < copy.bytes; ++j) {
            Cell& cell = cell_at(one.rank, copy.to - shared_of(one.rank) + j);
            cell.claim = Claim::NONE;
            cell.writer = agent_index(one.rank, barrier.copies);
            cell.write_time = barrier.phase + 1;
        }
    }
    thread.num_copies = kept;
}

inline void land(unsigned number) {
    state.asked_pc = bulk.list[number].pc;
    if (bulk.list[number].kind == BulkKind::STORE) {
        bulk.list[number].landed = true;
        return move(bulk.list[number]);
    }
    const Bulk one = remove_bulk(number);
    if (one.kind == BulkKind::ARRIVAL) {
        land_copies_of_thread(one);
        return count_arrival(one.rank, one.index, one.pc);
    }
    const unsigned bytes = one.box.bytes();
    if (one.kind == BulkKind::LOAD) move(one);
    else memcpy(shared_of(one.rank) + one.offset, shared_of(one.from_rank) + one.from_offset, bytes);
    for (unsigned i = 0; i < bytes; ++i) cell_at(one.rank, one.offset + i).claim = Claim::NONE;
    barriers[one.rank].mbarriers[one.index].bytes -= bytes;
    end_phase_if_complete(one.rank, one.index, one.pc);
}

// Lands one copy in flight that is not a store. Returns whether it found one.
inline bool land_copy() {
    unsigned waiting = 0, number = 0;
    for (unsigned i = 0; i < bulk.count; ++i) waiting += bulk.list[i].kind != BulkKind::STORE;
    if (!waiting) return false;
    unsigned chosen = state.launch.order == Order::REVERSED ? waiting - 1 : 0;
    if (state.launch.order == Order::SHUFFLED) chosen = random_number() % waiting;
    while (bulk.list[number].kind == BulkKind::STORE || chosen-- > 0) ++number;
    land(number);
    return true;
}

// Sometimes lands a copy early, while threads can still run.
inline void land_copy_early() {
    if (bulk.count && state.launch.order == Order::SHUFFLED && random_number() % 4 == 0) land_copy();
}

inline bool has_late_copies(unsigned rank, unsigned index, int64_t& bytes, const void*& pc) {
    for (unsigned i = 0; i < bulk.count; ++i) {
        const Bulk& one = bulk.list[i];
        const bool is_load = one.kind == BulkKind::LOAD || one.kind == BulkKind::TO_BLOCK;
        if (!is_load || one.rank != rank || one.index != index) continue;
        bytes += one.box.bytes();
        pc = one.pc;
    }
    return bytes;
}

inline void add_bulk(const Bulk& one) {
    if (bulk.count == MAX_BULK) {
        raise_fault("async copy not waited for", {nullptr, 0, one.pc}, "%u in flight", MAX_BULK);
    }
    bulk.list[bulk.count++] = one;
    if (state.launch.order == Order::GREEDY) land(bulk.count - 1);
}

// The running thread exits. Its cp_async copies with an mbarrier arrival stay in flight.
inline void check_exit() {
    Thread& thread = *state.current;
    for (unsigned i = 0; i < thread.num_copies; ++i) {
        if (copies[state.rank][thread.number][i].arrival) continue;
        raise_fault("async copy not waited for", {}, "the thread exits before its cp_async are waited for");
    }
    for (unsigned i = 0; i < bulk.count; ++i) {
        const Bulk& one = bulk.list[i];
        if (one.kind != BulkKind::STORE || one.rank != state.rank || one.thread != thread.number) continue;
        raise_fault("async copy not waited for", {nullptr, 0, one.pc},
                    "the thread exits before a bulk store has read shared memory: no tma_store_wait");
    }
}

// Block `rank` has ended. Raises a fault if a copy may still use its shared memory.
inline void check_copies_at_end(unsigned rank) {
    for (unsigned i = 0; i < bulk.count; ++i) {
        const Bulk& one = bulk.list[i];
        if (one.rank != rank && !(one.kind == BulkKind::TO_BLOCK && one.from_rank == rank)) continue;
        raise_fault("async copy not waited for", {nullptr, 0, one.pc},
                    "the block ends before a copy from or to its shared memory has landed");
    }
}

}  // namespace host
