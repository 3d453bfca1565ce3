// gather_expert_columns: gathers activations for a grouped GEMM with packed weights: columns in the order of the
// weight's rows and, with BY_PLACE, rows in the order of the slots.
//
//     x[t, k] = a[t / top_k, perm[e, k]], or 0 if perm[e, k] is out of range; e is the expert of row t
//     gathered[t, k] = x[t, k]; BY_PLACE: gathered[p, k] = x[sorted_token_ids[p], k]
//     LANE_STEP > 0, P = LANE_PAIRS:
//                    gathered[.., i + 8 j + 2 t + s] = x[.., i + LANE_STEP / 4 * t + j + j / P * P + P s],
//                    for multiples i of LANE_STEP, j < LANE_STEP / 8, t < 4, s < 2
//
// Slots of the lists hold rows (grouped.cuh). Rows without a slot, or with an invalid expert, are not written. A thread
// takes VEC_SIZE adjacent elements of a row.
//
// Constants
//     scalar_t      element type of a and gathered
//     PERMUTED      whether perm permutes the columns
//     BY_PLACE      whether gathered has a row for each slot
//     LANE_STEP     0, or the k-tile of wq_grouped_gemm_sm90.cu: the columns are then in the order in which that kernel
//                   multiplies them; K is a multiple of LANE_STEP, VEC_SIZE is 8, and there is no perm
//     LANE_PAIRS    pairs of quants in a word of its weights: 16 / BITS
//     VEC_SIZE      elements of a thread; without PERMUTED, elements of one access

#include "vec.cuh"

static_assert(LANE_STEP == 0 || (VEC_SIZE == 8 && !PERMUTED));

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
gather_expert_columns(scalar_t* gathered,                  // [num_rows, K]; BY_PLACE: [slots, K]
                      const scalar_t* a,                   // [num_rows / top_k, K]
                      const int32_t* perm,                 // [num_experts, K]; values are not trusted
                      const int32_t* sorted_token_ids,     // [slots]; values are not trusted
                      const int32_t* expert_ids,           // [slots / block_size]
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
            run.data[i] = from[first / LANE_STEP * LANE_STEP + i / 2 * (LANE_STEP / 4) + j +
                               j / LANE_PAIRS * LANE_PAIRS + i % 2 * LANE_PAIRS];
        }
        run.store(to + first);
    } else {
        Vec<scalar_t, VEC_SIZE>::load(from + first).store(to + first);
    }
}
