// cells.h: shared memory in a CLOCKED runtime. Each byte has a cell with its last write and the set of its readers
// since.
//
// The set of readers is a linked list. Lists share tails: equal (agent, time, tail) always give the same list element.
// So bytes with the same accesses, such as a tile that all threads read, share one list.
#pragma once
#include "clocks.h"

namespace host {

constexpr unsigned MAX_READERS = 1 << 20;  // list elements in total; a power of two
constexpr unsigned MAX_SHARED_ARRAYS = 64;

enum class Claim : uint8_t { NONE, COPY, MBARRIER };

struct Cell {
    uint32_t block;       // serial number of the block for which the cell is valid; cell_at resets any other cell
    uint32_t write_time;  // 0: the block has not written the byte
    uint32_t writer;      // index of the writing agent in clocks
    uint32_t readers;     // head of the list of readers; 0: no reader since the last write
    Claim claim;          // COPY: a copy in flight will write the byte; MBARRIER: the byte belongs to an mbarrier
    bool atomic;          // the last write was an atomic operation
    const void *write_pc, *read_pc;
};

// An element of a list of readers; `next` is the index of the following element, or 0.
struct Reader {
    uint32_t next, time, agent;
    uint32_t slot;  // index in the hash table of the entry that refers to this element
};

struct Cells {
    Cell* cells;  // SHARED_BYTES cells for each block of the cluster
    unsigned num_arenas;
    uint32_t serial[MAX_CLUSTER], last_serial;  // serial numbers of the blocks of the running cluster
    Range arrays[MAX_SHARED_ARRAYS];            // offsets of the shared arrays
    unsigned num_arrays;
    uint8_t swizzles[MAX_CLUSTER][SHARED_BYTES / 16];  // per 16 bytes: 1 + Swizzle of the box loaded there; 0: no box
    Reader* readers;
    uint32_t* table;  // MAX_READERS slots, open addressing
    uint32_t num_readers;
};
inline Cells cells;

inline bool cells_init() {
    const unsigned count = state.launch.cluster;
    if (cells.num_arenas < count) {
        if (cells.num_arenas) munmap(cells.cells, SHARED_BYTES * sizeof(Cell) * cells.num_arenas);
        cells.cells = reinterpret_cast<Cell*>(map_pages(SHARED_BYTES * sizeof(Cell) * count));
        cells.num_arenas = cells.cells ? count : 0;
    }
    if (!cells.readers) {
        cells.readers = reinterpret_cast<Reader*>(map_pages(MAX_READERS * sizeof(Reader)));
        cells.table = reinterpret_cast<uint32_t*>(map_pages(MAX_READERS * sizeof(uint32_t)));
    }
    cells.num_arrays = 0;
    return cells.cells && cells.readers && cells.table;
}

// Runs before the blocks of a cluster begin: all bytes become unwritten and all lists empty.
inline void cells_begin_cluster() {
    for (uint32_t i = 1; i <= cells.num_readers; ++i) cells.table[cells.readers[i].slot] = 0;
    cells.num_readers = 0;
    for (unsigned rank = 0; rank < state.launch.cluster; ++rank) {
        cells.serial[rank] = ++cells.last_serial;
        memset(cells.swizzles[rank], 0, sizeof cells.swizzles[rank]);
    }
}

inline void allocate_clocked(size_t offset, size_t bytes) {
    if (cells.num_arrays == MAX_SHARED_ARRAYS) {
        raise_fault("too much shared memory", {}, "more than %u shared arrays", MAX_SHARED_ARRAYS);
    }
    cells.arrays[cells.num_arrays++] = {offset, offset + bytes};
}

inline bool in_shared_array(size_t offset, size_t bytes) {
    for (unsigned i = 0; i < cells.num_arrays; ++i) {
        if (cells.arrays[i].holds(offset, bytes)) return true;
    }
    return false;
}

inline Cell& cell_at(unsigned rank, size_t offset) {
    Cell& cell = cells.cells[SHARED_BYTES * rank + offset];
    if (cell.block != cells.serial[rank]) {
        cell = {};
        cell.block = cells.serial[rank];
    }
    return cell;
}

// Returns the list that begins with this reader, followed by the list `next`. Equal arguments give the same list.
inline uint32_t list_of(uint32_t next, uint32_t agent, uint32_t time) {
    uint32_t slot = (next * 0x9e3779b1u ^ agent * 0x85ebca6bu ^ time * 0xc2b2ae35u) % MAX_READERS;
    for (; cells.table[slot]; slot = (slot + 1) % MAX_READERS) {
        const Reader& reader = cells.readers[cells.table[slot]];
        if (reader.next == next && reader.agent == agent && reader.time == time) return cells.table[slot];
    }
    if (cells.num_readers >= MAX_READERS / 2) raise_fault("bad launch", {}, "too many readers of shared memory");
    cells.readers[++cells.num_readers] = {next, time, agent, slot};
    return cells.table[slot] = cells.num_readers;
}

inline uint32_t without(uint32_t list, uint32_t agent) {
    if (!list) return 0;
    const Reader reader = cells.readers[list];
    return reader.agent == agent ? reader.next : list_of(without(reader.next, agent), reader.agent, reader.time);
}

// Returns the list with one more reader. It replaces an earlier read by the same agent.
inline uint32_t with_reader(uint32_t list, uint32_t agent, uint32_t time) {
    for (uint32_t at = list; at; at = cells.readers[at].next) {
        if (cells.readers[at].agent != agent) continue;
        return cells.readers[at].time == time ? list : list_of(without(list, agent), agent, time);
    }
    return list_of(list, agent, time);
}

// The agent that accesses shared memory of a block, and the clock of the thread that asked for the access.
struct Accessor {
    uint32_t agent, time;
    Clock clock;
    bool asynchronous;  // through the asynchronous proxy
    const char* name;   // "read", "write by a load", ...
};

inline Accessor running_thread(const char* name) {
    return {own_index(), state.current->time, clock_of(*state.current), false, name};
}

inline void check_order_of_write(const Cell& cell, const Accessor& by, const void* pc) {
    if (cell.writer != by.agent && !seen_by(by.clock, cell.writer, cell.write_time)) {
        raise_fault("shared memory race", {nullptr, 0, pc, cell.write_pc},
                    "%s of shared memory that %s has written, and nothing orders the two", by.name,
                    name_of_agent(cell.writer).text);
    }
    if (by.asynchronous && is_generic(cell.writer) && !fenced_by(by.clock, cell.writer, cell.write_time)) {
        raise_fault("missing proxy fence", {nullptr, 0, pc, cell.write_pc},
                    "%s of shared memory that %s has written, without fence_proxy_async() in between", by.name,
                    name_of_agent(cell.writer).text);
    }
}

inline void check_order_of_reads(const Cell& cell, const Accessor& by, const void* pc) {
    for (uint32_t at = cell.readers; at; at = cells.readers[at].next) {
        const Reader& reader = cells.readers[at];
        if (reader.agent == by.agent || seen_by(by.clock, reader.agent, reader.time)) continue;
        const bool has_read = is_thread(reader.agent);
        raise_fault("shared memory race", {nullptr, 0, pc, cell.read_pc}, "%s of shared memory that %s %s", by.name,
                    name_of_agent(reader.agent).text,
                    has_read ? "has read, and nothing orders the two"
                             : "may still read: no wait for it, or none that this thread knows of");
    }
}

// Check an access to shared memory of block `rank` against bounds and order, and record it. Raises a fault.
inline void check_cells(unsigned rank, size_t offset, size_t bytes, Access kind, const Accessor& by, const void* pc) {
    const Where where = {nullptr, 0, pc, nullptr};
    if (!in_shared_array(offset, bytes)) {
        raise_fault("out-of-bounds shared access", where, "%s of %zu bytes outside every shared array", by.name, bytes);
    }
    // Adjacent bytes mostly have equal cells: a cell equal to the one before it needs no second check.
    uint32_t writer = UINT32_MAX, write_time = 0, checked_readers = 0, readers = UINT32_MAX, new_readers = 0;
    for (size_t i = offset; i < offset + bytes; ++i) {
        Cell& cell = cell_at(rank, i);
        if (cell.claim == Claim::COPY) {
            raise_fault("async copy not waited for", {nullptr, 0, pc, cell.write_pc},
                        "%s of shared memory that a copy has yet to write", by.name);
        }
        if (cell.claim == Claim::MBARRIER) {
            raise_fault("mbarrier misuse", {nullptr, 0, pc, cell.write_pc}, "%s of the bytes of an mbarrier", by.name);
        }
        if (!cell.write_time) {
            if (kind != Access::WRITE) {
                raise_fault("uninitialised shared memory", where, "%s of shared memory that the block has not written",
                            by.name);
            }
        } else if (!(kind == Access::ATOMIC && cell.atomic) &&
                   (cell.writer != writer || cell.write_time != write_time)) {
            check_order_of_write(cell, by, pc);
            writer = cell.writer;
            write_time = cell.write_time;
        }
        if (kind == Access::READ) {
            if (cell.readers != readers) new_readers = with_reader(readers = cell.readers, by.agent, by.time);
            cell.readers = new_readers;
            cell.read_pc = pc;
            continue;
        }
        if (cell.readers && cell.readers != checked_readers) {
            check_order_of_reads(cell, by, pc);
            checked_readers = cell.readers;
        }
        cell.readers = 0;
        cell.writer = by.agent;
        cell.write_time = by.time;
        cell.atomic = kind == Access::ATOMIC;
        cell.write_pc = pc;
    }
}

// The running thread reads shared memory of another block.
inline void read_by_clocks(unsigned rank, size_t offset, size_t size, const void* pc) {
    check_cells(rank, offset, size, Access::READ, running_thread("read from another block"), pc);
}

inline void check_clocked(size_t offset, size_t bytes, Access kind, const void* pc) {
    check_cells(state.rank, offset, bytes, kind, running_thread(verb_of(kind)), pc);
    if (kind == Access::READ || bytes == 0) return;
    memset(cells.swizzles[state.rank] + offset / 16, 0, (offset + bytes - 1) / 16 - offset / 16 + 1);
}

}  // namespace host
