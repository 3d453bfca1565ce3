// mainloop_sm90.cuh: the main loop of a GEMM by WGMMA with both operands in shared memory, for one consumer warpgroup.
//
// A k-tile is 128 bytes of each row of the operands, in TMA's 128-byte swizzle. Accumulators are M_SLICES matrices of
// 64 x N. `run` accumulates all of K in the tensor cores; `run_promoted` accumulates a piece of a k-tile at a time, and
// the threads add each piece to registers of their own (promotion), while WGMMAs fill a second set of accumulators;
// `run_promoted_at_once` has one set.
//
// Included by gemm_sm90, grouped_gemm_sm90 and, for the issue of WGMMAs, gemm_sm90_swap_ab, in which rows of b are a.
// Each defines SCALE_BLOCK before the include.
#pragma once
#include "block_scales.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

// K_PIECES, N_PIECES: a k-tile has so many pieces along K, and along the rows of b, N rows each; each piece is promoted
// separately. CLUSTER: CTAs that a multicast into the ring reaches.
// A_BY_THREADS: threads write the rows of a, by cp.async, and WGMMAs see these writes after a proxy fence.
// LATE_A: the descriptor of a is made after the wait. NVRTC schedules by the order of the text, and each kernel has
// fewer instructions with its own order.
template <typename T, int M_SLICES, int N, int K_PIECES, int N_PIECES, int STAGES, int STAGE_BYTES, int CLUSTER,
          bool A_BY_THREADS = false, bool LATE_A = false>
struct WgmmaMainloop {
    static constexpr int ROW_BYTES = 128, MMA_K_BYTES = 32;  // bytes of K of a k-tile and of one WGMMA
    static constexpr int PIECE_MMAS = ROW_BYTES / MMA_K_BYTES / K_PIECES, PIECES = K_PIECES * N_PIECES;
    using accum_t = wgmma_sum_t<T>[M_SLICES][N / 2];

    Ring<STAGES>& ring;
    const uint8_t* stages;         // the ring's first stage
    const int a_offset, b_offset;  // of the warpgroup's rows in a stage

    static DEVICE void fence(accum_t& accum) {
#pragma unroll
        for (int slice = 0; slice < M_SLICES; ++slice) warpgroup_fence_operand(accum[slice]);
    }

    // Waits for the stage, then issues and commits the WGMMAs of one piece of its k-tile.
    DEVICE void issue(accum_t& accum, bool accumulate, int piece = 0) const {
        const uint8_t* from = stages + ring.stage * STAGE_BYTES;
        uint64_t a = LATE_A ? 0 : make_smem_desc(from + a_offset);
        const uint64_t b = make_smem_desc(from + b_offset + piece % N_PIECES * N * ROW_BYTES);
        if (piece == 0) ring.wait();
        if constexpr (A_BY_THREADS) fence_proxy_async();
        fence(accum);
        warpgroup_arrive();
        if constexpr (LATE_A) a = make_smem_desc(from + a_offset);
#pragma unroll
        for (int i = 0; i < PIECE_MMAS; ++i) {
            const int at = (piece / N_PIECES * PIECE_MMAS + i) * MMA_K_BYTES;
#pragma unroll
            for (int slice = 0; slice < M_SLICES; ++slice) {
                wgmma<T, N>(accum[slice], advance_smem_desc(a, slice * 64 * ROW_BYTES + at), advance_smem_desc(b, at),
                            accumulate || i > 0);
            }
        }
        warpgroup_commit_batch();
        fence(accum);
    }

    // Accumulates k-tiles first ... last - 1. `issued` is called when the last WGMMA is issued, and not yet complete.
    template <typename Issued>
    DEVICE void run(accum_t& accum, int first, int last, Issued issued) {
        int previous = 0;  // stage of the previous k-tile
        for (int k_tile = first; k_tile < last; ++k_tile, ring.advance()) {
            issue(accum, k_tile > first);
            warpgroup_wait<1>();  // for the WGMMAs of the previous k-tile
            if (k_tile > first) ring.template release<CLUSTER>(previous);
            previous = ring.stage;
        }
        issued();
        warpgroup_wait<0>();
        fence(accum);
        ring.template release<CLUSTER>(previous);
    }

    // Releases k-tiles first ... last - 1, which the warpgroup does not need.
    DEVICE void skip(int first, int last) {
        for (int k_tile = first; k_tile < last; ++k_tile, ring.advance()) {
            ring.wait();
            sync_warp();  // all lanes must have seen the phase before one lane releases the stage
            ring.template release<CLUSTER>(ring.stage);
        }
    }

    // Accumulates k-tiles first ... last - 1 and promotes each piece before the next is issued, with one set of
    // accumulators: start(k_tile, piece) issues a piece of a k-tile and loads what promote(piece) needs.
    template <typename Start, typename Promote>
    DEVICE void run_promoted_at_once(int first, int last, Start start, Promote promote) {
        for (int k_tile = first; k_tile < last; ++k_tile, ring.advance()) {
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                start(k_tile, piece);
                warpgroup_wait<0>();
                if (piece == PIECES - 1) ring.template release<CLUSTER>(ring.stage);
                promote(piece);
            }
        }
    }

    // Accumulates k-tiles first ... last - 1 piece by piece, in accums[0] and accums[1] alternately. start(piece, now)
    // issues a piece into accums[now] and loads what promote(now) needs, which promotes the complete accums[now].
    template <typename Start, typename Promote>
    DEVICE void run_promoted(int first, int last, Start start, Promote promote) {
        // The WGMMAs of a piece run while the threads promote the previous piece.
        const auto next = [&](int piece, int now) {
            const int before = ring.stage;
            if (now % PIECES == 0) ring.advance();
            start(piece, now);
            warpgroup_wait<1>();
            if (now % PIECES == 0) ring.template release<CLUSTER>(before);
            promote(1 - now);
        };
        int piece = first * PIECES;
        start(piece++, 0);
        for (; piece + 1 < last * PIECES; piece += 2) {
            next(piece, 1);
            next(piece + 1, 0);
        }
        if (piece < last * PIECES) {
            next(piece, 1);
            warpgroup_wait<0>();
            promote(1);
        } else {
            warpgroup_wait<0>();
            promote(0);
        }
        ring.template release<CLUSTER>(ring.stage);
        ring.advance();
    }
};
