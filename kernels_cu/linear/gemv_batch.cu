// gemv_batch: a batch of small GEMMs for decode, bound by reading the weights: matrices with contiguous rows.
//
//     out[b, t, n] = T(sum_k input[b, t, k] * weight[b, n, k]), summed in float32
//
// Warps multiply as gemv_rows.cuh says. blockIdx.z counts matrices, blockIdx.y tokens; blocks along x stride over
// the columns of out together. With CONSTANT_WEIGHT the first chunk is loaded while the previous kernel runs.
//
// Constants:
//     TOKENS, SPLIT, BATCH    of gemv_rows.cuh; TOKENS is 1
//     input_t       element type of input: scalar_t

#include "gemv_rows.cuh"

// Loads the first chunk to registers before the previous kernel has ended.
DEVICE void prefetch_row(raw_t (&next)[BATCH], const scalar_t* row) { load_chunk(next, row, 0); }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemv_batch(scalar_t* out,               // [matrices, num_tokens, output_size]
           const scalar_t* input,       // [matrices, num_tokens, HIDDEN_SIZE]
           const scalar_t* weight,      // [matrices, output_size, HIDDEN_SIZE]
           const scalar_t* prefetched,  // [rows, columns], read by a later kernel
           int64_t output_size, int64_t out_batch_stride, int64_t out_stride, int64_t input_batch_stride,
           int64_t input_stride, int64_t weight_batch_stride, int64_t weight_stride, int num_lines, int row_lines,
           int64_t prefetched_stride) {
    const int64_t matrix = blockIdx.z, token = blockIdx.y;
    const auto offset = [&](int i) {
        return matrix * weight_batch_stride + loaded_column<1>(i, output_size) * weight_stride;
    };
    raw_t next[BATCH];
    if constexpr (CONSTANT_WEIGHT) prefetch_row(next, weight + offset(0));
    prefetch_rows(prefetched, num_lines, row_lines, prefetched_stride);
    const int num_rows = count_rows<1>(output_size);
    await_previous_kernel();
    const auto row = [&](int i) { return weight + offset(i); };
    if (num_rows == 0) return;
    if constexpr (!CONSTANT_WEIGHT) load_chunk(next, row(0), 0);
    const scalar_t* const x = input + matrix * input_batch_stride + token * input_stride;
    scalar_t* const to = out + matrix * out_batch_stride + token * out_stride;
    const bool stores = stores_products();
    const auto input_row = [&](int, int) { return x; };
    multiply_rows(next, num_rows, row, input_row, [&](int i, const float (&acc)[TOKENS]) {
        const int64_t column = column_of<1>(i);
        if (stores && column < output_size) to[column] = from_float<scalar_t>(acc[0]);
    });
}
