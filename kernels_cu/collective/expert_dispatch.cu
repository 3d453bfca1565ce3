// expert_dispatch: every token's row goes to the ranks that hold one of its experts, with its ids and weights.
//
//     row t * W + r of rank p = row t of x of rank r    where one of its ids is an expert of p; with CODES, as codes
//     ids[t * W + r, k] of rank p = topk_ids[t, k] - p * E / W of rank r, -1 where that is no expert of p
//
// Thread t of block b sends the vectors b * NUM_THREADS + t, and every gridDim.x * NUM_THREADS after it; then ids and
// weights, likewise. expert_rows.cuh has the order of ranks.
//
// Constants
//     WORLD_SIZE     W, ranks
//     SIGNAL_BYTES   from a rank's signals to its rows
//     TOP_K          choices of a token
//     NUM_EXPERTS    E, on all ranks
//     id_t           element type of topk_ids
//     CODES          rows are codes, with a scale for 128 elements
//     code_t         element type of codes

#include "expert_rows.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
expert_dispatch(const scalar_t* x,          // [num_tokens, HIDDEN_SIZE]
                const id_t* topk_ids,       // [num_tokens, TOP_K]
                const float* topk_weights,  // [num_tokens, TOP_K]
                const uint64_t* signals,    // [8]: address of the signals of each rank
                LostRank* lost,             // [8]: each rank, if the kernel gives it up
                Signals* own_signals, int num_tokens, int most_tokens, int64_t ids_offset, int64_t weights_offset,
                int64_t scales_offset, int rank) {
    await_previous_kernel();
    World<WORLD_SIZE> world(signals, own_signals, lost, rank);
    ExpertRows rows(world);
    rows.dispatch(x, topk_ids, topk_weights, num_tokens, most_tokens, ids_offset, weights_offset, scales_offset);
    world.leave();
}
