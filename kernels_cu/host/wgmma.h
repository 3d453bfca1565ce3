// wgmma.h: warpgroup MMAs. They are computed when a thread waits for them (GREEDY: when they are issued).
//
// Each of the four warps issues a wgmma. Its reads of shared memory are recorded at that point, as reads by the
// warpgroup's tensor cores at the time of the wgmma's group: a thread that writes there later must have waited for the
// group. The accumulators are copied away and filled with NaN until the wait.
#pragma once
#include "products.h"

namespace host {

// The arguments of a lane to a wgmma.
struct LaneProduct {
    const Product* product;
    void* d;
};

inline bool same_product(const Product& a, const Product& b) {
    return a.a_descriptor == b.a_descriptor && a.b_descriptor == b.b_descriptor && a.columns == b.columns &&
           a.accumulate == b.accumulate && !a.a_registers == !b.a_registers;
}

inline Range range_of(const void* begin, size_t bytes) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(begin);
    return {at, at + bytes};
}

// Takes the registers that the lanes of a warp pass to a wgmma: checks the fence, and watches them from now on.
inline void take_registers(IssuedProduct& issued, Thread* warp, const LaneProduct* const* lanes, const void* pc) {
    const unsigned bytes = issued.product.columns / 2 * 4;
    for (unsigned lane = 0; lane < 32; ++lane) {
        const LaneProduct& own = *lanes[lane];
        const Thread& thread = warp[lane];
        if (!same_product(*own.product, *lanes[0]->product)) {
            raise_fault("divergent wgmma", {nullptr, 0, pc}, "lanes of a warp differ in descriptors");
        }
        const uint32_t* fragment = own.product->a_registers;
        check_fenced(thread, range_of(own.d, bytes), range_of(fragment, fragment ? 16 : 0), pc);
        if (!fragment) continue;
        memcpy(issued.fragments[thread.number % WARPGROUP], fragment, 16);
        Registers& watched = registers[state.rank][thread.number];
        if (watched.num_fragments == MAX_WATCHED) continue;
        watched.fragments[watched.num_fragments++] = {range_of(fragment, 16), thread.product_group, 0, pc};
    }
}

// Returns the chain that the warp continues; MAX_CHAINS if no chain has these accumulators.
inline unsigned find_chain(const TensorCores& cores, unsigned quarter, const void* d) {
    for (unsigned i = 0; i < MAX_CHAINS; ++i) {
        const Chain& chain = cores.chains[i];
        if (chain.used && chain.warps >> quarter & 1 && chain.d[32 * quarter] == d) return i;
    }
    return MAX_CHAINS;
}

// The accumulators of a warp begin a chain, or enter the chain that other warps have begun with this wgmma.
inline unsigned
begin_chain(TensorCores& cores, const IssuedProduct& issued, Thread* warp, const LaneProduct* const* lanes) {
    unsigned number = issued.chain;
    for (unsigned i = 0; number == MAX_CHAINS && i < MAX_CHAINS; ++i) {
        if (!cores.chains[i].used) number = i;
    }
    if (number == MAX_CHAINS) {
        raise_fault("wgmma not waited for", {nullptr, 0, issued.pc}, "more than %u accumulators in flight", MAX_CHAINS);
    }
    Chain& chain = cores.chains[number];
    const Product& product = issued.product;
    if (!chain.used) {
        chain.used = true;
        chain.integers = product.element == Element::INT8;
        chain.columns = product.columns;
        chain.warps = 0;
    }
    chain.warps |= 1u << warp[0].warp % 4;
    for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned thread = warp[lane].number % WARPGROUP;
        float* d = static_cast<float*>(lanes[lane]->d);
        chain.d[thread] = d;
        each_sum(thread, product.columns, [&](unsigned i, unsigned row, unsigned j) { chain.sums[row][j] = d[i]; });
        memset(d, 0xff, product.columns / 2 * 4);
        Registers& watched = registers[state.rank][warp[lane].number];
        watched.accumulators[watched.num_accumulators++] = {range_of(d, product.columns / 2 * 4), 0, number, issued.pc};
    }
    return number;
}

// All lanes of a warp have arrived at a wgmma. The running thread is the last of them.
inline void issue(Thread* warp, const LaneProduct* const* lanes, const void* pc) {
    const Where where = {nullptr, 0, pc, nullptr};
    const Product& product = *lanes[0]->product;
    TensorCores& cores = cores_of(warp[0]);
    if (!cores.used) cores.agent = new_agent(state.rank, AgentKind::TENSOR_CORES, warp[0].number / WARPGROUP);
    cores.used = true;
    const unsigned number = warp[0].num_products, quarter = warp[0].warp % 4, group = warp[0].product_group;
    if (number - cores.num_computed >= MAX_PRODUCTS) {
        raise_fault("wgmma not waited for", where, "%u in flight", MAX_PRODUCTS);
    }
    IssuedProduct& issued = cores.products[number % MAX_PRODUCTS];
    if (!issued.warps) {
        issued.product = product;
        issued.chain = MAX_CHAINS;
        issued.group = group;
        issued.pc = pc;
    } else if (!same_product(issued.product, product) || issued.group != group) {
        raise_fault("divergent wgmma", {nullptr, 0, pc, issued.pc},
                    "warps of a warpgroup differ in the descriptors, the shape or the group of their wgmma number %u",
                    number);
    }
    take_registers(issued, warp, lanes, pc);
    unsigned chain = find_chain(cores, quarter, lanes[0]->d);
    if (chain == MAX_CHAINS) chain = begin_chain(cores, issued, warp, lanes);
    if (issued.chain < MAX_CHAINS && issued.chain != chain) {
        raise_fault("divergent wgmma", where, "warps of a warpgroup go on with different accumulators");
    }
    if (cores.chains[chain].columns != product.columns) {
        raise_fault("missing wgmma fence", where, "wgmma of %u columns into accumulators of one in flight of %u",
                    product.columns, cores.chains[chain].columns);
    }
    issued.chain = chain;
    issued.warps |= 1u << quarter;
    cores.chains[chain].group[quarter] = group;
    const uint32_t agent = agent_index(state.rank, cores.agent);
    const Accessor by = {agent, group + 1, clock_of(*state.current), true, "read by a wgmma"};
    if (!product.a_registers) {
        const auto a = operand_of(product.a_descriptor, product.a_transposed, product.element, "A", pc);
        check_operand(a, 16 * quarter, 16, by, pc);
    }
    const auto b = operand_of(product.b_descriptor, product.b_transposed, product.element, "B", pc);
    check_operand(b, 0, product.columns, by, pc);
    for (unsigned lane = 0; lane < 32; ++lane) ++warp[lane].num_products;
    if (issued.warps != ALL_WARPS) return;
    if (state.launch.order == Order::GREEDY && cores.num_computed == number) compute(cores, issued);
    Thread* first = threads + warp[0].number / WARPGROUP * WARPGROUP;
    make_ready(first, WARPGROUP,
               [=](unsigned i) { return first[i].wait == Wait::WGMMA && first[i].awaited <= number + 1; });
}

__attribute__((noinline)) void wgmma(const Product& product, void* d) {
    const void* pc = __builtin_return_address(0);
    state.asked_pc = pc;
    if (state.current->number / WARPGROUP * WARPGROUP + WARPGROUP > num_threads() || warp_size() != 32) {
        raise_fault("bad launch", {nullptr, 0, pc}, "wgmma in a block of %u threads, by warps that are no warpgroup",
                    num_threads());
    }
    LaneProduct own = {&product, d};
    Thread* warp = threads + state.current->warp * warp_size();
    meet("wgmma", ~uint64_t(0), &own, "", 0, pc, [=](void* const* payloads, uint64_t) {
        const LaneProduct* lanes[32];
        for (unsigned lane = 0; lane < 32; ++lane) lanes[lane] = static_cast<const LaneProduct*>(payloads[lane]);
        issue(warp, lanes, pc);
    });
}

__attribute__((noinline)) void wgmma_commit() { ++state.current->product_group; }

// Computes wgmmas up to number `end`, once all warps of the warpgroup have issued them.
inline void compute_until(TensorCores& cores, unsigned end, const void* pc) {
    while (cores.num_computed < end) {
        IssuedProduct& issued = cores.products[cores.num_computed % MAX_PRODUCTS];
        if (issued.warps == ALL_WARPS) {
            compute(cores, issued);
            continue;
        }
        begin_wait(Wait::WGMMA, "warpgroup_wait, for other warps to issue their wgmma,", 0, "", 0, pc).awaited =
            cores.num_computed + 1;
        yield();
    }
}

// Gives the running thread the results of chains, if the wgmmas of its warp in them belong to groups before `end`.
inline void give_results(TensorCores& cores, unsigned end) {
    const Thread& thread = *state.current;
    Registers& own = registers[state.rank][thread.number];
    const unsigned quarter = thread.warp % 4, number = thread.number % WARPGROUP;
    unsigned kept = 0;
    for (unsigned i = 0; i < own.num_fragments; ++i) {
        if (own.fragments[i].group >= end) own.fragments[kept++] = own.fragments[i];
    }
    own.num_fragments = kept;
    kept = 0;
    for (unsigned i = 0; i < own.num_accumulators; ++i) {
        Chain& chain = cores.chains[own.accumulators[i].chain];
        if (chain.group[quarter] >= end) {
            own.accumulators[kept++] = own.accumulators[i];
            continue;
        }
        float* d = static_cast<float*>(chain.d[number]);
        each_sum(number, chain.columns, [&](unsigned i, unsigned row, unsigned j) { d[i] = chain.sums[row][j]; });
        chain.d[number] = nullptr;
        bool all = true;
        for (unsigned lane = 0; lane < 32; ++lane) all = all && !chain.d[32 * quarter + lane];
        if (all) chain.warps &= ~(1u << quarter);
        if (!chain.warps) chain.used = false;
    }
    own.num_accumulators = kept;
}

__attribute__((noinline)) void wgmma_wait(unsigned groups_in_flight) {
    const void* pc = __builtin_return_address(0);
    Thread& thread = *state.current;
    if (thread.number / WARPGROUP * WARPGROUP + WARPGROUP > num_threads()) return;
    TensorCores& cores = cores_of(thread);
    if (!cores.used || thread.product_group <= groups_in_flight) return;
    const unsigned end = thread.product_group - groups_in_flight;
    unsigned until = cores.num_computed;
    for (unsigned i = cores.num_computed; i < thread.num_products; ++i) {
        if (cores.products[i % MAX_PRODUCTS].group < end) until = i + 1;
    }
    compute_until(cores, until, pc);
    uint32_t& seen = clock_of(thread).seen[agent_index(state.rank, cores.agent)];
    if (seen < end) seen = end;
    give_results(cores, end);
}

// Runs before the blocks of a cluster begin.
inline void begin_clocked_cluster() {
    clocks_begin_cluster();
    cells_begin_cluster();
    bulk.count = 0;
    for (unsigned rank = 0; rank < state.launch.cluster; ++rank) {
        barriers_begin_block(rank);
        registers_begin_block(rank);
        wgmma_begin_block(rank);
    }
}

// Runs when all threads of the block have exited.
inline void end_clocked_block(unsigned rank) {
    clocks.ended[rank] = true;
    check_registers_at_end();
    check_copies_at_end(rank);
}

}  // namespace host
