// fused_qk_norm_rope: RMS norm of every query and key head, then rotary embedding, in place.
//
//     n = x / sqrt(mean(x^2) + eps) * weight    over one head, float32; weight is q_weight or k_weight
//     x' = n_x * cos - n_y * sin,  y' = n_y * cos + n_x * sin    for each pair (x, y) of the first ROTARY_DIM elements
//     pair j: elements (j, j + ROTARY_DIM / 2) if IS_NEOX, else (2j, 2j + 1)
//     its cos and sin: row position_ids[token] of cos_sin_cache, [cos of all pairs, sin of all pairs]
//
// The result is rounded once to T, the dtype of qkv. A token is not changed if its position lies outside the cache.
//
// One thread block per token. A group of HEAD_SIZE / 8 lanes has a head; each lane holds 8 consecutive elements of up
// to CHUNK heads at a time, so that position, angles and weights are loaded once for all of them.
//
// Constants:
//     cache_t       element type of cos_sin_cache
//     HEAD_SIZE     64, 128 or 256
//     NUM_HEADS_Q, NUM_HEADS_K   heads of each kind, in this order at the beginning of a row
//     ROTARY_DIM    even, at most HEAD_SIZE
//     IS_NEOX       which elements make a pair
//     ACCESS_SIZE   elements of qkv in one memory access
//     CACHE_VEC     elements of cos_sin_cache in one memory access; divides 8 and ROTARY_DIM / 2

#include "head_rotation.cuh"

constexpr int VEC_SIZE = 8;
constexpr int LANES = HEAD_SIZE / VEC_SIZE;
constexpr int GROUPS = NUM_THREADS / LANES;
constexpr int HALF = ROTARY_DIM / 2;
constexpr int HEADS = NUM_HEADS_Q + NUM_HEADS_K;
constexpr int GROUP_HEADS = ceil_div(HEADS, GROUPS);
constexpr int CHUNK = GROUP_HEADS < 8 ? GROUP_HEADS : 8;
using vec_t = Vec<scalar_t, VEC_SIZE>;
using Rotation = HeadRotation<LANES, HALF, IS_NEOX>;
constexpr bool VIA_SHARED = Rotation::VIA_SHARED;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
fused_qk_norm_rope(scalar_t* qkv,                 // [num_tokens, NUM_HEADS_Q + NUM_HEADS_K + value heads, HEAD_SIZE]
                   const scalar_t* q_weight,      // [HEAD_SIZE]
                   const scalar_t* k_weight,      // [HEAD_SIZE]
                   const cache_t* cos_sin_cache,  // [max_position, ROTARY_DIM]
                   const int64_t* position_ids,   // [num_tokens]
                   int64_t qkv_stride, int64_t position_stride, int64_t max_position, float eps) {
    await_previous_kernel();
    __shared__ float shared[VIA_SHARED ? NUM_THREADS * VEC_SIZE : 1];
    const int64_t token = blockIdx.x;
    const int group = threadIdx.x / LANES;
    const int element = threadIdx.x % LANES * VEC_SIZE;
    scalar_t* x = qkv + token * qkv_stride + element;

    const int64_t position = position_ids[token * position_stride];
    const vec_t q_vec = vec_t::load<ACCESS_SIZE>(q_weight + element);
    const vec_t k_vec = vec_t::load<ACCESS_SIZE>(k_weight + element);
    if (position < 0 || position >= max_position) return;
    const bool rotates = element < ROTARY_DIM;
    float cosine[VEC_SIZE], sine[VEC_SIZE];
    if (rotates) {
        Rotation::load_angles<CACHE_VEC>(cos_sin_cache + position * ROTARY_DIM, element, cosine);
        Rotation::load_angles<CACHE_VEC>(cos_sin_cache + position * ROTARY_DIM + HALF, element, sine);
    }

    for (int first = group; first - group < HEADS; first += CHUNK * GROUPS) {
        vec_t vecs[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const int head = first + i * GROUPS;
            if (HEADS % (CHUNK * GROUPS) == 0 || head < HEADS) {
                vecs[i] = vec_t::load_once<ACCESS_SIZE>(x + head * HEAD_SIZE);
            }
        }
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            // Groups without a head compute on garbage registers, because every lane must take part in the shuffles.
            const int head = first + i * GROUPS;
            float n[VEC_SIZE], weight[VEC_SIZE], partner[VEC_SIZE];
            vecs[i].to_floats(n);
            vec_t weight_vec = k_vec;
            if (head < NUM_HEADS_Q) weight_vec = q_vec;
            weight_vec.to_floats(weight);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) sum += n[j] * n[j];
            const float scale = rsqrtf(lane_reduce<Sum, LANES>(sum) / HEAD_SIZE + eps);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) n[j] *= scale * weight[j];

            Rotation::load_partners(n, element, VIA_SHARED ? shared + group * HEAD_SIZE : nullptr, partner);
            if (rotates) Rotation::rotate(n, element, cosine, sine, partner);
            if (HEADS % (CHUNK * GROUPS) == 0 || head < HEADS) {
                vec_t::from_floats(n).store<ACCESS_SIZE>(x + head * HEAD_SIZE);
            }
        }
    }
}
