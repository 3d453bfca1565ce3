// ggml_mul_mat: a GEMM with a GGUF-quantized weight on tensor cores, by product.cuh: sm_80 and later, gfx90a and later,
// gfx11 and gfx12.
//
//     out[m, n] = T(sum over groups g of K of
//                   scale[n, g] * (sum over k in g of (quant[n, k] - OFFSET) * X[m, k])
//                   - minimum[n, g] * (sum over k in g of X[m, k]))                      T: dtype of X and out
//
// quant - OFFSET is an integer that T represents exactly, so the MMA operands are exact; accumulators are float32. The
// scale multiplies the accumulator of a group, not the weights.
//
// Blocks: a block takes ROW_WARPS * 16 rows of W (columns of out) and TOKENS rows of X. blockIdx.x counts tiles of rows
// of W, then tiles of rows of X. Split-K: SPLITS blocks along y share a tile, each takes a part of K and writes its
// accumulators to `partial`, and the last block to arrive reduces them in the order of the splits.
//
// A k-tile is K_WARPS units of 256 elements; each of the K_WARPS warps that share sixteen rows of W takes one unit. The
// GGUF blocks come to shared memory unchanged, STAGES k-tiles at a time, with the rows of X. While the previous kernel
// still runs, the block prefetches the GGUF blocks of its first k-tile to L2. With HOLDS_COPIES (async.cuh) there is
// one stage, and registers hold the next k-tile during the MMAs.
//
// Fragments: row r of the A fragment is row r of W. The order of K within an MMA is free, so a lane's columns are 4 *
// QUANT_WORDS adjacent elements, whole words of quants. Further MMAs sum X per group and multiply the sums by the
// minima (GroupSums). Padding rows of X are zeros in shared memory; on matrix cores they repeat a valid row, and the
// results are not written. On matrix cores one `product` covers a whole group, with several instructions if needed.
//
// ggml_rows.cuh maps blocks to rows of X, out and W.
//
// Constants
//     CHOICES       how rows map to experts (ggml_rows.cuh)
//     index_t       element type of ids
//     FORMAT        the GGUF type, a struct of ggml.cuh
//     WHOLE         whether K is a multiple of a unit
//     TOKENS        rows of X of a block
//     ROW_WARPS, K_WARPS    warps along the rows of W and along K
//     STAGES        k-tiles in shared memory; 1 with HOLDS_COPIES
//     SPLITS        split-K: blocks that share a tile
//     ACCESS        bytes of one access to W
//     X_ACCESS      elements of one access to X

#include "ggml_mma.cuh"
#include "ggml_rows.cuh"

constexpr int NUM_THREADS = ROW_WARPS * K_WARPS * WARP_SIZE, ROWS = ROW_WARPS * 16;
constexpr int TILES = ceil_div(TOKENS, PRODUCT_COLUMNS);
static_assert(TILES == 1 || TOKENS % PRODUCT_COLUMNS == 0);
constexpr int STEP = K_WARPS * UNIT, X_PITCH = STEP + (ON_MATRIX_CORES ? 8 : 16);  // the pad spreads tokens over banks
constexpr int GRID_BYTES = bytes_of_grid(FORMAT::GRID_SIZE);
constexpr int GROUP = FORMAT::GROUP, LENGTH = FORMAT::LENGTH;
constexpr int PRODUCT_K = ON_MATRIX_CORES ? GROUP : 16, PRODUCTS = GROUP / PRODUCT_K;  // MMAs per group
// 32-bit words per lane and MMA: of a fragment, of the quants of one row, of X.
constexpr int WORDS = PRODUCT_K / 16 * SHORT_WORDS, QUANT_WORDS = ON_MATRIX_CORES ? WORDS / 2 : 1;
constexpr int X_WORDS = 2 * QUANT_WORDS, X_RUN = X_WORDS < 4 ? X_WORDS : 4;
constexpr int PARTS = WORDS / X_WORDS;  // MMAs that share one fragment of X
using tile_t = RowTile<FORMAT, ROWS, K_WARPS, ACCESS>;
constexpr int X_BYTES = TOKENS * X_PITCH * 2, STAGE_BYTES = tile_t::SIZE + X_BYTES;
constexpr int SUM_PITCH = ROWS + 4;
static_assert(!HOLDS_COPIES || STAGES == 1);
using rows_t = TokenRows<CHOICES, TOKENS, index_t>;
// Quants stay raised (ggml_mma.cuh) if the minima need the sums of X anyway. On matrix cores they stay raised whenever
// possible: there the MMAs wait for dequantization, and AMD has no instruction that subtracts bfloat16.
constexpr bool RAISES = FORMAT::HAS_MINIMUM || (ON_MATRIX_CORES && RAISED<FORMAT, scalar_t> != 0);
using sums_t = GroupSums<scalar_t, TILES>;
constexpr int GROUPS = UNIT / GROUP, SET = sums_t::GROUPS;  // groups of a unit; groups of one GroupSums
// The factor of a group's sum of X that is subtracted: the minimum, plus RAISED * scale to undo the raise.
DEVICE float raised_minimum(const uint8_t* block, int group) {
    const float minimum = FORMAT::minimum(block, group);
    if constexpr (RAISED<FORMAT, scalar_t> == 0) return minimum;
    return fmaf(float(RAISED<FORMAT, scalar_t>), FORMAT::scale(block, group), minimum);
}

// The first k-tile of split `split`.
DEVICE int64_t step_of(int64_t k, unsigned split) {
    const int64_t steps = (k + STEP - 1) / STEP;
    return steps * split / SPLITS;
}
DEVICE void prefetch_weight(const uint8_t* W, int64_t n, int64_t k, int64_t row_bytes) {
    if constexpr (CHOICES == 0) {
        const int64_t begin = step_of(k, blockIdx.y) * tile_t::PART;
        prefetch_rows<NUM_THREADS, ROWS, tile_t::PART>(W, first_row_of_block<ROWS>(n), n, row_bytes, begin);
    }
}

// Threads that share a row of X, and pieces of X_ACCESS elements in the row's part of a k-tile.
constexpr int X_THREADS = NUM_THREADS / TOKENS, X_PIECES = STEP / X_ACCESS;
// Calls f(to, from, count, thread), with the arguments of copy_row, for elements `from` to `from` + STEP - 1 of the row
// of X that this thread copies, cut off at the end of the row. A padding row is skipped; on matrix cores it is replaced
// by choice 0.
template <typename F>
DEVICE void
with_input(scalar_t* to, const scalar_t* X, const rows_t& rows, int64_t k, int64_t stride, int64_t from, F f) {
    const int token = threadIdx.x / X_THREADS;
    int64_t choice = rows.choice(token);
    if constexpr (ON_MATRIX_CORES) choice = max(choice, int64_t(0));
    if (choice < 0) return;
    f(reinterpret_cast<uint8_t*>(to + token * X_PITCH),
      reinterpret_cast<const uint8_t*>(X + rows.row_of(choice) * stride + from),
      int(min(int64_t(X_PIECES), (k - from) / X_ACCESS)), threadIdx.x % X_THREADS);
}
// Clears the padding rows of X in a stage. Copies skip these rows, so they stay zero.
DEVICE void clear_absent(scalar_t* to, const rows_t& rows) {
    const int token = threadIdx.x / X_THREADS;
    if (rows.choice(token) >= 0) return;
    for (int i = threadIdx.x % X_THREADS; i < STEP / 8; i += X_THREADS) {
        *reinterpret_cast<uint4*>(to + token * X_PITCH + i * 8) = uint4{};
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
ggml_mul_mat(scalar_t* out,                          // [M, N]
             const uint8_t* W,                       // [num_experts, N, row_bytes]
             const scalar_t* X,                      // [M / top_k, K]
             const index_t* ids,                     // CHOICES 1: [M]; 2: [tiles * TOKENS]
             const index_t* expert_ids,              // CHOICES 2: [tiles]
             const index_t* num_tokens_post_padded,  // CHOICES 2: [1]
             float* partial,                         // [tiles, SPLITS, RESULTS, NUM_THREADS]
             uint32_t* arrived,                      // [tiles]
             int64_t m, int64_t n, int64_t k, int64_t row_bytes, int64_t out_stride, int64_t x_stride,
             int64_t num_experts, int64_t top_k) {
    prefetch_weight(W, n, k, row_bytes);
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ uint32_t is_last;
    uint8_t* const shared = reinterpret_cast<uint8_t*>(memory);
    const uint16_t* grid = reinterpret_cast<const uint16_t*>(shared);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane_row(lane);
    // The lane's row of X in an MMA, and its run of K. Columns past TOKENS repeat the last row; they are never read.
    const int x_row = min(ON_MATRIX_CORES ? matrix_row(lane) : g, TOKENS - 1);
    const int t = ON_MATRIX_CORES ? matrix_run(lane) : lane % 4;
    const int row_warp = warp / K_WARPS, k_warp = warp % K_WARPS;

    const int units = int((k + UNIT - 1) / UNIT);
    const unsigned split = SPLITS > 1 ? blockIdx.y : 0;
    const int first_step = int(step_of(k, split)), end_step = int(step_of(k, split + 1));
    const int64_t first_row = first_row_of_block<ROWS>(n);
    const rows_t rows{ids, expert_ids, blockIdx.x / row_tiles<ROWS>(n), m, top_k};
    if (CHOICES == 2 && rows.tile * TOKENS >= *num_tokens_post_padded) return;
    const int64_t expert = rows.expert(num_experts);
    const int steps = expert < 0 ? 0 : end_step - first_step;
    W += expert < 0 ? 0 : expert * n * row_bytes;
    const auto stage_of = [&](int step) { return shared + GRID_BYTES + step % STAGES * STAGE_BYTES; };
    typename tile_t::template held_t<NUM_THREADS> held_weight;
    HeldRow<X_ACCESS * 2, X_PIECES, X_THREADS> held_input;
    // Calls f(held, to, from, count, thread) for the rows of W and of X that this thread copies in k-tile `step`.
    const auto with_rows = [&](int step, auto f) {
        const int64_t unit = int64_t(first_step + step) * K_WARPS;
        tile_t::at(stage_of(step), unit)
            .template with_row<NUM_THREADS>(W, first_row, n, row_bytes, unit,
                                            [&](auto... row) { f(held_weight, row...); });
        with_input(reinterpret_cast<scalar_t*>(stage_of(step) + tile_t::SIZE), X, rows, k, x_stride, unit * UNIT,
                   [&](auto... row) { f(held_input, row...); });
    };
    const auto load = [&](int step) {
        if (step < steps) with_rows(step, [](auto& held, auto... row) { held.load(row...); });
        cp_async_commit();
    };

    float sums[TILES][PRODUCT_SUMS] = {};
    for (int stage = 0; stage < STAGES && !ON_MATRIX_CORES; ++stage) {
        clear_absent(reinterpret_cast<scalar_t*>(stage_of(stage) + tile_t::SIZE), rows);
    }
    copy_grid<FORMAT, NUM_THREADS>(shared);
    for (int step = 0; step < STAGES; ++step) load(step);
    for (int step = 0; step < steps; ++step) {
        if constexpr (HOLDS_COPIES) {
            __syncthreads();  // all warps have read the previous k-tile
            with_rows(step, [](const auto& held, auto... row) { held.store(row...); });
            cp_async_wait<0>();  // for the grid, and for pieces too small to be held
            __syncthreads();
            load(step + 1);
        } else {
            if (step > 0) {
                if (step - 1 + STAGES < steps) __syncthreads();  // all warps have read the stage
                load(step - 1 + STAGES);
            }
            cp_async_wait<STAGES - 1>();
            __syncthreads();
        }
        const int unit = (first_step + step) * K_WARPS + k_warp;
        if (unit >= units) continue;
        const tile_t tile = tile_t::at(stage_of(step), unit - k_warp);
        const scalar_t* const x = reinterpret_cast<const scalar_t*>(stage_of(step) + tile_t::SIZE) + x_row * X_PITCH +
                                  k_warp * UNIT + 4 * QUANT_WORDS * t;
        // Groups of the unit that lie within the row.
        const int groups = WHOLE ? GROUPS : int(min(int64_t(GROUPS), (k - int64_t(unit) * UNIT) / GROUP));
        const auto block_of = [&](int half, int group) {
            return tile.block(row_warp * 16 + half * 8 + g, k_warp, group * GROUP);
        };
#pragma unroll
        for (int set = 0; set < GROUPS; set += SET) {
            sums_t x_sums;
            // Loaded before the MMAs, so that nothing waits for the minima at the end of a unit.
            float minima[LANE_ROWS][sums_t::LANE_GROUPS];
#pragma unroll
            for (int half = 0; half < LANE_ROWS && RAISES; ++half) {
#pragma unroll
                for (int i = 0; i < sums_t::LANE_GROUPS; ++i) {
                    const int group = set + sums_t::first_group(lane) + i;
                    const bool exists = WHOLE || group < groups;
                    minima[half][i] =
                        exists ? raised_minimum(block_of(half, group), group * GROUP % LENGTH / GROUP) : 0.0f;
                }
            }
            uint32_t b[TILES][WORDS];
#pragma unroll
            for (int group = set; group < set + SET; ++group) {
                if (!WHOLE && group >= groups) break;
                order_loads();
                const int of_block = group * GROUP % LENGTH;
                float scales[LANE_ROWS];
                uint32_t a[PRODUCTS][WORDS];
#pragma unroll
                for (int half = 0; half < LANE_ROWS; ++half) {
                    const uint8_t* const block = block_of(half, group);
                    scales[half] = FORMAT::scale(block, of_block / GROUP);
#pragma unroll
                    for (int u = 0; u < PRODUCTS; ++u) {
#pragma unroll
                        for (int i = 0; i < QUANT_WORDS; ++i) {
                            const int word = of_block / 4 + PRODUCT_K / 4 * u + QUANT_WORDS * t + i;
                            const uint32_t quants = FORMAT::quants(block, word, grid);
                            uint32_t& high = a[u][ON_MATRIX_CORES ? 2 * i + 1 : half + 2];
                            pairs_of_quants<FORMAT, scalar_t, RAISES>(quants, a[u][ON_MATRIX_CORES ? 2 * i : half],
                                                                      high);
                        }
                    }
                }
#pragma unroll
                for (int j = 0; j < TILES; ++j) {
                    float products[PRODUCT_SUMS] = {};
#pragma unroll
                    for (int u = 0; u < PRODUCTS; ++u) {
                        const int part = (group * PRODUCTS + u) % PARTS;
#pragma unroll
                        for (int i = 0; i < X_WORDS; i += X_RUN) {
                            const auto run = *reinterpret_cast<const Vec<uint32_t, X_RUN>*>(
                                x + j * PRODUCT_COLUMNS * X_PITCH + group * GROUP + PRODUCT_K * u + 2 * i);
#pragma unroll
                            for (int l = 0; l < X_RUN; ++l) b[j][X_WORDS * part + i + l] = run.data[l];
                        }
                        product<scalar_t>(products, a[u], b[j], part);
                    }
#pragma unroll
                    for (int i = 0; i < PRODUCT_SUMS; ++i) {
                        sums[j][i] = fmaf(scales[i / ROW_SUMS], products[i], sums[j][i]);
                    }
                }
                const int before = group - group * PRODUCTS % PARTS;  // the group of the first part of b
                if (RAISES && (group + 1) * PRODUCTS % PARTS == 0) x_sums.add(b, before % SET, group % SET);
            }
            if constexpr (RAISES) x_sums.subtract(sums, minima);
        }
    }

    // Reduce over the warps along K: warps store their accumulators to the shared memory of the stages, and threads add
    // them up.
    cp_async_wait<0>();
    __syncthreads();
    float* const of_warps = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
#pragma unroll
        for (int i = 0; i < PRODUCT_SUMS; ++i) {
            const int token = j * PRODUCT_COLUMNS + lane_column(lane) + i % ROW_SUMS;
            const int row = row_warp * 16 + i / ROW_SUMS * 8 + g;
            if (token < TOKENS) of_warps[(k_warp * TOKENS + token) * SUM_PITCH + row] = sums[j][i];
        }
    }
    __syncthreads();
    constexpr int RESULTS = ceil_div(TOKENS * ROWS, NUM_THREADS);  // results of a thread
    float results[RESULTS];
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) {
        const int at = i * NUM_THREADS + threadIdx.x, token = at / ROWS, row = at % ROWS;
        results[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < K_WARPS; ++j) {
            if (token < TOKENS) results[i] += of_warps[(j * TOKENS + token) * SUM_PITCH + row];
        }
    }
    if constexpr (SPLITS > 1) {
        float* const of_tile = partial + int64_t(blockIdx.x) * SPLITS * RESULTS * NUM_THREADS + threadIdx.x;
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) of_tile[(blockIdx.y * RESULTS + i) * NUM_THREADS] = results[i];
        if (!arrives_last(arrived + blockIdx.x, SPLITS, &is_last)) return;
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) {
            results[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < SPLITS; ++j) results[i] += load_fresh(of_tile + (j * RESULTS + i) * NUM_THREADS);
        }
    }
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) {
        const int at = i * NUM_THREADS + threadIdx.x;
        const int64_t row = first_row + at % ROWS;
        if (at >= TOKENS * ROWS || row >= n) continue;
        const int64_t choice = rows.choice(at / ROWS);
        if (choice >= 0) out[choice * out_stride + row] = from_float<scalar_t>(results[i]);
    }
}
