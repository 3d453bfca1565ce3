// concat_and_cache_mla: writes a token's latent vector and rotary key into a slot of a paged cache.
//
//     kv_cache[block, offset] = [kv_c[t], k_pe[t]]           where block, offset = divmod(slot_mapping[t], BLOCK_SIZE)
//     fp8: x / scale rounded to fp8                          a slot that does not exist is skipped
//
// Thread mapping: a CTA takes TOKENS tokens. Its threads share the vectors of these tokens; a thread loads BATCH
// vectors before it stores one (each_piece in cache.cuh).
//
// Constants
//     scalar_t      element type of kv_c and k_pe
//     cache_t       element type of kv_cache: scalar_t or an fp8 type
//     slot_t        element type of slot_mapping
//     LATENT_SIZE   elements of kv_c
//     ROPE_SIZE     elements of k_pe
//     VEC_SIZE      divides LATENT_SIZE and ROPE_SIZE
//     TOKENS        tokens of a CTA

#include "cache.cuh"
#include "paged.cuh"

static_assert(LATENT_SIZE % VEC_SIZE == 0 && ROPE_SIZE % VEC_SIZE == 0);

struct Piece {
    Vec<scalar_t, VEC_SIZE> vec;
    slot_t slot;
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1024 / NUM_THREADS)
concat_and_cache_mla(const scalar_t* kv_c,        // [num_tokens, LATENT_SIZE]
                     const scalar_t* k_pe,        // [num_tokens, ROPE_SIZE]
                     cache_t* kv_cache,           // [num_blocks, BLOCK_SIZE, LATENT_SIZE + ROPE_SIZE]
                     const slot_t* slot_mapping,  // [num_tokens]
                     const float* scale,          // one element
                     int64_t num_tokens, int64_t num_blocks, int64_t slot_mapping_stride, int64_t kv_c_stride,
                     int64_t k_pe_stride, int64_t block_stride, int64_t slot_stride) {
    await_previous_kernel();
    const Pages<BLOCK_SIZE> pages{num_blocks, block_stride, slot_stride};
    const Quotient over_scale(is_same<cache_t, scalar_t> ? 1.0f : *scale);
    const int64_t first = int64_t(blockIdx.x) * TOKENS;
    each_piece<NUM_THREADS, TOKENS, (LATENT_SIZE + ROPE_SIZE) / VEC_SIZE, BATCH>(
        [&](int row, int piece) {
            const int64_t token = min(first + row, num_tokens - 1);
            const int element = piece * VEC_SIZE;
            const bool is_rope = element >= LATENT_SIZE;
            const scalar_t* source = (is_rope ? k_pe : kv_c) + token * (is_rope ? k_pe_stride : kv_c_stride);
            Piece loaded;
            loaded.vec = loaded.vec.load(source + (is_rope ? element - LATENT_SIZE : element));
            loaded.slot = slot_mapping[token * slot_mapping_stride];
            return loaded;
        },
        [&](int row, int piece, const Piece& loaded) {
            const auto encoded = encode<cache_t>(loaded.vec, over_scale);
            const int64_t entry = pages.at_slot(loaded.slot);
            if (entry == NOWHERE || first + row >= num_tokens) return;
            encoded.store(kv_cache + entry + piece * VEC_SIZE);
        });
}
