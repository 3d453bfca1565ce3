// gemm.cu: out [m, n] = input [m, k] * weight [n, k]^T in bfloat16, with float32 accumulators.
//
// The plainest kernel with every part of a fast one on Hopper. It is persistent and warp-specialised: a CTA has three
// warpgroups and takes tiles of BLOCK_M x BLOCK_N. A thread of the last warpgroup loads k-tiles of BLOCK_K into a ring
// of STAGES stages: the barrier `full` tells that a stage is loaded, `empty` that it has been read. The other two
// warpgroups multiply 64 rows each and store their part of the tile through shared memory. The CTAs of a cluster have
// adjacent row tiles and share the k-tiles of weight: each CTA multicasts a part to all.
#include "cluster.cuh"
#include "wgmma.cuh"

constexpr int BLOCK_M = 128, BLOCK_K = 64, CONSUMERS = 2;
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = BLOCK_N * BLOCK_K * 2, C_BYTES = BLOCK_M * BLOCK_N * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(384, 1)
gemm(const __grid_constant__ TensorMap input_map,   // boxes of BLOCK_M x BLOCK_K, swizzled by 128 bytes
     const __grid_constant__ TensorMap weight_map,  // boxes of BLOCK_N / CLUSTER x BLOCK_K, swizzled as well
     const __grid_constant__ TensorMap out_map,     // boxes of 64 x 64, swizzled as well
     int m, int n, int k) {
    extern __shared__ __align__(1024) uint8_t shared[];
    uint64_t* full = reinterpret_cast<uint64_t*>(shared + STAGES * STAGE_BYTES + C_BYTES);
    uint64_t* empty = full + STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(full + i, 1);
            mbarrier_init(empty + i, CONSUMERS * CLUSTER);
        }
        fence_mbarrier_init();
    }
    sync_cluster<CLUSTER>();

    const int steps = ceil_div(k, BLOCK_K), tiles_n = ceil_div(n, BLOCK_N),
              tiles = ceil_div(m, BLOCK_M * CLUSTER) * tiles_n;
    const unsigned rank = CLUSTER > 1 ? blockIdx.y % CLUSTER : 0;
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0);
    int stage = 0;
    uint32_t phase = 0;
    const auto advance = [&] {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    };

    if (warpgroup == CONSUMERS) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x / 32 % 4 == 0 && elect_one()) {
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                const int row = (tile / tiles_n * CLUSTER + rank) * BLOCK_M, column = tile % tiles_n * BLOCK_N;
                for (int step = 0; step < steps; ++step, advance()) {
                    mbarrier_wait(empty + stage, phase ^ 1);
                    uint8_t* to = shared + stage * STAGE_BYTES;
                    mbarrier_arrive_expect_tx(full + stage, STAGE_BYTES);
                    tma_load(to, &input_map, full + stage, step * BLOCK_K, row);
                    if constexpr (CLUSTER == 1) {
                        tma_load(to + A_BYTES, &weight_map, full + stage, step * BLOCK_K, column);
                    } else {
                        uint8_t* part = to + A_BYTES + rank * (B_BYTES / CLUSTER);
                        tma_load_multicast(part, &weight_map, full + stage, (1 << CLUSTER) - 1, step * BLOCK_K,
                                           column + rank * (BLOCK_N / CLUSTER));
                    }
                }
            }
        }
        leave_cluster<CLUSTER>();
        return;
    }

    warpgroup_reg_alloc<232>();
    // The first threads of a warpgroup tell one block of the cluster each.
    const auto give_back = [&](int stage) {
        if (threadIdx.x % 128 >= CLUSTER) return;
        if constexpr (CLUSTER == 1) mbarrier_arrive(empty + stage);
        else mbarrier_arrive_cluster(empty + stage, threadIdx.x % 128);
    };
    const int thread = threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    uint8_t* own_c = shared + STAGES * STAGE_BYTES + warpgroup * (C_BYTES / CONSUMERS);
    float d[BLOCK_N / 2];
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int row = (tile / tiles_n * CLUSTER + rank) * BLOCK_M + warpgroup * 64, column = tile % tiles_n * BLOCK_N;
        int previous = -1;  // the stage that is read by the product in flight
        for (int step = 0; step < steps; ++step, advance()) {
            mbarrier_wait(full + stage, phase);
            const uint8_t* from = shared + stage * STAGE_BYTES;
            const uint64_t a = make_smem_desc(from + warpgroup * 64 * BLOCK_K * 2), b = make_smem_desc(from + A_BYTES);
            warpgroup_arrive();
#pragma unroll
            for (int i = 0; i < BLOCK_K / 16; ++i) {
                wgmma<bf16_t, BLOCK_N>(d, advance_smem_desc(a, 32 * i), advance_smem_desc(b, 32 * i),
                                       step > 0 || i > 0);
            }
            warpgroup_commit_batch();
            warpgroup_wait<1>();
            if (previous >= 0) give_back(previous);
            previous = stage;
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(d);
        give_back(previous);
        if (thread == 0) tma_store_wait_read<0>();
        named_barrier_sync(1 + warpgroup, 128);  // the store of the last tile has read own_c
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i += 2) {
            uint8_t* panel = own_c + i / 32 * (64 * 128);
            const int at = swizzle_128b(16 * warp + g + i / 2 % 2 * 8, i % 32 / 4 * 16 + 4 * t);
            *reinterpret_cast<uint32_t*>(panel + at) = pack_pair<bf16_t>(d[i], d[i + 1]);
        }
        fence_proxy_async();
        named_barrier_sync(1 + warpgroup, 128);
        if (thread == 0) {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 64; ++i) tma_store(&out_map, own_c + i * (64 * 128), column + 64 * i, row);
            tma_store_commit();
        }
    }
    if (thread == 0) tma_store_wait<0>();
    leave_cluster<CLUSTER>();
}
