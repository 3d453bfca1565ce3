// bf16_parts.cuh: float32 as the exact sum of three bfloat16, for MMAs.

#pragma once
#include "arith.cuh"

// Splits each float of the pair into three bfloat16 that add up to it; words[i] has part i of both.
DEVICE void split_pair(uint32_t (&words)[3], float low, float high) {
#pragma unroll
    for (int part = 0; part < 3; ++part) {
        const uint32_t low_bits = __float_as_uint(low), high_bits = __float_as_uint(high);
        words[part] = byte_perm(low_bits, high_bits, 0x7632);
        low -= __uint_as_float(low_bits & 0xffff0000u);
        high -= __uint_as_float(high_bits & 0xffff0000u);
    }
}
