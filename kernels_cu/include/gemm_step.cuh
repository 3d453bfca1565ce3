// gemm_step.cuh: a step of K of a matrix product by mma.sync or AMD's matrix cores: 128 bytes of
// each row of both operands in shared memory.
//
// fp8 becomes float16, which holds every code, where the device does not multiply fp8.
//
// A warp's product gives 16 rows and PRODUCT_COLUMNS columns of sums, PRODUCT_SUMS in a lane. Those are pairs of
// neighbouring columns: sum (r * PAIR_COLUMNS + c) * 2 + i is row pair_row(r), column pair_column(c) + i for
// r < PAIR_ROWS, c < PAIR_COLUMNS.
//
// A kernel defines before: scalar_t, the element type of both operands, half_t, bf16_t, fp8 or int8_t.
#pragma once
#include "async.cuh"
#include "matrix_core.cuh"
#include "mma.cuh"
#include "swizzle.cuh"

constexpr int STEP = 128 / sizeof(scalar_t), CHUNK = 16 / sizeof(scalar_t);  // elements of a step, and of 16 bytes
constexpr bool IS_INTEGER = is_same<scalar_t, int8_t>, IS_BYTE = sizeof(scalar_t) == 1;
template <bool INTEGER> struct sum_of { using type = float; };
template <> struct sum_of<true> { using type = int32_t; };
using sum_t = sum_of<IS_INTEGER>::type;
// Words of float16 that take the place of one word of a fragment.
constexpr int PARTS = IS_BYTE && !MULTIPLIES_BYTES<scalar_t> ? 2 : 1;
constexpr int UNROLL = PARTS == 2 ? 2 : 4;  // conversions of more parts at a time take more registers than there are

constexpr int PRODUCT_COLUMNS = HAS_MATRIX_CORES ? 16 : 8, PRODUCT_SUMS = HAS_MATRIX_CORES ? MATRIX_SUMS : 4;
constexpr int PAIR_ROWS = HAS_MATRIX_CORES ? 1 : 2, PAIR_COLUMNS = PRODUCT_SUMS / 2 / PAIR_ROWS;
// Columns of gates, before as many of their ups, where they alternate: pair q of a lane is a gate, pair q + 1 its up.
constexpr int GATE_COLUMNS = HAS_MATRIX_CORES ? 2 : 8;

DEVICE int pair_row(int lane, int r) { return HAS_MATRIX_CORES ? lane % 16 : r * 8 + lane / 4; }
DEVICE int pair_column(int lane, int c) { return HAS_MATRIX_CORES ? lane / 16 * PRODUCT_SUMS + 2 * c : lane % 4 * 2; }

using tile_t = SwizzledTile<uint16_t, 8>;  // rows of 128 bytes

// Copies the elements from `from` on of a row to a chunk of shared memory; zeros where there are none. The row has
// `size` elements, `step` apart, and is read VEC_SIZE at a time: one at a time where they lie apart.
template <int VEC_SIZE>
DEVICE void copy_chunk(uint16_t* to, const scalar_t* row, int64_t step, int64_t from, int64_t size) {
    constexpr int ACCESS_BYTES = VEC_SIZE * sizeof(scalar_t);
#pragma unroll
    for (int i = 0; i < CHUNK; i += VEC_SIZE) {
        scalar_t* const place = reinterpret_cast<scalar_t*>(to) + i;
        const bool exists = from + i < size;
        if constexpr (ACCESS_BYTES >= 4) {
            cp_async<ACCESS_BYTES>(place, row + from + i, exists);
        } else {
            using word_t = typename word_of<ACCESS_BYTES>::type;
            const int64_t at = VEC_SIZE == 1 ? (from + i) * step : from + i;
            *reinterpret_cast<word_t*>(place) = exists ? *reinterpret_cast<const word_t*>(row + at) : word_t{};
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

template <typename T, typename Sum>
DEVICE void multiply(Sum (&sums)[4], const uint32_t (&a)[PARTS][4], const uint32_t (&b)[PARTS][4], int first) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const uint32_t columns[2] = {b[part][first], b[part][first + 1]};
        if constexpr (sizeof(T) == 2) mma_m16n8k16<T>(sums, a[part], columns);
        else if constexpr (MULTIPLIES_BYTES<T>) mma_m16n8k32<T>(sums, a[part], columns);
        else mma_m16n8k16<half_t>(sums, a[part], columns);
    }
}

// The words of the operand that the lane has of row `row` of the stage, in part `part` of the four of a step.
DEVICE void load_operand(uint32_t (&words)[OPERAND_WORDS], const tile_t& stage, int row, int part, int byte) {
    constexpr int CHUNK_WORDS = OPERAND_WORDS < 4 ? OPERAND_WORDS : 4;
#pragma unroll
    for (int i = 0; i < OPERAND_WORDS; i += CHUNK_WORDS) {
        const uint16_t* const from = stage.at(row, part * 2 + byte / 16 + i / 4) + byte % 16 / 2;
        const auto loaded = *reinterpret_cast<const Vec<uint32_t, CHUNK_WORDS>*>(from);
#pragma unroll
        for (int word = 0; word < CHUNK_WORDS; ++word) words[i + word] = loaded.data[word];
    }
}

// multiply_step() by matrix_core.cuh's products.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE void multiply_on_matrix_cores(sum_t (&sums)[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS], const tile_t& stage,
                                     int a_row, int b_row) {
    const int lane = threadIdx.x % WARP_SIZE, byte = matrix_byte(lane);
#pragma unroll UNROLL
    for (int part = 0; part < 4; ++part) {  // 32 bytes of each row
        uint32_t rows[ROW_TILES][OPERAND_WORDS];
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) load_operand(rows[i], stage, a_row + i * 16 + lane % 16, part, byte);
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            uint32_t columns[OPERAND_WORDS];
            load_operand(columns, stage, b_row + j * 16 + matrix_row(lane), part, byte);
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i) matrix_product<scalar_t>(sums[i][j], columns, rows[i]);
        }
    }
}

// Adds the products of a warp of a step: rows of a from `a_row` on of the stage by rows of b from `b_row` on, which are
// 16 times ROW_TILES and PRODUCT_COLUMNS times COLUMN_TILES.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE void
multiply_step(sum_t (&sums)[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS], const tile_t& stage, int a_row, int b_row) {
    if constexpr (HAS_MATRIX_CORES) {
        multiply_on_matrix_cores(sums, stage, a_row, b_row);
    } else {
        const int lane = threadIdx.x % 32;
#pragma unroll UNROLL
        for (int part = 0; part < 4; ++part) {  // 32 bytes of each row
            uint32_t rows[ROW_TILES][PARTS][4];
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i) {
                uint32_t words[4];
                ldmatrix<4>(words, stage.at(a_row + i * 16, lane % 16, part, lane / 16));
                expand(rows[i], words);
            }
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; j += 2) {
                uint32_t words[4], columns[PARTS][4];
                ldmatrix<4>(words, stage.at(b_row + j * 8, lane / 16 * 8 + lane % 8, part, lane / 8 % 2));
                expand(columns, words);
#pragma unroll
                for (int i = 0; i < ROW_TILES; ++i) {
                    multiply<scalar_t>(sums[i][j], rows[i], columns, 0);
                    multiply<scalar_t>(sums[i][j + 1], rows[i], columns, 2);
                }
            }
        }
    }
}
