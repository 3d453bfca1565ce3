// sparse_24_metadata.cuh: expands 2:4 sparse quants to dense MMA fragments for wq_gemm_sm80.cu (layout_marlin_24).
//
// In an MMA of 16 rows of K, lane 4g + t holds quad t, a group of 4 rows, and its 2 stored quants as a pair. The
// metadata (`places`) selects for each of the 4 rows one of the 2 quants, or a quant that dequantizes to 0. If the
// metadata names a row twice, the second quant is used.
//
// The metadata is [K / 32, 2 N] in the order of packed_layouts.py: a 16-bit word has four quads of a column. For 64
// columns and 32 rows, lane 4g + t reads eight 32-bit words, with the 16-bit words of its two columns h as halves.
#pragma once
#include "wq_fragment.cuh"

// The __byte_perm selector of a quad, one byte per row: it chooses from the pair of quants and a pair of zeros.
DEVICE uint32_t selector_of(uint32_t place) {
    uint32_t selector = 0;
#pragma unroll
    for (uint32_t row = 0; row < 4; ++row) {
        selector |= (place >> 2 == row ? 0x32u : (place & 3) == row ? 0x10u : 0x54u) << 8 * row;
    }
    return selector;
}
// Writes all sixteen selectors to shared memory. All threads of the CTA call.
DEVICE void fill_selectors(uint32_t* selectors) {
    if (threadIdx.x < 16) selectors[threadIdx.x] = selector_of(threadIdx.x);
    __syncthreads();
}

struct Places {
    uint32_t words[8];

    // Copies the metadata of the k-tile that begins at row `first`. Past the end of K the last rows are copied again.
    static DEVICE void
    copy(uint8_t* to, const uint16_t* places, int64_t first, int64_t first_column, int64_t n, int64_t k) {
        constexpr int LINE = TILE_N * 4;  // bytes of metadata for 32 rows
        static_assert(PLACE_BYTES % 512 == 0);
#pragma unroll
        for (int i = threadIdx.x % 32 * 16; i < PLACE_BYTES; i += 512) {
            const int64_t line = min(first / 32 + i / LINE, k / 32 - 1);
            cp_async<16>(to + i, places + line * 2 * n + first_column * 2 + i % LINE / 2);
        }
    }
    // Reads the metadata of MMAs `product` (even) and `product + 1` of a unit.
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
    // Expands pairs[0] and pairs[1], the stored quants of the lane's quad in columns (tile, 0) and (tile, 1): pairs[j]
    // becomes rows 2q and 2q + 1 of column (tile, j % 2), q = j / 2.
    DEVICE void spread(uint32_t (&pairs)[4], const quants_t& decode, const uint32_t* selectors, int product, int tile,
                       int term) const {
        const uint32_t zeros = decode.raw(ZERO_POINT * 0x10001, 0, term);
        const uint32_t of_quad = words[2 * tile + product % 2] >> threadIdx.x % 4 * 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t selector = selectors[of_quad >> 16 * h & 15], quants = pairs[h];
            pairs[h] = __byte_perm(quants, zeros, selector);
            pairs[h + 2] = __byte_perm(quants, zeros, selector >> 16);
        }
    }
};
