// apply_penalties: lowers the logits of tokens that have been generated before, in place.
//
//     l = T(l - (frequency_penalties[row] * c + presence_penalties[row]))    where c = output_bin_counts > 0
//
// T is the dtype of the logits. A block edits a piece of a row (masked_edit.cuh).
//
// Constants:
//     SHIFTED    rows are not whole vectors
//     EAGER      logits are loaded together with their counts

#include "masked_edit.cuh"

// How often N tokens have been generated.
template <int N>
struct Counts {
    Vec<int32_t, N> counts;

    DEVICE bool any() const {
        bool found = false;
#pragma unroll
        for (int j = 0; j < N; ++j) found |= at(j);
        return found;
    }
    DEVICE bool reads() const { return any(); }
    DEVICE bool at(int j) const { return counts.data[j] > 0; }
};

struct Penalties {
    const int32_t* output_bin_counts;  // of the row
    float frequency, presence;

    template <int N> using Marks = Counts<N>;

    template <int N>
    DEVICE Counts<N> marks(int64_t column) const {
        return {Vec<int32_t, N>::load(output_bin_counts + column)};
    }
    template <int N>
    DEVICE bool operator()(float (&x)[N], const Counts<N>& marks) const {
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = lowered(x[j], marks.counts.data[j]);
        return true;
    }
    DEVICE float one(float x, const Counts<1>& mark) const { return lowered(x, mark.counts.data[0]); }

private:
    DEVICE float lowered(float x, int32_t count) const {
        return ieee_subtract(x, ieee_add(ieee_multiply(frequency, float(count)), presence));
    }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
apply_penalties(scalar_t* logits,                  // [num_seqs, vocab_size]
                const int32_t* output_bin_counts,  // [num_seqs, vocab_size]
                const float* frequency_penalties,  // [num_seqs]
                const float* presence_penalties,   // [num_seqs]
                int64_t num_rows, int64_t vocab_size) {
    await_previous_kernel();
    const Piece<VEC_SIZE, BATCH> piece(vocab_size);
    if (PLANES && piece.row >= num_rows) return;
    const int64_t begin = piece.row * vocab_size;
    piece(logits + begin,
          Penalties{output_bin_counts + begin, frequency_penalties[piece.row], presence_penalties[piece.row]});
}
