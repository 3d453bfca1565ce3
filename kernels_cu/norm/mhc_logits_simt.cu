// mhc_logits_simt: dot products of the streams of a token with the projection of manifold-constrained hyper-connections
// (mHC), and the sum of their squares, without tensor cores.
//
//     partials[split, t, n] = sum_k residual[t, k] * fn[n, k],  partials[split, t, COLUMNS] = sum_k residual[t, k]^2
//
// over the elements k of the split, in float32. mhc_pre.cu adds the splits.
//
// A CTA has TOKENS adjacent tokens and a split of K. Each thread multiplies a vector of K by all columns, so a load of
// fn serves TOKENS tokens.
//
// Constants
//     HC            streams of a token
//     HIDDEN_SIZE   elements of a stream; a multiple of VEC_SIZE
//     COLUMNS       rows of fn
//     TOKENS        tokens of a CTA

#include "reduce.cuh"
#include "vec.cuh"

constexpr int LANES = 32, GROUPS = NUM_THREADS / LANES, WIDTH = COLUMNS + 1;
constexpr int SIZE = HC * HIDDEN_SIZE;  // K

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
mhc_logits_simt(float* partials,           // [splits, num_tokens, WIDTH]
                const scalar_t* residual,  // [num_tokens, HC, HIDDEN_SIZE]
                const float* fn,           // [COLUMNS, SIZE]
                int64_t num_tokens, int split_size, int64_t token_stride, int64_t stream_stride) {
    await_previous_kernel();
    __shared__ float of_groups[GROUPS][TOKENS * WIDTH];
    const int64_t first_token = int64_t(blockIdx.x) * TOKENS;
    const int first = int(blockIdx.y) * split_size, end = min(SIZE, first + split_size);
    float acc[TOKENS][WIDTH] = {};
    for (int k = first + int(threadIdx.x) * VEC_SIZE; k < end; k += NUM_THREADS * VEC_SIZE) {
        const int64_t column = k / HIDDEN_SIZE * stream_stride + k % HIDDEN_SIZE;
        float x[TOKENS][VEC_SIZE];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            // Instead of a token that does not exist, the last one is read.
            load_floats<VEC_SIZE>(residual + min(first_token + t, num_tokens - 1) * token_stride + column, x[t]);
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) acc[t][COLUMNS] = fmaf(x[t][i], x[t][i], acc[t][COLUMNS]);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            float w[VEC_SIZE];
            load_floats<VEC_SIZE>(fn + int64_t(n) * SIZE + k, w);
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
                for (int i = 0; i < VEC_SIZE; ++i) acc[t][n] = fmaf(x[t][i], w[i], acc[t][n]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < TOKENS * WIDTH; ++i) {
        const float sum = lane_reduce<Sum, LANES>(acc[i / WIDTH][i % WIDTH]);
        if (threadIdx.x % LANES == 0) of_groups[threadIdx.x / LANES][i] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TOKENS * WIDTH; i += NUM_THREADS) {
        if (first_token + i / WIDTH >= num_tokens) continue;
        float sum = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) sum += of_groups[group][i];
        partials[(blockIdx.y * num_tokens + first_token) * WIDTH + i] = sum;
    }
}
