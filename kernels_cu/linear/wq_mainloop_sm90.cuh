// wq_mainloop_sm90.cuh: the main loop of wq_gemm_sm90, for one consumer warpgroup: WGMMAs with weights from registers.
//
// A warp dequantizes the A operands of one part of a k-tile, CHUNK WGMMAs deep in K, while the WGMMAs of the previous
// part run. Constants are the kernel's.
#pragma once
#include "pipeline.cuh"
#include "wgmma.cuh"
#include "wq_tile_sm90.cuh"

DEVICE void fence(accum_t& accum) {
#pragma unroll
    for (int j = 0; j < PRODUCTS; ++j) warpgroup_fence_operand(accum[j]);
}

// Accumulates k-tiles first ... last - 1. `stages` is the ring's first stage; `places` belong to the warp's columns.
// They are arguments, because as members of a struct NVRTC schedules the loop differently, with other registers.
DEVICE void run_mainloop(accum_t& accum, Ring<STAGES>& ring, const uint8_t* stages, int warp, const quants_t& decode,
                         const Place (&places)[PRODUCTS][2], int first, int last) {
    float promoted[APART ? PRODUCTS : 1][TILE_M / 2] = {};
    uint32_t weights[2][CHUNK][PRODUCTS][4];
    terms_t group_params[PRODUCTS][2];
    int previous = 0;
    for (int k_tile = first; k_tile < last; ++k_tile, ring.advance()) {
        const uint8_t* from = stages + ring.stage * STAGE_BYTES;
        const uint64_t a = make_smem_desc(from);
        const uint8_t* const quants = from + A_BYTES;
        lane_quants_t words[2][CHUNK][PRODUCTS];
        const auto read = [&](int part) {
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                lane_quants_t::template read<PRODUCTS, RECODED>(
                    words[part % 2][i], reinterpret_cast<const uint32_t*>(quants), part * CHUNK + i, warp * PRODUCTS);
            }
        };
        sync_warp();  // all lanes have read the previous stage, which this k-tile releases
        ring.wait();
        // Timeline of a k-tile's parts; q: quants, w: operands. Dequantization overlaps with the previous WGMMA.
        //   part    0         1         2
        //   LDS     q0, q1    q2        q3    quants of the next part
        //   CVT     w0        w1        w2    register operands, two sets
        //   WGMMA        w0        w1         w2    wait<1> before the older set is rewritten; APART: wait<0>
        read(0);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            auto& operands = weights[part % 2];
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                const int slice = part * CHUNK + i;  // k-slice: PRODUCT_K rows of w
                if (slice == 0 || (GROUPS > 1 && slice * PRODUCT_K % GROUP_SIZE == 0)) {
                    const int group = slice * GROUPS * PRODUCT_K / TILE_K;
#pragma unroll
                    for (int j = 0; j < PRODUCTS * 2; ++j) {
                        group_params[j / 2][j % 2].load(quants + QUANT_BYTES, SCALE_BYTES, group, places[j / 2][j % 2]);
                    }
                }
#pragma unroll
                for (int j = 0; j < PRODUCTS; ++j) {
#pragma unroll
                    for (int l = 0; l < 4; ++l) {
                        operands[i][j][l] = group_params[j][l % 2].weight(decode, words[part % 2][i][j], l % 2, l / 2);
                    }
                }
            }
            if (part + 1 < PARTS) read(part + 1);  // the loads are in flight while the WGMMAs are issued
            fence(accum);
            warpgroup_arrive();
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
#pragma unroll
                for (int j = 0; j < PRODUCTS; ++j) {
                    const int slice = part * CHUNK + i;
                    wgmma<scalar_t, TILE_M>(accum[j], operands[i][j],
                                            advance_smem_desc(a, slice / 4 * BOX_BYTES + slice % 4 * 32),
                                            APART ? i > 0 : slice > 0 || k_tile > first);
                }
            }
            warpgroup_commit_batch();
            // Wait for the previous WGMMAs: the next part rewrites their operands. APART: wait for these, to
            // promote them.
            warpgroup_wait<APART ? 0 : 1>();
            if constexpr (APART) {
                fence(accum);
#pragma unroll
                for (int i = 0; i < PRODUCTS * TILE_M / 2; ++i) {
                    promoted[i / (TILE_M / 2)][i % (TILE_M / 2)] += accum[i / (TILE_M / 2)][i % (TILE_M / 2)];
                }
            }
            if (part == 0) {
                if (k_tile > first) ring.template release<NEIGHBOURS>(previous);
                previous = ring.stage;
            }
        }
    }
    warpgroup_wait<0>();
    fence(accum);
#pragma unroll
    for (int i = 0; i < PRODUCTS * TILE_M / 2 && APART; ++i) {
        accum[i / (TILE_M / 2)][i % (TILE_M / 2)] = promoted[i / (TILE_M / 2)][i % (TILE_M / 2)];
    }
    sync_warp();
    ring.template release<NEIGHBOURS>(previous);
}
