// bulk.h: copies in flight by the copy engine: loads and stores of boxes and runs of bytes, copies to other blocks.
//
// A load lands at one of several times, by the schedule: at once (GREEDY); when no thread can run, the oldest (FIFO) or
// the newest (REVERSED) first; or at any time (SHUFFLED). Until then its bytes of shared memory are claimed. A store
// reads shared memory when it is waited for, no sooner. So do cp_async that an mbarrier waits for: they land as loads do.
#pragma once
#include "boxes.h"

namespace host {

constexpr unsigned MAX_BULK = 1024;  // in flight in a cluster

enum class BulkKind : uint8_t { LOAD, STORE, TO_BLOCK, ARRIVAL };

struct Bulk {
    BulkKind kind;
    bool landed;                // a store, which stays until it is waited for
    unsigned rank;              // of the block that is written to or, by a store, read
    size_t offset;              // in the shared memory of that block
    unsigned from_rank, index;  // TO_BLOCK: the block that is read; the mbarrier of block `rank`
    size_t from_offset;
    unsigned thread, group;  // that asked for it; STORE: the group of stores; ARRIVAL: its number
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

// Move the bytes of a load or a store.
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

// Carry out the cp_async that an mbarrier waits for by this arrival.
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
            cell.writer = place_of_agent(one.rank, barrier.copies);
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

// Land one of the copies in flight that are no stores. Returns whether there was one.
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

// The same, now and then, while threads can run.
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

// Raises a fault unless the running thread may access the box in global memory.
inline void check_box(const Box& box, Access kind, const void* pc) {
    box.each_row([&](size_t, uint64_t address, unsigned first, unsigned bytes) {
        if (bytes) check_access(reinterpret_cast<const char*>(address) + first, bytes, kind, pc);
    });
}

// A load, or a copy to another block, is about to be counted by an mbarrier of block `rank`: claim the bytes it writes.
inline unsigned
claim_for_load(unsigned rank, size_t offset, const Box& box, const void* barrier, const char* name, const void* pc) {
    const unsigned index = find_mbarrier(rank, barrier, name, pc), bytes = box.bytes();
    const Mbarrier& counting = barriers[rank].mbarriers[index];
    const Clock own = clock_of(*state.current);
    if (!counting.init_fenced && !fenced_by(own, counting.init_by, counting.init_time)) {
        raise_fault("missing proxy fence", {nullptr, 0, pc, counting.pc},
                    "%s counted by mbarrier #%u, without fence_mbarrier_init() after its initialisation", name, index);
    }
    const uint32_t agent = place_of_agent(rank, counting.loads);
    check_cells(rank, offset, bytes, Access::WRITE, {agent, counting.phase + 1, own, true, "write by a load"}, pc);
    for (unsigned i = 0; i < bytes; ++i) cell_at(rank, offset + i).claim = Claim::COPY;
    // Nobody knows how the bytes of a run are swizzled.
    const bool is_box = box.map.magic == TENSOR_MAP_MAGIC;
    memset(cells.swizzles[rank] + offset / CHUNK, is_box ? 1 + int(box.map.swizzle) : 0, bytes / CHUNK);
    return index;
}

// Load a box to the blocks whose bits are set; 0 stands for the running block.
inline void
load(const Box& box, size_t offset, const void* barrier, unsigned blocks, const char* name, const void* pc) {
    check_box(box, Access::READ, pc);
    if (!blocks) blocks = 1u << state.rank;
    for (unsigned rank = 0; blocks; ++rank, blocks >>= 1) {
        if (!(blocks & 1)) continue;
        const unsigned index = claim_for_load(rank, offset, box, barrier, name, pc);
        add_bulk({BulkKind::LOAD, false, rank, offset, 0, index, 0, state.current->number, 0, pc, box});
    }
}

inline void store(const Box& box, size_t offset, const char* name, const void* pc) {
    Thread& thread = *state.current;
    if (thread.store_agent < 0) thread.store_agent = new_agent(state.rank, AgentKind::STORES, thread.number);
    const uint32_t agent = place_of_agent(state.rank, thread.store_agent);
    check_cells(state.rank, offset, box.bytes(), Access::READ,
                {agent, thread.store_group + 1, clock_of(thread), true, name}, pc);
    check_box(box, Access::WRITE, pc);
    add_bulk({BulkKind::STORE, false, state.rank, offset, 0, 0, 0, thread.number, thread.store_group, pc, box});
}

inline size_t offset_of(const void* shared) { return static_cast<const char*>(shared) - memory.shared; }

__attribute__((noinline)) void tma_load(void* to, const void* map, const void* barrier, const int* at, unsigned rank) {
    const void* pc = __builtin_return_address(0);
    load(box_of(map, at, rank, offset_of(to), "tma_load", pc), offset_of(to), barrier, 0, "tma_load", pc);
}

__attribute__((noinline)) void
tma_load_multicast(void* to, const void* map, const void* barrier, const int* at, unsigned rank, unsigned blocks) {
    const void* pc = __builtin_return_address(0);
    const char* name = "tma_load_multicast";
    load(box_of(map, at, rank, offset_of(to), name, pc), offset_of(to), barrier, blocks, name, pc);
}

__attribute__((noinline)) void bulk_load(void* to, const void* from, unsigned bytes, const void* barrier) {
    const void* pc = __builtin_return_address(0);
    load(run_of(from, bytes, offset_of(to), "bulk_load", pc), offset_of(to), barrier, 0, "bulk_load", pc);
}

__attribute__((noinline)) void
bulk_load_multicast(void* to, const void* from, unsigned bytes, const void* barrier, unsigned blocks) {
    const void* pc = __builtin_return_address(0);
    const char* name = "bulk_load_multicast";
    load(run_of(from, bytes, offset_of(to), name, pc), offset_of(to), barrier, blocks, name, pc);
}

__attribute__((noinline)) void tma_store(const void* map, const void* from, const int* at, unsigned rank) {
    const void* pc = __builtin_return_address(0);
    store(box_of(map, at, rank, offset_of(from), "tma_store", pc), offset_of(from), "read by a TMA store", pc);
}

__attribute__((noinline)) void bulk_store(void* to, const void* from, unsigned bytes) {
    const void* pc = __builtin_return_address(0);
    store(run_of(to, bytes, offset_of(from), "bulk_store", pc), offset_of(from), "read by a bulk store", pc);
}

__attribute__((noinline)) void
bulk_copy_to_block(void* to, const void* from, unsigned bytes, const void* barrier, unsigned rank) {
    const void* pc = __builtin_return_address(0);
    const Box box = run_of(from, bytes, offset_of(to), "bulk_copy_to_block", pc);
    const unsigned index = claim_for_load(rank, offset_of(to), box, barrier, "bulk_copy_to_block", pc);
    const Mbarrier& counting = barriers[rank].mbarriers[index];
    const uint32_t agent = place_of_agent(rank, counting.loads);
    check_cells(state.rank, offset_of(from), bytes, Access::READ,
                {agent, counting.phase + 1, clock_of(*state.current), true, "read by a copy to another block"}, pc);
    add_bulk({BulkKind::TO_BLOCK, false, rank, offset_of(to), state.rank, index, offset_of(from), state.current->number,
              0, pc, box});
}

// It lands at once: whatever the schedule, a thread that reads the bytes must have waited for the phase that counts them.
__attribute__((noinline)) void store_async(void* to, const void* barrier, unsigned rank, const uint32_t (&words)[4]) {
    const void* pc = __builtin_return_address(0);
    const size_t offset = offset_of(to);
    const unsigned index = find_mbarrier(rank, barrier, "store_async", pc);
    if (offset % CHUNK) raise_fault("misaligned access", {nullptr, 0, pc}, "store_async to byte %zu", offset);
    Mbarrier& counting = barriers[rank].mbarriers[index];
    const uint32_t agent = place_of_agent(rank, counting.loads);
    check_cells(rank, offset, CHUNK, Access::WRITE,
                {agent, counting.phase + 1, clock_of(*state.current), false, "write by store_async"}, pc);
    cells.swizzles[rank][offset / CHUNK] = 0;
    memcpy(shared_of(rank) + offset, words, CHUNK);
    counting.bytes -= CHUNK;
    end_phase_if_complete(rank, index, pc);
}

// The mbarrier waits for the cp_async of the thread that no earlier arrival waits for.
__attribute__((noinline)) void copies_arrive(const void* address) {
    const void* pc = __builtin_return_address(0);
    Thread& thread = *state.current;
    const unsigned index = find_mbarrier(state.rank, address, "cp_async_mbarrier_arrive_noinc", pc);
    Mbarrier& barrier = barriers[state.rank].mbarriers[index];
    if (barrier.copies < 0) barrier.copies = new_agent(state.rank, AgentKind::THREAD_COPIES, index);
    const unsigned arrival = ++thread.num_arrivals;
    for (unsigned i = 0; i < thread.num_copies; ++i) {
        Copy& copy = copies[state.rank][thread.number][i];
        if (!copy.arrival) copy.arrival = arrival;
    }
    add_bulk({BulkKind::ARRIVAL, false, state.rank, 0, 0, index, 0, thread.number, arrival, pc, {}});
}

__attribute__((noinline)) void bulk_commit() { ++state.current->store_group; }

// Wait for the stores of all groups but the last `groups_in_flight`.
__attribute__((noinline)) void bulk_wait(unsigned groups_in_flight) {
    Thread& thread = *state.current;
    for (unsigned i = 0; i < bulk.count;) {
        const Bulk& one = bulk.list[i];
        const bool own = one.kind == BulkKind::STORE && one.rank == state.rank && one.thread == thread.number;
        if (!own || one.group + groups_in_flight >= thread.store_group) {
            ++i;
            continue;
        }
        if (!one.landed) land(i);
        remove_bulk(i);
    }
    if (thread.store_agent < 0 || thread.store_group <= groups_in_flight) return;
    uint32_t& seen = clock_of(thread).seen[place_of_agent(state.rank, thread.store_agent)];
    if (seen < thread.store_group - groups_in_flight) seen = thread.store_group - groups_in_flight;
}

// The running thread exits. Its cp_async that an mbarrier waits for go on.
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

// The block `rank` has ended: no copy may use its shared memory any more.
inline void check_copies_at_end(unsigned rank) {
    for (unsigned i = 0; i < bulk.count; ++i) {
        const Bulk& one = bulk.list[i];
        if (one.rank != rank && !(one.kind == BulkKind::TO_BLOCK && one.from_rank == rank)) continue;
        raise_fault("async copy not waited for", {nullptr, 0, one.pc},
                    "the block ends before a copy from or to its shared memory has landed");
    }
}

}  // namespace host
