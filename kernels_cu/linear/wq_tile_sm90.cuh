// wq_tile_sm90.cuh: the tile of wq_gemm_sm90, from the constants of that kernel: the bytes of a stage, the WGMMAs of a
// k-tile, and the columns of a lane.
#pragma once
#include "packed_table.cuh"

constexpr int CONSUMER_WARPS = 8, ROW_BYTES = 128, TILE_K = BOXES * ROW_BYTES / sizeof(scalar_t);
constexpr int PRODUCT_K = 32 / sizeof(scalar_t);                   // K of one WGMMA, in rows of w
constexpr int PRODUCTS = TILE_N / 128, PARTS = BOXES * 4 / CHUNK;  // WGMMAs along N of a warpgroup; parts of a k-tile
constexpr int GROUPS = GROUP_SIZE > 0 && GROUP_SIZE < TILE_K ? TILE_K / GROUP_SIZE : 1;  // groups of a k-tile
constexpr int BOX_BYTES = TILE_M * ROW_BYTES, A_BYTES = BOXES * BOX_BYTES, QUANT_BYTES = TILE_K * TILE_N * BITS / 8;
constexpr int SCALE_BYTES = HAS_SCALES ? GROUPS * TILE_N * (IS_TABLE ? 8 : sizeof(scale_t)) : 0;
constexpr int ZERO_BYTES = ZERO_CODES ? GROUPS * TILE_N * BITS / 8 : ADDED || ZERO_FLOATS ? GROUPS * TILE_N * 2 : 0;
constexpr int LOAD_BYTES = A_BYTES + QUANT_BYTES + SCALE_BYTES + ZERO_BYTES;
constexpr int STAGE_BYTES = ceil_div(LOAD_BYTES, 1024) * 1024;
constexpr bool TMA_STORE = TILE_M > 64 && !GROUPED;  // an expert's rows are scattered over out
// Large accumulators: a whole producer warpgroup is launched, to give its registers to the consumers (setmaxnreg).
constexpr bool REGISTER_REALLOC = PRODUCTS * TILE_M * (APART ? 2 : 1) > 128;
constexpr int NUM_THREADS = REGISTER_REALLOC ? 384 : 32 * (CONSUMER_WARPS + 1);
constexpr int WARP_FRAGMENTS = PRODUCTS * TILE_M / 8, FRAGMENTS = CONSUMER_WARPS * WARP_FRAGMENTS;
static_assert(TILE_M % 16 == 0 && TILE_M <= 256 && (TILE_N == 128 || TILE_N == 256) && (CHUNK == 1 || CHUNK == 2));
static_assert(GROUP_SIZE == 0 || GROUP_SIZE % TILE_K == 0 || (TILE_K % GROUP_SIZE == 0 && GROUP_SIZE % PRODUCT_K == 0));
static_assert(!IS_TABLE || (HAS_SCALES && BITS == 4));
static_assert(!RECODED || (ZERO_POINT == 8 && EXPONENT == 0));
static_assert(EXPONENT == 0 || (!ZERO_CODES && ZERO_POINT == 0), "floats have no zero points");
static_assert(HAS_SCALES || (!ADDED && GROUP_SCALE_EXPONENT == 0));
static_assert((!CUT || (SPLITS == 1 && !GROUPED)) && (NEIGHBOURS == 1 || (TMA_STORE && NEIGHBOURS == 2)));
static_assert((!APART || (CHUNK == 2 && PRODUCTS * TILE_M <= 128)) && (BOXES == 1 || lane_quants_t::TWO_BOXES));
static_assert(!GROUPED || SPLITS == 1);
static_assert((SPLITS == 1 || !TMA_STORE) && !GATED && BIAS <= 1 && AZP == 0);

using quants_box_t = typename layout_t::template TmaBox<TILE_K>;
constexpr float SUM_FACTOR = IS_TABLE ? 1.0f : quants_t::SUM_FACTOR;
using terms_t = conditional_t<IS_TABLE, TableTerms, Terms>;
// A warp's accumulators: one WGMMA has 64 columns of w, its M, and TILE_M rows of a, its N.
using accum_t = float[PRODUCTS][TILE_M / 2];

// The column, within the tile, of half h (accumulator rows 0-7 or 8-15 of the warp) of WGMMA `product`.
DEVICE int column_of(int warp, int product, int h, int lane) {
    return (warp * PRODUCTS + product) * 16 + h * 8 + lane / 4;
}
