// ggml_tile.cuh: rows of a matrix in one of GGUF's types, a part at a time in shared memory as they are.
#pragma once
#include "async.cuh"
#include "ggml.cuh"

constexpr int UNIT = 256;  // elements of a row that are copied together: one format block, or eight

// UNITS units of each of ROWS rows, which ACCESS bytes at a time come from memory. Rows begin at multiples of ACCESS
// bytes. A part of a row need not: then the pieces that its ends lie in are copied whole.
template <typename FORMAT_T, int ROWS, int UNITS, int ACCESS>
struct RowTile {
    static constexpr int UNIT_BYTES = UNIT / FORMAT_T::LENGTH * FORMAT_T::BYTES;
    static constexpr int PART = UNITS * UNIT_BYTES;  // bytes of a row
    static constexpr int PIECES = ceil_div(PART, ACCESS) + (PART % ACCESS != 0);
    // An odd number of 16 bytes: what eight neighbouring rows have at one place lies on different banks.
    static constexpr int PITCH = (PIECES * ACCESS + 15) / 16 / 2 * 32 + 16;
    static constexpr int SIZE = ROWS * PITCH;

    uint8_t* data;
    int skew;  // bytes of the first piece in front of the part

    // The part of rows `first_row` on that begins at `unit` units. All threads of the block copy; rows that do not
    // exist, and what lies behind the ends of rows, become zeros.
    template <int NUM_THREADS>
    static DEVICE RowTile copy(uint8_t* to, const uint8_t* W, int64_t first_row, int64_t num_rows, int64_t row_bytes,
                               int64_t unit) {
        const int64_t begin = unit * UNIT_BYTES, aligned = begin / ACCESS * ACCESS;
#pragma unroll 4
        for (int i = threadIdx.x; i < ROWS * PIECES; i += NUM_THREADS) {
            const int row = i / PIECES;
            const int64_t at = aligned + i % PIECES * ACCESS;
            const bool exists = first_row + row < num_rows && at < row_bytes;
            const uint8_t* const from = W + (exists ? (first_row + row) * row_bytes + at : 0);
            uint8_t* const place = to + row * PITCH + i % PIECES * ACCESS;
            if constexpr (ACCESS >= 4) {
                cp_async<ACCESS>(place, from, exists);
            } else {
                using word_t = typename word_of<ACCESS>::type;
                *reinterpret_cast<word_t*>(place) = exists ? *reinterpret_cast<const word_t*>(from) : word_t{};
            }
        }
        return RowTile{to, int(begin - aligned)};
    }

    // The format block that holds element `element` of unit `unit` of a row.
    DEVICE const uint8_t* block(int row, int unit, int element) const {
        return data + row * PITCH + skew + unit * UNIT_BYTES + element / FORMAT_T::LENGTH * FORMAT_T::BYTES;
    }
};

constexpr int bytes_of_grid(int entries) { return entries * int(sizeof(uint16_t)); }

// Copies the grid of a type to shared memory, for all threads of the block.
template <typename FORMAT_T, int NUM_THREADS>
DEVICE void copy_grid(uint8_t* shared) {
    if constexpr (FORMAT_T::GRID_SIZE > 0) {
        constexpr int BYTES = bytes_of_grid(FORMAT_T::GRID_SIZE);
        static_assert(BYTES % 16 == 0);
        for (int byte = threadIdx.x * 16; byte < BYTES; byte += NUM_THREADS * 16) {
            cp_async<16>(shared + byte, reinterpret_cast<const uint8_t*>(FORMAT_T::table()) + byte);
        }
    }
}
