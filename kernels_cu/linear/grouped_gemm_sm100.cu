// grouped_gemm_sm100: the grouped GEMM of experts in CUDA Tile C++ (tile.cuh), for tcgen05 on sm_100 and sm_103.
//
// Operands, lists and the epilogue are those of grouped.cuh. A block takes TILE_M slots of the sorted lists and TILE_N
// columns of out. TMA gathers rows of a by their numbers, four to an instruction, and scatters rows of out. A number
// out of range is padding: the gathered row is zeros, and nothing is scattered. GATED: the block has accumulators for
// gates and for ups; where they alternate, each are the rows of a view with twice the row stride.
//
// Constants
//     scalar_t, sum_t, SCALE_BLOCK, SWAP, TILE_M, TILE_N, TILE_K    of gemm_sm100.cu
//     out_t, A_SCALES, B_SCALES, BIAS, ROUTED, GATED, ACTIVATION    of grouped.cuh; no activation is gelu. With block
//                   scales the rows of b of a tile, gates or ups, are inside one block

#include "gemm_sm100.cuh"

constexpr int B_STEP = GATED == 2 ? 2 : 1;     // rows of b from a column of out to the next
constexpr float LIMIT = 7.0f, ALPHA = 1.702f;  // of swigluoai and swiglustep

TILE_FUNCTION auto of_tile(float x) { return full_tile<float, TILE_M, TILE_N>(x); }
template <typename X> TILE_FUNCTION auto clamped(X x) { return max_of(min_of(x, of_tile(LIMIT)), of_tile(-LIMIT)); }
// Of a gate and its up, or of an element alone.
template <typename X> TILE_FUNCTION auto expert_none(X x, X) { return x; }
template <typename X> TILE_FUNCTION auto expert_silu(X gate, X up) { return silu_of(gate) * up; }
template <typename X> TILE_FUNCTION auto expert_silu_no_mul(X x, X) { return silu_of(x); }
template <typename X> TILE_FUNCTION auto expert_relu2_no_mul(X x, X) {
    const auto positive = max_of(x, of_tile(0.0f));
    return positive * positive;
}
template <typename X> TILE_FUNCTION auto expert_swiglustep(X gate, X up) {
    return min_of(silu_of(gate), of_tile(LIMIT)) * clamped(up);
}
template <typename X> TILE_FUNCTION auto expert_swigluoai(X gate, X up) {
    const auto g = min_of(gate, of_tile(LIMIT));
    return (clamped(up) + of_tile(1.0f)) * logistic_of(g, of_tile(ALPHA) * g);
}

extern "C" __tile_global__ void
grouped_gemm_sm100(out_t* out,                          // [num_rows, N]
                   const scalar_t* a,                   // [num_rows / top_k, K]
                   const scalar_t* b,                   // [E, B_ROWS, K]
                   const int32_t* sorted_token_ids,     // [max_tiles * TILE_M] at least
                   const int32_t* expert_ids,           // [max_tiles / block_tiles] at least
                   const int32_t* num_tokens_post_pad,  // one element
                   const float* topk_weights,           // [num_rows]
                   const float* a_scales,               // [num_rows / top_k] or [1]; SCALE_BLOCK: [.., K / SCALE_BLOCK]
                   const float* b_scales,               // [E, B_ROWS] or [E]; SCALE_BLOCK: [E, B_ROWS / .., K / ..]
                   const out_t* bias,                   // [E, B_ROWS]
                   int64_t num_rows, int64_t n, int64_t k, int64_t num_experts, int64_t top_k, int64_t block_tiles,
                   int64_t max_tiles, int64_t a_stride, int64_t b_stride, int64_t out_stride, int64_t a_scale_step,
                   int64_t a_scale_block_step, int64_t b_scale_expert_step, int64_t b_scale_step,
                   int64_t b_scale_block_step, int64_t group_rows) {
    const uint32_t rows = uint32_t(num_rows), columns = assume_multiple<OUT_ALIGNED>(uint32_t(n));
    const uint32_t depth = assume_multiple<ALIGNED>(uint32_t(k)), row_tiles = uint32_t(max_tiles);
    const TileIndex tile = tile_of(block_index().x, row_tiles, (columns + TILE_N - 1) / TILE_N, uint32_t(group_rows));
    const uint32_t column = tile.column;
    if ((int64_t(tile.row) + 1) * TILE_M > *num_tokens_post_pad) return;
    const int64_t expert = expert_ids[tile.row / uint32_t(block_tiles)];
    if (expert < 0 || expert >= num_experts) return;

    // As unsigned numbers, negative ones are out of range, too.
    const auto* const numbers = reinterpret_cast<const uint32_t*>(sorted_token_ids);
    const auto slots = View<const uint32_t, TILE_M, 1>{numbers, row_tiles * TILE_M, 1, 1}.load(tile.row, 0);
    const auto a_slots = slots / full_tile<uint32_t, TILE_M, 1>(uint32_t(top_k));
    const uint32_t a_rows = rows / uint32_t(top_k);

    const int64_t a_pitch = assume_multiple<ALIGNED>(a_stride), b_pitch = assume_multiple<ALIGNED>(b_stride);
    const int64_t b_rows = GATED ? 2 * n : n, up_row = GATED == 2 ? 1 : n;
    const scalar_t* const weight = b + expert * b_rows * b_pitch;
    const View<const scalar_t, TILE_M, TILE_K> a_view{assume_aligned(a), a_rows, depth, a_pitch};
    const View<const scalar_t, TILE_N, TILE_K> b_view{assume_aligned(weight), columns, depth, B_STEP * b_pitch};
    const View<const scalar_t, TILE_N, TILE_K> up_view{assume_aligned(weight + up_row * b_pitch), columns, depth,
                                                       B_STEP * b_pitch};
    const float* const expert_scales = b_scales + expert * b_scale_expert_step;

    // `accum` and the products of a k-tile; `half`: 1 for ups.
    const auto step = [&](auto accum, auto a_tile, auto b_tile, uint32_t k_tile, int half) {
        if constexpr (SCALE_BLOCK > 0) {
            const View<const float, TILE_M, 1, 0> scales{a_scales + k_tile * a_scale_block_step, a_rows, 1,
                                                         a_scale_step, 1};
            const int64_t block = (half * up_row + int64_t(column) * TILE_N * B_STEP) / SCALE_BLOCK;
            const float b_scale = expert_scales[block * b_scale_step + k_tile * b_scale_block_step];
            return multiply_blocks(a_tile, b_tile, accum, scales.gather(a_slots, 0), b_scale);
        } else {
            return multiply(a_tile, b_tile, accum);
        }
    };
    auto accum = new_accumulators(), second = accum;  // the second: of ups
    for (uint32_t i = 0; i * TILE_K < depth; ++i) {
        const auto a_tile = a_view.gather(a_slots, i);
        accum = step(accum, a_tile, b_view.load(column, i), i, 0);
        if constexpr (GATED != 0) second = step(second, a_tile, up_view.load(column, i), i, 1);
    }

    // x[t, n] of grouped.cuh
    const auto value = [&](auto accum, int half) {
        auto x = cast<float>(unswapped(accum));
        if constexpr (B_SCALES) {
            const float* const scales = expert_scales + half * up_row * b_scale_step;
            x = spread<TILE_M, TILE_N>(for_columns(scales, B_STEP * b_scale_step, columns, column)) * x;
        }
        if constexpr (A_SCALES) {
            const View<const float, TILE_M, 1> scales{a_scales, a_rows, 1, a_scale_step};
            x = x * spread<TILE_M, TILE_N>(scales.gather(a_slots, 0));
        }
        if constexpr (BIAS > 0) {
            const out_t* const terms = bias + expert * b_rows + half * up_row;
            x = x + spread<TILE_M, TILE_N>(cast<float>(for_columns(terms, B_STEP, columns, column)));
        }
        if constexpr (ROUTED) {
            const View<const float, TILE_M, 1> weights{topk_weights, rows, 1, 1};
            x = x * spread<TILE_M, TILE_N>(weights.gather(slots, 0));
        }
        return x;
    };
    const auto first = value(accum, 0);
    const View<out_t, TILE_M, TILE_N> out_view{assume_aligned(out), rows, columns,
                                               assume_multiple<OUT_ALIGNED>(out_stride)};
    if constexpr (GATED != 0) out_view.scatter(slots, column, cast<out_t>(ACTIVATION(first, value(second, 1))));
    else out_view.scatter(slots, column, cast<out_t>(ACTIVATION(first, first)));
}
