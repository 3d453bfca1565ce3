// act_and_mul: one half of each row, activated, times the other half.
//
//     out[r, i] = T(T(ACT(g)) * u)    where [g, u] = input[r, i], input[r, hidden_size + i], or the other way round
//
// One vector of each half per thread (chunk.cuh).
//
// Constants
//     scalar_t      T: element type of out and input
//     ACT           activation: silu, gelu or gelu_tanh
//     ACT_FIRST     whether g is the first half
//     VEC_SIZE      elements in one memory access; divides hidden_size
//     NUM_THREADS   threads in the block
//     ROW_THREADS   of them that share a row; divides NUM_THREADS
//     PLANES        whether the rows need the third dimension of the grid
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "chunk.cuh"
#include "math.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
act_and_mul(scalar_t* out,          // [num_rows, hidden_size]
            const scalar_t* input,  // [num_rows, 2 * hidden_size]
            int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const scalar_t* first = input + at.row * input_stride + at.column;
    const vec_t g = vec_t::load(ACT_FIRST ? first : first + hidden_size);
    const vec_t u = vec_t::load(ACT_FIRST ? first + hidden_size : first);
    (ACT(g) * u).store(out + at.row * out_stride + at.column);
}
