// packed_weight.cuh: how wq_gemm_sm90.cu loads a k-tile of a packed weight by TMA and reads it from shared memory as
// register fragments: the quants, and the scale and zero point of each column.
//
// In an MMA of 16 rows of K and 16 columns, lane 4g + t of a warp has columns g + 8h (h: 0, 1), and in each the row
// pairs 2t + 8q, 2t + 8q + 1 (q: 0, 1): the A fragment of mma.cuh.
//
// A k-tile is 64 rows (layout_marlin: 64 * BOXES) and TILE_N columns. TMA loads its packed words; the tensor map has
// these dimensions, innermost first:
//
//     layout_marlin     [32 BITS, N / 64, K / 16], boxes of 32 BITS x TILE_N / 64 x 4 BOXES: whole tiles
//     layout_gptq       [N, K BITS / 32, 1], boxes of TILE_N x 2 BITS x 1; layout_exllama likewise
//     layout_awq        [N / 8, K, 1], boxes of TILE_N / 8 x 64 x 1, rows swizzled by their size
//     layout_marlin_8   [128, N / 32, K / 32], boxes of 128 x TILE_N / 32 x 2: whole tiles
//     layout_n32k16     [K, N / 4, 1], boxes of 64 x TILE_N / 4 x 1: a word of four columns for each row
//
// With layout_marlin_8, pair q has rows 4t + q and 4t + q + 2 instead. The columns of a are permuted to match
// (gather_columns.cu).
//
// Constants
//     BITS, EXPONENT    type of a quant: dequant.cuh
//     LAYOUT        layout of the quants: packed_layouts.py
//     RECODED       whether `marlin_int4_fp8_preprocess` has re-encoded the quants
//     HAS_SCALES    whether groups have scales
//     scale_t, SCALE    storage type of a scale, and the function that decodes it: group_scale.cuh
//     GROUP_SCALE_EXPONENT    a scale is the stored value times 2^GROUP_SCALE_EXPONENT
//     SCALE_ORDER   column_permutation.cuh's function for the columns of scales, and of zeros that are ADDED
//     ZERO_CODES    groups have packed integer zero points, to which ZERO_POINT is added; otherwise ZERO_POINT is
//                   the zero point of every group
//     ZERO_FLOATS   groups have zero points of type scalar_t, to which ZERO_POINT is added, and no scales: the
//                   difference from a quant is rounded
//     ADDED         groups have `zeros` of type scalar_t, which are added after scaling
//     GROUP_SIZE    rows of a group: a multiple or a divisor of the k-tile; 0: all rows are one group
#pragma once
#include "column_permutation.cuh"
#include "dequant.cuh"
#include "group_scale.cuh"
#include "mma.cuh"
#include "tma.cuh"

constexpr bool IS_TABLE = LAYOUT == layout_w4a8;  // whether weights come from the lookup table of packed_table.cuh
using number_t = conditional_t<IS_TABLE, bf16_t, scalar_t>;
using quants_t = Quants<number_t, BITS, EXPONENT>;
using pair_t = Vec<number_t, 2>;
constexpr bool IS_GPTQ = LAYOUT == layout_gptq || LAYOUT == layout_exllama;
static_assert(BITS == 4 || (BITS == 8 && LAYOUT != layout_awq && LAYOUT != layout_marlin_8) || (BITS == 2 && IS_GPTQ));

// The quants of a lane for one WGMMA.
struct LaneQuants {
    static constexpr int WORDS = LAYOUT == layout_awq ? 8 : IS_GPTQ ? 4 : LAYOUT == layout_marlin_8 ? 2 : BITS / 4;
    uint32_t words[WORDS];

    static DEVICE void load(uint8_t* to, const TensorMap* map, uint64_t* barrier, int step, int first_column) {
        if constexpr (LAYOUT == layout_marlin) tma_load(to, map, barrier, 0, first_column / 64, step * (BOXES * 4));
        else if constexpr (IS_GPTQ) tma_load(to, map, barrier, first_column, step * 2 * BITS, 0);
        else if constexpr (LAYOUT == layout_marlin_8) tma_load(to, map, barrier, 0, first_column / 32, step * 2);
        else if constexpr (LAYOUT == layout_n32k16) tma_load(to, map, barrier, step * 64, first_column / 4, 0);
        else tma_load(to, map, barrier, first_column / 8, step * 64, 0);
    }

    // Reads the lane's quants in k-slice `slice` (16 rows), for the PRODUCTS adjacent WGMMAs of warp `warp`.
    template <int PRODUCTS>
    static DEVICE void read(LaneQuants (&quants)[PRODUCTS], const uint8_t* step, int slice, int warp) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = warp * PRODUCTS;
        const uint32_t* from = reinterpret_cast<const uint32_t*>(step);
        constexpr int COLUMNS = 128 * PRODUCTS;
        if constexpr (LAYOUT == layout_marlin) {
            // A Marlin tile has, lane by lane, that lane's words for 64 columns, in order of the 16-column blocks.
            using run_t = Vec<uint32_t, PRODUCTS * WORDS>;
            const auto run = run_t::load(from + ((slice * (COLUMNS / 64) + first / 4) * 32 + lane) * (4 * WORDS) +
                                         first % 4 * WORDS);
#pragma unroll
            for (int i = 0; i < PRODUCTS * WORDS; ++i) quants[i / WORDS].words[i % WORDS] = run.data[i];
        } else if constexpr (LAYOUT == layout_marlin_8) {
            // A tile of 32 columns and 32 rows has, lane by lane, that lane's words, in order of the 8-column blocks.
            using run_t = Vec<uint32_t, PRODUCTS * WORDS>;
            const auto run =
                run_t::load(from + ((slice / 2 * (COLUMNS / 32) + first / 2) * 32 + lane) * 4 + first % 2 * WORDS);
#pragma unroll
            for (int i = 0; i < PRODUCTS * WORDS; ++i) {
                const uint32_t word = RECODED ? recoded_plus_8(run.data[i]) : run.data[i];
                quants[i / WORDS].words[i % WORDS] = word >> slice % 2 * BITS;  // rows of a word: 0 16 1 17 2 18 3 19
            }
        } else if constexpr (LAYOUT == layout_n32k16) {
            // The lane's words for 32 columns are adjacent, in order of the 8-column blocks.
            using run_t = Vec<uint32_t, PRODUCTS * WORDS>;
            const auto run = run_t::load(from + (first / 2 * 8 + g) * 64 + slice * 16 + t * 4 + first % 2 * WORDS);
#pragma unroll
            for (int i = 0; i < PRODUCTS * WORDS; ++i) quants[i / WORDS].words[i % WORDS] = run.data[i];
        } else if constexpr (IS_GPTQ) {
#pragma unroll
            for (int i = 0; i < PRODUCTS * 4; ++i) {
                const int q = i / 2 % 2, h = i % 2, row = slice * 16 + 8 * q + 2 * t;
                const uint32_t word = from[row * BITS / 32 * COLUMNS + (first + i / 4) * 16 + 8 * h + g];
                quants[i / 4].words[i % 4] =
                    word >> (LAYOUT == layout_exllama ? row % (32 / BITS) / 2 : row % (32 / BITS)) * BITS;
            }
        } else {
            // A row is COLUMNS / 8 words. TMA swizzles it: bits of the row number are xor-ed into the 16-byte chunk
            // index.
            constexpr int ROW_BYTES = COLUMNS / 2;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = slice * 16 + i / 2 * 8 + 2 * t + i % 2, column = first * 8;
                const int chunk = column / 16 ^ row * ROW_BYTES / 128 % (ROW_BYTES / 16);
                const auto run =
                    Vec<uint32_t, 2 * PRODUCTS>::load(from + (row * ROW_BYTES + chunk * 16 + column % 16) / 4);
#pragma unroll
                for (int j = 0; j < 2 * PRODUCTS; ++j) {
                    // Column order of the nibbles of a word: 0 2 4 6 1 3 5 7.
                    quants[j / 2].words[i * 2 + j % 2] = run.data[j] >> (g / 2 * 4 + g % 2 * 16);
                }
            }
        }
    }

    // Row pair q of column h: quant - zero point, not yet scaled.
    DEVICE pair_t pair(const quants_t& decode, int h, int q, const quants_t::Zero& zero) const {
        if constexpr (LAYOUT == layout_marlin) {
            if constexpr (BITS == 4) return decode.pair(words[0], 2 * h + q, zero);
            else return decode.pair(words[h], q, zero);
        } else if constexpr (LAYOUT == layout_marlin_8) {
            return decode.pair(words[h], 2 * q, zero);
        } else if constexpr (LAYOUT == layout_n32k16) {
            return decode.pair(__byte_perm(words[h], 0, 0x3120), q,
                               zero);  // bytes 1 and 2 swap: pairs of adjacent rows
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

// Offsets of a column within a group's row: of its scale (entry), and of its packed zero point (word, shift).
struct Place { int entry, word, shift; };
DEVICE Place place_of(int column) {
    constexpr int FIELDS = 32 / BITS;
    const int place = LAYOUT == layout_marlin ? int(column_marlin_64(column)) : column, field = place % FIELDS;
    const int shift = IS_GPTQ ? field : field / 2 + field % 2 * (FIELDS / 2);
    return {int(SCALE_ORDER(column)), place / FIELDS, shift * BITS};
}

// The scale and the zero point of a column, each in both halves of a pair.
struct Terms {
    pair_t scale, added;
    quants_t::Zero zero;

    // Loads them for the column at `place`, group `group` of the k-tile. Zero points begin `scale_bytes` after the
    // scales.
    DEVICE void load(const uint8_t* groups, int scale_bytes, int group, const Place& place) {
        const uint8_t* points = groups + scale_bytes;
        const int entry = group * TILE_N + place.entry;
        if constexpr (HAS_SCALES) scale = twice(reinterpret_cast<const scale_t*>(groups)[entry]);
        if constexpr (ADDED || ZERO_FLOATS) added = twice(reinterpret_cast<const number_t*>(points)[entry]);
        if constexpr ((ADDED || ZERO_FLOATS) && quants_t::SUM_FACTOR != 1.0f) {
            added = added * pair_t::full(1.0f / quants_t::SUM_FACTOR);
        }
        uint32_t point = ZERO_POINT;
        if constexpr (ZERO_CODES) {
            const uint32_t word = reinterpret_cast<const uint32_t*>(points)[group * (TILE_N * BITS / 32) + place.word];
            point += word >> place.shift & ((1 << BITS) - 1);
        }
        zero = quants_t::zero(point);
    }

    // Row pair q of column h, dequantized.
    DEVICE uint32_t weight(const quants_t& decode, const LaneQuants& quants, int h, int q) const {
        pair_t pair = quants.pair(decode, h, q, zero);
        // The two factors are separate only to stay in range; together they often cancel to 1.
        constexpr float FACTOR = quants_t::FACTOR * power_of_two(GROUP_SCALE_EXPONENT);
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
