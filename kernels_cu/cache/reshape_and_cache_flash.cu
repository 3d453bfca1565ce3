// reshape_and_cache_flash: writes keys and values of tokens into the slots of a paged cache, head by head.
//
//     key_cache[block, offset, h, :] = key[t, h, :]          where block, offset = divmod(slot_mapping[t], BLOCK_SIZE)
//     fp8: key / k_scale, or key / k_scale[h], rounded       values likewise; a slot that does not exist is skipped
//
// Threads: blockIdx.x counts groups of TOKENS tokens; blockIdx.y is 0 for keys, 1 for values. The threads of a block
// share the vectors of its tokens; a thread loads BATCH vectors before it stores one (each_piece in cache.cuh).
//
// Constants
//     scalar_t      element type of key and value
//     cache_t       element type of the caches: scalar_t or an fp8 type
//     slot_t        element type of slot_mapping
//     NUM_HEADS     heads of a token
//     HEAD_SIZE     elements of a head; a multiple of VEC_SIZE
//     HEAD_SCALES   each head has its own scale
//     TOKENS        tokens of a CTA

#include "cache.cuh"
#include "paged.cuh"

constexpr int HEAD_VECS = HEAD_SIZE / VEC_SIZE;
static_assert(HEAD_SIZE % VEC_SIZE == 0);

struct Piece {
    Vec<scalar_t, VEC_SIZE> vec;
    slot_t slot;
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1024 / NUM_THREADS)
reshape_and_cache_flash(const scalar_t* key,         // [num_tokens, NUM_HEADS, HEAD_SIZE]
                        const scalar_t* value,       // [num_tokens, NUM_HEADS, HEAD_SIZE]
                        cache_t* key_cache,          // [num_blocks, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE]
                        cache_t* value_cache,        // [num_blocks, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE]
                        const slot_t* slot_mapping,  // [num_tokens]
                        const float* k_scale,        // one element or [NUM_HEADS]
                        const float* v_scale,        // one element or [NUM_HEADS]
                        int64_t num_tokens, int64_t num_blocks, int64_t slot_mapping_stride, int64_t key_stride,
                        int64_t key_head_stride, int64_t value_stride, int64_t value_head_stride,
                        int64_t key_block_stride, int64_t key_slot_stride, int64_t key_cache_head_stride,
                        int64_t value_block_stride, int64_t value_slot_stride, int64_t value_cache_head_stride) {
    await_previous_kernel();
    const bool is_value = blockIdx.y;
    const scalar_t* source = is_value ? value : key;
    cache_t* cache = is_value ? value_cache : key_cache;
    const float* scale = is_value ? v_scale : k_scale;
    const int64_t token_stride = is_value ? value_stride : key_stride;
    const int64_t head_stride = is_value ? value_head_stride : key_head_stride;
    const int64_t cache_head_stride = is_value ? value_cache_head_stride : key_cache_head_stride;
    const Pages<BLOCK_SIZE> pages{num_blocks, is_value ? value_block_stride : key_block_stride,
                                  is_value ? value_slot_stride : key_slot_stride};
    constexpr bool SCALED = !is_same<cache_t, scalar_t>;
    const Quotient over_scale(SCALED && !HEAD_SCALES ? *scale : 1.0f);

    const int64_t first = int64_t(blockIdx.x) * TOKENS;
    each_piece<NUM_THREADS, TOKENS, NUM_HEADS * HEAD_VECS, BATCH>(
        [&](int row, int piece) {
            const int64_t token = min(first + row, num_tokens - 1);
            const int head = piece / HEAD_VECS, element = piece % HEAD_VECS * VEC_SIZE;
            Piece loaded;
            loaded.vec = loaded.vec.load(source + token * token_stride + head * head_stride + element);
            loaded.slot = slot_mapping[token * slot_mapping_stride];
            return loaded;
        },
        [&](int row, int piece, const Piece& loaded) {
            const int head = piece / HEAD_VECS, element = piece % HEAD_VECS * VEC_SIZE;
            const Quotient over = SCALED && HEAD_SCALES ? Quotient(scale[head]) : over_scale;
            const auto encoded = encode<cache_t>(loaded.vec, over);
            const int64_t entry = pages.at_slot(loaded.slot);
            if (entry == NOWHERE || first + row >= num_tokens) return;
            encoded.store(cache + entry + head * cache_head_stride + element);
        });
}
