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

#include "mla_rope_insert.cuh"

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
    const MlaRopeInsert insert{positions,           q_pe,          k_pe,          kv_c,
                               norm_weight,         cos_sin_cache, slot_mapping,  kv_cache,
                               kv_cache_scale,      num_blocks,    max_position,  positions_stride,
                               slot_mapping_stride, q_stride,      q_head_stride, k_stride,
                               kv_c_stride,         block_stride,  slot_stride,   epsilon};
    insert.run(blockIdx.x, blockIdx.y);
}
