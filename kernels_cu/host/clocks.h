// clocks.h: vector clocks: the happens-before order of accesses by the threads and copies of a cluster.
//
// An agent is whatever accesses memory in its own order: a thread; the copies that an mbarrier counts; the tensor cores
// of a warpgroup; the bulk stores of a thread. Each agent counts its own time. The clock of a thread holds, for each
// agent of the cluster, the latest time of the agent that happens before what the thread does now. A thread that
// arrives at a barrier stores its clock there and begins a new time (release). A thread that has waited there merges
// the stored clocks into its own (acquire). An access happens before another if the clock of the other's thread holds
// its agent and time. So a race is found under every schedule.
//
// Every clock is a pair: `seen`, and `fenced`, the part of `seen` that fences have made visible to the async proxy.
#pragma once
#include "records.h"

namespace host {

constexpr unsigned MAX_AGENTS = 192;  // agents of a block in addition to its threads
constexpr unsigned NUM_NAMED_BARRIERS = 16;

enum class AgentKind : uint8_t { LOADS, THREAD_COPIES, TENSOR_CORES, STORES };
struct Agent {
    AgentKind kind;
    unsigned owner;  // the index of the mbarrier, the number of the warpgroup, or the number of the thread
};

struct Clock { uint32_t *seen, *fenced; };

struct Clocks {
    uint32_t* times;  // storage of all clocks
    size_t bytes;
    unsigned stride, width;  // number of agents of a block, and of the cluster
    unsigned num_agents[MAX_CLUSTER];
    Agent agents[MAX_CLUSTER][MAX_AGENTS];
    Clock of_block[MAX_CLUSTER];  // per block: the clock that its last barrier gave to all of its threads
    bool ended[MAX_CLUSTER];
};
inline Clocks clocks;

// A block has a clock for each thread, two for each mbarrier, one for each named barrier, and one for all threads.
inline unsigned num_clocks_of_block() { return num_threads() + 2 * MAX_AGENTS + NUM_NAMED_BARRIERS + 1; }
inline Clock clock_at(unsigned rank, unsigned number) {
    uint32_t* first = clocks.times + (size_t(rank) * num_clocks_of_block() + number) * 2 * clocks.width;
    return {first, first + clocks.width};
}
inline Clock clock_of(const Thread& thread) { return clock_at(state.rank, thread.number); }
// For one mbarrier: the clock stored by arrivals at the open phase, and the clock that its ended phases give to
// waiters.
inline Clock clock_of_arrivals(unsigned rank, unsigned index) { return clock_at(rank, num_threads() + 2 * index); }
inline Clock clock_of_phases(unsigned rank, unsigned index) { return clock_at(rank, num_threads() + 2 * index + 1); }
inline Clock clock_of_named(unsigned number) { return clock_at(state.rank, num_threads() + 2 * MAX_AGENTS + number); }

// The index of an agent in every clock. A thread has its number; another agent of a block has num_threads() + its
// index.
inline uint32_t thread_index(unsigned rank, unsigned number) { return rank * clocks.stride + number; }
inline uint32_t agent_index(unsigned rank, unsigned index) { return thread_index(rank, num_threads() + index); }
inline uint32_t own_index() { return thread_index(state.rank, state.current->number); }
inline bool is_thread(uint32_t index) { return index % clocks.stride < num_threads(); }
inline const Agent& agent_at(uint32_t index) {
    return clocks.agents[index / clocks.stride][index % clocks.stride - num_threads()];
}
// Returns whether the agent accesses memory through the generic proxy.
inline bool is_generic(uint32_t index) { return is_thread(index) || agent_at(index).kind == AgentKind::THREAD_COPIES; }

inline void join(uint32_t* __restrict to, const uint32_t* __restrict from, unsigned count) {
    for (unsigned i = 0; i < count; ++i) to[i] = from[i] > to[i] ? from[i] : to[i];
}
inline void join(Clock to, Clock from) { join(to.seen, from.seen, 2 * clocks.width); }
inline void copy(Clock to, Clock from) { memcpy(to.seen, from.seen, 2 * clocks.width * sizeof(uint32_t)); }
inline void clear(Clock clock) { memset(clock.seen, 0, 2 * clocks.width * sizeof(uint32_t)); }

inline size_t bytes_of_clocks() {
    return size_t(num_clocks_of_block()) * state.launch.cluster * 2 * clocks.width * sizeof(uint32_t);
}

inline bool clocks_init() {
    clocks.stride = num_threads() + MAX_AGENTS;
    clocks.width = clocks.stride * state.launch.cluster;
    if (clocks.bytes >= bytes_of_clocks()) return true;
    if (clocks.bytes) munmap(clocks.times, clocks.bytes);
    clocks.bytes = bytes_of_clocks();
    clocks.times = reinterpret_cast<uint32_t*>(map_pages(clocks.bytes));
    if (!clocks.times) clocks.bytes = 0;
    return clocks.times;
}

// Runs before the blocks of a cluster begin.
inline void clocks_begin_cluster() {
    memset(clocks.times, 0, bytes_of_clocks());
    for (unsigned rank = 0; rank < state.launch.cluster; ++rank) {
        clocks.num_agents[rank] = 0;
        clocks.ended[rank] = false;
        clocks.of_block[rank] = clock_at(rank, num_clocks_of_block() - 1);
    }
}

inline unsigned new_agent(unsigned rank, AgentKind kind, unsigned owner) {
    unsigned& count = clocks.num_agents[rank];
    if (count == MAX_AGENTS) {
        raise_fault("bad launch", {}, "a block has more than %u mbarriers, warpgroups and threads that store in bulk",
                    MAX_AGENTS);
    }
    clocks.agents[rank][count] = {kind, owner};
    return count++;
}

struct AgentName { char text[96]; };

inline AgentName name_of_agent(uint32_t index) {
    const unsigned rank = index / clocks.stride, number = index % clocks.stride;
    AgentName name;
    int length = 0;
    const auto write = [&](const char* format, auto... values) {
        length = snprintf(name.text, sizeof name.text, format, values...);
    };
    if (is_thread(index)) {
        const Index& index = all_threads[rank][number].index;
        write("thread (%u, %u, %u)", index.x, index.y, index.z);
    } else {
        const Agent& agent = agent_at(index);
        if (agent.kind == AgentKind::LOADS) write("a load that mbarrier #%u counts", agent.owner);
        if (agent.kind == AgentKind::THREAD_COPIES) write("a cp_async that mbarrier #%u waits for", agent.owner);
        if (agent.kind == AgentKind::STORES) write("a bulk store of thread %u", agent.owner);
        if (agent.kind == AgentKind::TENSOR_CORES) {
            write("wgmma of threads %u to %u", 128 * agent.owner, 128 * agent.owner + 127);
        }
    }
    if (rank != state.rank)
        snprintf(name.text + length, sizeof name.text - length, " of block %u of the cluster", rank);
    return name;
}

// Returns whether the agent's access at this time happens before what the running thread does.
inline bool seen_by(const Clock& clock, uint32_t index, uint32_t time) {
    return clock.seen[index] >= time || clocks.of_block[state.rank].seen[index] >= time;
}
inline bool fenced_by(const Clock& clock, uint32_t index, uint32_t time) {
    return clock.fenced[index] >= time || clocks.of_block[state.rank].fenced[index] >= time;
}
inline bool has_seen(uint16_t thread, uint32_t time) {
    return seen_by(clock_of(*state.current), thread_index(state.rank, thread), time);
}

// The running thread stores its clock at `to` and begins a new time.
inline void release(Clock to) {
    Thread& thread = *state.current;
    const Clock own = clock_of(thread);
    own.seen[own_index()] = thread.time++;
    join(to, own);
    join(to, clocks.of_block[state.rank]);
}
inline void acquire(const Thread& thread, Clock from) { join(clock_of(thread), from); }

// All threads of the running block have arrived at a barrier.
inline void clocks_of_barrier() {
    for (unsigned i = 0; i < num_threads(); ++i) {
        const Clock own = clock_of(threads[i]);
        own.seen[thread_index(state.rank, i)] = threads[i].time++;
        join(clocks.of_block[state.rank], own);
    }
}

// The given lanes of a warp have arrived at a barrier.
inline void clocks_of_warp(Thread* warp, uint64_t lanes) {
    const Clock first = clock_of(warp[__builtin_ctzll(lanes)]);
    for (uint64_t rest = lanes; rest; rest &= rest - 1) {
        Thread& thread = warp[__builtin_ctzll(rest)];
        const Clock own = clock_of(thread);
        own.seen[thread_index(state.rank, thread.number)] = thread.time++;
        if (rest != lanes) join(first, own);
    }
    for (uint64_t rest = lanes & (lanes - 1); rest; rest &= rest - 1) {
        copy(clock_of(warp[__builtin_ctzll(rest)]), first);
    }
}

// All blocks of the cluster that have not ended have arrived at a cluster barrier.
inline void clocks_of_cluster() {
    const unsigned count = state.launch.cluster;
    for (unsigned rank = 1; rank < count; ++rank) {
        if (!clocks.ended[rank]) join(clocks.of_block[0], clocks.of_block[rank]);
    }
    for (unsigned rank = 1; rank < count; ++rank) copy(clocks.of_block[rank], clocks.of_block[0]);
}

// Makes what the thread has seen visible to the async proxy. With strict fences, this covers only the thread's own
// writes and no writes of other threads.
__attribute__((noinline)) void fence_proxy_async() {
    Thread& thread = *state.current;
    const Clock own = clock_of(thread), block = clocks.of_block[state.rank];
    own.seen[own_index()] = thread.time++;
    for (unsigned index = 0; index < clocks.width; ++index) {
        const bool tells = !state.launch.strict_fences || index == own_index() || !is_thread(index);
        const uint32_t seen = own.seen[index] > block.seen[index] ? own.seen[index] : block.seen[index];
        if (tells && own.fenced[index] < seen) own.fenced[index] = seen;
    }
}

}  // namespace host
