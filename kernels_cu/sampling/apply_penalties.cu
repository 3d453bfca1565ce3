// apply_penalties: lowers the logits of tokens that have been generated before, in place.
//
//     l = T(l - (frequency_penalties[row] * c + presence_penalties[row]))    where c = output_bin_counts > 0
//
// T is the dtype of the logits. Each thread edits BATCH vectors of the flattened matrix: it loads all their counts,
// then loads and stores only the vectors of logits that hold a count above 0.
//
// Constants:
//     VOCAB_SIZE    elements in a row
//     BATCH         vectors per thread

#include "masked_edit.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
apply_penalties(scalar_t* logits,                  // [num_seqs, VOCAB_SIZE]
                const int32_t* output_bin_counts,  // [num_seqs, VOCAB_SIZE]
                const float* frequency_penalties,  // [num_seqs]
                const float* presence_penalties,   // [num_seqs]
                int64_t size) {
    await_previous_kernel();
    const auto load = [&](int64_t element, int count, uint32_t (&counts)[VEC_SIZE]) {
        int32_t raw[VEC_SIZE] = {};
        load_some(output_bin_counts + element, count, raw);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) counts[j] = max(raw[j], 0);
    };
    const auto lower = [&](auto& x, const auto& counts, int64_t row) {
        const float frequency = frequency_penalties[row], presence = presence_penalties[row];
#pragma unroll
        for (int j = 0; j < length(x); ++j) {
            x[j] = ieee_residual(1.0f, ieee_fma(1.0f, ieee_multiply(frequency, float(counts[j])), presence), x[j]);
        }
    };
    Flat<VEC_SIZE, BATCH, VOCAB_SIZE, NUM_THREADS>(size).edit(logits, load, lower);
}
