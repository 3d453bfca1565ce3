// mla_cluster_combine.cuh: sequences that the CTAs of a cluster split among themselves, for short calls. They combine
// their results through distributed shared memory: no partial results in global memory, no other launch, and no
// schedule that reads all lengths.
//
//     out = sum_p w_p o_p / (sum_p w_p z_p + 1e-6),   w_p = exp2(m_p - m),   m = max_p m_p
//
// Piece p, that of a CTA, has row max m_p, row sum z_p and results o_p. The file reads the constants of the kernel that
// includes it: CLUSTER, and HAS_LSE.
#pragma once
#include "arith.cuh"
#include "attention.cuh"
#include "cluster.cuh"
#include "mla_entry.cuh"
#include "mla_schedule.cuh"
#include "reduce.cuh"

// The CTA's piece of an item, which is a whole sequence if there is a cluster. CTAs have the same number of tiles of
// TOKENS tokens, but the last ones may have fewer, or none.
template <int TOKENS>
DEVICE MlaItem piece_of_cta(MlaItem item) {
    if constexpr (CLUSTER > 1) {
        const int tokens = ceil_div(item.end, TOKENS * CLUSTER) * TOKENS;
        item.begin = int(min(int64_t(blockIdx.y % CLUSTER) * tokens, int64_t(item.end)));
        item.end = min(item.end - item.begin, tokens) + item.begin;
    }
    return item;
}

// Writes a CTA's heads of a sequence. The pieces are in shared memory, at the same addresses in each CTA: results, with
// `pitch` floats for each head, m_p and z_p. element_of(i): the element of a head that results have at i,
// for four adjacent ones. All threads of the cluster call; what is in shared memory may change after start_cluster().
template <typename P, int NUM_WARPS, typename T, typename F>
DEVICE void combine_cluster(const float* results, int pitch, const float* row_max, const float* exp_sums, int num_heads,
                            T* out, float* lse, F element_of) {
    constexpr int RUN = 32 * 4, RUNS = LATENT_SIZE / RUN;  // RUN: elements of a warp
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sync_cluster<CLUSTER>();
    for (int task = warp * CLUSTER + blockIdx.y % CLUSTER; task < num_heads * RUNS; task += NUM_WARPS * CLUSTER) {
        const int head = task / RUNS, at = task % RUNS * RUN + lane * 4;
        const float4* const from = reinterpret_cast<const float4*>(results + head * pitch + at);
        float4 x[CLUSTER];
        const float of_piece = load_of_block<CLUSTER>(row_max + head, lane % CLUSTER);
        const float exp_of_piece = load_of_block<CLUSTER>(exp_sums + head, lane % CLUSTER);
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i) x[i] = load_of_block<CLUSTER>(from, i);
        const float max_logit = lane_reduce<Max, CLUSTER>(of_piece), factor = relative_exp2(of_piece, max_logit);
        const float total = lane_reduce<Sum, CLUSTER>(exp_of_piece * factor);
        float four[4] = {};
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i) {
            const float w = shfl<CLUSTER>(factor, i), piece[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) four[j] = fmaf(piece[j], w, four[j]);
        }
        const float exp_sum = total * FULL_SCALE<P>, inverse = 1.0f / (exp_sum + 1e-6f) * FULL_SCALE<P>;
#pragma unroll
        for (int j = 0; j < 4; ++j) four[j] *= inverse;
        if (HAS_LSE && at == 0) lse[head] = log_sum_exp(max_logit, exp_sum);
        Vec<T, 4>::from_floats(four).store(out + head * LATENT_SIZE + element_of(at));
    }
}
