// state.h: the running launch, its threads, and the fault that ended it.
//
// One launch runs at a time, and one block after another. The threads of a block are fibers of one thread of the
// process. The blocks of a cluster run interleaved: each runs until all of its threads wait for the cluster.
#pragma once
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include "api.h"

namespace host {

constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned MAX_COPIES = 256;  // maximum number of asynchronous copies in flight per thread
constexpr unsigned MAX_CLUSTER = 16;  // maximum number of blocks of a cluster
constexpr unsigned MAX_SITES = 8;     // maximum number of source lines that a fault cites in its message

// Kernels that include barrier.cuh run with the CLOCKED runtime, which orders accesses by vector clocks (clocks.h). The
// other runtime orders accesses only by barriers of blocks and of warps, and is faster.
#ifndef PYOPS_HOST_CLOCKED
#define PYOPS_HOST_CLOCKED 0
#endif
constexpr bool CLOCKED = PYOPS_HOST_CLOCKED;

enum class Wait : uint8_t { NOTHING, BLOCK, WARP, CLUSTER, FLAG, EXITED, MBARRIER, NAMED_BARRIER, WGMMA };

struct Copy {
    char* to;
    const char* from;
    unsigned bytes, valid_bytes, group;
    unsigned arrival;  // 1 + number of the copies_arrive call of the thread that covers the copy; 0: none yet
};

struct Thread {
    void* stack_pointer;
    Index index;
    unsigned number, lane, warp;
    // What the thread waits for, and at which source line.
    Wait wait;
    const char *operation, *file;
    int line;
    const void* pc;
    uint64_t lanes;
    void* payload;
    unsigned num_copies, group;  // number of asynchronous copies in flight; number of the open group

    // The remaining members are for CLOCKED runtimes.
    uint32_t time;                    // current time of the thread; advances when the thread releases its clock
    unsigned awaited, awaited_phase;  // index and phase of an mbarrier, or number of a named barrier or a wgmma
    unsigned num_arrivals;            // number of copies_arrive calls so far
    int store_agent;                  // agent of the thread's bulk stores; -1: no bulk store so far
    unsigned store_group;             // number of the open group of bulk stores
    unsigned num_products;            // number of wgmmas that the thread's warp has issued
    unsigned product_group;           // number of the open group of wgmmas
    bool registers_fenced;            // the thread has called warpgroup_arrive
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
    uint32_t strict_fences;  // fence_proxy_async covers only the calling thread's own writes, not other threads' writes
    uint64_t seed;
    const Range* ranges;  // the tensors and workspaces of the call
    uint32_t num_ranges;
    uint32_t num_ranks;             // 0 unless the launch has several ranks (ranks.h); then equal to `cluster`
    void** const* rank_parameters;  // the parameters of each rank
    const uint32_t* owners;         // per range: its rank, and bits of ranks.h
};

// The fault as Python reads it: the same layout as its ctypes structure. Members with names that end in `pc` are
// offsets into the kernel's library, or 0 if unknown.
struct Fault {
    char kind[64], message[2048], file[256];
    int32_t line, has_thread;
    Index block, thread;
    uint64_t pc, asked_pc, other_pc;
    uint64_t address;                 // address of the global memory that was accessed; 0 for other faults
    uint64_t waiting_pcs[MAX_SITES];  // the message calls them @0@, @1@, ...
    uint64_t caller_pcs[MAX_SITES];   // the calls around `pc`, innermost first, up to a 0
};

struct State {
    Launch launch;
    uint64_t launch_number;
    void (*entry)(void**);
    void** parameters;
    Index block;
    unsigned rank;   // rank of the block in its cluster
    uint32_t phase;  // number of cluster barriers and launches so far; never repeats
    Thread* current;
    const void* asked_pc;                // return address of the last recorded access in the kernel
    const void* waiting_pcs[MAX_SITES];  // source positions of waiting threads, for the next fault's message
    unsigned num_waiting;
    void* main_stack_pointer;
    sigjmp_buf escape;
    volatile bool running;
    Fault fault;
};

inline State state;

// `threads` are the threads of the running block. In a CLOCKED runtime each block of a cluster has an array of its own,
// because copies land while another block runs. The other runtime copies the threads in and out of one array: access to
// an array at a constant address is faster.
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

// Returns the offset of a code address in the library that holds the running kernel; 0 for any other address.
inline uint64_t offset_in_kernel(const void* pc) {
    Dl_info kernel, found;
    if (!pc || !dladdr(reinterpret_cast<void*>(state.entry), &kernel) || !dladdr(pc, &found)) return 0;
    if (found.dli_fbase != kernel.dli_fbase) return 0;
    return static_cast<const char*>(pc) - static_cast<const char*>(found.dli_fbase);
}

// Defined in global.h.
inline bool on_a_stack(const void* address);

// A function's frame on a stack: kernels and runtime keep frame pointers.
struct Frame {
    const Frame* caller;
    const void* return_address;
};

// Stores the offsets of the calls around the instruction at `pc` by the running thread.
__attribute__((noinline)) inline void find_callers(const void* pc, uint64_t (&offsets)[MAX_SITES]) {
    unsigned count = 0;
    bool found = false;
    const auto* frame = static_cast<const Frame*>(__builtin_frame_address(0));
    for (; on_a_stack(frame) && count < MAX_SITES; frame = frame->caller) {
        if (found) offsets[count++] = offset_in_kernel(frame->return_address);
        found = found || frame->return_address == pc;
        if (frame->caller <= frame) break;
    }
    while (count < MAX_SITES) offsets[count++] = 0;
}

struct Where {
    const char* file = nullptr;
    int line = 0;
    const void* pc = nullptr;        // address of the faulting instruction or the one after it
    const void* other_pc = nullptr;  // address of the other access of a race
    uint64_t address = 0;            // address of the global memory that was accessed
};

// Ends the launch: describes the fault and abandons every fiber.
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
    find_callers(where.pc, fault.caller_pcs);
    for (unsigned i = 0; i < MAX_SITES; ++i) {
        fault.waiting_pcs[i] = i < state.num_waiting ? offset_in_kernel(state.waiting_pcs[i]) : 0;
    }
    fault.block = state.block;
    fault.has_thread = state.current != nullptr;
    if (state.current) fault.thread = state.current->index;
    siglongjmp(state.escape, 1);
}

}  // namespace host
