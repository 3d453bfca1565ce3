// mla_rope_insert.cuh: the work of concat_and_cache_mla_rope_fused.cu, which describes it and its constants, on one token.
#pragma once
#include "cache.cuh"
#include "norm.cuh"
#include "paged.cuh"
#include "rotary.cuh"

constexpr int HALF = ROPE_SIZE / 2;
constexpr int HEAD_ITEMS = HALF / VEC_SIZE;
constexpr int QUERY_ITEMS = NUM_HEADS * HEAD_ITEMS;
constexpr int ITEMS = QUERY_ITEMS + HEAD_ITEMS + LATENT_SIZE / VEC_SIZE;
static_assert(ROPE_SIZE % (2 * VEC_SIZE) == 0 && LATENT_SIZE % VEC_SIZE == 0);
using vec_t = Vec<scalar_t, VEC_SIZE>;

// VEC_SIZE pairs of a head as they lie in memory: vector a at offset first(item) of the head, vector b at offset
// second(item).
struct PairVectors {
    vec_t a, b;
    static DEVICE int first(int item) { return IS_NEOX ? item * VEC_SIZE : 2 * item * VEC_SIZE; }
    static DEVICE int second(int item) { return IS_NEOX ? HALF + item * VEC_SIZE : (2 * item + 1) * VEC_SIZE; }

    // Element i of both vectors, a before b.
    DEVICE scalar_t& at(int i) { return i < VEC_SIZE ? a.data[i] : b.data[i - VEC_SIZE]; }

    DEVICE void rotate(const vec_t& cosine, const vec_t& sine) {
        vec_t x = a, y = b;
        if constexpr (!IS_NEOX) {
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
                x.data[i] = at(2 * i);
                y.data[i] = at(2 * i + 1);
            }
        }
        turn(x, y, cosine, sine);
        if constexpr (IS_NEOX) {
            a = x;
            b = y;
        } else {
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
                at(2 * i) = x.data[i];
                at(2 * i + 1) = y.data[i];
            }
        }
    }
};

// 1 / sqrt(mean of squares + epsilon) of a latent vector. All lanes of the warp call it.
DEVICE float norm_scale(const scalar_t* latent, float epsilon) {
    float sum = 0.0f;
#pragma unroll
    for (int i = threadIdx.x % WARP_SIZE; i < LATENT_SIZE / VEC_SIZE; i += WARP_SIZE) {
        float x[VEC_SIZE];
        vec_t::load(latent + i * VEC_SIZE).to_floats(x);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) sum = fmaf(x[j], x[j], sum);
    }
    return rsqrtf(lane_reduce<Sum, WARP_SIZE>(sum) / LATENT_SIZE + epsilon);
}

// A template, so that only one of the two branches is compiled.
template <typename U>
DEVICE vec_t angles_at(const U* address) {
    const auto angles = Vec<U, VEC_SIZE>::load(address);
    if constexpr (is_same<U, scalar_t>) {
        return angles;
    } else {
        float x[VEC_SIZE];
        angles.to_floats(x);
        return vec_t::from_floats(x);
    }
}

// The tensors and strides of the kernel's arguments of the same names.
struct MlaRopeInsert {
    const position_t* positions;
    scalar_t *q_pe, *k_pe;
    const scalar_t *kv_c, *norm_weight;
    const angle_t* cos_sin_cache;
    const slot_t* slot_mapping;
    cache_t* kv_cache;
    const float* kv_cache_scale;
    int64_t num_blocks, max_position, positions_stride, slot_mapping_stride, q_stride, q_head_stride, k_stride,
        kv_c_stride, block_stride, slot_stride;
    float epsilon;

    // Part `part` of the token's work, by a block.
    DEVICE void run(int64_t token, int part) const {
        const scalar_t* const latent = kv_c + token * kv_c_stride;
        const int64_t position = positions[token * positions_stride], slot = slot_mapping[token * slot_mapping_stride];
        keep_loads_of_warp();  // The compiler would load the slot once the position is known.
        float scale = 0.0f;
        if constexpr (NORMALISED) scale = norm_scale(latent, epsilon);
        if (position < 0 || position >= max_position) return;
        const Pages<BLOCK_SIZE> pages{num_blocks, block_stride, slot_stride};
        const int64_t entry = pages.at_slot(slot);
        const angle_t* angles = cos_sin_cache + position * ROPE_SIZE;
        const Quotient over_scale(is_same<cache_t, scalar_t> ? 1.0f : *kv_cache_scale);
        const auto keep = [&](const vec_t& x, int element) {
            encode<cache_t>(x, over_scale).store(kv_cache + entry + element);
        };

#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int item = (part * ROUNDS + round) * NUM_THREADS + threadIdx.x;
            if (item < QUERY_ITEMS + HEAD_ITEMS) {
                const bool is_query = item < QUERY_ITEMS;
                if (!is_query && entry == NOWHERE) continue;
                const int of_head = item % HEAD_ITEMS;
                scalar_t* head =
                    is_query ? q_pe + token * q_stride + item / HEAD_ITEMS * q_head_stride : k_pe + token * k_stride;
                PairVectors pairs{vec_t::load(head + PairVectors::first(of_head)),
                                  vec_t::load(head + PairVectors::second(of_head))};
                pairs.rotate(angles_at(angles + of_head * VEC_SIZE), angles_at(angles + HALF + of_head * VEC_SIZE));
                pairs.a.store(head + PairVectors::first(of_head));
                pairs.b.store(head + PairVectors::second(of_head));
                if (!is_query) {
                    keep(pairs.a, LATENT_SIZE + PairVectors::first(of_head));
                    keep(pairs.b, LATENT_SIZE + PairVectors::second(of_head));
                }
            } else if (item < ITEMS && entry != NOWHERE) {
                const int element = (item - QUERY_ITEMS - HEAD_ITEMS) * VEC_SIZE;
                vec_t x = vec_t::load(latent + element);
                if constexpr (NORMALISED) {
                    float v[VEC_SIZE];
                    x.to_floats(v);
                    x = scale_and_weigh(v, scale, vec_t::load(norm_weight + element));
                }
                keep(x, element);
            }
        }
    }
};
