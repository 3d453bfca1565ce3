// chunk_scan_pass: the state after each segment of a scan (chunk_scan.cuh), from what each segment makes of zeros.
//
//     state_s = own_s + decay_s * state_{s - 1}, in place
//
// One vector of all segments per thread; BATCH segments are loaded at a time.
//
// Constants
//     STATE_SIZE    elements of the state of a head; a multiple of VEC_SIZE

#include "vec.cuh"

using vec_t = Vec<float, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
chunk_scan_pass(float* segment_states,        // [num_states, num_heads, STATE_SIZE]
                const float* segment_decays,  // [num_states, num_heads]
                int64_t num_states, int64_t num_heads) {
    await_previous_kernel();
    const int64_t i = (int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x) * VEC_SIZE, stride = num_heads * STATE_SIZE;
    if (i >= stride) return;
    const int64_t head = i / STATE_SIZE;
    float state[VEC_SIZE];
    vec_t::load(segment_states + i).to_floats(state);
    for (int64_t first = 1; first < num_states; first += BATCH) {
        vec_t own[BATCH];
        float decays[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int64_t s = first + b < num_states ? first + b : num_states - 1;
            own[b] = vec_t::load(segment_states + s * stride + i);
            decays[b] = segment_decays[s * num_heads + head];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (first + b >= num_states) break;
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                // A segment that begins a sequence forgets even what is infinite.
                state[j] = decays[b] == 0.0f ? own[b][j] : fmaf(decays[b], state[j], own[b][j]);
            }
            const vec_t result = vec_t::from_floats(state);
            *reinterpret_cast<vec_t*>(segment_states + (first + b) * stride + i) = result;
        }
    }
}
