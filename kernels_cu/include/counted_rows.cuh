// counted_rows.cuh: the work of a warp on batches of experts, where only the first rows of each expert exist.
//
// Expert e has the rows 0 to counts[e] - 1, with counts clamped to 0 ... num_tokens. A work item is one of the `chunks`
// chunks of a row. The items of all experts form one sequence, split evenly among the warps of the grid. Each warp
// computes the prefix sum of counts, finds the expert, row and chunk where its share begins, and walks its items from
// there. All lanes of the warp take part.

#pragma once
#include "reduce.cuh"
#include "vec.cuh"

template <int NUM_THREADS>
struct CountedRows {
    const int32_t* counts;  // [num_experts]
    int num_experts, num_tokens, chunks;
    int64_t remaining = 0;  // items of the warp, the current one included
    int expert = 0, token = 0, chunk = 0;
    int count = 0;  // rows of the expert

    DEVICE CountedRows(const int32_t* counts, int num_experts, int num_tokens, int chunks)
        : counts(counts), num_experts(num_experts), num_tokens(num_tokens), chunks(chunks) {
        // Each lane sums up the rows of its consecutive experts, and adds the rows of all lower lanes.
        const int lane = threadIdx.x % WARP_SIZE;
        const int lane_experts = ceil_div(num_experts, WARP_SIZE);
        const int first = min(lane * lane_experts, num_experts), end = min(first + lane_experts, num_experts);
        int64_t rows_until = 0;
#pragma unroll 4
        for (int e = first; e < end; ++e) rows_until += count_of(e);
        const int64_t own_rows = rows_until;
#pragma unroll
        for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
            const int64_t before = shfl<WARP_SIZE>(rows_until, lane < distance ? lane : lane - distance);
            if (lane >= distance) rows_until += before;
        }
        const int64_t items = shfl<WARP_SIZE>(rows_until, WARP_SIZE - 1) * chunks;
        const int64_t num_warps = int64_t(gridDim.x) * (NUM_THREADS / WARP_SIZE);
        const int64_t warp = int64_t(blockIdx.x) * (NUM_THREADS / WARP_SIZE) + threadIdx.x / WARP_SIZE;
        remaining = items * (warp + 1) / num_warps - items * warp / num_warps;
        if (remaining == 0) return;

        // Only the lane that counted the first item's row finds expert and row; they stay 0 in all other lanes.
        const int64_t row = items * warp / num_warps / chunks;
        chunk = items * warp / num_warps % chunks;
        if (row >= rows_until - own_rows && row < rows_until) {
            int64_t rest = row - (rows_until - own_rows);
#pragma unroll 1
            for (expert = first; rest >= count_of(expert); ++expert) rest -= count_of(expert);
            token = rest;
        }
        expert = lane_reduce<Sum, WARP_SIZE>(expert);
        token = lane_reduce<Sum, WARP_SIZE>(token);
        count = count_of(expert);
    }

    DEVICE int count_of(int e) const { return min(max(counts[e], 0), num_tokens); }

    DEVICE void next() {
        if (--remaining == 0 || ++chunk < chunks) return;
        chunk = 0;
        ++token;
#pragma unroll 1
        while (token >= count) {
            token = 0;
            count = count_of(++expert);
        }
    }
};
