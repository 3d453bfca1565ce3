// decode_operand.cuh: the MMA fragments of a lane in attention_decode, by mma.cuh and by matrix_core.cuh, and operands
// made of words of the cache.
//
// An MMA multiplies 16 rows of the cache (keys: tokens; values: dimensions) by TILE_HEADS heads. With mma.cuh the cache
// is operand A, and the accumulator is [rows of the cache, heads]. Matrix cores have the same layout for both operands:
// there the heads are operand A, and the accumulator is [heads, rows of the cache], so that probabilities are an
// operand without a permutation. With g = lane / 4 and t = lane % 4, a lane has
//
//                                      mma.cuh              matrix_core.cuh
//     cache operand, rows              g, g + 8             cache_row(lane)
//     cache operand, run of K          t                    cache_run(lane)
//     heads operand                    g                    lane % 16
//     accumulators, heads              2t, 2t + 1           lane % 16
//     accumulators, rows of the cache  g, g + 8             lane_column(lane) + i,  i < SUM_ROWS
//
// The constants in capitals that are not defined here are those of attention_decode.cu.
#pragma once
#include "attention.cuh"
#include "product.cuh"

constexpr bool IS_FP8 = sizeof(cache_t) == 1;
template <bool FP8> struct product_type { using type = scalar_t; };
template <> struct product_type<true> { using type = half_t; };
using product_t = product_type<IS_FP8>::type;  // element type of MMA operands

// The fragments of a lane.
constexpr int TILE_HEADS = PRODUCT_COLUMNS;          // heads of an MMA
constexpr int LANE_HEADS = ON_MATRIX_CORES ? 1 : 2;  // heads of a lane's accumulators
constexpr int SUM_ROWS = PRODUCT_SUMS / LANE_HEADS;  // rows of the cache of a lane's accumulators
constexpr int CACHE_ROWS = ON_MATRIX_CORES ? 1 : 2;  // rows of the cache of a lane's operand
constexpr int RUN_WORDS = SHORT_WORDS / CACHE_ROWS;  // words of each such row, and of a head, in a lane's operands
constexpr int RUN_TOKENS = 2 * RUN_WORDS;            // tokens of values in a lane's operand
// Lanes that share a head differ in bits from this one on.
constexpr int FIRST_HEAD_MASK = ON_MATRIX_CORES ? FIRST_ROW_MASK : 4;
DEVICE int cache_row(int lane) { return ON_MATRIX_CORES ? matrix_row(lane) : lane / 4; }
DEVICE int cache_run(int lane) { return ON_MATRIX_CORES ? matrix_run(lane) : lane % 4; }
DEVICE int operand_head(int lane) { return ON_MATRIX_CORES ? lane % 16 : lane / 4; }
// The row of the cache and the head of the lane's accumulator i = row * LANE_HEADS + head.
DEVICE int sum_row(int lane, int row) { return ON_MATRIX_CORES ? lane_column(lane) + row : lane / 4 + row * 8; }
DEVICE int sum_head(int lane, int head) { return ON_MATRIX_CORES ? lane % 16 : lane % 4 * 2 + head; }

// d += cache * heads, for the words of the lane's rows of the cache (row by row within each word of K) and of its head.
template <typename T, int WORDS>
DEVICE void
multiply_cache(float (&d)[PRODUCT_SUMS], const uint32_t (&cache)[WORDS * CACHE_ROWS], const uint32_t (&heads)[WORDS]) {
    if constexpr (ON_MATRIX_CORES) matrix_multiply<T>(d, heads, cache);
    else mma_m16n8k16<T>(d, cache, heads);
}

// The MMA operand from a lane's rows of the cache, when elements along K are contiguous. word(row, i) is the i-th word
// of a row: two 16-bit elements, or four fp8 values.
template <int WORDS, typename F>
DEVICE void operand_of_rows(uint32_t (&operand)[WORDS * CACHE_ROWS], F word) {
#pragma unroll
    for (int i = 0; i < WORDS; i += IS_FP8 ? 2 : 1) {
#pragma unroll
        for (int row = 0; row < CACHE_ROWS; ++row) {
            if constexpr (IS_FP8) {
                uint32_t halves[2];
                fp8_to_half<cache_t>(word(row, i / 2), halves);
                operand[CACHE_ROWS * i + row] = halves[0];
                operand[CACHE_ROWS * (i + 1) + row] = halves[1];
            } else {
                operand[CACHE_ROWS * i + row] = word(row, i);
            }
        }
    }
}

// MMA operands from words of RUN_TOKENS tokens, each with the same adjacent dimensions. Each dimension of a word is a
// row of one of OPERANDS operands.
constexpr int WORD_ELEMENTS = 4 / sizeof(cache_t), OPERANDS = WORD_ELEMENTS / CACHE_ROWS;
template <typename F>
DEVICE void operands_of_tokens(uint32_t (&operands)[OPERANDS][SHORT_WORDS], F word) {
#pragma unroll
    for (int k = 0; k < RUN_WORDS; ++k) {
        const uint32_t even = word(2 * k), odd = word(2 * k + 1);
        uint32_t pairs[WORD_ELEMENTS];  // two tokens of each dimension
        if constexpr (IS_FP8) {
            uint32_t halves[2][2];
            fp8_to_half<cache_t>(pack_bytes<false>(even, odd), halves[0]);
            fp8_to_half<cache_t>(pack_bytes<true>(even, odd), halves[1]);
#pragma unroll
            for (int i = 0; i < WORD_ELEMENTS; ++i) pairs[i] = halves[i / 2][i % 2];
        } else {
            pairs[0] = pack_halves<false>(even, odd);
            pairs[1] = pack_halves<true>(even, odd);
        }
#pragma unroll
        for (int i = 0; i < WORD_ELEMENTS; ++i) operands[i / CACHE_ROWS][CACHE_ROWS * k + i % CACHE_ROWS] = pairs[i];
    }
}
