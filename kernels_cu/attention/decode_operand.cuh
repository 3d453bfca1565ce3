// decode_operand.cuh: what a lane has of a product of attention_decode, by mma.cuh and by matrix_core.cuh, and operands
// made of words of the cache.
//
// A product multiplies 16 rows of the cache (keys: tokens; values: dimensions) by TILE_HEADS heads. By mma.cuh the cache is
// operand a and the sums are [rows of the cache, heads]; on matrix cores, whose two operands are alike, the heads are
// operand a and the sums are [heads, rows of the cache], so that probabilities are an operand as they are. With
// g = lane / 4 and t = lane % 4 a lane has
//
//                                      mma.cuh              matrix_core.cuh
//     of the cache, rows               g, g + 8             cache_row(lane)
//     of the cache, run of K           t                    cache_run(lane)
//     of the heads as an operand       g                    lane % 16
//     of sums, heads                   2t, 2t + 1           lane % 16
//     of sums, rows of the cache       g, g + 8             lane_column(lane) + i,  i < SUM_ROWS
//
// The constants in capitals that are not defined here are those of attention_decode.cu.
#pragma once
#include "attention.cuh"
#include "product.cuh"

constexpr bool IS_FP8 = sizeof(cache_t) == 1;
template <bool FP8> struct product_type { using type = scalar_t; };
template <> struct product_type<true> { using type = half_t; };
using product_t = product_type<IS_FP8>::type;  // of the factors of matrix products

// What a lane has of a product.
constexpr int TILE_HEADS = PRODUCT_COLUMNS;          // heads of a product
constexpr int LANE_HEADS = ON_MATRIX_CORES ? 1 : 2;  // heads of a lane's sums
constexpr int SUM_ROWS = PRODUCT_SUMS / LANE_HEADS;  // rows of the cache of a lane's sums
constexpr int CACHE_ROWS = ON_MATRIX_CORES ? 1 : 2;  // rows of the cache of a lane's operand
constexpr int RUN_WORDS = SHORT_WORDS / CACHE_ROWS;  // words of each such row, and of a head, in a lane's operands
constexpr int RUN_TOKENS = 2 * RUN_WORDS;            // tokens of values in a lane's operand
// Lanes that share a head differ in bits from this one on.
constexpr int FIRST_HEAD_MASK = ON_MATRIX_CORES ? FIRST_ROW_MASK : 4;
DEVICE int cache_row(int lane) { return ON_MATRIX_CORES ? matrix_row(lane) : lane / 4; }
DEVICE int cache_run(int lane) { return ON_MATRIX_CORES ? matrix_run(lane) : lane % 4; }
DEVICE int operand_head(int lane) { return ON_MATRIX_CORES ? lane % 16 : lane / 4; }
// Of sum i = row * LANE_HEADS + head of the lane: the row of the cache and the head of the product.
DEVICE int sum_row(int lane, int row) { return ON_MATRIX_CORES ? lane_column(lane) + row : lane / 4 + row * 8; }
DEVICE int sum_head(int lane, int head) { return ON_MATRIX_CORES ? lane % 16 : lane % 4 * 2 + head; }

// d += cache * heads for the words of a lane's rows of the cache, row by row within each word of K, and of its head.
template <typename T, int WORDS>
DEVICE void
multiply_cache(float (&d)[PRODUCT_SUMS], const uint32_t (&cache)[WORDS * CACHE_ROWS], const uint32_t (&heads)[WORDS]) {
    if constexpr (ON_MATRIX_CORES) matrix_multiply<T>(d, heads, cache);
    else mma_m16n8k16<T>(d, cache, heads);
}

// The operand of a product from a lane's rows of the cache whose neighbours follow each other along K. word(row, i) is
// the i-th word of a row: of two elements of 16 bits, or of four of fp8.
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

// The operands of products from words of RUN_TOKENS tokens, each of the same neighbouring dimensions: those of a word are
// rows of OPERANDS operands.
constexpr int WORD_ELEMENTS = 4 / sizeof(cache_t), OPERANDS = WORD_ELEMENTS / CACHE_ROWS;
template <typename F>
DEVICE void operands_of_tokens(uint32_t (&operands)[OPERANDS][SHORT_WORDS], F word) {
#pragma unroll
    for (int k = 0; k < RUN_WORDS; ++k) {
        const uint32_t even = word(2 * k), odd = word(2 * k + 1);
        uint32_t pairs[WORD_ELEMENTS];  // of each dimension, two tokens
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
