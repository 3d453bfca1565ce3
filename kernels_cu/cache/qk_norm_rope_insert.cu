// qk_norm_rope_insert: RMS norm and RoPE of the query and key heads in a row of qkv, and the insert of keys and values
// into a paged cache. A row may also have the query heads and the one key of an indexer, with a cache of its own.
//
//     n = x / sqrt(mean(x^2) + eps) * (weight + weight_bias)    over one head; without HAS_WEIGHTS n = x / sqrt(...)
//     n = x, without NORMS
//     y = T(rope(n));  rope rotates the first 2 * HALF elements, as head_rotation.cuh says, by row positions[t] of cos
//         and sin; T is the dtype of qkv; all else in float32
//     queries, keys: y to q_out, k_out, or in offset; values: x to v_out
//     q_fp8_out = e4m3(y / scale);  the caches of keys and values get y and x, or fp8 of y / k_scale and x / v_scale
//     index queries: y to index_q_out, or in offset;  the index key: y in offset and to index_cache; index_t is T or fp8
//
// A token with a position outside the table is not rotated, and nothing of it is inserted; nor is what has no slot.
//
// Thread mapping: LANES lanes share a head, with 8 consecutive elements each. The heads of a token (queries, keys,
// values, index queries, index key) are distributed round-robin over its GROUPS groups of lanes.
//
// Constants
//     scalar_t      T: element type of qkv, of two bytes
//     weight_t, angle_t, slot_t, position_t   element types of weights, of cos and sin, of slots, of positions
//     cache_t       element type of key_cache and value_cache: T or an fp8 type
//     index_t       element type of index_q_out and index_cache: T or an fp8 type
//     HEAD_SIZE     elements of a head, a multiple of 8
//     LANES         lanes of a head, a power of two
//     NUM_Q, NUM_KV, NUM_INDEX   heads of queries, of keys and of values, and of index queries
//     INDEX         index heads are processed; a row then has them after the values
//     HALF          rotated pairs of a head; 0 without RoPE
//     IS_NEOX       which elements make a pair
//     NORMS         heads are normed
//     HAS_WEIGHTS   norms have weights
//     SPLIT_ANGLES  cos and sin are two tensors; else sines follow the HALF cosines of a row
//     INSERT        there is a cache
//     ONE_CACHE     an entry of a head is its key and then its value; else value_cache is like key_cache
//     INDEX_SLOTS   the index key has slots of its own
//     BLOCK_SIZE    slots of a block
//     ROUNDS        heads of a group of lanes
//     ACCESS_SIZE   elements of tensors with heads in one memory access
//     ANGLE_ACCESS  elements of cos and sin in one memory access
//     CONSTANT_POSITIONS  the previous kernel writes no position, slot, angle or weight: they are loaded while it runs

#include "cache.cuh"
#include "head_rotation.cuh"
#include "paged.cuh"

constexpr int VEC_SIZE = 8;
constexpr int FIRST_K = NUM_Q, FIRST_V = NUM_Q + NUM_KV, FIRST_INDEX = NUM_Q + 2 * NUM_KV;
constexpr int HEADS = FIRST_INDEX + (INDEX ? NUM_INDEX + 1 : 0);
constexpr int GROUPS = ceil_div(HEADS, ROUNDS);
constexpr bool HAS_ROPE = HALF > 0;
using Rotation = HeadRotation<LANES, (HALF > 0 ? HALF : 8), IS_NEOX>;
constexpr bool VIA_SHARED = HAS_ROPE && Rotation::VIA_SHARED;
using vec_t = Vec<scalar_t, VEC_SIZE>;
// Whether all loads but those of the angles, which need the position, are in flight together. With two heads weights
// and slot would spill.
constexpr bool LOADS_EARLY = ROUNDS == 1;
struct HeadWeights { weight_t of[VEC_SIZE]; };
// Narrow accesses and partners by shared memory need more than the 64 registers that four blocks per SM leave a thread.
constexpr int MIN_BLOCKS = ACCESS_SIZE == VEC_SIZE && !VIA_SHARED ? 1024 / NUM_THREADS : 512 / NUM_THREADS;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
qk_norm_rope_insert(scalar_t* qkv,  // [num_tokens, heads and more], heads of HEAD_SIZE elements
                    const weight_t* q_weight, const weight_t* k_weight, const weight_t* index_q_weight,
                    const weight_t* index_k_weight,            // [HEAD_SIZE] each
                    const angle_t* cos, const angle_t* sin,    // [max_position, HALF] or [max_position, 2 * HALF]
                    const position_t* positions,               // [num_tokens]
                    const slot_t* slot_mapping,                // [num_slots]
                    const slot_t* index_slot_mapping,          // [num_index_slots], with INDEX_SLOTS
                    scalar_t* q_out, fp8_e4m3_t* q_fp8_out,    // [num_tokens, NUM_Q, HEAD_SIZE], or null
                    scalar_t* k_out, scalar_t* v_out,          // [num_tokens, NUM_KV, HEAD_SIZE], or null
                    index_t* index_q_out,                      // [num_tokens, NUM_INDEX, HEAD_SIZE], or null
                    cache_t* key_cache, cache_t* value_cache,  // [num_blocks, BLOCK_SIZE, NUM_KV, HEAD_SIZE]
                    index_t* index_cache,                      // [slots, HEAD_SIZE]
                    const float* q_scale, const float* k_scale,
                    const float* v_scale,  // one element each; null for q_fp8_scale and 1
                    int64_t num_tokens, int64_t num_slots, int64_t num_index_slots, int64_t num_blocks,
                    int64_t index_cache_slots, int64_t max_position, int64_t qkv_stride, int64_t cos_stride,
                    int64_t sin_stride, int64_t key_block_stride, int64_t key_slot_stride, int64_t key_head_stride,
                    int64_t value_block_stride, int64_t value_slot_stride, int64_t value_head_stride,
                    int64_t positions_stride, int64_t slot_mapping_stride, int64_t index_slot_mapping_stride, float eps,
                    float weight_bias, float q_fp8_scale) {
    __shared__ float shared[VIA_SHARED ? NUM_THREADS * VEC_SIZE : 1];
    const int lane = threadIdx.x % LANES, element = lane * VEC_SIZE;
    const bool holds = LANES * VEC_SIZE == HEAD_SIZE || element < HEAD_SIZE;
    const uint64_t group = (uint64_t(blockIdx.x) * NUM_THREADS + threadIdx.x) / LANES;
    const bool exists = group < uint64_t(num_tokens) * GROUPS && holds;
    const int64_t token = exists ? group / GROUPS : 0;
    const int first = made_anew(group % GROUPS);
    if constexpr (!CONSTANT_POSITIONS) await_previous_kernel();
    scalar_t* row = qkv + token * qkv_stride + element;

    const int64_t position = HAS_ROPE ? load_index<CONSTANT_POSITIONS>(positions + token * positions_stride) : 0;
    const auto load_slot = [&] {
        if (token >= num_slots) return NOWHERE;
        return int64_t(load_index<CONSTANT_POSITIONS>(slot_mapping + token * slot_mapping_stride));
    };
    const int64_t early_slot = LOADS_EARLY && INSERT ? load_slot() : NOWHERE;
    const auto load_weights = [&](int head) {
        HeadWeights found = {};
        if (!NORMS || !HAS_WEIGHTS || !exists || head >= HEADS || (head >= FIRST_V && head < FIRST_INDEX)) return found;
        const weight_t* from = head < FIRST_K     ? q_weight
                               : head < FIRST_V   ? k_weight
                               : head < HEADS - 1 ? index_q_weight
                                                  : index_k_weight;
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) found.of[j] = from[element + j];
        return found;
    };
    const HeadWeights early_weights = LOADS_EARLY ? load_weights(first) : HeadWeights{};
    vec_t vecs[ROUNDS];
    const auto load_heads = [&] {
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int head = first + round * GROUPS;
            vecs[round] = vec_t::full(0.0f);
            if (exists && head < HEADS) vecs[round] = vec_t::load<ACCESS_SIZE>(row + head * HEAD_SIZE);
        }
    };
    if constexpr (!CONSTANT_POSITIONS) load_heads();
    if constexpr (LOADS_EARLY) keep_loads_of_warp();
    bool known = true;
    float cosine[VEC_SIZE], sine[VEC_SIZE];
    const bool rotates = HAS_ROPE && element < 2 * HALF;
    if constexpr (HAS_ROPE) {
        known = position >= 0 && position < max_position;
        if (known && rotates) {
            const angle_t* sines = SPLIT_ANGLES ? sin : cos + HALF;
            Rotation::template load_angles<ANGLE_ACCESS>(cos + position * cos_stride, element, cosine);
            Rotation::template load_angles<ANGLE_ACCESS>(sines + position * sin_stride, element, sine);
        }
    }
    if constexpr (CONSTANT_POSITIONS) {
        await_previous_kernel();
        load_heads();
    }
    const Quotient over_q(q_scale == nullptr ? q_fp8_scale : *q_scale), over_one(1.0f);

#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int head = first + round * GROUPS;
        const bool is_q = head < FIRST_K, is_k = head >= FIRST_K && head < FIRST_V;
        const bool is_v = head >= FIRST_V && head < FIRST_INDEX;
        const bool is_index_k = INDEX && head == HEADS - 1, is_index_q = INDEX && head >= FIRST_INDEX && !is_index_k;
        float n[VEC_SIZE];
        vecs[round].to_floats(n);
        if constexpr (NORMS) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) sum += n[j] * n[j];
            const float scale = rsqrtf(lane_reduce<Sum, LANES>(sum) / HEAD_SIZE + eps);
            const HeadWeights weights = LOADS_EARLY ? early_weights : load_weights(head);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                const float weight = HAS_WEIGHTS ? to_float(weights.of[j]) + weight_bias : 1.0f;
                n[j] = ieee_multiply(n[j], scale * weight);
            }
        }
        if constexpr (HAS_ROPE) {
            float partner[VEC_SIZE];
            float* of_group = VIA_SHARED ? shared + threadIdx.x / LANES * (LANES * VEC_SIZE) : nullptr;
            Rotation::load_partners(n, element, of_group, partner);
            if (known && rotates) Rotation::rotate(n, element, cosine, sine, partner);
        }
        if (!exists || head >= HEADS) continue;
        const vec_t y = is_v ? vecs[round] : vec_t::from_floats(n);

        scalar_t* to = row + head * HEAD_SIZE;
        if (is_q && q_out != nullptr) to = q_out + (token * NUM_Q + head) * HEAD_SIZE + element;
        if (is_q && q_out == nullptr && q_fp8_out != nullptr) to = nullptr;
        if (is_k && k_out != nullptr) to = k_out + (token * NUM_KV + head - FIRST_K) * HEAD_SIZE + element;
        if (is_v) to = v_out == nullptr ? nullptr : v_out + (token * NUM_KV + head - FIRST_V) * HEAD_SIZE + element;
        if (is_index_q && index_q_out != nullptr) {
            index_t* index_to = index_q_out + (token * NUM_INDEX + head - FIRST_INDEX) * HEAD_SIZE + element;
            encode<index_t>(y, over_one).template store<ACCESS_SIZE>(index_to);
            to = nullptr;
        }
        if (to != nullptr) y.template store<ACCESS_SIZE>(to);
        if (is_q && q_fp8_out != nullptr) {
            fp8_e4m3_t* quants = q_fp8_out + (token * NUM_Q + head) * HEAD_SIZE + element;
            encode<fp8_e4m3_t>(y, over_q).template store<ACCESS_SIZE>(quants);
        }

        if (!INSERT || !known) continue;
        const int64_t slot = LOADS_EARLY ? early_slot : load_slot();
        if (is_k || is_v) {
            const Pages<BLOCK_SIZE> pages{num_blocks, is_k ? key_block_stride : value_block_stride,
                                          is_k ? key_slot_stride : value_slot_stride};
            const int64_t at = pages.at_slot(slot);
            if (at == NOWHERE) continue;
            const int64_t head_stride = is_k ? key_head_stride : value_head_stride;
            const int64_t offset = at + (head - (is_k ? FIRST_K : FIRST_V)) * head_stride + element;
            const float* scale_of = is_k ? k_scale : v_scale;
            const Quotient over(scale_of == nullptr ? 1.0f : *scale_of);
            cache_t* values = ONE_CACHE ? key_cache + HEAD_SIZE : value_cache;
            encode<cache_t>(y, over).template store<ACCESS_SIZE>((is_k ? key_cache : values) + offset);
        }
        if (is_index_k) {
            const bool own = INDEX_SLOTS;
            if (own && token >= num_index_slots) continue;
            const int64_t index_slot = own ? int64_t(index_slot_mapping[token * index_slot_mapping_stride]) : slot;
            if (index_slot < 0 || index_slot >= index_cache_slots) continue;
            encode<index_t>(y, over_one).template store<ACCESS_SIZE>(index_cache + index_slot * HEAD_SIZE + element);
        }
    }
}
