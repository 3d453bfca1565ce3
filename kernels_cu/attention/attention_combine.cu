// attention_combine: joins what the splits of a sequence have left into the result of attention.
//
//     m = max_s m_s,  w_s = z_s exp(m_s - m),  out = sum_s w_s o_s / (sum_s w_s + 1e-6)
//
// for splits s with largest logit m_s, sum z_s and mean o_s; a sink is one more logit without a value. One block for each
// query head of each sequence, one thread for each VEC_SIZE head dimensions.
//
// Constants
//     out_t, partial_t, length_t    types of out, tmp_out and seq_lens
//     HEAD_SIZE, NUM_HEADS    head size and query heads
//     VEC_SIZE       elements in one memory access; divides HEAD_SIZE
//     NUM_THREADS    threads in the block
//     PARTITION      as in attention_decode.cu
//     DIRECT         sequences of one split are there already
//     HAS_SINKS, HAS_LSE, HAS_STARTS, HAS_OUT_SCALE    which of the options are there
//     LSE_BY_ROW     lse is [num_rows, NUM_HEADS] instead

#include "attention.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
attention_combine(out_t* out,                    // [num_rows, NUM_HEADS, HEAD_SIZE]
                  float* lse,                    // [NUM_HEADS, num_rows]
                  const partial_t* tmp_out,  // [num_seqs, NUM_HEADS, most_splits, HEAD_SIZE]
                  const float* max_logits,      // [num_seqs, NUM_HEADS, most_splits]
                  const float* exp_sums,      // [num_seqs, NUM_HEADS, most_splits]
                  const length_t* seq_lens,      // [num_seqs]
                  const int* query_start_loc,    // [num_seqs + 1]
                  const float* sinks,            // [NUM_HEADS]
                  const float* fp8_out_scale,    // [1]
                  int64_t num_rows, int64_t most_tokens, int64_t most_splits, int64_t sliding_window, int64_t least_split,
                  int64_t out_stride, int64_t length_step) {
    await_previous_kernel();
    const int64_t seq = blockIdx.x / NUM_HEADS, head = blockIdx.x % NUM_HEADS;
    const Splits splits(seq_lens[seq * length_step], most_tokens, sliding_window, PARTITION, int(most_splits), int(least_split));
    const int64_t row = HAS_STARTS ? row_of(query_start_loc + seq, num_rows) : seq;
    if (row < 0) return;
    if (DIRECT && splits.count <= 1) return;

    const int64_t at = (seq * NUM_HEADS + head) * most_splits;
    const int count = min(splits.count, int(most_splits));
    float largest = minus_infinity();
    for (int s = 0; s < count; ++s) {
        if (splits.exists(s)) largest = fmaxf(largest, max_logits[at + s]);
    }
    float sink = 0.0f;
    if (HAS_SINKS) {
        sink = sinks[head];
        largest = fmaxf(largest, sink);
    }
    const float base = largest == minus_infinity() ? 0.0f : largest;
    float all = HAS_SINKS ? expf(sink - base) : 0.0f;

    const int column = threadIdx.x * VEC_SIZE;
    float sum[VEC_SIZE] = {};
    for (int s = 0; s < count; ++s) {
        if (!splits.exists(s)) continue;
        const float weight = exp_sums[at + s] * expf(max_logits[at + s] - base);
        all += weight;
        if (column < HEAD_SIZE) {
            float x[VEC_SIZE];
            Vec<partial_t, VEC_SIZE>::load(tmp_out + (at + s) * HEAD_SIZE + column).to_floats(x);
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
        }
    }
    const float share = 1.0f / (all + 1e-6f) * (HAS_OUT_SCALE ? 1.0f / *fp8_out_scale : 1.0f);
    if (column < HEAD_SIZE) {
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) sum[i] *= share;
        Vec<out_t, VEC_SIZE>::from_floats(sum).store(out + row * out_stride + head * HEAD_SIZE + column);
    }
    if (HAS_LSE && threadIdx.x == 0) {
        lse[LSE_BY_ROW ? row * NUM_HEADS + head : head * num_rows + row] = all == 0.0f ? minus_infinity() : largest + logf(all);
    }
}
