// group_slots: finds the tokens of each group of GROUP adjacent slots of a cache, for any order of slot_mapping.
//
//     marks[g] has bit o, and tokens[g * GROUP + o] = t, where slot_mapping[t] = g * GROUP + o
//     groups[0 .. *count) are the groups with a mark, in any order; a slot that does not exist is skipped
//
// The kernel is launched twice. With CLEAR it sets to 0 the count and the marks that the second launch will use, so the
// work grows with the number of tokens, not with the cache, and no memory is read before it is written. If several
// tokens have the same slot, the first to arrive is kept.
//
// Threads: one token per thread.
//
// Constants
//     slot_t         element type of slot_mapping
//     GROUP          slots of a group, at most 32
//     CLEAR          this is the first launch

#include "memory.cuh"

static_assert(GROUP <= 32);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
group_slots(const slot_t* slot_mapping,  // [num_tokens]
            uint32_t* marks,             // [num_slots / GROUP]
            uint32_t* tokens,            // [num_slots]
            uint32_t* groups,            // [min(num_tokens, num_slots / GROUP)]
            uint32_t* count,             // one element
            int64_t num_tokens, int64_t num_slots, int64_t slot_mapping_stride) {
    await_previous_kernel();
    const int64_t token = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (CLEAR && token == 0) *count = 0;
    if (token >= num_tokens) return;
    const int64_t slot = slot_mapping[token * slot_mapping_stride];
    if (slot < 0 || slot >= num_slots) return;
    const uint32_t group = uint32_t(slot) / GROUP, mark = 1u << uint32_t(slot) % GROUP;
    if (CLEAR) {
        store_relaxed(marks + group, 0u);
        return;
    }
    const uint32_t before = atomicOr(marks + group, mark);
    if (before & mark) return;
    tokens[slot] = uint32_t(token);
    if (before == 0) groups[atomicAdd(count, 1u)] = group;
}
