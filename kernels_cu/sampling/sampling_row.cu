// sampling_row: a token of each row, whose logits leave memory once: the blocks of a cluster keep a piece of the row each.
//
//     samples[row] = the first t with sum_{i <= t} w_i > floor(r * sum w / 2^64)    r = philox(seeds[row], offsets[row])
//
// for the weights w of tokens that no filter takes away, and r = 0 if the likeliest is to be taken; -1 if there is none:
//
//     top-k   leaves top_k[row] tokens, and those that equal the last of them
//     top-p   of these, the likeliest whose weights reach top_p[row] of all, and those that equal the last of them
//
// 1. The piece goes to shared memory. The blocks tell each other the extremes of the threads' largest logits.
// 2. top-k: the k-th largest of these is a bound that the k-th largest of all is not below. What is as large is counted.
// 3. top-p: without top-k, weights are added up in coarse bins, a counter for each lane so that lanes never meet. Of the bin
//    in which enough is reached, and else of what top-k left, weights are added up by key.
// 4. The blocks tell each other what they have left. The one in which the random number falls looks for the token.
//
// Keys are floats as integers of the same order. Steps 2 and 3 cut what keys the sought one may be among into BINS bins of
// equal width, find the bin, cut that, and end when it has one key, or when all of it is wanted. A bit of a thread's for each
// of its logits says which are still looked at. All sums are of integers.
//
// Vector i * NUM_THREADS + t of the piece is thread t's; logits that are not there are -inf.
//
// Constants
//     scalar_t      element type of logits
//     HAS_OFFSETS, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P, HAS_TEMPERATURE   false when that argument is null
//     CLUSTER       blocks that share a row and run together
//     VECTORS       of four logits, of a thread
//     BITS          of a key that a cut finds
//     MIN_BLOCKS    of a multiprocessor, for which there are registers
//     NUM_THREADS   threads in the block

#include "async.cuh"
#include "cluster.cuh"
#include "philox.cuh"
#include "probability.cuh"

constexpr int VEC = 4, ELEMENTS = VECTORS * VEC, WORDS = ceil_div(ELEMENTS, 32), IN_WORD = 32 / VEC;
constexpr int BINS = 1 << BITS;
constexpr int COARSE = 2 * BINS / GROUP_BINS;       // coarse bins: their counters take the room of two cuts
constexpr uint32_t LEAST_KEY = 0x00800000u;         // of a number: that of -FLOAT_MAX
constexpr int LOW = 20;                             // bits in a weight's low part, of which a block adds up any number
using Likeliness = Weights<HAS_TEMPERATURE, HAS_MIN_P, LOW>;
using parts_t = PartsOf<LOW>;
static_assert(ELEMENTS * NUM_THREADS < 1 << 17);    // so that sums of high parts, and a lane's of low ones, have 32 bits

// The keys among which the sought one is, and what of them is wanted: 0 as long as nobody knows.
struct Sought {
    uint32_t low, high;
    uint64_t wanted = 0;
    bool is_found = false;
    DEVICE bool holds(uint32_t key) const { return key - low <= high - low; }
};

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
sampling_row(int32_t* samples,             // [num_rows]
             const scalar_t* logits,       // [num_rows, vocab_size]
             const int64_t* seeds,         // [num_rows]
             const int64_t* offsets,       // [num_rows]
             const int32_t* top_k,         // [num_rows]
             const float* top_p,           // [num_rows]
             const float* min_p,           // [num_rows]
             const float* temperature,     // [num_rows]
             int64_t vocab_size, int64_t logits_stride, int64_t piece_size) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];  // [VECTORS, NUM_THREADS]
    __shared__ uint32_t bins[4 * BINS];  // of a cut, low parts and high parts, and of the one after
    __shared__ uint64_t groups[2][COARSE];
    __shared__ uint64_t partial[2][NUM_THREADS / WARP_SIZE];
    __shared__ Found<uint64_t> found;
    __shared__ uint32_t extremes[2];
    __shared__ uint64_t sum_of_block;
    using vec_t = Vec<scalar_t, VEC>;
    vec_t* const vectors = reinterpret_cast<vec_t*>(memory) + threadIdx.x;
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t row = blockIdx.x, first = min(int64_t(blockIdx.y) * piece_size, vocab_size);
    const Span<scalar_t, VEC> piece(logits + row * logits_stride + first, int(min(piece_size, vocab_size - first)));

#pragma unroll 1
    for (int i = 0; i < VECTORS; ++i) {
        const int number = i * NUM_THREADS + int(threadIdx.x);
        if (piece.is_whole(number)) {
            cp_async<int(sizeof(vec_t))>(vectors + i * NUM_THREADS, piece.base + number * VEC);
        } else {
            vectors[i * NUM_THREADS] = piece.load(number, from_float<scalar_t>(minus_infinity()));
        }
    }
    cp_async_commit();
    for (int i = threadIdx.x; i < 4 * BINS; i += NUM_THREADS) bins[i] = 0;
    if (threadIdx.x < 2) extremes[threadIdx.x] = threadIdx.x ? 0 : ~0u;
    __syncthreads();
    cp_async_wait<0>();

    // f(logits, word, bit) for all vectors of the thread, and the bit of the first of its logits.
    const auto for_each = [&](auto f) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
#pragma unroll 2
            for (int i = 0; i < min(IN_WORD, VECTORS - w * IN_WORD); ++i) {
                float x[VEC];
                vectors[(w * IN_WORD + i) * NUM_THREADS].to_floats(x);
#pragma unroll
                for (int j = 0; j < VEC; ++j) x[j] = clean(x[j]);
                f(x, w, i * VEC);
            }
        }
    };
    float largest = minus_infinity();
    for_each([&](const auto& x, int, int) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) largest = ieee_max(largest, x[j]);
    });
    const uint32_t mine = key_of(largest);
    {
        // Threads without a number say nothing of where others have theirs.
        const uint32_t low = lane_reduce<Min, WARP_SIZE>(mine >= LEAST_KEY ? mine : ~0u);
        const uint32_t high = lane_reduce<Max, WARP_SIZE>(mine);
        if (lane == 0) {
            atomicMin(extremes, low);
            atomicMax(extremes + 1, high);
        }
    }
    sync_cluster<CLUSTER>();
    const uint32_t low_end = lane_reduce<Min, WARP_SIZE>(load_of_block<CLUSTER>(extremes, lane % CLUSTER));
    const uint32_t high_end = lane_reduce<Max, WARP_SIZE>(load_of_block<CLUSTER>(extremes + 1, lane % CLUSTER));
    if (high_end < LEAST_KEY) {
        if (blockIdx.y == 0 && threadIdx.x == 0) samples[row] = -1;
        sync_cluster<CLUSTER>();
        return;
    }
    const Likeliness weights(number_of(high_end), temperature, min_p, row);

    uint32_t open[WORDS];  // a bit for each of the thread's logits that is still looked at
    // f(logit, key) for those that are open and that `at` holds. The others are closed, but what is above if that is kept.
    const auto for_each_open = [&](const Sought& at, bool keeps_above, auto f) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
#pragma unroll 1
            for (uint32_t rest = open[w]; rest; rest &= rest - 1) {
                const int bit = lowest_bit(rest);
                const scalar_t* const vec = vectors[(w * IN_WORD + bit / VEC) * NUM_THREADS].data;
                const float x = clean(to_float(vec[bit % VEC]));
                if (at.holds(key_of(x))) {
                    f(x, key_of(x));
                } else if (!keeps_above || key_of(x) < at.low) {
                    open[w] &= ~(rest & -rest);
                }
            }
        }
    };
    const auto open_all = [&](const Sought& at) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) open[w] = 0;
        for_each([&](const auto& x, int w, int bit) {
            uint32_t bits = 0;
#pragma unroll
            for (int j = 0; j < VEC; ++j) bits |= uint32_t(at.holds(key_of(x[j]))) << j;
            open[w] |= bits << bit;
        });
    };

    // The bin, of `num_groups` groups or of the bins in these, in which what all blocks have adds up to what is wanted, which
    // wanted_of says of the sum of all if `at` does not. `above` is what the block has above the bin, or from it on if all of
    // it is wanted or CLOSED says so.
    int turn = 0;
    uint64_t above = 0;  // of the thread; the block's threads together count each bin once
    const auto find = [&](const uint32_t* low, const uint32_t* high, int num_groups, bool in_group, const Sought& at, auto wanted_of) {
        uint64_t* const sums = groups[turn];
        __syncthreads();
        for (int group = threadIdx.x / GROUP_BINS; group < num_groups; group += NUM_THREADS / GROUP_BINS) {
            const int bin = group * GROUP_BINS + int(threadIdx.x) % GROUP_BINS;
            const uint64_t sum = lane_reduce<Sum, GROUP_BINS>(parts_t{low[bin], high[bin]}.whole());
            if (threadIdx.x % GROUP_BINS == 0) sums[group] = sum;
        }
        sync_cluster<CLUSTER>();  // so that the cut before is no longer looked at by anyone
        if (threadIdx.x < WARP_SIZE) {
            const auto load_group = [&](int group) {
                uint64_t sum = 0;
#pragma unroll
                for (int rank = 0; rank < CLUSTER; ++rank) sum += load_of_block<CLUSTER>(sums + group, rank);
                return sum;
            };
            auto place = find_by_lanes<COARSE / GROUP_BINS>(
                num_groups, load_group, [&](uint64_t all) { return at.wanted ? at.wanted : wanted_of(all); });
            if (in_group) {
                const uint64_t wanted = place.wanted;
                const int begin = int(place.bin) * GROUP_BINS;
                place = find_by_lanes<1>(
                    GROUP_BINS,
                    [&](int bin) {
                        parts_t sum;
                        uint64_t all = 0;
#pragma unroll
                        for (int rank = 0; rank < CLUSTER; ++rank) {
                            sum.low = load_of_block<CLUSTER>(low + begin + bin, rank);
                            sum.high = load_of_block<CLUSTER>(high + begin + bin, rank);
                            all += sum.whole();
                        }
                        return all;
                    },
                    [&](uint64_t) { return wanted; });
                place.bin += begin;
            }
            if (lane == 0) found = place;
        } else {
            // Those of the next cut. Coarse bins, which have the room of two, are looked at by their groups alone.
            for (int i = threadIdx.x - WARP_SIZE; i < (in_group ? 2 : 4) * BINS; i += NUM_THREADS - WARP_SIZE) {
                bins[in_group ? (turn ^ 1) * 2 * BINS + i : i] = 0;
            }
        }
        __syncthreads();
        turn ^= 1;
    };

    // Cuts `at` once: visit(f) gives keys and what they count to f.
    const auto cut = [&](Sought& at, auto wanted_of, auto visit) {
        const int shift = max(used_bits(at.high - at.low) - BITS, 0);
        uint32_t* const low = bins + turn * 2 * BINS;
        uint32_t* const high = low + BINS;
        visit([&](uint32_t key, parts_t weight) {
            const uint32_t bin = (key - at.low) >> shift;
            // What the low part has above 32 bits goes to the high one.
            if (weight.low && atomicAdd(low + bin, weight.low) > ~weight.low) atomicAdd(high + bin, 1u << (32 - LOW));
            if (weight.high) atomicAdd(high + bin, weight.high);
        });
        find(low, high, BINS / GROUP_BINS, true, at, wanted_of);
        const uint32_t place = found.bin;
        at.is_found = found.held == found.wanted || shift == 0;
        for (int i = threadIdx.x; i < BINS; i += NUM_THREADS) {
            if (i >= int(place + !at.is_found)) above += parts_t{low[i], high[i]}.whole();
        }
        at.low += place << shift;
        at.high = min(at.high, at.low + ((1u << shift) - 1));
        at.wanted = found.wanted;
        return found.held > 0;
    };

    uint32_t floor = LEAST_KEY;
    const int k = HAS_TOP_K ? top_k[row] : 0;
    const bool has_top_k = HAS_TOP_K && k > 0 && k < vocab_size, has_top_p = HAS_TOP_P && top_p[row] < 1.0f;
    if (has_top_k) {
        const auto wanted_of = [&](uint64_t all) { return min(uint64_t(k), all); };
        Sought at{low_end, high_end};
        const bool is_bound = k <= CLUSTER * NUM_THREADS &&
            cut(at, [&](uint64_t all) { return uint64_t(k) <= all ? uint64_t(k) : uint64_t(0); }, [&](auto f) {
                if (mine >= LEAST_KEY) f(mine, parts_t{1, 0});
            });
        at = {is_bound ? at.low : LEAST_KEY, high_end};
        open_all(at);
        while (!at.is_found) {
            cut(at, wanted_of, [&](auto f) { for_each_open(at, true, [&](float, uint32_t key) { f(key, parts_t{1, 0}); }); });
        }
        floor = at.low;
    }
    above = 0;
    if (has_top_p) {
        const auto wanted_of = [&](uint64_t all) {
            const double share = top_p[row] > 0.0f ? ceil(double(top_p[row]) * double(all)) : 0.0;
            return share < 1.0 ? uint64_t(1) : min(uint64_t(share), all);
        };
        Sought at{floor, high_end};
        if (!has_top_k) {
            const Coarse<COARSE> coarse(weights, number_of(low_end));
            for_each([&](const auto& x, int, int) {
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    const parts_t weight = weights.of(x[j]);
                    uint32_t* const counter = bins + (coarse.bin(x[j]) * GROUP_BINS + threadIdx.x % GROUP_BINS);
                    if (weight.low) atomicAdd(counter, weight.low);
                    if (weight.high) atomicAdd(counter + 2 * BINS, weight.high);
                }
            });
            find(bins, bins + 2 * BINS, COARSE, false, at, wanted_of);
            const uint32_t place = found.bin;
            if (threadIdx.x < COARSE && threadIdx.x > place) above = groups[turn ^ 1][threadIdx.x];
            if (place > 0) at.low = key_of(coarse.begin(place));
            at.high = min(high_end, key_of(coarse.begin(place + 1)) - 1);
            at.wanted = found.wanted;
            open_all(at);
        }
        while (!at.is_found) {
            cut(at, wanted_of, [&](auto f) {
                for_each_open(at, false, [&](float x, uint32_t key) { f(key, weights.of(x)); });
            });
        }
        floor = at.low;
    } else if (has_top_k) {
        for_each_open({floor, high_end}, false, [&](float x, uint32_t) { above += weights.of(x).whole(); });
    } else {
        parts_t sum;
        for_each([&](const auto& x, int, int) {
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                const parts_t weight = weights.of(x[j]);
                sum.low += weight.low;
                sum.high += weight.high;
            }
        });
        above = sum.whole();
    }

    uint64_t own;
    sum_before<NUM_THREADS>(above, partial[0], own);
    if (threadIdx.x == 0) sum_of_block = own;
    sync_cluster<CLUSTER>();
    const uint64_t up_to = sum_to_lane(lane < CLUSTER ? load_of_block<CLUSTER>(&sum_of_block, lane) : 0);
    sync_cluster<CLUSTER>();
    const uint64_t random = weights.is_greedy() ? 0 : philox(seeds[row], HAS_OFFSETS ? offsets[row] : 0);
    const uint64_t target = multiply_high(random, shfl<WARP_SIZE>(up_to, WARP_SIZE - 1));
    const uint64_t before = shfl<WARP_SIZE>(up_to, blockIdx.y) - own;
    if (target < before || target - before >= own) return;
    const auto weigh = [&](int i, uint64_t (&w)[VEC]) {
        const vec_t vec = reinterpret_cast<const vec_t*>(memory)[i];
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const float x = clean(vec[j]);
            w[j] = key_of(x) >= floor ? weights.of(x).whole() : 0;
        }
    };
    const auto take = [&](int i, int j, uint64_t) { samples[row] = int32_t(first) + piece.element(i) + j; };
    find_by_weight<NUM_THREADS, VEC>(target - before, VECTORS * NUM_THREADS, weigh, take, partial);
}
