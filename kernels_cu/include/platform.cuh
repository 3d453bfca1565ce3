// platform.cuh: the platform layer: compilers, integer types, launches and warps.
//
// PYOPS_CUDA (NVRTC), PYOPS_HIP (hiprtc) or PYOPS_HOST (a CPU compiler) is 1. PYOPS_HOST compiles against host/cuda.h,
// which has CUDA's names but no assembly. Kernels do not test the platform: each operation that differs between
// platforms has one name in the headers platform, arith, memory, number, reduce, async, cluster and product.
#pragma once

#if defined(PYOPS_HOST)
#define PYOPS_HIP 0
#define PYOPS_CUDA 0
#elif defined(__HIPCC_RTC__) || defined(__HIP_PLATFORM_AMD__)
#define PYOPS_HIP 1
#define PYOPS_CUDA 0
#define PYOPS_HOST 0
#else
#define PYOPS_HIP 0
#define PYOPS_CUDA 1
#define PYOPS_HOST 0
#endif

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
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
#if PYOPS_HOST
constexpr int WARP_SIZE = PYOPS_HOST_WARP_SIZE;
#else
constexpr int WARP_SIZE = 32;
#endif
#endif

// Whether the device is an NVIDIA GPU before sm_80. It has no cp.async, no mma.sync for bfloat16 and TF32, and a
// smaller K in that of other types. The host backend defines it to emulate such a GPU.
#ifndef PYOPS_TURING
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define PYOPS_TURING 1
#else
#define PYOPS_TURING 0
#endif
#endif

// lane_mask_t has a bit for each lane of a warp. (hiprtc's own headers hold the name lane_mask.)
template <int LANES> struct lane_mask_of { using type = uint32_t; };
template <> struct lane_mask_of<64> { using type = uint64_t; };
using lane_mask_t = lane_mask_of<WARP_SIZE>::type;
constexpr lane_mask_t ALL_LANES = ~lane_mask_t(0);

// Programmatic dependent launch. A kernel that calls this before it touches global memory may be launched while the
// previous kernel in the stream still runs (docs/kernels.md has the rule). The call returns when the previous kernel
// has ended and its writes are visible; then the next kernel may be launched.
DEVICE void await_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same for a kernel that another kernel of the same call always precedes. That kernel has waited for everything
// before the call when this one starts, so this one may read the arguments of the call before it waits.
DEVICE void await_previous_of_call() { await_previous_kernel(); }

// The value of the lane whose number differs from the caller's in the bits of `mask`. Every lane of the warp takes
// part.
template <typename T>
DEVICE T shfl_xor(T value, int mask) {
#if PYOPS_HIP
    return __shfl_xor(value, mask);
#else
    return __shfl_xor_sync(ALL_LANES, value, mask);
#endif
}

// The value of lane `source` of the caller's group of WIDTH lanes; groups are aligned. Every lane of the warp takes
// part.
template <int WIDTH, typename T>
DEVICE T shfl(T value, int source) {
#if PYOPS_HIP
    return __shfl(value, source, WIDTH);
#else
    return __shfl_sync(ALL_LANES, value, source, WIDTH);
#endif
}

// A bit for each lane of the warp: its predicate. Every lane of the warp takes part.
DEVICE lane_mask_t ballot(bool predicate) {
#if PYOPS_HIP
    return lane_mask_t(__ballot(predicate));
#else
    return lane_mask_t(__ballot_sync(ALL_LANES, predicate));
#endif
}

// Whether the predicate of any lane of the warp is true. Every lane of the warp takes part.
DEVICE bool any_lane(bool predicate) {
#if PYOPS_HIP
    return __any(predicate);
#else
    return __any_sync(ALL_LANES, predicate);
#endif
}

DEVICE void sync_warp() {
#if PYOPS_HIP
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
#else
    __syncwarp();
#endif
}

// A barrier of the block after which its threads see each other's writes to shared memory, but not to global memory. On
// RDNA, __syncthreads() would also wait for all loads from global memory.
DEVICE void sync_shared() {
#if PYOPS_HIP && __clang_major__ >= 20
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
#else
    __syncthreads();
#endif
}

// threadIdx.x, with the promise to the compiler that it is less than NUM_THREADS.
template <int NUM_THREADS>
DEVICE uint32_t thread_of() {
    const uint32_t thread = threadIdx.x;
#if !PYOPS_HOST
    __builtin_assume(thread < NUM_THREADS);
#endif
    return thread;
}
