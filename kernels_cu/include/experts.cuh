// experts.cuh: routing of tokens to experts: scores of experts, ranks of experts, and the best experts of a token.
//
// A token is a row of its matrix of logits. ROW_THREADS consecutive threads share it: a power of two up to a warp, or a
// whole block of several warps. NUM_THREADS and ROW_THREADS are constants of the kernel that includes this header.

#pragma once
#include "math.cuh"
#include "row.cuh"
#include "radix_select.cuh"

constexpr int MAX_WARPS = 32;  // most warps of a block

enum Scoring { none, softmax, sigmoid, softplus_sqrt };

// x for scoring: NaN becomes -inf, inf becomes the largest float.
DEVICE float logit_of(float x) { return ieee_min(ieee_max(x, minus_infinity()), FLOAT_MAX); }

// The score of an expert from its logit. For softmax, `base` is the row max of the token (0 if that is -inf), and
// `factor` the reciprocal of the sum of exp(logit - base).
template <Scoring SCORING>
struct Score {
    float base = 0.0f, factor = 1.0f;

    DEVICE float operator()(float logit) const {
        if constexpr (SCORING == softmax) return expf(logit - base) * factor;
        if constexpr (SCORING == sigmoid) return reciprocal_of(1.0f + expf(ieee_min(-logit, 88.0f)));  // exp(88) < inf
        if constexpr (SCORING == softplus_sqrt) {
            return sqrtf(ieee_max(logit, 0.0f) + log1pf(expf(-ieee_abs(logit))));
        }
        return logit;
    }
};

// Ranks: unsigned integers that order the experts of a token: by a float; of equal floats, the expert with the lower
// index ranks higher. NaN ranks as -inf. No two experts have one rank, and every rank is above 0.
//
// INDEX_BITS > 0: the low INDEX_BITS bits are 0 in every ranked float. They hold the index, and a rank is one word.
template <int INDEX_BITS>
struct Ranking {
    using rank_t = uint32_t;
    static constexpr uint32_t MASK = (1u << INDEX_BITS) - 1;

    static DEVICE rank_t rank(uint32_t ordered, int index) { return (ordered & ~MASK) | (MASK - uint32_t(index)); }
    static DEVICE int index(rank_t rank) { return int(MASK - (rank & MASK)); }
};
template <>
struct Ranking<0> {
    using rank_t = uint64_t;

    static DEVICE rank_t rank(uint32_t ordered, int index) { return uint64_t(ordered) << 32 | ~uint32_t(index); }
    static DEVICE int index(rank_t rank) { return int(~uint32_t(rank)); }
};

// ordered_bits of x, where NaN is -inf and -0 is 0.
DEVICE uint32_t ordered_key(float x) {
    return ordered_bits(__float_as_uint(ieee_add(ieee_max(x, minus_infinity()), 0.0f)));
}

// The number of low bits that are 0 in every float converted from type T.
template <typename T> constexpr int SPARE_BITS = is_same<T, bf16_t> ? 16 : is_same<T, half_t> ? 13 : 0;

// The largest value of each aligned group of WIDTH lanes. Every lane of the warp takes part.
template <int WIDTH>
DEVICE uint32_t lane_largest(uint32_t value) {
    return lane_reduce<Max, WIDTH>(value);
}
template <int WIDTH>
DEVICE uint64_t lane_largest(uint64_t value) {
    const uint32_t high = lane_reduce<Max, WIDTH>(uint32_t(value >> 32));
    const uint32_t low = lane_reduce<Max, WIDTH>(uint32_t(value >> 32) == high ? uint32_t(value) : 0u);
    return uint64_t(high) << 32 | low;
}

// The largest value of a token's threads. Every thread of the block takes part. `partial` is shared memory of one value
// per warp. Two such calls in a row need two arrays, which may alternate.
template <typename T>
DEVICE T row_largest(T value, T* partial) {
    if constexpr (ROW_THREADS <= WARP_SIZE) {
        return lane_largest<ROW_THREADS>(value);
    } else {
        const int lane = threadIdx.x % WARP_SIZE;
        value = lane_largest<WARP_SIZE>(value);
        if (lane == 0) partial[threadIdx.x / WARP_SIZE] = value;
        __syncthreads();
        return lane_largest<WARP_SIZE>(lane < ROW_THREADS / WARP_SIZE ? partial[lane] : T(0));
    }
}

// The score for a token's experts, by the logits of the calling thread; its sum over the experts is 1 if `divides`. Every
// thread of the block calls. Both arrays are shared memory of one value per warp.
template <Scoring SCORING, int N>
DEVICE Score<SCORING>
score_of_token(const float (&logits)[N], bool divides, uint32_t* max_partial, float* sum_partial) {
    Score<SCORING> score;
    if constexpr (SCORING == softmax) {
        float largest = minus_infinity();
#pragma unroll
        for (int i = 0; i < N; ++i) largest = ieee_max(largest, logits[i]);
        largest = logit_of(float_of_ordered(row_largest(ordered_key(largest), max_partial)));
        score.base = largest == minus_infinity() ? 0.0f : largest;
        if (divides) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) sum += score(logit_of(logits[i]));
            sum = row_reduce<Sum, ROW_THREADS>(sum, sum_partial);
            score.factor = sum > 0.0f ? reciprocal_of(sum) : 0.0f;
        }
    }
    return score;
}

// Sorts descending: Batcher's odd-even merge sort (Knuth, The Art of Computer Programming 3, 5.2.2, algorithm M).
template <typename T, int N>
DEVICE void sort_descending(T (&list)[N]) {
#pragma unroll
    for (int p = 1; p < N; p *= 2) {
#pragma unroll
        for (int q = p; q >= 1; q /= 2) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i < q % p || (i - q % p) / q % 2 || i + q >= N || i / (2 * p) != (i + q) / (2 * p)) continue;
                const T high = max(list[i], list[i + q]), low = min(list[i], list[i + q]);
                list[i] = high, list[i + q] = low;
            }
        }
    }
}

// The experts of a token, the best first: each thread sorts its ranks, and the sorted lists of the token's threads are
// merged.
template <typename T, int N>
struct KWayMerge {
    T list[N];
    T (*partial)[MAX_WARPS];  // two arrays in shared memory

    DEVICE KWayMerge(const T (&ranks)[N], T (*partial)[MAX_WARPS]) : partial(partial) {
#pragma unroll
        for (int i = 0; i < N; ++i) list[i] = ranks[i];
        sort_descending(list);
    }

    // The next best rank. Every thread of the block calls it, in round 0, 1, ...
    DEVICE T next(int round) {
        const T best = row_largest(list[0], partial[round % 2]);
        if (list[0] == best) {
#pragma unroll
            for (int i = 0; i < N - 1; ++i) list[i] = list[i + 1];
            list[N - 1] = 0;
        }
        return best;
    }

    // The next `count` best ranks, at most MOST: thread i of the token gets number i, and others 0. Every thread of the
    // block calls it.
    template <int MOST>
    DEVICE T take(int count, int thread) {
        T mine = 0;
#pragma unroll(MOST <= 8 ? MOST : 4)
        for (int i = 0; i < count; ++i) {
            const T best = next(i);
            if (thread == i) mine = best;
        }
        return mine;
    }
};

// A rank and its position among all ranks of a token, 0 for the best.
template <typename T>
struct Positioned {
    T rank;
    int position;
};

// The MOST best ranks of a token that the ROW_THREADS lanes of a warp share: each lane gets one of them, or a rank with
// a position of MOST or more. All lanes of the warp call. A merge takes MOST rounds that wait for each other; lanes
// count larger ranks instead here. First each lane counts those among the best ranks of the lanes: the MOST lanes with
// the best ones have all that are wanted. Then each lane takes one of their ranks and counts again.
template <int MOST, typename T, int N>
DEVICE Positioned<T> best_of_row(const T (&ranks)[N]) {
    const int lane = threadIdx.x % ROW_THREADS;
    if constexpr (MOST * N > ROW_THREADS) {
        KWayMerge<T, N> merge(ranks, nullptr);
        const T own = merge.template take<MOST>(MOST, lane);
        return {own, lane};
    } else {
        __shared__ alignas(16) T values[2][ROW_THREADS];
        T best = ranks[0];
#pragma unroll
        for (int i = 1; i < N; ++i) best = max(best, ranks[i]);
        const bool writes = threadIdx.x < ROW_THREADS;
        const auto count_larger = [&](const T(&list)[ROW_THREADS], T own) {
            int larger = 0;
#pragma unroll
            for (int i = 0; i < ROW_THREADS; ++i) larger += list[i] > own;
            return larger;
        };
        if (writes) {
            values[0][lane] = best;
            values[1][lane] = 0;
        }
        sync_warp();
        const int position_of_lane = count_larger(values[0], best);
        if (writes && best > 0 && position_of_lane < MOST) {
#pragma unroll
            for (int i = 0; i < N; ++i) values[1][position_of_lane * N + i] = ranks[i];
        }
        sync_warp();
        const T own = values[1][lane];
        return {own, own > 0 ? count_larger(values[1], own) : MOST};
    }
}

// Prefetches the row that a thread works on.
template <typename T>
DEVICE void prefetch_row(const T* rows, int64_t num_rows, int64_t stride, int num_experts) {
    constexpr int LINE = 128 / sizeof(T);
    const T* const row = rows + RowIndex<NUM_THREADS, ROW_THREADS>(num_rows).row * stride;
    for (int i = threadIdx.x % ROW_THREADS * LINE; i < num_experts; i += ROW_THREADS * LINE) prefetch_line(row + i);
}

// Elements first ... first + COUNT - 1 of `row` as floats, VEC_SIZE in one access. Those from `end` on are not read and
// become `missing`. `first` and `end` are multiples of VEC_SIZE; 0 < end.
template <int VEC_SIZE, typename T, int COUNT>
DEVICE void load_share(const T* row, int first, int end, float missing, float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i += VEC_SIZE) {
        // The load is unconditional so that it issues earlier: past the end, the last vector is loaded instead.
        float part[VEC_SIZE];
        load_floats<VEC_SIZE>(row + min(first + i, end - VEC_SIZE), part);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) x[i + j] = first + i < end ? part[j] : missing;
    }
}
