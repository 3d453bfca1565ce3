// operand_rows.cuh: the rows of an operand that a thread copies to shared memory.
//
// The kernel defines before the include: scalar_t and ROWS_APART.
#pragma once
#include "vec.cuh"

// Rows a constant distance from each other. Rows past the last one that exists repeat it: their results are not stored.
// SKIPS: a thread without any row reads nothing. All threads of all blocks would otherwise read one row at a time.
template <bool SKIPS = false>
struct StridedRows {
    const uint8_t* first;
    int64_t between;  // bytes from each row to the next
    int last;         // row that exists; SKIPS: -1 if none does

    DEVICE bool exists(int) const { return !SKIPS || last >= 0; }
    DEVICE const scalar_t* row(int i) const {
        return reinterpret_cast<const scalar_t*>(first + min(i, last) * between);
    }
    DEVICE void advance(int64_t elements) {
        first += elements * int(sizeof(scalar_t));
        last = made_anew(last);  // the offsets of all rows would take registers
    }
};

// The rows that a thread copies: row `row` and each further one `step` rows on, where `left` of the tile's rows exist
// from the first on. Without any, the thread copies row 0, with SKIPS zeros.
template <bool SKIPS = false>
DEVICE StridedRows<SKIPS> strided_rows(const scalar_t* base, int64_t row, int64_t stride, int step, int64_t left) {
    const int count = int(min((max(left, int64_t(0)) + ROWS_APART - 1) / ROWS_APART, int64_t(1 << 30)));
    const int64_t bytes = stride * int(sizeof(scalar_t));
    return {reinterpret_cast<const uint8_t*>(base) + (count > 0 ? row : 0) * bytes, step * bytes,
            SKIPS ? count - 1 : max(count - 1, 0)};
}

// Rows anywhere.
template <int COUNT>
struct ScatteredRows {
    const scalar_t* rows[COUNT];
    uint32_t exist;  // a bit of each row

    DEVICE bool exists(int i) const { return exist >> i & 1; }
    DEVICE const scalar_t* row(int i) const { return rows[i]; }
    DEVICE void advance(int64_t elements) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) rows[i] += elements;
    }
};

// The rows that a thread copies, from element `first` on: row_of(i) is the row of out of the tile's row i, negative if
// there is none, and top_k rows of out share a row of `base`.
template <int TILE_ROWS, typename RowOf>
DEVICE auto scattered_rows(const scalar_t* base, int64_t stride, int64_t first, int top_k, const RowOf& row_of) {
    ScatteredRows<ceil_div(TILE_ROWS, ROWS_APART)> found{{}, 0};
#pragma unroll
    for (int i = 0; i < ceil_div(TILE_ROWS, ROWS_APART); ++i) {
        const int row = row_of(min(int(threadIdx.x / 8) + i * ROWS_APART, TILE_ROWS - 1));
        found.rows[i] = base + max(row, 0) / top_k * stride + first;
        found.exist |= uint32_t(row >= 0) << i;
    }
    return found;
}
