// concat_and_cache_mla_rope_fused: rotates queries and keys in place, then writes latent vector and key into a slot of
// a paged cache.
//
//     x' = T(T(x * cos) - T(y * sin)),   y' = T(T(y * cos) + T(x * sin))
//     for the pairs (j, j + ROPE_SIZE / 2) if IS_NEOX, else (2j, 2j + 1), of every head of q_pe and of k_pe; the angles
//     are row positions[t] of cos_sin_cache
//     kv_cache[block, offset] = [c[t], rotated k_pe[t]]                      fp8: x / scale, rounded
//     c = kv_c, with NORMALISED its RMS norm:  T(T(kv_c[t, i] / sqrt(mean_i(kv_c[t, i]^2) + epsilon)) * norm_weight[i])
//     where block, offset = divmod(slot_mapping[t], BLOCK_SIZE)
//
// A token with a position outside of the table is not changed. For a token without an existing slot, only queries are
// rotated.
//
// Threads: blockIdx.x counts tokens, blockIdx.y parts of a token's work. A thread takes up to ROUNDS items of the
// token. An item is VEC_SIZE pairs of a query head, VEC_SIZE pairs of the key, or VEC_SIZE elements of the latent
// vector. The mean square is summed by each warp, without a barrier.
//
// Constants
//     scalar_t      T: element type of q_pe, k_pe and kv_c
//     angle_t       element type of cos_sin_cache: T, or float, which is rounded to T
//     cache_t       element type of kv_cache: scalar_t or an fp8 type
//     slot_t        element type of slot_mapping
//     position_t    element type of positions
//     NUM_HEADS     query heads
//     ROPE_SIZE     elements of a head of q_pe and of k_pe
//     LATENT_SIZE   elements of kv_c
//     IS_NEOX       which elements make a pair
//     NORMALISED    whether latent vectors are normalised; else norm_weight is null
//     VEC_SIZE      divides ROPE_SIZE / 2 and LATENT_SIZE
//     ROUNDS        items of a thread

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

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1024 / NUM_THREADS)
concat_and_cache_mla_rope_fused(const position_t* positions,   // [num_tokens]
                                scalar_t* q_pe,                // [num_tokens, NUM_HEADS, ROPE_SIZE]
                                scalar_t* k_pe,                // [num_tokens, ROPE_SIZE]
                                const scalar_t* kv_c,          // [num_tokens, LATENT_SIZE]
                                const scalar_t* norm_weight,   // [LATENT_SIZE]
                                const angle_t* cos_sin_cache,  // [max_position, ROPE_SIZE]
                                const slot_t* slot_mapping,    // [num_tokens]
                                cache_t* kv_cache,             // [num_blocks, BLOCK_SIZE, LATENT_SIZE + ROPE_SIZE]
                                const float* kv_cache_scale,   // one element
                                int64_t num_blocks, int64_t max_position, int64_t positions_stride,
                                int64_t slot_mapping_stride, int64_t q_stride, int64_t q_head_stride, int64_t k_stride,
                                int64_t kv_c_stride, int64_t block_stride, int64_t slot_stride, float epsilon) {
    if constexpr (NORMALISED) prefetch_part(norm_weight, LATENT_SIZE - 1, threadIdx.x);
    await_previous_kernel();
    const int64_t token = blockIdx.x;
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
        const int item = (int(blockIdx.y) * ROUNDS + round) * NUM_THREADS + threadIdx.x;
        if (item < QUERY_ITEMS + HEAD_ITEMS) {
            const bool is_query = item < QUERY_ITEMS;
            if (!is_query && entry == NOWHERE) continue;
            const int part = item % HEAD_ITEMS;
            scalar_t* head =
                is_query ? q_pe + token * q_stride + item / HEAD_ITEMS * q_head_stride : k_pe + token * k_stride;
            PairVectors pairs{vec_t::load(head + PairVectors::first(part)),
                              vec_t::load(head + PairVectors::second(part))};
            pairs.rotate(angles_at(angles + part * VEC_SIZE), angles_at(angles + HALF + part * VEC_SIZE));
            pairs.a.store(head + PairVectors::first(part));
            pairs.b.store(head + PairVectors::second(part));
            if (!is_query) {
                keep(pairs.a, LATENT_SIZE + PairVectors::first(part));
                keep(pairs.b, LATENT_SIZE + PairVectors::second(part));
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
