// platform.cuh: the one seam between the compilers a kernel string meets.
//
// NVRTC, hiprtc and the host's compiler are told apart here and nowhere else: PYOPS_CUDA, PYOPS_HIP or PYOPS_HOST is 1.
// The last compiles against host/cuda.h, which has CUDA's names but no assembly. Kernels use only the names below for
// warps, launch bounds and cached or streaming memory accesses.
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

// A bit for every lane of a warp.
template <int LANES> struct lane_mask { using type = uint32_t; };
template <> struct lane_mask<64> { using type = uint64_t; };
using lane_mask_t = lane_mask<WARP_SIZE>::type;
constexpr lane_mask_t ALL_LANES = ~lane_mask_t(0);

// Programmatic dependent launch: a kernel whose first statement this is may be started while the one before it in the stream
// still runs. It waits here until that one has ended and its writes can be seen, then lets the next kernel start in turn.
DEVICE void await_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Asks for the line of memory at `address` ahead of its use. It comes no further than the cache that all of the device shares,
// so what the kernel before writes there meanwhile is seen: this may be done before `await_previous_kernel`.
DEVICE void prefetch_line(const void* address) {
#if PYOPS_CUDA
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// The line with this number of what lies between elements 0 and `last`, if there is one.
template <typename T>
DEVICE void prefetch_part(const T* elements, int64_t last, int64_t line) {
    const int64_t first = line * (128 / int(sizeof(T)));
    if (first <= last) prefetch_line(elements + first);
}

// Value held by the lane whose number differs in the bits of `mask`. Every lane of the warp takes part.
template <typename T>
DEVICE T shfl_xor(T value, int mask) {
#if PYOPS_HIP
    return __shfl_xor(value, mask);
#else
    return __shfl_xor_sync(ALL_LANES, value, mask);
#endif
}

// Value held by lane `source` of the aligned group of `WIDTH` lanes the caller is in. Every lane of the warp takes part.
template <int WIDTH, typename T>
DEVICE T shfl(T value, int source) {
#if PYOPS_HIP
    return __shfl(value, source, WIDTH);
#else
    return __shfl_sync(ALL_LANES, value, source, WIDTH);
#endif
}

// The lanes of the warp that say so, a bit for each. Every lane takes part.
DEVICE lane_mask_t ballot(bool predicate) {
#if PYOPS_HIP
    return lane_mask_t(__ballot(predicate));
#else
    return lane_mask_t(__ballot_sync(ALL_LANES, predicate));
#endif
}

// Whether any lane of the warp says so. Every lane takes part.
DEVICE bool any_lane(bool predicate) {
#if PYOPS_HIP
    return __any(predicate);
#else
    return __any_sync(ALL_LANES, predicate);
#endif
}

// How many bits are set, and the number of the lowest of them.
DEVICE int count_bits(uint32_t bits) { return __popc(bits); }
DEVICE int used_bits(uint32_t bits) { return 32 - __clz(int(bits)); }  // up to the highest
DEVICE int lowest_bit(uint32_t bits) { return __ffs(int(bits)) - 1; }
DEVICE int lowest_bit(uint64_t bits) { return __ffsll(int64_t(bits)) - 1; }

DEVICE void sync_warp() {
#if PYOPS_HIP
    __builtin_amdgcn_wave_barrier();
#else
    __syncwarp();
#endif
}

// What is loaded before this is not loaded later: a compiler moves a load to its only use, behind the condition of that.
DEVICE void keep_loads() {
#if !PYOPS_HOST
    asm volatile("" ::: "memory");
#endif
}

// The same with the assembler, too, which does not see the former and moves a load behind a branch that has its only use: over
// a barrier it moves none. Every lane of the warp takes part, which costs no instruction.
DEVICE void keep_loads_of_warp() {
#if !PYOPS_HOST
    sync_warp();
#endif
}

// threadIdx.x, of which the compiler then knows that it is less than NUM_THREADS.
template <int NUM_THREADS>
DEVICE uint32_t thread_of() {
    const uint32_t thread = threadIdx.x;
#if !PYOPS_HOST
    __builtin_assume(thread < NUM_THREADS);
#endif
    return thread;
}

// An unsigned word (or pair, or four) of a given size: what one memory access moves.
template <int BYTES> struct word_of;
template <> struct word_of<1> { using type = uint8_t; };
template <> struct word_of<2> { using type = uint16_t; };
template <> struct word_of<4> { using type = uint32_t; };
template <> struct word_of<8> { using type = uint2; };
template <> struct word_of<16> { using type = uint4; };

// Whether to load what another thread may be writing, if the value is not used: a load without a condition is issued earlier.
constexpr bool SPECULATE = !PYOPS_HOST;

// Read-once and write-once accesses: they leave the caches to data that is used again.
template <typename W>
DEVICE W load_streaming(const W* address) {
#if PYOPS_CUDA
    return __ldcs(address);
#else
    return *address;
#endif
}

template <typename W>
DEVICE void store_streaming(W* address, W value) {
#if PYOPS_CUDA
    __stcs(address, value);
#else
    *address = value;
#endif
}

// A store beside which other threads may store to the same word: one of them is kept.
DEVICE void store_relaxed(uint32_t* address, uint32_t value) {
#if PYOPS_CUDA
    asm volatile("st.relaxed.gpu.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
#else
    atomicExch(address, value);
#endif
}

// Whether the calling block is the last of `blocks` to come here; what the others wrote before can then be seen by load_fresh.
// Every thread calls. `counter` is 0 before the first comes and after the last; `is_last` is shared memory.
DEVICE bool arrives_last(uint32_t* counter, uint32_t blocks, uint32_t* is_last) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *is_last = atomicAdd(counter, 1u) == blocks - 1;
        if (*is_last) atomicExch(counter, 0u);
        __threadfence();
    }
    __syncthreads();
    return *is_last;
}

// What another block may have written in this launch.
template <typename T>
DEVICE T load_fresh(const T* address) {
#if PYOPS_CUDA
    return __ldcg(address);
#else
    return *const_cast<const volatile T*>(address);
#endif
}

// The hardware's estimates of 2^x and 1 / x, good to about 22 bits; on the host, correctly rounded. Subnormal numbers
// become 0 before and after.
DEVICE float estimate_exp2(float x) {
#if PYOPS_HIP
    return __builtin_amdgcn_exp2f(x);
#elif PYOPS_HOST
    return host_flush(exp2f(host_flush(x)));
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

DEVICE float estimate_reciprocal(float x) {
#if PYOPS_HIP
    return __builtin_amdgcn_rcpf(x);
#elif PYOPS_HOST
    return host_flush(1.0f / host_flush(x));
#else
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

// IEEE arithmetic. CuPy compiles with -ftz=true, under which the plain operators take subnormal floats for zero, and lets
// the compiler fuse a product with a sum; these do neither, for results that must equal those of eager tensor arithmetic.
DEVICE float ieee_add(float a, float b) {
#if PYOPS_CUDA
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return __fadd_rn(a, b);
#endif
}

DEVICE float ieee_subtract(float a, float b) {
#if PYOPS_CUDA
    float result;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return __fsub_rn(a, b);
#endif
}

DEVICE float ieee_multiply(float a, float b) {
#if PYOPS_CUDA
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return __fmul_rn(a, b);
#endif
}

DEVICE float ieee_fma(float a, float b, float c) {
#if PYOPS_CUDA
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
#else
    return __fmaf_rn(a, b, c);
#endif
}

// c - a * b.
DEVICE float ieee_residual(float a, float b, float c) {
#if PYOPS_CUDA
    float result;
    asm("{.reg .f32 negative; neg.f32 negative, %1; fma.rn.f32 %0, negative, %2, %3;}"
        : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
#else
    return __fmaf_rn(-a, b, c);
#endif
}

DEVICE float ieee_divide(float a, float b) {
#if PYOPS_CUDA
    float result;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return __fdiv_rn(a, b);
#endif
}

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// x within 0 and 1; NaN is 0.
DEVICE float saturate(float x) {
#if PYOPS_CUDA
    return __saturatef(x);
#else
    return x > 0.0f ? fminf(x, 1.0f) : 0.0f;
#endif
}

// The bits of the float 2^23 + floor(a * b), for a product that is exact, not negative and less than 2^23: its lowest bits.
DEVICE uint32_t floor_bits(float a, float b) {
#if PYOPS_CUDA
    return __float_as_uint(__fmaf_rd(a, b, 0x1p23f));
#else
    return __float_as_uint(0x1p23f + floorf(a * b));
#endif
}

// floor(a * b) and a constant, modulo 2^32, for a product within -2^22 and 2^22, whatever its number of bits. Nothing is
// taken for 0 that is not.
DEVICE uint32_t floor_of_22_bits(float a, float b) {
#if PYOPS_CUDA
    float result;
    asm("fma.rm.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(0x1.8p23f));
    return __float_as_uint(result);
#else
    return __float_as_uint(0x1.8p23f + float(floor(double(a) * double(b))));
#endif
}

// One instruction each where the device has it (compute capability 9.0 on), and several elsewhere.
DEVICE uint32_t min_of_three(uint32_t a, uint32_t b, uint32_t c) {
#if PYOPS_CUDA
    return __vimin3_u32(a, b, c);
#else
    return min(a, min(b, c));
#endif
}

// The same of unsigned numbers of 16 bits, two to a word: the smallest and the largest of three, and min(a + b, c), sums modulo 2^16.
DEVICE uint32_t min_of_three_pairs(uint32_t a, uint32_t b, uint32_t c) {
#if PYOPS_CUDA
    return __vimin3_u16x2(a, b, c);
#else
    return min(a >> 16, min(b >> 16, c >> 16)) << 16 | min(a & 0xffffu, min(b & 0xffffu, c & 0xffffu));
#endif
}

DEVICE uint32_t max_of_three_pairs(uint32_t a, uint32_t b, uint32_t c) {
#if PYOPS_CUDA
    return __vimax3_u16x2(a, b, c);
#else
    return max(a >> 16, max(b >> 16, c >> 16)) << 16 | max(a & 0xffffu, max(b & 0xffffu, c & 0xffffu));
#endif
}

DEVICE uint32_t min_of_sums(uint32_t a, uint32_t b, uint32_t c) {
#if PYOPS_CUDA
    return __viaddmin_u16x2(a, b, c);
#else
    return min(((a >> 16) + (b >> 16)) & 0xffffu, c >> 16) << 16 | min((a + b) & 0xffffu, c & 0xffffu);
#endif
}

// The larger, or the smaller, of two numbers; NaN is dropped.
DEVICE float ieee_max(float a, float b) {
#if PYOPS_CUDA
    float result;
    asm("max.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return fmaxf(a, b);
#endif
}

DEVICE float ieee_min(float a, float b) {
#if PYOPS_CUDA
    float result;
    asm("min.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return fminf(a, b);
#endif
}

// An instruction that takes x can do this on the way.
DEVICE float ieee_abs(float x) {
#if PYOPS_CUDA
    float result;
    asm("abs.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return __uint_as_float(__float_as_uint(x) & 0x7fffffffu);
#endif
}

DEVICE bool ieee_less_equal(float a, float b) {
#if PYOPS_CUDA
    uint32_t result;
    asm("set.le.u32.f32 %0, %1, %2;" : "=r"(result) : "f"(a), "f"(b));
    return result;
#else
    return a <= b;
#endif
}
