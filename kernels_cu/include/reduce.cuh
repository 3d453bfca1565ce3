// reduce.cuh: reductions (sum, max, min) over the threads that share a row.
//
// A row belongs to ROW_THREADS consecutive threads: a power of two up to the warp size, or a whole block of several
// warps. Every thread of the row gets the result; all compute it in the same order.

#pragma once
#include "arith.cuh"

struct Sum {
    static DEVICE float identity() { return 0.0f; }
    template <typename T> static DEVICE T apply(T a, T b) { return a + b; }
};

// Maximum and minimum of floats ignore NaN.
struct Max {
    static DEVICE float identity() { return minus_infinity(); }
    static DEVICE float apply(float a, float b) { return ieee_max(a, b); }
    static DEVICE uint32_t apply(uint32_t a, uint32_t b) { return max(a, b); }
};
struct Min {
    static DEVICE float identity() { return -minus_infinity(); }
    static DEVICE float apply(float a, float b) { return ieee_min(a, b); }
    static DEVICE uint32_t apply(uint32_t a, uint32_t b) { return min(a, b); }
};

// Reduces 32-bit integers over a warp with one instruction (redux.sync), where the device has it.
#define PYOPS_REDUX (PYOPS_HOST || PYOPS_CUDA && __CUDA_ARCH__ >= 800)
#if PYOPS_REDUX
DEVICE uint32_t warp_reduce(Sum, uint32_t value) { return __reduce_add_sync(ALL_LANES, value); }
DEVICE uint32_t warp_reduce(Max, uint32_t value) { return __reduce_max_sync(ALL_LANES, value); }
DEVICE uint32_t warp_reduce(Min, uint32_t value) { return __reduce_min_sync(ALL_LANES, value); }
#endif

// Reduces over each aligned group of WIDTH lanes of a warp. Every lane of the warp takes part.
template <typename Op, int WIDTH, typename T>
DEVICE T lane_reduce(T value) {
    static_assert((WIDTH & (WIDTH - 1)) == 0);
#if PYOPS_REDUX
    if constexpr (WIDTH == WARP_SIZE && is_same<T, uint32_t>) return warp_reduce(Op(), value);
#endif
#pragma unroll
    for (int mask = WIDTH / 2; mask > 0; mask /= 2) value = Op::apply(value, shfl_xor(value, mask));
    return value;
}

// Reduces over the ROW_THREADS threads of a row. `partial` is shared memory of one value per warp. A second reduction
// of the block needs another array, or a barrier in between.
template <typename Op, int ROW_THREADS, typename T>
DEVICE T row_reduce(T value, T* partial) {
    if constexpr (ROW_THREADS <= WARP_SIZE) {
        return lane_reduce<Op, ROW_THREADS>(value);
    } else {
        constexpr int NUM_WARPS = ROW_THREADS / WARP_SIZE;
        static_assert(ROW_THREADS % WARP_SIZE == 0);
        value = lane_reduce<Op, WARP_SIZE>(value);
        if (threadIdx.x % WARP_SIZE == 0) partial[threadIdx.x / WARP_SIZE] = value;
        __syncthreads();
        value = Op::identity();
#pragma unroll
        for (int warp = 0; warp < NUM_WARPS; ++warp) value = Op::apply(value, partial[warp]);
        return value;
    }
}
