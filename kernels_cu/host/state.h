// state.h: the launch that runs, its threads, and the fault that ended it.
//
// One launch runs at a time, its blocks one after another, the threads of a block as fibers of one thread of the
// process. Blocks of a cluster take turns: each runs until all of its threads wait for the cluster.
#pragma once
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include "api.h"

namespace host {

constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned MAX_COPIES = 256;  // asynchronous copies that a thread may have in flight
constexpr unsigned MAX_CLUSTER = 8;   // blocks of a cluster
constexpr unsigned MAX_PLACES = 8;    // in the source, that a fault names in its message

// Kernels that include barrier.cuh run with a runtime of their own, which orders accesses by vector clocks (clocks.h).
// The other runtime orders them by barriers of the block and of warps alone, which takes less time.
#ifndef PYOPS_HOST_CLOCKED
#define PYOPS_HOST_CLOCKED 0
#endif
constexpr bool CLOCKED = PYOPS_HOST_CLOCKED;

enum class Wait : uint8_t { NOTHING, BLOCK, WARP, CLUSTER, FLAG, EXITED, MBARRIER, NAMED_BARRIER, WGMMA };

struct Copy {
    char* to;
    const char* from;
    unsigned bytes, valid_bytes, group;
    unsigned arrival;  // 1 + number of the thread's copies_arrive that tells of the copy; 0: none does
};

struct Thread {
    void* stack_pointer;
    Index index;
    unsigned number, lane, warp;
    // What the thread waits for, and where in the source.
    Wait wait;
    const char *operation, *file;
    int line;
    const void* pc;
    uint64_t lanes;
    void* payload;
    unsigned num_copies, group;  // asynchronous copies in flight, and the number of the open group

    // The rest is for CLOCKED runtimes.
    uint32_t time;                    // of what the thread does until it next tells others of it
    unsigned awaited, awaited_phase;  // index and phase of an mbarrier, or number of a named barrier, or of a product
    unsigned num_arrivals;            // calls of copies_arrive
    int store_agent;                  // of its bulk stores; -1: it has started none
    unsigned store_group;             // number of the open group of bulk stores
    unsigned num_products;            // wgmmas that its warp has issued
    unsigned product_group;           // number of the open group of wgmmas
    bool registers_fenced;            // it has called warpgroup_arrive
};

enum class Order : uint32_t { FIFO, REVERSED, GREEDY, SHUFFLED };

// A range of addresses.
struct Range {
    uintptr_t begin, end;
    bool holds(uintptr_t address, size_t bytes) const {
        return address >= begin && address <= end && bytes <= end - address;
    }
};

// The launch as Python fills it in: the same layout as its ctypes structure.
struct Launch {
    Index grid, block;
    uint32_t shared_bytes, warp_size, cluster;
    Order order;
    uint32_t time_limit_ms;
    uint32_t strict_fences;  // fence_proxy_async tells of the calling thread's own writes only
    uint64_t seed;
    const Range* ranges;  // the tensors and workspaces of the call
    uint32_t num_ranges;
    uint32_t num_ranks;              // 0 but in a launch of several ranks (ranks.h), where `cluster` is as many
    void** const* rank_parameters;   // the parameters of each rank
    const uint32_t* owners;          // of each range: its rank, and bits of ranks.h
};

// The fault as Python reads it: the same layout as its ctypes structure. Members that end in `pc` are offsets into the
// kernel's library, 0 if unknown.
struct Fault {
    char kind[64], message[2048], file[256];
    int32_t line, has_thread;
    Index block, thread;
    uint64_t pc, asked_pc, other_pc;
    uint64_t address;                  // of the global memory that was accessed; 0 where the fault is of another kind
    uint64_t waiting_pcs[MAX_PLACES];  // the message calls them @0@, @1@, ...
};

struct State {
    Launch launch;
    uint64_t launch_number;
    void (*entry)(void**);
    void** parameters;
    Index block;
    unsigned rank;   // of the block in its cluster
    uint32_t phase;  // counts the cluster's barriers, and launches; never repeats
    Thread* current;
    const void* asked_pc;                 // return address of the last recorded access in the kernel
    const void* waiting_pcs[MAX_PLACES];  // where threads wait that the next fault names
    unsigned num_waiting;
    void* main_stack_pointer;
    sigjmp_buf escape;
    volatile bool running;
    Fault fault;
};

inline State state;

// `threads` are those of the running block. In a CLOCKED runtime each block of a cluster has its own, for copies land
// while another block runs. The other runtime copies them: an array at a constant address takes less time.
inline Thread all_threads[CLOCKED ? MAX_CLUSTER : 1][MAX_THREADS];
#if PYOPS_HOST_CLOCKED
inline Thread* threads = all_threads[0];
inline void enter_threads(unsigned rank) { threads = all_threads[rank]; }
#else
inline Thread (&threads)[MAX_THREADS] = all_threads[0];
inline void enter_threads(unsigned) {}
#endif

inline Copy copies[MAX_CLUSTER][MAX_THREADS][MAX_COPIES];

inline unsigned num_threads() { return state.launch.block.x * state.launch.block.y * state.launch.block.z; }

// Offset of a code address into the library that holds the running kernel; 0 for an address elsewhere.
inline uint64_t offset_in_kernel(const void* pc) {
    Dl_info kernel, found;
    if (!pc || !dladdr(reinterpret_cast<void*>(state.entry), &kernel) || !dladdr(pc, &found)) return 0;
    if (found.dli_fbase != kernel.dli_fbase) return 0;
    return static_cast<const char*>(pc) - static_cast<const char*>(found.dli_fbase);
}

struct Where {
    const char* file = nullptr;
    int line = 0;
    const void* pc = nullptr;        // of the faulting instruction, or of the next one
    const void* other_pc = nullptr;  // of the other access of a race
    uint64_t address = 0;            // of the global memory that was accessed
};

// End the launch: describe the fault and leave every fiber where it stands.
[[noreturn]] __attribute__((format(printf, 3, 4))) inline void
raise_fault(const char* kind, const Where& where, const char* format, ...) {
    Fault& fault = state.fault;
    snprintf(fault.kind, sizeof fault.kind, "%s", kind);
    int length = 0;
    if (state.launch.num_ranks) length = snprintf(fault.message, sizeof fault.message, "rank %u: ", state.rank);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fault.message + length, sizeof fault.message - length, format, arguments);
    va_end(arguments);
    snprintf(fault.file, sizeof fault.file, "%s", where.file ? where.file : "");
    fault.line = where.line;
    fault.pc = offset_in_kernel(where.pc);
    fault.asked_pc = offset_in_kernel(state.asked_pc);
    fault.other_pc = offset_in_kernel(where.other_pc);
    fault.address = where.address;
    for (unsigned i = 0; i < MAX_PLACES; ++i) {
        fault.waiting_pcs[i] = i < state.num_waiting ? offset_in_kernel(state.waiting_pcs[i]) : 0;
    }
    fault.block = state.block;
    fault.has_thread = state.current != nullptr;
    if (state.current) fault.thread = state.current->index;
    siglongjmp(state.escape, 1);
}

}  // namespace host
