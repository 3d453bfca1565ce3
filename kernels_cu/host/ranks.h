// ranks.h: the blocks of several ranks that run as one launch, and the happens-before order that flags give to ranks.
//
// The blocks with the same index of all ranks run together, as the blocks of a cluster do: each runs until all of its
// threads wait. A rank has its own parameters and tensors; memory that is not private is accessible to all ranks. A
// thread that stores a flag releases what its block did before the block's last barrier. The relaxed kinds of `Flagged`
// release less: that its rank has begun, or also that its block's reads are over. A thread that waits for the flag
// acquires this, and the other threads of its block acquire it at their next barrier. `Seen` holds what a block knows
// of each other rank, in epochs (memory.h). An access that conflicts with another rank's access is a fault under every
// schedule, unless a flag orders the two.
#pragma once
#include "schedule.h"

namespace host {

// Defined in global.h.
inline void check_bounds(const char* address, size_t bytes, Access kind, const void* pc, bool is_flag = false);

constexpr uint32_t OWNER = 0xff, PRIVATE = 0x100, LASTING = 0x200, EARLY = 0x400;  // bits of Launch::owners
constexpr size_t MAX_FLAGS = 1 << 14;                                              // a power of two

// What a block or a thread knows of a rank: the last epoch with all writes known to be over, and the last epoch with
// all reads known to be over. A release that covers the writes of an epoch also covers its reads.
struct Seen {
    uint32_t writes, reads;

    void merge(Seen other) {
        if (other.writes > writes) writes = other.writes;
        if (other.reads > reads) reads = other.reads;
    }
    uint32_t of(Access kind) const { return kind == Access::READ ? reads : writes; }
};

struct Flag {
    const uint32_t* address;
    uint64_t launch;  // number of the launch that last stored the flag; in any other launch the slot is free
    Seen clock[MAX_CLUSTER];
};

struct RankClocks {
    Seen seen[MAX_CLUSTER];                   // per rank: what every thread of the block knows
    Seen accessed[MAX_CLUSTER];               // the block's last epochs with accesses to memory of each rank; 0: none
    Seen acquired[MAX_THREADS][MAX_CLUSTER];  // what one thread knows
    uint32_t first_epoch;
    bool ended;
};
inline RankClocks rank_clocks[MAX_CLUSTER];
inline Flag flags[MAX_FLAGS];

struct Awaited {
    const uint32_t* address;
    uint32_t value;
    unsigned from;
    bool given_up;  // the thread has been told that the flag will never be stored
};
inline Awaited awaited[MAX_CLUSTER][MAX_THREADS];
// Message about which rank waits for which, written once no rank can run. Every thread that waits for a flag then runs
// once more, to give up.
inline char ranks_that_wait[sizeof Fault::message - 128];

inline bool has_come(const Awaited& flag) { return int32_t(*flag.address - flag.value) >= 0; }
inline bool awaits_nothing(unsigned thread) {
    const Awaited& flag = awaited[state.rank][thread];
    return threads[thread].wait == Wait::FLAG && !flag.given_up && (has_come(flag) || *ranks_that_wait);
}

inline Flag* flag_at(const uint32_t* address, bool make) {
    size_t slot = (reinterpret_cast<uintptr_t>(address) * 0x9e3779b97f4a7c15u) >> 50;
    for (size_t i = 0; i < MAX_FLAGS; ++i, slot = (slot + 1) % MAX_FLAGS) {
        Flag& flag = flags[slot];
        if (flag.launch != state.launch_number) {
            if (!make) return nullptr;
            flag = {address, state.launch_number, {}};
            return &flag;
        }
        if (flag.address == address) return &flag;
    }
    raise_fault("bad launch", {}, "more than %zu flags", MAX_FLAGS);
}

// What the running thread knows of `rank`.
inline Seen seen_of(unsigned rank) {
    const RankClocks& own = rank_clocks[state.rank];
    Seen seen = own.seen[rank];
    seen.merge(own.acquired[state.current->number][rank]);
    return seen;
}

// Returns the rank with this epoch in its running block; MAX_CLUSTER: no rank.
inline unsigned rank_of(uint32_t epoch) {
    const uint32_t offset = epoch - rank_clocks[0].first_epoch;
    return offset < state.launch.num_ranks * MAX_BARRIERS ? offset / MAX_BARRIERS : MAX_CLUSTER;
}
// Returns whether flags have published that another rank's accesses of this kind, at this epoch, are over.
inline bool flags_tell_of(Access kind, uint32_t epoch) {
    const unsigned rank = rank_of(epoch);
    return rank < MAX_CLUSTER && epoch <= seen_of(rank).of(kind);
}

[[noreturn]] inline void missing_flag(Access kind, uint32_t epoch, const char* before, const void* pc) {
    const unsigned rank = rank_of(epoch);
    if (rank == MAX_CLUSTER) {
        raise_fault("missing flag", {nullptr, 0, pc}, "%s of memory that a block of another index has %s",
                    kind == Access::READ ? "read" : "write", before);
    }
    raise_fault("missing flag", {nullptr, 0, pc}, "%s of memory that rank %u has %s, and no flag has told of it",
                kind == Access::READ ? "read" : "write", rank, before);
}

// Checks an access to memory of another rank, `owner`: that rank must have begun unless the memory is EARLY, and must
// not have ended unless it is LASTING.
inline void check_owner(uint32_t owner, Access kind, const void* pc) {
    const unsigned rank = owner & OWNER;
    const char* verb = kind == Access::READ ? "read" : "write";
    if (!(owner & EARLY) && seen_of(rank).writes < rank_clocks[rank].first_epoch) {
        raise_fault("missing flag", {nullptr, 0, pc}, "%s of memory of rank %u, of whose start no flag has told", verb,
                    rank);
    }
    if (owner & LASTING) return;
    if (rank_clocks[rank].ended) {
        raise_fault("missing flag", {nullptr, 0, pc}, "%s of memory of rank %u, which has ended", verb, rank);
    }
    Seen& accessed = rank_clocks[state.rank].accessed[rank];
    (kind == Access::READ ? accessed.reads : accessed.writes) = memory.epoch;
}

inline void begin_ranks() {
    *ranks_that_wait = 0;
    for (unsigned rank = 0; rank < state.launch.num_ranks; ++rank) {
        rank_clocks[rank] = {};
        rank_clocks[rank].first_epoch = memory.epoch + 1 + rank * MAX_BARRIERS;
    }
}

// Runs at a barrier of the block, when all of its threads have arrived.
inline void ranks_at_barrier() {
    RankClocks& own = rank_clocks[state.rank];
    for (unsigned i = 0; i < num_threads(); ++i) {
        for (unsigned rank = 0; rank < state.launch.num_ranks; ++rank) {
            own.seen[rank].merge(own.acquired[i][rank]);
        }
    }
}

// The block of the running rank has ended: from now on the code that launched it may write its tensors.
inline void end_rank() {
    ranks_at_barrier();
    RankClocks& own = rank_clocks[state.rank];
    own.ended = true;
    for (unsigned rank = 0; rank < state.launch.num_ranks; ++rank) {
        const Seen accessed = rank_clocks[rank].accessed[state.rank], seen = own.seen[rank];
        if (rank != state.rank && (accessed.writes > seen.writes || accessed.reads > seen.reads)) {
            raise_fault("missing flag", {}, "the rank ends, and no flag has told that rank %u is done with its memory",
                        rank);
        }
    }
}

__attribute__((noinline)) void store_flag(uint32_t* flag, uint32_t value, Flagged what) {
    check_bounds(reinterpret_cast<const char*>(flag), sizeof *flag, Access::WRITE, __builtin_return_address(0), true);
    Flag& record = *flag_at(flag, true);
    const uint32_t first = rank_clocks[state.rank].first_epoch, last = memory.epoch - 1;
    for (unsigned rank = 0; rank < state.launch.num_ranks; ++rank) {
        const bool is_own = rank == state.rank;
        if (what == Flagged::ALL) record.clock[rank] = is_own ? Seen{last, last} : seen_of(rank);
        if (what == Flagged::START) record.clock[rank] = is_own ? Seen{first, first} : Seen{};
        if (what == Flagged::READS) record.clock[rank] = is_own ? Seen{first, last} : Seen{};
    }
    *flag = value;
}

// Waits until the number at `address` has reached `value`. Returns false if no rank can run.
inline bool await_number(const uint32_t* address, uint32_t value, unsigned from, const void* pc) {
    const unsigned number = state.current->number;
    awaited[state.rank][number] = {address, value, from, false};
    while (!has_come(awaited[state.rank][number])) {
        if (*ranks_that_wait) return false;
        begin_wait(Wait::FLAG, "a flag", 0, "", 0, pc);
        yield();
    }
    return true;
}

// Waits for the flag. Returns false if no rank can run.
__attribute__((noinline)) bool await_flag(const uint32_t* flag, uint32_t value, unsigned from) {
    const void* pc = __builtin_return_address(0);
    check_bounds(reinterpret_cast<const char*>(flag), sizeof *flag, Access::READ, pc, true);
    if (!await_number(flag, value, from, pc)) return false;
    const unsigned number = state.current->number;
    if (const Flag* record = flag_at(flag, false)) {
        Seen(&acquired)[MAX_CLUSTER] = rank_clocks[state.rank].acquired[number];
        for (unsigned rank = 0; rank < state.launch.num_ranks; ++rank) acquired[rank].merge(record->clock[rank]);
    }
    return true;
}

// A packet publishes nothing but itself: other accesses of the storing rank stay unordered for the reader.
__attribute__((noinline)) void store_packet(void* address, unsigned long long packet) {
    const char* bytes = static_cast<const char*>(address);
    check_bounds(bytes, sizeof packet, Access::WRITE, __builtin_return_address(0), true);
    memcpy(address, &packet, sizeof packet);
}

// Returns the packet once its upper half has reached `meeting`, or when no rank can run.
__attribute__((noinline)) unsigned long long await_packet(const void* address, uint32_t meeting, unsigned from) {
    const void* pc = __builtin_return_address(0);
    unsigned long long packet;
    check_bounds(static_cast<const char*>(address), sizeof packet, Access::READ, pc, true);
    await_number(static_cast<const uint32_t*>(address) + 1, meeting, from, pc);
    memcpy(&packet, address, sizeof packet);
    return packet;
}

// Parks a thread that waits for a flag which will never be stored. The launch ends when all such threads are parked.
__attribute__((noinline)) void give_up() {
    awaited[state.rank][state.current->number].given_up = true;
    for (;;) {
        begin_wait(Wait::FLAG, "a flag", 0, "", 0, __builtin_return_address(0));
        yield();
    }
}

// The running rank waits and no rank can run: appends which rank waits for which flag to the text.
inline void describe_flags(unsigned rank, const Thread* of_rank, char* text, size_t room) {
    size_t length = strlen(text);
    unsigned waiting = 0;
    for (unsigned i = 0; i < num_threads(); ++i) {
        if (of_rank[i].wait != Wait::FLAG) continue;
        const Awaited& flag = awaited[rank][i];
        if (waiting++ < MAX_CLUSTER && length < room - 1) {
            length +=
                snprintf(text + length, room - length, "%srank %u waits for rank %u (its flag is %u, expected %u)",
                         length ? "; " : "", rank, flag.from, *flag.address, flag.value);
        }
    }
    if (!waiting && length < room - 1) {
        snprintf(text + length, room - length, "%srank %u waits at a barrier", length ? "; " : "", rank);
    }
}

}  // namespace host
