// product.cuh: MMA of a warp, with one interface to tensor cores (mma.cuh) and AMD's matrix cores (matrix_core.cuh).
//
//     d[r, c] += sum_k a[r, k] * b[c, k],    16 rows r of a, PRODUCT_COLUMNS rows c of b
//
// A lane holds PRODUCT_SUMS accumulators of d, ROW_SUMS adjacent ones in each of LANE_ROWS rows. Accumulator i is
//
//     row       lane_row(lane) + i / ROW_SUMS * ROW_STEP
//     column    lane_column(lane) + i % ROW_SUMS
//
// Operands are loaded for 16 rows each, so one b serves 16 / PRODUCT_COLUMNS MMAs. The fragment of a lane depends on
// the platform; both operands have the same order of K.
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

// Whether MMAs take elements of T. fp8 types that they do not take are converted to float16, which represents every fp8
// value.
template <typename T>
constexpr bool MULTIPLIES = ON_MATRIX_CORES ? MATRIX_TAKES<T> : sizeof(T) == 2 || MULTIPLIES_BYTES<T>;

// Words of an operand in a lane: LOAD_WORDS for LOAD_BYTES bytes of each row, the most that one access loads, and
// SHORT_WORDS for 16 elements of 16 bits, the least that an MMA takes.
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

// Loads operand a: 16 rows of a tile from `origin` on, a multiple of 8, bytes from part * LOAD_BYTES on (with
// SHORT_WORDS words: from part * 32 on).
template <int WORDS, typename Tile>
DEVICE void load_rows(uint32_t (&words)[WORDS], const Tile& tile, int origin, int part, int lane) {
    if constexpr (ON_MATRIX_CORES) {
        load_run(words, tile, origin + lane % 16, (part * K_LANES + matrix_run(lane)) * WORDS * 4);
    } else {
        ldmatrix<4>(words, tile.at(origin, lane % 16, part, lane / 16));
    }
}

// Loads operand b in the same way.
template <int WORDS, typename Tile>
DEVICE void load_columns(uint32_t (&words)[WORDS], const Tile& tile, int origin, int part, int lane) {
    if constexpr (ON_MATRIX_CORES) {
        load_run(words, tile, origin + matrix_row(lane), (part * K_LANES + matrix_run(lane)) * WORDS * 4);
    } else {
        ldmatrix<4>(words, tile.at(origin, lane / 16 * 8 + lane % 8, part, lane / 8 % 2));
    }
}

// Loads words of a column of a tile of 16-bit elements, from row `row` on, one element at a time.
template <int WORDS, typename Tile>
DEVICE void load_column_run(uint32_t (&words)[WORDS], const Tile& tile, int row, int column) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const auto* low = reinterpret_cast<const uint16_t*>(tile.at(row + 2 * i, column / 8)) + column % 8;
        const auto* high = reinterpret_cast<const uint16_t*>(tile.at(row + 2 * i + 1, column / 8)) + column % 8;
        words[i] = uint32_t(*high) << 16 | *low;
    }
}

// Loads operand b transposed: 16 columns of a tile of 16-bit elements from chunk 2 * step on, with K along the 16 rows
// from `origin` on. Matrix cores load it one element at a time, which suits tiles that few waves read; other tiles are
// stored transposed in shared memory.
template <typename Tile>
DEVICE void load_transposed(uint32_t (&words)[SHORT_WORDS], const Tile& tile, int origin, int step, int lane) {
    if constexpr (ON_MATRIX_CORES) {
        order_loads();
        load_column_run(words, tile, origin + matrix_run(lane) * SHORT_WORDS * 2, step * 16 + matrix_row(lane));
    } else {
        ldmatrix<4, true>(words, tile.at(origin, lane % 16, step, lane / 16));
    }
}

// d += a * b^T for part number `half` of the columns of b: b has 16 / PRODUCT_COLUMNS such parts.
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

// Makes an operand a from 16 columns of accumulators. `words` holds the lane's accumulators of these columns, rounded
// and packed in pairs, one MMA after another. For WMMA of gfx11 a lane also needs the words of the other lane that
// shares its row.
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
