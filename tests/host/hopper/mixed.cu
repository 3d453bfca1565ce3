// mixed.cu: out [128, 128] = a [128, k] * (scale * q [128, k])^T, int8 weights with a scale for each row and 64 columns.
//
// A pipeline of another kind than gemm.cu's. TMA loads a, the weights and their scales. Two warpgroups in ping-pong
// order (named barriers 1 and 2) dequantize the weights into swizzled bfloat16 tiles, by ordinary stores, and multiply
// them by 64 rows of a each. One lane of a warp waits for its warp, and loads begin before their bytes are announced.
#include "wgmma.cuh"

constexpr int STAGES = 2, A_BYTES = 64 * 128, Q_BYTES = 128 * 64, SCALE_BYTES = 128 * 4;
constexpr int STAGE_BYTES = 2 * A_BYTES + Q_BYTES + 1024, TILE_BYTES = 128 * 128;

extern "C" __global__ void LAUNCH_BOUNDS(384, 1)
mixed(float* out, const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap q_map,
      const __grid_constant__ TensorMap scale_map, int steps) {
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* tiles = shared + STAGES * STAGE_BYTES;
    uint64_t* full = reinterpret_cast<uint64_t*>(tiles + 2 * TILE_BYTES);
    uint64_t* empty = full + STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(full + i, 1);
            mbarrier_init(empty + i, 8);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    int stage = 0;
    uint32_t phase = 0;
    const auto advance = [&] {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    };
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
    if (group == 2) {
        if (warp == 0 && elect_one()) {
            for (int step = 0; step < steps; ++step, advance()) {
                mbarrier_wait(empty + stage, phase ^ 1);
                uint8_t* to = shared + stage * STAGE_BYTES;
                tma_load(to, &a_map, full + stage, step * 64, 0);
                tma_load(to + A_BYTES, &a_map, full + stage, step * 64, 64);
                tma_load(to + 2 * A_BYTES, &q_map, full + stage, step * 64, 0);
                tma_load(to + 2 * A_BYTES + Q_BYTES, &scale_map, full + stage, 0, step);
                mbarrier_arrive_expect_tx(full + stage, 2 * A_BYTES + Q_BYTES + SCALE_BYTES);
            }
        }
        return;
    }
    float d[64];
    for (int i = 0; i < 64; ++i) d[i] = 0.0f;
    if (group == 1) named_barrier_arrive<1>(256);
    for (int step = 0; step < steps; ++step, advance()) {
        if (lane == 0) mbarrier_wait(full + stage, phase);
        sync_warp();  // AFTER THE WAIT
        const uint8_t* from = shared + stage * STAGE_BYTES;
        const int8_t* q = reinterpret_cast<const int8_t*>(from + 2 * A_BYTES);
        const float scale = reinterpret_cast<const float*>(q + Q_BYTES)[thread];
        uint8_t* tile = tiles + group * TILE_BYTES;
        for (int k = 0; k < 64; k += 2) {
            const uint32_t pair = pack_pair<bf16_t>(scale * q[thread * 64 + k], scale * q[thread * 64 + k + 1]);
            *reinterpret_cast<uint32_t*>(tile + thread / 8 * 1024 + swizzle_128b(thread % 8, 2 * k)) = pair;
        }
        fence_proxy_async();                 // OF THE TILE
        named_barrier_sync(3 + group, 128);  // THE TILE IS WRITTEN
        named_barrier_sync(1 + group, 256);  // the warpgroup's turn
        warpgroup_arrive();
        for (int i = 0; i < 4; ++i) {
            wgmma<bf16_t, 128>(d, advance_smem_desc(make_smem_desc(from + group * A_BYTES), 32 * i),
                               advance_smem_desc(make_smem_desc(tile), 32 * i));
        }
        warpgroup_commit_batch();
        if (group == 0 || step + 1 < steps) named_barrier_arrive(2 - group, 256);
        warpgroup_wait<0>();
        sync_warp();  // BEFORE THE ARRIVAL
        if (lane == 0) mbarrier_arrive(empty + stage);
        named_barrier_sync(3 + group, 128);  // THE TILE HAS BEEN READ
    }
    for (int i = 0; i < 64; ++i) {
        const int row = group * 64 + warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        out[row * 128 + column] = d[i];
    }
}
