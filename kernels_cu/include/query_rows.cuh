// query_rows.cuh: queries beside codes of an fp8 cache become float16 in shared memory, the type that holds every code.
#pragma once
#include "attention.cuh"

// A row of queries of type Q, which lies in PANELS swizzled panels at `row`, becomes float16 in its place, relative to a
// power of two: returns what products of the row are to be multiplied by. By four neighbouring lanes, whose numbers are t;
// `number`: of the row. Neighbouring rows take other halves of 128 bytes: lanes then read all banks.
template <typename Q, int PANELS, int PANEL_BYTES>
DEVICE float convert_query_row(uint8_t* row, int number, int t) {
    const auto at = [&](int i) { return row + i / 2 * PANEL_BYTES + (t + (i + number) % 2 * 4) * 16; };
    float absmax = 0.0f, x[8];
    for (int i = 0; i < 2 * PANELS; ++i) {
        Vec<Q, 8>::load(reinterpret_cast<const Q*>(at(i))).to_floats(x);
#pragma unroll
        for (int j = 0; j < 8; ++j) absmax = fmaxf(absmax, fabsf(x[j]));
    }
    absmax = fmaxf(absmax, shfl_xor(absmax, 1));
    absmax = fmaxf(absmax, shfl_xor(absmax, 2));
    const float factor = inverse_power_of_two(absmax);
    for (int i = 0; i < 2 * PANELS; ++i) {
        Vec<Q, 8>::load(reinterpret_cast<const Q*>(at(i))).to_floats(x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= factor;
        Vec<half_t, 8>::from_floats(x).store_shared(reinterpret_cast<half_t*>(at(i)));
    }
    return 1.0f / factor;
}
