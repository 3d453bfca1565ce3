// registers.h: the rules of wgmma for registers of threads, and setmaxnreg.
//
// To the compiler, an array is memory once its address has been taken, and every access to it calls the runtime. So the
// accumulators and fragments that kernels pass to wgmma are watched as memory on the threads' stacks.
#pragma once
#include "bulk.h"

namespace host {

constexpr unsigned MAX_WATCHED = 8;  // fragments of a thread, and accumulator arrays, in use by wgmmas in flight
constexpr unsigned WARPGROUP = 128;  // threads of a warpgroup
constexpr size_t WORD = 4;           // bytes of a register

// An array of registers that a wgmma in flight uses.
struct Watched {
    Range range;
    unsigned group;  // fragments: the group of the wgmma
    unsigned chain;  // accumulators: the chain of wgmmas
    const void* pc;
};
struct Registers {
    uint64_t touched[STACK_BYTES / WORD / 64];  // a bit for each word of the stack since the last warpgroup_arrive
    size_t first, end;                          // the elements of `touched` that may have bits
    Watched fragments[MAX_WATCHED];
    unsigned num_fragments;
    Watched accumulators[MAX_WATCHED];
    unsigned num_accumulators;
};
inline Registers registers[MAX_CLUSTER][MAX_THREADS];

// The number of registers that a warpgroup has asked for (0: none yet), and how many of its threads have asked.
struct RegisterCount { unsigned count, num_threads; };
inline RegisterCount register_counts[MAX_CLUSTER][MAX_THREADS / WARPGROUP];

inline void forget_touched(Registers& own) {
    if (own.first < own.end) memset(own.touched + own.first, 0, (own.end - own.first) * sizeof own.touched[0]);
    own.first = STACK_BYTES;
    own.end = 0;
}

inline void registers_begin_block(unsigned rank) {
    for (unsigned i = 0; i < num_threads(); ++i) {
        Registers& own = registers[rank][i];
        forget_touched(own);
        own.num_fragments = own.num_accumulators = 0;
    }
    memset(register_counts[rank], 0, sizeof register_counts[rank]);
}

inline bool overlap(Range a, Range b) { return a.begin < b.end && b.begin < a.end; }

// Calls f(i, bits) for each element of `touched` with bits of these addresses; for none if they are on no stack of the
// thread.
template <typename F>
inline void each_touched(const Thread& thread, Range range, F f) {
    const size_t number = state.rank * num_threads() + thread.number;
    const size_t stack = reinterpret_cast<uintptr_t>(scheduler.stacks) + number * STACK_BYTES;
    if (range.begin == range.end || !Range{stack, stack + STACK_BYTES}.holds(range.begin, range.end - range.begin)) {
        return;
    }
    const size_t last = (range.end - 1 - stack) / WORD;
    for (size_t word = (range.begin - stack) / WORD; word <= last; word = (word | 63) + 1) {
        const size_t stop = last < (word | 63) ? last : word | 63;
        f(word / 64, ~uint64_t(0) >> (63 - (stop - word)) << word % 64);
    }
}

// Handles an access of the running thread to a stack.
inline void check_registers(const char* address, size_t bytes, Access kind, const void* pc) {
    Thread& thread = *state.current;
    Registers& own = registers[state.rank][thread.number];
    const Range range = {reinterpret_cast<uintptr_t>(address), reinterpret_cast<uintptr_t>(address) + bytes};
    for (unsigned i = 0; i < own.num_accumulators; ++i) {
        if (!overlap(range, own.accumulators[i].range)) continue;
        raise_fault("wgmma not waited for", {nullptr, 0, pc, own.accumulators[i].pc},
                    "%s of accumulators of a wgmma in flight: no warpgroup_wait", verb_of(kind));
    }
    for (unsigned i = 0; kind != Access::READ && i < own.num_fragments; ++i) {
        if (!overlap(range, own.fragments[i].range)) continue;
        raise_fault("wgmma not waited for", {nullptr, 0, pc, own.fragments[i].pc},
                    "%s of a register fragment that a wgmma in flight reads: no warpgroup_wait", verb_of(kind));
    }
    if (!thread.registers_fenced) return;  // without warpgroup_arrive, any wgmma is a fault already
    each_touched(thread, range, [&](size_t i, uint64_t bits) {
        own.touched[i] |= bits;
        if (i < own.first) own.first = i;
        if (i >= own.end) own.end = i + 1;
    });
}

__attribute__((noinline)) void wgmma_fence() {
    state.current->registers_fenced = true;
    forget_touched(registers[state.rank][state.current->number]);
}

// The thread issues a wgmma with these registers.
inline void check_fenced(const Thread& thread, Range accumulators, Range fragment, const void* pc) {
    const Where where = {nullptr, 0, pc, nullptr};
    const Registers& own = registers[state.rank][thread.number];
    if (!thread.registers_fenced) {
        raise_fault("missing wgmma fence", where, "the first wgmma of a warp without warpgroup_arrive() before it");
    }
    const Range used[] = {accumulators, fragment};
    for (const Range range : used) {
        each_touched(thread, range, [&](size_t i, uint64_t bits) {
            if (!(own.touched[i] & bits)) return;
            raise_fault("missing wgmma fence", where,
                        "the thread has used registers of this wgmma since its last warpgroup_arrive()");
        });
    }
}

// setmaxnreg: registers per thread at the start of a kernel that is compiled for `blocks_per_sm` blocks per SM, which
// set_registers sets.
inline unsigned blocks_per_sm = 1;

inline unsigned first_registers() {
    const unsigned count = 65536 / (num_threads() * blocks_per_sm) / 8 * 8;
    return count > 248 ? 248 : count;
}

inline void check_sum_of_registers(const Where& where, unsigned if_none) {
    const unsigned groups = num_threads() / WARPGROUP, available = first_registers() * groups;
    unsigned sum = 0;
    bool asked = false;
    for (unsigned i = 0; i < groups; ++i) {
        const unsigned count = register_counts[state.rank][i].count;
        asked = asked || count;
        sum += count ? count : if_none;
    }
    if (!asked || sum <= available) return;
    raise_fault("setmaxnreg", where,
                "the warpgroups ask for %u registers a thread in all, and have %u: the block would wait for ever", sum,
                available);
}

// Runs at the end of a block: if a warpgroup asked for more registers than the others have released, it would have
// waited forever on a device.
inline void check_registers_at_end() { check_sum_of_registers({}, first_registers()); }

__attribute__((noinline)) void set_registers(unsigned count, unsigned min_blocks, bool more) {
    blocks_per_sm = min_blocks;
    const Where where = {nullptr, 0, __builtin_return_address(0), nullptr};
    if (state.current->number / WARPGROUP >= num_threads() / WARPGROUP) {
        raise_fault("setmaxnreg", where, "by warps that are no whole warpgroup, in a block of %u threads",
                    num_threads());
    }
    const unsigned first = first_registers();
    if (more ? count < first : count > first) {
        raise_fault("setmaxnreg", where, "%s to %u registers, where a thread begins with %u", more ? "up" : "down",
                    count, first);
    }
    RegisterCount& own = register_counts[state.rank][state.current->number / WARPGROUP];
    if (own.num_threads++ && own.count != count) {
        raise_fault("setmaxnreg", where, "%u registers, and %u for other threads of the warpgroup", count, own.count);
    }
    own.count = count;
    check_sum_of_registers(where, 24);  // a warpgroup that has not asked yet may still release all but 24
}

}  // namespace host
