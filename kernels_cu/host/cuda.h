// cuda.h: CUDA C++ for a host compiler: the language, vector types, intrinsics.
//
// The kernel's text follows inside `namespace pyops_kernel`, so that its names do not clash with libc's.
#pragma once
#include <math.h>
#include <string.h>
#include "api.h"
#include "number.h"

#define PYOPS_HOST 1
#ifndef PYOPS_HOST_WARP_SIZE
#define PYOPS_HOST_WARP_SIZE 32
#endif

#define __global__ __attribute__((visibility("hidden"), noinline))
#define __device__
#define __host__
#define __forceinline__ inline  // not always: that doubles the compilation of large kernels
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(BYTES) alignas(BYTES)
#define __constant__ static
#define __restrict__ __restrict
#define __shared__ the_host_backend_takes_one_shared_array_in_a_line_of_its_own
#define assert(CONDITION) \
    ((CONDITION) ? (void)0 : host::fail("assertion failed", #CONDITION, __builtin_FILE(), __builtin_LINE()))

#define threadIdx (host::thread_index())
#define blockIdx (host::block_index())
#define blockDim (host::block_size())
#define gridDim (host::grid_size())

// Last parameters of a collective: by default, the file and line of its call.
#define HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace pyops_kernel {

#define VECTORS(T, NAME, ALIGN2, ALIGN4)                               \
    struct NAME##1 { T x; };                                           \
    struct alignas(ALIGN2) NAME##2 { T x, y; };                        \
    struct NAME##3 { T x, y, z; };                                     \
    struct alignas(ALIGN4) NAME##4 { T x, y, z, w; };                  \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }         \
    inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; } \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(signed char, char, 2, 4)
VECTORS(unsigned char, uchar, 2, 4)
VECTORS(short, short, 4, 8)
VECTORS(unsigned short, ushort, 4, 8)
VECTORS(int, int, 8, 16)
VECTORS(unsigned, uint, 8, 16)
VECTORS(long long, longlong, 16, 16)
VECTORS(unsigned long long, ulonglong, 16, 16)
VECTORS(float, float, 8, 16)
VECTORS(double, double, 16, 16)
#undef VECTORS

// Arithmetic. Functions of libm are computed in double and rounded once. The result is the correctly rounded float in
// all but about one of 10^8 cases, and the same with every libm. The compiler is told not to fuse multiplications with
// additions.
#define THROUGH_DOUBLE(NAME) \
    inline float NAME##f(float x) { return float(::NAME(double(x))); }
THROUGH_DOUBLE(exp)
THROUGH_DOUBLE(exp2)
THROUGH_DOUBLE(expm1)
THROUGH_DOUBLE(log)
THROUGH_DOUBLE(log2)
THROUGH_DOUBLE(log10)
THROUGH_DOUBLE(log1p)
THROUGH_DOUBLE(sin)
THROUGH_DOUBLE(cos)
THROUGH_DOUBLE(tanh)
THROUGH_DOUBLE(erf)
#undef THROUGH_DOUBLE
inline float powf(float x, float y) { return float(::pow(double(x), double(y))); }
inline float rsqrtf(float x) { return float(1.0 / ::sqrt(double(x))); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return ::sqrtf(x); }
// Flushes subnormal numbers to 0.
inline float host_flush(float x) { return ::fabsf(x) < 1.17549435e-38f ? ::copysignf(0.0f, x) : x; }
// If one argument is NaN, the result is the other; -0 is smaller than 0.
inline float fminf(float a, float b) {
    if (a != a || b != b) return a != a ? b : a;
    return a < b || (a == b && ::signbit(a)) ? a : b;
}
inline float fmaxf(float a, float b) { return -fminf(-a, -b); }
inline int min(int a, int b) { return b < a ? b : a; }
inline unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
inline long long min(long long a, long long b) { return b < a ? b : a; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return b < a ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline int max(int a, int b) { return a < b ? b : a; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
inline long long max(long long a, long long b) { return a < b ? b : a; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a < b ? b : a; }
inline float max(float a, float b) { return fmaxf(a, b); }

inline unsigned __float_as_uint(float x) { return host::bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return host::bits_as<float>(x); }
inline int __float_as_int(float x) { return host::bits_as<int>(x); }
inline float __int_as_float(int x) { return host::bits_as<float>(x); }
// Rounds to nearest, ties to even; saturates; NaN becomes 0.
inline int __float2int_rn(float x) {
    if (x != x) return 0;
    const double rounded = ::rint(double(x));
    return rounded >= 2147483647.0 ? 2147483647 : rounded <= -2147483648.0 ? -2147483647 - 1 : int(rounded);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;  // three bits of a nibble count
    }
    return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

// Memory.
template <typename T> inline T __ldg(const T* address) { return *address; }
template <typename T> inline T __ldcs(const T* address) { return *address; }
template <typename T> inline T __ldcg(const T* address) { return *address; }
template <typename T> inline void __stcs(T* address, T value) { *address = value; }
template <typename T> inline void __stcg(T* address, T value) { *address = value; }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <typename T, typename F>
inline T host_atomic(T* address, F f) {
    host::record_access(address, sizeof(T), host::Access::ATOMIC);
    T before, after;
    host::copy_unrecorded(&before, address, sizeof(T));
    after = f(before);
    host::copy_unrecorded(address, &after, sizeof(T));
    return before;
}
template <typename T> struct host_same { using type = T; };
#define ATOMIC(NAME, EXPRESSION)                                             \
    template <typename T>                                                    \
    inline T atomic##NAME(T* address, typename host_same<T>::type value) {   \
        return host_atomic(address, [=](T old) -> T { return EXPRESSION; }); \
    }
ATOMIC(Add, old + value)
ATOMIC(Sub, old - value)
ATOMIC(Exch, value)
ATOMIC(Min, value < old ? value : old)
ATOMIC(Max, value > old ? value : old)
ATOMIC(And, (old & value))
ATOMIC(Or, old | value)
ATOMIC(Xor, old ^ value)
ATOMIC(Inc, old >= value ? 0 : old + 1)
ATOMIC(Dec, old == 0 || old > value ? value : old - 1)
#undef ATOMIC
template <typename T>
inline T atomicCAS(T* address, typename host_same<T>::type expected, typename host_same<T>::type value) {
    return host_atomic(address, [=](T old) -> T { return old == expected ? value : old; });
}

// Barriers and the collectives of a warp. Every lane passes its payload; the last lane to arrive computes all results.
using host_lanes = uint64_t;

inline void __syncthreads(HOST_SITE) { host::block_barrier(file, line); }
inline void __syncwarp(host_lanes lanes = ~host_lanes(0), HOST_SITE) { host::warp_barrier(lanes, file, line); }

// Clusters, for include/cluster.cuh.
inline void host_sync_cluster(HOST_SITE) { host::cluster_barrier(file, line); }
template <typename T>
inline T host_load_of_block(const T* own, unsigned rank) {
    T value;
    host::read_of_block(&value, own, rank, sizeof value);
    return value;
}

template <typename T>
struct host_shuffle {
    T value, result;
    int source;  // lane that provides the value; -1: the lane keeps its own
};
template <typename T>
inline T host_shuffle_with(const char* name, host_lanes lanes, T value, int source, const char* file, int line) {
    host_shuffle<T> own = {value, value, source};
    host::warp_collective(
        name, lanes, &own,
        [](void* const* payloads, uint64_t lanes) {
            for (uint64_t rest = lanes; rest; rest &= rest - 1) {
                auto& lane = *static_cast<host_shuffle<T>*>(payloads[__builtin_ctzll(rest)]);
                if (lane.source < 0) continue;
                if (lanes >> lane.source & 1) lane.result = static_cast<host_shuffle<T>*>(payloads[lane.source])->value;
                else memset(static_cast<void*>(&lane.result), 0xff, sizeof(T));  // undefined
            }
        },
        file, line);
    return own.result;
}
// Shuffles within segments of `width` lanes. A lane with a source outside its segment keeps its own value.
template <typename T>
inline T __shfl_sync(host_lanes lanes, T value, int source, int width = PYOPS_HOST_WARP_SIZE, HOST_SITE) {
    const int first = host::lane_index() & ~(width - 1);
    return host_shuffle_with("__shfl_sync", lanes, value, first + (source & (width - 1)), file, line);
}
template <typename T>
inline T __shfl_xor_sync(host_lanes lanes, T value, int mask, int width = PYOPS_HOST_WARP_SIZE, HOST_SITE) {
    const int lane = host::lane_index(), source = lane ^ mask;
    const bool inside = source < (lane & ~(width - 1)) + width;
    return host_shuffle_with("__shfl_xor_sync", lanes, value, inside ? source : -1, file, line);
}
template <typename T>
inline T __shfl_down_sync(host_lanes lanes, T value, unsigned delta, int width = PYOPS_HOST_WARP_SIZE, HOST_SITE) {
    const int lane = host::lane_index(), source = lane + int(delta);
    const bool inside = source < (lane & ~(width - 1)) + width;
    return host_shuffle_with("__shfl_down_sync", lanes, value, inside ? source : -1, file, line);
}
template <typename T>
inline T __shfl_up_sync(host_lanes lanes, T value, unsigned delta, int width = PYOPS_HOST_WARP_SIZE, HOST_SITE) {
    const int lane = host::lane_index(), source = lane - int(delta);
    const bool inside = source >= (lane & ~(width - 1));
    return host_shuffle_with("__shfl_up_sync", lanes, value, inside ? source : -1, file, line);
}

// Every lane gets the reduction F of all lanes' values.
template <typename T, typename F>
inline T host_reduce(const char* name, host_lanes lanes, T value, F, const char* file, int line) {
    host::warp_collective(
        name, lanes, &value,
        [](void* const* payloads, uint64_t lanes) {
            T total = *static_cast<T*>(payloads[__builtin_ctzll(lanes)]);
            for (uint64_t rest = lanes & (lanes - 1); rest; rest &= rest - 1) {
                total = F::apply(total, *static_cast<T*>(payloads[__builtin_ctzll(rest)]));
            }
            for (uint64_t rest = lanes; rest; rest &= rest - 1) {
                *static_cast<T*>(payloads[__builtin_ctzll(rest)]) = total;
            }
        },
        file, line);
    return value;
}
#define REDUCE(NAME, EXPRESSION)                                                                \
    struct host_##NAME {                                                                        \
        template <typename T> static T apply(T a, T b) { return EXPRESSION; }                   \
    };                                                                                          \
    template <typename T>                                                                       \
    inline T __reduce_##NAME##_sync(host_lanes lanes, T value, HOST_SITE) {                     \
        return host_reduce("__reduce_" #NAME "_sync", lanes, value, host_##NAME(), file, line); \
    }
REDUCE(add, a + b)
REDUCE(min, b < a ? b : a)
REDUCE(max, a < b ? b : a)
REDUCE(and, (a & b))
REDUCE(or, a | b)
REDUCE(xor, a ^ b)
#undef REDUCE
inline host_lanes __ballot_sync(host_lanes lanes, int predicate, HOST_SITE) {
    const host_lanes own = host_lanes(predicate != 0) << host::lane_index();
    return host_reduce("__ballot_sync", lanes, own, host_or(), file, line);
}
inline int __any_sync(host_lanes lanes, int predicate, HOST_SITE) {
    return host_reduce("__any_sync", lanes, int(predicate != 0), host_or(), file, line);
}
inline int __all_sync(host_lanes lanes, int predicate, HOST_SITE) {
    return host_reduce("__all_sync", lanes, int(predicate != 0), host_and(), file, line);
}

// memcpy and memset of a kernel: not every compiler instruments the C library's functions.
inline void* host_memcpy(void* to, const void* from, size_t bytes) {
    host::record_access(from, bytes, host::Access::READ);
    host::record_access(to, bytes, host::Access::WRITE);
    host::copy_unrecorded(to, from, bytes);
    return to;
}
inline void* host_memset(void* to, int value, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) static_cast<volatile unsigned char*>(to)[i] = value;
    return to;
}
#define memcpy host_memcpy
#define memset host_memset

}  // namespace pyops_kernel
