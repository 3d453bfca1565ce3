// wgmma.cuh: asynchronous MMA of a warpgroup (wgmma.mma_async, sm_90a). A warpgroup is four warps that start at a
// multiple of four.
//
// D [64, N] += A [64, K] * B [N, K]^T, where K elements are 32 bytes. B is in shared memory, A in shared memory or in
// registers. With w = warp % 4, g = lane / 4 and t = lane % 4, a thread holds
//
//     d[i]: row 16w + g + i / 2 % 2 * 8, column 2t + i % 2 + i / 4 * 8            of D
//     a[i]: row 16w + g + i % 2 * 8, the 4 bytes from 4t + i / 2 * 16 on          of A
//
// MMAs form groups, as cp_async copies do. All four warps of the warpgroup execute the same sequence:
//
//     warpgroup_arrive();                 after the thread's last use of the MMAs' registers
//     wgmma<T, N>(d, a, b); ...           the first MMA into d may overwrite d instead of adding to it
//     warpgroup_commit_batch();           closes the group
//     warpgroup_wait<GROUPS_IN_FLIGHT>()  waits until at most GROUPS_IN_FLIGHT groups are in flight
//     warpgroup_fence_operand(d);         tells the compiler that d is ready only now
//
// Accumulators of fp16 and bf16 MMAs are float32. Accumulators of fp8 MMAs are stored as float32, but have 14 bits of
// mantissa: each of the 32 products and the accumulator are truncated towards zero to a multiple of 2^-13 of the
// largest power of two among them, and the result is truncated to its first 14 bits. To keep the error small, a kernel
// adds (promotes) the accumulators to float32 registers after every 64 or 128 elements of K.
//
// While an MMA is in flight no thread uses d or writes to a, and nothing writes to the shared memory that the MMA
// reads.
#pragma once
#include "mma.cuh"
#include "tma.cuh"

#if PYOPS_CUDA && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
static_assert(false, "wgmma exists on sm_90a alone: a plan takes Kernel.for_arch(device.arch_feature)");
#endif

// Sets the number of registers of each thread of the calling warpgroup (setmaxnreg). dealloc lowers the number and
// frees registers for other warpgroups; alloc raises it and waits until enough registers are free. The launch bounds of
// the kernel determine the number that a thread starts with; MIN_BLOCKS is their second argument.
template <int REGISTERS, int MIN_BLOCKS = 1>
DEVICE void warpgroup_reg_dealloc() {
    static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0);
#if PYOPS_CUDA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#elif PYOPS_HOST
    host::set_registers(REGISTERS, MIN_BLOCKS, false);
#endif
}
template <int REGISTERS, int MIN_BLOCKS = 1>
DEVICE void warpgroup_reg_alloc() {
    static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0);
#if PYOPS_CUDA
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#elif PYOPS_HOST
    host::set_registers(REGISTERS, MIN_BLOCKS, true);
#endif
}

// The swizzle of a matrix in shared memory, as numbered in matrix descriptors. It equals the swizzle of the tensor map
// that loaded the matrix.
enum SmemSwizzle : int { SWIZZLE_NONE = 0, SWIZZLE_128B = 1, SWIZZLE_64B = 2, SWIZZLE_32B = 3 };

// Makes the descriptor of a matrix with rows along K or, for an MMA with TRANSPOSED_A or TRANSPOSED_B, along M or N.
//
// A row of a swizzled matrix is as long as the swizzle, and each group of 8 rows is contiguous. `stride` is the
// distance in bytes between groups of 8 rows. A matrix begins at a multiple of 8 rows, or, for the next slice of K, at
// a multiple of 32 bytes within the first row. A transposed matrix that is wider than a row continues `leading` bytes
// later with the first row of the next columns. Without a swizzle, rows are 16 bytes, and `leading` is the distance
// between adjacent 16-byte chunks along K.
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

// Advances a descriptor by `bytes`, a multiple of 16.
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

// The compiler assumes that d is ready right after the asm of an MMA. A call after a wait keeps uses of d after that
// wait; a call before warpgroup_arrive keeps assignments to d before the MMAs.
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

// Keeps the next warpgroup_wait after the instructions that compute `x`, which is not negative. ptxas treats a wait as
// dependent on MMAs only, so it hoists the wait above arithmetic that should overlap the MMAs, without a warning. It
// hoists no wait above an instruction that may sleep; the nanosleep here is never executed.
DEVICE void hold_next_wait(float x) {
#if PYOPS_CUDA
    asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p nanosleep.u32 1;}" ::"f"(x) : "memory");
#endif
}

// The same for the elements of an array from FIRST on.
template <int FIRST, int SIZE>
DEVICE void hold_next_wait(const float (&x)[SIZE]) {
    int bits = 0;
#pragma unroll
    for (int i = FIRST; i < SIZE; ++i) bits |= __float_as_int(x[i]);
    hold_next_wait(__int_as_float(bits & 0x7fffffff));
}

// The accumulator type of MMAs of T: half_t, bf16_t, fp8_e4m3_t, fp8_e5m2_t or int8_t.
template <typename T> struct wgmma_sum { using type = float; };
template <> struct wgmma_sum<int8_t> { using type = int32_t; };
template <typename T> using wgmma_sum_t = typename wgmma_sum<T>::type;

#if PYOPS_CUDA
// An MMA lists its registers one by one, and its operands by number: first the registers of d, in groups of eight, then
// the other operands, I0 to I6.
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
// E: groups of eight accumulators. TYPES: K and the element types. C: the asm constraint of d. A_AND_B: the operands A
// and B and the immediates after them.
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

// d += A * B^T if `accumulate`, otherwise d = A * B^T. `a` and `b` are descriptors from make_smem_desc.
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
