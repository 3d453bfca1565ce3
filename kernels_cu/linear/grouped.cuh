// grouped.cuh: products of rows with the weights of their experts: rows in blocks of one expert, and their epilogue.
//
//     x[t, n] = weight[t] * (a_scales[t / top_k] * (b_scales[e, n] * float(sum[t, n])) + bias[e, n])
//     out[t, n] = out_t(f(x[t, n]))                      of these, what the op is given; e is the expert of row t
//     GATED 1, with N gates and then N ups in b[e]:      out_t(f(x[t, n], x[t, N + n]))
//     GATED 2, with gates and ups by turns:              out_t(f(x[t, 2 n], x[t, 2 n + 1]))
//
// Row t of out is a choice of a token; its row of a is t / top_k. moe_align_block_size and its like sort rows: place p of
// sorted_token_ids holds a row, or a number of no row; expert_ids holds the expert of each block of places. Rows of a
// block whose expert does not exist are left as they are. COLUMN_ORDER: bias[e, n] lies at column_permutation.cuh's place of n.
#pragma once
#include "column_permutation.cuh"
#include "math.cuh"
#include "vec.cuh"

// Activations of float32, for a result that is rounded to T: of an element, or of a gate and its up.
template <typename T> DEVICE float silu_of(float x) { return logistic<T>(x, x); }
DEVICE float gelu_of(float x) { return 0.5f * x * (1.0f + erff(x * 0.707106781186547524f)); }
constexpr float SWIGLU_LIMIT = 7.0f, SWIGLU_ALPHA = 1.702f;
template <typename T> DEVICE float expert_none(float x, float) { return x; }
template <typename T> DEVICE float expert_silu_no_mul(float x, float) { return silu_of<T>(x); }
template <typename T> DEVICE float expert_gelu_no_mul(float x, float) { return gelu_of(x); }
template <typename T> DEVICE float expert_relu2_no_mul(float x, float) { return x < 0.0f ? 0.0f : x * x; }
template <typename T> DEVICE float expert_silu(float gate, float up) { return silu_of<T>(gate) * up; }
template <typename T> DEVICE float expert_gelu(float gate, float up) { return gelu_of(gate) * up; }
template <typename T>
DEVICE float expert_swigluoai(float gate, float up) {
    const float g = at_most(gate, SWIGLU_LIMIT);
    return (clamped(up, SWIGLU_LIMIT) + 1.0f) * logistic<T>(g, SWIGLU_ALPHA * g);
}
template <typename T>
DEVICE float expert_swiglustep(float gate, float up) {
    return at_most(silu_of<T>(gate), SWIGLU_LIMIT) * clamped(up, SWIGLU_LIMIT);
}

// What the epilogue knows of the weights of one expert.
template <typename out_t, bool A_SCALES, bool B_SCALES, bool BIAS, bool ROUTED>
struct ExpertEpilogue {
    const float* topk_weights;  // [num_rows]
    const float* a_scales;      // [num_rows / top_k] or [1]
    const float* b_scales;      // [N] or [1], of the expert
    const out_t* bias;          // [N], of the expert
    int top_k;
    int64_t a_scale_step, b_scale_step;

    struct Row { float scale, weight; };
    struct Column { float scale, bias; };

    // The terms of a row, and of a column, that exist.
    DEVICE Row row(int t) const {
        return {A_SCALES ? a_scales[t / top_k * a_scale_step] : 1.0f, ROUTED ? topk_weights[t] : 1.0f};
    }
    DEVICE Column column(int64_t n) const {
        return {B_SCALES ? b_scales[n * b_scale_step] : 1.0f, BIAS ? to_float(bias[COLUMN_ORDER(n)]) : 0.0f};
    }
    // x[t, n]. Sum is float or int32_t.
    template <typename Sum>
    DEVICE float value(const Row& row, const Column& column, Sum sum) const {
        float x = float(sum);
        if constexpr (B_SCALES) x = ieee_multiply(column.scale, x);
        if constexpr (A_SCALES) x = BIAS ? fmaf(row.scale, x, column.bias) : ieee_multiply(row.scale, x);
        else if constexpr (BIAS) x += column.bias;
        if constexpr (ROUTED) x = ieee_multiply(row.weight, x);
        return x;
    }
};

// Tiles of TILE_M places. No number that the lists hold leads outside of a tensor.
template <int TILE_M>
struct ExpertTiles {
    const int32_t* sorted_token_ids;  // [tiles * TILE_M] at least
    const int32_t* expert_ids;        // [tiles / block_tiles] at least
    int num_rows, num_experts, block_tiles;
    int tiles;  // that have rows

    // `max_tiles`: for which the lists have room. `block_tiles`: tiles of a block of places.
    DEVICE ExpertTiles(const int32_t* sorted, const int32_t* experts, const int32_t* num_tokens_post_pad, int64_t rows,
                       int64_t experts_count, int64_t tiles_of_block, int64_t max_tiles)
        : sorted_token_ids(sorted),
          expert_ids(experts),
          num_rows(int(rows)),
          num_experts(int(experts_count)),
          block_tiles(int(tiles_of_block)) {
        tiles = int(min(max(int64_t(*num_tokens_post_pad), int64_t(0)) / TILE_M, max_tiles));
    }
    // The row at a place, or -1.
    DEVICE int row(int place) const {
        const int row = sorted_token_ids[place];
        return row >= 0 && row < num_rows ? row : -1;
    }
    // Brings the rows of a tile, -1 for none, to shared memory. Returns whether any exists. Every thread of the block calls.
    template <int NUM_THREADS>
    DEVICE bool load(int tile, int (&rows_of_tile)[TILE_M]) const {
        for (int i = threadIdx.x; i < TILE_M; i += NUM_THREADS) rows_of_tile[i] = row(tile * TILE_M + i);
        __syncthreads();
        bool any = false;
        for (int i = threadIdx.x % WARP_SIZE; i < TILE_M; i += WARP_SIZE) any |= rows_of_tile[i] >= 0;
        return any_lane(any);
    }
    // What expert_ids says of a tile, whether there is such an expert or not.
    DEVICE int number(int tile) const { return expert_ids[tile / block_tiles]; }

    // Tile number `index` of tiles x columns, of which a block takes every stride-th. Tiles of one expert that follow
    // each other are counted along the columns, at most GROUP of them below each other at a time, which so share columns
    // of the weight in the L2 cache. Where they begin changes with each round of blocks: the last tile of an expert,
    // which may have few rows, falls to a different block each time. Returns the expert, or -1 if there is none.
    template <int GROUP>
    DEVICE int locate(int index, int columns, int stride, int& tile, int& column) const {
        const int expert = number(index / columns);
        int first = index / columns, end = first + 1;
        while (first > 0 && number(first - 1) == expert) --first;
        while (end < tiles && number(end) == expert) ++end;
        const int of_expert = index - first * columns, group = of_expert / (GROUP * columns) * GROUP;
        const int size = min(GROUP, end - first - group), within = of_expert - group * columns;
        column = within / size;
        tile = first + group + (within + column * size / stride) % size;
        return expert >= 0 && expert < num_experts ? expert : -1;
    }
};
