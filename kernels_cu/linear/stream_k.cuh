// stream_k.cuh: the tile scheduler of a GEMM with stream-K for the last wave.
//
// Full waves are data-parallel: every CTA takes one tile of each wave. With CUT, the tiles left for the last, partial
// wave (the rest) are scheduled by stream-K: their k-tiles, tile after tile, are divided into equal runs for `sharers`
// CTAs, so that a CTA works on one tile of the rest or on two consecutive ones. CTAs that share a tile write their
// partial accumulators to the workspace; the last one to arrive reduces all parts in the order of K, so that the result
// does not depend on timing. Each warp does so on its own: warp w of one CTA has the same elements as warp w of the
// others.
//
// The number of sharers is at least the tiles of the rest, and at most the k-tiles of the rest.
#pragma once
#include "memory.cuh"

// The current tile of a CTA and its k-tiles first ... last - 1; `advance` moves to the next.
template <bool CUT>
struct CutTile {
    int tiles, whole, steps, sharers;  // whole: tiles of the full waves; steps: k-tiles per tile
    int number, first, last;

    // The CTA's first tile. Without CUT, every tile has k-tiles first_step ... last_step - 1.
    DEVICE CutTile(int tiles, int first_step, int last_step, int sharers)
        : tiles(tiles),
          whole(tiles / int(gridDim.x) * int(gridDim.x)),
          steps(last_step),
          sharers(sharers),
          number(int(blockIdx.x)),
          first(first_step),
          last(last_step) {
        if (CUT && number >= whole) take(run_begin(blockIdx.x), run_begin(blockIdx.x + 1));
    }
    DEVICE bool exists() const { return number < tiles; }
    DEVICE void advance() {
        const bool is_rest = CUT && number >= whole;
        const int64_t behind =
            int64_t(number - whole + 1) * steps;  // the end of this tile, counted in k-tiles of the rest
        number += gridDim.x;
        if (!CUT || (!is_rest && number < whole)) return;
        take(is_rest ? behind : run_begin(blockIdx.x), run_begin(blockIdx.x + 1));
    }

    // The fix-up. Returns whether `sums` of the calling warp now holds the accumulators over all of K; if not, another
    // CTA finishes the tile. All lanes of the NUM_WARPS warps call. `partial` is the workspace: NUM_WARPS * 32 * ROWS *
    // SUMS elements of 4 bytes per part, and capacity for sharers + tiles of the rest - 1 parts. `arrived` has
    // NUM_WARPS counters per tile of the rest, which are 0 before and after.
    template <int NUM_WARPS, typename Sum, int ROWS, int SUMS>
    DEVICE bool complete(Sum (&sums)[ROWS][SUMS], float* partial, uint32_t* arrived) const {
        if (!CUT || number < whole) return true;
        const int64_t begin = int64_t(number - whole) * steps;
        const int first_sharer = sharer_of(begin), parts = sharer_of(begin + steps - 1) - first_sharer + 1;
        if (parts == 1) return true;
        constexpr int FOURS = ROWS * SUMS / 4, AT_ONCE = FOURS % 8 == 0 ? 8 : 2, PART = FOURS * NUM_WARPS * 32;
        static_assert(SUMS % 4 == 0 && FOURS % AT_ONCE == 0);
        const int own = int(blockIdx.x) - first_sharer, warp = threadIdx.x / 32;
        // The index of a part is its sharer + its tile: from each part to the next, one of the two increases by 1.
        using four_t = decltype(four_of(sums[0]));
        four_t* const fours =
            reinterpret_cast<four_t*>(partial) + int64_t(first_sharer + number - whole) * PART + threadIdx.x;
        uint32_t* const counter = arrived + (number - whole) * NUM_WARPS + warp;
        // Addition of two parts commutes, so the last CTA to arrive keeps its own part in registers.
        bool is_last = parts == 2 && arrivals(counter, 0) == 1;
        if (!is_last) {
            four_t* const to = fours + int64_t(own) * PART;
#pragma unroll
            for (int i = 0; i < FOURS; ++i) {
                to[i * (NUM_WARPS * 32)] = four_of(sums[i * 4 / SUMS] + i * 4 % SUMS);
            }
            is_last = arrivals(counter, 1) + 1 == uint32_t(parts);
        }
        if (!is_last) return false;
        if (threadIdx.x % 32 == 0) atomicExch(counter, 0u);
#pragma unroll
        for (int i = 0; i < ROWS * SUMS && parts > 2; ++i) sums[i / SUMS][i % SUMS] = 0;
        for (int part = parts == 2 ? 1 - own : 0, end = parts == 2 ? 2 - own : parts; part < end; ++part) {
            const four_t* const from = fours + int64_t(part) * PART;
#pragma unroll
            for (int first = 0; first < FOURS; first += AT_ONCE) {
                four_t loaded[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) loaded[i] = load_fresh(from + (first + i) * (NUM_WARPS * 32));
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    Sum* const four = sums[(first + i) * 4 / SUMS] + (first + i) * 4 % SUMS;
                    const Sum terms[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
#pragma unroll
                    for (int j = 0; j < 4; ++j) four[j] += terms[j];
                }
                keep_loads_of_warp();  // hoisted loads of all iterations would not fit in registers
            }
        }
        return true;
    }

private:
    static DEVICE float4 four_of(const float* sums) { return {sums[0], sums[1], sums[2], sums[3]}; }
    static DEVICE int4 four_of(const int32_t* sums) { return {sums[0], sums[1], sums[2], sums[3]}; }

    // The k-tiles of the rest are numbered 0 ... rest_steps() - 1.
    DEVICE int64_t rest_steps() const { return int64_t(tiles - whole) * steps; }
    // The first k-tile of sharer `block`.
    DEVICE int64_t run_begin(int block) const { return rest_steps() * min(block, sharers) / sharers; }
    // The sharer with k-tile `step` in its run.
    DEVICE int sharer_of(int64_t step) const { return int(((step + 1) * sharers - 1) / rest_steps()); }

    // Makes the part of a tile that begins at k-tile `step` of the rest the current one; it ends with the tile or
    // before `end`. If the run is empty, the CTA has no tile left.
    DEVICE void take(int64_t step, int64_t end) {
        if (step >= end) {
            number = tiles;
            return;
        }
        number = whole + int(step / steps);
        const int64_t begin = int64_t(number - whole) * steps;
        first = int(step - begin);
        last = int(min(int64_t(steps), end - begin));
    }

    // Adds `more` to the counter of arrived CTAs and returns its previous value. Afterwards the lanes can read what the
    // CTAs counted in it have written.
    static DEVICE uint32_t arrivals(uint32_t* counter, uint32_t more) {
        __threadfence();
        sync_warp();
        uint32_t before = 0;
        if (threadIdx.x % 32 == 0) {
            before = atomicAdd(counter, more);
            __threadfence();
        }
        sync_warp();  // the loads of the other lanes come after lane 0's fence
        return shfl<32>(before, 0);
    }
};
