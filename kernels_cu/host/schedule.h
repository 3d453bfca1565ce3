// schedule.h: which thread runs next; barriers and collectives.
//
// A thread runs until it waits. The order of a launch says which ready thread runs next: FIFO, the thread that has been
// ready longest; REVERSED, the same with threads and blocks counted from the last; GREEDY, the thread that became ready
// last, so that one warp runs as far as it can before the next; SHUFFLED, a random one, by the seed.
#pragma once
#include "fiber.h"
#include "copies.h"

namespace host {

constexpr size_t STACK_BYTES = 128 * 1024;  // stack of one thread; its first page is unmapped

struct Scheduler {
    char* stacks;
    unsigned capacity, num_stacks;  // number of mapped stacks; number of stacks with their first page already unmapped
    uint16_t ready[MAX_THREADS];    // ring buffer of the threads that can run
    unsigned first, num_ready;
    unsigned num_alive, num_at_barrier;
    uint64_t lanes_arrived[MAX_THREADS / 32];
    uint64_t random;
};
inline Scheduler scheduler;

inline uint64_t random_number() {
    scheduler.random += 0x9e3779b97f4a7c15u;
    uint64_t z = scheduler.random;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

inline bool stacks_init(unsigned count) {
    if (scheduler.capacity < count) {
        if (scheduler.capacity) munmap(scheduler.stacks, STACK_BYTES * scheduler.capacity);
        scheduler.capacity = scheduler.num_stacks = 0;
        const unsigned capacity = count > MAX_THREADS ? MAX_CLUSTER * MAX_THREADS : MAX_THREADS;
        scheduler.stacks = map_pages(STACK_BYTES * capacity);
        if (!scheduler.stacks) return false;
        scheduler.capacity = capacity;
    }
    for (; scheduler.num_stacks < count; ++scheduler.num_stacks) {
        mprotect(scheduler.stacks + scheduler.num_stacks * STACK_BYTES, PAGE, PROT_NONE);
    }
    return true;
}

inline unsigned warp_size() { return state.launch.warp_size; }

// Makes ready each of the `count` threads from `first` on for which which(i) is true.
template <typename Which>
inline void make_ready(Thread* first, unsigned count, Which which) {
    const bool backwards = state.launch.order == Order::REVERSED || state.launch.order == Order::GREEDY;
    for (unsigned k = 0; k < count; ++k) {
        const unsigned i = backwards ? count - 1 - k : k;
        if (!which(i)) continue;
        first[i].wait = Wait::NOTHING;
        scheduler.ready[(scheduler.first + scheduler.num_ready++) % MAX_THREADS] = first[i].number;
    }
}
inline bool all(unsigned) { return true; }

inline Thread* take_ready() {
    if (!scheduler.num_ready) return nullptr;
    const unsigned last = scheduler.num_ready - 1;
    const auto at = [](unsigned i) -> uint16_t& { return scheduler.ready[(scheduler.first + i) % MAX_THREADS]; };
    uint16_t number = at(0);
    if (state.launch.order == Order::GREEDY || state.launch.order == Order::SHUFFLED) {
        uint16_t& chosen = at(state.launch.order == Order::GREEDY ? last : random_number() % scheduler.num_ready);
        number = chosen;
        chosen = at(last);
    } else {
        scheduler.first = (scheduler.first + 1) % MAX_THREADS;
    }
    --scheduler.num_ready;
    return &threads[number];
}

// In a CLOCKED runtime threads also wait for copies and wgmmas, which make progress while no thread can run.
inline bool is_asynchronous(Wait wait) { return wait > Wait::EXITED; }

inline bool same_text(const char* a, const char* b) { return a == b || strcmp(a, b) == 0; }

// Returns whether two threads wait for the same operation at the same source line.
inline bool same_site(const Thread& thread, const Thread& other) {
    return thread.wait == other.wait && thread.lanes == other.lanes && thread.line == other.line &&
           same_text(thread.operation, other.operation) && same_text(thread.file, other.file) &&
           (!is_asynchronous(thread.wait) ||
            (thread.pc == other.pc && thread.awaited == other.awaited && thread.awaited_phase == other.awaited_phase));
}

// Returns whether all threads that `thread` still waits for have exited.
inline bool waits_for_exited(const Thread& thread) {
    if (thread.wait == Wait::EXITED || is_asynchronous(thread.wait)) return false;
    bool exited = false;
    for (unsigned i = 0; i < num_threads(); ++i) {
        const Thread& other = threads[i];
        if (thread.wait == Wait::WARP && (other.warp != thread.warp || !(thread.lanes >> other.lane & 1))) continue;
        if (other.wait == Wait::EXITED) exited = true;
        else if (!same_site(thread, other)) return false;
    }
    return exited;
}

// Ends the launch because no thread can run. The message lists runs of threads that wait at the same source line.
[[noreturn]] inline void deadlock() {
    char text[sizeof Fault::message - 128];
    size_t length = 0;
    bool asynchronous = false;
    const auto append = [&](const char* format, auto... arguments) {
        if (length < sizeof text - 1) length += snprintf(text + length, sizeof text - length, format, arguments...);
    };
    const unsigned count = num_threads();
    bool exited = false;
    for (unsigned i = 0, next; i < count; i = next) {
        exited = exited || waits_for_exited(threads[i]);
        const Thread& thread = threads[i];
        next = i + 1;
        while (next < count && same_site(thread, threads[next])) ++next;
        append(i ? "; threads %u to %u " : "threads %u to %u ", i, next - 1);
        if (thread.wait == Wait::EXITED) {
            append("have exited");
            continue;
        }
        append("wait at %s (", thread.operation);
        if (thread.line || state.num_waiting == MAX_SITES) {
            append("%s:%d", thread.file, thread.line);
        } else {
            append("@%u@", state.num_waiting);
            state.waiting_pcs[state.num_waiting++] = thread.pc;
        }
        if (thread.wait == Wait::WARP) append(", lanes %#llx", static_cast<unsigned long long>(thread.lanes));
        append(")");
        if constexpr (CLOCKED) {
            if (!is_asynchronous(thread.wait)) continue;
            asynchronous = true;
            char more[192];
            describe_wait(more, sizeof more, thread);
            append("%s", more);
        }
    }
    raise_fault(asynchronous ? "deadlock"
                : exited     ? "early exit"
                             : "divergent barrier",
                {state.current->file, state.current->line, state.current->pc}, "%s", text);
}

[[noreturn]] inline void nothing_can_run() {
    for (unsigned i = 0; i < num_threads(); ++i) {  // the fault names the first thread that waits
        if (threads[i].wait != Wait::EXITED) state.current = &threads[i];
    }
    deadlock();
}

// Lets another thread run, and returns when the calling thread is scheduled again.
inline void yield() {
    Thread* thread = state.current;
    if constexpr (CLOCKED) land_copy_early();
    Thread* next = take_ready();
    if (!next && (state.launch.num_ranks || (CLOCKED && state.launch.cluster > 1))) {  // switch to another block
        pyops_host_switch(&thread->stack_pointer, state.main_stack_pointer);
        return;
    }
    if constexpr (CLOCKED) {
        while (!next && land_copy()) next = take_ready();
    }
    if (!next) nothing_can_run();
    if (next == thread) return;
    state.current = next;
    pyops_host_switch(&thread->stack_pointer, next->stack_pointer);
}

inline Thread&
begin_wait(Wait wait, const char* operation, uint64_t lanes, const char* file, int line, const void* pc) {
    Thread& thread = *state.current;
    thread.wait = wait;
    thread.operation = operation;
    thread.lanes = lanes;
    thread.file = file;
    thread.line = line;
    thread.pc = pc;
    return thread;
}

// Counts `thread` as arrived at a barrier of its block. Returns whether all threads of the block have arrived.
inline bool all_arrived(const Thread& thread) {
    if (++scheduler.num_at_barrier < num_threads()) return false;
    for (unsigned i = 0; i < num_threads(); ++i) {
        if (!same_site(thread, threads[i])) deadlock();
    }
    scheduler.num_at_barrier = 0;
    return true;
}

__attribute__((noinline)) void block_barrier(const char* file, int line) {
    if (all_arrived(begin_wait(Wait::BLOCK, "__syncthreads", 0, file, line, __builtin_return_address(0)))) {
        next_epoch();
        if constexpr (CLOCKED) clocks_of_barrier();
        if (state.launch.num_ranks) ranks_at_barrier();
        make_ready(threads, num_threads(), all);
    }
    yield();
}

// Waits for the lanes of the warp that `lanes` selects. The last lane to arrive calls complete(payloads, lanes).
template <typename Complete>
inline void
meet(const char* name, uint64_t lanes, void* payload, const char* file, int line, const void* pc, Complete complete) {
    const unsigned first = state.current->warp * warp_size(), left = num_threads() - first;
    const unsigned size = left < warp_size() ? left : warp_size();  // lanes in this warp
    if (size < 64) lanes &= (uint64_t(1) << size) - 1;
    Thread* warp = threads + first;
    Thread& thread = begin_wait(Wait::WARP, name, lanes, file, line, pc);
    thread.payload = payload;
    if (!(lanes >> thread.lane & 1)) {
        raise_fault("divergent barrier", {file, line, pc}, "%s by a lane that it does not name", name);
    }
    uint64_t& arrived = scheduler.lanes_arrived[thread.warp];
    arrived |= uint64_t(1) << thread.lane;
    if ((arrived & lanes) == lanes) {
        void* payloads[64];
        for (uint64_t rest = lanes; rest; rest &= rest - 1) {
            const unsigned lane = __builtin_ctzll(rest);
            if (!same_site(thread, warp[lane])) deadlock();
            payloads[lane] = warp[lane].payload;
        }
        arrived &= ~lanes;
        complete(payloads, lanes);
        make_ready(warp, size, [=](unsigned lane) { return lanes >> lane & 1; });
    }
    yield();
}

__attribute__((noinline)) void
warp_collective(const char* name, uint64_t lanes, void* payload, Combine combine, const char* file, int line) {
    meet(name, lanes, payload, file, line, __builtin_return_address(0), combine);
}

__attribute__((noinline)) void warp_barrier(uint64_t lanes, const char* file, int line) {
    const unsigned warp = state.current->warp;
    meet("__syncwarp", lanes, nullptr, file, line, __builtin_return_address(0), [=](void* const*, uint64_t lanes) {
        ++memory.warp_epoch[warp];
        if constexpr (CLOCKED) clocks_of_warp(threads + warp * warp_size(), lanes);
    });
}

// The function that every fiber runs.
inline void thread_main() {
    state.entry(state.launch.num_ranks ? state.launch.rank_parameters[state.rank] : state.parameters);
    Thread& thread = *state.current;
    if constexpr (CLOCKED) {
        check_exit();
    } else if (thread.num_copies) {
        raise_fault("async copy not waited for", {}, "the thread exits before %u copies", thread.num_copies);
    }
    thread.wait = Wait::EXITED;
    thread.operation = thread.file = "";
    thread.line = 0;
    thread.lanes = 0;
    if (--scheduler.num_alive) yield();
    state.current = nullptr;
    void* abandoned;
    pyops_host_switch(&abandoned, state.main_stack_pointer);
}

// Runs all ready threads, and the threads that they make ready, until every thread of the block has exited or waits for
// the cluster. In a cluster of a CLOCKED runtime it runs them until every thread waits for anything.
inline void run_threads() {
    state.current = take_ready();
    pyops_host_switch(&state.main_stack_pointer, state.current->stack_pointer);
}

inline void begin_block(Index block) {
    state.block = block;
    memory_begin_block();
    const Index size = state.launch.block;
    scheduler.num_alive = num_threads();
    scheduler.num_ready = scheduler.first = scheduler.num_at_barrier = 0;
    scheduler.random = state.launch.seed ^ (uint64_t(block.x) << 40 ^ uint64_t(block.y) << 20 ^ block.z) * 0x9e3779b9u;
    memset(scheduler.lanes_arrived, 0, sizeof scheduler.lanes_arrived);
    for (unsigned i = 0; i < num_threads(); ++i) {
        Thread& thread = threads[i];
        thread = {};
        thread.number = i;
        thread.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
        thread.lane = i % warp_size();
        thread.warp = i / warp_size();
        thread.time = 1;
        thread.store_agent = -1;
        thread.stack_pointer =
            new_fiber(scheduler.stacks + (state.rank * num_threads() + i + 1) * STACK_BYTES, thread_main);
    }
    make_ready(threads, num_threads(), all);
}

}  // namespace host
