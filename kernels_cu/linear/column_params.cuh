// column_params.cuh: the epilogue operands of a tile's columns, for a consumer warpgroup of gemm_sm90 or
// grouped_gemm_sm90. Reads the kernel's constants B_SCALES, BIAS and AZP.
#pragma once
#include "barrier.cuh"
#include "vec.cuh"

// Scale, bias and zero point of the warpgroup's N rows of b: each is an array in shared memory. The warpgroup loads them
// before its main loop, which hides the latency, and keeps them in registers, then writes them to shared memory for its
// epilogue.
template <typename Column, int N>
struct ColumnParams {
    static constexpr int ARRAYS = B_SCALES + BIAS + (AZP > 0), BYTES = ARRAYS * N * 4;
    static constexpr int COLUMNS = ceil_div(N, 128);  // columns that a thread loads
    Column loaded[COLUMNS];
    float* memory;

    // column_of(i): the operands of row i of b, or of any row if i is N or more.
    template <typename ColumnOf>
    DEVICE void load(ColumnOf column_of) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) loaded[i] = column_of(int(threadIdx.x) % 128 + i * 128);
    }
    // Writes them to shared memory. All threads of the warpgroup call; `barrier` is its named barrier.
    DEVICE void share(int barrier) {
        if constexpr (ARRAYS == 0) return;
        named_barrier_sync(barrier, 128);  // all have read the previous tile's operands
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const int column = threadIdx.x % 128 + i * 128;
            if (N % 128 != 0 && column >= N) continue;
            if constexpr (B_SCALES) memory[column] = loaded[i].scale;
            if constexpr (BIAS) memory[B_SCALES * N + column] = loaded[i].bias;
            if constexpr (AZP > 0) zero_points()[column] = loaded[i].azp;
        }
        named_barrier_sync(barrier, 128);
    }
    // The operands of `column` and the next.
    DEVICE void get(int column, Column (&pair)[2]) const {
        Vec<float, 2> scale, bias;
        Vec<int32_t, 2> azp;
        if constexpr (B_SCALES) scale = Vec<float, 2>::load(memory + column);
        if constexpr (BIAS) bias = Vec<float, 2>::load(memory + B_SCALES * N + column);
        if constexpr (AZP > 0) azp = Vec<int32_t, 2>::load(zero_points() + column);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            pair[i] = {0, B_SCALES ? scale.data[i] : 1.0f, BIAS ? bias.data[i] : 0.0f, AZP > 0 ? azp.data[i] : 0};
        }
    }
    DEVICE int32_t* zero_points() const { return reinterpret_cast<int32_t*>(memory) + (B_SCALES + BIAS) * N; }
};
