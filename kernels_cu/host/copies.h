// copies.h: asynchronous copies into shared memory.
//
// copy_async checks and lists a copy; the bytes move when the thread waits for the copy's group. Until then every
// access to the destination is a fault.
#pragma once
#include "records.h"
#if PYOPS_HOST_CLOCKED
#include "cells.h"
#endif

namespace host {

// Marks bytes as the destination of an asynchronous copy of the running thread.
inline void claim_for_copy(size_t offset, unsigned bytes) {
    for (size_t i = offset; i < offset + bytes; ++i) {
#if PYOPS_HOST_CLOCKED
        cell_at(state.rank, i).claim = Claim::COPY;
#else
        memory.bytes[i].copier = 1 + state.current->number;
#endif
    }
}

// Records that the asynchronous copy has written these bytes.
inline void record_copy(size_t offset, unsigned bytes) {
    for (size_t i = offset; i < offset + bytes; ++i) {
#if PYOPS_HOST_CLOCKED
        Cell& cell = cell_at(state.rank, i);
        cell.claim = Claim::NONE;
        cell.write_time = state.current->time;
#else
        memory.bytes[i].copier = 0;
        record_write(memory.bytes[i], false);
#endif
    }
}

__attribute__((noinline)) void copy_async(void* to, const void* from, unsigned bytes, unsigned valid_bytes) {
    Thread& thread = *state.current;
    const void* pc = __builtin_return_address(0);
    const Where where = {nullptr, 0, pc, nullptr};
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes) {
        raise_fault("misaligned access", where, "asynchronous copy of %u bytes between %p and %p", bytes, to, from);
    }
    const size_t offset = static_cast<char*>(to) - memory.shared;
    if (offset >= SHARED_BYTES) raise_fault("out-of-bounds shared access", where, "asynchronous copy to %p", to);
    if (thread.num_copies == MAX_COPIES) raise_fault("async copy not waited for", where, "%u in flight", MAX_COPIES);
    check_access(to, bytes, Access::WRITE, pc);
    claim_for_copy(offset, bytes);
    if (valid_bytes) check_space(from, pc);
    check_access(from, valid_bytes, Access::READ, pc);
    copies[state.rank][thread.number][thread.num_copies++] = {
        static_cast<char*>(to), static_cast<const char*>(from), bytes, valid_bytes, thread.group, 0};
}

void commit_copies() { ++state.current->group; }

inline void carry_out(const Copy& copy) {
    memcpy(copy.to, copy.from, copy.valid_bytes);
    memset(copy.to + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
}

// Performs the copies of all groups but the last `groups_in_flight`.
void wait_for_copies(unsigned groups_in_flight) {
    Thread& thread = *state.current;
    unsigned kept = 0;
    for (unsigned i = 0; i < thread.num_copies; ++i) {
        const Copy copy = copies[state.rank][thread.number][i];
        if (copy.group + groups_in_flight >= thread.group) {
            copies[state.rank][thread.number][kept++] = copy;
            continue;
        }
        carry_out(copy);
        record_copy(copy.to - memory.shared, copy.bytes);
    }
    thread.num_copies = kept;
}

}  // namespace host
