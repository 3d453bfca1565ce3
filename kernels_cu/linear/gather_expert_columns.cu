// gather_expert_columns: rows of activations as the packed weights of their experts take them: columns in the order of the
// weight's rows, rows in the order of places.
//
//     x[t, k] = a[t / top_k, perm[e, k]], or 0 if there is no such column; e is the expert of row t
//     gathered[t, k] = x[t, k]; BY_PLACE: gathered[p, k] = x[sorted_token_ids[p], k]
//     LANE_STEP > 0: gathered[.., i + 8 j + 2 t + s] = x[.., i + LANE_STEP / 4 * t + j + j / 4 * 4 + 4 s],
//                    for multiples i of LANE_STEP, j < LANE_STEP / 8, t < 4, s < 2
//
// Places of lists hold rows, as grouped.cuh says; rows that they do not name, or whose expert does not exist, are left as
// they are. A thread has VEC_SIZE neighbours of a row.
//
// Constants
//     scalar_t      element type of both
//     PERMUTED      columns are permuted by perm
//     BY_PLACE      a row of gathered for each place
//     LANE_STEP     0, or elements of K of a step of wq_grouped_gemm_sm90.cu, whose columns lie in the order in which
//                   it multiplies them; K is a multiple of them, VEC_SIZE is 8, and there is no perm
//     VEC_SIZE      elements of a thread, and without PERMUTED of one access

#include "vec.cuh"

static_assert(LANE_STEP == 0 || (VEC_SIZE == 8 && !PERMUTED));

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
gather_expert_columns(scalar_t* gathered,                  // [num_rows, K]; BY_PLACE: [places, K]
                      const scalar_t* a,                   // [num_rows / top_k, K]
                      const int32_t* perm,                 // [num_experts, K], any numbers
                      const int32_t* sorted_token_ids,     // [places], any numbers
                      const int32_t* expert_ids,           // [places / block_size]
                      const int32_t* num_tokens_post_pad,  // [1]
                      int64_t places, int64_t num_rows, int64_t num_experts, int64_t block_size, int64_t top_k,
                      int64_t k, int64_t a_stride) {
    await_previous_kernel();
    const int64_t pieces = ceil_div(k, int64_t(VEC_SIZE)), i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    const int64_t place = i / pieces, first = i % pieces * VEC_SIZE;
    if (place >= min(places, int64_t(*num_tokens_post_pad))) return;
    const int64_t row = sorted_token_ids[place], expert = expert_ids[place / block_size];
    if (row < 0 || row >= num_rows || expert < 0 || expert >= num_experts) return;
    const scalar_t* const from = a + row / top_k * a_stride;
    scalar_t* const to = gathered + (BY_PLACE ? place : row) * k;
    if constexpr (PERMUTED) {
        for (int64_t j = first; j < min(first + VEC_SIZE, k); ++j) {
            const int64_t column = perm[expert * k + j];
            to[j] = column >= 0 && column < k ? from[column] : from_float<scalar_t>(0.0f);
        }
    } else if constexpr (LANE_STEP > 0) {
        const int j = int(first % LANE_STEP / 8);
        Vec<scalar_t, VEC_SIZE> run;
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
            run.data[i] = from[first / LANE_STEP * LANE_STEP + i / 2 * (LANE_STEP / 4) + j + j / 4 * 4 + i % 2 * 4];
        }
        run.store(to + first);
    } else {
        Vec<scalar_t, VEC_SIZE>::load(from + first).store(to + first);
    }
}
