// shuffle_rows: rows in any order and number, bit for bit.
//
//     output_tensor[i] = input_tensor[dst2src_map[i]], or 0 if there is no such row
//
// Threads: one vector of a row of output_tensor per thread (chunk.cuh).

#include "cache.cuh"
#include "chunk.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
shuffle_rows(scalar_t* output_tensor,       // [num_rows, hidden_size], bytes
             const scalar_t* input_tensor,  // [num_sources, hidden_size], bytes
             const int32_t* dst2src_map,    // [num_rows]
             int64_t num_rows, int64_t hidden_size, int64_t input_stride, int64_t out_stride, int64_t num_sources) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const int64_t source = dst2src_map[at.row];
    Words<VEC_SIZE> words{};
    if (source >= 0 && source < num_sources) {
        words = load_words<VEC_SIZE>(input_tensor + source * input_stride + at.column);
    }
    store_words<VEC_SIZE>(output_tensor + at.row * out_stride + at.column, words);
}
