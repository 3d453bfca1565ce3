// packed_weight.cuh: how wq_gemm_sm90.cu reads a step of a weight from shared memory: codes, and the terms of columns.
//
// In a product of 16 rows of K, lane 4g + t of a warp has columns g + 8h (h: 0, 1) of 16, and of each the pairs q of rows
// 2t + 8q and the next, as the fragment a of mma.cuh.
//
// A step is 64 rows, of layout_marlin BOXES times as many, and TILE_N columns. The copy engine brings its words of codes;
// the tensor's map is, from the fastest dimension on,
//
//     layout_marlin     [32 BITS, N / 64, K / 16], boxes of 32 BITS x TILE_N / 64 x 4 BOXES: whole tiles
//     layout_gptq       [N, K BITS / 32, 1], boxes of TILE_N x 2 BITS x 1; layout_exllama likewise
//     layout_awq        [N / 8, K, 1], boxes of TILE_N / 8 x 64 x 1, rows swizzled by their size
//     layout_marlin_8   [128, N / 32, K / 32], boxes of 128 x TILE_N / 32 x 2: whole tiles
//     layout_n32k16     [K, N / 4, 1], boxes of 64 x TILE_N / 4 x 1: a word of four columns for each row
//
// Of layout_marlin_8, pairs are of other rows: pair q of rows 4t + q and 4t + q + 2. Columns of a lie in that order, as
// gather_columns.cu leaves them.
//
// Constants
//     BITS, EXPONENT    of a code: dequant.cuh
//     LAYOUT        of the codes: packed_layouts.py
//     RECODED       whether codes are those of `marlin_int4_fp8_preprocess`
//     HAS_SCALES    whether groups have scales
//     scale_t, SCALE    type of an entry of scales and what it is: group_scale.cuh
//     GROUP_SCALE_EXPONENT    a scale is its entry times two to this
//     SCALE_ORDER   column_permutation.cuh's function for the columns of scales, and of zeros that are ADDED
//     ZERO_CODES    zero points of groups are codes, to which ZERO_POINT is added; else ZERO_POINT is that of all codes
//     ZERO_FLOATS   zero points of groups, of columns without scales, are numbers of scalar_t, to which ZERO_POINT is added:
//                   the difference from a code is rounded
//     ADDED         `zeros` are numbers of scalar_t
//     GROUP_SIZE    rows of a group: a multiple or a divisor of a step; 0: all rows are one group
#pragma once
#include "column_permutation.cuh"
#include "dequant.cuh"
#include "group_scale.cuh"
#include "mma.cuh"
#include "tma.cuh"

constexpr bool IS_TABLE = LAYOUT == layout_w4a8;  // whether codes are those of packed_table.cuh
using number_t = conditional_t<IS_TABLE, bf16_t, scalar_t>;
using codes_t = Codes<number_t, BITS, EXPONENT>;
using pair_t = Vec<number_t, 2>;
constexpr bool IS_GPTQ = LAYOUT == layout_gptq || LAYOUT == layout_exllama;
static_assert(BITS == 4 || (BITS == 8 && LAYOUT != layout_awq && LAYOUT != layout_marlin_8) || (BITS == 2 && IS_GPTQ));

// The codes of a lane in a product.
struct Code {
    static constexpr int WORDS = LAYOUT == layout_awq ? 8 : IS_GPTQ ? 4 : LAYOUT == layout_marlin_8 ? 2 : BITS / 4;
    uint32_t words[WORDS];

    static DEVICE void load(uint8_t* to, const TensorMap* map, uint64_t* barrier, int step, int first_column) {
        if constexpr (LAYOUT == layout_marlin) tma_load(to, map, barrier, 0, first_column / 64, step * (BOXES * 4));
        else if constexpr (IS_GPTQ) tma_load(to, map, barrier, first_column, step * 2 * BITS, 0);
        else if constexpr (LAYOUT == layout_marlin_8) tma_load(to, map, barrier, 0, first_column / 32, step * 2);
        else if constexpr (LAYOUT == layout_n32k16) tma_load(to, map, barrier, step * 64, first_column / 4, 0);
        else tma_load(to, map, barrier, first_column / 8, step * 64, 0);
    }

    // Of the products side by side of warp `warp`, and of slice number `slice` of 16 rows.
    template <int PRODUCTS>
    static DEVICE void read(Code (&code)[PRODUCTS], const uint8_t* step, int slice, int warp) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = warp * PRODUCTS;
        const uint32_t* from = reinterpret_cast<const uint32_t*>(step);
        constexpr int COLUMNS = 128 * PRODUCTS;
        if constexpr (LAYOUT == layout_marlin) {
            // The tile's lane has words of 64 columns, those of 16 columns after the other.
            using run_t = Vec<uint32_t, PRODUCTS * WORDS>;
            const auto run = run_t::load(from + ((slice * (COLUMNS / 64) + first / 4) * 32 + lane) * (4 * WORDS) +
                                         first % 4 * WORDS);
#pragma unroll
            for (int i = 0; i < PRODUCTS * WORDS; ++i) code[i / WORDS].words[i % WORDS] = run.data[i];
        } else if constexpr (LAYOUT == layout_marlin_8) {
            // The lane has words of 32 columns and 32 rows, those of 8 columns after the other.
            using run_t = Vec<uint32_t, PRODUCTS * WORDS>;
            const auto run =
                run_t::load(from + ((slice / 2 * (COLUMNS / 32) + first / 2) * 32 + lane) * 4 + first % 2 * WORDS);
#pragma unroll
            for (int i = 0; i < PRODUCTS * WORDS; ++i) {
                const uint32_t word = RECODED ? recoded_plus_8(run.data[i]) : run.data[i];
                code[i / WORDS].words[i % WORDS] = word >> slice % 2 * BITS;  // rows of a word: 0 16 1 17 2 18 3 19
            }
        } else if constexpr (LAYOUT == layout_n32k16) {
            // The lane has words of 32 columns, those of 8 columns after the other.
            using run_t = Vec<uint32_t, PRODUCTS * WORDS>;
            const auto run = run_t::load(from + (first / 2 * 8 + g) * 64 + slice * 16 + t * 4 + first % 2 * WORDS);
#pragma unroll
            for (int i = 0; i < PRODUCTS * WORDS; ++i) code[i / WORDS].words[i % WORDS] = run.data[i];
        } else if constexpr (IS_GPTQ) {
#pragma unroll
            for (int i = 0; i < PRODUCTS * 4; ++i) {
                const int q = i / 2 % 2, h = i % 2, row = slice * 16 + 8 * q + 2 * t;
                const uint32_t word = from[row * BITS / 32 * COLUMNS + (first + i / 4) * 16 + 8 * h + g];
                code[i / 4].words[i % 4] =
                    word >> (LAYOUT == layout_exllama ? row % (32 / BITS) / 2 : row % (32 / BITS)) * BITS;
            }
        } else {
            // A row is COLUMNS / 8 words; bits of its number are in those of the 16 bytes.
            constexpr int ROW_BYTES = COLUMNS / 2;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = slice * 16 + i / 2 * 8 + 2 * t + i % 2, column = first * 8;
                const int chunk = column / 16 ^ row * ROW_BYTES / 128 % (ROW_BYTES / 16);
                const auto run =
                    Vec<uint32_t, 2 * PRODUCTS>::load(from + (row * ROW_BYTES + chunk * 16 + column % 16) / 4);
#pragma unroll
                for (int j = 0; j < 2 * PRODUCTS; ++j) {
                    // Columns of a word: 0 2 4 6 1 3 5 7.
                    code[j / 2].words[i * 2 + j % 2] = run.data[j] >> (g / 2 * 4 + g % 2 * 16);
                }
            }
        }
    }

    // Pair q of rows of column h.
    DEVICE pair_t pair(const codes_t& decode, int h, int q, const codes_t::Zero& zero) const {
        if constexpr (LAYOUT == layout_marlin) {
            if constexpr (BITS == 4) return decode.pair(words[0], 2 * h + q, zero);
            else return decode.pair(words[h], q, zero);
        } else if constexpr (LAYOUT == layout_marlin_8) {
            return decode.pair(words[h], 2 * q, zero);
        } else if constexpr (LAYOUT == layout_n32k16) {
            return decode.pair(__byte_perm(words[h], 0, 0x3120), q, zero);  // rows of a pair are neighbours
        } else if constexpr (LAYOUT == layout_awq) {
            return decode.pair(pack_halves<false>(words[q * 4 + h], words[q * 4 + 2 + h]), 0, zero);
        } else if constexpr (LAYOUT == layout_exllama) {
            return decode.pair(words[2 * q + h], 0, zero);
        } else {
            constexpr uint32_t TWO = (1u << 2 * BITS) - 1;
            const uint32_t both = words[2 * q + h] & TWO;
            return decode.pair(both | both << (16 - BITS), 0, zero);
        }
    }
};

// Where a column of the tile has its scale, and its zero point among codes, in a row of a group.
struct Place { int entry, word, shift; };
DEVICE Place place_of(int column) {
    constexpr int FIELDS = 32 / BITS;
    const int place = LAYOUT == layout_marlin ? int(column_marlin_64(column)) : column, field = place % FIELDS;
    const int shift = IS_GPTQ ? field : field / 2 + field % 2 * (FIELDS / 2);
    return {int(SCALE_ORDER(column)), place / FIELDS, shift * BITS};
}

// The scale and the zero point of a column, twice each.
struct Terms {
    pair_t scale, added;
    codes_t::Zero zero;

    // Of the column with this place, in group number `group` of the step. Zero points are `scale_bytes` behind scales.
    DEVICE void load(const uint8_t* groups, int scale_bytes, int group, const Place& place) {
        const uint8_t* points = groups + scale_bytes;
        const int entry = group * TILE_N + place.entry;
        if constexpr (HAS_SCALES) scale = twice(reinterpret_cast<const scale_t*>(groups)[entry]);
        if constexpr (ADDED || ZERO_FLOATS) added = twice(reinterpret_cast<const number_t*>(points)[entry]);
        if constexpr ((ADDED || ZERO_FLOATS) && codes_t::SUM_FACTOR != 1.0f) {
            added = added * pair_t::full(1.0f / codes_t::SUM_FACTOR);
        }
        uint32_t point = ZERO_POINT;
        if constexpr (ZERO_CODES) {
            const uint32_t word = reinterpret_cast<const uint32_t*>(points)[group * (TILE_N * BITS / 32) + place.word];
            point += word >> place.shift & ((1 << BITS) - 1);
        }
        zero = codes_t::zero(point);
    }

    // Pair q of rows of column h as numbers.
    DEVICE uint32_t weight(const codes_t& decode, const Code& code, int h, int q) const {
        pair_t pair = code.pair(decode, h, q, zero);
        // Of two factors that are apart for their size alone, one is often the inverse of the other.
        constexpr float FACTOR = codes_t::FACTOR * power_of_two(GROUP_SCALE_EXPONENT);
        if constexpr (FACTOR != 1.0f) pair = pair * pair_t::full(FACTOR);
        if constexpr (ZERO_FLOATS) pair = pair - added;
        if constexpr (ADDED) multiply_add_pair<number_t>(pair.data, pair.data, scale.data, added.data);
        else if constexpr (HAS_SCALES) pair = pair * scale;
        return pair.template word<2>(0);
    }

private:
    template <typename T>
    static DEVICE pair_t twice(T x) {
        if constexpr (is_same<T, number_t>) {
            pair_t pair;
            pair.data[0] = pair.data[1] = x;
            return pair;
        } else {
            return pair_t::full(SCALE<T>(&x, 0));
        }
    }
};
