// skinny_linear: few rows times a matrix, where the bytes of the matrix are what takes time.
//
//     out[t, n] = T(sum_k input[t, k] * weight[n, k] + bias[n]), summed in float32
//
// SPLIT warps share a row of weight, each with a part of every chunk of it: BATCH vectors to a lane, neighbouring lanes with
// neighbouring vectors. The blocks go over the matrix together, and a warp has asked for its next vectors before it multiplies
// with those that have come; input stays in the first cache. While the kernel before still runs, a warp asks for its first row:
// what that holds is looked at only afterwards.
//
// Constants
//     scalar_t      T: element type of out, input, weight and bias
//     HIDDEN_SIZE   elements that are summed up
//     VEC_SIZE      elements in one memory access; divides HIDDEN_SIZE
//     TOKENS        rows of input that a block multiplies with
//     SPLIT         warps that share a row of weight; divides the warps of a block
//     BATCH         vectors of a chunk that a lane has
//     HAS_BIAS      false when bias is null
//     NUM_THREADS   threads in the block
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "reduce.cuh"
#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE, BLOCK_ROWS = NUM_WARPS / SPLIT;
constexpr int VECS = HIDDEN_SIZE / VEC_SIZE, CHUNK = SPLIT * BATCH * WARP_SIZE, CHUNKS = ceil_div(VECS, CHUNK);

// The row of weight that the warp has in the block's step, counted over chunks.
DEVICE int64_t row_of(int step) {
    return (int64_t(step / CHUNKS) * gridDim.x + blockIdx.x) * BLOCK_ROWS + threadIdx.x / WARP_SIZE / SPLIT;
}
// The thread's vector number `b` of a chunk.
DEVICE int vector_of(int chunk, int b) {
    return chunk * CHUNK + (int(threadIdx.x) / WARP_SIZE % SPLIT * BATCH + b) * WARP_SIZE + int(threadIdx.x) % WARP_SIZE;
}
DEVICE bool exists(int chunk, int b) { return VECS % CHUNK == 0 || vector_of(chunk, b) < VECS; }

DEVICE void prefetch_weight(const scalar_t* weight, int64_t output_size, int64_t stride) {
    const int64_t row = row_of(0);
    if (row >= output_size) return;
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        if (exists(0, b)) prefetch_line(weight + row * stride + int64_t(vector_of(0, b)) * VEC_SIZE);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
skinny_linear(scalar_t* out,           // [num_tokens, output_size]
              const scalar_t* input,   // [num_tokens, HIDDEN_SIZE]
              const scalar_t* weight,  // [output_size, HIDDEN_SIZE]
              const scalar_t* bias,    // [output_size]
              int64_t num_tokens, int64_t output_size, int64_t out_stride, int64_t input_stride, int64_t weight_stride) {
    prefetch_weight(weight, output_size, weight_stride);
    await_previous_kernel();
    __shared__ float partial[2][NUM_WARPS][TOKENS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int64_t first_token = int64_t(blockIdx.y) * TOKENS;
    const int64_t block_rows = output_size / BLOCK_ROWS + (output_size % BLOCK_ROWS > 0);  // groups of rows that blocks have
    const int steps = blockIdx.x < block_rows ? int((block_rows - 1 - blockIdx.x) / gridDim.x + 1) * CHUNKS : 0;

    // What does not exist is asked for where something does, which takes no condition, and counts for nothing.
    const auto load = [&](int step, vec_t(&w)[BATCH]) {
        const int64_t row = row_of(step);
        const scalar_t* address = weight + (row < output_size ? row : output_size - 1) * weight_stride;
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int vector = exists(step % CHUNKS, b) ? vector_of(step % CHUNKS, b) : 0;
            w[b] = vec_t::load_once(address + int64_t(vector) * VEC_SIZE);
        }
    };
    vec_t w[BATCH], next[BATCH];
    float sums[TOKENS] = {};
    if (steps > 0) load(0, next);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) w[b] = next[b];
        if (step + 1 < steps) load(step + 1, next);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (!exists(step % CHUNKS, b)) continue;
            float v[VEC_SIZE];
            w[b].to_floats(v);
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                const int64_t token = TOKENS == 1 || first_token + t < num_tokens ? first_token + t : num_tokens - 1;
                float x[VEC_SIZE];
                vec_t::load(input + token * input_stride + int64_t(vector_of(step % CHUNKS, b)) * VEC_SIZE).to_floats(x);
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) sums[t] = fmaf(v[j], x[j], sums[t]);
            }
        }
        if (CHUNKS > 1 && step % CHUNKS < CHUNKS - 1) continue;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) sums[t] = lane_reduce<Sum, WARP_SIZE>(sums[t]);
        if constexpr (SPLIT > 1) {
            float(&parts)[NUM_WARPS][TOKENS] = partial[step / CHUNKS % 2];  // of the row before, others may still read the other
            if (lane == 0) {
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) parts[warp][t] = sums[t];
            }
            __syncthreads();
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                sums[t] = 0.0f;
#pragma unroll
                for (int w = 0; w < SPLIT; ++w) sums[t] += parts[warp / SPLIT * SPLIT + w][t];
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
