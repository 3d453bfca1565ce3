// wgmma.cuh: asynchronous matrix products by a warpgroup: four warps, the first of which is a multiple of four
// (sm_90a).
//
// D [64, N] += A [64, K] * B [N, K]^T, where K elements are 32 bytes. B lies in shared memory, A in shared memory or in
// registers. With w = warp % 4, g = lane / 4 and t = lane % 4, a thread holds
//
//     d[i]: row 16w + g + i / 2 % 2 * 8, column 2t + i % 2 + i / 4 * 8            of D
//     a[i]: row 16w + g + i % 2 * 8, the 4 bytes from 4t + i / 2 * 16 on          of A
//
// Products form groups, as cp_async does, and every warp of the warpgroup does the same:
//
//     warpgroup_arrive();                 after the thread has last used registers of the products
//     wgmma<T, N>(d, a, b); ...           the first product into d may overwrite d, not add to it
//     warpgroup_commit_batch();           closes the group
//     warpgroup_wait<GROUPS_IN_FLIGHT>()  until at most so many groups are in flight
//     warpgroup_fence_operand(d);         tells the compiler that d is ready only now
//
// Sums of 16-bit floats are float32. Those of fp8 are kept in float32, but have 14 bits: each of the 32 products, and the
// sum so far, is cut towards zero to a multiple of 2^-13 of the largest power of two among them, and the result to its
// first 14 bits. Threads that add up sums of 64 or 128 elements of K in float32 keep the error small.
//
// While a product is in flight no thread uses d or writes to a, and nothing writes to the shared memory that it reads.
#pragma once
#include "mma.cuh"
#include "tma.cuh"

#if PYOPS_CUDA && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
static_assert(false, "wgmma exists on sm_90a alone: a plan takes Kernel.for_arch(device.arch_feature)");
#endif

// Sets the number of registers of each thread of the calling warpgroup: fewer, which others may take, or more, once
// others have given enough away. The launch bounds of the kernel give the number that a thread begins with.
template <int REGISTERS>
DEVICE void warpgroup_reg_dealloc() {
    static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0);
#if PYOPS_CUDA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#elif PYOPS_HOST
    host::set_registers(REGISTERS, false);
#endif
}
template <int REGISTERS>
DEVICE void warpgroup_reg_alloc() {
    static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0);
#if PYOPS_CUDA
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#elif PYOPS_HOST
    host::set_registers(REGISTERS, true);
#endif
}

// The swizzle of a matrix in shared memory, as descriptors number it: that of the tensor map which has written the
// matrix.
enum SmemSwizzle : int { SWIZZLE_NONE = 0, SWIZZLE_128B = 1, SWIZZLE_64B = 2, SWIZZLE_32B = 3 };

// Describes a matrix whose rows run along K or, where the product says TRANSPOSED, whose rows run along M or N.
//
// Rows of a swizzled matrix are as long as the swizzle, and 8 rows follow each other. `stride` is the distance in
// bytes between groups of 8 rows. A matrix begins at a multiple of 8 rows, or a multiple of 32 bytes on within the
// first row: the next piece of K. A TRANSPOSED matrix that is wider than a row continues `leading` bytes further on,
// with the first row of the next columns. Without a swizzle, the rows are 16 bytes, and `leading` lies between
// neighbours along K.
template <SmemSwizzle SWIZZLE = SWIZZLE_128B>
DEVICE uint64_t make_smem_desc(const void* matrix,
                               int stride = SWIZZLE == SWIZZLE_128B  ? 1024
                                            : SWIZZLE == SWIZZLE_64B ? 512
                                                                     : 256,
                               int leading = 16) {
#if PYOPS_HOST
    const uint64_t address = host::shared_offset(matrix) >> 4;
#else
    const uint64_t address = (shared_address(matrix) & 0x3ffff) >> 4;
#endif
    return address | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(SWIZZLE) << 62;
}

// Describes the matrix that lies `bytes` further on, a multiple of 16.
DEVICE uint64_t advance_smem_desc(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

DEVICE void warpgroup_arrive() {
#if PYOPS_CUDA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#elif PYOPS_HOST
    host::wgmma_fence();
#endif
}

DEVICE void warpgroup_commit_batch() {
#if PYOPS_CUDA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#elif PYOPS_HOST
    host::wgmma_commit();
#endif
}

template <int GROUPS_IN_FLIGHT>
DEVICE void warpgroup_wait() {
    static_assert(GROUPS_IN_FLIGHT >= 0 && GROUPS_IN_FLIGHT <= 7);
#if PYOPS_CUDA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS_IN_FLIGHT) : "memory");
#elif PYOPS_HOST
    host::wgmma_wait(GROUPS_IN_FLIGHT);
#endif
}

// To the compiler, d is ready after the asm of a product. This keeps uses of d behind a wait, where it is called after
// the wait, and assignments to d before the products, where it is called before warpgroup_arrive.
template <typename S, int REGISTERS>
DEVICE void warpgroup_fence_operand(S (&d)[REGISTERS]) {
#if PYOPS_CUDA
#pragma unroll
    for (int i = 0; i < REGISTERS; ++i) {
        if constexpr (is_same<S, float>) asm volatile("" : "+f"(d[i])::"memory");
        else asm volatile("" : "+r"(d[i])::"memory");
    }
#elif PYOPS_HOST
    asm volatile("" ::"r"(d) : "memory");
#endif
}

// Keeps the next wait behind the instructions that compute `x`, which is not negative. To the assembler a wait depends on
// nothing but products, so it moves the wait ahead of arithmetic that should run beside them, without a warning. It
// moves no wait ahead of an instruction that may sleep, and this one never does.
DEVICE void hold_next_wait(float x) {
#if PYOPS_CUDA
    asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p nanosleep.u32 1;}" ::"f"(x) : "memory");
#endif
}

// The type of sums of products of T: half_t, bf16_t, fp8_e4m3_t, fp8_e5m2_t or int8_t.
template <typename T> struct wgmma_sum { using type = float; };
template <> struct wgmma_sum<int8_t> { using type = int32_t; };
template <typename T> using wgmma_sum_t = typename wgmma_sum<T>::type;

#if PYOPS_CUDA
// An instruction names its registers one by one, and operands by number: first the registers of d, by eights, then
// those of the other operands, I0 to I6.
#define PYOPS_RHALF "%0, %1, %2, %3"
#define PYOPS_R1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PYOPS_R2 PYOPS_R1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PYOPS_R3 PYOPS_R2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PYOPS_R4 PYOPS_R3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PYOPS_R5 PYOPS_R4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PYOPS_R6 PYOPS_R5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define PYOPS_R7 PYOPS_R6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PYOPS_R8 PYOPS_R7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PYOPS_R9 PYOPS_R8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PYOPS_R10 PYOPS_R9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PYOPS_R11 PYOPS_R10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PYOPS_R12 PYOPS_R11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define PYOPS_R13 PYOPS_R12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define PYOPS_R14 PYOPS_R13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define PYOPS_R15 PYOPS_R14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define PYOPS_R16 PYOPS_R15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define PYOPS_EIGHT(C, I) \
    C(d[I]), C(d[I + 1]), C(d[I + 2]), C(d[I + 3]), C(d[I + 4]), C(d[I + 5]), C(d[I + 6]), C(d[I + 7])
#define PYOPS_DHALF(C) C(d[0]), C(d[1]), C(d[2]), C(d[3])
#define PYOPS_D1(C) PYOPS_EIGHT(C, 0)
#define PYOPS_D2(C) PYOPS_D1(C), PYOPS_EIGHT(C, 8)
#define PYOPS_D3(C) PYOPS_D2(C), PYOPS_EIGHT(C, 16)
#define PYOPS_D4(C) PYOPS_D3(C), PYOPS_EIGHT(C, 24)
#define PYOPS_D5(C) PYOPS_D4(C), PYOPS_EIGHT(C, 32)
#define PYOPS_D6(C) PYOPS_D5(C), PYOPS_EIGHT(C, 40)
#define PYOPS_D7(C) PYOPS_D6(C), PYOPS_EIGHT(C, 48)
#define PYOPS_D8(C) PYOPS_D7(C), PYOPS_EIGHT(C, 56)
#define PYOPS_D9(C) PYOPS_D8(C), PYOPS_EIGHT(C, 64)
#define PYOPS_D10(C) PYOPS_D9(C), PYOPS_EIGHT(C, 72)
#define PYOPS_D11(C) PYOPS_D10(C), PYOPS_EIGHT(C, 80)
#define PYOPS_D12(C) PYOPS_D11(C), PYOPS_EIGHT(C, 88)
#define PYOPS_D13(C) PYOPS_D12(C), PYOPS_EIGHT(C, 96)
#define PYOPS_D14(C) PYOPS_D13(C), PYOPS_EIGHT(C, 104)
#define PYOPS_D15(C) PYOPS_D14(C), PYOPS_EIGHT(C, 112)
#define PYOPS_D16(C) PYOPS_D15(C), PYOPS_EIGHT(C, 120)
// TYPES with the depth, C the constraint of d, A_AND_B the operands and what follows them.
#define PYOPS_WGMMA(N, E, TYPES, C, I0, A_AND_B, ...)                                                    \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I0 ", 0; wgmma.mma_async.sync.aligned.m64n" #N TYPES \
                 " {" PYOPS_R##E "}, " A_AND_B ";}"                                                      \
                 : PYOPS_D##E(C)                                                                         \
                 : "r"(int(accumulate)), "l"(b), __VA_ARGS__)
#define PYOPS_SS_16(N, E, T, I0, I1, I2, I3, I4)                                                            \
    PYOPS_WGMMA(N, E, "k16.f32." T "." T, "+f", I0, "%" #I2 ", %" #I1 ", p, 1, 1, %" #I3 ", %" #I4, "l"(a), \
                "n"(int(TRANSPOSED_A)), "n"(int(TRANSPOSED_B)))
#define PYOPS_SS_8(N, E, T, I0, I1, I2) \
    PYOPS_WGMMA(N, E, "k32.f32." T "." T, "+f", I0, "%" #I2 ", %" #I1 ", p, 1, 1", "l"(a))
#define PYOPS_SS_INT8(N, E, I0, I1, I2) PYOPS_WGMMA(N, E, "k32.s32.s8.s8", "+r", I0, "%" #I2 ", %" #I1 ", p", "l"(a))
#define PYOPS_SS(N, E, I0, I1, I2, I3, I4, I5, I6)                                           \
    if constexpr (COLUMNS == N) {                                                            \
        if constexpr (is_same<T, bf16_t>) PYOPS_SS_16(N, E, "bf16", I0, I1, I2, I3, I4);     \
        else if constexpr (is_same<T, half_t>) PYOPS_SS_16(N, E, "f16", I0, I1, I2, I3, I4); \
        else if constexpr (is_same<T, fp8_e4m3_t>) PYOPS_SS_8(N, E, "e4m3", I0, I1, I2);     \
        else if constexpr (is_same<T, fp8_e5m2_t>) PYOPS_SS_8(N, E, "e5m2", I0, I1, I2);     \
        else PYOPS_SS_INT8(N, E, I0, I1, I2);                                                \
    }
#define PYOPS_FRAGMENT "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define PYOPS_RS_16(N, E, T, I0, I1, I2, I3, I4, I5, I6)                                              \
    PYOPS_WGMMA(N, E, "k16.f32." T "." T, "+f", I0,                                                   \
                "{%" #I2 ", %" #I3 ", %" #I4 ", %" #I5 "}, %" #I1 ", p, 1, 1, %" #I6, PYOPS_FRAGMENT, \
                "n"(int(TRANSPOSED_B)))
#define PYOPS_RS_8(N, E, T, I0, I1, I2, I3, I4, I5)                                                                \
    PYOPS_WGMMA(N, E, "k32.f32." T "." T, "+f", I0, "{%" #I2 ", %" #I3 ", %" #I4 ", %" #I5 "}, %" #I1 ", p, 1, 1", \
                PYOPS_FRAGMENT)
#define PYOPS_RS_INT8(N, E, I0, I1, I2, I3, I4, I5)                                                       \
    PYOPS_WGMMA(N, E, "k32.s32.s8.s8", "+r", I0, "{%" #I2 ", %" #I3 ", %" #I4 ", %" #I5 "}, %" #I1 ", p", \
                PYOPS_FRAGMENT)
#define PYOPS_RS(N, E, I0, I1, I2, I3, I4, I5, I6)                                                   \
    if constexpr (COLUMNS == N) {                                                                    \
        if constexpr (is_same<T, bf16_t>) PYOPS_RS_16(N, E, "bf16", I0, I1, I2, I3, I4, I5, I6);     \
        else if constexpr (is_same<T, half_t>) PYOPS_RS_16(N, E, "f16", I0, I1, I2, I3, I4, I5, I6); \
        else if constexpr (is_same<T, fp8_e4m3_t>) PYOPS_RS_8(N, E, "e4m3", I0, I1, I2, I3, I4, I5); \
        else if constexpr (is_same<T, fp8_e5m2_t>) PYOPS_RS_8(N, E, "e5m2", I0, I1, I2, I3, I4, I5); \
        else PYOPS_RS_INT8(N, E, I0, I1, I2, I3, I4, I5);                                            \
    }
#define PYOPS_WGMMA_SHAPES(X)                     \
    X(8, HALF, 4, 5, 6, 7, 8, 9, 10)              \
    X(16, 1, 8, 9, 10, 11, 12, 13, 14)            \
    X(32, 2, 16, 17, 18, 19, 20, 21, 22)          \
    X(48, 3, 24, 25, 26, 27, 28, 29, 30)          \
    X(64, 4, 32, 33, 34, 35, 36, 37, 38)          \
    X(80, 5, 40, 41, 42, 43, 44, 45, 46)          \
    X(96, 6, 48, 49, 50, 51, 52, 53, 54)          \
    X(112, 7, 56, 57, 58, 59, 60, 61, 62)         \
    X(128, 8, 64, 65, 66, 67, 68, 69, 70)         \
    X(144, 9, 72, 73, 74, 75, 76, 77, 78)         \
    X(160, 10, 80, 81, 82, 83, 84, 85, 86)        \
    X(176, 11, 88, 89, 90, 91, 92, 93, 94)        \
    X(192, 12, 96, 97, 98, 99, 100, 101, 102)     \
    X(208, 13, 104, 105, 106, 107, 108, 109, 110) \
    X(224, 14, 112, 113, 114, 115, 116, 117, 118) \
    X(240, 15, 120, 121, 122, 123, 124, 125, 126) \
    X(256, 16, 128, 129, 130, 131, 132, 133, 134)
#endif

// d += A * B^T or, unless `accumulate`, d = A * B^T. make_smem_desc describes A and B.
template <typename T, int COLUMNS, bool TRANSPOSED_A = false, bool TRANSPOSED_B = false>
DEVICE void wgmma(wgmma_sum_t<T> (&d)[COLUMNS / 2], uint64_t a, uint64_t b, bool accumulate = true) {
    static_assert((COLUMNS % 16 == 0 || COLUMNS == 8) && COLUMNS > 0 && COLUMNS <= 256);
    static_assert(sizeof(T) == 2 || !(TRANSPOSED_A || TRANSPOSED_B), "elements of 8 bits run along K");
#if PYOPS_CUDA
    PYOPS_WGMMA_SHAPES(PYOPS_SS)
#elif PYOPS_HOST
    host::wgmma({host_element<T>, COLUMNS, TRANSPOSED_A, TRANSPOSED_B, accumulate, nullptr, a, b}, d);
#endif
}

// The same with A in registers.
template <typename T, int COLUMNS, bool TRANSPOSED_B = false>
DEVICE void wgmma(wgmma_sum_t<T> (&d)[COLUMNS / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate = true) {
    static_assert((COLUMNS % 16 == 0 || COLUMNS == 8) && COLUMNS > 0 && COLUMNS <= 256);
    static_assert(sizeof(T) == 2 || !TRANSPOSED_B, "elements of 8 bits run along K");
#if PYOPS_CUDA
    PYOPS_WGMMA_SHAPES(PYOPS_RS)
#elif PYOPS_HOST
    host::wgmma({host_element<T>, COLUMNS, false, TRANSPOSED_B, accumulate, a, 0, b}, d);
#endif
}
