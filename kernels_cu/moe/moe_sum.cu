// moe_sum: the sum over the choices of each token.
//
//     output[t] = T(sum of input[t, j] over j < TOPK), added in float32 in the order of j
//
// HAS_IDS: only choices j with an expert on this device are added (expert_sort.cuh); input[t, j] of the others may be
// garbage.
//
// Threads: one vector of a row of output per thread (elementwise.cuh).
//
// Constants
//     TOPK          choices of a token
//     HAS_IDS, HAS_MAP    topk_ids are given, and expert_map
//     id_t          element type of topk_ids

#include "elementwise.cuh"
#include "expert_sort.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int BATCH = TOPK < 8 ? TOPK : 8;  // vectors that are loaded before the first is used

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
moe_sum(scalar_t* output,           // [num_rows, hidden_size]
        const scalar_t* input,      // [num_rows, TOPK, hidden_size]
        const id_t* topk_ids,       // [num_rows, TOPK]
        const int32_t* expert_map,  // [num_ids]
        int64_t num_rows, int64_t hidden_size, int64_t input_stride, int64_t out_stride, int64_t num_ids,
        int64_t num_local) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const scalar_t* const own = input + at.row * input_stride + at.column;
    const auto exists = [&](int j) {
        if constexpr (!HAS_IDS) return true;
        const id_t id = topk_ids[at.row * TOPK + j];
        return local_expert<HAS_MAP>(id, expert_map, num_ids, int(num_local), NO_BIN) != NO_BIN;
    };
    float sum[VEC_SIZE] = {};
#pragma unroll 1
    for (int first = 0; first < TOPK; first += BATCH) {
        vec_t vecs[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) vecs[j] = vec_t::load_once(own + min(first + j, TOPK - 1) * hidden_size);
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            if (HAS_IDS && (first + j >= TOPK || !exists(first + j))) continue;
            float x[VEC_SIZE];
            vecs[j].to_floats(x);
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
                if (first + j == 0) sum[i] = x[i];
                else if (first + j < TOPK) sum[i] = ieee_add(sum[i], x[i]);
            }
        }
    }
    vec_t::from_floats(sum).store(output + at.row * out_stride + at.column);
}
