// vocab_parallel_embedding: the rows of a rank's part of an embedding table, bit for bit; zeros for tokens of other
// ranks.
//
//     out[t] = weight[row(input_ids[t])], or 0 if there is no such row
//     row(id) = id - org_vocab_start_index                          for org_vocab_start_index <= id < its end, else
//               id - added_vocab_start_index + num_org_elements     for added_vocab_start_index <= id < its end
//     num_org_elements = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
//
// The plan has checked that both ranges have rows in `weight`.
//
// Threads: one vector of each of BATCH adjacent rows of out per thread (such a group of rows is one row of
// elementwise.cuh). Loads of the ids, then loads of all rows, are in flight together.
//
// Constants
//     index_t       element type of input_ids
//     BATCH         rows of a thread

#include "cache.cuh"
#include "elementwise.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
vocab_parallel_embedding(scalar_t* out,             // [num_outputs, hidden_size], bytes
                         const index_t* input_ids,  // [num_outputs]
                         const scalar_t* weight,    // [rows, hidden_size], bytes
                         int64_t num_rows, int64_t hidden_size, int64_t input_stride, int64_t out_stride,
                         int64_t num_outputs, int64_t org_vocab_start_index, int64_t org_vocab_end_index,
                         int64_t num_org_vocab_padding, int64_t added_vocab_start_index,
                         int64_t added_vocab_end_index) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const int64_t first = at.row * BATCH;
    int64_t sources[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        const int64_t id = input_ids[min(first + i, num_outputs - 1)];
        const int64_t num_org_elements = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding;
        sources[i] = -1;
        if (id >= added_vocab_start_index && id < added_vocab_end_index) {
            sources[i] = id - added_vocab_start_index + num_org_elements;
        }
        if (id >= org_vocab_start_index && id < org_vocab_end_index) sources[i] = id - org_vocab_start_index;
    }
    gather_rows<VEC_SIZE>(out, weight, sources, first, num_outputs, at.column, out_stride, input_stride);
}
