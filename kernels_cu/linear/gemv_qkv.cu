// gemv_qkv: the queries, keys and values of a token in one kernel, bound by the bandwidth of reading the weight: an RMS
// norm, the QKV projection, RoPE, and the insert of keys and values into a paged cache.
//
//     x = T(T(input[k] / sqrt(mean_k(input[k]^2) + epsilon)) * norm_weight[k])
//     y[n] = sum_k x[k] * weight[n, k] + bias[n]
//     heads of queries and keys:  z = rope(y): rope rotates the first 2 * HALF elements by row `position` of cos_sin
//     query = T(z);  the token's slot of key_cache = T(z), of value_cache = T(y);  all but x in float32
//
// A token with a position outside the table is not rotated, and nothing of it is inserted; nor is a token without a
// slot.
//
// blockIdx.x counts heads, blockIdx.z tokens; PARTS blocks along y share a head. Warps multiply as gemv_rows.cuh says,
// and a warp multiplies both rows of a pair of elements that rotate together. The dot products of a block meet in
// shared memory, where each pair has a thread. The plan promises that no kernel which may still run writes the weight:
// the first chunk is loaded while the previous kernel runs.
//
// Constants:
//     TOKENS, SPLIT, BATCH    of gemv_rows.cuh; TOKENS is 1
//     input_t       element type of input: scalar_t
//     angle_t, position_t, slot_t    element types of cos_sin, positions and slot_mapping
//     HEAD_SIZE     elements of a head
//     NUM_Q, NUM_KV    heads of queries, and of keys
//     HALF          rotated pairs of a head
//     IS_NEOX       pairs are (j, j + HALF), else (2j, 2j + 1)
//     HAS_BIAS      false when bias is null
//     BLOCK_SIZE    slots of a block of the cache
//     PARTS         blocks that share a head

#include "gemv_norm.cuh"
#include "paged.cuh"

// A round is a pair for each warp, or for each SPLIT warps, of the blocks of a head.
constexpr int PAIRS = HEAD_SIZE / 2, ROUND_PAIRS = PARTS * BLOCK_ROWS, ROUNDS = ceil_div(PAIRS, ROUND_PAIRS);
static_assert(PAIRS % BLOCK_ROWS == 0 && PAIRS <= NUM_THREADS);

// The number within the head of pair i of the block.
DEVICE int pair_of(int i) { return i / BLOCK_ROWS * ROUND_PAIRS + int(blockIdx.y) * BLOCK_ROWS + i % BLOCK_ROWS; }
// Element j, 0 or 1, of a pair. Elements that do not rotate pair up with their neighbours.
DEVICE int element_of(int pair, int j) { return IS_NEOX && pair < HALF ? pair + j * HALF : 2 * pair + j; }

// The pair of the block that the dot products of row i of the warp belong to.
DEVICE int pair_of_row(int i) { return i / 2 * BLOCK_ROWS + int(threadIdx.x) / WARP_SIZE / SPLIT; }
DEVICE int64_t weight_row(int i) {
    return int64_t(blockIdx.x) * HEAD_SIZE + element_of(pair_of(pair_of_row(i)), i % 2);
}

// The first chunk, before the previous kernel has ended.
DEVICE void prefetch_chunk(raw_t (&w)[BATCH], const scalar_t* weight, const scalar_t* norm_weight, int64_t stride) {
    load_chunk(w, weight + weight_row(0) * stride, 0);
    prefetch_part(norm_weight, HIDDEN_SIZE - 1, threadIdx.x);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemv_qkv(scalar_t* query,                             // [num_tokens, NUM_Q, HEAD_SIZE]
         const scalar_t* input,                       // [num_tokens, HIDDEN_SIZE]
         const scalar_t* weight,                      // [(NUM_Q + 2 * NUM_KV) * HEAD_SIZE, HIDDEN_SIZE]
         const scalar_t* bias,                        // an element for each row of weight
         const scalar_t* norm_weight,                 // [HIDDEN_SIZE]
         const angle_t* cos_sin,                      // [max_position, 2 * HALF]
         const position_t* positions,                 // [num_tokens]
         const slot_t* slot_mapping,                  // [num_tokens]
         scalar_t* key_cache, scalar_t* value_cache,  // [num_blocks, BLOCK_SIZE, NUM_KV, HEAD_SIZE]
         int64_t num_blocks, int64_t max_position, int64_t input_stride, int64_t weight_stride, int64_t angle_stride,
         int64_t key_block_stride, int64_t key_slot_stride, int64_t key_head_stride, int64_t value_block_stride,
         int64_t value_slot_stride, int64_t value_head_stride, float epsilon) {
    raw_t next[BATCH];
    prefetch_chunk(next, weight, norm_weight, weight_stride);
    await_previous_kernel();
    const int head = blockIdx.x, thread = threadIdx.x;
    const bool is_q = head < NUM_Q, is_k = !is_q && head < NUM_Q + NUM_KV, is_v = !is_q && !is_k;
    const int rounds = ROUNDS - (PAIRS % ROUND_PAIRS > 0 && pair_of((ROUNDS - 1) * BLOCK_ROWS) >= PAIRS);
    const bool has_pair = thread < rounds * BLOCK_ROWS;
    const int pair = has_pair ? pair_of(thread) : 0;
    const int64_t token = blockIdx.z, position = positions[token], slot = slot_mapping[token];

    __shared__ vec_t normalised[VECS];
    scalar_t* x = reinterpret_cast<scalar_t*>(normalised);
    normalise(x, input + token * input_stride, norm_weight, epsilon);

    // What the pair needs after its dot products is in flight with the weight.
    const bool known = position >= 0 && position < max_position;
    const bool rotates = has_pair && !is_v && known && pair < HALF;
    const angle_t* angles = cos_sin + (rotates ? position * angle_stride + pair : 0);
    const float cosine = to_float(angles[0]), sine = to_float(angles[HALF]);
    const auto of_pair = [&](const auto* row, int j) { return to_float(row[element_of(pair, j)]); };
    float terms[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        if constexpr (HAS_BIAS) terms[j] = of_pair(bias + head * HEAD_SIZE, j);
    }

    __shared__ float products[ROUNDS * BLOCK_ROWS][2];
    const auto row = [&](int i) { return weight + weight_row(i) * weight_stride; };
    const auto done = [&](int i, float (&acc)[TOKENS]) {
        if (stores_products()) products[pair_of_row(i)][i % 2] = acc[0];
    };
    multiply_rows(next, 2 * rounds, row, [&](int, int) { return x; }, done);
    __syncthreads();

    float y[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        if (has_pair) y[j] = products[thread][j] + terms[j];
    }
    if (rotates) {
        const float low = ieee_fma(y[0], cosine, ieee_multiply(-y[1], sine));
        y[1] = ieee_fma(y[1], cosine, ieee_multiply(y[0], sine));
        y[0] = low;
    }
    const Pages<BLOCK_SIZE> pages{num_blocks, is_k ? key_block_stride : value_block_stride,
                                  is_k ? key_slot_stride : value_slot_stride};
    const int64_t at = is_q ? 0 : known ? pages.at_slot(slot) : NOWHERE;
    scalar_t* to = is_q   ? query + (token * NUM_Q + head) * HEAD_SIZE
                   : is_k ? key_cache + at + (head - NUM_Q) * key_head_stride
                          : value_cache + at + (head - NUM_Q - NUM_KV) * value_head_stride;
    if (has_pair && at != NOWHERE) {
#pragma unroll
        for (int j = 0; j < 2; ++j) to[element_of(pair, j)] = from_float<scalar_t>(y[j]);
    }
}
