// cluster.h: the blocks of a cluster, and the grid.
//
// The blocks of a cluster run interleaved: each runs up to the next cluster barrier or, in a CLOCKED runtime, until all
// of its threads wait. A block reads shared memory of another block only through `read_of_block`, and only bytes
// written before the last cluster barrier and not written again before the next one. A CLOCKED runtime also accepts
// accesses that its vector clocks order in other ways.
#pragma once
#include "ranks.h"

namespace host {

// The saved state of a block of a cluster while other blocks run.
struct Paused {
    Index block;
    bool begun, ended, at_barrier;  // at_barrier: all of its threads wait for the cluster
    bool released;                  // all blocks have arrived at the barrier, and this block has not run since
    bool synchronised;
    uint32_t first_epoch, epoch, barrier_epoch;  // barrier_epoch: value of `epoch` at the last cluster barrier
    uint32_t warp_epoch[MAX_THREADS / 32];
    unsigned num_alive, num_at_barrier;
    uint64_t lanes_arrived[MAX_THREADS / 32];
    Thread threads[CLOCKED ? 1 : MAX_THREADS];
};
inline Paused cluster[MAX_CLUSTER];

__attribute__((noinline)) void cluster_barrier(const char* file, int line) {
    Thread& thread = begin_wait(Wait::CLUSTER, "sync_cluster", 0, file, line, __builtin_return_address(0));
    if (!all_arrived(thread)) return yield();
    if constexpr (CLOCKED) clocks_of_barrier();
    cluster[state.rank].at_barrier = true;
    pyops_host_switch(&thread.stack_pointer, state.main_stack_pointer);  // switch to the next block
}

__attribute__((noinline)) void read_of_block(void* to, const void* own, unsigned rank, size_t size) {
    const void* pc = __builtin_return_address(0);
    const Where where = {nullptr, 0, pc, nullptr};
    const size_t offset = static_cast<const char*>(own) - memory.shared;
    if (rank >= state.launch.cluster || offset >= SHARED_BYTES) {
        raise_fault("out-of-bounds shared access", where, "read of block %u of a cluster of %u", rank,
                    state.launch.cluster);
    }
    if (rank == state.rank) {
        check_access(own, size, Access::READ, pc);
    } else if (cluster[rank].ended) {
        raise_fault("early exit", where, "read of shared memory of block %u of the cluster, which has ended", rank);
    } else if constexpr (CLOCKED) {
        read_by_clocks(rank, offset, size, pc);
    } else {
        for (size_t i = offset; i < offset + size; ++i) {
            Byte& byte = memory.records[SHARED_BYTES * rank + i];
            if (i >= SHARED_BYTES || !byte.allocated) {
                raise_fault("out-of-bounds shared access", where, "read of %zu bytes outside every shared array", size);
            }
            if (byte.copier) {
                raise_fault("async copy not waited for", where,
                            "read of shared memory that an asynchronous copy has yet to write");
            }
            if (byte.write_epoch < cluster[rank].first_epoch) {
                raise_fault("uninitialised shared memory", where,
                            "read of shared memory that block %u of the cluster has not written", rank);
            }
            if (byte.write_epoch > cluster[rank].barrier_epoch) {
                const Index& index = threads[byte.writer].index;
                raise_fault("shared memory race", {nullptr, 0, pc, byte.write_pc},
                            "read of shared memory that thread (%u, %u, %u) of block %u of the cluster has written "
                            "since its last barrier",
                            index.x, index.y, index.z, rank);
            }
            byte.phase = state.phase;
        }
    }
    memcpy(to, memory.arenas + ARENA_BYTES * rank + PAGE + offset, size);
}

inline void enter_block(unsigned rank) {
    state.rank = rank;
    enter_threads(rank);
    memory_enter(rank);
    memory_enter_epochs(cluster[rank].first_epoch, MAX_BARRIERS - 1);
}

inline void pause_block(Paused& paused) {
    paused.block = state.block;
    paused.epoch = memory.epoch;
    paused.synchronised = memory.synchronised;
    memcpy(paused.warp_epoch, memory.warp_epoch, sizeof memory.warp_epoch);
    paused.num_alive = scheduler.num_alive;
    paused.num_at_barrier = scheduler.num_at_barrier;
    memcpy(paused.lanes_arrived, scheduler.lanes_arrived, sizeof scheduler.lanes_arrived);
    if constexpr (!CLOCKED) memcpy(paused.threads, threads, num_threads() * sizeof(Thread));
}

inline void resume_block(const Paused& paused) {
    state.block = paused.block;
    memory.epoch = paused.epoch;
    memory.synchronised = paused.synchronised;
    memcpy(memory.warp_epoch, paused.warp_epoch, sizeof memory.warp_epoch);
    scheduler.num_ready = scheduler.first = 0;
    scheduler.num_alive = paused.num_alive;
    scheduler.num_at_barrier = paused.num_at_barrier;
    memcpy(scheduler.lanes_arrived, paused.lanes_arrived, sizeof scheduler.lanes_arrived);
    if constexpr (!CLOCKED) memcpy(threads, paused.threads, num_threads() * sizeof(Thread));
}

inline void run_block(Index block) {
    memory_enter_epochs(memory.epoch + 1, MAX_EPOCHS);
    if constexpr (CLOCKED) begin_clocked_cluster();
    begin_block(block);
    run_threads();
    if constexpr (CLOCKED) end_clocked_block(0);
}

// Runs a block of the cluster with first block `first` until all of its threads wait. Returns whether a thread could
// run.
inline bool take_turn(unsigned rank, Index first) {
    Paused& own = cluster[rank];
    enter_block(rank);
    if (own.begun) {
        resume_block(own);
        if (own.released) {
            next_epoch();
            make_ready(threads, num_threads(), [](unsigned i) { return threads[i].wait == Wait::CLUSTER; });
        }
        if constexpr (CLOCKED) make_ready(threads, num_threads(), awaited_phase_has_ended);
        if (state.launch.num_ranks) make_ready(threads, num_threads(), awaits_nothing);
    } else if (state.launch.num_ranks) {
        begin_block(first);
        next_epoch();  // flags that a rank has begun refer to its first epoch, so the block uses the next one
    } else {
        begin_block({first.x, first.y + rank, first.z});
    }
    own.begun = true;
    own.released = false;
    if (scheduler.num_ready == 0) return false;
    run_threads();
    own.ended = state.current == nullptr;
    state.current = nullptr;
    if (own.ended && state.launch.num_ranks) end_rank();
    pause_block(own);
    if constexpr (CLOCKED) {
        if (own.ended) end_clocked_block(rank);
    }
    return true;
}

// All ranks wait or have ended. The first time, threads that wait for a flag run again and may give up. The second
// time, the launch ends with a fault.
inline void no_rank_can_run(unsigned stuck) {
    if (!*ranks_that_wait) {
        for (unsigned rank = 0; rank < state.launch.num_ranks; ++rank) {
            if (!cluster[rank].ended) {
                describe_flags(rank, cluster[rank].threads, ranks_that_wait, sizeof ranks_that_wait);
            }
        }
        return;
    }
    enter_block(stuck);
    resume_block(cluster[stuck]);
    raise_fault("deadlock", {nullptr, 0, threads[0].pc}, "%s", ranks_that_wait);
}

// Runs the blocks of the cluster until each of them waits for the cluster or has ended. Returns how many blocks wait.
inline unsigned run_to_barrier(Index first) {
    const unsigned count = state.launch.cluster;
    for (;;) {
        const unsigned start = state.launch.order == Order::SHUFFLED ? random_number() % count : 0;
        unsigned waiting = 0, num_ended = 0, stuck = 0;
        bool ran = false;
        for (unsigned turn = 0; turn < count; ++turn) {
            const unsigned rank = state.launch.order == Order::REVERSED ? count - 1 - turn : (start + turn) % count;
            Paused& own = cluster[rank];
            if (!own.ended && !own.at_barrier) {
                stuck = rank;
                if (take_turn(rank, first)) ran = true;
            }
            waiting += own.at_barrier;
            num_ended += own.ended;
        }
        if (waiting + num_ended == count) return waiting;
        if constexpr (CLOCKED) {
            if (ran || land_copy()) continue;
        }
        if (state.launch.num_ranks) {
            if (!ran) no_rank_can_run(stuck);
            continue;
        }
        enter_block(stuck);
        resume_block(cluster[stuck]);
        nothing_can_run();
    }
}

// Runs the cluster with block `first` as rank 0.
inline void run_cluster(Index first) {
    const unsigned count = state.launch.cluster;
    const uint32_t first_epoch = memory.epoch + 1;
    memory.reserved = memory.epoch + count * MAX_BARRIERS;
    for (unsigned rank = 0; rank < count; ++rank) {
        cluster[rank].begun = cluster[rank].ended = cluster[rank].at_barrier = cluster[rank].released = false;
        cluster[rank].epoch = 0;
        cluster[rank].first_epoch = first_epoch + rank * MAX_BARRIERS;
    }
    if constexpr (CLOCKED) begin_clocked_cluster();
    begin_ranks();
    for (unsigned waiting = count; waiting;) {
        ++state.phase;
        for (unsigned rank = 0; rank < count; ++rank) cluster[rank].barrier_epoch = cluster[rank].epoch;
        waiting = run_to_barrier(first);
        if constexpr (CLOCKED) clocks_of_cluster();
        for (unsigned rank = 0; rank < count; ++rank) {
            cluster[rank].released = cluster[rank].at_barrier;
            cluster[rank].at_barrier = false;
        }
    }
    memory.epoch = memory.reserved;
    state.rank = 0;
    enter_threads(0);
    memory_enter(0);
}

inline void run_grid() {
    const Index grid = state.launch.grid;
    const unsigned high = state.launch.num_ranks ? 1 : state.launch.cluster;  // number of blocks of a cluster along y
    const unsigned rows = grid.y / high;
    const uint64_t count = uint64_t(grid.x) * rows * grid.z;
    scheduler.random = state.launch.seed;
    // A shuffled grid visits its blocks, or clusters, with a step coprime to their number: each is visited exactly
    // once.
    uint64_t step = 1, start = 0;
    if (state.launch.order == Order::SHUFFLED) {
        const auto gcd = [](uint64_t a, uint64_t b) {
            while (b) {
                const uint64_t rest = a % b;
                a = b;
                b = rest;
            }
            return a;
        };
        start = random_number() % count;
        do step = 1 + random_number() % count;
        while (gcd(step, count) != 1);
    }
    for (uint64_t i = 0; i < count; ++i) {
        uint64_t number = i;
        if (state.launch.order == Order::REVERSED) number = count - 1 - i;
        if (state.launch.order == Order::SHUFFLED) number = (start + (unsigned __int128)i * step) % count;
        const Index first = {unsigned(number % grid.x), unsigned(number / grid.x % rows) * high,
                             unsigned(number / grid.x / rows)};
        if (state.launch.cluster == 1 && !state.launch.num_ranks) run_block(first);
        else run_cluster(first);
    }
}

}  // namespace host
