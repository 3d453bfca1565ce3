// copy_blocks: copies whole blocks of a layer's caches onto other blocks.
//
//     key_cache[block_mapping[i, 1]] = key_cache[block_mapping[i, 0]]
//     value_cache likewise; pairs out of range are skipped
//
// Threads: blockIdx.x counts pairs and, within a pair, chunks of NUM_THREADS * BATCH vectors. blockIdx.y is 0 for keys,
// 1 for values.
//
// Constants
//     map_t         element type of block_mapping
//     VEC_SIZE      bytes, not elements, in one memory access; divides block_bytes

#include "cache.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1024 / NUM_THREADS)
copy_blocks(uint8_t* key_cache,          // [num_blocks, block_bytes]
            uint8_t* value_cache,        // [num_blocks, block_bytes]
            const map_t* block_mapping,  // [num_pairs, 2]
            int64_t num_blocks, int64_t block_bytes, int64_t key_stride, int64_t value_stride, int64_t map_stride,
            int64_t map_column_stride, int chunks) {
    await_previous_kernel();
    const int64_t pair = blockIdx.x / unsigned(chunks);
    const int64_t source = block_mapping[pair * map_stride];
    const int64_t target = block_mapping[pair * map_stride + map_column_stride];
    if (source < 0 || source >= num_blocks || target < 0 || target >= num_blocks || source == target) return;
    uint8_t* cache = blockIdx.y ? value_cache : key_cache;
    const int64_t stride = blockIdx.y ? value_stride : key_stride;
    const int64_t start = int64_t(blockIdx.x % unsigned(chunks)) * (NUM_THREADS * BATCH * VEC_SIZE);
    const uint8_t* from = cache + source * stride + start;
    uint8_t* to = cache + target * stride + start;
    const int bytes = int(min(block_bytes - start, int64_t(NUM_THREADS * BATCH * VEC_SIZE)));

    using words_t = Words<VEC_SIZE>;
    each_piece<NUM_THREADS, 1, NUM_THREADS * BATCH, BATCH>(
        [&](int, int piece) {
            words_t words;
            if (piece * VEC_SIZE < bytes) words = load_words<VEC_SIZE>(from + piece * VEC_SIZE);
            return words;
        },
        [&](int, int piece, const words_t& words) {
            if (piece * VEC_SIZE < bytes) store_words<VEC_SIZE>(to + piece * VEC_SIZE, words);
        });
}
