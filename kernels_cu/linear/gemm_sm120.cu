// gemm_sm120: a GEMM of block-scaled operands on tensor cores that apply the scales: sm_120a and sm_121a.
//
//     accum[m, n] = sum_k (a[m, k] * a_block_scales[m, k / BLOCK]) * (b[n, k] * b_block_scales[n, k / BLOCK])
//     out[m, n] = the epilogue of gemm_epilogue.cuh applied to accum[m, n]
//
// grouped_gemm_sm120: the same for MoE; e is the expert of row t, and its scales are in row scale_rows[t].
//
//     accum[t, n] = sum_k (a[t, k] * a_block_scales[scale_rows[t], k / BLOCK]) *
//                         (b[e, n, k] * b_block_scales[e, n, k / BLOCK])
//     out[t, n] = the epilogue of grouped.cuh applied to accum[t, n]; a row of scales out of range stands for a[t] = 0
//
// Operands are bytes: e4m3 values, or two e2m1 values to a byte, the first in its lower half; sizes and strides of K
// are in bytes, and rows begin at multiples of 16. Block scales are in tiles of 128 rows and 4 columns: the scales of
// row r, columns 4 w to 4 w + 3, are a word at byte
//
//     (r / 128 * words + w) * 512 + r % 32 * 16 + r / 32 % 4 * 4,    words = ceil(K / BLOCK / 4)
//
// Blocks, warps, split-K, k-tiles and stages are those of gemm_sm80.cu. A stage also has the words of scales of its
// rows. A lane loads the scales of row lane % 4 * 8 + lane / 4 of each 32 rows of a or of b: two MMA tiles of a or four
// of b take their scales from one register (mma_block_scaled.cuh).
//
// Constants
//     QUANT_BITS    bits of a value. 4: e2m1; 8: e4m3
//     BLOCK         values under one scale: 16 (e4m3 scales, read without their sign) or 32 (e8m0 scales)
//     WHOLE_WORDS   whether K is a multiple of 4 BLOCK. Otherwise the last word also has scales of no values, which may be
//                   anything, and are set to 0
//     others        as of gemm_sm80.cu, without gated activations and zero points

constexpr int WARPS_K = 1;  // team
#include "gemm_tile.cuh"
#include "grouped_tile.cuh"
#include "mainloop_sm80.cuh"
#include "mma_block_scaled.cuh"

static_assert(GATED == 0 && VEC_SIZE == 16 && (WARP_N == 16 || WARP_N % 32 == 0));

using quant_t = conditional_t<QUANT_BITS == 4, fp4_e2m1_t, fp8_e4m3_t>;
constexpr int WORDS = 128 * 8 / QUANT_BITS / BLOCK / 4;  // words of scales of a row in a k-tile
constexpr int TILE_ROWS = TILE_M + TILE_N;
constexpr int ACCUMULATORS = ROW_TILES * COLUMN_TILES * PRODUCT_SUMS;  // of a thread
constexpr int SCALED_STAGE_BYTES = STAGE_BYTES + WORDS * TILE_ROWS * 4;
constexpr int SCALE_COPIES = ceil_div(TILE_ROWS, NUM_THREADS);  // rows with scales that a thread copies
constexpr int WORD_DISTANCE = 512;                              // bytes from a row's word of scales to its next one

// The byte offset of a row's first word of scales.
DEVICE int64_t scale_offset(int64_t row, int64_t words) {
    return row / 128 * words * WORD_DISTANCE + row % 32 * 16 + row / 32 % 4 * 4;
}

// The copies of scales to stages: those of the rows of a, then of b.
struct ScaleCopies {
    const uint8_t* rows[SCALE_COPIES];  // the thread's next words
    uint32_t exist;                     // a bit of each row
    int64_t left;                       // words of a row from the next k-tile on
    uint32_t last_mask;                 // of the scales in the last word

    DEVICE void load(uint32_t* stage) {
#pragma unroll
        for (int i = 0; i < SCALE_COPIES; ++i) {
            const int row = threadIdx.x + i * NUM_THREADS;
            if (TILE_ROWS % NUM_THREADS != 0 && row >= TILE_ROWS) continue;
#pragma unroll
            for (int word = 0; word < WORDS; ++word) {
                uint32_t* const to = stage + word * TILE_ROWS + row;
                const uint8_t* const from = rows[i] + word * WORD_DISTANCE;
                const bool exists = exist >> i & 1;
                if (WHOLE_WORDS || word != left - 1) cp_async<4>(to, from, exists && word < left);
                else *to = exists ? *reinterpret_cast<const uint32_t*>(from) & last_mask : 0;
            }
            rows[i] += WORDS * WORD_DISTANCE;
        }
        left -= WORDS;
    }
};

// The copies from word `first` on, of rows with `blocks` scales. a_row(i) and b_row(i) give the row of scales of row i
// of the tile, negative if there is none.
template <typename RowOfA, typename RowOfB>
DEVICE ScaleCopies scale_copies(const uint8_t* a_scales, const uint8_t* b_scales, int64_t blocks, int64_t first,
                                const RowOfA& a_row, const RowOfB& b_row) {
    const int64_t words = (blocks + 3) / 4;
    ScaleCopies found{{}, 0, words - first, ~0u >> (words * 4 - blocks) * 8};
#pragma unroll
    for (int i = 0; i < SCALE_COPIES; ++i) {
        const int local = min(int(threadIdx.x) + i * NUM_THREADS, TILE_ROWS - 1);
        const int64_t row = local < TILE_M ? a_row(local) : b_row(local - TILE_M);
        const int64_t offset = scale_offset(max(row, int64_t(0)), words) + first * WORD_DISTANCE;
        found.rows[i] = (local < TILE_M ? a_scales : b_scales) + offset;
        found.exist |= uint32_t(row >= 0) << i;
    }
    return found;
}

// The operands of a warp's MMAs for 32 bytes of K, and their scales.
struct ScaledFragments {
    Fragments<scalar_t, LOAD_WORDS> values;
    uint32_t row_scales[ceil_div(WARP_M, 32)], column_scales[ceil_div(WARP_N, 32)];

    DEVICE void load(const tile_t& stage, const uint32_t* scales, int a_row, int b_row, int part) {
        values.load(stage, a_row, b_row, part);
        const int lane = threadIdx.x % WARP_SIZE, row = lane % 4 * 8 + lane / 4;
        const uint32_t* const word = scales + part * WORDS / 4 * TILE_ROWS;
#pragma unroll
        for (int i = 0; i < ceil_div(WARP_M, 32); ++i) row_scales[i] = word[a_row + i * 32 + row % min(WARP_M, 32)];
#pragma unroll
        for (int j = 0; j < ceil_div(WARP_N, 32); ++j) column_scales[j] = word[b_row + j * 32 + row % min(WARP_N, 32)];
    }
    DEVICE void multiply(float (&accum)[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS], int part) const {
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            const uint32_t columns[2] = {values.columns[j / 2][j % 2 * 2], values.columns[j / 2][j % 2 * 2 + 1]};
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i) {
                mma_block_scaled<quant_t, BLOCK>(accum[i][j], values.rows[i], columns, row_scales[i / 2],
                                                 column_scales[j / 4], part * WORDS % 4, i % 2, j % 4);
            }
        }
    }
};

// Adds the MMAs of `steps` k-tiles to the accumulators of a warp, as multiply_tile does. `left`: bytes of a row of a or
// b from the thread's first chunk on.
template <typename RowsOfA, typename RowsOfB>
DEVICE void
multiply_scaled(float (&accum)[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS], const RowsOfA& a_rows, const RowsOfB& b_rows,
                ScaleCopies scales, uint4* memory, int64_t left, int steps, int warp_row, int warp_column) {
    uint8_t* const stages = reinterpret_cast<uint8_t*>(memory);
    const auto stage_of = [&](int slot) {
        return tile_t{reinterpret_cast<uint16_t*>(stages + slot * SCALED_STAGE_BYTES)};
    };
    const auto scales_of = [&](int slot) {
        return reinterpret_cast<uint32_t*>(stages + slot * SCALED_STAGE_BYTES + STAGE_BYTES);
    };
    OperandCopies<TILE_M, RowsOfA> a(a_rows);
    OperandCopies<TILE_N, RowsOfB> b(b_rows);
    const auto load = [&](int slot) {
        a.load(stage_of(slot), 0, 1, left);
        b.load(stage_of(slot), TILE_M, 1, left);
        scales.load(scales_of(slot));
        left -= STEP;
        cp_async_commit();
    };
    for (int step = 0; step < STAGES - 1; ++step) load(step);
    multiply_ahead<ScaledFragments>(
        steps, load,
        [](int) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
        },
        [&](ScaledFragments& operands, int slot, int part) {
            operands.load(stage_of(slot), scales_of(slot), warp_row, TILE_M + warp_column, part);
        },
        [&](const ScaledFragments& operands, int part) { operands.multiply(accum, part); }, [](int) {}, [](int) {});
    cp_async_wait<0>();
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemm_sm120(out_t* out,                     // [M, N]
           const uint8_t* a,               // [M, K]
           const uint8_t* b,               // [N, K]
           const a_scale_t* a_scales,      // one
           const uint8_t* a_block_scales,  // [M rounded up to 128, 4 * words], in tiles
           const uint8_t* b_block_scales,  // [N rounded up to 128, 4 * words], in tiles
           float* partial,                 // [tiles, SPLITS, ACCUMULATORS / 4, NUM_THREADS, 4]
           uint32_t* arrived,              // [tiles]
           int64_t m, int64_t n, int64_t k, int64_t blocks, int64_t a_stride, int64_t b_stride, int64_t out_stride) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ uint32_t is_last;
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;
    const TileIndex index = index_of_tile<GROUP_ROWS>(blockIdx.x, m, n);
    const int64_t first_row = index.row * TILE_M, first_column = index.column * TILE_N;

    const int64_t all_steps = (k + STEP - 1) / STEP;
    const int64_t first_step = all_steps * blockIdx.y / SPLITS, end_step = all_steps * (blockIdx.y + 1) / SPLITS;
    const int64_t first = first_step * STEP + threadIdx.x % 8 * CHUNK;
    const int64_t row = first_row + threadIdx.x / 8, column = first_column + threadIdx.x / 8;
    const auto row_within = [](int64_t row, int64_t rows) { return row < rows ? row : int64_t(-1); };
    float accum[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS] = {};
    multiply_scaled(accum, strided_rows(a + first, row, a_stride, ROWS_APART, m - row),
                    strided_rows(b + first, column, b_stride, ROWS_APART, n - column),
                    scale_copies(
                        a_block_scales, b_block_scales, blocks, first_step * WORDS,
                        [&](int i) { return row_within(first_row + i, m); },
                        [&](int i) { return row_within(first_column + i, n); }),
                    memory, min(k, end_step * STEP) - first, int(end_step - first_step), warp_row, warp_column);

    float result[ACCUMULATORS];
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; ++i) {
        result[i] = accum[i / (COLUMN_TILES * PRODUCT_SUMS)][i / PRODUCT_SUMS % COLUMN_TILES][i % PRODUCT_SUMS];
    }
    if (!add_splits<SPLITS>(result, partial, arrived, &is_last)) return;
    static_assert(!B_SCALES && AZP == 0 && BIAS == 0);
    const Epilogue<out_t, A_SCALES, false, 0, 0, SCALE_EXPONENT> epilogue{a_scales, nullptr, nullptr, nullptr,
                                                                          nullptr,  0,       0,       0};
    write_tile<OUT_ACCESS>(
        out, out_stride, n, epilogue, result, warp_row + lane_row(lane), warp_column + lane_column(lane),
        [&](int local, int more) { return first_row + local + more; }, [&](int64_t row) { return row < m; },
        [&](int local) { return first_column + local; });
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
grouped_gemm_sm120(out_t* out,                          // [num_rows, N]
                   const uint8_t* a,                    // [num_rows, K]
                   const uint8_t* b,                    // [E, N, K]
                   const int32_t* sorted_token_ids,     // [max_tiles * TILE_M] at least
                   const int32_t* expert_ids,           // [max_tiles / block_tiles] at least
                   const int32_t* num_tokens_post_pad,  // one element
                   const int32_t* scale_rows,           // [num_rows]
                   const b_scale_t* b_scales,           // [E]
                   const uint8_t* a_block_scales,       // [num_scale_rows, 4 * words], in tiles
                   const uint8_t* b_block_scales,       // [E, N rounded up to 128, 4 * words], in tiles
                   int64_t num_rows, int64_t n, int64_t k, int64_t blocks, int64_t num_scale_rows, int64_t num_experts,
                   int64_t block_tiles, int64_t max_tiles, int64_t a_stride, int64_t b_stride, int64_t out_stride) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ int rows_of_tile[TILE_M];  // the row of out of each tile row; -1: padding
    const ExpertTiles<TILE_M> tiles(sorted_token_ids, expert_ids, num_tokens_post_pad, num_rows, num_experts,
                                    block_tiles, max_tiles);
    const int columns = int((n + TILE_N - 1) / TILE_N);
    if (blockIdx.x >= int64_t(tiles.tiles) * columns) return;
    int tile_row, tile_column;
    const int expert = tiles.template locate<GROUP>(int(blockIdx.x), columns, int(gridDim.x), tile_row, tile_column);
    if (expert < 0) return;
    if (!tiles.template load<NUM_THREADS>(tile_row, rows_of_tile)) return;

    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;
    const int first_column = tile_column * TILE_N;
    const int64_t first = threadIdx.x % 8 * CHUNK, column = first_column + threadIdx.x / 8;
    // The row of scales of tile row i; negative if the row or its scales do not exist.
    const auto scale_row = [&](int i) {
        const int at = rows_of_tile[i] < 0 ? -1 : scale_rows[rows_of_tile[i]];
        return at < num_scale_rows ? at : -1;
    };
    const int64_t scales_of_expert = (n + 127) / 128 * 128 * ((blocks + 3) / 4 * 4);
    float accum[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS] = {};
    multiply_scaled(
        accum,
        scattered_rows<TILE_M>(a, a_stride, first, 1, [&](int i) { return scale_row(i) < 0 ? -1 : rows_of_tile[i]; }),
        strided_rows(b + expert * n * b_stride + first, column, b_stride, ROWS_APART, n - column),
        scale_copies(
            a_block_scales, b_block_scales + expert * scales_of_expert, blocks, 0,
            [&](int i) { return int64_t(scale_row(i)); },
            [&](int i) { return first_column + i < n ? int64_t(first_column + i) : int64_t(-1); }),
        memory, k - first, int((k + STEP - 1) / STEP), warp_row, warp_column);

    static_assert(!A_SCALES && BIAS == 0);
    const ExpertEpilogue<out_t, false, B_SCALES, 0, ROUTED> epilogue{
        nullptr, nullptr, B_SCALES ? b_scales + expert : nullptr, nullptr, 1, 0, 0};
    write_expert_tile(
        out, out_stride, int(n), int(n), epilogue, rows_of_tile + warp_row + lane_row(lane),
        warp_column + lane_column(lane), [&](int local) { return first_column + local; },
        [&](int i, int j, int l) { return accum[i][j][l]; });
}
