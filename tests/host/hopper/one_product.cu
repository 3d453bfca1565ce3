// one_product.cu: out [64, N] = a [64, K] * b [N, K]^T, K of ROW_BYTES: one chain of wgmma, of element_t.
//
// TMA loads A, unless REGISTERS takes it from `fragments`. TMA loads B in BOXES boxes, with TRANSPOSED as [K, N].
#include "wgmma.cuh"

extern "C" __global__ void LAUNCH_BOUNDS(128, 1)
one_product(wgmma_sum_t<element_t>* out, const uint32_t* fragments, const __grid_constant__ TensorMap a_map,
            const __grid_constant__ TensorMap b_map) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t barrier[1];
    uint8_t* b_tile = shared + 64 * 128;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier, 64 * ROW_BYTES + BOXES * BOX_BYTES);
        tma_load(shared, &a_map, barrier, 0, 0);
        for (int i = 0; i < BOXES; ++i) {
            tma_load(b_tile + i * BOX_BYTES, &b_map, barrier, i * (TRANSPOSED ? 64 : 0),
                     TRANSPOSED ? 0 : i * (N / BOXES));
        }
    }
    mbarrier_wait(barrier, 0);
    wgmma_sum_t<element_t> d[N / 2];
    uint32_t a[ROW_BYTES / 32][4];
    if constexpr (REGISTERS) {
        for (int i = 0; i < ROW_BYTES / 32 * 4; ++i) a[i / 4][i % 4] = fragments[i * 128 + threadIdx.x];
    }
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < ROW_BYTES / 32; ++i) {
        const uint64_t b = TRANSPOSED ? make_smem_desc<SWIZZLE_128B>(b_tile + i * 2048, 1024, BOX_BYTES)
                                      : advance_smem_desc(make_smem_desc<SWIZZLE>(b_tile), 32 * i);
        if constexpr (REGISTERS) {
            wgmma<element_t, N, TRANSPOSED>(d, a[i], b, i > 0);
        } else {
            wgmma<element_t, N, false, TRANSPOSED>(d, advance_smem_desc(make_smem_desc<SWIZZLE>(shared), 32 * i), b,
                                                   i > 0);
        }
    }
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(d);
    for (int i = 0; i < N / 2; ++i) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
        out[row * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
    }
}
