// marlin_int4_fp8_preprocess: re-encodes 4-bit quants so that few instructions convert quant - zero to e4m3.
//
//     recoded = quant - zero if that is not negative, else 15 - quant;   zero = 8, or the zero point of the group
//
// A thread takes one word. A zero point is at the same bit of its word as the quants it belongs to.
//
// Constants
//     HAS_ZEROS     whether groups have zero points

#include "platform.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
marlin_int4_fp8_preprocess(uint32_t* recoded,        // [num_rows, columns]
                           const uint32_t* qweight,  // [num_rows, columns]
                           const uint32_t* qzeros,   // [num_rows / group_rows, columns]
                           int64_t num_rows, int64_t columns, int64_t group_rows) {
    await_previous_kernel();
    const int64_t i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (i >= num_rows * columns) return;
    const uint32_t word = qweight[i];
    const uint32_t zeros = HAS_ZEROS ? qzeros[i / columns / group_rows * columns + i % columns] : 0x88888888u;
    uint32_t result = 0;
#pragma unroll
    for (int bit = 0; bit < 32; bit += 4) {
        const uint32_t quant = word >> bit & 15, zero = zeros >> bit & 15;
        result |= (quant >= zero ? quant - zero : 15 - quant) << bit;
    }
    recoded[i] = result;
}
