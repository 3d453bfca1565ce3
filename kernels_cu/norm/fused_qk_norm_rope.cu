// fused_qk_norm_rope: RMS norm of every query and key head, then rotary embedding, in place.
//
//     n = x / sqrt(mean(x^2) + eps) * weight                       float32, over one head; weight is q_weight or k_weight
//     IS_NEOX: pairs (j, j + ROTARY_DIM / 2), else (2j, 2j + 1)    of the first ROTARY_DIM elements turn by the angle whose
//     cosine and sine are row position_ids[t] of cos_sin_cache     [cos of each pair, sin of each pair]
//     x = T(n)                                                     rounded once
//
// HEAD_SIZE / 8 lanes share a head, each holding 8 neighbouring elements. A NeoX partner lives in another lane: it comes by
// shuffle where halves are whole vectors, else through shared memory. A position outside the cache leaves its heads as they
// are.
//
// Constants
//     scalar_t      T: element type of qkv and the weights
//     cache_t       element type of cos_sin_cache
//     HEAD_SIZE     64, 128 or 256
//     ROTARY_DIM    even, at most HEAD_SIZE
//     IS_NEOX       which elements make a pair
//     ACCESS_SIZE   elements of qkv in one memory access
//     CACHE_VEC     elements of cos_sin_cache in one memory access; divides 8 and ROTARY_DIM / 2
//     NUM_THREADS   threads in the block

#include "norm.cuh"

constexpr int VEC_SIZE = 8;
constexpr int LANES = HEAD_SIZE / VEC_SIZE;
constexpr int HALF = ROTARY_DIM / 2;
using row_t = Row<scalar_t, HEAD_SIZE, VEC_SIZE, LANES, true, ACCESS_SIZE>;

// cos or sin for the 8 elements from `element` on, all inside the rotary part.
DEVICE void load_angles(const cache_t* row, int element, float (&angle)[VEC_SIZE]) {
    if constexpr (!IS_NEOX) {
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) angle[j] = element + j < ROTARY_DIM ? to_float(row[(element + j) / 2]) : 0.0f;
    } else if constexpr (HALF % VEC_SIZE == 0) {
#pragma unroll
        for (int j = 0; j < VEC_SIZE; j += CACHE_VEC) {
            const auto vec = Vec<cache_t, CACHE_VEC>::load(row + element % HALF + j);
#pragma unroll
            for (int k = 0; k < CACHE_VEC; ++k) angle[j + k] = vec[k];
        }
    } else {
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) angle[j] = element + j < ROTARY_DIM ? to_float(row[(element + j) % HALF]) : 0.0f;
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
fused_qk_norm_rope(scalar_t* qkv,                  // [num_tokens, num_heads_q + num_heads_k + num_heads_v, HEAD_SIZE]
                   const scalar_t* q_weight,       // [HEAD_SIZE]
                   const scalar_t* k_weight,       // [HEAD_SIZE]
                   const cache_t* cos_sin_cache,   // [max_position, ROTARY_DIM]
                   const int64_t* position_ids,    // [num_tokens]
                   int64_t num_tokens, int num_heads_q, int num_heads_k, int num_heads_v, int64_t max_position,
                   float eps) {
    constexpr bool EXCHANGE = IS_NEOX && HALF % VEC_SIZE != 0;
    __shared__ float exchange[EXCHANGE ? NUM_THREADS * VEC_SIZE : 1];
    const int num_heads = num_heads_q + num_heads_k;
    const RowIndex<NUM_THREADS, LANES> at(num_tokens * num_heads);
    const int64_t token = at.row / num_heads;
    const int head = at.row % num_heads;
    const int element = threadIdx.x % LANES * VEC_SIZE;
    scalar_t* x = qkv + (token * (num_heads + num_heads_v) + head) * HEAD_SIZE;
    const int64_t position = position_ids[token];
    const bool inside = position >= 0 && position < max_position;
    const cache_t* angles = cos_sin_cache + (inside ? position : 0) * ROTARY_DIM;

    const row_t row = row_t::load_once(x);
    const row_t weight = row_t::load(head < num_heads_q ? q_weight : k_weight);
    const bool rotates = element < ROTARY_DIM;
    float cosine[VEC_SIZE], sine[VEC_SIZE];
    if (rotates && inside) {
        load_angles(angles, element, cosine);
        load_angles(angles + HALF, element, sine);
    }

    const auto values = [&](int i, int column, float(&v)[VEC_SIZE]) { row.get(i, column).to_floats(v); };
    const float scale = rsqrtf(row_mean_square<row_t, LANES>(values, nullptr) + eps);
    float n[VEC_SIZE], partner[VEC_SIZE];
    values(0, element, n);
    const auto w = weight.get(0, element);
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) n[j] *= scale * w[j];

    if constexpr (!IS_NEOX) {
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) partner[j] = n[j ^ 1];
    } else if constexpr (!EXCHANGE) {
        const int source = element / VEC_SIZE + (element < HALF ? HALF : -HALF) / VEC_SIZE;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) partner[j] = shfl<LANES>(n[j], rotates ? source : 0);
    } else {
        float* head_values = exchange + threadIdx.x / LANES * HEAD_SIZE;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) head_values[element + j] = n[j];
        sync_warp();
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            const int other = element + j + (element + j < HALF ? HALF : -HALF);
            partner[j] = element + j < ROTARY_DIM ? head_values[other] : 0.0f;
        }
    }
    if (!at.active || !inside) return;

    if (rotates) {
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            const bool first = IS_NEOX ? element + j < HALF : j % 2 == 0;
            if (element + j < ROTARY_DIM) n[j] = n[j] * cosine[j] + (first ? -partner[j] : partner[j]) * sine[j];
        }
    }
    row_t::vec_t::from_floats(n).template store<ACCESS_SIZE>(x + element);
}
