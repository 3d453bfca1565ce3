// matrix_core.cuh: MMA of a wave on AMD's matrix cores: MFMA (gfx90a, gfx942, gfx950), WMMA (gfx1100, gfx1201).
//
//     d[r, c] += sum_k a[r, k] * b[c, k],    16 rows r of a, 16 rows c of b
//
// The instructions multiply their first operand by the transpose of the second. Here b is the first operand and a the
// second, so that a lane's accumulators are adjacent in a row of d. With l the lane and S = MATRIX_SUMS, a lane holds
//
//     of a and b    row l % 16, a run of its elements along K
//     of d          row l % 16, columns S * (l / 16) + i for i < S
//
// K_LANES lanes share a row of an operand, and each holds a run: adjacent bytes of the row in memory. The instruction
// may define other values of k for these registers. That only permutes the terms of the sum over k, because both
// operands are loaded the same way. A run may be longer than the operand of one instruction; then matrix_multiply
// issues several. tests/host/test_matrix_cores.py compares this header with the tables of AMD's matrix instruction
// calculator and ISA documents.
//
// gfx11 is different. Each lane holds a whole row along K, and lanes l and l + 16 hold the same row. Accumulator i of
// its WMMA is column 2 * i + l / 16 of d. matrix_row() permutes the rows of b that the lanes load, so that accumulator
// i is column 8 * (l / 16) + i, as above.
#pragma once
#include "widen.cuh"

enum MatrixCore { NO_MATRIX_CORE, MFMA, WMMA_11, WMMA_12 };
#if PYOPS_HOST
#ifndef PYOPS_HOST_CORE
#define PYOPS_HOST_CORE WARP_SIZE == 64 ? MFMA : NO_MATRIX_CORE
#endif
constexpr MatrixCore MATRIX_CORE = PYOPS_HOST_CORE;
#elif defined(__GFX9__)
constexpr MatrixCore MATRIX_CORE = MFMA;
#elif defined(__GFX11__)
constexpr MatrixCore MATRIX_CORE = WMMA_11;
#elif defined(__GFX12__)
constexpr MatrixCore MATRIX_CORE = WMMA_12;
#else
constexpr MatrixCore MATRIX_CORE = NO_MATRIX_CORE;
#endif
constexpr int MATRIX_SUMS = MATRIX_CORE == MFMA ? 4 : 8;                           // accumulators of a lane
constexpr int K_LANES = MATRIX_CORE == MFMA ? 4 : MATRIX_CORE == WMMA_12 ? 2 : 1;  // lanes that share a row
// 32-bit words that a lane holds of an operand with K = 16 and 16-bit elements.
constexpr int MATRIX_WORDS = MATRIX_CORE == WMMA_11 ? 8 : MATRIX_CORE == WMMA_12 ? 4 : 2;

// Whether the matrix cores of this architecture take elements of T. Callers convert the other fp8 formats to float16,
// which represents every fp8 value.
template <typename T> constexpr bool MATRIX_TAKES = sizeof(T) == 2 || is_same<T, int8_t>;
#if defined(__gfx942__)
template <> constexpr bool MATRIX_TAKES<fp8_e4m3fnuz_t> = true;
#elif defined(__gfx950__) || defined(__GFX12__)
template <> constexpr bool MATRIX_TAKES<fp8_e4m3_t> = true;
template <> constexpr bool MATRIX_TAKES<fp8_e5m2_t> = true;
#endif

// matrix_row: the row of b, 0 to 15, that the lane loads. matrix_run: the lane's index among the lanes that share a
// row.
DEVICE int matrix_row(int lane) { return MATRIX_CORE == WMMA_11 ? lane % 2 * 8 + lane % 16 / 2 : lane % 16; }
DEVICE int matrix_run(int lane) { return MATRIX_CORE == WMMA_11 ? 0 : lane / 16; }

#if PYOPS_HIP
template <typename T, int N> using native_t = T __attribute__((ext_vector_type(N)));

// Returns the words as the vector type that an instruction takes as operand.
template <typename To>
DEVICE To operand_of(const uint32_t* words) {
    To value;
    __builtin_memcpy(&value, words, sizeof value);
    return value;
}
#endif

// Keeps the compiler from hoisting operand loads above this call. On gfx11, where an operand is eight words, it would
// hoist more loads than fit in registers.
DEVICE void order_loads() {
#if PYOPS_HIP
    if constexpr (MATRIX_CORE == WMMA_11) __builtin_amdgcn_sched_barrier(0);
#endif
}

// The same in an unrolled loop over k-steps, on every AMD GPU: the compiler may load 16 words ahead, the operands of
// 16 / MATRIX_WORDS steps.
DEVICE void order_steps(int step) {
#if PYOPS_HIP
    if (step % (16 / MATRIX_WORDS) == 0) __builtin_amdgcn_sched_barrier(0);
#endif
}

// Makes the compiler compute the WMMA accumulators here. Otherwise it may sink the MMAs below the next branch and keep
// the operands of all of them in registers until then.
template <int SUMS>
DEVICE void keep_sums(float (&sums)[SUMS]) {
#if PYOPS_HIP
    if constexpr (MATRIX_CORE != MFMA) asm volatile("" : "+v"(reinterpret_cast<native_t<float, SUMS>&>(sums)));
#endif
}

// d += a * b^T, for elements of T; int8 accumulates in int32, other types in float. The architecture's instruction with
// the largest K that divides the run is issued once for each part of the run.
template <typename T, int WORDS, typename Sum>
DEVICE void matrix_multiply(Sum (&sums)[MATRIX_SUMS], const uint32_t (&a)[WORDS], const uint32_t (&b)[WORDS]) {
    static_assert(MATRIX_TAKES<T>);
#if PYOPS_HOST
    host_matrix_core<T, MATRIX_CORE>(sums, b, a);
#elif PYOPS_HIP
    auto& d = reinterpret_cast<native_t<Sum, MATRIX_SUMS>&>(sums);
#define PYOPS_MATRIX(TYPE, CALL)                                                   \
    {                                                                              \
        _Pragma("unroll") for (int i = 0; i < WORDS; i += int(sizeof(TYPE) / 4)) { \
            const TYPE x = operand_of<TYPE>(b + i), y = operand_of<TYPE>(a + i);   \
            d = CALL;                                                              \
        }                                                                          \
    }
    using halves_4 = native_t<_Float16, 4>;
    using halves_8 = native_t<_Float16, 8>;
    using halves_16 = native_t<_Float16, 16>;
    using shorts_4 = native_t<short, 4>;
    using shorts_8 = native_t<short, 8>;
    using shorts_16 = native_t<short, 16>;
    using words_2 = native_t<int, 2>;
    using words_4 = native_t<int, 4>;
    constexpr bool IS_HALF = is_same<T, half_t>, IS_BF16 = is_same<T, bf16_t>, IS_E5M2 = is_same<T, fp8_e5m2_t>;
    constexpr bool IS_INT8 = is_same<T, int8_t>;
#if defined(__gfx950__)
    using bf16s_8 = native_t<__bf16, 8>;
    if constexpr (IS_HALF && WORDS % 4 == 0)
        PYOPS_MATRIX(halves_8, __builtin_amdgcn_mfma_f32_16x16x32_f16(x, y, d, 0, 0, 0))
    else if constexpr (IS_BF16 && WORDS % 4 == 0)
        PYOPS_MATRIX(bf16s_8, __builtin_amdgcn_mfma_f32_16x16x32_bf16(x, y, d, 0, 0, 0))
    else if constexpr (IS_INT8 && WORDS % 4 == 0)
        PYOPS_MATRIX(words_4, __builtin_amdgcn_mfma_i32_16x16x64_i8(x, y, d, 0, 0, 0))
    else
#endif
#if defined(__GFX9__)
        if constexpr (IS_HALF)
        PYOPS_MATRIX(halves_4, __builtin_amdgcn_mfma_f32_16x16x16f16(x, y, d, 0, 0, 0))
    else if constexpr (IS_BF16) PYOPS_MATRIX(shorts_4, __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, d, 0, 0, 0))
#if defined(__gfx90a__)
    else PYOPS_MATRIX(int, __builtin_amdgcn_mfma_i32_16x16x16i8(x, y, d, 0, 0, 0))
#else
    else if constexpr (IS_INT8) PYOPS_MATRIX(long, __builtin_amdgcn_mfma_i32_16x16x32_i8(x, y, d, 0, 0, 0))
    else if constexpr (IS_E5M2) PYOPS_MATRIX(long, __builtin_amdgcn_mfma_f32_16x16x32_bf8_bf8(x, y, d, 0, 0, 0))
    else PYOPS_MATRIX(long, __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(x, y, d, 0, 0, 0))
#endif
#elif defined(__GFX11__)
    if constexpr (IS_HALF) PYOPS_MATRIX(halves_16, __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(x, y, d))
    else if constexpr (IS_BF16) PYOPS_MATRIX(shorts_16, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(x, y, d))
    else PYOPS_MATRIX(words_4, __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, x, true, y, d, false))
#else
    if constexpr (IS_HALF) PYOPS_MATRIX(halves_8, __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(x, y, d))
    else if constexpr (IS_BF16) PYOPS_MATRIX(shorts_8, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(x, y, d))
    else if constexpr (IS_INT8)
        PYOPS_MATRIX(words_2, __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, x, true, y, d, false))
    else if constexpr (IS_E5M2) PYOPS_MATRIX(words_2, __builtin_amdgcn_wmma_f32_16x16x16_bf8_bf8_w32_gfx12(x, y, d))
    else PYOPS_MATRIX(words_2, __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(x, y, d))
#endif
#undef PYOPS_MATRIX
#endif
}
