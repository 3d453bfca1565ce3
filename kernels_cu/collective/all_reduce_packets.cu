// all_reduce_packets: the all-reduce of a short tensor within a node by the low-latency protocol (ll_protocol.cuh):
// each rank sends its input to all ranks.
//
//     out[i] = T(sum_r float(input_r[i]))    in the order of ranks, rounded once
//
// Thread t of block b sends vector b * NUM_THREADS + t, and every gridDim.x * NUM_THREADS after it, and then sums those
// vectors as their packets arrive. out may alias input.
//
// Constants
//     WORLD_SIZE     ranks
//     SIGNAL_BYTES   offset of a rank's packets from its signals
//     PACKET_BYTES   bytes of a rank's packets
//     NUM_THREADS    threads in the block
//     VEC_SIZE       elements in 16 bytes

#include "ll_protocol.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
all_reduce_packets(scalar_t* out,            // [num_vecs * VEC_SIZE]
                   const scalar_t* input,    // [num_vecs * VEC_SIZE]
                   const uint64_t* signals,  // [8]: address of the signals of each rank
                   LostRank* lost,           // [8]: report on each rank that the kernel gave up
                   Signals* own_signals, int64_t num_vecs, int rank) {
    await_previous_kernel();
    World<WORLD_SIZE> world(signals, own_signals, lost, rank);
    const Packets<WORLD_SIZE, scalar_t, VEC_SIZE> packets(world, num_vecs);
    ++world.meeting;
    const int64_t first = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x, step = int64_t(gridDim.x) * NUM_THREADS;
    for (int64_t i = first; i < num_vecs; i += step) packets.send(i, vec_t::load(input + i * VEC_SIZE));
    for (int64_t i = first; i < num_vecs; i += step) {
        float x[VEC_SIZE];
        packets.sum(x, i);
        vec_t::from_floats(x).store(out + i * VEC_SIZE);
    }
    __syncthreads();  // every thread has loaded the number of the meeting before
    world.leave();
}
