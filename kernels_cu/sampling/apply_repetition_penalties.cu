// apply_repetition_penalties: logits of tokens that have come before are made smaller, in place.
//
//     l = T(l / p) if l > 0 else T(l * p)    where prompt_mask or output_mask is set, p = repetition_penalties[row]
//
// A thread reads the masks of BATCH vectors and then, of the logits, only the vectors in which one is set.
//
// Constants
//     scalar_t      T: element type of logits and repetition_penalties
//     VOCAB_SIZE    elements in a row
//     VEC_SIZE      elements of a vector
//     BATCH         vectors of a thread
//     NUM_THREADS   threads in the block

#include "masked_edit.cuh"

// By the reciprocal, a residual brings a product to one of the two nearest numbers, which suffices for T of 16 bits, and another
// to the nearest.
constexpr int RESIDUALS = is_same<scalar_t, float> ? 2 : 1;

// x = x / penalty or x * penalty. Where a quotient could leave the normal numbers, each is a division.
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
            for (int i = 0; i < RESIDUALS; ++i) quotient = nearer(quotient, x[j], penalty, reciprocal);
            x[j] = is_positive(x[j]) ? quotient : ieee_multiply(x[j], penalty);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = is_positive(x[j]) ? ieee_divide(x[j], penalty) : ieee_multiply(x[j], penalty);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
apply_repetition_penalties(scalar_t* logits,                       // [num_seqs, VOCAB_SIZE]
                           const uint8_t* prompt_mask,             // [num_seqs, VOCAB_SIZE]
                           const uint8_t* output_mask,             // [num_seqs, VOCAB_SIZE]
                           const scalar_t* repetition_penalties,   // [num_seqs]
                           int64_t size) {
    await_previous_kernel();
    const auto load = [&](int64_t element, int count, uint32_t (&mask)[VEC_SIZE]) {
        uint8_t prompt[VEC_SIZE] = {}, output[VEC_SIZE] = {};
        load_some(prompt_mask + element, count, prompt);
        load_some(output_mask + element, count, output);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) mask[j] = prompt[j] | output[j];
    };
    Flat<VEC_SIZE, BATCH, VOCAB_SIZE, NUM_THREADS>(size).edit(logits, load, [&](auto& x, const auto&, int64_t row) {
        penalise(x, to_float(repetition_penalties[row]));
    });
}
