// apply_repetition_penalties: makes tokens that have come before less likely, in place.
//
//     l = T(l / p) if l > 0 else T(l * p)    where prompt_mask or output_mask is set, p = repetition_penalties[row]
//
// T is the dtype of the logits and penalties. Each thread edits BATCH vectors of the flattened matrix: it loads all
// their masks, then loads and stores only the vectors of logits that hold a set mask.
//
// Constants:
//     VOCAB_SIZE    elements in a row
//     BATCH         vectors per thread

#include "masked_edit.cuh"

// Times that a quotient is refined. x * (1 / penalty) refined once is one of the two floats next to x / penalty: exact
// enough to round to 16 bits. Refined twice, the quotient is the nearest float.
constexpr int REFINEMENTS = is_same<scalar_t, float> ? 2 : 1;

// x = x / penalty where x > 0, else x * penalty. Multiplying by the reciprocal is fast but needs operands of ordinary
// size; otherwise every quotient is a true division.
template <int N>
DEVICE void penalise(float (&x)[N], float penalty) {
    bool ordinary = is_ordinary(penalty);
#pragma unroll
    for (int j = 0; j < N; ++j) ordinary &= !is_positive(x[j]) || is_ordinary(x[j]);
    if (ordinary) {
        const float reciprocal = reciprocal_of(penalty);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            float quotient = x[j] * reciprocal;
#pragma unroll
            for (int i = 0; i < REFINEMENTS; ++i) quotient = nearer(quotient, x[j], penalty, reciprocal);
            x[j] = is_positive(x[j]) ? quotient : ieee_multiply(x[j], penalty);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            x[j] = is_positive(x[j]) ? ieee_divide(x[j], penalty) : ieee_multiply(x[j], penalty);
        }
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
apply_repetition_penalties(scalar_t* logits,                      // [num_seqs, VOCAB_SIZE]
                           const uint8_t* prompt_mask,            // [num_seqs, VOCAB_SIZE]
                           const uint8_t* output_mask,            // [num_seqs, VOCAB_SIZE]
                           const scalar_t* repetition_penalties,  // [num_seqs]
                           int64_t size) {
    await_previous_kernel();
    const auto load = [&](int64_t element, int count, uint32_t (&mask)[VEC_SIZE]) {
        uint8_t prompt[VEC_SIZE] = {}, output[VEC_SIZE] = {};
        load_some(prompt_mask + element, count, prompt);
        load_some(output_mask + element, count, output);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) mask[j] = prompt[j] | output[j];
    };
    Flat<VEC_SIZE, BATCH, VOCAB_SIZE, NUM_THREADS>(size).edit(
        logits, load, [&](auto& x, const auto&, int64_t row) { penalise(x, to_float(repetition_penalties[row])); });
}
