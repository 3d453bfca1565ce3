// global.h: global memory: its bounds, and a record of the last accesses to every byte in the launch.
//
// A kernel may access the tensors and workspaces of its call, and the constants in its own library. Every access is
// checked against their bounds before it happens, so a kernel never reads or writes any other memory.
//
// Within a block, barriers order accesses as they do for shared memory. Between blocks a kernel may rely on no order:
// no block may access a byte that another block writes. There are three exceptions. Atomic operations of two blocks on
// a byte, and reads of bytes that atomic operations have written, are no race. A block that reads or updates a byte
// after an atomic operation of an earlier block may have waited for that block: from then on its accesses are not
// compared with those of earlier blocks. Barriers of a cluster order the accesses of its blocks.
//
// The records of a page of memory fill one page of records, which a hash table finds by the page's number. Epochs never
// repeat: the epoch identifies a record of an earlier launch, and nothing is cleared between launches.
#pragma once
#include <link.h>
#include "cluster.h"
#if PYOPS_HOST_CLOCKED
#include "wgmma.h"
#endif

namespace host {

struct Records {
    uintptr_t page;
    uint32_t (*reads)[MAX_CLUSTER];  // per byte and rank: epoch of the last read; null in a launch of one rank
    Touches bytes[PAGE];
};
constexpr size_t READS_BYTES = sizeof(uint32_t) * MAX_CLUSTER * PAGE;
constexpr size_t MAX_PAGES = 1 << 16;  // a power of two; once half of them are in use, all records are dropped

struct Global {
    Records** table;  // MAX_PAGES slots, open addressing
    size_t num_pages;
    Records* recent;
    const Range* recent_range;  // the range of the launch that held the last access
    Range library;              // addresses of the running kernel's library
};
inline Global global_memory;

// Returns whether the address is on the stack of a thread.
inline bool on_a_stack(const void* address) {
    return size_t(static_cast<const char*>(address) - scheduler.stacks) < STACK_BYTES * scheduler.capacity;
}

// Returns the addresses of the library that holds `code`.
inline Range library_of(const void* code) {
    struct Search {
        uintptr_t code;
        Range found;
    } search = {reinterpret_cast<uintptr_t>(code), {}};
    dl_iterate_phdr(
        [](dl_phdr_info* library, size_t, void* data) -> int {
            Search& search = *static_cast<Search*>(data);
            Range range = {UINTPTR_MAX, 0};
            for (int i = 0; i < library->dlpi_phnum; ++i) {
                const auto& segment = library->dlpi_phdr[i];
                if (segment.p_type != PT_LOAD) continue;
                const uintptr_t begin = library->dlpi_addr + segment.p_vaddr, end = begin + segment.p_memsz;
                if (begin < range.begin) range.begin = begin;
                if (end > range.end) range.end = end;
            }
            if (!range.holds(search.code, 1)) return 0;
            search.found = range;
            return 1;
        },
        &search);
    return search.found;
}

inline void global_begin_launch() {
    Global& global = global_memory;
    global.recent_range = nullptr;
    const void* entry = reinterpret_cast<const void*>(state.entry);
    if (!global.library.holds(reinterpret_cast<uintptr_t>(entry), 1)) global.library = library_of(entry);
}

// Raises a fault unless the running kernel may access these bytes. Accesses to flags are not checked for their order.
inline void check_bounds(const char* address, size_t bytes, Access kind, const void* pc, bool is_flag) {
    Global& global = global_memory;
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (bytes == 0 || (global.recent_range && global.recent_range->holds(at, bytes))) return;
    for (uint32_t i = 0; i < state.launch.num_ranges; ++i) {
        if (!state.launch.ranges[i].holds(at, bytes)) continue;
        if (state.launch.num_ranks) {
            const uint32_t owner = state.launch.owners[i];
            if ((owner & OWNER) == state.rank) return;
            if (owner & PRIVATE) continue;
            if (!is_flag) check_owner(owner, kind, pc);
            return;
        }
        global.recent_range = state.launch.ranges + i;
        return;
    }
    if (global.library.holds(at, bytes)) return;
    if (in_arena(address)) {
        raise_fault("out-of-bounds shared access", {nullptr, 0, pc}, "%s beside shared memory", verb_of(kind));
    }
    raise_fault("out-of-bounds global access", {nullptr, 0, pc, nullptr, at}, "%s of %zu bytes at 0x%zx", verb_of(kind),
                bytes, size_t(at));
}

__attribute__((noinline)) void check_load(const void* address, size_t bytes) {
    state.asked_pc = __builtin_return_address(0);
    check_bounds(static_cast<const char*>(address), bytes, Access::READ, state.asked_pc);
}

inline void check_space(const void* address, const void* pc) {
    const bool is_shared = in_arena(address);
    if (!is_shared && !on_a_stack(address)) return;
    raise_fault("wrong address space", {nullptr, 0, pc},
                "an address of %s memory, where the instruction takes global ones", is_shared ? "shared" : "local");
}

__attribute__((noinline)) void expect_global(const void* address) { check_space(address, __builtin_return_address(0)); }

inline void drop_records() {
    for (size_t i = 0; i < MAX_PAGES; ++i) {
        if (!global_memory.table[i]) continue;
        if (global_memory.table[i]->reads) munmap(global_memory.table[i]->reads, READS_BYTES);
        munmap(global_memory.table[i], sizeof(Records));
        global_memory.table[i] = nullptr;
    }
    global_memory.num_pages = 0;
    global_memory.recent = nullptr;
}

// Runs before a launch: starts again at epoch 0, without records, if too few epochs are left for the launch.
inline void renew_epochs() {
    if (memory.epoch <= MAX_EPOCHS && memory.reserved <= MAX_EPOCHS) return;
    if (global_memory.table) drop_records();
    memory_release();
    memory.epoch = memory.reserved = 0;
}

// Returns the records of a page; null if no memory is left for them.
inline Records* records_of(uintptr_t page) {
    Global& global = global_memory;
    if (global.recent && global.recent->page == page) return global.recent;
    if (!global.table) global.table = reinterpret_cast<Records**>(map_pages(MAX_PAGES * sizeof(Records*)));
    if (!global.table) return nullptr;
    if (global.num_pages >= MAX_PAGES / 2) drop_records();
    size_t slot = page * 0x9e3779b97f4a7c15u >> 48;
    while (global.table[slot] && global.table[slot]->page != page) slot = (slot + 1) % MAX_PAGES;
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
        raise_fault("global memory race", where, "%s of global memory that another block has %s", verb_of(kind),
                    before);
    }
    raise_fault("global memory race", where, "%s of global memory that %s has %s since the last barrier", verb_of(kind),
                name_of(other).text, before);
}

// Returns whether the access at `epoch` was by a block of the running cluster, before the last cluster barrier.
inline bool before_barrier_of_cluster(uint32_t epoch) {
    const uint32_t offset = epoch - cluster[0].first_epoch;
    return offset < state.launch.cluster * MAX_BARRIERS && state.launch.cluster > 1 &&
           epoch <= cluster[offset / MAX_BARRIERS].barrier_epoch;
}

// Checks an access of the running thread to a byte of global memory against its record, and records the access. In a
// launch of several ranks, `reads` has the epoch of each rank's last read.
inline void check_byte(Touches& byte, uint32_t* reads, Access kind, const void* pc) {
    const bool written = byte.write_epoch >= memory.launch_epoch;
    if (written) {
        const bool by_this_block = is_own(byte.write_epoch);
        if (kind != Access::WRITE && byte.atomic) {
            if (!by_this_block) memory.synchronised = true;
        } else if (by_this_block && !ordered(byte.writer, byte.write_epoch, byte.write_warp_epoch)) {
            global_race(kind, "written", true, byte.writer, pc);
        } else if (!by_this_block && reads) {
            if (!flags_tell_of(Access::WRITE, byte.write_epoch)) missing_flag(kind, byte.write_epoch, "written", pc);
        } else if (!by_this_block && !memory.synchronised && !before_barrier_of_cluster(byte.write_epoch)) {
            global_race(kind, "written", false, 0, pc);
        }
    }
    for (unsigned rank = 0; reads && kind != Access::READ && rank < state.launch.num_ranks; ++rank) {
        const bool concerns = reads[rank] >= memory.launch_epoch && !is_own(reads[rank]);
        if (concerns && !flags_tell_of(Access::READ, reads[rank])) missing_flag(kind, reads[rank], "read", pc);
    }
    if (reads && kind == Access::READ) reads[state.rank] = memory.epoch;
    if (kind == Access::READ) return record_read(byte);
    if (kind == Access::WRITE && byte.read_epoch >= memory.launch_epoch) {
        const bool by_others =
            (!is_own(byte.read_epoch) && !before_barrier_of_cluster(byte.read_epoch)) || byte.several_blocks_read;
        if (!reads_are_over(byte)) global_race(kind, "read", true, byte.reader, pc);
        if (by_others && !memory.synchronised && !reads) global_race(kind, "read", false, 0, pc);
    }
    record_write(byte, kind == Access::ATOMIC);
}

// Checks an access of the running thread to global memory against bounds and records, and records it. Raises a fault.
inline void check_global(const char* address, size_t bytes, Access kind, const void* pc) {
    if constexpr (CLOCKED) {
        if (on_a_stack(address)) return check_registers(address, bytes, kind, pc);
    }
    check_bounds(address, bytes, kind, pc);
    const uintptr_t end = reinterpret_cast<uintptr_t>(address) + bytes;
    for (uintptr_t at = end - bytes; at < end;) {
        Records* records = records_of(at / PAGE);
        if (!records) return;
        const bool by_ranks = state.launch.num_ranks != 0;
        if (by_ranks && !records->reads) {
            records->reads = reinterpret_cast<uint32_t (*)[MAX_CLUSTER]>(map_pages(READS_BYTES));
            if (!records->reads) return;
        }
        const uintptr_t end_of_page = (at / PAGE + 1) * PAGE, stop = end < end_of_page ? end : end_of_page;
        Touches* bytes = records->bytes + at % PAGE;
        if (by_ranks) {
            for (size_t i = 0; i < stop - at; ++i) check_byte(bytes[i], records->reads[at % PAGE + i], kind, pc);
        } else {
            check_records(bytes, stop - at, [&](Touches& byte) { check_byte(byte, nullptr, kind, pc); });
        }
        at = stop;
    }
}

}  // namespace host
