// mma.cuh: MMA of a warp of 32 lanes on tensor cores (mma.sync), and the loads, stores and conversions of its
// fragments.
//
// A fragment is the part of a tile that one lane holds: words of two 16-bit elements, the lower index in the lower
// half. With g = lane / 4 and t = lane % 4, a lane holds
//
//     a[i]: row g + i % 2 * 8, columns 2t + i / 2 * 8 and the next       of A [16, 16]
//     b[i]: rows 2t + i * 8 and the next, column g                       of B [16, 8]
//     d[i]: row g + i / 2 * 8, column 2t + i % 2                         of D [16, 8], in float32
//
// A word of 8-bit elements holds four, with twice as many columns of A and rows of B: columns 4t + i / 2 * 16 and the
// next three of A [16, 32], rows 4t + i * 16 and the next three of B [32, 8]. A word of TF32 holds one number, with
// half as many: column t + i / 2 * 4 of A [16, 8], row t + i * 4 of B [8, 8].
//
// Turing (sm_75) has instructions with a smaller K: two or four make one of these. They take float16 and int8, not
// bfloat16 or TF32.
//
// AMD's matrix cores have other shapes (matrix_core.cuh): the MMAs, loads and stores of this file do not compile there.

#pragma once
#include "widen.cuh"

// D += A * B of float16 on Turing: A [16, 8] and B [8, 8], which are the first halves of the fragments above.
DEVICE void mma_m16n8k8_of_half(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1]) {
#if PYOPS_CUDA
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
#elif PYOPS_HOST
    host_mma<half_t>(d, a, b);
#endif
}

// D += A * B of int8 on Turing: A [8, 16] and B [16, 8]; the elements of A may be uint8_t.
template <typename A>
DEVICE void mma_m8n8k16(int32_t (&d)[2], const uint32_t (&a)[1], const uint32_t (&b)[1]) {
#if PYOPS_CUDA
#define PYOPS_MMA(FORMATS)                                                                     \
    asm("mma.sync.aligned.m8n8k16.row.col.s32." FORMATS ".s32 {%0, %1}, {%2}, {%3}, {%0, %1};" \
        : "+r"(d[0]), "+r"(d[1])                                                               \
        : "r"(a[0]), "r"(b[0]))
    if constexpr (is_same<A, uint8_t>) PYOPS_MMA("u8.s8");
    else PYOPS_MMA("s8.s8");
#undef PYOPS_MMA
#elif PYOPS_HOST
    host_mma<int8_t, A>(d, a, b);
#endif
}

// D += A * B, the elements of A and B of type T: half_t or bf16_t.
template <typename T>
DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    static_assert((!PYOPS_HIP || sizeof(T) == 0) && (is_same<T, half_t> || (is_same<T, bf16_t> && !PYOPS_TURING)));
    if constexpr (PYOPS_TURING) {
        mma_m16n8k8_of_half(d, {a[0], a[1]}, {b[0]});
        mma_m16n8k8_of_half(d, {a[2], a[3]}, {b[1]});
        return;
    }
#if PYOPS_CUDA
#define PYOPS_MMA(FORMAT)                                          \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." FORMAT "." FORMAT \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "                \
        "{%8, %9}, {%0, %1, %2, %3};"                              \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (is_same<T, half_t>) PYOPS_MMA("f16");
    else PYOPS_MMA("bf16");
#undef PYOPS_MMA
#elif PYOPS_HOST
    host_mma<T>(d, a, b);
#endif
}

// D += A * B, with elements of A and B in TF32: float32 with the last 13 bits zero.
DEVICE void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if PYOPS_CUDA
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif PYOPS_HOST
    host_mma<float>(d, a, b);
#endif
}

// x = high + low but for the last bits of x, both TF32: three MMAs, all but low * low, are as exact as float32.
template <int N>
DEVICE void split_tf32(const float (&x)[N], uint32_t (&high)[N], uint32_t (&low)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        high[i] = __float_as_uint(x[i]) & 0xffffe000;
        low[i] = __float_as_uint(x[i] - __uint_as_float(high[i])) & 0xffffe000;
    }
}

// Rounds x to TF32.
template <int N>
DEVICE void round_tf32(const float (&x)[N], uint32_t (&rounded)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) rounded[i] = __float_as_uint(x[i]) + 0x1000 & 0xffffe000;
}

// Whether mma_m16n8k32 takes elements of type T on this device. Otherwise kernels convert with fp8_to_half and use two
// mma_m16n8k16. (Data-centre GPUs from sm_90 on have the fp8 instruction, too, but not in hardware: the compiler
// converts the elements again for every MMA.)
template <typename T>
constexpr bool MULTIPLIES_BYTES =
    is_same<T, int8_t> || (((PYOPS_HOST && !PYOPS_TURING) || ARCHITECTURE == 890 || ARCHITECTURE >= 1200) &&
                           (is_same<T, fp8_e4m3_t> || is_same<T, fp8_e5m2_t>));

// D += A * B, with elements of A and B of type T: fp8_e4m3_t or fp8_e5m2_t with D in float, or int8_t with D in
// int32_t. With int8_t, the elements of A may be uint8_t.
template <typename T, typename A = T, typename Sum>
DEVICE void mma_m16n8k32(Sum (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    static_assert((!PYOPS_HIP || sizeof(T) == 0) && MULTIPLIES_BYTES<T>);
    if constexpr (PYOPS_TURING) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Sum rows[2] = {d[2 * half], d[2 * half + 1]};
            mma_m8n8k16<A>(rows, {a[half]}, {b[0]});
            mma_m8n8k16<A>(rows, {a[half + 2]}, {b[1]});
            d[2 * half] = rows[0];
            d[2 * half + 1] = rows[1];
        }
        return;
    }
#if PYOPS_CUDA
#define PYOPS_MMA(SUM, FORMATS, CONSTRAINT)                                      \
    asm("mma.sync.aligned.m16n8k32.row.col." SUM "." FORMATS "." SUM             \
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"       \
        : CONSTRAINT(d[0]), CONSTRAINT(d[1]), CONSTRAINT(d[2]), CONSTRAINT(d[3]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (is_same<A, uint8_t>) PYOPS_MMA("s32", "u8.s8", "+r");
    else if constexpr (is_same<T, int8_t>) PYOPS_MMA("s32", "s8.s8", "+r");
    else if constexpr (is_same<T, fp8_e4m3_t>) PYOPS_MMA("f32", "e4m3.e4m3", "+f");
    else PYOPS_MMA("f32", "e5m2.e5m2", "+f");
#undef PYOPS_MMA
#elif PYOPS_HOST
    host_mma<T, A>(d, a, b);
#endif
}

// Loads N (1, 2 or 4) tiles of 8 x 8 16-bit elements from shared memory. `row` of lane 8i + j is the address of row j
// of tile i, a multiple of 16 bytes. Word i of the fragment receives row g, columns 2t and 2t + 1 of tile i; if
// TRANSPOSED, rows 2t and 2t + 1, column g.
template <int N, bool TRANSPOSED = false>
DEVICE void ldmatrix(uint32_t (&fragment)[N], const void* row) {
    static_assert((!PYOPS_HIP || N == 0) && (N == 1 || N == 2 || N == 4));
#if PYOPS_CUDA
    const uint32_t from = __cvta_generic_to_shared(row);
#define PYOPS_LDMATRIX(SHAPE, REGISTERS, ...)                                               \
    if constexpr (TRANSPOSED)                                                               \
        asm volatile("ldmatrix.sync.aligned.m8n8." SHAPE ".trans.shared.b16 " REGISTERS ";" \
                     : __VA_ARGS__                                                          \
                     : "r"(from)                                                            \
                     : "memory");                                                           \
    else                                                                                    \
        asm volatile("ldmatrix.sync.aligned.m8n8." SHAPE ".shared.b16 " REGISTERS ";"       \
                     : __VA_ARGS__                                                          \
                     : "r"(from)                                                            \
                     : "memory")
    if constexpr (N == 1) {
        PYOPS_LDMATRIX("x1", "{%0}, [%1]", "=r"(fragment[0]));
    } else if constexpr (N == 2) {
        PYOPS_LDMATRIX("x2", "{%0, %1}, [%2]", "=r"(fragment[0]), "=r"(fragment[1]));
    } else {
        PYOPS_LDMATRIX("x4", "{%0, %1, %2, %3}, [%4]", "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]),
                       "=r"(fragment[3]));
    }
#undef PYOPS_LDMATRIX
#elif PYOPS_HOST
    host_ldmatrix<N, TRANSPOSED>(fragment, row);
#endif
}

// Stores N (1, 2 or 4) tiles of 8 x 8 16-bit elements to shared memory, the inverse of ldmatrix: `row` of lane 8i + j
// is the address of row j of tile i, a multiple of 16 bytes. Requires sm_90.
template <int N, bool TRANSPOSED = false>
DEVICE void stmatrix(void* row, const uint32_t (&fragment)[N]) {
    static_assert((!PYOPS_HIP || N == 0) && (N == 1 || N == 2 || N == 4));
#if PYOPS_CUDA
    static_assert(N > 0 && __CUDA_ARCH__ >= 900, "stmatrix exists from sm_90 on");
    const uint32_t to = __cvta_generic_to_shared(row);
#define PYOPS_STMATRIX(SHAPE, REGISTERS, ...)                                                     \
    if constexpr (TRANSPOSED)                                                                     \
        asm volatile("stmatrix.sync.aligned.m8n8." SHAPE ".trans.shared.b16 [%0], " REGISTERS ";" \
                     :                                                                            \
                     : "r"(to), __VA_ARGS__                                                       \
                     : "memory");                                                                 \
    else                                                                                          \
        asm volatile("stmatrix.sync.aligned.m8n8." SHAPE ".shared.b16 [%0], " REGISTERS ";"       \
                     :                                                                            \
                     : "r"(to), __VA_ARGS__                                                       \
                     : "memory")
    if constexpr (N == 1) {
        PYOPS_STMATRIX("x1", "{%1}", "r"(fragment[0]));
    } else if constexpr (N == 2) {
        PYOPS_STMATRIX("x2", "{%1, %2}", "r"(fragment[0]), "r"(fragment[1]));
    } else {
        PYOPS_STMATRIX("x4", "{%1, %2, %3, %4}", "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]),
                       "r"(fragment[3]));
    }
#undef PYOPS_STMATRIX
#elif PYOPS_HOST
    host_stmatrix<N, TRANSPOSED>(row, fragment);
#endif
}

// Transposes a tile of 8 x 8 16-bit elements. Before and after, each lane holds row g, columns 2t and 2t + 1.
template <typename Word>
DEVICE Word transpose_8x8(Word word) {
    static_assert(!PYOPS_HIP || sizeof(Word) == 0);
#if PYOPS_CUDA
    uint32_t result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
#elif PYOPS_HOST
    return host_transpose(word);
#endif
}

// Transposes a matrix of 4 x 4 words: lane t of four adjacent lanes holds column t before, and row t after. Every lane
// of the warp calls.
DEVICE void transpose_4x4(uint32_t (&words)[4]) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
        const bool upper = lane & mask;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & mask) continue;
            const uint32_t other = shfl_xor(upper ? words[i] : words[i + mask], mask);
            if (upper) words[i] = other;
            else words[i + mask] = other;
        }
    }
}
