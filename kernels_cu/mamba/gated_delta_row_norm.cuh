// gated_delta_row_norm.cuh: the norms of the rows of a tile of keys or queries in shared memory.
#pragma once
#include "gated_delta_norm.cuh"
#include "vec.cuh"

struct RowNorm {
    float inverse;  // 1 / sqrt(sum of squares + 1e-6); 1 without QK_NORM
    bool is_large;  // the row has been scaled by DOWN
};

// The sum of squares of a row of a tile of keys or queries in shared memory. In a warp of 64 lanes, lanes i and i + 32
// share the row. With SCALES, the row is first multiplied by DOWN in the tile, and lanes without takes_part skip it.
template <bool SCALES, typename Tile> DEVICE float squares(const Tile& tile, int row, bool takes_part) {
    float four[4] = {};  // independent, because one warp adds them and nothing hides its latency
#pragma unroll 4
    for (int chunk = threadIdx.x % WARP_SIZE / 32; chunk < KEY_SIZE / 8; chunk += WARP_SIZE / 32) {
        if (SCALES && !takes_part) break;
        auto x = Vec<scalar_t, 8>::load(tile.at(row, chunk));
        if (SCALES) {
            x = map(x, [](float value) { return value * DOWN; });
            x.store_shared(tile.at(row, chunk));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) four[i % 4] = fmaf(x[i], x[i], four[i % 4]);
    }
    float sum = (four[0] + four[1]) + (four[2] + four[3]);
    if constexpr (WARP_SIZE == 64) sum += shfl_xor(sum, 32);
    return sum;
}

// The norm of a row of a tile, for each lane. Large rows are scaled down in the tile, because their dot products with
// other rows would overflow float32; a lane without takes_part has the row of another lane, which scales it.
template <typename Tile> DEVICE RowNorm norm_of(const Tile& tile, int row, bool takes_part) {
    if (!QK_NORM) return {1.0f, false};
    float sum = squares<false>(tile, row, true);
    const bool is_large = CAN_BE_LARGE && sum > LARGE;
    if (CAN_BE_LARGE && any_lane(is_large)) {
        sync_warp();  // all lanes have read the tile before some lanes overwrite it
        const float scaled = squares<true>(tile, row, is_large && takes_part);
        if (is_large) sum = scaled;
    }
    return {inverse_root(sum, is_large), is_large};
}
