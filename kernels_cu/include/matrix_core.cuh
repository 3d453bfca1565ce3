// matrix_core.cuh: products of a warp on AMD's matrix cores: MFMA (gfx90a, gfx942, gfx950), WMMA (gfx1100, gfx1201).
//
//     d[r, c] += sum_k a[c, k] * b[r, k],    r, c < 16, k over 32 bytes of each row
//
// Both operands are 16 rows of 32 bytes. The instructions multiply b by the transpose of a, so that a lane's sums are
// neighbours in a row of the result. With l the lane and N the sums of a lane (4 of MFMA, 8 of WMMA), a lane holds
//
//     of both operands   row l % 16 and OPERAND_BYTES bytes from OPERAND_BYTES * (l / 16) on; gfx1100: all 32 bytes
//     of the result      column c = l % 16 of d, rows r = N * (l / 16) + i for i < N
//
// Elements of K may be summed in any order, if both operands have the same: so one layout of operands serves 16 bits,
// fp8 and int8 alike, and a lane's bytes go to as many instructions as the device needs for them.
//
// WMMA of gfx1100 leaves rows 2 i + l / 16 of its result in a lane; matrix_row() says in which order b's rows are loaded
// for that to be rows 8 * (l / 16) + i, as on gfx1201.
#pragma once
#include "widen.cuh"

#if PYOPS_HOST
constexpr bool HAS_MFMA = WARP_SIZE == 64, HAS_WMMA = false, HAS_WMMA_11 = false;
#elif defined(__GFX9__)
constexpr bool HAS_MFMA = true, HAS_WMMA = false, HAS_WMMA_11 = false;
#elif defined(__GFX11__)
constexpr bool HAS_MFMA = false, HAS_WMMA = true, HAS_WMMA_11 = true;
#else
constexpr bool HAS_MFMA = false, HAS_WMMA = PYOPS_HIP, HAS_WMMA_11 = false;
#endif
constexpr bool HAS_MATRIX_CORES = HAS_MFMA || HAS_WMMA;
constexpr int MATRIX_SUMS = HAS_WMMA ? 8 : 4;                        // of a lane
constexpr int OPERAND_BYTES = HAS_WMMA_11 ? 32 : HAS_WMMA ? 16 : 8;  // of a lane
constexpr int OPERAND_WORDS = OPERAND_BYTES / 4;

// Whether the matrix cores take elements of T; fp8 of other formats is widened to float16.
#if defined(__gfx942__)
template <typename T>
constexpr bool MATRIX_TAKES = sizeof(T) == 2 || is_same<T, int8_t> || is_same<T, fp8_e4m3fnuz_t>;
#elif defined(__gfx950__) || defined(__GFX12__)
template <typename T>
constexpr bool MATRIX_TAKES = sizeof(T) == 2 || is_same<T, int8_t> || is_same<T, fp8_e4m3_t> || is_same<T, fp8_e5m2_t>;
#else
template <typename T>
constexpr bool MATRIX_TAKES = sizeof(T) == 2 || is_same<T, int8_t>;
#endif

// The row of b that the lane loads, of 16.
DEVICE int matrix_row(int lane) { return HAS_WMMA_11 ? lane % 2 * 8 + lane % 16 / 2 : lane % 16; }
// The first byte of 32 that the lane loads of both operands.
DEVICE int matrix_byte(int lane) { return HAS_WMMA_11 ? 0 : lane / 16 * OPERAND_BYTES; }

#if PYOPS_HIP
template <typename T, int N> using native_t = T __attribute__((ext_vector_type(N)));

// N words of an operand as the vector that an instruction takes.
template <typename To, int N>
DEVICE To operand_of(const uint32_t* words) {
    static_assert(sizeof(To) == N * 4);
    To value;
    __builtin_memcpy(&value, words, N * 4);
    return value;
}
#endif

// One or two instructions: the products of the lane's operands `a` and `b` of WORDS words, elements of T.
template <typename T, int WORDS, typename Sum>
DEVICE void matrix_multiply(Sum (&sums)[MATRIX_SUMS], const uint32_t (&b)[WORDS], const uint32_t (&a)[WORDS]) {
    static_assert(MATRIX_TAKES<T> && WORDS == OPERAND_WORDS);
#if PYOPS_HOST
    host_mfma<T>(sums, b, a);
#elif PYOPS_HIP
    auto& d = reinterpret_cast<native_t<Sum, MATRIX_SUMS>&>(sums);
#define PYOPS_PRODUCT(TYPE, COUNT, AT, CALL)                                                 \
    {                                                                                        \
        const auto x = operand_of<TYPE, COUNT>(b + AT), y = operand_of<TYPE, COUNT>(a + AT); \
        d = CALL;                                                                            \
    }
#define PYOPS_PRODUCTS(TYPE, COUNT, CALL) \
    PYOPS_PRODUCT(TYPE, COUNT, 0, CALL)   \
    if constexpr (COUNT < WORDS) PYOPS_PRODUCT(TYPE, COUNT, WORDS / 2, CALL)
    using halves_t = native_t<_Float16, 2 * WORDS>;
    using shorts_t = native_t<short, 2 * WORDS>;
#if defined(__GFX9__)
    if constexpr (is_same<T, half_t>) {
        PYOPS_PRODUCTS(halves_t, WORDS, __builtin_amdgcn_mfma_f32_16x16x16f16(x, y, d, 0, 0, 0))
    } else if constexpr (is_same<T, bf16_t>) {
        PYOPS_PRODUCTS(shorts_t, WORDS, __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, d, 0, 0, 0))
    } else if constexpr (is_same<T, int8_t>) {
#if defined(__gfx90a__)
        PYOPS_PRODUCTS(int, 1, __builtin_amdgcn_mfma_i32_16x16x16i8(x, y, d, 0, 0, 0))
#else
        PYOPS_PRODUCTS(long, 2, __builtin_amdgcn_mfma_i32_16x16x32_i8(x, y, d, 0, 0, 0))
#endif
#if !defined(__gfx90a__)
    } else if constexpr (is_same<T, fp8_e5m2_t>) {
        PYOPS_PRODUCTS(long, 2, __builtin_amdgcn_mfma_f32_16x16x32_bf8_bf8(x, y, d, 0, 0, 0))
    } else {
        PYOPS_PRODUCTS(long, 2, __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(x, y, d, 0, 0, 0))
#endif
    }
#elif defined(__GFX11__)
    using words_t = native_t<int, 4>;
    if constexpr (is_same<T, half_t>) {
        PYOPS_PRODUCTS(halves_t, WORDS, __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(x, y, d))
    } else if constexpr (is_same<T, bf16_t>) {
        PYOPS_PRODUCTS(shorts_t, WORDS, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(x, y, d))
    } else {
        PYOPS_PRODUCTS(words_t, 4, __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, x, true, y, d, false))
    }
#else
    using words_t = native_t<int, 2>;
    if constexpr (is_same<T, half_t>) {
        PYOPS_PRODUCTS(halves_t, WORDS, __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(x, y, d))
    } else if constexpr (is_same<T, bf16_t>) {
        PYOPS_PRODUCTS(shorts_t, WORDS, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(x, y, d))
    } else if constexpr (is_same<T, int8_t>) {
        PYOPS_PRODUCTS(words_t, 2, __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, x, true, y, d, false))
    } else if constexpr (is_same<T, fp8_e5m2_t>) {
        PYOPS_PRODUCTS(words_t, 2, __builtin_amdgcn_wmma_f32_16x16x16_bf8_bf8_w32_gfx12(x, y, d))
    } else {
        PYOPS_PRODUCTS(words_t, 2, __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(x, y, d))
    }
#endif
#undef PYOPS_PRODUCTS
#undef PYOPS_PRODUCT
#endif
}

// d += the products of 16 rows of `a` by 16 rows of `b`, of elements of T in 32 bytes.
template <typename T, typename Sum>
DEVICE void
matrix_product(Sum (&sums)[MATRIX_SUMS], const uint32_t (&b)[OPERAND_WORDS], const uint32_t (&a)[OPERAND_WORDS]) {
    if constexpr (MATRIX_TAKES<T>) {
        matrix_multiply<T>(sums, b, a);
    } else {
        uint32_t halves[2][2][OPERAND_WORDS];  // of the first and the last half of the words; of b and of a
#pragma unroll
        for (int i = 0; i < OPERAND_WORDS; ++i) {
            constexpr int HALF = OPERAND_WORDS / 2;
            uint32_t pairs[2];
            fp8_to_half<T>(b[i], pairs);
            for (int j = 0; j < 2; ++j) halves[i / HALF][0][i % HALF * 2 + j] = pairs[j];
            fp8_to_half<T>(a[i], pairs);
            for (int j = 0; j < 2; ++j) halves[i / HALF][1][i % HALF * 2 + j] = pairs[j];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) matrix_multiply<half_t>(sums, halves[half][0], halves[half][1]);
    }
}
