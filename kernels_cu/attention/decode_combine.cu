// decode_combine: combines the partial results of a sequence's splits (split-KV).
//
//     out = sum_s w_s o_s / (sum_s w_s + 1e-6),   w_s = z_s exp(m_s - m),   m = max_s m_s
//
// Split s has stored its row max m_s, the row sum z_s relative to m_s, and the mean of values o_s. A sink is one more
// logit without a value. attention.cuh explains splits.
//
// Thread mapping: a CTA takes HEADS query heads of one sequence, with all dimensions, or with a part of them if LANES
// threads cannot hold all. Each head has GROUPS groups of LANES threads. The groups take the splits round-robin, and
// each thread of a group takes VEC_SIZE dimensions.
//
// Constants
//     out_t, partial_t, length_t    element types of out, tmp_out and seq_lens
//     starts_t, STARTS_STEP         as in attention_decode.cu
//     NUM_HEADS                     query heads
//     HEADS                         query heads of a CTA; divides NUM_HEADS
//     LANES                         threads of a group; whole warps
//     GROUPS                        groups of a head
//     PARTITION                     as in attention_decode.cu, and so is wave_splits
//     DIRECT                        attention_decode has already written sequences of one split to out
//     HAS_OUT_SCALE                 out is divided by fp8_out_scale
//     SPLIT_UNIT                    every split is a multiple of this number of tokens
//     HAS_LENGTHS                   seq_lens is given; otherwise every sequence has max_tokens tokens
//     LSE_BY_ROW                    lse is [num_rows, NUM_HEADS], not [NUM_HEADS, num_rows]

#include "attention.cuh"

constexpr int BATCH = 4;  // splits that a group loads at once
constexpr bool MAY_BALANCE = DIRECT && PARTITION == 0;

// exp(x - max_logit); 0 for x = -inf, also where max_logit is -inf.
DEVICE float relative_exp(float x, float max_logit) {
    return expf(x - (max_logit == minus_infinity() ? 0.0f : max_logit));
}

extern "C" __global__ void LAUNCH_BOUNDS(LANES * GROUPS * HEADS, 1)
decode_combine(out_t* out,                       // [num_rows, NUM_HEADS, HEAD_SIZE]
               float* lse,                       // [NUM_HEADS, num_rows]
               const partial_t* tmp_out,         // [num_seqs, NUM_HEADS, max_splits, HEAD_SIZE]
               const float* max_logits,          // [num_seqs, NUM_HEADS, max_splits]
               const float* exp_sums,            // [num_seqs, NUM_HEADS, max_splits]
               const length_t* seq_lens,         // [num_seqs]
               const starts_t* query_start_loc,  // [num_seqs + 1]
               const float* sinks,               // [NUM_HEADS]
               const float* fp8_out_scale,       // [1]
               int64_t num_seqs, int64_t num_rows, int64_t max_tokens, int64_t max_splits, int64_t sliding_window,
               int64_t min_split, int64_t out_stride, int64_t length_step, float wave_splits, float two_waves,
               float three_waves, float two_mixed_waves, float three_mixed_waves) {
    await_previous_kernel();
    constexpr int BLOCKS = NUM_HEADS / HEADS,
                  PARTS = ceil_div(HEAD_SIZE, LANES * VEC_SIZE);  // CTAs of a sequence; parts of a head
    const int block_head = threadIdx.x / (LANES * GROUPS), group = threadIdx.x / LANES % GROUPS;
    const int lane = threadIdx.x % LANES;
    const int64_t seq = blockIdx.x / (BLOCKS * PARTS), head = blockIdx.x / PARTS % BLOCKS * HEADS + block_head;
    const int part = blockIdx.x % PARTS;
    int planned_splits = int(max_splits);
    if (MAY_BALANCE && wave_splits > 0.0f) {
        const Balance<length_t> balance(seq_lens, length_step, num_seqs, max_tokens, sliding_window,
                                        {wave_splits, {two_waves, three_waves}, {two_mixed_waves, three_mixed_waves}},
                                        max_splits, HEAD_SIZE);
        planned_splits = balance.splits_of(seq);
    }
    const Splits splits(HAS_LENGTHS ? int64_t(seq_lens[seq * length_step]) : max_tokens, max_tokens, sliding_window,
                        PARTITION, planned_splits, int(min_split), SPLIT_UNIT);
    const int64_t row = HAS_STARTS ? row_of(query_start_loc + seq * STARTS_STEP, STARTS_STEP, num_rows) : seq;
    if (row < 0) return;
    if (DIRECT && splits.count <= 1) return;

    const int64_t first_part = (seq * NUM_HEADS + head) * max_splits;
    const int count = min(splits.count, int(max_splits));
    const int column = (part * LANES + lane) * VEC_SIZE;
    float max_logit = minus_infinity(), exp_sum = 0.0f, sum[VEC_SIZE] = {};
    for (int first = group; first < count; first += GROUPS * BATCH) {
        float logit[BATCH], weight[BATCH], x[BATCH][VEC_SIZE] = {};
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int split = first + i * GROUPS;
            const bool exists = split < count && splits.exists(split);
            logit[i] = exists ? max_logits[first_part + split] : minus_infinity();
            weight[i] = exists ? exp_sums[first_part + split] * (1.0f / FULL_SCALE<float>) : 0.0f;
            if (exists && column < HEAD_SIZE) {
                Vec<partial_t, VEC_SIZE>::load(tmp_out + (first_part + split) * HEAD_SIZE + column).to_floats(x[i]);
            }
        }
        float larger = max_logit;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) larger = fmaxf(larger, logit[i]);
        const float correction = relative_exp(max_logit, larger);
        max_logit = larger;
        exp_sum *= correction;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) sum[j] *= correction;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const float factor = weight[i] * relative_exp(logit[i], larger);
            exp_sum += factor;
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) sum[j] = fmaf(factor, x[i][j], sum[j]);
        }
    }

    // Group 0 of each head combines the results of the groups.
    if constexpr (GROUPS > 1) {
        __shared__ float group_max[HEADS][GROUPS];
        __shared__ float group_exp_sum[HEADS][GROUPS];
        __shared__ float group_sum[HEADS][GROUPS][VEC_SIZE][LANES];
        if (lane == 0) {
            group_max[block_head][group] = max_logit;
            group_exp_sum[block_head][group] = exp_sum;
        }
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) group_sum[block_head][group][j][lane] = sum[j];
        __syncthreads();
        if (group > 0) return;
#pragma unroll
        for (int i = 1; i < GROUPS; ++i) max_logit = fmaxf(max_logit, group_max[block_head][i]);
        exp_sum = 0.0f;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) sum[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const float factor = relative_exp(group_max[block_head][i], max_logit);
            exp_sum = fmaf(factor, group_exp_sum[block_head][i], exp_sum);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) sum[j] = fmaf(factor, group_sum[block_head][i][j][lane], sum[j]);
        }
    }
    max_logit *= LOG2_E;
    exp_sum *= FULL_SCALE<float>;
    const float correction = HAS_SINKS ? count_sink(sinks[head], max_logit, exp_sum) : 1.0f;
    const float scale =
        correction / (exp_sum + 1e-6f) * (FULL_SCALE<float> * (HAS_OUT_SCALE ? 1.0f / *fp8_out_scale : 1.0f));
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) sum[j] *= scale;
    if (column < HEAD_SIZE) {
        Vec<out_t, VEC_SIZE>::from_floats(sum).store(out + row * out_stride + head * HEAD_SIZE + column);
    }
    if (HAS_LSE && part == 0 && group == 0 && lane == 0) {
        lse[LSE_BY_ROW ? row * NUM_HEADS + head : head * num_rows + row] = log_sum_exp(max_logit, exp_sum);
    }
}
