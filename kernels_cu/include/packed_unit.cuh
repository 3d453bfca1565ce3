// packed_unit.cuh: what a lane of gemm_packed_mma.cu multiplies in a step: codes of columns, rows of a that meet them, and the
// scales and zero points of the columns.
//
// In a product of 16 rows of K, lane 4g + t has two columns h, and of each two pairs q of rows, as mma.cuh's fragment a.
// A warp has four such tiles of 16 columns. Which columns and rows of the unit these are is what the lane's words hold;
// where a pair is not of the rows that mma.cuh says, `Rows` takes a in the same order. Constants are the kernel's.
#pragma once
#include "dequant.cuh"
#include "gemm_epilogue.cuh"
#include "mma.cuh"

enum Layout { layout_marlin, layout_gptq, layout_exllama, layout_awq };

using codes_t = Codes<scalar_t, BITS, EXPONENT>;
using pair_t = Vec<scalar_t, 2>;
constexpr int TILE_N = 64;                                   // columns of a warp
constexpr int UNITS = 4, WORDS = 8;                          // of a step, and of a lane's unit
constexpr int UNIT_K = 128 / BITS, STEP_K = UNITS * UNIT_K;  // rows
constexpr int PRODUCTS = UNIT_K / 16;                        // of 16 rows, for a unit
constexpr int ROW_TILES = ceil_div(TILE_M, 8);               // of 8 rows of a
constexpr int A_CHUNKS = STEP_K / 8;                         // of 16 bytes, of a row of a
constexpr int GROUPS = GROUP_SIZE > 0 && GROUP_SIZE < STEP_K ? STEP_K / GROUP_SIZE : 1;  // of a step
constexpr int A_BYTES = TILE_M * A_CHUNKS * 16, SCALE_BYTES = HAS_SCALES ? TILE_N * 2 : 0;
constexpr int ZERO_BYTES = ZERO_CODES ? TILE_N * BITS / 8 : ADDED ? TILE_N * 2 : 0;
constexpr int STAGE_BYTES = A_BYTES + GROUPS * (SCALE_BYTES + ZERO_BYTES);
constexpr bool IS_GPTQ = LAYOUT == layout_gptq || LAYOUT == layout_exllama;
static_assert(GROUP_SIZE == 0 || GROUP_SIZE % STEP_K == 0 || STEP_K % GROUP_SIZE == 0);
static_assert(GROUP_SIZE == 0 || GROUP_SIZE % UNIT_K == 0 || (LAYOUT == layout_marlin && GROUP_SIZE % 16 == 0));
static_assert(TILE_M < 8 ? 8 % TILE_M == 0 : TILE_M == 8 || TILE_M % 16 == 0);
static_assert(!(ZERO_CODES && ADDED));

// A unit of a lane of the tile of columns that begins at `first_column`.
struct Unit {
    uint32_t words[WORDS];

    // Column number (tile, h) of lane 4g + t, of the 64.
    static DEVICE int column(int g, int tile, int h) {
        if constexpr (LAYOUT == layout_marlin) return 16 * tile + 8 * h + g;
        else if constexpr (IS_GPTQ) return 32 * h + 4 * g + tile;
        else return 8 * g + 2 * tile + h;
    }

    // Unit number `unit` of K. Rows that do not exist are replaced by ones that do: they meet zeros of a.
    DEVICE void load(const uint32_t* codes, int64_t unit, int64_t first_column, int64_t n, int64_t k) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        using four_t = Vec<uint32_t, 4>;
        if constexpr (LAYOUT == layout_awq) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const int64_t row = min(unit * UNIT_K + 8 * t + i, k - 1);
                words[i] = load_streaming(codes + (row * n + first_column) / 8 + g);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int64_t at;
                if constexpr (LAYOUT == layout_marlin) {
                    const int64_t tile = min(BITS == 4 ? unit * 2 + i : unit, k / 16 - 1);
                    at =
                        (tile * (n / 64) + first_column / 64) * (32 * BITS) + (BITS == 4 ? lane * 4 : lane * 8 + i * 4);
                } else {
                    at = min(unit * 4 + t, k * BITS / 32 - 1) * n + first_column + 32 * i + 4 * g;
                }
                const four_t four = four_t::load_once(codes + at);
#pragma unroll
                for (int j = 0; j < 4; ++j) words[i * 4 + j] = four.data[j];
            }
        }
    }

    // Pair q of rows of column (tile, h), in product number `product`.
    DEVICE pair_t pair(int product, int tile, int h, int q, const codes_t::Zero& zero) const {
        if constexpr (LAYOUT == layout_marlin) {
            if constexpr (BITS == 4) return codes_t::pair(words[4 * product + tile], 2 * h + q, zero);
            else return codes_t::pair(words[2 * tile + h], q, zero);
        } else if constexpr (IS_GPTQ) {
            return codes_t::pair(words[4 * h + tile], 2 * product + q, zero);
        } else {
            const int row = 4 * product + 2 * q;
            const uint32_t even = pack_halves<false>(words[row], words[row + 1]);
            const uint32_t odd = pack_halves<true>(words[row], words[row + 1]);
            return codes_t::pair(h ? odd : even, tile, zero);
        }
    }
};

// The rows of a of a step, in shared memory: chunks of 16 bytes, permuted so that the eight chunks that lanes read
// together, one of eight rows or four of two rows, lie on different banks.
struct Rows {
    const uint8_t* data;

    static DEVICE int place(int row, int chunk) {
        return (row * A_CHUNKS + (chunk ^ ((row & 1) << 2 | (row >> 1 & 3)))) * 16;
    }

    // What meets the unit's pairs: words of product `product` and of 8 rows of a.
    DEVICE void load(uint32_t (&b)[PRODUCTS][ROW_TILES][2], int unit) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        if constexpr (LAYOUT == layout_marlin && (TILE_M > 8 || PRODUCTS == 1)) {
            constexpr int TILES = ROW_TILES == 1 ? 1 : 2;
#pragma unroll
            for (int i = 0; i < PRODUCTS * ROW_TILES; i += TILES) {
                const int product = i / ROW_TILES, tile = i % ROW_TILES;
                const int row = TILES == 1 ? lane % 8 % TILE_M : tile * 8 + lane / 16 * 8 + lane % 8;
                uint32_t words[2 * TILES];
                ldmatrix<2 * TILES>(words, data + place(row, (unit * PRODUCTS + product) * 2 + lane / 8 % 2));
#pragma unroll
                for (int j = 0; j < 2 * TILES; ++j) b[product][tile + j / 2][j % 2] = words[j];
            }
        } else if constexpr (LAYOUT == layout_marlin) {
            uint32_t words[4];
            ldmatrix<4>(words, data + place(lane % 8 % TILE_M, unit * 4 + lane / 8));
#pragma unroll
            for (int j = 0; j < 4; ++j) b[j / 2 % PRODUCTS][0][j % 2] = words[j];
        } else {
            constexpr int PAIRS = UNIT_K / 8;  // words of a lane: rows of a word of codes
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                uint32_t words[PAIRS];
                const int row = tile * 8 + (TILE_M < 8 ? g % TILE_M : g);
                if constexpr (PAIRS == 2) {
                    const auto two = Vec<uint32_t, 2>::load(
                        reinterpret_cast<const uint32_t*>(data + place(row, unit * 2 + t / 2) + t % 2 * 8));
                    words[0] = two.data[0];
                    words[1] = two.data[1];
                } else {
#pragma unroll
                    for (int i = 0; i < PAIRS; i += 4) {
                        const auto four = Vec<uint32_t, 4>::load(
                            reinterpret_cast<const uint32_t*>(data + place(row, (unit * 4 + t) * (PAIRS / 4) + i / 4)));
#pragma unroll
                        for (int j = 0; j < 4; ++j) words[i + j] = four.data[j];
                    }
                }
#pragma unroll
                for (int i = 0; i < PAIRS; ++i) {
                    uint32_t& word = b[i / 2][tile][i % 2];
                    // Without an interleave, a pair of codes is rows i and i + PAIRS.
                    if constexpr (LAYOUT != layout_gptq) word = words[i];
                    else if (i % 2 == 0) word = pack_halves<false>(words[i / 2], words[i / 2 + PAIRS / 2]);
                    else word = pack_halves<true>(words[i / 2], words[i / 2 + PAIRS / 2]);
                }
            }
        }
    }
};

// Scales and zero points of a lane's columns in a group.
struct Terms {
    pair_t scales[4][2], added[4][2];
    codes_t::Zero zeros[4][2];

    // Entries of scalar_t of the lane's columns, from those of the tile, each twice.
    static DEVICE void spread(pair_t (&to)[4][2], const uint8_t* from) {
        const scalar_t* entries = reinterpret_cast<const scalar_t*>(from);
        const int g = threadIdx.x % 32 / 4;
        // Whether the columns of a lane lie one after another.
        constexpr bool MARLIN = LAYOUT == layout_marlin && SCALE_ORDER(8) == 1 && SCALE_ORDER(63) == 63;
        if constexpr (MARLIN || (LAYOUT == layout_awq && SCALE_ORDER(8) == 8)) {
            const auto eight = Vec<scalar_t, 8>::load(entries + 8 * g);
#pragma unroll
            for (int i = 0; i < 8; ++i) to[i / 2][i % 2] = twice(eight.data[i]);
        } else if constexpr (IS_GPTQ && SCALE_ORDER(8) == 8) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const auto four = Vec<scalar_t, 4>::load(entries + 32 * h + 4 * g);
#pragma unroll
                for (int i = 0; i < 4; ++i) to[i][h] = twice(four.data[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) to[i / 2][i % 2] = twice(entries[SCALE_ORDER(Unit::column(g, i / 2, i % 2))]);
        }
    }

    // Of group number `group` of the step.
    DEVICE void load(const uint8_t* groups, int group) {
        const uint8_t* points = groups + GROUPS * SCALE_BYTES + group * ZERO_BYTES;
        if constexpr (HAS_SCALES) spread(scales, groups + group * SCALE_BYTES);
        if constexpr (ADDED) spread(added, points);
        const int g = threadIdx.x % 32 / 4;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(points);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int tile = i / 2, h = i % 2;
            uint32_t point = ZERO_POINT;
            if constexpr (ZERO_CODES && IS_GPTQ) {
                constexpr int FIELDS = 32 / BITS;
                const int first = 32 * h + 4 * g;
                point += words[first / FIELDS] >> (first % FIELDS + tile) * BITS & ((1 << BITS) - 1);
            } else if constexpr (ZERO_CODES) {
                point += words[g] >> (tile + 4 * h) * 4 & 15;  // the columns of a lane, even ones in the lower half
            }
            zeros[tile][h] = codes_t::zero(point);
        }
    }

    // The pair of the weight in column (tile, h).
    DEVICE uint32_t weight(pair_t pair, int tile, int h) const {
        if constexpr (codes_t::IS_FLOAT && !FOLDED) pair = pair * pair_t::full(codes_t::FACTOR);
        if constexpr (ADDED)
            multiply_add_pair<scalar_t>(pair.data, pair.data, scales[tile][h].data, added[tile][h].data);
        else if constexpr (HAS_SCALES) pair = pair * scales[tile][h];
        return pair.template word<2>(0);
    }

private:
    static DEVICE pair_t twice(scalar_t x) {
        pair_t pair;
        pair.data[0] = pair.data[1] = x;
        return pair;
    }
};
