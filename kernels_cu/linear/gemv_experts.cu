// gemv_experts: one of the two GEMMs of a layer of experts for decode (few tokens), bound by reading the weights.
//
//     COMBINES false: out[t, j, n] = T(f(x[n]))
//                     x[n] = sum_k input[t, k] * weight[e, n, k] + bias[e, n]
//                     with GATED 1 T(f(x[n], x[output_size + n])), with GATED 2 T(f(x[2 n], x[2 n + 1]))
//     COMBINES true:  out[t, n] = T(addend[t, n] + sum_j topk_weights[t, j] * x[j, n])
//                     x[j, n] = sum_k input[t, j, k] * weight[e, n, k] + bias[e, n]
//
// e is topk_ids[t, j]. Accumulation is in float32; T is the dtype of all tensors but ids and topk_weights. A choice j
// with an expert that does not exist has a row of zeros, or adds nothing. Unlike in a grouped GEMM, tokens with the
// same expert read its weights once each.
//
// SHARED more choices of each token follow those of topk_ids, with weight 1 and no bias: equal parts of the channels of
// a shared MLP.
//
// Warps multiply as gemv_rows.cuh says; blocks along x stride over the columns of out together. blockIdx.y counts the
// choices of all tokens, or, with COMBINES, the tokens: SHARERS warps (or groups of SPLIT warps) multiply row n of an
// equal number of experts each, one after the other. A lane adds its products of all of them before the sum over lanes
// and warps: a barrier for each expert would have the warps wait for the slowest load. The plan promises that no kernel
// which may still run writes the weights; with COMBINES, nor topk_ids and topk_weights. So the first chunk of a sum,
// and of a shared choice, is loaded while the previous kernel runs.
//
// Constants:
//     TOKENS, SPLIT, BATCH    of gemv_rows.cuh; TOKENS is 1
//     input_t       element type of input: scalar_t
//     id_t          element type of topk_ids
//     TOP_K         choices of a token in topk_ids
//     SHARED        choices of a token that are parts of the shared MLP
//     COMBINES      whether the choices of a token are added
//     SHARERS       with COMBINES, warps among which the choices of a token are divided; a divisor of their number
//     HAS_BIAS, HAS_ADDEND    false when they are null
//     ACTIVATION    f, a function expert_* of gemm_activation.cuh
//     GATED         order of gates and ups in the rows of a weight: 0 no gates, 1 gates first, 2 alternating

#include "gemm_activation.cuh"
#include "gemv_rows.cuh"

constexpr int CHOICES = TOP_K + SHARED;  // choices of a token
// Rows of the weights for each column of out.
constexpr int OUT_ROWS = COMBINES ? CHOICES / SHARERS : GATED ? 2 : 1;
constexpr int EXPERTS = COMBINES ? TOP_K : 1;  // experts that the block looks up
static_assert(CHOICES % SHARERS == 0 && (COMBINES || SHARERS == 1));

// The number of the warp among those that share a column.
DEVICE int sharer() { return int(threadIdx.x) / WARP_SIZE / SPLIT % SHARERS; }

// The choice of its token that row i of the warp belongs to.
DEVICE int choice_of(int i) { return COMBINES ? i % OUT_ROWS * SHARERS + sharer() : int(blockIdx.y % CHOICES); }

DEVICE int64_t column_of(int i) { return column_of<OUT_ROWS, SHARERS>(i); }

// Whether row i of the warp belongs to the shared MLP.
DEVICE bool is_shared(int i) { return SHARED > 0 && choice_of(i) >= TOP_K; }

// The row of a weight with `num_columns` columns, or the element of its bias, for row i of the warp.
DEVICE int64_t expert_row(int i, int64_t column, int64_t num_columns) {
    if constexpr (COMBINES || GATED == 0) return column;
    return GATED == 2 ? 2 * column + i % OUT_ROWS : column + i % OUT_ROWS * num_columns;
}

// Finds the experts of the block's choices, and with COMBINES their weights.
DEVICE void
find_experts(int64_t* experts, float* factors, const id_t* topk_ids, const float* topk_weights, int64_t num_experts) {
    const int64_t token = COMBINES ? blockIdx.y : blockIdx.y / CHOICES;
    const int64_t first = token * TOP_K + (COMBINES ? 0 : choice_of(0));
#pragma unroll 1
    for (int j = threadIdx.x; j < EXPERTS; j += NUM_THREADS) {
        const int64_t id = load_fresh(topk_ids + first + j);
        if constexpr (COMBINES) factors[j] = load_fresh(topk_weights + first + j);
        experts[j] = id < 0 || id >= num_experts ? -1 : id;
    }
    __syncthreads();
}

// The rows of the weights that the warp multiplies.
struct WeightRows {
    int64_t* experts;
    int64_t output_size, weight_stride, expert_stride, shared_stride;

    // The expert of row i, -1 for none. Not for rows of the shared MLP.
    DEVICE int64_t expert(int i) const { return experts[COMBINES ? choice_of(i) : 0]; }

    // The address of row i. Rows out of range, and those of no expert, are clamped; their results are not used.
    DEVICE const scalar_t* address(int i, const scalar_t* weight, const scalar_t* shared) const {
        const int64_t column = loaded_column<OUT_ROWS, SHARERS>(i, output_size);
        if (is_shared(i)) {
            const int64_t part = choice_of(i) - TOP_K;
            if constexpr (COMBINES) return shared + column * shared_stride + part * HIDDEN_SIZE;
            return shared + expert_row(i, part * output_size + column, SHARED * output_size) * shared_stride;
        }
        const int64_t known = expert(i) < 0 ? 0 : expert(i);
        return weight + known * expert_stride + expert_row(i, column, output_size) * weight_stride;
    }
};

// Loads the first chunk to registers before the previous kernel has ended.
DEVICE void prefetch_row(raw_t (&next)[BATCH], const WeightRows& rows, const scalar_t* weight, const scalar_t* shared,
                         float* factors, const id_t* topk_ids, const float* topk_weights, int64_t num_experts) {
    if constexpr (COMBINES) find_experts(rows.experts, factors, topk_ids, topk_weights, num_experts);
    load_chunk(next, rows.address(0, weight, shared), 0);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemv_experts(scalar_t* out,              // [num_tokens, CHOICES, output_size], or [num_tokens, output_size]
             const scalar_t* input,      // [num_tokens, HIDDEN_SIZE], or [num_tokens, CHOICES, HIDDEN_SIZE]
             const scalar_t* weight,     // [num_experts, rows, HIDDEN_SIZE]
             const id_t* topk_ids,       // [num_tokens, TOP_K]
             const float* topk_weights,  // [num_tokens, TOP_K]
             const scalar_t* bias,       // [num_experts, rows]
             const scalar_t* addend,     // [num_tokens, output_size]
             const scalar_t* shared,     // [SHARED * rows, HIDDEN_SIZE], or [output_size, SHARED * HIDDEN_SIZE]
             int64_t num_experts, int64_t output_size, int64_t out_stride, int64_t input_stride, int64_t addend_stride,
             int64_t weight_stride, int64_t expert_stride, int64_t bias_stride, int64_t shared_stride) {
    __shared__ int64_t experts[EXPERTS];  // -1 where there is none
    __shared__ float factors[EXPERTS];
    const WeightRows rows{experts, output_size, weight_stride, expert_stride, shared_stride};
    raw_t next[BATCH];
    if (COMBINES || is_shared(0)) {
        prefetch_row(next, rows, weight, shared, factors, topk_ids, topk_weights, num_experts);
    }
    const int num_rows = count_rows<OUT_ROWS, SHARERS>(output_size);
    await_previous_kernel();
    const auto row = [&](int i) { return rows.address(i, weight, shared); };
    if (!COMBINES && !is_shared(0)) {
        find_experts(experts, factors, topk_ids, topk_weights, num_experts);
        if (experts[0] < 0) {
            for (int64_t n = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x; n < output_size;
                 n += int64_t(gridDim.x) * NUM_THREADS) {
                out[blockIdx.y * out_stride + n] = from_float<scalar_t>(0.0f);
            }
            return;
        }
        load_chunk(next, row(0), 0);
    }
    const bool has_product = stores_products(), stores = has_product && sharer() == 0;
    const auto token = [&](int i, int) {
        if constexpr (COMBINES) return input + (int64_t(blockIdx.y) * CHOICES + choice_of(i)) * input_stride;
        return input + int64_t(blockIdx.y / CHOICES) * input_stride;
    };
    const auto term = [&](int i) {  // of a sum, loaded a column ahead by the thread that stores it: out may be addend
        const bool has_term = HAS_ADDEND && stores && i < num_rows && column_of(i) < output_size;
        return has_term ? addend[blockIdx.y * addend_stride + column_of(i)] : from_float<scalar_t>(0.0f);
    };
    scalar_t next_term = term(0);  // not waited for: it is no float yet
    float gate = 0.0f;
    const auto with_bias = [&](int i, float x) {  // of one thread for all lanes and warps of a row
        if (!HAS_BIAS || !has_product || is_shared(i)) return x;
        const int64_t column = column_of(i), expert = rows.expert(i);
        if (column >= output_size || expert < 0) return x;
        return x + to_float(bias[expert * bias_stride + expert_row(i, column, output_size)]);
    };
    if constexpr (COMBINES) {
        const auto add = [&](int i, float x, float sum) {
            if (is_shared(i)) return sum + x;
            return rows.expert(i) < 0 ? sum : fmaf(factors[choice_of(i)], with_bias(i, x), sum);
        };
        const auto done = [&](int i, float (&sum)[TOKENS]) {
            const float with_term = HAS_ADDEND ? sum[0] + to_float(next_term) : sum[0];
            next_term = term(i + 1);
            const int64_t column = column_of(i);
            if (stores && column < output_size) {
                out[blockIdx.y * out_stride + column] = from_float<scalar_t>(with_term);
            }
        };
        multiply_rows<SHARERS>(next, num_rows, row, token, done, SumOfRows<OUT_ROWS, decltype(add)>{add});
    } else {
        const auto done = [&](int i, const float (&acc)[TOKENS]) {
            const int64_t column = column_of(i);
            const float x = with_bias(i, acc[0]);
            if (i % OUT_ROWS == OUT_ROWS - 1 && stores && column < output_size) {
                out[blockIdx.y * out_stride + column] =
                    from_float<scalar_t>(GATED ? ACTIVATION<scalar_t>(gate, x) : ACTIVATION<scalar_t>(x, x));
            }
            gate = x;
        };
        multiply_rows(next, num_rows, row, token, done);
    }
}
