// layout_exllama.cuh: GPTQ's columns with the even rows of a word in its lower half, as `gptq_shuffle` leaves them.
//
//     words [K BITS / 32, N]
//
//     4 bits:   bits   0-3  4-7  8-11  12-15  16-19  20-23  24-27  28-31
//               row    0    2    4     6      1      3      5      7
//     8 bits:   as in layout_gptq, with the same kernels
//     3 bits:   three words have 32 rows. Word i has rows 10i ... 10i + 9, the even ones in bits 0-14 and the odd
//               ones in bits 16-30, and in bits 15 and 31 bit i of rows 30 and 31.
//
//     zero points of a group: as in layout_gptq
#pragma once
#include "layout_gptq.cuh"

template <int BITS>
struct layout_exllama : column_words<BITS, true> {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        constexpr int FIELDS = BITS == 3 ? 32 : 32 / BITS, UNIT_WORDS = BITS == 3 ? 3 : 1;
        const uint32_t* unit = words + int64_t(k / FIELDS) * UNIT_WORDS * size.columns + n;
        const int field = int(k % FIELDS), half = field % 2 * 16;
        if constexpr (BITS == 8) {
            return *unit >> field * 8 & 255;
        } else if constexpr (BITS == 3) {
            if (field < 30) return unit[int64_t(field / 10) * size.columns] >> (half + field % 10 / 2 * 3) & 7;
            uint32_t quant = 0;
#pragma unroll
            for (int j = 0; j < 3; ++j) quant |= (unit[int64_t(j) * size.columns] >> (half + 15) & 1) << j;
            return quant;
        } else {
            return *unit >> (half + field / 2 * BITS) & FIELD_MASK<BITS>;
        }
    }

    // The words of two WGMMAs at a time, for lack of registers: a word has eight rows of a column, a pair for each of
    // four lanes. Column `at` of a lane's eight belongs to WGMMA at % 4, half at / 4.
    template <int BLOCK_N, int QUANTS_AT>
    struct FewRows {
        static_assert(BITS == 4);
        static constexpr bool BY_HALVES = true;
        static constexpr int RUN = 4;

        static DEVICE void read(uint32_t (&words)[8], const uint8_t* stage, int slice, int first) {
            const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
            const uint8_t* const quants = stage + QUANTS_AT;
            const uint8_t* const columns =
                quants + slice * (2 * BLOCK_N * 4) + (warp * (BLOCK_N / 4) + 4 * g + first) * 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const auto run = Vec<uint32_t, 2>::load(
                    reinterpret_cast<const uint32_t*>(columns + (i / 2 * BLOCK_N + i % 2 * 32) * 4));
#pragma unroll
                for (int j = 0; j < 2; ++j) words[i * 2 + j] = run.data[j] >> 4 * t;
            }
        }
    };
};
