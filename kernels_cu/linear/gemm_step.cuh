// gemm_step.cuh: one k-tile of a GEMM by product.cuh: 128 bytes of each row of both operands in shared memory.
//
// On devices without fp8 MMA, fp8 operands are converted to float16, which represents every fp8 value exactly.
//
// The kernel defines before the include: scalar_t, the element type of both operands: half_t, bf16_t, fp8 or int8_t.
#pragma once
#include "async.cuh"
#include "product.cuh"

constexpr int STEP = 128 / sizeof(scalar_t), CHUNK = 16 / sizeof(scalar_t);  // elements of a k-tile, and of 16 bytes
constexpr bool IS_INTEGER = is_same<scalar_t, int8_t>, IS_BYTE = sizeof(scalar_t) == 1;
template <bool INTEGER> struct sum_of { using type = float; };
template <> struct sum_of<true> { using type = int32_t; };
using sum_t = sum_of<IS_INTEGER>::type;
// Words per fragment word after conversion: 2 if fp8 is converted to float16, else 1.
constexpr int PARTS = MULTIPLIES<scalar_t> ? 1 : 2;
// Unroll factor over the parts of a k-tile. Converted operands, and those of gfx11, would spill if more were unrolled.
constexpr int UNROLL = MATRIX_CORE == WMMA_11 ? 1 : PARTS == 2 ? 2 : 4;

using tile_t = SwizzledTile<uint16_t, 8>;  // rows of 128 bytes

// GATED tiles alternate GATE_COLUMNS gate columns with their GATE_COLUMNS up columns. With two accumulators per lane
// and row, MMAs alternate between gates and ups; with more, one MMA covers both.
constexpr int GATE_COLUMNS = ROW_SUMS == 2 ? PRODUCT_COLUMNS : ROW_SUMS / 2;

// The registers that stage one thread's part of a k-tile on devices without cp.async (HOLDS_COPIES): its chunk of every
// STRIDE-th of ROWS rows.
template <int ROWS, int NUM_THREADS>
struct HeldChunks {
    static constexpr int STRIDE = NUM_THREADS / 8, COUNT = ceil_div(ROWS, STRIDE);
    uint32_t chunks[HOLDS_COPIES ? COUNT : 1][4];

    // Stores the held chunks to the rows of a stage, from `first` on. The caller puts MMAs between the loads and this
    // call to hide the latency, and a barrier between the last MMAs that read the stage and this call.
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

// Copies one chunk of a row to shared memory, or to the registers `held`. The row has `left` elements at distances of
// `step`, from `from` on, read VEC_SIZE at a time; VEC_SIZE is 1 if they are not adjacent. Elements past these, and all
// elements of a row that does not exist, are zeros.
template <int VEC_SIZE>
DEVICE void copy_chunk(uint32_t* held, uint16_t* to, const scalar_t* from, int64_t step, int64_t left, bool exists) {
    constexpr int ACCESS_BYTES = VEC_SIZE * sizeof(scalar_t);
#pragma unroll
    for (int i = 0; i < CHUNK; i += VEC_SIZE) {
        scalar_t* const place = reinterpret_cast<scalar_t*>(to) + i;
        const bool valid = exists && i < left;
        if constexpr (ACCESS_BYTES >= 4) {
            if constexpr (HOLDS_COPIES) hold<ACCESS_BYTES>(held + i / (CHUNK / 4), from + i, valid);
            else cp_async<ACCESS_BYTES>(place, from + i, valid);
        } else {
            using word_t = typename word_of<ACCESS_BYTES>::type;
            const int64_t at = VEC_SIZE == 1 ? i * step : i;
            if constexpr (HOLDS_COPIES) {
                const uint32_t word = valid ? *reinterpret_cast<const word_t*>(from + at) : 0;
                uint32_t& to_word = held[i / (CHUNK / 4)];
                to_word = (i % (CHUNK / 4) == 0 ? 0 : to_word) | word << i / VEC_SIZE * ACCESS_BYTES * 8 % 32;
            } else {
                *reinterpret_cast<word_t*>(place) = valid ? *reinterpret_cast<const word_t*>(from + at) : word_t{};
            }
        }
    }
}

// The fragment `words` as MMA operands: itself, or the first and the second half of its elements as float16.
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

// sums += a * b^T, for operands made by `expand`.
DEVICE void multiply(sum_t (&sums)[PRODUCT_SUMS], const uint32_t (&a)[PARTS][LOAD_WORDS],
                     const uint32_t (&b)[PARTS][LOAD_WORDS], int half) {
    using operand_t = conditional_t<PARTS == 1, scalar_t, half_t>;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) product<operand_t>(sums, a[part], b[part], half);
}

// The warp's MMAs of one k-tile: 16 * ROW_TILES rows of a, from row `a_row` of the stage on, times PRODUCT_COLUMNS *
// COLUMN_TILES rows of b, from row `b_row` of the stage on.
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
