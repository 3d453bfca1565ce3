// gather_columns: permutes the columns of activations to the order of a packed weight's rows, and converts 8 bits to
// 16.
//
//     gathered[m, k] = T(a[m, perm[k]]), or 0 if perm[k] is out of range; without PERMUTED, T(a[m, k])
//     IN_FOURS:        T(a[m, 16 (k / 16) + 4 t + q + 2 e]) for k % 16 = 2 t + 8 q + e, t < 4, q < 2, e < 2
//
// A thread takes VEC_SIZE adjacent elements of a row.
//
// Constants
//     scalar_t      T
//     a_t           element type of a; T represents all its values
//     PERMUTED      whether perm permutes the columns
//     IN_FOURS      whether the columns are permuted for layout_marlin_8, where an MMA lane has four adjacent rows of
//                   the weight (packed_weight.cuh); K is a multiple of 16
//     ACCESS        elements of one access to gathered: VEC_SIZE, or 1 if VEC_SIZE does not divide K
//     A_ACCESS      elements of one access to a: VEC_SIZE of fp8, or 1 if columns are permuted or accesses not aligned

#include "widen.cuh"

static_assert(!IN_FOURS || (VEC_SIZE == 8 && !PERMUTED));
static_assert(A_ACCESS == 1 || (A_ACCESS == 8 && ACCESS == 8 && !IN_FOURS && !PERMUTED));

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1) gather_columns(scalar_t* gathered,   // [M, K]
                                                                        const a_t* a,         // [M, K]
                                                                        const int32_t* perm,  // [K]; not trusted
                                                                        int64_t m, int64_t k, int64_t a_stride) {
    await_previous_kernel();
    const int64_t pieces = ceil_div(k, int64_t(VEC_SIZE)), i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (i >= m * pieces) return;
    const int64_t row = i / pieces, first = i % pieces * VEC_SIZE;
    a += row * a_stride;
    scalar_t* out = gathered + row * k + first;
    if constexpr (A_ACCESS > 1) {
        // Before sm_89, to_float of fp8 has branches for each element.
        const auto words = Vec<uint32_t, 2>::load(reinterpret_cast<const uint32_t*>(a + first));
        uint32_t pairs[2][2];
        fp8_to_pairs<scalar_t, a_t>(words.data[0], pairs[0]);
        fp8_to_pairs<scalar_t, a_t>(words.data[1], pairs[1]);
        const Vec<uint32_t, 4> converted{{pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]}};
        converted.store(reinterpret_cast<uint32_t*>(out));
        return;
    }
    float x[VEC_SIZE];
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) {
        int64_t column = first + j >= k ? -1 : PERMUTED ? int64_t(perm[first + j]) : first + j;
        if constexpr (IN_FOURS) column = first / 16 * 16 + j / 2 * 4 + first % 16 / 8 + j % 2 * 2;
        x[j] = column >= 0 && column < k ? to_float(a[column]) : 0.0f;
    }
    if (ACCESS == VEC_SIZE) {
        Vec<scalar_t, VEC_SIZE>::from_floats(x).store(out);
    } else {
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            if (first + j < k) out[j] = from_float<scalar_t>(x[j]);
        }
    }
}
