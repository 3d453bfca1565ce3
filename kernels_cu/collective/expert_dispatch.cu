// expert_dispatch: sends every token's row, with its ids and weights, to the ranks that hold its experts.
//
//     row t * W + r of rank p = row t of x of rank r    if one of its ids is an expert of p; CODES: quantized
//     ids[t * W + r, k] of rank p = topk_ids[t, k] - p * E / W of rank r, or -1 if that is not an expert of p
//
// Thread t of block b sends vector b * NUM_THREADS + t, and every gridDim.x * NUM_THREADS after it; then ids and
// weights in the same order. expert_rows.cuh explains the memory and the synchronization.
//
// Constants
//     WORLD_SIZE     W, ranks
//     SIGNAL_BYTES   offset of a rank's rows from its signals
//     TOP_K          choices of a token
//     NUM_EXPERTS    E, on all ranks
//     id_t           element type of topk_ids
//     CODES          whether rows are quantized, with one scale per 128 elements
//     code_t         element type of quantized rows

#include "expert_rows.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
expert_dispatch(const scalar_t* x,          // [num_tokens, HIDDEN_SIZE]
                const id_t* topk_ids,       // [num_tokens, TOP_K]
                const float* topk_weights,  // [num_tokens, TOP_K]
                const uint64_t* signals,    // [8]: address of the signals of each rank
                LostRank* lost,             // [8]: report on each rank that the kernel gave up
                Signals* own_signals, int num_tokens, int most_tokens, int64_t ids_offset, int64_t weights_offset,
                int64_t scales_offset, int rank) {
    await_previous_kernel();
    World<WORLD_SIZE> world(signals, own_signals, lost, rank);
    ExpertRows rows(world);
    rows.dispatch(x, topk_ids, topk_weights, num_tokens, most_tokens, ids_offset, weights_offset, scales_offset);
    world.leave();
}
