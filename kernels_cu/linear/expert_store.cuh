// expert_store.cuh: the epilogue of grouped_gemm_sm90: stores a tile to rows that are scattered over out, 16 bytes at a
// time, from swizzled shared memory.
//
// The kernel defines before the include: out_t, ACTIVATION, GATED, ALIGNED_OUT; epilogue_t of grouped.cuh; PART_N rows
// of b that a warpgroup multiplies, OUT_N columns of out that these give.
#pragma once
#include "grouped.cuh"
#include "tma.cuh"

// Applies the operands of the expert to the accumulators of a warp, 16 rows, and stores them.
struct ExpertStore {
    static constexpr int COLUMNS = 128 / sizeof(out_t), BYTES = 16 * 128;  // columns of a store, bytes of its buffer

    out_t* out;
    int64_t out_stride, n;
    uint8_t* own_store;  // the warp's store buffer
    int lane;

    // own_rows: the two rows of out of the thread's accumulators, -1 for padding. row_terms: the operands of these rows.
    // first_column: of the warpgroup.
    template <typename Sum>
    DEVICE void
    store(const Sum (&accum)[PART_N / 2], const int (&own_rows)[2], const typename epilogue_t::Row (&row_terms)[2],
          const epilogue_t& epilogue, int first_column) const {
        if (!any_lane(own_rows[0] >= 0 || own_rows[1] >= 0)) return;
#pragma unroll
        for (int first = 0; first < OUT_N; first += COLUMNS) {
            sync_warp();
#pragma unroll
            for (int i = 0; i < COLUMNS / (4 * PAIR); ++i) {
                if (first + i * 4 * PAIR >= OUT_N) continue;
                stage(accum, row_terms, epilogue, first_column, first, first / (4 * PAIR) + i);
            }
            sync_warp();
            copy(own_rows, first_column + first, min(COLUMNS, OUT_N - first));
        }
    }

private:
    static constexpr int PAIR = GATED == 2 ? 1 : 2;  // adjacent columns of out of a thread per 8 columns of b

    // Writes the thread's elements of one 8-column block of the accumulators (GATED 1: of the gates) to the store
    // buffer, which begins with column `first`.
    template <typename Sum>
    DEVICE void stage(const Sum (&accum)[PART_N / 2], const typename epilogue_t::Row (&row_terms)[2],
                      const epilogue_t& epilogue, int first_column, int first, int at) const {
        const int column = at * 4 * PAIR + lane % 4 * PAIR;
        float x[2][PAIR];
#pragma unroll
        for (int l = 0; l < PAIR; ++l) {
            const int64_t n_at = min(int64_t(first_column + column + l), n - 1);
            const auto gate = epilogue.column(GATED == 2 ? 2 * n_at : n_at);
            const auto up = epilogue.column(GATED == 2 ? 2 * n_at + 1 : GATED == 1 ? n + n_at : n_at);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int own = at * 4 + j * 2 + l;
                const int other = GATED == 2 ? own + 1 : GATED == 1 ? own + OUT_N / 2 : own;
                x[j][l] = ACTIVATION<out_t>(epilogue.value(row_terms[j], gate, accum[own]),
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
    DEVICE void copy(const int (&own_rows)[2], int first, int width) const {
        constexpr int OUT_CHUNK = 16 / sizeof(out_t);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = shfl<WARP_SIZE>(own_rows[i / 2], (i % 2 * 4 + lane / 8) * 4);
            const int column = lane % 8 * OUT_CHUNK;
            const int64_t n_at = first + column;
            if (row < 0 || column >= width || n_at >= n) continue;
            const auto* from =
                reinterpret_cast<const out_t*>(own_store + swizzle_128b(i * 4 + lane / 8, lane % 8 * 16));
            out_t* to = out + row * out_stride + n_at;
            if (ALIGNED_OUT && n_at + OUT_CHUNK <= n) {
                Vec<out_t, OUT_CHUNK>::load(from).store(to);
            } else {
                for (int j = 0; j < OUT_CHUNK && n_at + j < n; ++j) to[j] = from[j];
            }
        }
    }
};
