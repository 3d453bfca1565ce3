// attention_combine: joins what the splits of a sequence have left into the result of attention.
//
//     m = max_s m_s,  w_s = z_s exp(m_s - m),  out = sum_s w_s o_s / (sum_s w_s + 1e-6)
//
// for splits s with largest logit m_s, sum z_s and mean o_s; a sink is one more logit without a value. A block takes
// query heads of one sequence. Each head has `groups` groups of LANES threads, which take its splits in turn, and each thread
// VEC_SIZE dimensions. The size of the block says how many heads those are.
//
// Constants
//     out_t, partial_t, length_t    types of out, tmp_out and seq_lens
//     starts_t, STARTS_STEP    as in attention_decode.cu
//     HEAD_SIZE, NUM_HEADS    head size and query heads
//     VEC_SIZE       elements in one memory access
//     LANES          threads of a group, whole warps
//     PARTITION      as in attention_decode.cu, and so is `slots`
//     DIRECT         sequences of one split are there already
//     HAS_SINKS, HAS_LSE, HAS_STARTS, HAS_OUT_SCALE    which of the options are there
//     LSE_BY_ROW     lse is [num_rows, NUM_HEADS] instead

#include "attention.cuh"

constexpr int BATCH = 4;  // splits of a group whose loads are in flight together
constexpr int MAX_GROUPS = LANES <= 128 ? 8 : 1024 / LANES;  // of a block
constexpr bool MAY_BALANCE = DIRECT && PARTITION == 0;

extern "C" __global__ void LAUNCH_BOUNDS(LANES * MAX_GROUPS, 1)
attention_combine(out_t* out,                    // [num_rows, NUM_HEADS, HEAD_SIZE]
                  float* lse,                    // [NUM_HEADS, num_rows]
                  const partial_t* tmp_out,  // [num_seqs, NUM_HEADS, most_splits, HEAD_SIZE]
                  const float* max_logits,      // [num_seqs, NUM_HEADS, most_splits]
                  const float* exp_sums,      // [num_seqs, NUM_HEADS, most_splits]
                  const length_t* seq_lens,      // [num_seqs]
                  const starts_t* query_start_loc,    // [num_seqs + 1]
                  const float* sinks,            // [NUM_HEADS]
                  const float* fp8_out_scale,    // [1]
                  int64_t num_seqs, int64_t num_rows, int64_t most_tokens, int64_t most_splits, int64_t sliding_window, int64_t least_split,
                  int64_t out_stride, int64_t length_step, float slots, int groups) {
    await_previous_kernel();
    const int own = threadIdx.x / LANES, lane = threadIdx.x % LANES;  // own: which group of the block
    const unsigned number = blockIdx.x * (blockDim.x / LANES) + own, each = groups;
    const int group = number % each;
    const int64_t seq = number / each / NUM_HEADS, head = number / each % NUM_HEADS;
    int parts = int(most_splits);
    if (MAY_BALANCE && slots > 0.0f) {
        parts = Balance<length_t>(seq_lens, length_step, num_seqs, most_tokens, sliding_window, slots, most_splits).splits_of(seq);
    }
    const Splits splits(seq_lens[seq * length_step], most_tokens, sliding_window, PARTITION, parts, int(least_split));
    const int64_t row = HAS_STARTS ? row_of(query_start_loc + seq * STARTS_STEP, STARTS_STEP, num_rows) : seq;
    if (row < 0) return;
    if (DIRECT && splits.count <= 1) return;

    const int64_t at = (seq * NUM_HEADS + head) * most_splits;
    const int count = min(splits.count, int(most_splits));
    const int column = lane * VEC_SIZE;
    float most = minus_infinity(), all = 0.0f, sum[VEC_SIZE] = {};
    const auto relative = [](float x, float largest) { return expf(x - (largest == minus_infinity() ? 0.0f : largest)); };
    for (int first = group; first < count; first += groups * BATCH) {
        float logit[BATCH], weight[BATCH], x[BATCH][VEC_SIZE] = {};
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int split = first + i * groups;
            const bool there = split < count && splits.exists(split);
            logit[i] = there ? max_logits[at + split] : minus_infinity();
            weight[i] = there ? exp_sums[at + split] : 0.0f;
            if (there && column < HEAD_SIZE) Vec<partial_t, VEC_SIZE>::load(tmp_out + (at + split) * HEAD_SIZE + column).to_floats(x[i]);
        }
        float largest = most;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) largest = fmaxf(largest, logit[i]);
        const float shrink = relative(most, largest);
        most = largest;
        all *= shrink;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) sum[j] *= shrink;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const float share = weight[i] * relative(logit[i], largest);
            all += share;
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) sum[j] = fmaf(share, x[i][j], sum[j]);
        }
    }

    if (groups > 1) {
        __shared__ float group_most[MAX_GROUPS];
        __shared__ float group_all[MAX_GROUPS];
        __shared__ float group_sum[MAX_GROUPS][VEC_SIZE][LANES];
        if (lane == 0) {
            group_most[own] = most;
            group_all[own] = all;
        }
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) group_sum[own][j][lane] = sum[j];
        __syncthreads();
        if (group > 0) return;
#pragma unroll
        for (int i = 1; i < MAX_GROUPS; ++i) {
            if (i < groups) most = fmaxf(most, group_most[own + i]);
        }
        all = 0.0f;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) sum[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < MAX_GROUPS; ++i) {
            if (i >= groups) break;
            const float share = relative(group_most[own + i], most);
            all = fmaf(share, group_all[own + i], all);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) sum[j] = fmaf(share, group_sum[own + i][j][lane], sum[j]);
        }
    }
    float weight = 1.0f;
    if (HAS_SINKS) {
        const float sink = sinks[head], largest = fmaxf(most, sink);
        weight = relative(most, largest);
        all = all * weight + relative(sink, largest);
        most = largest;
    }
    const float share = weight / (all + 1e-6f) * (HAS_OUT_SCALE ? 1.0f / *fp8_out_scale : 1.0f);
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) sum[j] *= share;
    if (column < HEAD_SIZE) Vec<out_t, VEC_SIZE>::from_floats(sum).store(out + row * out_stride + head * HEAD_SIZE + column);
    if (HAS_LSE && group == 0 && lane == 0) {
        lse[LSE_BY_ROW ? row * NUM_HEADS + head : head * num_rows + row] = all == 0.0f ? minus_infinity() : most + logf(all);
    }
}
