// stream_k.cuh: the tiles of a matrix product that a block takes, those of the last round cut along K.
//
// Blocks take tiles in rounds, a block one tile of each. With CUT, tiles that are too few for a round are the rest: their
// steps of K, tile after tile, are dealt to `sharers` blocks in equal runs, so that a block has steps of one tile of the
// rest or of two neighbours. Blocks that have parts of one tile leave sums in memory; the last one to arrive adds the
// sums of all parts up in the order of K. Warps do so each for themselves: warp w of a block has the sums of the same
// elements as warp w of the others.
//
// There are as many sharers as tiles of the rest at least, and as steps of the rest at most.
#pragma once
#include "memory.cuh"

// The steps first ... last - 1 of a tile, and how to come to the next.
template <bool CUT>
struct CutTile {
    int tiles, whole, steps, sharers;  // whole: tiles of rounds that are full; steps: of a tile
    int number, first, last;

    // The first part of the block. Without CUT, every part has these steps.
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
        const int64_t behind = int64_t(number - whole + 1) * steps;  // the tile, in steps of the rest
        number += gridDim.x;
        if (!CUT || (!is_rest && number < whole)) return;
        take(is_rest ? behind : run_begin(blockIdx.x), run_begin(blockIdx.x + 1));
    }

    // Whether the calling warp has the sums of all of the tile now, in `sums`; otherwise another block will. All lanes of
    // the NUM_WARPS warps call. `partial` has NUM_WARPS * 32 * ROWS * SUMS floats for each part: sharers + tiles of the
    // rest - 1 are enough. `arrived` has NUM_WARPS counters for each tile of the rest, 0 before and after.
    template <int NUM_WARPS, int ROWS, int SUMS>
    DEVICE bool complete(float (&sums)[ROWS][SUMS], float* partial, uint32_t* arrived) const {
        if (!CUT || number < whole) return true;
        const int64_t begin = int64_t(number - whole) * steps;
        const int first_sharer = sharer_of(begin), parts = sharer_of(begin + steps - 1) - first_sharer + 1;
        if (parts == 1) return true;
        constexpr int FOURS = ROWS * SUMS / 4, AT_ONCE = FOURS % 8 == 0 ? 8 : 2, PART = FOURS * NUM_WARPS * 32;
        static_assert(SUMS % 4 == 0 && FOURS % AT_ONCE == 0);
        const int own = int(blockIdx.x) - first_sharer, warp = threadIdx.x / 32;
        // From one part to the next, the sharer or the tile is another one.
        float4* const fours =
            reinterpret_cast<float4*>(partial) + int64_t(first_sharer + number - whole) * PART + threadIdx.x;
        uint32_t* const counter = arrived + (number - whole) * NUM_WARPS + warp;
        // The order of two terms does not matter: those of the last to arrive stay in registers.
        bool is_last = parts == 2 && arrivals(counter, 0) == 1;
        if (!is_last) {
            float4* const to = fours + int64_t(own) * PART;
#pragma unroll
            for (int i = 0; i < FOURS; ++i) {
                const float* four = sums[i * 4 / SUMS] + i * 4 % SUMS;
                to[i * (NUM_WARPS * 32)] = {four[0], four[1], four[2], four[3]};
            }
            is_last = arrivals(counter, 1) + 1 == uint32_t(parts);
        }
        if (!is_last) return false;
        if (threadIdx.x % 32 == 0) atomicExch(counter, 0u);
#pragma unroll
        for (int i = 0; i < ROWS * SUMS && parts > 2; ++i) sums[i / SUMS][i % SUMS] = 0.0f;
        for (int part = parts == 2 ? 1 - own : 0, end = parts == 2 ? 2 - own : parts; part < end; ++part) {
            const float4* const from = fours + int64_t(part) * PART;
#pragma unroll
            for (int first = 0; first < FOURS; first += AT_ONCE) {
                float4 loaded[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) loaded[i] = load_fresh(from + (first + i) * (NUM_WARPS * 32));
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    float* const four = sums[(first + i) * 4 / SUMS] + (first + i) * 4 % SUMS;
                    const float terms[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
#pragma unroll
                    for (int j = 0; j < 4; ++j) four[j] += terms[j];
                }
                keep_loads_of_warp();  // loads of all sums at once have no registers
            }
        }
        return true;
    }

private:
    // The steps of the rest are 0 ... rest_steps() - 1.
    DEVICE int64_t rest_steps() const { return int64_t(tiles - whole) * steps; }
    // The first step of sharer number `block`.
    DEVICE int64_t run_begin(int block) const { return rest_steps() * min(block, sharers) / sharers; }
    // The sharer that has a step: the last whose run begins no later.
    DEVICE int sharer_of(int64_t step) const { return int(((step + 1) * sharers - 1) / rest_steps()); }

    // What there is of a tile from step `step` of the rest on, before step `end`.
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

    // How many blocks had arrived before `more` are added. What the lanes of those wrote before can be read afterwards.
    static DEVICE uint32_t arrivals(uint32_t* counter, uint32_t more) {
        __threadfence();
        sync_warp();
        uint32_t before = 0;
        if (threadIdx.x % 32 == 0) {
            before = atomicAdd(counter, more);
            __threadfence();
        }
        sync_warp();  // behind the fence, for the loads of the other lanes
        return shfl<32>(before, 0);
    }
};
