// gemv: a linear layer for decode (small M), bound by the bandwidth of reading the weight.
//
//     out[t, n] = T(sum_k input[t, k] * weight[n, k] + bias[n]), summed in float32    T: dtype of all tensors but input
//
// SPLIT warps share a row of the weight. The row is divided into chunks, and each warp takes a part of every chunk:
// BATCH vectors per lane, adjacent lanes take adjacent vectors. blockIdx.y counts groups of TOKENS tokens; blocks along
// x stride over the rows together. A warp issues the loads of its next chunk before it multiplies the current one; the
// input stays in the L1 cache. While the previous kernel still runs, each warp prefetches its first chunk: to L2, or to
// registers if the caller promises that no kernel before this one writes the weight.
//
// Constants:
//     input_t       element type of input
//     HIDDEN_SIZE   K, the length of each dot product
//     TOKENS        tokens of a block
//     SPLIT         warps that share a row of the weight; divides the warps of a block
//     BATCH         vectors per lane in a chunk
//     HAS_BIAS      false when bias is null
//     CONSTANT_WEIGHT    the previous kernel does not write the weight

#include "reduce.cuh"
#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE, BLOCK_ROWS = NUM_WARPS / SPLIT;
constexpr int VECS = HIDDEN_SIZE / VEC_SIZE, CHUNK = SPLIT * BATCH * WARP_SIZE, CHUNKS = ceil_div(VECS, CHUNK);

// The warp's row of the weight in step `step` of the block. A step is one chunk of one row.
DEVICE int64_t row_of(int step) {
    return (int64_t(step / CHUNKS) * gridDim.x + blockIdx.x) * BLOCK_ROWS + threadIdx.x / WARP_SIZE / SPLIT;
}
// The index within the row of the thread's vector `b` of chunk `chunk`.
DEVICE int vector_of(int chunk, int b) {
    return chunk * CHUNK + (int(threadIdx.x) / WARP_SIZE % SPLIT * BATCH + b) * WARP_SIZE +
           int(threadIdx.x) % WARP_SIZE;
}
DEVICE bool exists(int chunk, int b) { return VECS % CHUNK == 0 || vector_of(chunk, b) < VECS; }

// Loads the vectors of a step. Rows and vectors out of range are clamped to valid ones, so that the loads need no
// branch; their results are not used.
DEVICE void load_step(vec_t (&w)[BATCH], int step, const scalar_t* weight, int64_t output_size, int64_t stride) {
    const int64_t row = row_of(step);
    const scalar_t* address = weight + (row < output_size ? row : output_size - 1) * stride;
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        const int vector = exists(step % CHUNKS, b) ? vector_of(step % CHUNKS, b) : 0;
        w[b] = vec_t::load_once(address + int64_t(vector) * VEC_SIZE);
    }
}

// The first step, before the previous kernel has ended: in `w` if the weight is constant, else in L2.
DEVICE void prefetch_step(vec_t (&w)[BATCH], const scalar_t* weight, int64_t output_size, int64_t stride) {
    if constexpr (CONSTANT_WEIGHT) {
        load_step(w, 0, weight, output_size, stride);
    } else {
        const int64_t row = row_of(0);
        if (row >= output_size) return;
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (exists(0, b)) prefetch_line(weight + row * stride + int64_t(vector_of(0, b)) * VEC_SIZE);
        }
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemv(scalar_t* out,           // [num_tokens, output_size]
     const input_t* input,    // [num_tokens, HIDDEN_SIZE]
     const scalar_t* weight,  // [output_size, HIDDEN_SIZE]
     const scalar_t* bias,    // [output_size]
     int64_t num_tokens, int64_t output_size, int64_t out_stride, int64_t input_stride, int64_t weight_stride) {
    vec_t w[BATCH], next[BATCH];
    prefetch_step(next, weight, output_size, weight_stride);
    await_previous_kernel();
    __shared__ float partial[2][NUM_WARPS][TOKENS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int64_t first_token = int64_t(blockIdx.y) * TOKENS;
    const int64_t row_groups = output_size / BLOCK_ROWS + (output_size % BLOCK_ROWS > 0);
    const int steps = blockIdx.x < row_groups ? int((row_groups - 1 - blockIdx.x) / gridDim.x + 1) * CHUNKS : 0;

    float sums[TOKENS] = {};
    if (!CONSTANT_WEIGHT && steps > 0) load_step(next, 0, weight, output_size, weight_stride);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) w[b] = next[b];
        if (step + 1 < steps) load_step(next, step + 1, weight, output_size, weight_stride);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (!exists(step % CHUNKS, b)) continue;
            float v[VEC_SIZE];
            w[b].to_floats(v);
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                const int64_t token = TOKENS == 1 || first_token + t < num_tokens ? first_token + t : num_tokens - 1;
                float x[VEC_SIZE];
                Vec<input_t, VEC_SIZE>::load(input + token * input_stride +
                                             int64_t(vector_of(step % CHUNKS, b)) * VEC_SIZE)
                    .to_floats(x);
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) sums[t] = fmaf(v[j], x[j], sums[t]);
            }
        }
        if (CHUNKS > 1 && step % CHUNKS < CHUNKS - 1) continue;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) sums[t] = lane_reduce<Sum, WARP_SIZE>(sums[t]);
        if constexpr (SPLIT > 1) {
            // `partial` is double-buffered: other warps may still read the partial sums of the previous row.
            float (&warp_sums)[NUM_WARPS][TOKENS] = partial[step / CHUNKS % 2];
            if (lane == 0) {
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) warp_sums[warp][t] = sums[t];
            }
            __syncthreads();
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                sums[t] = 0.0f;
#pragma unroll
                for (int w = 0; w < SPLIT; ++w) sums[t] += warp_sums[warp / SPLIT * SPLIT + w][t];
            }
        }
        const int64_t row = row_of(step);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            if (lane == t && warp % SPLIT == 0 && row < output_size && first_token + t < num_tokens) {
                if constexpr (HAS_BIAS) sums[t] += to_float(bias[row]);
                out[(first_token + t) * out_stride + row] = from_float<scalar_t>(sums[t]);
            }
            sums[t] = 0.0f;
        }
    }
}
