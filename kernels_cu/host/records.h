// records.h: records of accesses to bytes of memory, and whether barriers order a later access after them.
#pragma once
#include "memory.h"

namespace host {

// Returns whether `epoch` belongs to the running block.
inline bool is_own(uint32_t epoch) { return epoch - memory.first_epoch <= memory.max_epochs; }

// Returns whether the thread with this number is in the warp of `thread`.
inline bool same_warp(unsigned number, const Thread& thread) {
    return number - (thread.number - thread.lane) < state.launch.warp_size;
}

// Returns whether a barrier separates the running thread from an access by `thread` of its block at these epochs.
inline bool ordered(uint16_t thread, uint32_t epoch, uint32_t warp_epoch) {
    if (epoch < memory.epoch || thread == state.current->number) return true;
    if constexpr (CLOCKED) return has_seen(thread, warp_epoch);
    return same_warp(thread, *state.current) && warp_epoch < memory.warp_epoch[state.current->warp];
}

// The time of a thread that a record stores next to the epoch of the block.
inline uint32_t warp_time(const Thread& thread) { return CLOCKED ? thread.time : memory.warp_epoch[thread.warp]; }

struct ThreadName { char text[48]; };

// The name of the other thread of a race, for a message. Of several readers only the last one is known, which may be
// the running thread itself.
inline ThreadName name_of(uint16_t other) {
    ThreadName name = {"another thread"};
    const Index& index = threads[other].index;
    if (other != state.current->number) {
        snprintf(name.text, sizeof name.text, "thread (%u, %u, %u)", index.x, index.y, index.z);
    }
    return name;
}

[[noreturn]] inline void
race(const char* now, const char* before, uint16_t other, const void* pc, const void* other_pc) {
    raise_fault("shared memory race", {nullptr, 0, pc, other_pc},
                "%s of shared memory that %s has %s since the last barrier", now, name_of(other).text, before);
}

inline void record_read(Touches& byte) {
    const Thread& thread = *state.current;
    if (byte.read_epoch < memory.launch_epoch) {
        byte.several_blocks_read = false;
    } else if (!is_own(byte.read_epoch)) {
        byte.several_blocks_read = true;
    }
    if (byte.read_epoch != memory.epoch) {
        byte.several_readers = byte.several_warps_read = false;
    } else if (byte.reader != thread.number) {
        if (!same_warp(byte.reader, thread)) byte.several_warps_read = true;
        byte.several_readers = CLOCKED || byte.read_warp_epoch == memory.warp_epoch[thread.warp];
    }
    byte.reader = thread.number;
    byte.read_epoch = memory.epoch;
    byte.read_warp_epoch = warp_time(thread);
}

inline void record_write(Touches& byte, bool atomic) {
    const Thread& thread = *state.current;
    byte.writer = thread.number;
    byte.write_epoch = memory.epoch;
    byte.write_warp_epoch = warp_time(thread);
    byte.atomic = atomic;
}

// Returns whether barriers order a write by the running thread after every read of the byte by its block.
inline bool reads_are_over(const Touches& byte) {
    if (byte.read_epoch != memory.epoch) return true;
    // A record keeps the time of one reader only. With several readers, the clocks cannot be consulted.
    if constexpr (CLOCKED) return byte.several_readers || ordered(byte.reader, byte.read_epoch, byte.read_warp_epoch);
    if (byte.several_warps_read) return false;
    const Thread& thread = *state.current;
    if (same_warp(byte.reader, thread) && byte.read_warp_epoch < memory.warp_epoch[thread.warp]) return true;
    return byte.reader == state.current->number && !byte.several_readers;
}

inline const char* verb_of(Access kind) {
    return kind == Access::READ ? "read" : kind == Access::WRITE ? "write" : "atomic operation";
}

// Defined in global.h.
inline bool on_a_stack(const void* address);
inline void check_global(const char* address, size_t bytes, Access kind, const void* pc);
// Raises a fault unless the address is in global memory, for an instruction that accepts no other. Defined in global.h.
inline void check_space(const void* address, const void* pc);

// Checks an access to consecutive bytes by their records. Most accesses find equal records, as the bytes were accessed
// together before: what the check of the first one finds and records then holds for the others, too.
template <typename Record, typename Check>
inline void check_records(Record* bytes, size_t count, Check check) {
    if (count == 0) return;
    const Record before = bytes[0];
    check(bytes[0]);
    for (size_t i = 1; i < count; ++i) {
        if (memcmp(&bytes[i], &before, sizeof before) == 0) {
            bytes[i] = bytes[0];
        } else {
            check(bytes[i]);
        }
    }
}

// Checks an access of the running thread outside its stack against bounds and records, and records it. Raises a fault.
__attribute__((noinline)) void check_memory(const void* address, size_t bytes, Access kind, const void* pc) {
    const size_t offset = static_cast<const char*>(address) - memory.shared;
    if (!state.current) return;
    if (offset >= SHARED_BYTES) return check_global(static_cast<const char*>(address), bytes, kind, pc);
    if constexpr (CLOCKED) return check_clocked(offset, bytes, kind, pc);
    const char* verb = verb_of(kind);
    const Where where = {nullptr, 0, pc, nullptr};
    const auto outside = [&] {
        raise_fault("out-of-bounds shared access", where, "%s of %zu bytes outside every shared array", verb, bytes);
    };
    const auto check = [&](Byte& byte) {
        if (!byte.allocated) outside();
        if (byte.copier) {
            raise_fault("async copy not waited for", where,
                        "%s of shared memory that an asynchronous copy has yet to write", verb);
        }
        const bool written = byte.write_epoch >= memory.first_epoch;
        if (kind != Access::WRITE && !written) {
            raise_fault("uninitialised shared memory", where, "%s of shared memory that the block has not written",
                        verb);
        }
        const bool both_atomic = kind == Access::ATOMIC && byte.atomic;
        if (written && !both_atomic && !ordered(byte.writer, byte.write_epoch, byte.write_warp_epoch)) {
            race(verb, "written", byte.writer, pc, byte.write_pc);
        }
        if (kind == Access::READ) {
            record_read(byte);
            byte.read_pc = pc;
        } else {
            if (!reads_are_over(byte)) race(verb, "read", byte.reader, pc, byte.read_pc);
            if (byte.phase == state.phase) {
                raise_fault("shared memory race", where,
                            "%s of shared memory that another block of the cluster has read since its last barrier",
                            verb);
            }
            record_write(byte, kind == Access::ATOMIC);
            byte.write_pc = pc;
        }
    };
    const size_t inside = bytes <= SHARED_BYTES - offset ? bytes : SHARED_BYTES - offset;
    check_records(memory.bytes + offset, inside, check);
    if (inside < bytes) outside();
}

// Checks any access of the running thread. Most go to its stack, where only the CLOCKED runtime watches registers.
inline void check_access(const void* address, size_t bytes, Access kind, const void* pc) {
    state.asked_pc = pc;
    if (CLOCKED || !on_a_stack(address)) check_memory(address, bytes, kind, pc);
}

__attribute__((noinline)) void record_access(const void* address, size_t bytes, Access kind) {
    check_access(address, bytes, kind, __builtin_return_address(0));
}

__attribute__((noinline)) void copy_unrecorded(void* to, const void* from, size_t bytes) {
    state.asked_pc = __builtin_return_address(0);
    memcpy(to, from, bytes);
}

}  // namespace host
