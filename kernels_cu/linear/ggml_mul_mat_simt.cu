// ggml_mul_mat_simt: a GEMM with a GGUF-quantized weight by fused multiply-adds, on every platform.
//
//     out[m, n] = T(sum_k W[n, k] * X[m, k]), W dequantized to float32, summed in float32    T: dtype of X and out
//
// A warp takes a row of W and TOKENS rows of X. A k-tile is UNITS units of 256 elements; the block copies its GGUF
// blocks to shared memory unchanged. Lanes dequantize vectors of eight elements, adjacent lanes take adjacent vectors;
// X stays in the L1 cache. blockIdx.x counts tiles of rows of W, then tiles of rows of X. ggml_rows.cuh maps blocks to
// rows.
//
// Constants
//     CHOICES     how rows map to experts (ggml_rows.cuh)
//     index_t     element type of ids
//     FORMAT      the GGUF type, a struct of ggml.cuh
//     TOKENS      rows of X of a block
//     UNITS       units of a k-tile
//     ACCESS      bytes of one access to W
//     VEC_SIZE    elements of one access to X

#include "ggml_rows.cuh"
#include "ggml_tile.cuh"
#include "reduce.cuh"

constexpr int ROWS = NUM_THREADS / WARP_SIZE, GRID_BYTES = bytes_of_grid(FORMAT::GRID_SIZE);
using tile_t = RowTile<FORMAT, ROWS, UNITS, ACCESS>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
ggml_mul_mat_simt(scalar_t* out,                          // [M, N]
                  const uint8_t* W,                       // [num_experts, N, row_bytes]
                  const scalar_t* X,                      // [M / top_k, K]
                  const index_t* ids,                     // CHOICES 1: [M]; 2: [groups * TOKENS]
                  const index_t* expert_ids,              // CHOICES 2: [groups]
                  const index_t* num_tokens_post_padded,  // CHOICES 2: [1]
                  int64_t m, int64_t n, int64_t k, int64_t row_bytes, int64_t out_stride, int64_t x_stride,
                  int64_t num_experts, int64_t top_k) {
    await_previous_kernel();
    __shared__ alignas(16) uint8_t shared[GRID_BYTES + tile_t::SIZE];
    const uint16_t* grid = reinterpret_cast<const uint16_t*>(shared);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int64_t first_row = first_row_of_block<ROWS>(n);
    const TokenRows<CHOICES, TOKENS, index_t> rows{ids, expert_ids, blockIdx.x / row_tiles<ROWS>(n), m, top_k};
    if (CHOICES == 2 && rows.tile * TOKENS >= *num_tokens_post_padded) return;
    const int64_t expert = rows.expert(num_experts), units = expert < 0 ? 0 : (k + UNIT - 1) / UNIT;
    W += expert < 0 ? 0 : expert * n * row_bytes;
    float sums[TOKENS] = {};
    copy_grid<FORMAT, NUM_THREADS>(shared);
    for (int64_t unit = 0; unit < units; unit += UNITS) {
        __syncthreads();  // all warps have read the previous k-tile
        const tile_t tile = tile_t::at(shared + GRID_BYTES, unit);
        tile.copy<NUM_THREADS>(W, first_row, n, row_bytes, unit);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        for (int v = lane; v < UNITS * UNIT / 8; v += WARP_SIZE) {
            const int64_t element = unit * UNIT + v * 8;
            if (element >= k) break;
            float w[8];
            decode<FORMAT>(tile.block(warp, v / (UNIT / 8), v % (UNIT / 8) * 8), v % (FORMAT::LENGTH / 8), grid, w);
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                const int64_t choice = rows.choice(t);
                if (choice < 0) continue;
                float x[8];
                load_floats<VEC_SIZE>(X + rows.row_of(choice) * x_stride + element, x);
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[t] = fmaf(w[i], x[i], sums[t]);
            }
        }
    }
    const int64_t row = first_row + warp;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const float sum = lane_reduce<Sum, WARP_SIZE>(sums[t]);
        const int64_t choice = rows.choice(t);
        if (lane == 0 && row < n && choice >= 0) out[choice * out_stride + row] = from_float<scalar_t>(sum);
    }
}
