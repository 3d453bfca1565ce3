// ggml_mma.cuh: codes of GGUF's types as elements of a tensor core's products, and the steps of rows that these need.
#pragma once
#include "ggml_tile.cuh"
#include "product.cuh"

// What `pairs_of_codes` adds to codes less OFFSET if it does not subtract what makes codes numbers: 128, whose last place
// in bfloat16 is worth 1, as that of 1024 in float16; which is too much beside codes, and is subtracted. Elsewhere 0.
template <typename FORMAT_T, typename T>
constexpr int RAISED = is_same<T, bf16_t> && FORMAT_T::LARGEST < 128 ? 128 + FORMAT_T::OFFSET : 0;

// Four codes less OFFSET, plus RAISED if `RAISE`, as two pairs of T, exactly.
template <typename FORMAT_T, typename T, bool RAISE>
DEVICE void pairs_of_codes(uint32_t codes, uint32_t& low, uint32_t& high) {
    constexpr bool IS_HALF = is_same<T, half_t>, IS_WIDE = !IS_HALF && FORMAT_T::LARGEST > 127;
    const uint32_t places = IS_WIDE ? codes & 127 * ONES : codes;  // the last ones of a number
    low = byte_perm(places, IS_HALF ? 0x64 : 0x43, 0x4140);
    high = byte_perm(places, IS_HALF ? 0x64 : 0x43, 0x4342);
    if constexpr (RAISE && RAISED<FORMAT_T, T> != 0) return;
    Vec<T, 2> pairs[2], offsets[2];
    pairs[0].template word<2>(0) = low;
    pairs[1].template word<2>(0) = high;
    if constexpr (IS_WIDE) {  // the eighth bit of a code is worth 128: the offset is 128 with it, or 256, twice as much
        static_assert(FORMAT_T::OFFSET == 128);
        const uint32_t exponents = ~codes & 128 * ONES;
        offsets[0].template word<2>(0) = byte_perm(exponents, 0x43, 0x4140);
        offsets[1].template word<2>(0) = byte_perm(exponents, 0x43, 0x4342);
    } else {
        offsets[0] = offsets[1] = Vec<T, 2>::full((IS_HALF ? 1024.0f : 128.0f) + FORMAT_T::OFFSET);
    }
    low = (pairs[0] - offsets[0]).template word<2>(0);
    high = (pairs[1] - offsets[1]).template word<2>(0);
}

// A tile of ones.
template <typename T>
constexpr uint32_t ONE_PAIR = is_same<T, half_t> ? 0x3c003c00 : 0x3f803f80;
