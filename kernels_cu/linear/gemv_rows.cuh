// gemv_rows.cuh: dot products of rows of a weight with rows of the input, for the kernels gemv*.cu.
//
// SPLIT warps share a row of the weight. The row is divided into chunks, and each warp takes a part of every chunk:
// BATCH vectors per lane, adjacent lanes take adjacent vectors. A warp issues the loads of its next chunk as soon as it
// has multiplied the current one; the input stays in the L1 cache.
//
// Constants:
//     HIDDEN_SIZE   K, the length of each dot product
//     TOKENS        rows of the input that a block multiplies
//     SPLIT         warps that share a row of the weight; divides the warps of a block
//     BATCH         vectors per lane in a chunk

#pragma once
#include "reduce.cuh"
#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
// A vector of the weight while it is loaded. As elements of 16 bits the compiler would unpack it as soon as it arrives,
// so that a load would be waited for where it is issued.
using raw_t = vec_t::word_t<VEC_SIZE>;
constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE, BLOCK_ROWS = NUM_WARPS / SPLIT;
constexpr int VECS = HIDDEN_SIZE / VEC_SIZE, CHUNK = SPLIT * BATCH * WARP_SIZE, CHUNKS = ceil_div(VECS, CHUNK);

DEVICE vec_t vector_from(const raw_t& words) {
    vec_t vector;
    vector.word<VEC_SIZE>(0) = words;
    return vector;
}

// The index within the row of the thread's vector `b` of chunk `chunk`.
DEVICE int vector_of(int chunk, int b) {
    return chunk * CHUNK + (int(threadIdx.x) / WARP_SIZE % SPLIT * BATCH + b) * WARP_SIZE +
           int(threadIdx.x) % WARP_SIZE;
}
DEVICE bool exists(int chunk, int b) {
    const bool for_all_warps = CHUNKS == 1 && ((SPLIT - 1) * BATCH + b + 1) * WARP_SIZE <= VECS;
    return VECS % CHUNK == 0 || for_all_warps || vector_of(chunk, b) < VECS;
}

// The column of out that row i of the warp contributes to: OUT_ROWS rows for each column, of each of SHARERS warps (or
// groups of SPLIT warps) of the block. Blocks along x stride over the columns together.
template <int OUT_ROWS, int SHARERS = 1>
DEVICE int64_t column_of(int i) {
    return (int64_t(i / OUT_ROWS) * gridDim.x + blockIdx.x) * (BLOCK_ROWS / SHARERS) +
           threadIdx.x / WARP_SIZE / SPLIT / SHARERS;
}
// The same for loads: columns out of range are clamped to the last one.
template <int OUT_ROWS, int SHARERS = 1>
DEVICE int64_t loaded_column(int i, int64_t output_size) {
    const int64_t column = column_of<OUT_ROWS, SHARERS>(i);
    return column < output_size ? column : output_size - 1;
}
// The number of rows of each warp of the block. Kernels call it before they wait: the compiler would leave the division
// for later, between the end of the previous kernel and the load of the input.
template <int OUT_ROWS, int SHARERS = 1>
DEVICE int count_rows(int64_t output_size) {
    constexpr int COLUMNS = BLOCK_ROWS / SHARERS;
    static_assert(BLOCK_ROWS % SHARERS == 0);
    const int64_t groups = output_size / COLUMNS + (output_size % COLUMNS > 0);
    return made_anew(blockIdx.x < groups ? int((groups - 1 - blockIdx.x) / gridDim.x + 1) * OUT_ROWS : 0);
}

// Whether the thread is the one that stores the dot products of its warp, or of the SPLIT warps that share a row.
DEVICE bool stores_products() { return threadIdx.x % (SPLIT * WARP_SIZE) == 0; }

// Loads the thread's vectors of a chunk of a row. Vectors out of range are replaced by the first one, so that the loads
// need no branch; their results are not used.
DEVICE void load_chunk(raw_t (&w)[BATCH], const scalar_t* row, int chunk) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        const scalar_t* const vector = row + int64_t(exists(chunk, b) ? vector_of(chunk, b) : 0) * VEC_SIZE;
        w[b] = vec_t::load_once(vector).word<VEC_SIZE>(0);
    }
}

// The products of each row are summed by themselves.
struct SumOfRow {
    static constexpr int ROWS = 1;
    DEVICE float operator()(int, float x, float) const { return x; }
};
// The products of ROWS_ rows in a row are added before the sum over lanes and warps: add(i, x, sum) returns `sum` with
// the lane's part x of the product of row i.
template <int ROWS_, typename F>
struct SumOfRows : F {
    static constexpr int ROWS = ROWS_;
};

// Multiplies rows 0 to num_rows - 1 of the warp, one after the other. All warps of a block have the same number.
//
//     row(i)          the address of row i of the weight, which can be read for every i >= 0
//     input(i, t)     the address of row t of the input of row i
//     done(i, acc)    is called by all threads with the TOKENS dot products of row i, or of the rows up to i that `add`
//                     has added
//     add             SumOfRow or SumOfRows
//
// SHARERS warps (or groups of SPLIT warps) share columns. `next` holds chunk 0 of row 0.
template <int SHARERS = 1, typename Row, typename Input, typename Done, typename Add = SumOfRow>
DEVICE void multiply_rows(raw_t (&next)[BATCH], int num_rows, Row row, Input input, Done done, Add add = {}) {
    constexpr int SUMMED = SPLIT * SHARERS;  // warps that have a part of a sum
    __shared__ float partial[2][NUM_WARPS][TOKENS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    float acc[TOKENS] = {}, sum[TOKENS] = {};
#pragma unroll 1
    for (int step = 0; step < num_rows * CHUNKS; ++step) {
        const int i = step / CHUNKS, chunk = step % CHUNKS;
        raw_t w[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) w[b] = next[b];
        if (step + 1 < num_rows * CHUNKS) load_chunk(next, row((step + 1) / CHUNKS), (step + 1) % CHUNKS);
        keep_loads();  // The compiler would move them after the sum over lanes.
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (!exists(chunk, b)) continue;
            float v[VEC_SIZE];
            vector_from(w[b]).to_floats(v);
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                float x[VEC_SIZE];
                Vec<input_t, VEC_SIZE>::load(input(i, t) + int64_t(vector_of(chunk, b)) * VEC_SIZE).to_floats(x);
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) acc[t] = fmaf(v[j], x[j], acc[t]);
            }
        }
        if (CHUNKS > 1 && chunk < CHUNKS - 1) continue;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            sum[t] = add(i, acc[t], sum[t]);
            acc[t] = 0.0f;
        }
        if (Add::ROWS > 1 && i % Add::ROWS < Add::ROWS - 1) continue;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) sum[t] = lane_reduce<Sum, WARP_SIZE>(sum[t]);
        if constexpr (SUMMED > 1) {
            // `partial` is double-buffered: other warps may still read the values of the previous sum.
            float (&warp_sums)[NUM_WARPS][TOKENS] = partial[i / Add::ROWS % 2];
            if (lane == 0) {
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) warp_sums[warp][t] = sum[t];
            }
            __syncthreads();
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                sum[t] = 0.0f;
#pragma unroll
                for (int w = 0; w < SUMMED; ++w) sum[t] += warp_sums[warp / SUMMED * SUMMED + w][t];
            }
        }
        done(i, sum);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) sum[t] = 0.0f;
    }
}
