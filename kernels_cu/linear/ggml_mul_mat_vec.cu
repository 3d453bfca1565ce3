// ggml_mul_mat_vec: a GEMM with a GGUF-quantized weight for very small M (decode), by mma.sync: sm_80 and later.
//
//     out[m, n] = T(sum over groups g of K of
//                   scale[n, g] * (sum over k in g of (quant[n, k] - OFFSET) * X[m, k])
//                   - minimum[n, g] * (sum over k in g of X[m, k]))                      T: dtype of X and out
//
// quant - OFFSET is an integer that T represents exactly, so the MMA operands are exact; accumulators are float32.
//
// Blocks: a block takes ROW_WARPS * 16 rows of W (columns of out) and TOKENS rows of X. A k-tile is K_WARPS units of
// 256 elements; each of the K_WARPS warps that share sixteen rows of W takes one unit. The GGUF blocks come to shared
// memory unchanged, STAGES k-tiles at a time, with the rows of X. While the previous kernel still runs, the block
// prefetches the GGUF blocks of its first k-tile to L2.
//
// Fragments: an accumulator tile is 16 rows of W by 8 groups, for one row of X. The MMA of group c multiplies its
// quants by a B fragment that holds the elements of X in column c, and zeros elsewhere. So of every eight groups a lane
// holds the accumulators of two groups for two rows, and loads only their scales. The four columns of quants that lane
// t holds are four adjacent elements. An A fragment of ones times the elements of X, each group in its own column, sums
// X per group. If it costs less, quants stay raised by RAISED (ggml_mma.cuh), and RAISED times the sum of X is
// subtracted.
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
//     STAGES        k-tiles in shared memory
//     ACCESS        bytes of one access to W
//     X_ACCESS      elements of one access to X

#include "ggml_mma.cuh"
#include "ggml_rows.cuh"

constexpr int NUM_THREADS = ROW_WARPS * K_WARPS * 32, ROWS = ROW_WARPS * 16, STEP = K_WARPS * UNIT;
constexpr int GRID_BYTES = bytes_of_grid(FORMAT::GRID_SIZE), GROUP = FORMAT::GROUP, LENGTH = FORMAT::LENGTH;
constexpr int GROUPS = UNIT / GROUP, TILES = GROUPS / 8, PARTS = GROUP / 16;  // per unit, unit, group
// Independent chains of MMAs per accumulator tile: an MMA takes 33 cycles, and in one chain each waits for the last.
constexpr int CHAINS = PARTS > 1 ? 2 : 1;
constexpr bool HAS_X_SUMS = FORMAT::HAS_MINIMUM || RAISED<FORMAT, scalar_t> != 0;
using tile_t = RowTile<FORMAT, ROWS, K_WARPS, ACCESS>;
constexpr int STAGE_BYTES = tile_t::SIZE + TOKENS * STEP * 2;

DEVICE void prefetch_weight(const uint8_t* W, int64_t n, int64_t row_bytes) {
    if constexpr (CHOICES == 0) {
        prefetch_rows<NUM_THREADS, ROWS, tile_t::PART>(W, first_row_of_block<ROWS>(n), n, row_bytes, 0);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
ggml_mul_mat_vec(scalar_t* out,                          // [M, N]
                 const uint8_t* W,                       // [num_experts, N, row_bytes]
                 const scalar_t* X,                      // [M / top_k, K]
                 const index_t* ids,                     // CHOICES 1: [M]; 2: [tiles * TOKENS]
                 const index_t* expert_ids,              // CHOICES 2: [tiles]
                 const index_t* num_tokens_post_padded,  // CHOICES 2: [1]
                 int64_t m, int64_t n, int64_t k, int64_t row_bytes, int64_t out_stride, int64_t x_stride,
                 int64_t num_experts, int64_t top_k) {
    prefetch_weight(W, n, row_bytes);
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ float partial[K_WARPS][TOKENS][ROWS];
    uint8_t* const shared = reinterpret_cast<uint8_t*>(memory);
    const uint16_t* grid = reinterpret_cast<const uint16_t*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_warp = warp / K_WARPS, k_warp = warp % K_WARPS;
    const int64_t first_row = first_row_of_block<ROWS>(n);
    const TokenRows<CHOICES, TOKENS, index_t> rows{ids, expert_ids, blockIdx.x / row_tiles<ROWS>(n), m, top_k};
    if (CHOICES == 2 && rows.tile * TOKENS >= *num_tokens_post_padded) return;
    const int64_t expert = rows.expert(num_experts);
    const int units = expert < 0 ? 0 : int((k + UNIT - 1) / UNIT), steps = ceil_div(units, K_WARPS);
    W += expert < 0 ? 0 : expert * n * row_bytes;

    const auto stage_of = [&](int step) { return shared + GRID_BYTES + step % STAGES * STAGE_BYTES; };
    const auto load = [&](int step) {
        if (step < steps) {
            uint8_t* const stage = stage_of(step);
            const int64_t unit = int64_t(step) * K_WARPS, from = unit * UNIT;
            tile_t::at(stage, unit).copy<NUM_THREADS>(W, first_row, n, row_bytes, unit);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                const int64_t choice = rows.choice(token);
                if (choice < 0) continue;
                const scalar_t* const row = X + rows.row_of(choice) * x_stride + from;
                copy_row<X_ACCESS * 2, STEP / X_ACCESS, NUM_THREADS>(
                    stage + tile_t::SIZE + token * STEP * 2, reinterpret_cast<const uint8_t*>(row),
                    int(min(int64_t(STEP), k - from)) / X_ACCESS, threadIdx.x);
            }
        }
        cp_async_commit();
    };

    // is_own[i] is 1 if the lane's column holds the elements of group i of a tile, else 0. It is used as a factor,
    // since multiplications have twice the rate of logic and selects. The XOR with blockIdx.z, which is 0, keeps the
    // compiler from turning the multiplication into a select.
    uint32_t is_own[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) is_own[i] = uint32_t(g == i) ^ blockIdx.z;
    float sums[TOKENS][2] = {};
    copy_grid<FORMAT, NUM_THREADS>(shared);
    for (int step = 0; step < STAGES; ++step) load(step);
    for (int step = 0; step < steps; ++step) {
        if (step > 0) {
            if (step - 1 + STAGES < steps) __syncthreads();  // all warps have read the stage
            load(step - 1 + STAGES);
        }
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        const int unit = step * K_WARPS + k_warp;
        if (unit >= units) continue;
        // Groups of the unit that lie within the row.
        const int groups = WHOLE ? GROUPS : int(min(int64_t(GROUPS), (k - int64_t(unit) * UNIT) / GROUP));
        const tile_t tile = tile_t::at(stage_of(step), unit - k_warp);

        // x[token][j][u]: part u of the elements of X in the lane's group of tile j.
        uint2 x[TOKENS][TILES][PARTS] = {};
        float products[TOKENS][TILES][CHAINS][4] = {}, x_sums[TOKENS][TILES][4] = {};
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const bool exists = rows.choice(token) >= 0;
            const scalar_t* const elements =
                reinterpret_cast<const scalar_t*>(stage_of(step) + tile_t::SIZE) + token * STEP + k_warp * UNIT + 4 * t;
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
#pragma unroll
                for (int u = 0; u < PARTS; ++u) {
                    if (exists && 8 * j + g < groups) {
                        x[token][j][u] = *reinterpret_cast<const uint2*>(elements + (8 * j + g) * GROUP + 16 * u);
                    }
                    if constexpr (HAS_X_SUMS) {
                        constexpr uint32_t ONE = ONE_PAIR<scalar_t>, ones[4] = {ONE, ONE, ONE, ONE};
                        const uint32_t b[2] = {x[token][j][u].x, x[token][j][u].y};
                        mma_m16n8k16<scalar_t>(x_sums[token][j], ones, b);
                    }
                }
            }
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (!WHOLE && group >= groups) break;
#pragma unroll
            for (int u = 0; u < PARTS; ++u) {
                uint32_t a[4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint8_t* const block = tile.block(row_warp * 16 + half * 8 + g, k_warp, group * GROUP);
                    const uint32_t quants = FORMAT::quants(block, group * GROUP % LENGTH / 4 + 4 * u + t, grid);
                    pairs_of_quants<FORMAT, scalar_t, true>(quants, a[half], a[half + 2]);
                }
#pragma unroll
                for (int token = 0; token < TOKENS; ++token) {
                    const uint2 own = x[token][group / 8][u];
                    const uint32_t b[2] = {own.x * is_own[group % 8], own.y * is_own[group % 8]};
                    mma_m16n8k16<scalar_t>(products[token][group / 8][u % CHAINS], a, b);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < TILES * 4; ++i) {
            const int j = i / 4, half = i / 2 % 2, group = 8 * j + 2 * t + i % 2;
            if (!WHOLE && group >= groups) continue;
            const uint8_t* const block = tile.block(row_warp * 16 + half * 8 + g, k_warp, group * GROUP);
            const float scale = FORMAT::scale(block, group * GROUP % LENGTH / GROUP);
            const float minimum = FORMAT::minimum(block, group * GROUP % LENGTH / GROUP);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                const float x_sum = x_sums[token][j][i % 4];
                float product = products[token][j][0][i % 4];
                if constexpr (CHAINS > 1) product += products[token][j][1][i % 4];
                product = fmaf(float(-RAISED<FORMAT, scalar_t>), x_sum, product);
                sums[token][half] = fmaf(scale, product, sums[token][half]);
                if constexpr (FORMAT::HAS_MINIMUM) sums[token][half] = fmaf(-minimum, x_sum, sums[token][half]);
            }
        }
    }

#pragma unroll
    for (int i = 0; i < TOKENS * 2; ++i) {
        float sum = sums[i / 2][i % 2];
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
        if (t == 0) partial[k_warp][i / 2][row_warp * 16 + i % 2 * 8 + g] = sum;
    }
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int first = 0; first < TOKENS * ROWS; first += NUM_THREADS) {
        const int i = first + threadIdx.x;
        if (i >= TOKENS * ROWS) break;
        const int64_t choice = rows.choice(i / ROWS), row = first_row + i % ROWS;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < K_WARPS; ++j) sum += partial[j][i / ROWS][i % ROWS];
        if (choice >= 0 && row < n) out[choice * out_stride + row] = from_float<scalar_t>(sum);
    }
}
