// expert_combine: sums the results of every token over the ranks that hold its experts.
//
//     out[t] = T(sum_p float(row t * W + rank of rank p))    over these ranks in order, rounded once; 0 without ranks
//
// Thread t of block b sums vector b * NUM_THREADS + t, and every gridDim.x * NUM_THREADS after it, which it reads from
// the memory of the ranks. expert_rows.cuh explains the memory and the synchronization.
//
// Constants
//     WORLD_SIZE     W, ranks
//     SIGNAL_BYTES   offset of a rank's rows from its signals
//     TOP_K          choices of a token
//     NUM_EXPERTS    on all ranks
//     id_t           element type of topk_ids
//     CODES, code_t  used by the dispatch only

#include "expert_rows.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
expert_combine(scalar_t* out,            // [num_tokens, HIDDEN_SIZE]
               const id_t* topk_ids,     // [num_tokens, TOP_K]
               const uint64_t* signals,  // [8]: address of the signals of each rank
               LostRank* lost,           // [8]: report on each rank that the kernel gave up
               Signals* own_signals, int num_tokens, int rank) {
    await_previous_kernel();
    World<WORLD_SIZE> world(signals, own_signals, lost, rank);
    ExpertRows rows(world);
    rows.combine(out, topk_ids, num_tokens);
    world.leave();
}
