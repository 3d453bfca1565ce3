// gated_delta_tokens.cuh: the token-by-token matrices of a tile of gated_delta_chunk, which the producer warps prepare
// for the warps that hold rows of the state. The header of gated_delta_chunk.cu gives the formulas and constants.
#pragma once
#include "gated_delta_row_norm.cuh"
#include "gated_delta_tiles.cuh"

// Per-token factors that the warps with state rows use, in addition to the two square matrices.
struct Factors {
    float of_keys[TOKENS];     // exp(a_l) / |k_l|
    float of_queries[TOKENS];  // exp(a_l) * scale / |q_l|
    float of_changes[TOKENS];  // exp(a_end - a_m) / |k_m|
    float kept;                // exp(a_end)
};

// Data that the producer warps of a tile exchange.
struct Prepared {
    float logs[TOKENS];             // a_l in units of log2
    float strengths[TOKENS];        // b_l
    float keys[TOKENS];             // 1 / |k|
    float queries[TOKENS];          // scale / |q|
    float columns[TOKENS * PITCH];  // L, column-major
    DEVICE float decay(int l, int m) const { return estimate_exp2(logs[l] - logs[m]); }
};

// 1 / |x| of token lane % 32 of a tile of keys or queries.
DEVICE float token_norm(const key_tile& tile) {
    const int lane = threadIdx.x % 32;
    return norm_of(tile, lane % TOKENS, lane < TOKENS).inverse;
}

// rows * columns^T of two tiles by MMA: the blocks of 16 by 16 tokens on the diagonal and below it. Calls
// store(row, column, element_of(row, column, dot product)), and no `store` before the last `element_of`: the compiler
// would repeat loads of shared memory that a store may have changed.
template <typename Element, typename Store>
DEVICE void multiply_tokens(const key_tile& rows, const key_tile& columns, Element element_of, Store store) {
    constexpr int COUNT = BLOCKS * (BLOCKS + 1) / 2;
    const int lane = threadIdx.x % WARP_SIZE;
    Block products[COUNT] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        order_steps(step);
        uint32_t a[BLOCKS][SHORT_WORDS], b[BLOCKS][SHORT_WORDS];
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            load_rows(a[i], rows, i * 16, step, lane);
            load_columns(b[i], columns, i * 16, step, lane);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) products[i].add_product<scalar_t>(a[(i + 1) / 2], b[i / 2]);
    }
    const auto each = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < COUNT * BLOCK_PAIRS * 2; ++i) {
            const int block = i / (2 * BLOCK_PAIRS), pair = i / 2 % BLOCK_PAIRS;
            visit((block + 1) / 2 * 16 + pair_row(pair) + lane_row(lane),
                  block / 2 * 16 + pair_column(pair) + lane_column(lane) + i % 2, products[block].at(pair, i % 2));
        }
    };
    each([&](int l, int m, float& x) { x = element_of(l, m, x); });
    each([&](int l, int m, float& x) { store(l, m, x); });
}

// Computes the prefix sums of log decays, the norms of keys and their factors for a tile of `count` tokens. Lane l
// holds log_decay and strength of token l.
DEVICE void
prepare_decays(Prepared& to, Factors& factor, float log_decay, float strength, const key_tile& keys, int count) {
    const int lane = threadIdx.x % WARP_SIZE;
    // A decay of 0 has the logarithm -inf, and -inf - -inf is NaN. -160 is as good: 2^-160 is 0 in float32.
    float sum = log_decay < -160.0f ? -160.0f : log_decay;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const float before = shfl<32>(sum, lane - distance & 31);
        if (lane >= distance) sum += before;
    }
    const float total = shfl<32>(sum, 31), norm = token_norm(keys);
    if (lane < TOKENS) {
        to.logs[lane] = sum;
        to.strengths[lane] = strength;
        to.keys[lane] = norm;
        factor.of_keys[lane] = estimate_exp2(sum) * norm;
        factor.of_changes[lane] = lane < count ? estimate_exp2(total - sum) * norm : 0.0f;
    }
    if (lane == 0) factor.kept = estimate_exp2(total);
}

// Computes L from the results of prepare_decays.
DEVICE void relate_keys(Prepared& to, const key_tile& keys) {
    multiply_tokens(
        keys, keys,
        [&](int l, int m, float product) {
            return m < l ? to.decay(l, m) * (to.strengths[l] * to.keys[l]) * (to.keys[m] * product) : 0.0f;
        },
        [&](int l, int m, float element) { to.columns[m * PITCH + l] = element; });
}

// The weights of u in o, and the factors of queries (Factors::of_queries).
DEVICE void weigh(const Prepared& from, const key_tile& queries, const key_tile& keys, const square_tile& weights,
                  Factors& factor) {
    const int lane = threadIdx.x % WARP_SIZE;
    if (lane < TOKENS) factor.of_queries[lane] = estimate_exp2(from.logs[lane]) * from.queries[lane];
    multiply_tokens(
        queries, keys,
        [&](int l, int m, float product) {
            return m <= l ? from.decay(l, m) * from.queries[l] * (from.keys[m] * product) : 0.0f;
        },
        [&](int l, int m, float weight) { weights.at(l, m / 8)[m % 8] = from_float<scalar_t>(weight); });
}
