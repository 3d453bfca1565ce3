// platform.cuh: the one seam between the compilers a kernel string meets.
//
// NVRTC and hiprtc are told apart here and nowhere else. Kernels use only the names below for warps, launch bounds
// and cached or streaming memory accesses.
#pragma once

#if defined(__HIPCC_RTC__) || defined(__HIP_PLATFORM_AMD__)
#define PYOPS_HIP 1
#else
#define PYOPS_HIP 0
#endif

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

#define DEVICE __device__ __forceinline__

// The second argument of __launch_bounds__ counts blocks on CUDA and waves on HIP.
#if PYOPS_HIP
#define LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS) __launch_bounds__(NUM_THREADS)
#if defined(__GFX9__)
constexpr int WARP_SIZE = 64;
#else
constexpr int WARP_SIZE = 32;
#endif
#else
#define LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS) __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
constexpr int WARP_SIZE = 32;
#endif

// Value held by the lane whose number differs in the bits of `mask`. Every lane of the warp takes part.
template <typename T>
DEVICE T shfl_xor(T value, int mask) {
#if PYOPS_HIP
    return __shfl_xor(value, mask);
#else
    return __shfl_xor_sync(0xffffffffu, value, mask);
#endif
}

// Value held by lane `source` of the aligned group of `WIDTH` lanes the caller is in. Every lane of the warp takes part.
template <int WIDTH, typename T>
DEVICE T shfl(T value, int source) {
#if PYOPS_HIP
    return __shfl(value, source, WIDTH);
#else
    return __shfl_sync(0xffffffffu, value, source, WIDTH);
#endif
}

DEVICE void sync_warp() {
#if PYOPS_HIP
    __builtin_amdgcn_wave_barrier();
#else
    __syncwarp();
#endif
}

// An unsigned word (or pair, or four) of a given size: what one memory access moves.
template <int BYTES> struct word_of;
template <> struct word_of<1> { using type = uint8_t; };
template <> struct word_of<2> { using type = uint16_t; };
template <> struct word_of<4> { using type = uint32_t; };
template <> struct word_of<8> { using type = uint2; };
template <> struct word_of<16> { using type = uint4; };

// Read-once and write-once accesses: they leave the caches to data that is used again.
template <typename W>
DEVICE W load_streaming(const W* address) {
#if PYOPS_HIP
    return *address;
#else
    return __ldcs(address);
#endif
}

template <typename W>
DEVICE void store_streaming(W* address, W value) {
#if PYOPS_HIP
    *address = value;
#else
    __stcs(address, value);
#endif
}

// The hardware's estimates of 2^x and 1 / x, good to about 22 bits.
DEVICE float estimate_exp2(float x) {
#if PYOPS_HIP
    return __builtin_amdgcn_exp2f(x);
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

DEVICE float estimate_reciprocal(float x) {
#if PYOPS_HIP
    return __builtin_amdgcn_rcpf(x);
#else
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

// IEEE arithmetic. CuPy compiles with -ftz=true, under which the plain operators take subnormal floats for zero, and lets
// the compiler fuse a product with a sum; these do neither, for results that must equal those of eager tensor arithmetic.
DEVICE float ieee_multiply(float a, float b) {
#if PYOPS_HIP
    return __fmul_rn(a, b);
#else
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#endif
}

DEVICE float ieee_fma(float a, float b, float c) {
#if PYOPS_HIP
    return __fmaf_rn(a, b, c);
#else
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
#endif
}

// c - a * b.
DEVICE float ieee_residual(float a, float b, float c) {
#if PYOPS_HIP
    return __fmaf_rn(-a, b, c);
#else
    float result;
    asm("{.reg .f32 negative; neg.f32 negative, %1; fma.rn.f32 %0, negative, %2, %3;}"
        : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
#endif
}

DEVICE float ieee_divide(float a, float b) {
#if PYOPS_HIP
    return __fdiv_rn(a, b);
#else
    float result;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#endif
}

DEVICE bool ieee_less_equal(float a, float b) {
#if PYOPS_HIP
    return a <= b;
#else
    uint32_t result;
    asm("set.le.u32.f32 %0, %1, %2;" : "=r"(result) : "f"(a), "f"(b));
    return result;
#endif
}
