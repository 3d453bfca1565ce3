// expert_store.cuh: the epilogue of grouped_gemm_sm90: stores a tile to rows that are scattered over out, 16 bytes at a
// time, from swizzled shared memory.
//
// The kernel defines before the include: out_t, ACTIVATION, GATED, ALIGNED_OUT; epilogue_t of grouped.cuh; PART_N rows
// of b that a warpgroup multiplies, OUT_N columns of out that these give.
#pragma once
#include "column_params.cuh"
#include "grouped.cuh"
#include "tma.cuh"

using column_params_t = ColumnParams<epilogue_t::Column, PART_N>;

// Applies the operands of the expert to the accumulators of a warp, 16 rows, and stores them.
struct ExpertStore {
    static constexpr int COLUMNS = 128 / sizeof(out_t), BYTES = 16 * 128;  // columns of a store, bytes of its buffer

    out_t* out;
    int64_t out_stride;
    int n;
    uint8_t* own_store;  // the warp's store buffer
    const epilogue_t& epilogue;
    int lane;

    // own_row: the row of out that is row lane % 16 of the warp, or -1 for padding; own_terms: its operands.
    // first_column: of the warpgroup.
    template <typename Sum>
    DEVICE void store(const Sum (&accum)[PART_N / 2], int own_row, const typename epilogue_t::Row& own_terms,
                      const column_params_t& columns, int first_column) const {
        if (!any_lane(own_row >= 0)) return;
        // Of the two rows of the thread's accumulators.
        const typename epilogue_t::Row row_terms[2] = {epilogue_t::of_lane(own_terms, lane / 4),
                                                       epilogue_t::of_lane(own_terms, lane / 4 + 8)};
#pragma unroll
        for (int first = 0; first < OUT_N; first += COLUMNS) {
            sync_warp();
#pragma unroll
            for (int i = 0; i < COLUMNS / (4 * PAIR); ++i) {
                if (first + i * 4 * PAIR >= OUT_N) continue;
                stage(accum, row_terms, columns, first, first / (4 * PAIR) + i);
            }
            sync_warp();
            copy(own_row, first_column + first, min(COLUMNS, OUT_N - first));
        }
    }

private:
    static constexpr int PAIR = GATED == 2 ? 1 : 2;  // adjacent columns of out of a thread per 8 columns of b

    // Writes the thread's elements of one 8-column block of the accumulators (GATED 1: of the gates) to the store
    // buffer, which begins with column `first`.
    template <typename Sum>
    DEVICE void stage(const Sum (&accum)[PART_N / 2], const typename epilogue_t::Row (&row_terms)[2],
                      const column_params_t& columns, int first, int at) const {
        const int column = at * 4 * PAIR + lane % 4 * PAIR;
        typename epilogue_t::Column own[2], ups[2];
        columns.get(GATED == 2 ? 2 * column : column, own);
        if constexpr (GATED == 1) columns.get(OUT_N + column, ups);
        float x[2][PAIR];
#pragma unroll
        for (int l = 0; l < PAIR; ++l) {
            const auto& gate = own[l];
            const auto& up = GATED == 2 ? own[1] : GATED == 1 ? ups[l] : own[l];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int sum = at * 4 + j * 2 + l;
                const int other = GATED == 2 ? sum + 1 : GATED == 1 ? sum + OUT_N / 2 : sum;
                x[j][l] = ACTIVATION<out_t>(epilogue.value(row_terms[j], gate, accum[sum]),
                                            epilogue.value(row_terms[j], up, accum[other]));
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            uint8_t* to = own_store + swizzle_128b(lane / 4 + j * 8, (column - first) * int(sizeof(out_t)));
            *reinterpret_cast<Vec<out_t, PAIR>*>(to) = Vec<out_t, PAIR>::from_floats(x[j]);
        }
    }
    // Copies `width` columns of the store buffer to column `first` of out.
    DEVICE void copy(int own_row, int first, int width) const {
        constexpr int OUT_CHUNK = 16 / sizeof(out_t);
        const int column = lane % 8 * OUT_CHUNK, count = min(width, n - first) - column;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = shfl<WARP_SIZE>(own_row, i * 4 + lane / 8);
            if (row < 0 || count <= 0) continue;
            const auto* from =
                reinterpret_cast<const out_t*>(own_store + swizzle_128b(i * 4 + lane / 8, lane % 8 * 16));
            out_t* to = out + row * out_stride + first + column;
            if (ALIGNED_OUT && count >= OUT_CHUNK) {
                Vec<out_t, OUT_CHUNK>::load(from).store(to);
            } else {
#pragma unroll 1
                for (int j = 0; j < min(count, OUT_CHUNK); ++j) to[j] = from[j];
            }
        }
    }
};
