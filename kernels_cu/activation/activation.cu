// activation: every element through a function of its own.
//
//     out[r, i] = T(ACT(input[r, i]))
//
// One vector per thread (chunk.cuh).
//
// Constants
//     scalar_t      T: element type of out and input
//     ACT           activation: gelu_new, gelu_fast, gelu_quick or relu2
//     VEC_SIZE      elements in one memory access; divides hidden_size
//     NUM_THREADS   threads in the block
//     ROW_THREADS   of them that share a row; divides NUM_THREADS
//     PLANES        whether the rows need the third dimension of the grid
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "chunk.cuh"
#include "math.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
activation(scalar_t* out,          // [num_rows, hidden_size]
           const scalar_t* input,  // [num_rows, hidden_size]
           int64_t num_rows, int64_t hidden_size, int64_t out_stride, int64_t input_stride) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, VEC_SIZE, PLANES> at(num_rows, hidden_size);
    if (!at.inside) return;
    const vec_t x = vec_t::load(input + at.row * input_stride + at.column);
    ACT(x).store(out + at.row * out_stride + at.column);
}
