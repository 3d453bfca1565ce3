// zero_point_row_sums.cuh: sums of the rows of a over K, which wq_gemm_sm80.cu multiplies by zero points.
//
// The sums are MMAs with a matrix of ones. Four adjacent words of a lane, from two MMAs of 16 rows of K or from two
// blocks of eight rows of a, serve as the A operand: rows g and g + 8 of the result sum two words each, and the
// positions of the ones in B select which. This takes half the MMAs that ones as the A operand would.
#pragma once
#include "wq_fragment.cuh"

struct RowSums {
    static constexpr bool BY_TILES = Rows::BY_PRODUCT && ROW_TILES % 2 == 0;
    // Two MMAs of a unit make one sum, unless a group may end between them.
    static constexpr bool BY_PRODUCTS = !Rows::BY_PRODUCT && PRODUCTS % 2 == 0 && STEP_K / GROUPS % 32 == 0;
    static constexpr int COUNT = BY_TILES ? ROW_TILES / 2 : ROW_TILES;
    float sums[COUNT][4] = {};
    // BY_TILES, columns 0 to 3 are sums of the first and the second word, columns 4 to 7 of the others.
    uint32_t ones[2];

    DEVICE RowSums() {
        const uint32_t one = pair_t::full(1.0f).template word<2>(0);
        const bool is_low = threadIdx.x % 32 < 16;
        ones[0] = !BY_TILES || is_low ? one : 0;
        ones[1] = !BY_TILES || !is_low ? one : 0;
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < COUNT * 4; ++i) sums[i / 4][i % 4] = 0.0f;
    }
    // Adds the rows of MMA `product` of a unit; with BY_PRODUCTS, an even `product` adds the next one, too.
    DEVICE void add(const uint32_t (&a)[PRODUCTS][ROW_TILES][2], int product) {
        if (BY_PRODUCTS && product % 2 != 0) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if constexpr (BY_TILES || BY_PRODUCTS) {
                const auto& first = a[product][BY_TILES ? 2 * i : i];
                const auto& second = a[product + BY_PRODUCTS][BY_TILES ? 2 * i + 1 : i];
                const uint32_t words[4] = {first[0], first[1], second[0], second[1]};
                mma_m16n8k16<scalar_t>(sums[i], words, ones);
            } else {
                const uint32_t tile[4] = {ones[0], ones[0], ones[0], ones[0]};
                mma_m16n8k16<scalar_t>(sums[i], tile, a[product][i]);
            }
        }
    }
    // The sum of row 2t + i of the block `tile` of eight rows, for lane 4g + t. All lanes of the warp call.
    DEVICE float of(int tile, int i) const {
        if constexpr (!BY_TILES && !BY_PRODUCTS) return sums[tile][i];
        const auto& own = sums[BY_TILES ? tile / 2 : tile];
        return shfl<32>(own[0] + own[2], (threadIdx.x % 4 * 2 + i) * 4 + (BY_TILES ? tile % 2 * 2 : 0));
    }
};
