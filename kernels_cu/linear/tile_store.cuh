// tile_store.cuh: stores of a tile of out from the registers of a warp: stmatrix to shared memory, then TMA.
//
// Included by gemm_sm90 and wq_gemm_sm90.
#pragma once
#include "mma.cuh"
#include "tma.cuh"

// The store buffers of a warp: STAGES boxes of 16 rows x COLUMNS columns, swizzled; one is filled while TMA reads the
// others. TRANSPOSED: the accumulators are those of the transposed box (swap-AB).
template <typename T, int COLUMNS, bool TRANSPOSED = false, int STAGES = 2>
struct TmaStore {
    static constexpr int ROW_BYTES = COLUMNS * sizeof(T), BUFFER_BYTES = 16 * ROW_BYTES, BYTES = STAGES * BUFFER_BYTES;
    static_assert(ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES == 128);

    const TensorMap* map;  // of out, boxes of 16 x COLUMNS, swizzled
    uint8_t* buffers;      // BYTES bytes
    int lane;
    int stage = 0;

    // Stores a box at (row, column) of out. pairs_of(i, pairs) writes the lane's elements of columns 16 i ... 16 i + 15
    // as four words for stmatrix.
    template <typename PairsOf>
    DEVICE void store(int64_t row, int64_t column, PairsOf pairs_of) {
        uint8_t* to = buffers + stage * BUFFER_BYTES;
        stage = (stage + 1) % STAGES;
        if (lane == 0) tma_store_wait_read<STAGES - 1>();
        sync_warp();
#pragma unroll
        for (int i = 0; i < COLUMNS / 16; ++i) {
            uint32_t pairs[4];
            pairs_of(i, pairs);
            stmatrix<4, TRANSPOSED>(to + swizzle_chunk<ROW_BYTES>(lane % 16, i * 2 + lane / 16), pairs);
        }
        fence_proxy_async();
        sync_warp();
        if (lane == 0) {
            tma_store(map, to, int(column), int(row));
            tma_store_commit();
        }
    }
    // Before the warp exits: waits until all stores are complete.
    DEVICE void wait() const {
        if (lane == 0) tma_store_wait<0>();
    }
};
