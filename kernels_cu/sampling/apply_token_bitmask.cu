// apply_token_bitmask: sets the logits of tokens that a grammar forbids to -inf, in place.
//
//     logits[r, t] = -inf where bit t % 32 of bitmask[r, t / 32] is 0    for every row r, or only the rows in indices
//
// A block edits a piece of a row (masked_edit.cuh). Only vectors with allowed and forbidden tokens are read, because a
// store that covers a part of a sector makes L2 read it in any case. With indices, each warp searches them for its row.
//
// Constants:
//     VEC_SIZE       logits in one memory access; divides 32, so that the bits of a vector lie in one word
//     SHIFTED        false
//     HAS_INDICES    false when indices is null
//     EAGER          logits are loaded together with their bits

#include "masked_edit.cuh"

static_assert(!SHIFTED);

// Which of N tokens are forbidden: a bit each.
template <int N>
struct Bits {
    static constexpr uint32_t ALL = (1u << N) - 1;
    uint32_t bits;

    DEVICE bool any() const { return bits != 0; }
    DEVICE bool reads() const { return bits != 0 && bits != ALL; }
    DEVICE bool at(int j) const { return bits >> j & 1; }
};

struct Grammar {
    const int32_t* bitmask;  // of the row

    template <int N> using Marks = Bits<N>;

    template <int N>
    DEVICE Bits<N> marks(int64_t column) const {
        return {~uint32_t(bitmask[column / 32]) >> column % 32 & Bits<N>::ALL};
    }
    template <int N>
    DEVICE bool operator()(float (&x)[N], const Bits<N>&) const {
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = minus_infinity();
        return true;
    }
    DEVICE float one(float, const Bits<1>&) const { return minus_infinity(); }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
apply_token_bitmask(scalar_t* logits,        // [num_rows, vocab_size]
                    const int32_t* bitmask,  // [num_rows, ceil(vocab_size / 32)]
                    const int32_t* indices,  // [num_indices]
                    int64_t num_rows, int64_t vocab_size, int64_t num_indices, int64_t logits_stride,
                    int64_t bitmask_stride) {
    await_previous_kernel();
    const Piece<VEC_SIZE, BATCH> piece(vocab_size);
    bool edited = !HAS_INDICES;
    for (int64_t i = threadIdx.x % WARP_SIZE; HAS_INDICES && i < num_indices; i += WARP_SIZE) {
        edited |= indices[i] == piece.row;
    }
    if (HAS_INDICES) edited = any_lane(edited);
    if (!edited || PLANES && piece.row >= num_rows) return;
    piece(logits + piece.row * logits_stride, Grammar{bitmask + piece.row * bitmask_stride});
}
