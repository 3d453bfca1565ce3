// apply_repetition_penalties: makes tokens that have come before less likely, in place.
//
//     l = T(l / p) if l > 0 else T(l * p)    where prompt_mask or output_mask is set, p = repetition_penalties[row]
//
// T is the dtype of the logits and penalties. A block edits a piece of a row (masked_edit.cuh).
//
// Constants:
//     SHIFTED    rows are not whole vectors
//     EAGER      logits are loaded together with their masks

#include "masked_edit.cuh"

// Times that a quotient is refined. x * (1 / penalty) refined once is one of the two floats next to x / penalty: exact
// enough to round to 16 bits. Refined twice, the quotient is the nearest float.
constexpr int REFINEMENTS = is_same<scalar_t, float> ? 2 : 1;

// Whether 2^-60 <= x <= 2^60.
DEVICE bool is_ordinary(float x) { return x >= 0x1p-60f && x <= 0x1p60f; }

// Which of N tokens have come before: a byte each, not 0 for those.
template <int N>
struct Seen {
    static constexpr int WORD = N < 4 ? N : 4;  // bytes of an access
    uint32_t words[N / WORD];

    DEVICE bool any() const {
        uint32_t all = 0;
#pragma unroll
        for (int i = 0; i < N / WORD; ++i) all |= words[i];
        return all != 0;
    }
    DEVICE bool reads() const { return any(); }
    DEVICE bool at(int j) const { return words[j / WORD] & 0xffu << j % WORD * 8; }
};

struct Penalty {
    const uint8_t *prompt_mask, *output_mask;  // of the row
    float penalty, reciprocal;

    template <int N> using Marks = Seen<N>;

    template <int N>
    DEVICE Seen<N> marks(int64_t column) const {
        const auto prompt = Vec<uint8_t, N>::load(prompt_mask + column);
        const auto output = Vec<uint8_t, N>::load(output_mask + column);
        constexpr int WORD = Seen<N>::WORD;
        Seen<N> seen;
#pragma unroll
        for (int i = 0; i < N / WORD; ++i) {
            seen.words[i] = uint32_t(prompt.template word<WORD>(i * WORD)) | output.template word<WORD>(i * WORD);
        }
        return seen;
    }
    // Multiplying by the reciprocal is fast but needs operands of ordinary size.
    template <int N>
    DEVICE bool operator()(float (&x)[N], const Seen<N>&) const {
        bool ordinary = is_ordinary(penalty);
#pragma unroll
        for (int j = 0; j < N; ++j) ordinary &= !is_positive(x[j]) || is_ordinary(x[j]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            float quotient = x[j] * reciprocal;
#pragma unroll
            for (int i = 0; i < REFINEMENTS; ++i) quotient = nearer(quotient, x[j], penalty, reciprocal);
            x[j] = is_positive(x[j]) ? quotient : ieee_multiply(x[j], penalty);
        }
        return ordinary;
    }
    DEVICE float one(float x, const Seen<1>&) const {
        return is_positive(x) ? ieee_divide(x, penalty) : ieee_multiply(x, penalty);
    }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
apply_repetition_penalties(scalar_t* logits,                      // [num_seqs, vocab_size]
                           const uint8_t* prompt_mask,            // [num_seqs, vocab_size]
                           const uint8_t* output_mask,            // [num_seqs, vocab_size]
                           const scalar_t* repetition_penalties,  // [num_seqs]
                           int64_t num_rows, int64_t vocab_size) {
    await_previous_kernel();
    const Piece<VEC_SIZE, BATCH> piece(vocab_size);
    if (PLANES && piece.row >= num_rows) return;
    const int64_t begin = piece.row * vocab_size;
    const float penalty = to_float(repetition_penalties[piece.row]);
    piece(logits + begin, Penalty{prompt_mask + begin, output_mask + begin, penalty, reciprocal_of(penalty)});
}
