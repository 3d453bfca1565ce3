// gemv_batch_columns: a batch of small GEMMs for decode, bound by reading the weights: matrices with contiguous columns.
//
//     out[b, t, n] = T(sum_k input[b, t, k] * weight[b, k, n]), summed in float32
//
// blockIdx.x counts groups of COLUMNS columns, blockIdx.y tokens, blockIdx.z matrices; blocks multiply as gemv_columns.cuh
// says. With CONSTANT_WEIGHT the first rows are loaded while the previous kernel runs.
//
// Constants:
//     HIDDEN_SIZE      K, the length of each dot product
//     COLUMN_THREADS   threads that share a row

#include "gemv_columns.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemv_batch_columns(scalar_t* out,               // [matrices, num_tokens, output_size]
                   const scalar_t* input,       // [matrices, num_tokens, HIDDEN_SIZE]
                   const scalar_t* weight,      // [matrices, HIDDEN_SIZE, output_size]
                   const scalar_t* prefetched,  // [rows, columns], read by a later kernel
                   int64_t output_size, int64_t out_batch_stride, int64_t out_stride, int64_t input_batch_stride,
                   int64_t input_stride, int64_t weight_batch_stride, int64_t weight_stride, int num_lines,
                   int row_lines, int64_t prefetched_stride) {
    const int64_t matrix = blockIdx.z, token = blockIdx.y;
    vec_t next[BATCH];
    if constexpr (CONSTANT_WEIGHT) {
        prefetch_chunk(next, weight + matrix * weight_batch_stride, weight_stride, output_size);
    }
    prefetch_rows(prefetched, num_lines, row_lines, prefetched_stride);
    await_previous_kernel();
    const ColumnProduct product{weight + matrix * weight_batch_stride, weight_stride, output_size,
                                int64_t(blockIdx.x) * COLUMNS};
    if constexpr (!CONSTANT_WEIGHT) product.load_first(next);
    product.multiply(next, input + matrix * input_batch_stride + token * input_stride,
                     out + matrix * out_batch_stride + token * out_stride);
}
