// gated_delta_segments: the states before the segments of a sequence, from what gated_delta_sm90.cu finds of each
// segment.
//
// Formula: S_j+1 = S_j M_j + D_j, where segment j has the transition M_j and adds D_j, and S_1 = D_0. M_j is split
// into two matrices of bf16_t, and so is S_j; three of their four products are as exact as 16 bits.
//
// Blocks: blockIdx.x counts sequences, value heads and tiles of 64 rows of the state. A block is a warpgroup, which
// holds its rows in WGMMA accumulators.
//
// Constants
//     scalar_t      T: element type of keys
//     KEY_SIZE      elements of a head of k: 64 or 128
//     VALUE_SIZE    elements of a head of v, a multiple of 64

#include "gated_delta_sm90_tiles.cuh"
#include "wgmma.cuh"

constexpr int NUM_THREADS = 128, STAGES = 2, TILES = VALUE_SIZE / 64, PART_BYTES = sizeof(Transition) / 2;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
gated_delta_segments(float* added,                   // [num_seqs, value_heads, segments - 1, VALUE_SIZE, KEY_SIZE]:
                                                     // D_j, then S_j+1
                     const Transition* transitions,  // [num_seqs, value_heads, segments - 2]: M_j from j = 1 on
                     int64_t segments) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Transition* const stages = reinterpret_cast<Transition*>(memory);
    __shared__ uint64_t full[STAGES];
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) mbarrier_init(full + i, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    await_previous_kernel();
    const int64_t chain = blockIdx.x / TILES;
    const int count = int(segments) - 2, lane = threadIdx.x % 32, t = lane % 4;
    const int own_row = int(blockIdx.x % TILES) * 64 + int(threadIdx.x) / 32 * 16 + lane / 4;
    transitions += chain * count;
    added += (chain * (segments - 1) * VALUE_SIZE + own_row) * KEY_SIZE + 2 * t;
    const auto load = [&](int j) {
        constexpr int PIECE = sizeof(Transition) / 16;  // several copies are in flight at a time
        uint64_t* const barrier = full + j % STAGES;
        mbarrier_arrive_expect_tx(barrier, sizeof(Transition));
        auto* const to = reinterpret_cast<uint8_t*>(stages + j % STAGES);
        const auto* const from = reinterpret_cast<const uint8_t*>(transitions + j);
        for (int i = 0; i < int(sizeof(Transition)); i += PIECE) bulk_load(to + i, from + i, PIECE, barrier);
    };
    if (threadIdx.x == 0) {
        for (int j = 0; j < min(STAGES, count); ++j) load(j);
    }
    // Calls visit(i, address of elements i and i + 1 of the lane) in the state of D_j.
    const auto each_pair = [&](int j, auto visit) {
        float* const of = added + int64_t(j) * (VALUE_SIZE * KEY_SIZE);
#pragma unroll
        for (int i = 0; i < KEY_SIZE / 2; i += 2) visit(i, of + i / 2 % 2 * 8 * KEY_SIZE + i / 4 * 8);
    };
    float s[KEY_SIZE / 2], next[KEY_SIZE / 2];  // next: D_j+1 while S_j is multiplied
    const auto read = [&](float (&to)[KEY_SIZE / 2], int j) {
        each_pair(j, [&](int i, const float* from) {
            const auto two = Vec<float, 2>::load(from);
            to[i] = two[0];
            to[i + 1] = two[1];
        });
    };
    read(s, 0);
    if (count > 0) read(next, 1);
    for (int j = 0; j < count; ++j) {
        uint32_t high[STEPS][4], low[STEPS][4];
#pragma unroll
        for (int i = 0; i < STEPS * 4; ++i) {
            const int at = (i / 4 * 2 + i % 4 / 2) * 4 + i % 2 * 2;
            high[i / 4][i % 4] = pack_pair<bf16_t>(s[at], s[at + 1]);
            float first, second;
            unpack_pair<bf16_t>(high[i / 4][i % 4], first, second);
            low[i / 4][i % 4] = pack_pair<bf16_t>(s[at] - first, s[at + 1] - second);
        }
#pragma unroll
        for (int i = 0; i < KEY_SIZE / 2; ++i) s[i] = next[i];
        mbarrier_wait(full + j % STAGES, j / STAGES % 2);
        const auto multiply = [&](const uint32_t (&rows)[STEPS][4], int part) {
            const uint64_t columns = make_smem_desc(stages[j % STAGES].parts[part], 1024, PART_BYTES / PANELS);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                wgmma<bf16_t, KEY_SIZE, true>(s, rows[step], advance_smem_desc(columns, step * 16 * WIDE * 2));
            }
        };
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            warpgroup_fence_operand(high[step]);
            warpgroup_fence_operand(low[step]);
        }
        warpgroup_fence_operand(s);
        warpgroup_arrive();
        multiply(low, 0);
        multiply(high, 1);
        multiply(high, 0);
        warpgroup_commit_batch();
        if (j + 2 <= count) read(next, j + 2);
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
        __syncthreads();
        if (threadIdx.x == 0 && j + STAGES < count) load(j + STAGES);
        each_pair(j + 1, [&](int i, float* to) {
            const float two[2] = {s[i], s[i + 1]};
            Vec<float, 2>::from_floats(two).store(to);
        });
    }
}
