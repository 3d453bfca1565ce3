// gemv_batch_columns: a batch of small GEMMs for decode, bound by reading the weights: matrices with contiguous columns.
//
//     out[b, t, n] = T(sum_k input[b, t, k] * weight[b, k, n]), summed in float32
//
// blockIdx.x counts groups of COLUMNS columns, blockIdx.y tokens, blockIdx.z matrices. COLUMN_THREADS adjacent threads
// load the columns of a row k, a vector each; the SLICES groups of such threads take every SLICES-th row, BATCH rows at a
// time, and issue the loads of the next ones before they multiply. At the end their sums are added in shared memory.
// With CONSTANT_WEIGHT the first rows are loaded while the previous kernel runs.
//
// Constants:
//     HIDDEN_SIZE      K, the length of each dot product
//     COLUMN_THREADS   threads that share a row

#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int SLICES = NUM_THREADS / COLUMN_THREADS, COLUMNS = COLUMN_THREADS * VEC_SIZE;
constexpr int CHUNK = SLICES * BATCH, CHUNKS = ceil_div(HIDDEN_SIZE, CHUNK);

// The thread's row number b of a chunk.
DEVICE int row_of(int chunk, int b) { return chunk * CHUNK + b * SLICES + int(threadIdx.x) / COLUMN_THREADS; }
DEVICE bool exists(int chunk, int b) { return HIDDEN_SIZE % CHUNK == 0 || row_of(chunk, b) < HIDDEN_SIZE; }

// Loads the thread's vectors of a chunk. Rows out of range are replaced by the first one; their results are not used.
DEVICE void load_chunk(vec_t (&w)[BATCH], const scalar_t* column, int64_t stride, int chunk) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        w[b] = vec_t::load_once(column + (exists(chunk, b) ? row_of(chunk, b) : 0) * stride);
    }
}

// Loads the first chunk to registers before the previous kernel has ended.
DEVICE void prefetch_chunk(vec_t (&w)[BATCH], const scalar_t* column, int64_t stride) {
    load_chunk(w, column, stride, 0);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemv_batch_columns(scalar_t* out,           // [matrices, num_tokens, output_size]
                   const scalar_t* input,   // [matrices, num_tokens, HIDDEN_SIZE]
                   const scalar_t* weight,  // [matrices, HIDDEN_SIZE, output_size]
                   int64_t output_size, int64_t out_batch_stride, int64_t out_stride, int64_t input_batch_stride,
                   int64_t input_stride, int64_t weight_batch_stride, int64_t weight_stride) {
    __shared__ float partial[SLICES][COLUMNS];
    const int64_t matrix = blockIdx.z, token = blockIdx.y;
    const int64_t first = int64_t(blockIdx.x) * COLUMNS;
    const int own = threadIdx.x % COLUMN_THREADS * VEC_SIZE;  // the thread's first column of the block
    const int64_t offset = matrix * weight_batch_stride + (first + own < output_size ? first + own : 0);
    vec_t next[BATCH];
    if constexpr (CONSTANT_WEIGHT) prefetch_chunk(next, weight + offset, weight_stride);
    await_previous_kernel();
    const scalar_t* const column = weight + offset;
    if constexpr (!CONSTANT_WEIGHT) load_chunk(next, column, weight_stride, 0);
    const scalar_t* const x = input + matrix * input_batch_stride + token * input_stride;
    float acc[VEC_SIZE] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        vec_t w[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) w[b] = next[b];
        if (chunk + 1 < CHUNKS) load_chunk(next, column, weight_stride, chunk + 1);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (!exists(chunk, b)) continue;
            const float factor = to_float(x[row_of(chunk, b)]);
            float v[VEC_SIZE];
            w[b].to_floats(v);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) acc[j] = fmaf(v[j], factor, acc[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) partial[threadIdx.x / COLUMN_THREADS][own + j] = acc[j];
    __syncthreads();
    scalar_t* const to = out + matrix * out_batch_stride + token * out_stride + first;
    for (int i = threadIdx.x; i < COLUMNS && first + i < output_size; i += NUM_THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < SLICES; ++s) sum += partial[s][i];
        to[i] = from_float<scalar_t>(sum);
    }
}
