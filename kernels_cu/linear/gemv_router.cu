// gemv_router: the norm of a token, the logits of its router, and the choice of its experts.
//
//     x[k] = T(T(input[k] / sqrt(mean_k(input[k]^2) + epsilon)) * norm_weight[k])      T: input_t
//     logit[n] = sum_k x[k] * weight[n, k]                                             in float32
//     topk_ids = the TOP_K experts with the best logits, the best first; of equal logits the lower id first
//     topk_weights = score(logit), divided by their sum if `renormalize`, times routed_scaling_factor
//
// blockIdx.y counts tokens. Each block along x normalises the token, and the first one writes it; warps multiply as
// gemv_rows.cuh says. The first warp of the last block of a token to arrive chooses: ROW_THREADS lanes with
// THREAD_EXPERTS adjacent experts each. No fence orders logits and arrivals: logits are passed through memory that held
// zeros (Passed), and a warp loads them while its arrival is counted. The plan promises that no kernel which may
// still run writes the weight: the first chunk is loaded while the previous kernel runs.
//
// Constants:
//     TOKENS, SPLIT, BATCH    of gemv_rows.cuh; TOKENS is 1
//     input_t       element type of input and norm_weight
//     SCORING       softmax or sigmoid
//     NUM_EXPERTS   experts, at most ROW_THREADS * THREAD_EXPERTS
//     TOP_K         experts of a token, at most ROW_THREADS
//     THREAD_EXPERTS    experts of a lane

#include "experts.cuh"
#include "gemv_norm.cuh"

using ranking = Ranking<0>;

DEVICE const scalar_t* weight_row(int i, const scalar_t* weight, int64_t stride) {
    return weight + loaded_column<1>(i, NUM_EXPERTS) * stride;
}

// The first chunk and the norm's weight, before the previous kernel has ended.
DEVICE void prefetch_weights(raw_t (&next)[BATCH], const scalar_t* weight, int64_t stride, const input_t* norm_weight) {
    load_chunk(next, weight_row(0, weight, stride), 0);
    prefetch_part(norm_weight, HIDDEN_SIZE - 1, threadIdx.x);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemv_router(input_t* normalised,         // [num_tokens, HIDDEN_SIZE]
            float* topk_weights,         // [num_tokens, TOP_K]
            int32_t* topk_ids,           // [num_tokens, TOP_K]
            const input_t* input,        // [num_tokens, HIDDEN_SIZE]
            const input_t* norm_weight,  // [HIDDEN_SIZE]
            const scalar_t* weight,      // [NUM_EXPERTS, HIDDEN_SIZE]
            Passed<2>* all_logits,       // [num_tokens, NUM_EXPERTS] zeros; both floats of a pair are the logit
            uint32_t* arrived,           // [num_tokens] zeros
            int64_t input_stride, int64_t weight_stride, bool renormalize, float routed_scaling_factor, float epsilon) {
    __shared__ Vec<input_t, VEC_SIZE> row_of_token[VECS];
    raw_t next[BATCH];
    prefetch_weights(next, weight, weight_stride, norm_weight);
    const int num_rows = count_rows<1>(NUM_EXPERTS);
    await_previous_kernel();
    const int64_t token = blockIdx.y;
    input_t* const x = reinterpret_cast<input_t*>(row_of_token);
    normalise(x, input + token * input_stride, norm_weight, epsilon);
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < VECS; i += NUM_THREADS) {
            row_of_token[i].store(normalised + token * HIDDEN_SIZE + i * VEC_SIZE);
        }
    }
    Passed<2>* const logits = all_logits + token * NUM_EXPERTS;
    const auto row = [&](int i) { return weight_row(i, weight, weight_stride); };
    const auto input_row = [&](int, int) { return x; };
    multiply_rows(next, num_rows, row, input_row, [&](int i, const float (&acc)[TOKENS]) {
        const int64_t expert = column_of<1>(i);
        if (stores_products() && expert < NUM_EXPERTS) logits[expert].store({acc[0], acc[0]});
    });
    __syncthreads();
    if (threadIdx.x >= WARP_SIZE) return;

    const int lane = threadIdx.x % ROW_THREADS, first = lane * THREAD_EXPERTS;
    const uint32_t before = threadIdx.x == 0 ? atomicAdd(arrived + token, 1u) : 0;
    float own[THREAD_EXPERTS];
    // Loads the lane's logits. Returns whether all of them have arrived.
    const auto load_logits = [&] {
        uint32_t least = ~0u;
#pragma unroll
        for (int i = 0; i < THREAD_EXPERTS; ++i) {
            uint32_t words[2];
            logits[min(first + i, NUM_EXPERTS - 1)].load(words);
            own[i] = first + i < NUM_EXPERTS ? Passed<2>::float_of(words[0]) : minus_infinity();
            least = min(least, words[0]);
        }
        return least > 0;
    };
    bool has_all = speculates(logits, NUM_EXPERTS) && load_logits();
    if (shfl<WARP_SIZE>(before, 0) != gridDim.x - 1) return;
    while (any_lane(!has_all)) has_all = load_logits();

    ranking::rank_t ranks[THREAD_EXPERTS];
#pragma unroll
    for (int i = 0; i < THREAD_EXPERTS; ++i) {
        ranks[i] = first + i < NUM_EXPERTS ? ranking::rank(ordered_key(own[i]), first + i) : 0;
    }
    const auto score = score_of_token<SCORING>(own, !renormalize, nullptr, nullptr);
    const auto [best, position] = best_of_row<TOP_K>(ranks);
    const bool chosen = position < TOP_K;
    const float s = chosen ? score(logit_of(float_of_ordered(uint32_t(best >> 32)))) : 0.0f;
    const float sum = lane_reduce<Sum, ROW_THREADS>(s);
    const float divisor = renormalize && sum > 0.0f ? sum : 1.0f;
    if (threadIdx.x >= ROW_THREADS) return;
    if (chosen) {
        topk_ids[token * TOP_K + position] = ranking::index(best);
        topk_weights[token * TOP_K + position] = ieee_multiply(ieee_divide(s, divisor), routed_scaling_factor);
    }
    // Leaves zeros for the next launch.
    if (lane == 0) atomicExch(arrived + token, 0u);
#pragma unroll
    for (int i = 0; i < THREAD_EXPERTS; ++i) {
        if (first + i < NUM_EXPERTS) logits[first + i] = {};
    }
}
