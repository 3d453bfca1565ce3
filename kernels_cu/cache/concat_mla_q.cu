// concat_mla_q: concatenates the two parts of every query head of multi-head latent attention.
//
//     q_out[t, h] = [ql_nope[t, h], q_pe[t, h]]        bits are copied
//
// Thread mapping: the vectors of all heads are numbered head after head. A CTA takes BATCH * NUM_THREADS vectors, and a
// thread every NUM_THREADS-th vector.
//
// Constants
//     NUM_HEADS     heads of a token
//     NOPE_SIZE     elements of a head of ql_nope
//     ROPE_SIZE     elements of a head of q_pe
//     VEC_SIZE      elements in one memory access; divides NOPE_SIZE and ROPE_SIZE
//     BATCH         vectors that a thread loads before it stores one

#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int NOPE_VECS = NOPE_SIZE / VEC_SIZE, HEAD_VECS = NOPE_VECS + ROPE_SIZE / VEC_SIZE;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1536 / NUM_THREADS)
concat_mla_q(const scalar_t* ql_nope,  // [num_tokens, NUM_HEADS, NOPE_SIZE]
             const scalar_t* q_pe,     // [num_tokens, NUM_HEADS, ROPE_SIZE]
             scalar_t* q_out,          // [num_tokens, NUM_HEADS, NOPE_SIZE + ROPE_SIZE]
             int64_t num_vecs, int64_t nope_stride, int64_t nope_head_stride, int64_t pe_stride, int64_t pe_head_stride,
             int64_t out_stride, int64_t out_head_stride) {
    await_previous_kernel();
    const int64_t first = int64_t(blockIdx.x) * (BATCH * NUM_THREADS) + threadIdx.x;
    vec_t vecs[BATCH];
    int64_t to[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        // A thread without a vector loads the last one again: a conditional load would be issued late.
        const uint64_t vec = min(first + i * NUM_THREADS, num_vecs - 1);
        const uint64_t head = vec / HEAD_VECS;
        const int64_t token = head / NUM_HEADS, of_token = head % NUM_HEADS;
        const int piece = vec % HEAD_VECS;
        const scalar_t* nope = ql_nope + token * nope_stride + of_token * nope_head_stride + piece * VEC_SIZE;
        const scalar_t* pe = q_pe + token * pe_stride + of_token * pe_head_stride + (piece - NOPE_VECS) * VEC_SIZE;
        vecs[i] = vec_t::load_once(piece < NOPE_VECS ? nope : pe);
        to[i] = token * out_stride + of_token * out_head_stride + piece * VEC_SIZE;
    }
    keep_loads();
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        if (first + i * NUM_THREADS < num_vecs) vecs[i].store(q_out + to[i]);
    }
}
