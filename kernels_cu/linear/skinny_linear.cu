// skinny_linear: few rows times a matrix, where the bytes of the matrix are what takes time.
//
//     out[t, n] = T(sum_k input[t, k] * weight[n, k] + bias[n]), summed in float32
//
// A warp has ROWS neighbouring rows of weight. Its lanes have neighbouring vectors of a row, BATCH of which are on their way
// at a time, and multiply each with TOKENS rows of input, which stay in the first cache. While the kernel before still runs,
// a warp asks for its rows: what they hold is looked at only afterwards.
//
// Constants
//     scalar_t      T: element type of out, input, weight and bias
//     HIDDEN_SIZE   elements that are summed up
//     VEC_SIZE      elements in one memory access; divides HIDDEN_SIZE
//     TOKENS        rows of input that a block multiplies with
//     ROWS          rows of weight to a warp
//     BATCH         vectors of a row that a lane loads at a time
//     HAS_BIAS      false when bias is null
//     NUM_THREADS   threads in the block
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "reduce.cuh"
#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int VECS = HIDDEN_SIZE / VEC_SIZE, ROUNDS = ceil_div(VECS, WARP_SIZE), BLOCK_ROWS = NUM_THREADS / WARP_SIZE * ROWS;

// The warp's rows of weight; behind the last, that one again.
DEVICE const scalar_t* weight_row(const scalar_t* weight, int r, int64_t output_size, int64_t stride) {
    const int64_t row = int64_t(blockIdx.x) * BLOCK_ROWS + threadIdx.x / WARP_SIZE * ROWS + r;
    return weight + (row < output_size ? row : output_size - 1) * stride;
}

DEVICE void prefetch_weight(const scalar_t* weight, int64_t output_size, int64_t stride) {
    constexpr int LINE = 128 / int(sizeof(scalar_t));
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const scalar_t* row = weight_row(weight, r, output_size, stride);
        for (int k = threadIdx.x % WARP_SIZE * LINE; k < HIDDEN_SIZE; k += WARP_SIZE * LINE) prefetch_line(row + k);
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
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t first_token = int64_t(blockIdx.y) * TOKENS;
    float sums[ROWS][TOKENS] = {};
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round += BATCH) {
        vec_t w[ROWS][BATCH];
        const auto vector = [&](int b) { return (round + b) * WARP_SIZE + lane; };
        const auto exists = [&](int b) { return VECS % (WARP_SIZE * BATCH) == 0 || vector(b) < VECS; };
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const scalar_t* row = weight_row(weight, r, output_size, weight_stride);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                w[r][b] = exists(b) ? vec_t::load_once(row + int64_t(vector(b)) * VEC_SIZE) : vec_t();
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (!exists(b)) continue;
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                const int64_t token = TOKENS == 1 || first_token + t < num_tokens ? first_token + t : num_tokens - 1;
                float x[VEC_SIZE];
                vec_t::load(input + token * input_stride + int64_t(vector(b)) * VEC_SIZE).to_floats(x);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    float v[VEC_SIZE];
                    w[r][b].to_floats(v);
#pragma unroll
                    for (int j = 0; j < VEC_SIZE; ++j) sums[r][t] = fmaf(v[j], x[j], sums[r][t]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int64_t row = int64_t(blockIdx.x) * BLOCK_ROWS + threadIdx.x / WARP_SIZE * ROWS + r;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            float sum = lane_reduce<Sum, WARP_SIZE>(sums[r][t]);
            if (lane != t % WARP_SIZE || row >= output_size || first_token + t >= num_tokens) continue;
            if constexpr (HAS_BIAS) sum += to_float(bias[row]);
            out[(first_token + t) * out_stride + row] = from_float<scalar_t>(sum);
        }
    }
}
