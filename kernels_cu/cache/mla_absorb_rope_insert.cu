// mla_absorb_rope_insert: the queries of multi-head latent attention in absorbed form, and what
// concat_and_cache_mla_rope_fused does, in one launch: neither needs the other's results.
//
//     absorbed[h, t, n] = T(sum_k plain[h, t, k] * up_keys[h, k, n]), summed in float32
//
// blockIdx.y counts tokens. Blocks with blockIdx.z < NUM_HEADS multiply: blockIdx.x counts groups of COLUMNS columns of
// head blockIdx.z (gemv_columns.cuh). With blockIdx.z = NUM_HEADS it counts parts of the token's other work
// (mla_rope_insert.cuh). The first rows of up_keys are loaded while the previous kernel runs: the plan promises that no
// kernel which may still run writes them.
//
// Constants
//     scalar_t, angle_t, cache_t, slot_t, position_t, NUM_HEADS, ROPE_SIZE, LATENT_SIZE, BLOCK_SIZE, IS_NEOX,
//     NORMALISED, VEC_SIZE, ROUNDS    of concat_and_cache_mla_rope_fused.cu
//     HIDDEN_SIZE, COLUMN_THREADS     of gemv_batch_columns.cu

#include "gemv_columns.cuh"
#include "mla_rope_insert.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
mla_absorb_rope_insert(scalar_t* absorbed,            // [NUM_HEADS, num_tokens, output_size]
                       const scalar_t* plain,         // [NUM_HEADS, num_tokens, HIDDEN_SIZE]
                       const scalar_t* up_keys,       // [NUM_HEADS, HIDDEN_SIZE, output_size]
                       const position_t* positions,   // [num_tokens]
                       scalar_t* q_pe,                // [num_tokens, NUM_HEADS, ROPE_SIZE]
                       scalar_t* k_pe,                // [num_tokens, ROPE_SIZE]
                       const scalar_t* kv_c,          // [num_tokens, LATENT_SIZE]
                       const scalar_t* norm_weight,   // [LATENT_SIZE]
                       const angle_t* cos_sin_cache,  // [max_position, ROPE_SIZE]
                       const slot_t* slot_mapping,    // [num_tokens]
                       cache_t* kv_cache,             // [num_blocks, BLOCK_SIZE, LATENT_SIZE + ROPE_SIZE]
                       const float* kv_cache_scale,   // one element
                       int64_t output_size, int64_t out_batch_stride, int64_t out_stride, int64_t input_batch_stride,
                       int64_t input_stride, int64_t weight_batch_stride, int64_t weight_stride, int64_t num_blocks,
                       int64_t max_position, int64_t positions_stride, int64_t slot_mapping_stride, int64_t q_stride,
                       int64_t q_head_stride, int64_t k_stride, int64_t kv_c_stride, int64_t block_stride,
                       int64_t slot_stride, float epsilon) {
    const int64_t token = blockIdx.y, head = blockIdx.z;
    const bool inserts = head == NUM_HEADS;
    vec_t next[BATCH];
    if (!inserts) {
        prefetch_chunk(next, up_keys + head * weight_batch_stride, weight_stride, output_size);
    } else if constexpr (NORMALISED) {
        prefetch_part(norm_weight, LATENT_SIZE - 1, threadIdx.x);
    }
    await_previous_kernel();
    if (inserts) {
        const MlaRopeInsert insert{positions,           q_pe,          k_pe,          kv_c,
                                   norm_weight,         cos_sin_cache, slot_mapping,  kv_cache,
                                   kv_cache_scale,      num_blocks,    max_position,  positions_stride,
                                   slot_mapping_stride, q_stride,      q_head_stride, k_stride,
                                   kv_c_stride,         block_stride,  slot_stride,   epsilon};
        insert.run(token, blockIdx.x);
        return;
    }
    const ColumnProduct product{up_keys + head * weight_batch_stride, weight_stride, output_size,
                                int64_t(blockIdx.x) * COLUMNS};
    product.multiply(next, plain + head * input_batch_stride + token * input_stride,
                     absorbed + head * out_batch_stride + token * out_stride);
}
