// repack_weight: repacks weights from one layout to another.
//
//     quant (k, n) of packed = quant (perm[k], n) of quants, or 0 if that row or column is out of range
//
// A thread writes WORDS adjacent words of a weight; blockIdx.y counts weights. Its reads are scattered, but the fields
// of one word, and the threads of one warp, often read the same words.
//
// Constants
//     SOURCE_LAYOUT layout of quants: packed_layout.cuh
//     LAYOUT        layout of packed
//     BITS          bits of a quant
//     PERMUTED      whether perm permutes the rows
//     PADDED        whether packed has more columns than quants
//     WORDS         words of a thread; divides num_words
//     ACCESS        bytes of one access to packed

#include "LAYOUT.cuh"
#include "SOURCE_LAYOUT.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
repack_weight(uint8_t* packed,         // [experts, num_words] words, a weight [K, columns padded to the tiles]
              const uint32_t* quants,  // [experts, expert_words], a weight [K, N]
              const int32_t* perm,     // [experts, K]; values are not trusted
              int64_t k, int64_t n, int64_t columns, int64_t num_words, int64_t expert_words, int64_t word_stride,
              int64_t word_step) {
    await_previous_kernel();
    const int64_t first = (int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x) * WORDS, expert = blockIdx.y;
    if (first >= num_words) return;
    const PackedSize source{uint32_t(k), uint32_t(n), word_stride, word_step};
    const PackedSize size{uint32_t(k), uint32_t(columns), columns, 1};
    quants += expert * expert_words;
    Vec<uint8_t, 4 * WORDS> bytes;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        uint32_t word = 0;
#pragma unroll
        for (int field = 0; field < 32 / BITS; ++field) {
            const Element at = LAYOUT<BITS>::element(uint64_t(first) | i, field, size);
            uint32_t row = at.k;
            if constexpr (PERMUTED) row = uint32_t(perm[expert * k + at.k]);  // negative: more than k
            if ((PERMUTED && row >= k) || (PADDED && at.n >= n)) continue;
            word |= SOURCE_LAYOUT<BITS>::quant(quants, source, row, at.n) << field * BITS;
        }
        bytes.template word<4>(4 * i) = word;
    }
    bytes.template store<ACCESS>(packed + (expert * num_words + first) * 4);
}
