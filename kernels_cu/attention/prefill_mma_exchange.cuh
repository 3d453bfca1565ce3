// prefill_mma_exchange.cuh: what warps that share rows exchange through shared memory in prefill_mma: row max, row sum
// and P. Reads the constants of the kernel that includes it. With COLUMN_WARPS == 1 nothing is exchanged.
#pragma once
#include "prefill_mma_loader.cuh"
#include "reduce.cuh"

using weights_tile = SwizzledTile<scalar_t, TOKENS / 8>;  // P: a row for each query row
static_assert(COLUMN_WARPS == 1 || (!ON_MATRIX_CORES && !PACKED && !P_HI_LO && NUM_WARPS % COLUMN_WARPS == 0));

struct Exchange {
    unsigned char* shared;  // P of the CTA's rows, then for each row a float of each of its warps
    int row, part;          // the lane's first row, and the number of its warp among those that share it

    DEVICE weights_tile weights() const { return {reinterpret_cast<scalar_t*>(shared)}; }
    DEVICE float* of_warps(int i) const {
        return reinterpret_cast<float*>(shared + weights_tile::bytes(TILE_ROWS)) + (row + i * ROW_STEP) * COLUMN_WARPS;
    }

    // Reduces the numbers of the lane's rows over the warps that share them. t: lane_column of the lane. Between two
    // calls there must be a barrier.
    template <typename Op>
    DEVICE void reduce(float (&of_rows)[ROW_TILES][LANE_ROWS], int t) const {
        if constexpr (COLUMN_WARPS == 1) return;
#pragma unroll
        for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
            if (t == 0) of_warps(i)[part] = of_rows[i / LANE_ROWS][i % LANE_ROWS];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
            const auto all = Vec<float, COLUMN_WARPS>::load(of_warps(i));
            float total = all[0];
#pragma unroll
            for (int w = 1; w < COLUMN_WARPS; ++w) total = Op::apply(total, all[w]);
            of_rows[i / LANE_ROWS][i % LANE_ROWS] = total;
        }
    }

    // Stores the warp's columns of P. A barrier must follow before load.
    DEVICE void store(const uint32_t (&p)[ROW_TILES][WARP_TOKENS / 16][SHORT_WORDS], int t) const {
        if constexpr (COLUMN_WARPS == 1) return;
#pragma unroll
        for (int i = 0; i < ROW_TILES * WARP_TOKENS / 16 * SHORT_WORDS; ++i) {
            const int r = i / (WARP_TOKENS / 16 * SHORT_WORDS), k = i / SHORT_WORDS % (WARP_TOKENS / 16);
            const int word = i % SHORT_WORDS, chunk = part * (WARP_TOKENS / 8) + 2 * k + word / LANE_ROWS;
            scalar_t* const to = weights().at(row + r * 16 + word % LANE_ROWS * ROW_STEP, chunk) + t;
            *reinterpret_cast<uint32_t*>(to) = p[r][k][word];
        }
    }

    // The operand of 16 rows from `origin` on and keys 16 * k to 16 * k + 15 of the tile. own: that of the warp.
    template <int K>
    DEVICE void
    load(uint32_t (&a)[SHORT_WORDS], const uint32_t (&own)[K][SHORT_WORDS], int origin, int k, int lane) const {
        if constexpr (COLUMN_WARPS > 1) return load_rows(a, weights(), origin, k, lane);
#pragma unroll
        for (int i = 0; i < SHORT_WORDS; ++i) a[i] = own[k % K][i];
    }
};
