// radix_select.cuh: radix select, which finds the k-th largest key digit by digit of its bits, and the prefix sums that
// it needs.

#pragma once
#include "reduce.cuh"

// Bits of a float as an integer of the same order: -NaN, -inf, ..., -0, +0, ..., +inf, +NaN.
DEVICE uint32_t ordered_bits(uint32_t bits) { return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u); }
// The inverse of ordered_bits.
DEVICE float float_of_ordered(uint32_t ordered) {
    return __uint_as_float(ordered ^ (uint32_t(int32_t(~ordered) >> 31) | 0x80000000u));
}

// Inclusive prefix sum over the lanes of a warp. Every lane of the warp calls.
template <typename T>
DEVICE T sum_to_lane(T sum) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int step = 1; step < WARP_SIZE; step *= 2) {
        const T other = shfl<WARP_SIZE>(sum, max(lane - step, 0));
        if (lane >= step) sum += other;
    }
    return sum;
}

// Exclusive prefix sum over the warps of a block, for the calling warp. of_warps has one value per warp, and `total`
// becomes the sum over all warps. Every lane of the warp calls.
template <int NUM_THREADS, typename T>
DEVICE T sum_of_warps_before(const T* of_warps, T& total) {
    constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE;
    static_assert(NUM_WARPS <= WARP_SIZE);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const T here = lane < NUM_WARPS ? of_warps[lane] : T(0);
    if constexpr (sizeof(T) == 4) {
        total = lane_reduce<Sum, WARP_SIZE>(here);
        return lane_reduce<Sum, WARP_SIZE>(lane < warp ? here : T(0));
    } else {
        const T up_to = sum_to_lane(here);  // sum over warps 0 ... lane
        total = shfl<WARP_SIZE>(up_to, WARP_SIZE - 1);
        const T before = shfl<WARP_SIZE>(up_to, max(warp - 1, 0));
        return warp > 0 ? before : T(0);
    }
}

// Exclusive prefix sum over the threads of a block; `total` becomes the sum over all threads. Every thread of the block
// calls. `partial` is shared memory for one value per warp. Two consecutive calls need two such arrays, which may
// alternate.
template <int NUM_THREADS, typename T>
DEVICE T sum_before(T value, T* partial, T& total) {
    const T sum = sum_to_lane(value);
    if (threadIdx.x % WARP_SIZE == WARP_SIZE - 1) partial[threadIdx.x / WARP_SIZE] = sum;
    __syncthreads();
    return sum_of_warps_before<NUM_THREADS>(partial, total) + (sum - value);
}

// Digit number 0, 1 or 2 of 32-bit keys, the most significant first: `shift` is its lowest bit, `bins` its number of
// values.
struct Digit {
    int shift, bins;
    explicit DEVICE Digit(int number)
        : shift(number == 0   ? 21
                : number == 1 ? 10
                              : 0),
          bins(number < 2 ? 2048 : 1024) {}
    DEVICE uint32_t of(uint32_t key) const { return key >> shift & (bins - 1); }
    // Whether the more significant digits of the key equal those of `prefix`. The other digits of `prefix` are 0.
    DEVICE bool matches(uint32_t key, uint32_t prefix) const {
        return shift == 21 || (key ^ prefix) >> shift < uint32_t(bins);
    }
};
constexpr int MAX_BINS = 2048;

// A bin, the sum that it holds, and how much of this sum is wanted.
template <typename T>
struct Found {
    uint32_t bin;
    T held, wanted;
};

// Finds the bin in which the running sum of the bins, from the highest bin down, reaches wanted_of(sum of all bins).
// This must be positive and at most that sum. load(bin) returns the sum that a bin holds. Every thread of the block
// calls; `partial` is as in sum_before. The bins may be overwritten as soon as this returns.
template <int NUM_THREADS, typename T, typename F, typename LOAD>
DEVICE Found<T> find_from_above(int num_bins, LOAD load, F wanted_of, T* partial, Found<T>* found) {
    constexpr int THREAD_BINS = MAX_BINS / NUM_THREADS;
    static_assert(MAX_BINS % NUM_THREADS == 0);
    T held[THREAD_BINS], sum = 0, total;
    const int first = num_bins - 1 - int(thread_of<NUM_THREADS>()) * THREAD_BINS;
#pragma unroll
    for (int i = 0; i < THREAD_BINS; ++i) sum += held[i] = first - i >= 0 ? load(first - i) : T(0);
    const T of_warp = lane_reduce<Sum, WARP_SIZE>(sum);
    if (threadIdx.x % WARP_SIZE == 0) partial[threadIdx.x / WARP_SIZE] = of_warp;
    __syncthreads();
    T before = sum_of_warps_before<NUM_THREADS>(partial, total);
    const T wanted = wanted_of(total);
    if (before < wanted && wanted <= before + of_warp) {  // this warp's bins reach `wanted`
        before += sum_to_lane(sum) - sum;
#pragma unroll
        for (int i = 0; i < THREAD_BINS; ++i) {
            if (before < wanted && wanted <= before + held[i]) *found = {uint32_t(first - i), held[i], wanted - before};
            before += held[i];
        }
    }
    __syncthreads();
    return *found;
}

// find_from_above by one warp, for up to 32 * LANE_BINS bins, which may be in memory of high latency. If the bins do
// not reach `wanted`, the result holds 0.
template <int LANE_BINS, typename LOAD, typename F>
DEVICE Found<uint64_t> find_by_lanes(int num_bins, LOAD load, F wanted_of) {
    constexpr int LANES = 32;  // lanes that search; a wider warp has idle lanes
    const int lane = threadIdx.x % WARP_SIZE;
    const int first = num_bins - 1 - lane * LANE_BINS;
    uint64_t held[LANE_BINS], sum = 0;
#pragma unroll
    for (int i = 0; i < LANE_BINS; ++i) sum += held[i] = lane < LANES && first - i >= 0 ? load(first - i) : 0;
    uint64_t before = sum_to_lane(sum);
    const uint64_t wanted = wanted_of(shfl<WARP_SIZE>(before, WARP_SIZE - 1));
    before -= sum;
    Found<uint64_t> mine{0, 0, 0};
#pragma unroll
    for (int i = 0; i < LANE_BINS; ++i) {
        if (before < wanted && wanted <= before + held[i]) {
            mine.bin = first - i, mine.held = held[i], mine.wanted = wanted - before;
        }
        before += held[i];
    }
    const auto here = ballot(mine.held > 0);
    const int from = here ? lowest_bit(here) : 0;
    return {shfl<WARP_SIZE>(mine.bin, from), shfl<WARP_SIZE>(mine.held, from), shfl<WARP_SIZE>(mine.wanted, from)};
}

// find_from_above in two levels: the first warp of the block searches the sums of up to 64 groups of GROUP_BINS bins,
// and then the bins of one group; the other warps wait. The number of loads stays small, which matters if they have a
// high latency. load_group(group) returns the sum that a group holds, load(bin) that of a bin. Every thread of the
// block calls.
constexpr int GROUP_BINS = 32;
template <typename GROUP, typename LOAD>
DEVICE Found<uint32_t>
find_in_groups(int num_bins, GROUP load_group, LOAD load, uint32_t wanted, Found<uint32_t>* found) {
    if (threadIdx.x < WARP_SIZE) {
        const int lane = threadIdx.x, groups = num_bins / GROUP_BINS;
        constexpr int LANES = 32;  // lanes that search; a wider warp has idle lanes
        constexpr int LANE_GROUPS = MAX_BINS / GROUP_BINS / LANES;
        uint32_t held[LANE_GROUPS], sum = 0;
#pragma unroll
        for (int i = 0; i < LANE_GROUPS; ++i) {
            const int group = groups - 1 - (lane * LANE_GROUPS + i);
            sum += held[i] = lane < LANES && group >= 0 ? load_group(group) : 0;
        }
        // One lane finds the group, counted from the highest, and the sum of the groups above it.
        uint32_t before = sum_to_lane(sum) - sum, above = 0;
        int mine = -1;
#pragma unroll
        for (int i = 0; i < LANE_GROUPS; ++i) {
            if (lane < LANES && before < wanted && wanted <= before + held[i])
                mine = lane * LANE_GROUPS + i, above = before;
            before += held[i];
        }
        const int from = lowest_bit(ballot(mine >= 0));
        mine = shfl<WARP_SIZE>(mine, from);
        above = shfl<WARP_SIZE>(above, from);

        const int bin = (groups - 1 - mine) * GROUP_BINS + GROUP_BINS - 1 - lane;
        const uint32_t here = lane < LANES ? load(bin) : 0;
        before = above + sum_to_lane(here) - here;
        if (lane < LANES && before < wanted && wanted <= before + here) *found = {uint32_t(bin), here, wanted - before};
    }
    __syncthreads();
    return *found;
}

// Finds the first element at which the running sum of weights, in element order, exceeds `left`. The thread that holds
// this element calls found(vector, j, rest), where rest is `left` minus the weights before the element. weigh(vector,
// weights) gives the weights of the VEC elements of a vector; it must accept any vector index, also beyond `vectors`.
// Every thread of the block calls.
template <int NUM_THREADS, int VEC, typename WEIGH, typename FOUND>
DEVICE void
find_by_weight(uint64_t left, int vectors, WEIGH weigh, FOUND found, uint64_t (&partial)[2][NUM_THREADS / WARP_SIZE]) {
    int turn = 0;
    for (int first = 0; first < vectors; first += NUM_THREADS) {
        uint64_t weights[VEC], own = 0, all;
        weigh(first + int(threadIdx.x), weights);
#pragma unroll
        for (int j = 0; j < VEC; ++j) own += weights[j];
        uint64_t before = sum_before<NUM_THREADS>(own, partial[turn ^= 1], all);
        if (left >= all) {
            left -= all;
            continue;
        }
        if (left < before || left >= before + own) return;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            if (before <= left && left < before + weights[j]) found(first + int(threadIdx.x), j, left - before);
            before += weights[j];
        }
        return;
    }
}
