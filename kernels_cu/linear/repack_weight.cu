// repack_weight: packs the codes of weights in another layout.
//
//     code of (k, n) in packed = code of (perm[k], n) in codes; 0 where codes has no such row or column
//
// A thread makes one word. Neighbouring threads have neighbouring words; what they read is not in order.
//
// Constants
//     SOURCE        layout of codes: a name of packed_layout.cuh
//     LAYOUT        layout of packed
//     BITS          of a code
//     PERMUTED      rows are permuted by perm
//     ACCESS        bytes of one access to packed

#include "packed_layout.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
repack_weight(uint8_t* packed,        // [experts, num_words] words, a weight [K, columns padded to the tiles]
              const uint32_t* codes,  // [experts, expert_words], a weight [K, N]
              const int32_t* perm,    // [experts, K], any numbers
              int64_t k, int64_t n, int64_t columns, int64_t num_words, int64_t expert_words, int64_t total,
              int64_t word_stride, int64_t word_step) {
    await_previous_kernel();
    const int64_t i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (i >= total) return;
    const int64_t expert = i / num_words;
    const PackedSize source{uint32_t(k), uint32_t(n), word_stride, word_step};
    const PackedSize size{uint32_t(k), uint32_t(columns), columns, 1};
    codes += expert * expert_words;
    uint32_t word = 0;
#pragma unroll
    for (int field = 0; field < 32 / BITS; ++field) {
        const Element at = LAYOUT<BITS>::element(uint64_t(i - expert * num_words), field, size);
        int64_t row = at.k;
        if constexpr (PERMUTED) row = perm[expert * k + at.k];
        if (row < 0 || row >= k || at.n >= n) continue;
        word |= SOURCE<BITS>::code(codes, source, uint32_t(row), at.n) << field * BITS;
    }
    Vec<uint8_t, 4> bytes;
    bytes.template word<4>(0) = word;
    bytes.template store<ACCESS>(packed + i * 4);
}
