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
// mhc_post_logits_mma: the same of the streams that mhc_post.cu computes, which it writes. A split is columns of every
// stream.
//
// Constants
//     HC            streams of a token
//     HIDDEN_SIZE   elements of a stream; a multiple of 8
//     COLUMNS       rows of fn
//     TILES_M       16-row tiles of tokens of a warp
//     M_WARPS       warps along the tokens of a CTA; divides the warps of the CTA
//     BATCH         adjacent steps that a warp loads before it multiplies the first; mhc_post_logits_mma has none

#include "async.cuh"
#include "bf16_parts.cuh"
#include "mma.cuh"
#include "reduce.cuh"

constexpr int WARP_TOKENS = 16 * TILES_M, TOKENS = M_WARPS * WARP_TOKENS;
constexpr int TILES_N = ceil_div(COLUMNS, 8), WIDTH = COLUMNS + 1, SIZE = HC * HIDDEN_SIZE;  // SIZE: K
constexpr int K_WARPS = NUM_THREADS / 32 / M_WARPS;
constexpr int RUN = 8, STEP = 4 * RUN;  // a lane has RUN adjacent elements of a step

// Brings columns `first` to `end` of the projection to L2, once for all tiles of tokens.
DEVICE void prefetch_projection(const float* fn, int first, int end) {
    if (blockIdx.x > 0) return;
    const int lines = ceil_div(end - first, 32);
    for (int i = threadIdx.x; i < COLUMNS * lines; i += NUM_THREADS) {
        prefetch_part(fn + int64_t(i / lines) * SIZE + first, end - first - 1, i % lines);
    }
}

// The place of a thread.
struct Place {
    const int k_warp = threadIdx.x / 32 % K_WARPS, warp_token = threadIdx.x / 32 / K_WARPS * WARP_TOKENS;
    const int row = threadIdx.x % 32 / 4, run = threadIdx.x % 4;
    const int64_t first_token = int64_t(blockIdx.x) * TOKENS;

    // The row of the CTA of a fragment.
    DEVICE int row_of(int m, int half) const { return warp_token + m * 16 + half * 8 + row; }
};

// Fragments of a step: words of the streams, not elements, because a load would wait until the elements of the one
// before are unpacked; and the projection.
using stream_words = uint32_t[TILES_M][2][RUN / 2];
using projection_run = float[TILES_N][RUN];

DEVICE void load_projection(projection_run& b, const float* fn, int row, int k, bool exists) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) b[n][i] = 0.0f;
        if (exists && n * 8 + row < COLUMNS) load_floats<4>(fn + int64_t(n * 8 + row) * SIZE + k, b[n]);
    }
}

// The accumulators of a warp: products of its tokens with the projection, and their squares.
struct Accumulators {
    float d[TILES_M][TILES_N][4] = {}, squares[TILES_M][2] = {};

    DEVICE void add(const stream_words& a, const projection_run& b) {
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                float x, y;
                unpack_pair<bf16_t>(a[m][i * 2 / RUN][i % (RUN / 2)], x, y);
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
                for (int i = 0; i < 2; ++i) split_pair(pairs[i], b[n][4 * mma + 2 * i], b[n][4 * mma + 2 * i + 1]);
#pragma unroll
                for (int part = 2; part >= 0; --part) {
                    const uint32_t b_words[2] = {pairs[0][part], pairs[1][part]};
#pragma unroll
                    for (int m = 0; m < TILES_M; ++m) {
                        uint32_t a_words[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) a_words[i] = a[m][i % 2][2 * mma + i / 2];
                        mma_m16n8k16<bf16_t>(d[m][n], a_words, b_words);
                    }
                }
            }
        }
    }

    // Adds the warps along K, and writes the partials of the split.
    DEVICE void write(float* partials, int64_t num_tokens, const Place& at) const {
        __shared__ float of_warps[K_WARPS][TOKENS * WIDTH];
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float* of_row = of_warps[at.k_warp] + at.row_of(m, half) * WIDTH;
                const float square = lane_reduce<Sum, 4>(squares[m][half]);
                if (at.run == 0) of_row[COLUMNS] = square;
#pragma unroll
                for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int column = n * 8 + 2 * at.run + i;
                        if (column < COLUMNS) of_row[column] = d[m][n][2 * half + i];
                    }
                }
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TOKENS * WIDTH; i += NUM_THREADS) {
            if (at.first_token + i / WIDTH >= num_tokens) continue;
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < K_WARPS; ++other) sum += of_warps[other][i];
            partials[(blockIdx.y * num_tokens + at.first_token) * WIDTH + i] = sum;
        }
    }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
mhc_logits_mma(float* partials,         // [splits, num_tokens, WIDTH]
               const bf16_t* residual,  // [num_tokens, HC, HIDDEN_SIZE]
               const float* fn,         // [COLUMNS, SIZE]
               int64_t num_tokens, int split_size, int64_t token_stride, int64_t stream_stride) {
    const int first = int(blockIdx.y) * split_size, end = min(SIZE, first + split_size);
    prefetch_projection(fn, first, end);
    await_previous_kernel();
    const Place at;
    Accumulators acc;
    for (int start = first + at.k_warp * BATCH * STEP; start < end; start += K_WARPS * BATCH * STEP) {
        stream_words a[BATCH];
        projection_run b[BATCH];
#pragma unroll
        for (int s = 0; s < BATCH; ++s) {
            const int k = start + s * STEP + at.run * RUN;
            const bf16_t* of_run = residual + k / HIDDEN_SIZE * stream_stride + k % HIDDEN_SIZE;
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int64_t token = at.first_token + at.row_of(m, half);
                    hold<16>(a[s][m][half], of_run + token * token_stride, k < end && token < num_tokens);
                }
            }
            load_projection(b[s], fn, at.row, k, k < end);
        }
#pragma unroll
        for (int s = 0; s < BATCH; ++s) acc.add(a[s], b[s]);
    }
    acc.write(partials, num_tokens, at);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
mhc_post_logits_mma(bf16_t* out,                  // [num_tokens, HC, HIDDEN_SIZE]
                    float* partials,              // [splits, num_tokens, WIDTH]
                    const bf16_t* x,              // [num_tokens, HIDDEN_SIZE]
                    const bf16_t* residual,       // [num_tokens, HC, HIDDEN_SIZE]
                    const float* post_layer_mix,  // [num_tokens, HC]
                    const float* comb_res_mix,    // [num_tokens, HC, HC]
                    const float* fn,              // [COLUMNS, SIZE]
                    int64_t num_tokens, int split_size, int64_t out_token_stride, int64_t out_stream_stride,
                    int64_t x_stride, int64_t token_stride, int64_t stream_stride, int64_t comb_token_stride,
                    int64_t comb_row_stride) {
    const int first = int(blockIdx.y) * split_size, end = min(HIDDEN_SIZE, first + split_size);
    for (int j = 0; j < HC; ++j) prefetch_projection(fn, j * HIDDEN_SIZE + first, j * HIDDEN_SIZE + end);
    await_previous_kernel();
    constexpr int INPUTS = HC + 1;  // the layer's output, and the streams
    __shared__ float factors[TOKENS][HC][INPUTS];
    const Place at;
    for (int i = threadIdx.x; i < TOKENS * HC * INPUTS; i += NUM_THREADS) {
        const int64_t token = min(at.first_token + i / (HC * INPUTS), num_tokens - 1);
        const int j = i / INPUTS % HC, input = i % INPUTS;
        factors[i / (HC * INPUTS)][j][input] =
            input == 0 ? post_layer_mix[token * HC + j]
                       : comb_res_mix[token * comb_token_stride + (input - 1) * comb_row_stride + j];
    }
    __syncthreads();
    Accumulators acc;
    for (int start = first + at.k_warp * STEP; start < end; start += K_WARPS * STEP) {
        const int column = start + at.run * RUN;
        stream_words given[INPUTS];
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int64_t token = at.first_token + at.row_of(m, half);
                const bool exists = column < end && token < num_tokens;
                hold<16>(given[0][m][half], x + token * x_stride + column, exists);
#pragma unroll
                for (int i = 0; i < HC; ++i) {
                    const bf16_t* of_stream = residual + token * token_stride + i * stream_stride;
                    hold<16>(given[i + 1][m][half], of_stream + column, exists);
                }
            }
        }
#pragma unroll 1
        for (int j = 0; j < HC; ++j) {
            projection_run b;
            load_projection(b, fn, at.row, j * HIDDEN_SIZE + column, column < end);
            stream_words a;
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float (&of_token)[INPUTS] = factors[at.row_of(m, half)][j];
#pragma unroll
                    for (int word = 0; word < RUN / 2; ++word) {
                        // As in mhc_post.cu, products and additions are rounded one by one.
                        float low = 0.0f, high = 0.0f;
#pragma unroll
                        for (int i = 0; i < INPUTS; ++i) {
                            float y, z;
                            unpack_pair<bf16_t>(given[i][m][half][word], y, z);
                            y = ieee_multiply(of_token[i], y);
                            z = ieee_multiply(of_token[i], z);
                            low = i == 0 ? y : ieee_add(low, y);
                            high = i == 0 ? z : ieee_add(high, z);
                        }
                        a[m][half][word] = pack_pair<bf16_t>(low, high);
                    }
                    const int64_t token = at.first_token + at.row_of(m, half);
                    if (column < end && token < num_tokens) {
                        bf16_t* to = out + token * out_token_stride + j * out_stream_stride + column;
                        Vec<uint32_t, RUN / 2> words;
#pragma unroll
                        for (int i = 0; i < RUN / 2; ++i) words.data[i] = a[m][half][i];
                        words.store(reinterpret_cast<uint32_t*>(to));
                    }
                }
            }
            acc.add(a, b);
        }
    }
    acc.write(partials, num_tokens, at);
}
