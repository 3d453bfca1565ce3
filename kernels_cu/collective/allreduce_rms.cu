// allreduce_rms: RMS norm of rows whose columns are sharded over ranks (tensor parallelism): the sum of squares of a
// row is reduced over all ranks.
//
//     s = sum_p sum_i float(x_p[r, i])^2    in the order of ranks
//     out[r, i] = T(x[r, i] / sqrt(s / (SIZE * WORLD_SIZE) + epsilon) * weight[i])
//     x: the first Q_SIZE columns of input, and separately, with their own s and weight, the next K_SIZE columns
//
// A block takes row blockIdx.x and every gridDim.x-th after it. It writes the sums of squares of its rows to the
// scratch memory of its rank, meets the blocks with its index (rank_barrier.cuh), and reads theirs. The scratch memory
// is double-buffered: a rank that is one kernel ahead writes to the other half, and no rank can be two ahead, so one
// meeting is enough. All launches have the same grid for any number of rows, so that all blocks count the same
// meetings.
//
// Constants
//     WORLD_SIZE      ranks
//     Q_SIZE, K_SIZE  columns that are normalised; K_SIZE may be 0
//     SIGNAL_BYTES    offset of a rank's scratch memory from its signals

#include "reduce.cuh"
#include "rank_barrier.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

template <int SIZE>
DEVICE float sum_of_squares(const scalar_t* x, float* partial) {
    float sum = 0.0f;
    for (int i = threadIdx.x * VEC_SIZE; i < SIZE; i += NUM_THREADS * VEC_SIZE) {
        float v[VEC_SIZE];
        vec_t::load(x + i).to_floats(v);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) sum += v[j] * v[j];
    }
    sum = row_reduce<Sum, NUM_THREADS>(sum, partial);
    __syncthreads();  // all warps have read `partial`
    return sum;
}

template <int SIZE>
DEVICE void normalise(scalar_t* out, const scalar_t* x, const scalar_t* weight, float sum, float epsilon) {
    const float scale = rsqrtf(sum / (float(SIZE) * WORLD_SIZE) + epsilon);
    for (int i = threadIdx.x * VEC_SIZE; i < SIZE; i += NUM_THREADS * VEC_SIZE) {
        float v[VEC_SIZE], w[VEC_SIZE];
        vec_t::load(x + i).to_floats(v);
        vec_t::load(weight + i).to_floats(w);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[j] = v[j] * scale * w[j];
        vec_t::from_floats(v).store(out + i);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
allreduce_rms(scalar_t* q_out,           // [num_rows, Q_SIZE]
              scalar_t* k_out,           // [num_rows, K_SIZE]
              const scalar_t* input,     // [num_rows, Q_SIZE + K_SIZE or more]
              const scalar_t* q_weight,  // [Q_SIZE]
              const scalar_t* k_weight,  // [K_SIZE]
              const uint64_t* signals,   // [WORLD_SIZE]: address of the signals of each rank
              LostRank* lost,            // [8]: report on each rank that the kernel gave up
              int64_t num_rows, int64_t input_stride, int rank, float epsilon) {
    await_previous_kernel();
    __shared__ float partial[NUM_THREADS / WARP_SIZE];
    World<WORLD_SIZE> world(signals, reinterpret_cast<Signals*>(signals[rank]), lost, rank);
    const int half = world.meeting & 1;
    for (int64_t r = blockIdx.x; r < num_rows; r += gridDim.x) {
        const scalar_t* x = input + r * input_stride;
        const float q = sum_of_squares<Q_SIZE>(x, partial), k = sum_of_squares<K_SIZE>(x + Q_SIZE, partial);
        if (threadIdx.x == 0) {
            float* sums = world.template scratch<float>(rank) + r * 4 + half * 2;
            sums[0] = q;
            sums[1] = k;
        }
    }
    world.meet<Flagged::ALL>();
    for (int64_t r = blockIdx.x; r < num_rows; r += gridDim.x) {
        float q = 0.0f, k = 0.0f;
        for (int other = 0; other < WORLD_SIZE; ++other) {
            const float* sums = world.template scratch<float>(other) + r * 4 + half * 2;
            q += sums[0];
            k += sums[1];
        }
        const scalar_t* x = input + r * input_stride;
        normalise<Q_SIZE>(q_out + r * Q_SIZE, x, q_weight, q, epsilon);
        if constexpr (K_SIZE > 0) normalise<K_SIZE>(k_out + r * K_SIZE, x + Q_SIZE, k_weight, k, epsilon);
    }
    world.leave();
}
