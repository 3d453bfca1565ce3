// topk_grouped: routing: the TOP_K best experts of each token, out of its TOP_GROUPS best groups of experts.
//
//     s = score(x)                       SCORING of the token's x, in float
//     key = s + bias                     -inf where x is not finite; there s = 0
//     group score = sum of the two largest keys of the group, or of one if it has only one; without a bias the largest
//     ids = the TOP_K experts of the TOP_GROUPS best groups with the largest keys, the largest first
//     weight = s * routed_scaling_factor, divided by the sum of the token's s + 1e-20 if `renormalize`
//
// Of equal groups, and of equal keys, the one with the lower index comes first. If fewer than TOP_GROUPS groups have a
// score above -inf, ids are 0 ... TOP_K - 1, and weights 1 / TOP_K.
//
// ROW_THREADS threads share a token, GROUP_THREADS of them a group; each has THREAD_EXPERTS adjacent experts of it. The
// scores of groups are gathered in the lanes of every warp. Thread i of the token writes choice number i.
//
// Constants:
//     bias_t           element type of bias
//     SCORING          none (x is the score), sigmoid or softmax
//     NUM_GROUPS       groups, at most 32
//     GROUP_SIZE       experts of a group
//     TOP_GROUPS       groups that experts are chosen from
//     TOP_K            experts of a token, at most 32
//     THREAD_EXPERTS   experts of a thread; a multiple of VEC_SIZE
//     GROUP_THREADS    threads of a group, a power of two
//     HAS_BIAS         false when bias is null

#include "experts.cuh"

constexpr int NUM_EXPERTS = NUM_GROUPS * GROUP_SIZE;
constexpr int LANES = ROW_THREADS < WARP_SIZE ? ROW_THREADS : WARP_SIZE;     // lanes of a warp that share a token
constexpr int PART_THREADS = GROUP_THREADS < LANES ? GROUP_THREADS : LANES;  // lanes of a warp that share a group
constexpr int GROUP_PARTS = GROUP_THREADS / PART_THREADS;
using ranking = Ranking<0>;
using rank_t = ranking::rank_t;

// The two largest keys of a set of experts.
struct TopTwo {
    float first, second;

    static DEVICE TopTwo of_one(float key) { return {key, minus_infinity()}; }
    DEVICE void join(const TopTwo& other) {
        second = ieee_max(ieee_min(first, other.first), ieee_max(second, other.second));
        first = ieee_max(first, other.first);
    }
    DEVICE void join_lanes(int mask) { join({shfl_xor(first, mask), shfl_xor(second, mask)}); }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
topk_grouped(float* topk_weights,     // [num_tokens, TOP_K]
             int32_t* topk_ids,       // [num_tokens, TOP_K]
             const scalar_t* scores,  // [num_tokens, NUM_EXPERTS], rows of stride scores_stride
             const bias_t* bias,      // [NUM_EXPERTS]
             int64_t num_tokens, int64_t scores_stride, bool renormalize, float routed_scaling_factor) {
    prefetch_row(scores, num_tokens, scores_stride, NUM_EXPERTS);
    await_previous_kernel();
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_tokens);
    const int thread = threadIdx.x % ROW_THREADS, lane = threadIdx.x % LANES;
    const scalar_t* const row = scores + at.row * scores_stride;
    __shared__ rank_t rank_partial[2][MAX_WARPS];
    __shared__ uint32_t max_partial[MAX_WARPS];
    __shared__ float sum_partial[MAX_WARPS];
    __shared__ TopTwo parts[MAX_WARPS];

    // Keys.
    const bool has_group = thread / GROUP_THREADS < NUM_GROUPS;
    const int group = has_group ? thread / GROUP_THREADS : 0;
    const int first = has_group ? thread % GROUP_THREADS * THREAD_EXPERTS : GROUP_SIZE;
    float x[THREAD_EXPERTS], keys[THREAD_EXPERTS], biases[THREAD_EXPERTS];
    load_share<VEC_SIZE>(row + group * GROUP_SIZE, first, GROUP_SIZE, minus_infinity(), x);
    if constexpr (HAS_BIAS) load_share<VEC_SIZE>(bias + group * GROUP_SIZE, first, GROUP_SIZE, 0.0f, biases);
    const auto is_finite = [](float value) { return ieee_abs(value) <= FLOAT_MAX; };
    const auto finite = [&](float value) { return is_finite(value) ? value : minus_infinity(); };
    Score<SCORING> score;
    if constexpr (SCORING == softmax) {
        float largest = minus_infinity(), sum = 0.0f;
#pragma unroll
        for (int i = 0; i < THREAD_EXPERTS; ++i) largest = ieee_max(largest, finite(x[i]));
        largest = float_of_ordered(row_largest(ordered_key(largest), max_partial));
        score.base = largest == minus_infinity() ? 0.0f : largest;
#pragma unroll
        for (int i = 0; i < THREAD_EXPERTS; ++i) sum += score(finite(x[i]));
        sum = row_reduce<Sum, ROW_THREADS>(sum, sum_partial);
        score.factor = sum > 0.0f ? reciprocal_of(sum) : 0.0f;
    }
    TopTwo best = TopTwo::of_one(minus_infinity());
#pragma unroll
    for (int i = 0; i < THREAD_EXPERTS; ++i) {
        const float s = score(x[i]), key = HAS_BIAS ? ieee_add(s, biases[i]) : s;
        keys[i] = is_finite(x[i]) && key == key ? key : minus_infinity();
        best.join(TopTwo::of_one(keys[i]));
    }

    // Lane g * GROUP_PARTS gets the score of group g.
#pragma unroll
    for (int mask = 1; mask < PART_THREADS; mask *= 2) best.join_lanes(mask);
    if constexpr (ROW_THREADS > WARP_SIZE) {
        if (thread % PART_THREADS == 0) parts[thread / PART_THREADS] = best;
        __syncthreads();
        best = lane < ROW_THREADS / PART_THREADS ? parts[lane] : TopTwo::of_one(minus_infinity());
#pragma unroll
        for (int mask = 1; mask < GROUP_PARTS; mask *= 2) best.join_lanes(mask);
    } else {
        best = {shfl<LANES>(best.first, lane * PART_THREADS % LANES),
                shfl<LANES>(best.second, lane * PART_THREADS % LANES)};
    }
    // Ordered bits, since the comparison of two floats takes subnormal ones for 0.
    const uint32_t group_key = ordered_key(HAS_BIAS && GROUP_SIZE > 1 ? ieee_add(best.first, best.second) : best.first);

    // The best groups.
    const int own = lane / GROUP_PARTS;
    int above = 0;  // groups that rank above this lane's
#pragma unroll 4
    for (int g = 0; g < NUM_GROUPS; ++g) {
        const uint32_t other = shfl<LANES>(group_key, g * GROUP_PARTS);
        above += other > group_key || (other == group_key && g < own);
    }
    const bool is_chosen = own < NUM_GROUPS && above < TOP_GROUPS;
    const bool falls_back = lane_reduce<Max, LANES>(uint32_t(is_chosen && group_key == ordered_key(minus_infinity())));
    const bool may_choose = shfl<LANES>(int(is_chosen), group * GROUP_PARTS);

    // The best experts.
    rank_t ranks[THREAD_EXPERTS];
#pragma unroll
    for (int i = 0; i < THREAD_EXPERTS; ++i) {
        const float key = may_choose ? keys[i] : minus_infinity();
        ranks[i] = first + i < GROUP_SIZE ? ranking::rank(ordered_key(key), group * GROUP_SIZE + first + i) : 0;
    }
    KWayMerge<rank_t, THREAD_EXPERTS> merge(ranks, rank_partial);
    const int expert = ranking::index(merge.take<TOP_K>(TOP_K, thread));
    const bool writes = thread < TOP_K;
    const float chosen = to_float(row[writes ? expert : 0]);
    const float s = writes && is_finite(chosen) ? score(chosen) : 0.0f;
    float factor = routed_scaling_factor;
    if (renormalize) factor = ieee_divide(factor, lane_reduce<Sum, LANES>(s) + 1e-20f);  // LANES >= TOP_K
    if (!writes || !at.active) return;
    topk_ids[at.row * TOP_K + thread] = falls_back ? thread : expert;
    topk_weights[at.row * TOP_K + thread] = falls_back ? 1.0f / TOP_K : ieee_multiply(s, factor);
}
