// ggml_tile.cuh: tiles of a GGUF-quantized matrix in shared memory, in the GGUF block format.
#pragma once
#include "async.cuh"
#include "ggml.cuh"

constexpr int UNIT = 256;  // elements of a row that are copied together: one format block, or eight

// Copies pieces AT, AT + THREADS, ... below `count` of a row. A piece is ACCESS bytes; a row has at most PIECES.
template <int AT, int ACCESS, int PIECES, int THREADS>
DEVICE void copy_pieces(uint8_t* to, const uint8_t* from, int count) {
    if constexpr (AT < PIECES) {
        cp_async_if<ACCESS, AT * ACCESS>(AT < count, to, from);
        copy_pieces<AT + THREADS, ACCESS, PIECES, THREADS>(to, from, count);
    }
}

// Copies pieces 0 to `count` - 1 of a row. A piece is ACCESS bytes; a row has at most PIECES. The caller is thread
// `thread` of the THREADS threads that share the row.
template <int ACCESS, int PIECES, int THREADS>
DEVICE void copy_row(uint8_t* to, const uint8_t* from, int count, int thread) {
    to += thread * ACCESS;
    from += thread * ACCESS;
    count -= thread;
    if constexpr (ACCESS >= 4) {
        copy_pieces<0, ACCESS, PIECES, THREADS>(to, from, count);
    } else {
        using word_t = typename word_of<ACCESS>::type;
        for (int i = 0; i < count; i += THREADS) {
            *reinterpret_cast<word_t*>(to + i * ACCESS) = *reinterpret_cast<const word_t*>(from + i * ACCESS);
        }
    }
}

// copy_row in two parts: `load` begins the copy of pieces 0 to `count` - 1 of a row, and `store`, after a barrier after
// the last use of the shared memory, completes it. With HOLDS_COPIES the pieces stay in registers in between.
template <int ACCESS, int PIECES, int THREADS>
struct HeldRow {
    static constexpr bool HOLDS = HOLDS_COPIES && ACCESS >= 4;
    uint32_t words[HOLDS ? ceil_div(PIECES, THREADS) : 1][HOLDS ? ACCESS / 4 : 1];

    DEVICE void load(uint8_t* to, const uint8_t* from, int count, int thread) {
        if constexpr (HOLDS) {
#pragma unroll
            for (int i = 0; i < ceil_div(PIECES, THREADS); ++i) {
                // Past the end of the row this loads the last piece again, which avoids a branch; it is never read.
                hold<ACCESS>(words[i], from + min(thread + i * THREADS, count - 1) * ACCESS, true);
            }
        } else if constexpr (!HOLDS_COPIES) {
            copy_row<ACCESS, PIECES, THREADS>(to, from, count, thread);
        }
    }
    DEVICE void store(uint8_t* to, const uint8_t* from, int count, int thread) const {
        if constexpr (HOLDS) {
#pragma unroll
            for (int i = 0; i < ceil_div(PIECES, THREADS); ++i) {
                if (PIECES % THREADS != 0 && thread + i * THREADS >= PIECES) continue;
                Vec<uint32_t, ACCESS / 4> piece;
#pragma unroll
                for (int j = 0; j < ACCESS / 4; ++j) piece.data[j] = words[i][j];
                *reinterpret_cast<Vec<uint32_t, ACCESS / 4>*>(to + (thread + i * THREADS) * ACCESS) = piece;
            }
        } else if constexpr (HOLDS_COPIES) {
            copy_row<ACCESS, PIECES, THREADS>(to, from, count, thread);
        }
    }
};

// UNITS units of each of ROWS rows, copied ACCESS bytes at a time. Rows begin at multiples of ACCESS bytes. The tile's
// part of a row may not: then the pieces at its two ends are copied whole.
template <typename FORMAT_T, int ROWS, int UNITS, int ACCESS>
struct RowTile {
    static constexpr int UNIT_BYTES = UNIT / FORMAT_T::LENGTH * FORMAT_T::BYTES;
    static constexpr int PART = UNITS * UNIT_BYTES;  // bytes of a row
    static constexpr int PIECES = ceil_div(PART, ACCESS) + (PART % ACCESS != 0);
    // An odd multiple of 16 bytes: eight adjacent rows have the same offset on different banks.
    static constexpr int PITCH = (PIECES * ACCESS + 15) / 32 * 32 + 16;
    static constexpr int SIZE = ROWS * PITCH;

    uint8_t* data;
    int skew;  // bytes of the first piece before the part

    // The tile at `data` whose parts begin at unit `unit` of the rows.
    static DEVICE RowTile at(uint8_t* data, int64_t unit) { return {data, int(unit * UNIT_BYTES % ACCESS)}; }

    template <int NUM_THREADS> using held_t = HeldRow<ACCESS, PIECES, NUM_THREADS / ROWS>;

    // Calls f(to, from, count, thread), with the arguments of copy_row, for the row that this thread copies, counted
    // from `first_row` and cut off at the end of the row. Rows past the last one repeat the last row. All threads of
    // the block call.
    template <int NUM_THREADS, typename F>
    DEVICE void
    with_row(const uint8_t* W, int64_t first_row, int64_t num_rows, int64_t row_bytes, int64_t unit, F f) const {
        constexpr int THREADS = NUM_THREADS / ROWS;  // threads that share a row
        static_assert(NUM_THREADS % ROWS == 0);
        const int row = threadIdx.x / THREADS;
        const int64_t begin = unit * UNIT_BYTES - skew;
        const int count = int(min(int64_t(PIECES), (row_bytes - begin) / ACCESS));
        f(data + row * PITCH, W + min(first_row + row, num_rows - 1) * row_bytes + begin, count, threadIdx.x % THREADS);
    }

    // Copies the tile's parts of the rows from `first_row` on.
    template <int NUM_THREADS>
    DEVICE void copy(const uint8_t* W, int64_t first_row, int64_t num_rows, int64_t row_bytes, int64_t unit) const {
        with_row<NUM_THREADS>(W, first_row, num_rows, row_bytes, unit,
                              [](uint8_t* to, const uint8_t* from, int count, int thread) {
                                  copy_row<ACCESS, PIECES, NUM_THREADS / ROWS>(to, from, count, thread);
                              });
    }

    // The format block that holds element `element` of unit `unit` of a row.
    DEVICE const uint8_t* block(int row, int unit, int element) const {
        return data + row * PITCH + skew + unit * UNIT_BYTES + element / FORMAT_T::LENGTH * FORMAT_T::BYTES;
    }
};

// Prefetches to L2 at most BYTES bytes of each of ROWS rows, from byte `begin` on. All threads of the block call. A
// kernel prefetches only its first k-tile: further requests would delay that one in DRAM.
template <int NUM_THREADS, int ROWS, int BYTES>
DEVICE void prefetch_rows(const uint8_t* W, int64_t first_row, int64_t num_rows, int64_t row_bytes, int64_t begin) {
    constexpr int THREADS = NUM_THREADS / ROWS, LINE = 128;
    const int64_t row = first_row + threadIdx.x / THREADS;
    if (row >= num_rows) return;
    const int bytes = int(min(int64_t(BYTES), row_bytes - begin)), first = threadIdx.x % THREADS * LINE;
    W += row * row_bytes + begin + first;
#pragma unroll
    for (int at = 0; at < BYTES; at += THREADS * LINE) {
        if (at + first < bytes) prefetch_line(W + at);
    }
}

constexpr int bytes_of_grid(int entries) { return entries * int(sizeof(uint16_t)); }

// Copies the codebook grid of a type to shared memory. All threads of the block call.
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
