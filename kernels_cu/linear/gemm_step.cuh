// gemm_step.cuh: a step of K of a matrix product by product.cuh: 128 bytes of each row of both operands in shared memory.
//
// fp8 becomes float16, which holds every code, where the device does not multiply fp8.
//
// A kernel defines before: scalar_t, the element type of both operands, half_t, bf16_t, fp8 or int8_t.
#pragma once
#include "async.cuh"
#include "product.cuh"

constexpr int STEP = 128 / sizeof(scalar_t), CHUNK = 16 / sizeof(scalar_t);  // elements of a step, and of 16 bytes
constexpr bool IS_INTEGER = is_same<scalar_t, int8_t>, IS_BYTE = sizeof(scalar_t) == 1;
template <bool INTEGER> struct sum_of { using type = float; };
template <> struct sum_of<true> { using type = int32_t; };
using sum_t = sum_of<IS_INTEGER>::type;
// Words of float16 that take the place of one word of a fragment.
constexpr int PARTS = MULTIPLIES<scalar_t> ? 1 : 2;
// Parts of a step at a time: conversions of more, and gfx11's operands, take more registers than there are.
constexpr int UNROLL = MATRIX_CORE == WMMA_11 ? 1 : PARTS == 2 ? 2 : 4;

using tile_t = SwizzledTile<uint16_t, 8>;  // rows of 128 bytes

// Columns of gates, before as many of their ups, where the two alternate: products of gates and of ups by turns, or, of
// a lane with more than two sums in a row, gates and ups in one product.
constexpr int GATE_COLUMNS = ROW_SUMS == 2 ? PRODUCT_COLUMNS : ROW_SUMS / 2;

// What a thread of a block holds of ROWS rows of a step, where copies are held: its chunk of every STRIDE-th row.
template <int ROWS, int NUM_THREADS>
struct HeldChunks {
    static constexpr int STRIDE = NUM_THREADS / 8, COUNT = ceil_div(ROWS, STRIDE);
    uint32_t chunks[HOLDS_COPIES ? COUNT : 1][4];

    DEVICE uint32_t* of(int row) { return chunks[HOLDS_COPIES ? (row - int(threadIdx.x) / 8) / STRIDE : 0]; }
    // Stores what is held to the rows of a stage from `first` on: after products that hide the latency of the loads, and
    // behind a barrier after the last products that read the stage.
    DEVICE void store(const tile_t& stage, int first) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int row = threadIdx.x / 8 + i * STRIDE;
            if (ROWS % STRIDE != 0 && row >= ROWS) continue;
            if constexpr (HOLDS_COPIES) {
                Vec<uint32_t, 4> chunk;
#pragma unroll
                for (int j = 0; j < 4; ++j) chunk.data[j] = chunks[i][j];
                *reinterpret_cast<Vec<uint32_t, 4>*>(stage.at(first + row, threadIdx.x % 8)) = chunk;
            }
        }
    }
};

// Copies the elements from `from` on of a row to a chunk of shared memory, or of `held`; zeros where there are none. The
// row has `size` elements, `step` apart, and is read VEC_SIZE at a time: one at a time where they lie apart.
template <int VEC_SIZE>
DEVICE void copy_chunk(uint32_t* held, uint16_t* to, const scalar_t* row, int64_t step, int64_t from, int64_t size) {
    constexpr int ACCESS_BYTES = VEC_SIZE * sizeof(scalar_t);
#pragma unroll
    for (int i = 0; i < CHUNK; i += VEC_SIZE) {
        scalar_t* const place = reinterpret_cast<scalar_t*>(to) + i;
        const bool exists = from + i < size;
        if constexpr (ACCESS_BYTES >= 4) {
            if constexpr (HOLDS_COPIES) hold<ACCESS_BYTES>(held + i / (CHUNK / 4), row + from + i, exists);
            else cp_async<ACCESS_BYTES>(place, row + from + i, exists);
        } else {
            using word_t = typename word_of<ACCESS_BYTES>::type;
            const int64_t at = VEC_SIZE == 1 ? (from + i) * step : from + i;
            if constexpr (HOLDS_COPIES) {
                const uint32_t word = exists ? *reinterpret_cast<const word_t*>(row + at) : 0;
                uint32_t& to_word = held[i / (CHUNK / 4)];
                to_word = (i % (CHUNK / 4) == 0 ? 0 : to_word) | word << i / VEC_SIZE * ACCESS_BYTES * 8 % 32;
            } else {
                *reinterpret_cast<word_t*>(place) = exists ? *reinterpret_cast<const word_t*>(row + at) : word_t{};
            }
        }
    }
}

// The fragment `words` as operands of products: itself, or the first and the second half of its elements as float16.
template <int N>
DEVICE void expand(uint32_t (&operands)[PARTS][N], const uint32_t (&words)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if constexpr (PARTS == 2) {
            uint32_t halves[2];
            fp8_to_half<scalar_t>(words[i], halves);
            operands[0][i] = halves[0];
            operands[PARTS - 1][i] = halves[1];
        } else {
            operands[0][i] = words[i];
        }
    }
}

// Adds the products of operands that `expand` has made.
DEVICE void multiply(sum_t (&sums)[PRODUCT_SUMS], const uint32_t (&a)[PARTS][LOAD_WORDS],
                     const uint32_t (&b)[PARTS][LOAD_WORDS], int half) {
    using operand_t = conditional_t<PARTS == 1, scalar_t, half_t>;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) product<operand_t>(sums, a[part], b[part], half);
}

// Adds the products of a warp of a step: rows of a from `a_row` on of the stage by rows of b from `b_row` on, which are
// 16 times ROW_TILES and PRODUCT_COLUMNS times COLUMN_TILES.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE void
multiply_step(sum_t (&sums)[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS], const tile_t& stage, int a_row, int b_row) {
    constexpr int HALVES = 16 / PRODUCT_COLUMNS;
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll UNROLL
    for (int part = 0; part < 128 / LOAD_BYTES; ++part) {
        uint32_t rows[ROW_TILES][PARTS][LOAD_WORDS];
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
            uint32_t words[LOAD_WORDS];
            load_rows(words, stage, a_row + i * 16, part, lane);
            expand(rows[i], words);
        }
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j += HALVES) {
            uint32_t words[LOAD_WORDS], columns[PARTS][LOAD_WORDS];
            load_columns(words, stage, b_row + j * PRODUCT_COLUMNS, part, lane);
            expand(columns, words);
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i) {
                multiply(sums[i][j], rows[i], columns, 0);
                if constexpr (HALVES == 2) multiply(sums[i][j + 1], rows[i], columns, 1);
            }
        }
    }
}
