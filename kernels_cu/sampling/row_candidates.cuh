// row_candidates.cuh: the logits of a row that top-k may keep, found in one pass over the row and gathered by the first
// block of its cluster. What follows needs neither the row nor the other blocks.
//
// 1. Bound: the k-th largest of many maxima, each over a group of the block's first logits, is a lower bound of the
//    k-th largest of the row.
// 2. Collect: each block stores its logits from its bound on.
// 3. Gather: the first block copies the candidates of all others, in any order.
//
// Every block finds its own bound, so the cluster meets only before and after the gather.

#pragma once
#include "key_search.cuh"

// VECTORS: vectors of VEC logits per thread of a block.
template <typename T, int VEC, int CLUSTER, int NUM_THREADS, int VECTORS>
struct RowCandidates {
    static constexpr int BATCH = 4;   // vectors of a thread in flight: a group that has one maximum
    static constexpr int GROUPS = 4;  // groups of a thread that make the bound
    static constexpr int BOUNDING = ceil_div(VECTORS, BATCH) < GROUPS ? ceil_div(VECTORS, BATCH) : GROUPS;

    uint64_t* const all;     // [capacity]: key * 2^32 + token
    uint32_t* const shared;  // [4]: smallest and largest of the block's maxima; its bound's key; its candidates, zeros
    const uint32_t capacity;
    uint32_t count = 0;  // candidates of the row, once gathered

    // Whether a row of logits in random order is likely to have no more candidates than fit.
    DEVICE bool is_worthwhile(int k) const {
        constexpr int PER_K = CLUSTER * ceil_div(VECTORS, BATCH * BOUNDING);
        return k <= BOUNDING * NUM_THREADS / 2 && int64_t(k) * PER_K + k / 4 * PER_K <= capacity;
    }

    // The key of the bound; MIN_KEY, which all logits that can be drawn reach, if there are fewer than k maxima.
    template <typename SEARCH>
    DEVICE uint32_t find_bound(SEARCH& search, const Span<T, VEC>& piece, int k) const {
        uint32_t maxima[BOUNDING], smallest = ~0u, largest = 0;
#pragma unroll
        for (int g = 0; g < BOUNDING; ++g) {
            Vec<T, VEC> batch[BATCH];
            load(piece, g * BATCH, batch);
            float x = minus_infinity();
#pragma unroll
            for (int b = 0; b < BATCH; ++b) x = ieee_max(x, max_of(batch[b]));
            maxima[g] = key_of(clean(x));
            if (maxima[g] >= MIN_KEY) smallest = min(smallest, maxima[g]);
            largest = max(largest, maxima[g]);
        }
        smallest = lane_reduce<Min, WARP_SIZE>(smallest);
        largest = lane_reduce<Max, WARP_SIZE>(largest);
        if (threadIdx.x % WARP_SIZE == 0) {
            atomicMin(shared, smallest);
            atomicMax(shared + 1, largest);
        }
        __syncthreads();
        KeyRange range{shared[0], shared[1]};
        if (range.high < MIN_KEY) return MIN_KEY;
        const auto wanted_of = [&](uint64_t held) { return uint64_t(k) <= held ? uint64_t(k) : uint64_t(0); };
        const auto visit = [&](auto f) {
#pragma unroll
            for (uint32_t key : maxima) {
                if (key >= MIN_KEY && range.holds(key)) f(key, {1, 0});
            }
        };
        // A bin of many maxima would make a low bound.
        do {
            if (!search.template refine<1>(range, wanted_of, visit)) return MIN_KEY;
        } while (!range.is_found && search.found->held > range.wanted + k / 2);
        return range.low;
    }

    // Stores the block's logits from the bound on; the first one of the piece is token `first_token`.
    DEVICE void collect(const Span<T, VEC>& piece, int first_token, float bound) const {
        bool is_full = false;
#pragma unroll 1
        for (int i = 0; i < VECTORS && !is_full; i += BATCH) {
            Vec<T, VEC> batch[BATCH];
            load(piece, i, batch);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (!(max_of(batch[b]) >= bound)) continue;  // a bound is a number, and NaN reaches none
                const int token = first_token + piece.element((i + b) * NUM_THREADS + int(threadIdx.x));
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    const float x = batch[b][j];
                    if (!(x >= bound)) continue;
                    const uint32_t slot = atomicAdd(shared + 3, 1u);
                    if (slot < capacity) all[slot] = uint64_t(key_of(clean(x))) << 32 | uint32_t(token + j);
                    is_full = slot >= capacity;
                }
            }
        }
    }

    // The first block of the cluster gets the candidates of all blocks. Returns whether they fit, and sets `min_key` to
    // the largest bound.
    DEVICE bool gather(uint32_t& min_key) {
        sync_cluster<CLUSTER>();
        const int lane = threadIdx.x % WARP_SIZE;
        min_key = lane_reduce<Max, WARP_SIZE>(load_of_block<CLUSTER>(shared + 2, lane % CLUSTER));
        const uint32_t own = lane < CLUSTER ? load_of_block<CLUSTER>(shared + 3, lane) : 0;
        const uint32_t up_to = sum_to_lane(own);
        count = shfl<WARP_SIZE>(up_to, WARP_SIZE - 1);
        const bool fits = count <= capacity;
        if constexpr (CLUSTER > 1) {
            uint32_t begin[CLUSTER];
#pragma unroll
            for (int rank = 1; rank < CLUSTER; ++rank) begin[rank] = shfl<WARP_SIZE>(up_to, rank - 1);
            const uint32_t end = fits && blockIdx.y == 0 ? count : 0;
            for (uint32_t i = begin[1] + threadIdx.x; i < end; i += NUM_THREADS) {
                uint32_t from = 0, rank = 0;
#pragma unroll
                for (int r = 1; r < CLUSTER; ++r) {
                    if (i >= begin[r]) from = begin[r], rank = r;
                }
                all[i] = load_of_block<CLUSTER>(all + (i - from), rank);
            }
            sync_cluster<CLUSTER>();
        }
        return fits;
    }

    // All three steps.
    template <typename SEARCH>
    DEVICE bool find(SEARCH& search, const Span<T, VEC>& piece, int first_token, int k, uint32_t& min_key) {
        const uint32_t bound = find_bound(search, piece, k);
        if (threadIdx.x == 0) shared[2] = bound;
        collect(piece, first_token, number_of(bound));
        return gather(min_key);
    }

    // f(key, token) for every candidate, each by one thread.
    template <typename F>
    DEVICE void for_each(F f) const {
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < count; i += NUM_THREADS) f(uint32_t(all[i] >> 32), uint32_t(all[i]));
    }

private:
    static DEVICE void load(const Span<T, VEC>& piece, int i, Vec<T, VEC> (&batch)[BATCH]) {
        const T absent = from_float<T>(minus_infinity());
        piece.template load_batch<NUM_THREADS>(i * NUM_THREADS + int(threadIdx.x), absent, batch);
    }
    static DEVICE float max_of(const Vec<T, VEC>& vec) {
        float x = vec[0];
#pragma unroll
        for (int j = 1; j < VEC; ++j) x = ieee_max(x, vec[j]);
        return x;
    }
};
