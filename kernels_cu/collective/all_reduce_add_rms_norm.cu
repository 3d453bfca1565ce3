// all_reduce_add_rms_norm: all-reduce, residual add and RMS norm in one kernel, by ll_protocol.cuh.
//
//     x = T(sum_p float(input_p[r, i]));  z = T(x + residual[r, i]);  residual[r, i] = z
//     out[r, i] = T(T(z / sqrt(mean_i(z^2) + epsilon)) * weight[i])    T: dtype of all tensors
//
// A block takes row blockIdx.x and every gridDim.x-th after it. It sends all its rows to every rank, and then sums row
// after row in registers as the packets arrive. Every rank computes all rows. out may alias input.
//
// Constants
//     WORLD_SIZE     ranks
//     SIGNAL_BYTES   offset of a rank's packets from its signals
//     PACKET_BYTES   bytes of a rank's packets

#include "norm.cuh"
#include "ll_protocol.cuh"

using row_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, NUM_THREADS>;
using vec_t = row_t::vec_t;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
all_reduce_add_rms_norm(scalar_t* out,            // [num_rows, HIDDEN_SIZE]
                        scalar_t* residual,       // [num_rows, HIDDEN_SIZE]
                        const scalar_t* weight,   // [HIDDEN_SIZE]
                        const scalar_t* input,    // [num_rows, HIDDEN_SIZE]
                        const uint64_t* signals,  // [8]: address of the signals of each rank
                        LostRank* lost,           // [8]: report on each rank that the kernel gave up
                        Signals* own_signals, int64_t num_rows, int rank, float epsilon) {
    await_previous_kernel();
    constexpr int ROW_VECS = HIDDEN_SIZE / VEC_SIZE;
    __shared__ float partial[NUM_THREADS / WARP_SIZE];
    World<WORLD_SIZE> world(signals, own_signals, lost, rank);
    const Packets<WORLD_SIZE, scalar_t, VEC_SIZE> packets(world, num_rows * ROW_VECS);
    ++world.meeting;
    for (int64_t r = blockIdx.x; r < num_rows; r += gridDim.x) {
        for (int i = threadIdx.x; i < ROW_VECS; i += NUM_THREADS) {
            packets.send(r * ROW_VECS + i, vec_t::load(input + (r * ROW_VECS + i) * VEC_SIZE));
        }
    }
    for (int64_t r = blockIdx.x; r < num_rows; r += gridDim.x) {
        scalar_t* const row = residual + r * HIDDEN_SIZE;
        row_t z(row);
        const auto add_residual = [&](int i, int column, float (&v)[VEC_SIZE]) {
            const vec_t added = vec_t::load(row + column);
            packets.sum(v, (r * HIDDEN_SIZE + column) / VEC_SIZE);
            add_to(v, vec_t::from_floats(v), added);
            const vec_t sum = vec_t::from_floats(v);
            sum.store(row + column);
            z.set(i, sum);
            sum.to_floats(v);
        };
        const float scale = rsqrtf(row_mean_square<NUM_THREADS>(z, add_residual, partial) + epsilon);
        z.for_each([&](int i, int column) {
            float v[VEC_SIZE];
            z.get(i, column).to_floats(v);
            scale_and_weigh<vec_t>(v, scale, vec_t::load(weight + column)).store(out + r * HIDDEN_SIZE + column);
        });
        __syncthreads();  // all warps have read `partial`
    }
    world.leave();
}
