// wq_epilogue_sm90.cuh: the epilogue of wq_gemm_sm90: the store of a warp's accumulators of a tile, by TMA or by
// threads.
//
// Constants are the kernel's.
#pragma once
#include "cluster_reduce.cuh"
#include "gemm_epilogue.cuh"
#include "tile_store.cuh"
#include "wq_tile_sm90.cuh"

using epilogue_t = Epilogue<out_t, A_SCALES, B_SCALES, 0, BIAS, SCALE_EXPONENT>;
using tma_store_t = TmaStore<out_t, 16 * PRODUCTS, true>;
using cluster_sums_t = ClusterSums<float, SPLITS, SPLITS, FRAGMENTS>;

// Applies the epilogue and stores 16 rows at a time by TMA; (first_row, first_column) is the first element of the tile.
DEVICE void store_by_tma(tma_store_t& tma_store, const accum_t& accum, const epilogue_t& epilogue, int warp, int lane,
                         int first_row, int first_column, int64_t m, int64_t n) {
    typename epilogue_t::Column columns[PRODUCTS][2];
#pragma unroll
    for (int j = 0; j < PRODUCTS * 2; ++j) {
        const int column = first_column + column_of(warp, j / 2, j % 2, lane);
        columns[j / 2][j % 2] = epilogue.column(min(int64_t(column), n - 1));
    }
#pragma unroll
    for (int part = 0; part < TILE_M / 16; ++part) {
        const auto pairs_of = [&](int j, uint32_t (&pairs)[4]) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                const int at = (part * 2 + l % 2) * 4 + l / 2 * 2;
                float x[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int64_t row = first_row + part * 16 + l % 2 * 8 + lane % 4 * 2 + e;
                    const auto row_params = epilogue.row(min(row, m - 1));
                    x[e] =
                        ACTIVATION<out_t>(epilogue.value(row_params, columns[j][l / 2], accum[j][at + e] * SUM_FACTOR));
                }
                pairs[l] = pack_pair<out_t>(x[0], x[1]);
            }
        };
        tma_store.store(first_row + part * 16, first_column + warp * PRODUCTS * 16, pairs_of);
    }
}

// Applies the epilogue to a fragment of the tile at (first_row, first_column), and stores it. GROUPED: rows are slots
// of the lists.
struct ThreadStore {
    out_t* out;
    const epilogue_t& epilogue;
    const int32_t* sorted_token_ids;
    const float* topk_weights;
    int64_t m, n, num_rows, out_stride;
    int first_row, first_column, lane;

    DEVICE void operator()(int fragment, const Fragment<float>& own) const {
        const int i = fragment / CONSUMER_WARPS, product = i / (TILE_M / 8);
        const int64_t row = first_row + i % (TILE_M / 8) * 8 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int64_t m_at = row + j % 2;
            const int64_t n_at = first_column + column_of(fragment % CONSUMER_WARPS, product, j / 2, lane);
            if (m_at >= m || n_at >= n) continue;
            if constexpr (GROUPED) {
                m_at = sorted_token_ids[m_at];
                if (m_at < 0 || m_at >= num_rows) continue;
            }
            float x = epilogue.value(epilogue.row(m_at), epilogue.column(n_at), own.sums[j] * SUM_FACTOR);
            if constexpr (ROUTED) x = ieee_multiply(topk_weights[m_at], x);
            out[m_at * out_stride + n_at] = from_float<out_t>(ACTIVATION<out_t>(x));
        }
    }
};

// Stores a warp's accumulators; with SPLITS > 1, first adds those of the CTAs of the cluster.
DEVICE void store_by_threads(const ThreadStore& store, const accum_t& accum, const cluster_sums_t& cluster_reduce,
                             int split, int warp) {
#pragma unroll
    for (int i = 0; i < WARP_FRAGMENTS; ++i) {
        const int fragment = i * CONSUMER_WARPS + warp;
        const float* four = accum[i / (TILE_M / 8)] + i % (TILE_M / 8) * 4;
        const Fragment<float> own = {four[0], four[1], four[2], four[3]};
        if constexpr (SPLITS > 1) cluster_reduce.send(split, fragment, own);
        else store(fragment, own);
    }
    if constexpr (SPLITS > 1) cluster_reduce.add_up(split, warp, CONSUMER_WARPS, store);
}
