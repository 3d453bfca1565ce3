// paged.cuh: the offset of a token in a paged KV cache.
//
// A cache has num_blocks blocks of BLOCK_SIZE slots. Slot number block * BLOCK_SIZE + offset is slot `offset` of the
// block. A row of a block table lists the blocks of a sequence, one for every BLOCK_SIZE positions. For any input, the
// result is the offset of an existing slot in elements, or NOWHERE.

#pragma once
#include "memory.cuh"

constexpr int64_t NOWHERE = -1;

template <int BLOCK_SIZE>
struct Pages {
    int64_t num_blocks, block_stride, slot_stride;  // strides in elements

    DEVICE int64_t at_slot(int64_t slot) const {
        if (slot < 0 || slot >= num_blocks * BLOCK_SIZE) return NOWHERE;
        return int64_t(uint64_t(slot) / BLOCK_SIZE) * block_stride + int64_t(uint64_t(slot) % BLOCK_SIZE) * slot_stride;
    }

    // `blocks` is the sequence's row of the block table: max_blocks entries with stride `stride`.
    template <typename index_t>
    DEVICE int64_t at_position(int64_t position, const index_t* blocks, int64_t max_blocks, int64_t stride) const {
        if (position < 0 || position >= max_blocks * BLOCK_SIZE) return NOWHERE;
        return in_block(blocks[page_of(position) * stride], position);
    }
    // at_position in two steps, for a position that exists: `block` is the block table entry number page_of(position).
    static DEVICE int64_t page_of(int64_t position) { return int64_t(uint64_t(position) / BLOCK_SIZE); }
    DEVICE int64_t in_block(int64_t block, int64_t position) const {
        if (block < 0 || block >= num_blocks) return NOWHERE;
        return block * block_stride + int64_t(uint64_t(position) % BLOCK_SIZE) * slot_stride;
    }
};

// Returns how many of `count` ascending numbers, with stride `stride`, are <= value. If the numbers do not ascend, the
// result is any number from 0 to `count`. The binary search takes two steps at a time: it loads both numbers that the
// second step may need together with the number of the first step, because the latency of the loads dominates its time.
template <typename index_t>
DEVICE int64_t count_up_to(const index_t* numbers, int64_t count, int64_t stride, int64_t value) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const int64_t lower = low + (middle - low) / 2, upper = middle + 1 + (high - middle - 1) / 2;
        const int64_t at_lower = numbers[lower * stride], at_upper = numbers[min(upper, count - 1) * stride];
        const int64_t at_middle = numbers[middle * stride];
        keep_loads();
        const bool above = at_middle <= value;
        low = above ? middle + 1 : low;
        high = above ? high : middle;
        if (low == high) break;
        const bool above_next = (above ? at_upper : at_lower) <= value;
        low = above_next ? (above ? upper : lower) + 1 : low;
        high = above_next ? high : above ? upper : lower;
    }
    return low;
}
