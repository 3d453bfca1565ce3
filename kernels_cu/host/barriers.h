// barriers.h: mbarriers and named barriers.
//
// The runtime keeps the state of an mbarrier outside shared memory. Its eight bytes there hold nothing, and kernels may
// not access them. A phase ends when all arrivals have come and all announced bytes have landed; then threads that wait
// for the phase can run. If the next phase also ends before such a thread runs, a thread on a device might miss both: a
// fault.
#pragma once
#include "schedule.h"

namespace host {

constexpr unsigned MAX_MBARRIERS = MAX_AGENTS;

struct Mbarrier {
    size_t offset;
    unsigned arrivals, missing;  // arrivals that complete a phase; arrivals that the open phase still expects
    int64_t bytes;               // bytes announced in the open phase that have not landed
    uint32_t phase;              // number of the open phase
    uint32_t init_by, init_time;
    bool init_fenced;  // fence_mbarrier_init has been called after the initialisation
    unsigned loads;    // the agent that stands for the loads counted by the mbarrier
    int copies;        // the agent of the cp_async copies that the mbarrier waits for; -1: none so far
    const void* pc;    // return address of its initialisation
};
struct NamedBarrier {
    unsigned expected, arrived;
    const void* pc;
    uint32_t last, last_time;  // the last agent to arrive in the previous use, and its time; 0: first use
};
struct Barriers {
    Mbarrier mbarriers[MAX_MBARRIERS];
    unsigned count;
    uint8_t index_at[SHARED_BYTES / 8];  // index of the mbarrier at each 8 bytes of shared memory
    NamedBarrier named[NUM_NAMED_BARRIERS];
};
inline Barriers barriers[MAX_CLUSTER];

inline void barriers_begin_block(unsigned rank) {
    barriers[rank].count = 0;
    memset(barriers[rank].named, 0, sizeof barriers[rank].named);
}

inline int describe_wait(char* text, size_t room, const Thread& thread) {
    if (thread.wait == Wait::NAMED_BARRIER) {
        const NamedBarrier& barrier = barriers[state.rank].named[thread.awaited];
        return snprintf(text, room, " for %u threads at named barrier %u, where %u are", barrier.expected,
                        thread.awaited, barrier.arrived);
    }
    if (thread.wait != Wait::MBARRIER) return snprintf(text, room, "%s", "");
    const Mbarrier& barrier = barriers[state.rank].mbarriers[thread.awaited];
    const size_t dynamic = memory.dynamic - memory.shared;
    const bool is_dynamic = barrier.offset >= dynamic;
    return snprintf(text, room,
                    " for phase %u of mbarrier #%u (byte %zu of %s shared memory), which lacks %u of %u arrivals and "
                    "%lld bytes",
                    thread.awaited_phase, thread.awaited, barrier.offset - (is_dynamic ? dynamic : 0),
                    is_dynamic ? "dynamic" : "static", barrier.missing, barrier.arrivals,
                    static_cast<long long>(barrier.bytes));
}

// Returns the index of the mbarrier of block `rank` at this address of the running block. Raises a fault if the address
// is no mbarrier, or if the running thread may not use it yet.
inline unsigned find_mbarrier(unsigned rank, const void* address, const char* operation, const void* pc) {
    const Where where = {nullptr, 0, pc, nullptr};
    state.asked_pc = pc;
    const size_t offset = static_cast<const char*>(address) - memory.shared;
    if (rank >= state.launch.cluster) {
        raise_fault("mbarrier misuse", where, "%s in block %u of a cluster of %u", operation, rank,
                    state.launch.cluster);
    }
    if (offset >= SHARED_BYTES || !in_shared_array(offset, 8)) {
        raise_fault("out-of-bounds shared access", where, "%s of an mbarrier outside every shared array", operation);
    }
    if (offset % 8) raise_fault("misaligned access", where, "%s of an mbarrier at byte %zu", operation, offset);
    if (clocks.ended[rank]) {
        raise_fault("early exit", where, "%s of an mbarrier of block %u of the cluster, which has ended", operation,
                    rank);
    }
    const Barriers& own = barriers[rank];
    const unsigned index = own.index_at[offset / 8];
    if (index >= own.count || own.mbarriers[index].offset != offset) {
        raise_fault("mbarrier misuse", where, "%s of an mbarrier that block %u of the cluster has not initialised",
                    operation, rank);
    }
    const Mbarrier& found = own.mbarriers[index];
    if (found.init_by != own_index() && !seen_by(clock_of(*state.current), found.init_by, found.init_time)) {
        raise_fault("shared memory race", {nullptr, 0, pc, found.pc},
                    "%s of mbarrier #%u, and nothing orders it after the initialisation", operation, index);
    }
    if (rank != state.rank && !found.init_fenced) {
        raise_fault("missing proxy fence", {nullptr, 0, pc, found.pc},
                    "%s of an mbarrier of another block, without fence_mbarrier_init() after its initialisation",
                    operation);
    }
    return index;
}

__attribute__((noinline)) void mbarrier_init(const void* address, unsigned arrivals) {
    const void* pc = __builtin_return_address(0);
    const Where where = {nullptr, 0, pc, nullptr};
    const size_t offset = static_cast<const char*>(address) - memory.shared;
    Barriers& own = barriers[state.rank];
    if (offset >= SHARED_BYTES) raise_fault("mbarrier misuse", where, "mbarrier_init outside of shared memory");
    if (offset % 8) raise_fault("misaligned access", where, "mbarrier_init at byte %zu", offset);
    if (arrivals == 0 || arrivals >= 1u << 20) {
        raise_fault("mbarrier misuse", where, "mbarrier_init for %u arrivals, expected 1 to 2^20 - 1", arrivals);
    }
    check_cells(state.rank, offset, 8, Access::WRITE, running_thread("initialisation"), pc);
    for (size_t i = offset; i < offset + 8; ++i) cell_at(state.rank, i).claim = Claim::MBARRIER;
    const unsigned index = own.count, loads = new_agent(state.rank, AgentKind::LOADS, index);
    own.index_at[offset / 8] = own.count++;
    own.mbarriers[index] = {offset, arrivals, arrivals, 0, 0, own_index(), state.current->time, false, loads, -1, pc};
}

__attribute__((noinline)) void fence_mbarrier_init() {
    Barriers& own = barriers[state.rank];
    for (unsigned i = 0; i < own.count; ++i) {
        if (own.mbarriers[i].init_by == own_index()) own.mbarriers[i].init_fenced = true;
    }
}

inline bool has_late_copies(unsigned rank, unsigned index, int64_t& bytes, const void*& pc);  // defined in in_flight.h

// Ends the open phase of an mbarrier if it is complete. `pc` belongs to the last arrival or copy.
inline void end_phase_if_complete(unsigned rank, unsigned index, const void* pc) {
    Mbarrier& barrier = barriers[rank].mbarriers[index];
    if (barrier.missing || barrier.bytes) return;
    int64_t bytes = 0;
    const void* late_pc = nullptr;
    if (has_late_copies(rank, index, bytes, late_pc)) {
        raise_fault("wrong transaction bytes", {nullptr, 0, pc, late_pc},
                    "phase %u of mbarrier #%u ends with %lld bytes of loads that it counts still on their way: fewer "
                    "bytes were announced than are loaded",
                    barrier.phase, index, static_cast<long long>(bytes));
    }
    const uint32_t ended = barrier.phase++;
    barrier.missing = barrier.arrivals;
    const Clock arrivals = clock_of_arrivals(rank, index);
    arrivals.seen[agent_index(rank, barrier.loads)] = barrier.phase;
    if (barrier.copies >= 0) arrivals.seen[agent_index(rank, barrier.copies)] = barrier.phase;
    copy(clock_of_phases(rank, index), arrivals);
    if (rank != state.rank || !state.current) return;  // the other block checks when it runs again
    make_ready(threads, num_threads(), [=](unsigned i) {
        return threads[i].wait == Wait::MBARRIER && threads[i].awaited == index && threads[i].awaited_phase == ended;
    });
}

// Counts one arrival at the open phase.
inline void count_arrival(unsigned rank, unsigned index, const void* pc) {
    Mbarrier& barrier = barriers[rank].mbarriers[index];
    if (!barrier.missing) {
        raise_fault("mbarrier misuse", {nullptr, 0, pc, barrier.pc},
                    "arrival at mbarrier #%u, whose phase %u has all of its %u: it waits for %lld bytes", index,
                    barrier.phase, barrier.arrivals, static_cast<long long>(barrier.bytes));
    }
    --barrier.missing;
    end_phase_if_complete(rank, index, pc);
}

inline void arrive(unsigned rank, const void* address, unsigned bytes, const void* pc) {
    const unsigned index = find_mbarrier(rank, address, "mbarrier_arrive", pc);
    barriers[rank].mbarriers[index].bytes += bytes;
    release(clock_of_arrivals(rank, index));
    count_arrival(rank, index, pc);
}

__attribute__((noinline)) void mbarrier_arrive(const void* address, unsigned announced_bytes) {
    arrive(state.rank, address, announced_bytes, __builtin_return_address(0));
}

__attribute__((noinline)) void mbarrier_arrive_cluster(const void* address, unsigned rank) {
    arrive(rank, address, 0, __builtin_return_address(0));
}

__attribute__((noinline)) void mbarrier_wait(const void* address, unsigned parity) {
    const void* pc = __builtin_return_address(0);
    const unsigned index = find_mbarrier(state.rank, address, "mbarrier_wait", pc);
    const Mbarrier& barrier = barriers[state.rank].mbarriers[index];
    if (parity > 1) raise_fault("mbarrier misuse", {nullptr, 0, pc}, "mbarrier_wait for parity %u", parity);
    if ((barrier.phase & 1) == parity) {
        Thread& thread = begin_wait(Wait::MBARRIER, "mbarrier_wait", 0, "", 0, pc);
        thread.awaited = index;
        const uint32_t awaited = thread.awaited_phase = barrier.phase;
        yield();
        if (barrier.phase != awaited + 1) {
            raise_fault("mbarrier misuse", {nullptr, 0, pc},
                        "phases %u and %u of mbarrier #%u have ended before a thread that waits for the first has run: "
                        "it may miss both",
                        awaited, awaited + 1, index);
        }
    }
    acquire(*state.current, clock_of_phases(state.rank, index));
}

// Returns whether the thread waits for a phase that ended while another block ran.
inline bool awaited_phase_has_ended(unsigned thread) {
    const Thread& one = threads[thread];
    if (one.wait != Wait::MBARRIER) return false;
    return barriers[state.rank].mbarriers[one.awaited].phase != one.awaited_phase;
}

__attribute__((noinline)) void named_barrier(unsigned number, unsigned count, bool waits) {
    const void* pc = __builtin_return_address(0);
    const Where where = {nullptr, 0, pc, nullptr};
    state.asked_pc = pc;
    if (number == 0 || number >= NUM_NAMED_BARRIERS) {
        raise_fault("divergent barrier", where, "named barrier %u: expected 1 to 15", number);
    }
    if (count == 0 || count % 32 || count > num_threads()) {
        raise_fault("divergent barrier", where,
                    "named barrier %u of %u threads, in a block of %u: expected a multiple of 32", number, count,
                    num_threads());
    }
    NamedBarrier& barrier = barriers[state.rank].named[number];
    if (!barrier.arrived) {
        barrier.expected = count;
        barrier.pc = pc;
    } else if (barrier.expected != count) {
        raise_fault("divergent barrier", {nullptr, 0, pc, barrier.pc},
                    "named barrier %u of %u threads, where others wait at it for %u", number, count, barrier.expected);
    }
    if (barrier.last_time && barrier.last != own_index() &&
        !seen_by(clock_of(*state.current), barrier.last, barrier.last_time)) {
        raise_fault("divergent barrier", {nullptr, 0, pc, barrier.pc},
                    "at named barrier %u, which %s and others have used before, and nothing orders the two uses: it "
                    "may count threads of both",
                    number, name_of_agent(barrier.last).text);
    }
    const Clock clock = clock_of_named(number);
    const uint32_t time = state.current->time;
    release(clock);
    if (waits) begin_wait(Wait::NAMED_BARRIER, "named_barrier_sync", 0, "", 0, pc).awaited = number;
    if (++barrier.arrived == barrier.expected) {
        const auto is_waiting = [=](unsigned i) {
            return threads[i].wait == Wait::NAMED_BARRIER && threads[i].awaited == number;
        };
        for (unsigned i = 0; i < num_threads(); ++i) {
            if (is_waiting(i)) acquire(threads[i], clock);
        }
        clear(clock);
        barrier.arrived = 0;
        barrier.last = own_index();
        barrier.last_time = time;
        make_ready(threads, num_threads(), is_waiting);
    }
    if (waits) yield();
}

// The lane that elect_one chooses. A device may choose any lane.
__attribute__((noinline)) unsigned elected_lane() {
    if (state.launch.order == Order::REVERSED) return 31;
    return state.launch.order == Order::SHUFFLED ? state.launch.seed % 32 : 0;
}

}  // namespace host
