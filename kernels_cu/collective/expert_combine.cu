// expert_combine: the sum of a token's results over the ranks that hold one of its experts.
//
//     out[t] = T(sum_p float(row t * W + rank of rank p))    over these ranks in their order, rounded once; else 0
//
// Thread t of block b sums the vectors b * NUM_THREADS + t, and every gridDim.x * NUM_THREADS after it, which it reads
// where the ranks hold them. expert_rows.cuh has the order of ranks.
//
// Constants
//     WORLD_SIZE     W, ranks
//     SIGNAL_BYTES   from a rank's signals to its rows
//     TOP_K          choices of a token
//     NUM_EXPERTS    on all ranks
//     id_t           element type of topk_ids
//     CODES, code_t  of the dispatch: of no interest here

#include "expert_rows.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
expert_combine(scalar_t* out,            // [num_tokens, HIDDEN_SIZE]
               const id_t* topk_ids,     // [num_tokens, TOP_K]
               const uint64_t* signals,  // [8]: address of the signals of each rank
               LostRank* lost,           // [8]: each rank, if the kernel gives it up
               Signals* own_signals, int num_tokens, int rank) {
    await_previous_kernel();
    World<WORLD_SIZE> world(signals, own_signals, lost, rank);
    ExpertRows rows(world);
    rows.combine(out, topk_ids, num_tokens);
    world.leave();
}
