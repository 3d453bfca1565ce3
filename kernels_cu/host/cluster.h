// cluster.h: the blocks of a cluster, and the grid.
//
// Blocks of a cluster take turns: each runs up to the next barrier of the cluster. A block reads shared memory of
// another only by `read_of_block`, and only bytes that were written before the last barrier of the cluster and are not
// written again before the next.
#pragma once
#include "schedule.h"

namespace host {

// State of a block of a cluster while other blocks run.
struct Paused {
    Index block;
    bool ended, synchronised;
    uint32_t first_epoch, epoch, barrier_epoch;  // barrier_epoch: `epoch` at the last barrier of the cluster
    uint32_t warp_epoch[MAX_THREADS / 32];
    Thread threads[MAX_THREADS];
};
inline Paused cluster[MAX_CLUSTER];

__attribute__((noinline)) void cluster_barrier(const char* file, int line) {
    Thread& thread = begin_wait(Wait::CLUSTER, "sync_cluster", 0, file, line, __builtin_return_address(0));
    if (!all_arrived(thread)) return yield();
    pyops_host_switch(&thread.stack_pointer, state.main_stack_pointer);  // the next block's turn
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

inline void pause_block(Paused& paused) {
    paused.block = state.block;
    paused.epoch = memory.epoch;
    paused.synchronised = memory.synchronised;
    memcpy(paused.warp_epoch, memory.warp_epoch, sizeof memory.warp_epoch);
    memcpy(paused.threads, threads, num_threads() * sizeof(Thread));
}

inline void resume_block(const Paused& paused) {
    memory_enter_epochs(paused.first_epoch, MAX_BARRIERS - 1);
    memory.epoch = paused.epoch;
    memory.synchronised = paused.synchronised;
    memcpy(memory.warp_epoch, paused.warp_epoch, sizeof memory.warp_epoch);
    memcpy(threads, paused.threads, num_threads() * sizeof(Thread));
    state.block = paused.block;
    scheduler.num_alive = num_threads();
    next_epoch();
}

inline void run_block(Index block) {
    memory_enter_epochs(memory.epoch + 1, MAX_EPOCHS);
    begin_block(block);
    run_threads();
}

// Run the cluster whose block of rank 0 is `first`. Its blocks take turns, each up to the next barrier of the cluster.
inline void run_cluster(Index first) {
    const unsigned count = state.launch.cluster;
    const uint32_t first_epoch = memory.epoch + 1;
    memory.reserved = memory.epoch + count * MAX_BARRIERS;
    for (unsigned rank = 0; rank < count; ++rank) {
        cluster[rank].first_epoch = first_epoch + rank * MAX_BARRIERS;
        cluster[rank].epoch = 0;
        cluster[rank].ended = false;
    }
    unsigned num_ended = 0;
    for (bool begun = false; num_ended < count; begun = true) {
        ++state.phase;
        for (unsigned rank = 0; rank < count; ++rank) cluster[rank].barrier_epoch = cluster[rank].epoch;
        const unsigned start = state.launch.order == Order::SHUFFLED ? random_number() % count : 0;
        for (unsigned turn = 0; turn < count; ++turn) {
            const unsigned rank = state.launch.order == Order::REVERSED ? count - 1 - turn : (start + turn) % count;
            Paused& own = cluster[rank];
            if (begun && own.ended) continue;
            state.rank = rank;
            memory_enter(rank);
            if (begun) {
                resume_block(own);
            } else {
                memory_enter_epochs(own.first_epoch, MAX_BARRIERS - 1);
                begin_block({first.x, first.y + rank, first.z});
            }
            run_threads();
            own.ended = state.current == nullptr;
            num_ended += own.ended;
            pause_block(own);
        }
    }
    memory.epoch = memory.reserved;
    state.rank = 0;
    memory_enter(0);
}

inline void run_grid() {
    const Index grid = state.launch.grid;
    const unsigned rows = grid.y / state.launch.cluster;
    const uint64_t count = uint64_t(grid.x) * rows * grid.z;
    scheduler.random = state.launch.seed;
    // A shuffled grid goes through its blocks, or clusters, in steps coprime to their number, and so visits each once.
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
        const Index first = {unsigned(number % grid.x), unsigned(number / grid.x % rows) * state.launch.cluster,
                             unsigned(number / grid.x / rows)};
        if (state.launch.cluster == 1) run_block(first);
        else run_cluster(first);
    }
}

}  // namespace host
