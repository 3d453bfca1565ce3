// kimi_k3_attn_res: the attention residual of Kimi K3, which mixes the residual stream and the outputs of earlier
// blocks of layers by a softmax, and optionally norms the mix.
//
//     x = T(prefix[t] + delta[t]), or prefix[t];  prefix[t] = x;  blocks[t, block_write_idx] = x if block_write_idx >= 0
//     v[s] = blocks[t, s] for s < NUM_BLOCKS,  v[NUM_BLOCKS] = x
//     p = softmax over s of sum(v[s] * norm_weight * qk_weight) / sqrt(mean(v[s]^2) + eps)
//     y = sum of p[s] * v[s];  output[t] = y, or y / sqrt(mean(y^2) + output_norm_eps) * output_norm_weight
//
// All in float32; T, the dtype of the tensors, rounds x and the output.
//
// One thread block per token. Each thread has the same vectors of all rows, and reads those of the blocks twice: for
// all logits together, which takes one reduction, and for the mix, then mostly from a cache.
//
// Constants
//     scalar_t      T
//     HIDDEN_SIZE   elements of a row; a multiple of VEC_SIZE
//     NUM_BLOCKS    blocks that are mixed
//     HAS_DELTA     prefix has an addend
//     HAS_NORM      the mix is normed
//     VEC_SIZE      elements in one memory access

#include "reduce.cuh"
#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int SOURCES = NUM_BLOCKS + 1, LANES = 32, WARPS = NUM_THREADS / LANES;
constexpr int VECS = ceil_div(HIDDEN_SIZE, NUM_THREADS* VEC_SIZE);
constexpr int ACCS = 2 * SOURCES;  // of each source, the squares and the products with the weights

DEVICE int column_of(int i) { return (i * NUM_THREADS + int(threadIdx.x)) * VEC_SIZE; }

// Adds each of the N accumulators of a thread over the block.
template <int N>
DEVICE void add_over_block(float (&acc)[N], float* partial) {
    __syncthreads();
#pragma unroll
    for (int s = 0; s < N; ++s) {
        acc[s] = lane_reduce<Sum, LANES>(acc[s]);
        if (threadIdx.x % LANES == 0) partial[s * WARPS + threadIdx.x / LANES] = acc[s];
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < N; ++s) {
        acc[s] = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) acc[s] += partial[s * WARPS + warp];
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
kimi_k3_attn_res(scalar_t* prefix,                    // [num_tokens, HIDDEN_SIZE]
                 const scalar_t* delta,               // [num_tokens, HIDDEN_SIZE]
                 scalar_t* blocks,                    // [num_tokens, blocks, HIDDEN_SIZE]
                 const scalar_t* norm_weight,         // [HIDDEN_SIZE]
                 const scalar_t* qk_weight,           // [HIDDEN_SIZE]
                 const scalar_t* output_norm_weight,  // [HIDDEN_SIZE]
                 scalar_t* output,                    // [num_tokens, HIDDEN_SIZE]
                 int64_t prefix_stride, int64_t delta_stride, int64_t blocks_stride, int64_t block_stride,
                 int64_t output_stride, int64_t block_write_idx, float eps, float output_norm_eps) {
    await_previous_kernel();
    __shared__ float partial[ACCS * WARPS];
    const int64_t token = blockIdx.x;
    const scalar_t* of_token = blocks + token * blocks_stride;
    // Element by element: a choice between two vectors as a whole would lie in local memory.
    const auto load_block = [&](int s, int column, const vec_t& x) {
        vec_t v = vec_t::load(of_token + s * block_stride + column);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v.data[j] = s == block_write_idx ? x.data[j] : v.data[j];
        return v;
    };

    vec_t prefixes[VECS];
    float acc[ACCS] = {};
#pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int column = column_of(i);
        if (column >= HIDDEN_SIZE) continue;
        vec_t x = vec_t::load(prefix + token * prefix_stride + column);
        if constexpr (HAS_DELTA) {
            x = x + vec_t::load(delta + token * delta_stride + column);
            x.store(prefix + token * prefix_stride + column);
        }
        if (block_write_idx >= 0) x.store(blocks + token * blocks_stride + block_write_idx * block_stride + column);
        prefixes[i] = x;
        if constexpr (NUM_BLOCKS > 0) {
            const vec_t norms = vec_t::load(norm_weight + column), queries = vec_t::load(qk_weight + column);
#pragma unroll
            for (int s = 0; s < SOURCES; ++s) {
                const vec_t v = s == NUM_BLOCKS ? x : load_block(s, column, x);
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) {
                    acc[2 * s] += v[j] * v[j];
                    acc[2 * s + 1] += v[j] * (norms[j] * queries[j]);
                }
            }
        }
    }
    float weights[SOURCES];
    weights[0] = 1.0f;
    if constexpr (NUM_BLOCKS > 0) {
        add_over_block(acc, partial);
        float largest = 0.0f;
#pragma unroll
        for (int s = 0; s < SOURCES; ++s) {
            weights[s] = acc[2 * s + 1] * rsqrtf(acc[2 * s] / HIDDEN_SIZE + eps);
            largest = s == 0 ? weights[0] : fmaxf(largest, weights[s]);
        }
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < SOURCES; ++s) total += weights[s] = expf(weights[s] - largest);
#pragma unroll
        for (int s = 0; s < SOURCES; ++s) weights[s] /= total;
    }

    float mixed[VECS][VEC_SIZE];
    float squares[1] = {};
#pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int column = column_of(i);
        if (column >= HIDDEN_SIZE) continue;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) mixed[i][j] = prefixes[i][j] * weights[NUM_BLOCKS];
#pragma unroll
        for (int s = 0; s < NUM_BLOCKS; ++s) {
            const vec_t v = load_block(s, column, prefixes[i]);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) mixed[i][j] += v[j] * weights[s];
        }
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) squares[0] += mixed[i][j] * mixed[i][j];
    }
    float scale = 1.0f;
    if constexpr (HAS_NORM) {
        add_over_block(squares, partial);
        scale = rsqrtf(squares[0] / HIDDEN_SIZE + output_norm_eps);
    }
#pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int column = column_of(i);
        if (column >= HIDDEN_SIZE) continue;
        if constexpr (HAS_NORM) {
            const vec_t weight = vec_t::load(output_norm_weight + column);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) mixed[i][j] *= scale * weight[j];
        }
        vec_t::from_floats(mixed[i]).store(output + token * output_stride + column);
    }
}
