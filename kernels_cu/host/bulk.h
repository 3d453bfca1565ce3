// bulk.h: TMA instructions of threads: loads and stores of boxes and of runs of bytes, copies to other blocks.
#pragma once
#include "in_flight.h"

namespace host {

// Raises a fault unless the running thread may access the box in global memory.
inline void check_box(const Box& box, Access kind, const void* pc) {
    box.each_row([&](size_t, uint64_t address, unsigned first, unsigned bytes) {
        if (bytes) check_access(reinterpret_cast<const char*>(address) + first, bytes, kind, pc);
    });
}

// Claims the destination of a load, or of a copy to another block, that an mbarrier of block `rank` will count.
inline unsigned
claim_for_load(unsigned rank, size_t offset, const Box& box, const void* barrier, const char* name, const void* pc) {
    const unsigned index = find_mbarrier(rank, barrier, name, pc), bytes = box.bytes();
    const Mbarrier& counting = barriers[rank].mbarriers[index];
    const Clock own = clock_of(*state.current);
    if (!counting.init_fenced && !fenced_by(own, counting.init_by, counting.init_time)) {
        raise_fault("missing proxy fence", {nullptr, 0, pc, counting.pc},
                    "%s counted by mbarrier #%u, without fence_mbarrier_init() after its initialisation", name, index);
    }
    const uint32_t agent = agent_index(rank, counting.loads);
    check_cells(rank, offset, bytes, Access::WRITE, {agent, counting.phase + 1, own, true, "write by a load"}, pc);
    for (unsigned i = 0; i < bytes; ++i) cell_at(rank, offset + i).claim = Claim::COPY;
    // Only a box has a known swizzle: the layout of a plain run of bytes is up to the kernel.
    const bool is_box = box.map.magic == TENSOR_MAP_MAGIC;
    memset(cells.swizzles[rank] + offset / CHUNK, is_box ? 1 + int(box.map.swizzle) : 0, bytes / CHUNK);
    return index;
}

// Loads a box to the blocks with their bits set; 0 stands for the running block.
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
    const uint32_t agent = agent_index(state.rank, thread.store_agent);
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
    const uint32_t agent = agent_index(rank, counting.loads);
    check_cells(state.rank, offset_of(from), bytes, Access::READ,
                {agent, counting.phase + 1, clock_of(*state.current), true, "read by a copy to another block"}, pc);
    add_bulk({BulkKind::TO_BLOCK, false, rank, offset_of(to), state.rank, index, offset_of(from), state.current->number,
              0, pc, box});
}

// The store lands at once. No schedule needs a delay: a thread that reads the bytes must have waited for the phase that
// counts them.
__attribute__((noinline)) void store_async(void* to, const void* barrier, unsigned rank, const uint32_t (&words)[4]) {
    const void* pc = __builtin_return_address(0);
    const size_t offset = offset_of(to);
    const unsigned index = find_mbarrier(rank, barrier, "store_async", pc);
    if (offset % CHUNK) raise_fault("misaligned access", {nullptr, 0, pc}, "store_async to byte %zu", offset);
    Mbarrier& counting = barriers[rank].mbarriers[index];
    const uint32_t agent = agent_index(rank, counting.loads);
    check_cells(rank, offset, CHUNK, Access::WRITE,
                {agent, counting.phase + 1, clock_of(*state.current), false, "write by store_async"}, pc);
    cells.swizzles[rank][offset / CHUNK] = 0;
    memcpy(shared_of(rank) + offset, words, CHUNK);
    counting.bytes -= CHUNK;
    end_phase_if_complete(rank, index, pc);
}

// The mbarrier will wait for those cp_async copies of the thread that no earlier arrival covers.
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

// Waits for the stores of all groups but the last `groups_in_flight`.
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
    uint32_t& seen = clock_of(thread).seen[agent_index(state.rank, thread.store_agent)];
    if (seen < thread.store_group - groups_in_flight) seen = thread.store_group - groups_in_flight;
}

}  // namespace host
