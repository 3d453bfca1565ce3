// all_gather: concatenates the tensors of the ranks of one node, in the order of ranks, on every rank.
//
//     out[r * num_vecs + i] = input_r[i]    vectors of 16 bytes
//
// Thread t of block b takes vector b * NUM_THREADS + t of every rank, and every gridDim.x * NUM_THREADS after it.
//
// Constants
//     WORLD_SIZE     ranks
//     SIGNAL_BYTES   offset of a rank's packets from its signals
//     NUM_THREADS    threads in the block

#include "rank_barrier.cuh"

using vec_t = Vec<uint8_t, 16>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
all_gather(uint8_t* out,             // [WORLD_SIZE, num_vecs * 16]
           const uint64_t* peers,    // [8]: address of the input of each rank
           const uint64_t* signals,  // [8]: address of the signals of each rank
           LostRank* lost,           // [8]: report on each rank that the kernel gave up
           Signals* own_signals, int64_t num_vecs, int rank) {
    await_previous_kernel();
    World<WORLD_SIZE> world(signals, own_signals, lost, rank);
    const uint8_t* inputs[WORLD_SIZE];
#pragma unroll
    for (int i = 0; i < WORLD_SIZE; ++i) inputs[i] = reinterpret_cast<const uint8_t*>(peers[i]);

    world.template meet<Flagged::START>();
    const int64_t first = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x, step = int64_t(gridDim.x) * NUM_THREADS;
    for (int64_t i = first; i < num_vecs; i += step) {
        vec_t vecs[WORLD_SIZE];
#pragma unroll
        for (int other = 0; other < WORLD_SIZE; ++other) vecs[other] = vec_t::load(inputs[other] + i * 16);
#pragma unroll
        for (int other = 0; other < WORLD_SIZE; ++other) vecs[other].store(out + (other * num_vecs + i) * 16);
    }
    world.template meet<Flagged::READS>();
    world.leave();
}
