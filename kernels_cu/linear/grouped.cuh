// grouped.cuh: grouped GEMM for MoE: the scheduler of single-expert tiles, and the epilogue.
//
//     x[t, n] = weight[t] * (a_scales[t / top_k] * (b_scales[e, n] * float(sum[t, n])) + bias[e, n])
//     out[t, n] = out_t(f(x[t, n]))                      operands that are not given drop out; e: row t's expert
//     GATED 1, with N gates and then N ups in b[e]:      out_t(f(x[t, n], x[t, N + n]))
//     GATED 2, with interleaved gates and ups:             out_t(f(x[t, 2 n], x[t, 2 n + 1]))
//
// Row t of out is one (token, choice) pair; its row of a is t / top_k. moe_align_block_size and similar ops sort the
// rows: slot p of sorted_token_ids holds a row, or an out-of-range value as padding; expert_ids holds the expert of
// each block of slots. Rows of a block with an invalid expert are not written. COLUMN_ORDER: bias[e, n] is stored at
// index COLUMN_ORDER(n) (column_permutation.cuh).
#pragma once
#include "gemm_epilogue.cuh"
#include "vec.cuh"

// The epilogue of gemm_epilogue.cuh with the operands of one expert, and with the routing weight of the row.
template <typename out_t, bool A_SCALES, bool B_SCALES, int BIAS, bool ROUTED>
struct ExpertEpilogue : Epilogue<out_t, A_SCALES, B_SCALES, 0, BIAS, SCALE_EXPONENT> {
    using base_t = Epilogue<out_t, A_SCALES, B_SCALES, 0, BIAS, SCALE_EXPONENT>;
    static_assert(AZP == 0 && BIAS <= 1);

    const float* topk_weights;  // [num_rows]
    int top_k;

    struct Row : base_t::Row { float weight; };

    // a_scales: [num_rows / top_k] or [1]; b_scales: [N] or [1], and bias: [N], the expert's.
    DEVICE ExpertEpilogue(const float* topk_weights, const a_scale_t* a_scales, const b_scale_t* b_scales,
                          const out_t* bias, int top_k, int64_t a_scale_step, int64_t b_scale_step)
        : base_t{a_scales, b_scales, nullptr, nullptr, bias, a_scale_step, b_scale_step, 0},
          topk_weights(topk_weights),
          top_k(top_k) {}
    // The operands of row t of out, which must be in range.
    template <typename Index>
    DEVICE Row row(Index t) const {
        return {base_t::row(t / top_k), ROUTED ? topk_weights[t] : 1.0f};
    }
    // The operands of the row of another lane.
    static DEVICE Row of_lane(Row row, int lane) {
        if constexpr (A_SCALES) row.scale = shfl<WARP_SIZE>(row.scale, lane);
        if constexpr (ROUTED) row.weight = shfl<WARP_SIZE>(row.weight, lane);
        return row;
    }
    template <typename Sum>
    DEVICE float value(const Row& row, const typename base_t::Column& column, Sum sum) const {
        const float x = base_t::value(row, column, sum);
        return ROUTED ? ieee_multiply(row.weight, x) : x;
    }
    static DEVICE float activated(float gate, float up) { return ACTIVATION<out_t>(gate, up); }
};

// The tile scheduler over TILE_M slots per tile. The lists are not trusted: no value in them causes an out-of-range
// access.
template <int TILE_M>
struct ExpertTiles {
    const int32_t* sorted_token_ids;  // [tiles * TILE_M] at least
    const int32_t* expert_ids;        // [tiles / block_tiles] at least
    int num_rows, num_experts, block_tiles;
    int tiles;  // tiles with slots in use

    // `max_tiles`: capacity of the lists, in tiles. `block_tiles`: tiles per block of slots.
    DEVICE ExpertTiles(const int32_t* sorted, const int32_t* experts, const int32_t* num_tokens_post_pad, int64_t rows,
                       int64_t experts_count, int64_t tiles_of_block, int64_t max_tiles)
        : sorted_token_ids(sorted),
          expert_ids(experts),
          num_rows(int(rows)),
          num_experts(int(experts_count)),
          block_tiles(int(tiles_of_block)) {
        tiles = int(min(max(int64_t(*num_tokens_post_pad), int64_t(0)) / TILE_M, max_tiles));
    }
    // The row in a slot, or -1 if the slot is padding.
    DEVICE int row(int place) const {
        const int row = sorted_token_ids[place];
        return row >= 0 && row < num_rows ? row : -1;
    }
    // Whether any of COUNT slots from `slot` on, a multiple of the lanes, holds a row. All lanes of a warp call.
    template <int COUNT>
    DEVICE bool any(int slot) const {
        bool found = false;
#pragma unroll
        for (int i = 0; i < COUNT; i += WARP_SIZE) found |= row(slot + i + int(threadIdx.x) % WARP_SIZE) >= 0;
        return any_lane(found);
    }
    // Writes the rows of a tile (-1 for padding) to shared memory and returns whether there is any. All threads call.
    template <int NUM_THREADS>
    DEVICE bool load(int tile, int (&rows_of_tile)[TILE_M]) const {
        for (int i = threadIdx.x; i < TILE_M; i += NUM_THREADS) rows_of_tile[i] = row(tile * TILE_M + i);
        __syncthreads();
        bool any = false;
        for (int i = threadIdx.x % WARP_SIZE; i < TILE_M; i += WARP_SIZE) any |= rows_of_tile[i] >= 0;
        return any_lane(any);
    }
    // The entry of expert_ids for a tile, not validated.
    DEVICE int number(int tile) const { return expert_ids[block_tiles == 1 ? tile : tile / block_tiles]; }

    // The row tile and column tile of number `index`; a CTA takes every stride-th number. The order walks at most GROUP
    // consecutive row tiles of one expert down M, then the next column, so that they share columns of the weight in the
    // L2 cache. The starting point is rotated each wave, counted over all experts: an expert's last tile, which may
    // have few rows, goes to a different CTA each time. Returns the expert, or -1 if it is invalid. Persistent CTAs wait
    // for it before each tile, so an expert with one row tile takes one division and no load that waits for another.
    template <int GROUP>
    DEVICE int locate(int index, int columns, int stride, int& tile, int& column) const {
        tile = index / columns;
        const int expert = number(tile), before = number(max(tile - 1, 0)), after = number(min(tile + 1, tiles - 1));
        int first = tile, end = tile + 1;
        if (first > 0 && before == expert) {
            do --first;
            while (first > 0 && number(first - 1) == expert);
        }
        if (end < tiles && after == expert) {
            do ++end;
            while (end < tiles && number(end) == expert);
        }
        column = index - tile * columns;
        if (end - first > 1) {
            const int of_expert = index - first * columns;
            const int group = end - first > GROUP ? of_expert / (GROUP * columns) * GROUP : 0;
            const int size = min(GROUP, end - first - group), within = of_expert - group * columns;
            column = within / size;
            const int wave = (index - within % size) / stride;  // of the column's first tile, so equal for its tiles
            tile = first + group + (within + wave) % size;
        }
        return expert >= 0 && expert < num_experts ? expert : -1;
    }
};
