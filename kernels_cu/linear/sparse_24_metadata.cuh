// sparse_24_metadata.cuh: codes of two in four rows become the rows of a product of wq_gemm_sm80.cu (layout_marlin_24).
//
// Of sixteen rows, lane 4g + t has four: quad t. The two codes that it has of them are a pair; what `places` says of the
// quad chooses, for each of its rows, a half of the pair, or a half of the pair of zeros: codes whose number is 0. Where one
// place is named twice, the second code is there.
//
// `places` are [K / 32, 2 N] as packed_layouts.py has them: a word of 16 bits has four quads of a column. Of 64 columns and
// 32 rows, lane 4g + t reads eight words of 32 bits: the words of its columns h in two halves.
#pragma once
#include "wq_fragment.cuh"

// Bytes of a selector for the rows of a quad: what __byte_perm takes of a pair of codes and of a pair of zeros.
DEVICE uint32_t selector_of(uint32_t place) {
    uint32_t selector = 0;
#pragma unroll
    for (uint32_t row = 0; row < 4; ++row) {
        selector |= (place >> 2 == row ? 0x32u : (place & 3) == row ? 0x10u : 0x54u) << 8 * row;
    }
    return selector;
}
// All sixteen, to shared memory. All threads of the block call.
DEVICE void fill_selectors(uint32_t* selectors) {
    if (threadIdx.x < 16) selectors[threadIdx.x] = selector_of(threadIdx.x);
    __syncthreads();
}

struct Places {
    uint32_t words[8];

    // Copies the places of a step that begins at row `first`. Beyond the last rows come copies of these.
    static DEVICE void
    copy(uint8_t* to, const uint16_t* places, int64_t first, int64_t first_column, int64_t n, int64_t k) {
        constexpr int LINE = TILE_N * 4;  // bytes of 32 rows
        static_assert(PLACE_BYTES % 512 == 0);
#pragma unroll
        for (int i = threadIdx.x % 32 * 16; i < PLACE_BYTES; i += 512) {
            const int64_t line = min(first / 32 + i / LINE, k / 32 - 1);
            cp_async<16>(to + i, places + line * 2 * n + first_column * 2 + i % LINE / 2);
        }
    }
    // Reads those of products number `product`, an even one, and the next of a unit.
    DEVICE void read(const uint8_t* from, int unit, int product) {
        const uint8_t* const line =
            from + (unit * UNIT_K + product * 16) / 32 * (TILE_N * 4) + threadIdx.x % 32 / 4 * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto four = Vec<uint32_t, 4>::load(reinterpret_cast<const uint32_t*>(line + i * (TILE_N * 2)));
#pragma unroll
            for (int j = 0; j < 4; ++j) words[4 * i + j] = four.data[j];
        }
    }
    // Makes of `pairs`, each the two codes of the lane's quad of column (tile, j % 2), rows 2q and 2q + 1 of it, q = j / 2.
    DEVICE void spread(uint32_t (&pairs)[4], const codes_t& decode, const uint32_t* selectors, int product, int tile,
                       int term) const {
        const uint32_t zeros = decode.raw(ZERO_POINT * 0x10001, 0, term);
        const uint32_t of_quad = words[2 * tile + product % 2] >> threadIdx.x % 4 * 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t selector = selectors[of_quad >> 16 * h & 15], codes = pairs[h];
            pairs[h] = __byte_perm(codes, zeros, selector);
            pairs[h + 2] = __byte_perm(codes, zeros, selector >> 16);
        }
    }
};
