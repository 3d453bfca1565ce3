// all_reduce: the all-reduce (sum) of a tensor over the ranks of one node, in one shot or two shots, or its
// reduce-scatter.
//
//     out[i] = T(sum_r float(input_r[i]))    in the order of ranks, rounded once; with SCATTER, rank r has only slice r
//
// Thread t of block b takes vector b * NUM_THREADS + t, and every gridDim.x * NUM_THREADS after it, UNROLL of them at a
// time: the loads in flight bound the rate over the links.
//
// One shot: each rank reads all inputs. Two shots: rank r sums slice r, 1 / WORLD_SIZE of the vectors (reduce-scatter),
// and then reads the other slices from the ranks that summed them (all-gather): 2 (W - 1) / W of the bytes cross the
// links instead of W - 1 times the bytes. A vector is read by the thread with the index of the thread that summed it,
// so only blocks with the same index meet (rank_barrier.cuh).
//
// Constants
//     WORLD_SIZE     ranks
//     TWO_SHOT       reduce-scatter, then all-gather
//     SCATTER        reduce-scatter: out is the rank's slice
//     SIGNAL_BYTES   offset of a rank's packets from its signals
//     PACKET_BYTES   offset of its scratch memory from its packets
//     UNROLL         vectors that a thread loads from every rank before it sums them
//     NUM_THREADS    threads in the block
//     VEC_SIZE       elements in 16 bytes

#include "rank_barrier.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
all_reduce(scalar_t* out,            // [num_vecs * VEC_SIZE], or a slice of it
           const uint64_t* peers,    // [8]: address of the input of each rank
           const uint64_t* signals,  // [8]: address of the signals of each rank
           LostRank* lost,           // [8]: report on each rank that the kernel gave up
           Signals* own_signals, int64_t num_vecs, int rank) {
    await_previous_kernel();
    World<WORLD_SIZE> world(signals, own_signals, lost, rank);
    const scalar_t* inputs[WORLD_SIZE];
#pragma unroll
    for (int i = 0; i < WORLD_SIZE; ++i) inputs[i] = reinterpret_cast<const scalar_t*>(peers[i]);
    const int64_t first = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x, step = int64_t(gridDim.x) * NUM_THREADS;
    const int64_t slice = num_vecs / WORLD_SIZE, begin = TWO_SHOT || SCATTER ? rank * slice : 0;
    const bool to_the_end = !SCATTER && (!TWO_SHOT || rank == WORLD_SIZE - 1);
    const int64_t end = to_the_end ? num_vecs : begin + slice;
    const auto slice_of = [&](int other) {
        return reinterpret_cast<scalar_t*>(world.template scratch<char>(other) + PACKET_BYTES);
    };
    const scalar_t* slices[WORLD_SIZE];
#pragma unroll
    for (int i = 0; TWO_SHOT && i < WORLD_SIZE; ++i) slices[i] = slice_of(i);
    scalar_t* sums = TWO_SHOT ? slice_of(rank) : out;

    world.meet<Flagged::START>();
    for (int64_t i = first; i < end - begin; i += step * UNROLL) {
        vec_t vecs[UNROLL][WORLD_SIZE];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (i + step * u >= end - begin) break;
#pragma unroll
            for (int other = 0; other < WORLD_SIZE; ++other) {
                vecs[u][other] = vec_t::load(inputs[other] + (begin + i + step * u) * VEC_SIZE);
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (i + step * u >= end - begin) break;
            float x[VEC_SIZE];
            sum_in_order(x, vecs[u]);
            vec_t::from_floats(x).store(sums + (i + step * u) * VEC_SIZE);
        }
    }
    world.meet<TWO_SHOT ? Flagged::ALL : Flagged::READS>();
    if constexpr (TWO_SHOT) {
        const int64_t last_slice = num_vecs - (WORLD_SIZE - 1) * slice;
        for (int64_t i = first; i < last_slice; i += step * UNROLL) {
            const auto has = [&](int u, int other) {
                return i + step * u < (other < WORLD_SIZE - 1 ? slice : last_slice);
            };
            vec_t sum[UNROLL][WORLD_SIZE];
#pragma unroll
            for (int j = 0; j < UNROLL * WORLD_SIZE; ++j) {
                const int u = j / WORLD_SIZE, other = j % WORLD_SIZE;
                if (has(u, other)) sum[u][other] = vec_t::load(slices[other] + (i + step * u) * VEC_SIZE);
            }
#pragma unroll
            for (int j = 0; j < UNROLL * WORLD_SIZE; ++j) {
                const int u = j / WORLD_SIZE, other = j % WORLD_SIZE;
                if (has(u, other)) sum[u][other].store(out + (other * slice + i + step * u) * VEC_SIZE);
            }
        }
    }
    world.leave();
}
