// mhc_logits_mma: mhc_logits_simt.cu by tensor cores, for streams of bfloat16.
//
//     partials[split, t, n] = sum_k residual[t, k] * fn[n, k],  partials[split, t, COLUMNS] = sum_k residual[t, k]^2
//
// A float32 of fn is the exact sum of three bfloat16, which three MMAs multiply: every product is exact, and
// accumulators are float32.
//
// A CTA has TOKENS adjacent tokens and a split of K. M_WARPS warps share the tokens, and find the projection in the L1
// cache after the first of them has loaded it; K_WARPS warps share the steps of the split. Fragments come from global
// memory in 16-byte accesses: both operands permute K in the same way, so that the elements of a lane are adjacent.
//
// Constants
//     HC            streams of a token
//     HIDDEN_SIZE   elements of a stream; a multiple of 8
//     COLUMNS       rows of fn
//     TILES_M       16-row tiles of tokens of a warp
//     M_WARPS       warps along the tokens of a CTA; divides the warps of the CTA
//     BATCH         adjacent steps that a warp loads before it multiplies the first

#include "async.cuh"
#include "bf16_parts.cuh"
#include "mma.cuh"
#include "reduce.cuh"

constexpr int WARP_TOKENS = 16 * TILES_M, TOKENS = M_WARPS * WARP_TOKENS;
constexpr int TILES_N = ceil_div(COLUMNS, 8), WIDTH = COLUMNS + 1, SIZE = HC * HIDDEN_SIZE;  // SIZE: K
constexpr int K_WARPS = NUM_THREADS / 32 / M_WARPS;
constexpr int RUN = 8, STEP = 4 * RUN;  // a lane has RUN adjacent elements of a step

// Brings the split of the projection to L2.
DEVICE void prefetch_projection(const float* fn, int first, int end) {
    const int lines = ceil_div(end - first, 32);
    for (int i = threadIdx.x; i < COLUMNS * lines; i += NUM_THREADS) {
        prefetch_part(fn + int64_t(i / lines) * SIZE + first, end - first - 1, i % lines);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
mhc_logits_mma(float* partials,         // [splits, num_tokens, WIDTH]
               const bf16_t* residual,  // [num_tokens, HC, HIDDEN_SIZE]
               const float* fn,         // [COLUMNS, SIZE]
               int64_t num_tokens, int split_size, int64_t token_stride, int64_t stream_stride) {
    const int first = int(blockIdx.y) * split_size, end = min(SIZE, first + split_size);
    if (blockIdx.x == 0) prefetch_projection(fn, first, end);
    await_previous_kernel();
    __shared__ float of_warps[K_WARPS][TOKENS * WIDTH];
    const int k_warp = threadIdx.x / 32 % K_WARPS, warp_token = threadIdx.x / 32 / K_WARPS * WARP_TOKENS;
    const int row = threadIdx.x % 32 / 4, run = threadIdx.x % 4;
    const int64_t first_token = int64_t(blockIdx.x) * TOKENS;
    float d[TILES_M][TILES_N][4] = {}, squares[TILES_M][2] = {};
    for (int start = first + k_warp * BATCH * STEP; start < end; start += K_WARPS * BATCH * STEP) {
        // Words, not elements: a load would wait until the elements of the one before are unpacked.
        uint32_t a[BATCH][TILES_M][2][RUN / 2];
        float b[BATCH][TILES_N][RUN];
#pragma unroll
        for (int s = 0; s < BATCH; ++s) {
            const int k = start + s * STEP + run * RUN;
            const bf16_t* of_run = residual + k / HIDDEN_SIZE * stream_stride + k % HIDDEN_SIZE;
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int64_t token = first_token + warp_token + m * 16 + half * 8 + row;
                    hold<16>(a[s][m][half], of_run + token * token_stride, k < end && token < num_tokens);
                }
            }
#pragma unroll
            for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
                for (int i = 0; i < RUN; ++i) b[s][n][i] = 0.0f;
                if (k < end && n * 8 + row < COLUMNS) load_floats<4>(fn + int64_t(n * 8 + row) * SIZE + k, b[s][n]);
            }
        }
#pragma unroll
        for (int s = 0; s < BATCH; ++s) {
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    float x, y;
                    unpack_pair<bf16_t>(a[s][m][i * 2 / RUN][i % (RUN / 2)], x, y);
                    float& sum = squares[m][i * 2 / RUN];
                    sum = fmaf(y, y, fmaf(x, x, sum));
                }
            }
#pragma unroll
            for (int mma = 0; mma < RUN / 4; ++mma) {
#pragma unroll
                for (int n = 0; n < TILES_N; ++n) {
                    uint32_t pairs[2][3];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        split_pair(pairs[i], b[s][n][4 * mma + 2 * i], b[s][n][4 * mma + 2 * i + 1]);
                    }
#pragma unroll
                    for (int part = 2; part >= 0; --part) {
                        const uint32_t b_words[2] = {pairs[0][part], pairs[1][part]};
#pragma unroll
                        for (int m = 0; m < TILES_M; ++m) {
                            uint32_t a_words[4];
#pragma unroll
                            for (int i = 0; i < 4; ++i) a_words[i] = a[s][m][i % 2][2 * mma + i / 2];
                            mma_m16n8k16<bf16_t>(d[m][n], a_words, b_words);
                        }
                    }
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* of_row = of_warps[k_warp] + (warp_token + m * 16 + half * 8 + row) * WIDTH;
            const float square = lane_reduce<Sum, 4>(squares[m][half]);
            if (run == 0) of_row[COLUMNS] = square;
#pragma unroll
            for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = n * 8 + 2 * run + i;
                    if (column < COLUMNS) of_row[column] = d[m][n][2 * half + i];
                }
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TOKENS * WIDTH; i += NUM_THREADS) {
        if (first_token + i / WIDTH >= num_tokens) continue;
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < K_WARPS; ++other) sum += of_warps[other][i];
        partials[(blockIdx.y * num_tokens + first_token) * WIDTH + i] = sum;
    }
}
