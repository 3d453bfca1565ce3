// product.cuh: a matrix product by a warp, the seam to tensor cores (mma.cuh) and AMD's matrix cores (matrix_core.cuh).
//
//     d[r, c] += sum_k a[r, k] * b[c, k],    16 rows r of a, PRODUCT_COLUMNS rows c of b
//
// A lane holds PRODUCT_SUMS elements of d, ROW_SUMS neighbours in each of LANE_ROWS rows: sum i is
//
//     row       lane_row(lane) + i / ROW_SUMS * ROW_STEP
//     column    lane_column(lane) + i % ROW_SUMS
//
// Operands are loaded for 16 rows of each, so b serves 16 / PRODUCT_COLUMNS products. What a lane holds of them is the
// platform's own; both operands have it in the same order of K.
#pragma once
#include "matrix_core.cuh"
#include "mma.cuh"
#include "swizzle.cuh"

constexpr bool ON_MATRIX_CORES = MATRIX_CORE != NO_MATRIX_CORE;
constexpr int PRODUCT_COLUMNS = ON_MATRIX_CORES ? 16 : 8, PRODUCT_SUMS = ON_MATRIX_CORES ? MATRIX_SUMS : 4;
constexpr int LANE_ROWS = ON_MATRIX_CORES ? 1 : 2, ROW_STEP = 16 / LANE_ROWS, ROW_SUMS = PRODUCT_SUMS / LANE_ROWS;
DEVICE int lane_row(int lane) { return ON_MATRIX_CORES ? lane % 16 : lane / 4; }
// Lanes that share a row differ in the bits from FIRST_ROW_MASK up to END_ROW_MASK, exclusive.
constexpr int FIRST_ROW_MASK = ON_MATRIX_CORES ? 16 : 1, END_ROW_MASK = ON_MATRIX_CORES ? WARP_SIZE : 4;
DEVICE int lane_column(int lane) { return ON_MATRIX_CORES ? lane / 16 * MATRIX_SUMS : lane % 4 * 2; }

// Whether products take elements of T. fp8 that they do not take becomes float16, which holds every code.
template <typename T>
constexpr bool MULTIPLIES = ON_MATRIX_CORES ? MATRIX_TAKES<T> : sizeof(T) == 2 || MULTIPLIES_BYTES<T>;

// Words of an operand in a lane: of LOAD_BYTES bytes of each row, the most that one access brings; and of 16 elements
// of 16 bits, the least that a product takes.
constexpr int LOAD_WORDS = ON_MATRIX_CORES && MATRIX_WORDS > 4 ? MATRIX_WORDS : 4;
constexpr int LOAD_BYTES = ON_MATRIX_CORES ? LOAD_WORDS * 4 * K_LANES : 32;
constexpr int SHORT_WORDS = ON_MATRIX_CORES ? MATRIX_WORDS : 4;

// The lane's words of row `row` of a tile in shared memory, from byte `byte` of the row on.
template <int WORDS, typename Tile>
DEVICE void load_run(uint32_t (&words)[WORDS], const Tile& tile, int row, int byte) {
    constexpr int ACCESS = WORDS < 4 ? WORDS : 4;
#pragma unroll
    for (int i = 0; i < WORDS; i += ACCESS) {
        const int at = byte + i * 4;
        const auto loaded = *reinterpret_cast<const Vec<uint32_t, ACCESS>*>(
            reinterpret_cast<const uint8_t*>(tile.at(row, at / 16)) + at % 16);
#pragma unroll
        for (int j = 0; j < ACCESS; ++j) words[i + j] = loaded.data[j];
    }
}

// Operand a: 16 rows of a tile from `origin` on, a multiple of 8, bytes from part * LOAD_BYTES on (SHORT_WORDS: part * 32).
template <int WORDS, typename Tile>
DEVICE void load_rows(uint32_t (&words)[WORDS], const Tile& tile, int origin, int part, int lane) {
    if constexpr (ON_MATRIX_CORES) {
        load_run(words, tile, origin + lane % 16, (part * K_LANES + matrix_run(lane)) * WORDS * 4);
    } else {
        ldmatrix<4>(words, tile.at(origin, lane % 16, part, lane / 16));
    }
}

// Operand b, likewise.
template <int WORDS, typename Tile>
DEVICE void load_columns(uint32_t (&words)[WORDS], const Tile& tile, int origin, int part, int lane) {
    if constexpr (ON_MATRIX_CORES) {
        load_run(words, tile, origin + matrix_row(lane), (part * K_LANES + matrix_run(lane)) * WORDS * 4);
    } else {
        ldmatrix<4>(words, tile.at(origin, lane / 16 * 8 + lane % 8, part, lane / 8 % 2));
    }
}

// Words of a column of a tile of 16-bit elements, from row `row` on, element by element.
template <int WORDS, typename Tile>
DEVICE void load_column_run(uint32_t (&words)[WORDS], const Tile& tile, int row, int column) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const auto* low = reinterpret_cast<const uint16_t*>(tile.at(row + 2 * i, column / 8)) + column % 8;
        const auto* high = reinterpret_cast<const uint16_t*>(tile.at(row + 2 * i + 1, column / 8)) + column % 8;
        words[i] = uint32_t(*high) << 16 | *low;
    }
}

// Operand b: 16 columns of a tile of 16-bit elements from chunk 2 * step on, 16 rows from `origin` on for K. On matrix
// cores element by element: for tiles that few waves read so. Others lie transposed in shared memory.
template <typename Tile>
DEVICE void load_transposed(uint32_t (&words)[SHORT_WORDS], const Tile& tile, int origin, int step, int lane) {
    if constexpr (ON_MATRIX_CORES) {
        order_loads();
        load_column_run(words, tile, origin + matrix_run(lane) * SHORT_WORDS * 2, step * 16 + matrix_row(lane));
    } else {
        ldmatrix<4, true>(words, tile.at(origin, lane % 16, step, lane / 16));
    }
}

// d += a * b^T for the columns number `half` of the 16 / PRODUCT_COLUMNS that b has.
template <typename T, typename Sum, int WORDS>
DEVICE void product(Sum (&d)[PRODUCT_SUMS], const uint32_t (&a)[WORDS], const uint32_t (&b)[WORDS], int half = 0) {
    static_assert(MULTIPLIES<T>);
    if constexpr (ON_MATRIX_CORES) {
        matrix_multiply<T>(d, a, b);
    } else {
        const uint32_t columns[2] = {b[2 * half], b[2 * half + 1]};
        if constexpr (sizeof(T) == 2) mma_m16n8k16<T>(d, a, columns);
        else mma_m16n8k32<T>(d, a, columns);
    }
}

// Makes an operand a of 16 columns of sums, rounded and packed: words of the pairs of a lane's sums of these columns, one
// product after another. WMMA of gfx11 takes those of the other lane of a row, too.
DEVICE void finish_operand(uint32_t (&words)[SHORT_WORDS]) {
    if constexpr (MATRIX_CORE == WMMA_11) {
        constexpr int OWN = SHORT_WORDS / 2;
        const bool upper = threadIdx.x % WARP_SIZE >= 16;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const uint32_t own = words[i], other = shfl_xor(own, 16);
            words[i] = upper ? other : own;
            words[i + OWN] = upper ? own : other;
        }
    }
}
