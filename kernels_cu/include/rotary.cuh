// rotary.cuh: rotary position embedding, RoPE (Su et al. 2021, arXiv:2104.09864). It rotates each pair of elements of a
// head by an angle.
//
//     x' = x * cos - y * sin,   y' = y * cos + x * sin
//
// The rotary part of a head has 2 * HALF elements: pair j is elements j and j + HALF if IS_NEOX, else 2j and 2j + 1.
// Pair j is rotated by angle j.

#pragma once
#include "vec.cuh"

// Rotates a pair (x, y) in float32. Every product, sum and difference is rounded and may be subnormal, as in eager
// tensor arithmetic.
DEVICE void rotate(float& x, float& y, float cosine, float sine) {
    const float rotated = ieee_subtract(ieee_multiply(x, cosine), ieee_multiply(y, sine));
    y = ieee_add(ieee_multiply(y, cosine), ieee_multiply(x, sine));
    x = rotated;
}

// Rotates pairs (x, y). Every product, sum and difference is rounded to T, as in eager tensor arithmetic.
template <typename T, int N>
DEVICE void turn(Vec<T, N>& x, Vec<T, N>& y, const Vec<T, N>& cosine, const Vec<T, N>& sine) {
    const Vec<T, N> turned = x * cosine - y * sine;
    y = y * cosine + x * sine;
    x = turned;
}

// Rotates pairs (x, y) in float32 and rounds once at the end.
template <typename T, int N>
DEVICE void turn(Vec<T, N>& x, Vec<T, N>& y, const float (&cosine)[N], const float (&sine)[N]) {
    float a[N], b[N];
    x.to_floats(a);
    y.to_floats(b);
#pragma unroll
    for (int i = 0; i < N; ++i) rotate(a[i], b[i], cosine[i], sine[i]);
    x = Vec<T, N>::from_floats(a);
    y = Vec<T, N>::from_floats(b);
}

// Rotates pairs (x, y). With cosines and sines of type T it rounds as the first overload of `turn`, with float as the
// second.
template <typename T, typename A, int N>
DEVICE void turn_by(Vec<T, N>& x, Vec<T, N>& y, const Vec<A, N>& cosine, const Vec<A, N>& sine) {
    if constexpr (is_same<T, A>) {
        turn(x, y, cosine, sine);
    } else {
        float cosines[N], sines[N];
        cosine.to_floats(cosines);
        sine.to_floats(sines);
        turn(x, y, cosines, sines);
    }
}

// N adjacent pairs of a head: the first elements in x, the second elements in y. A memory access moves ACCESS elements,
// at most N if IS_NEOX, else at most 2 * N. Without IS_NEOX, 2 * N elements must fit into 16 bytes.
template <typename T, int N, int HALF, bool IS_NEOX, int ACCESS>
struct Pairs {
    static_assert(HALF % N == 0);
    using vec_t = Vec<T, N>;
    vec_t x, y;

    // Pairs first ... first + N - 1 of the head at address `head`.
    static DEVICE Pairs load(const T* head, int first) {
        Pairs pairs;
        if constexpr (IS_NEOX) {
            pairs.x = vec_t::template load<ACCESS>(head + first);
            pairs.y = vec_t::template load<ACCESS>(head + first + HALF);
        } else {
            const auto both = Vec<T, 2 * N>::template load<ACCESS>(head + 2 * first);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                pairs.x.data[i] = both.data[2 * i];
                pairs.y.data[i] = both.data[2 * i + 1];
            }
        }
        return pairs;
    }
    DEVICE void store(T* head, int first) const {
        if constexpr (IS_NEOX) {
            x.template store<ACCESS>(head + first);
            y.template store<ACCESS>(head + first + HALF);
        } else {
            Vec<T, 2 * N> both;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                both.data[2 * i] = x.data[i];
                both.data[2 * i + 1] = y.data[i];
            }
            both.template store<ACCESS>(head + 2 * first);
        }
    }
};

// The LANES lanes of a group copy SIZE elements together, ACCESS elements in one memory access.
template <int LANES, int SIZE, int ACCESS, typename T>
DEVICE void copy_elements(T* to, const T* from, int lane) {
#pragma unroll 1
    for (int i = lane * ACCESS; i < SIZE; i += LANES * ACCESS) Vec<T, ACCESS>::load(from + i).store(to + i);
}

// Offset of a token in a tensor with one or two LEADING dimensions, [num_tokens] or [.., size1].
template <int LEADING>
DEVICE int64_t token_offset(int64_t token, int size1, int64_t stride0, int64_t stride1) {
    if constexpr (LEADING == 1) return token * stride0;
    return uint32_t(token) / uint32_t(size1) * stride0 + uint32_t(token) % uint32_t(size1) * stride1;
}

// The work of a thread. The HEADS heads of a token are distributed over GROUPS groups of LANES adjacent threads: group
// g takes heads g, g + GROUPS, g + 2 * GROUPS and so on, at most THREAD_HEADS heads. A block has BLOCK_GROUPS groups
// for each of its BLOCK_TOKENS tokens. blockIdx.x counts tokens in steps of BLOCK_TOKENS; blockIdx.y counts the blocks
// that share a token.
template <int NUM_THREADS, int LANES, int HEADS, int THREAD_HEADS, int BLOCK_GROUPS>
struct HeadIndex {
    static constexpr int GROUPS = ceil_div(HEADS, THREAD_HEADS);
    static constexpr int BLOCK_TOKENS = NUM_THREADS / (BLOCK_GROUPS * LANES);
    static_assert(BLOCK_TOKENS > 0);
    int64_t token;
    int group, lane;
    bool inside;

    explicit DEVICE HeadIndex(int64_t num_tokens) {
        const int slot = threadIdx.x / (BLOCK_GROUPS * LANES);
        token = int64_t(blockIdx.x) * BLOCK_TOKENS + slot;
        group = blockIdx.y * BLOCK_GROUPS + threadIdx.x / LANES % BLOCK_GROUPS;
        lane = threadIdx.x % LANES;
        inside = slot < BLOCK_TOKENS && token < num_tokens && group < GROUPS;
    }

    // Calls f(i, head) for every head of the calling thread; i counts these heads.
    template <typename F>
    DEVICE void for_each(F f) const {
#pragma unroll
        for (int i = 0; i < THREAD_HEADS; ++i) {
            const int head = group + i * GROUPS;
            if (HEADS % THREAD_HEADS == 0 || head < HEADS) f(i, head);
        }
    }
};
