// operand_rows.cuh: the rows of an operand that a thread copies to shared memory.
//
// The kernel defines before the include: scalar_t and ROWS_APART.
#pragma once
#include "vec.cuh"

// Rows a constant distance from each other.
struct StridedRows {
    const scalar_t* first;
    int64_t between;  // elements from each row to the next
    int count;        // rows that exist

    DEVICE bool exists(int i) const { return i < count; }
    DEVICE const scalar_t* row(int i) const { return first + i * between; }
    DEVICE void advance(int64_t elements) { first += elements; }
};

// The rows that a thread copies: row `row` and each further one `step` rows on, where `left` of the tile's rows exist
// from the first on. Rows past these are not read. If there is one row or none, the stride of a tensor of one row may
// be anything, and copies need aligned addresses: so all rows get the address of the first.
DEVICE StridedRows strided_rows(const scalar_t* base, int64_t row, int64_t stride, int step, int64_t left) {
    const int count = int(min((max(left, int64_t(0)) + ROWS_APART - 1) / ROWS_APART, int64_t(1 << 30)));
    return {base + (count > 0 ? row : 0) * stride, count > 1 ? step * stride : 0, count};
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
