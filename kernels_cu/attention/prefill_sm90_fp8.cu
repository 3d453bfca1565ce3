// prefill_sm90_fp8: attention prefill on Hopper with e4m3 queries, keys and values; both matmuls run in FP8.
//
//     l_ij = scale * q_scale * k_scale * q_i . k_j            limit_i - window < j <= limit_i
//     p_ij = e4m3(2^8 exp(l_ij - m_i))                        m_i: about max_j l_ij
//     out_i = v_scale * sum_j p_ij v_j / (sum_j p_ij + 2^8 * 1e-6)
//
// After FlashAttention-3 (arXiv:2407.08608). Work items, warp specialisation and ping-pong are those of
// prefill_sm90.cu. The warps next to the producer transpose value tiles (prefill_transpose.cuh).
//
// FP8 WGMMA accumulates with 14 bits of mantissa (wgmma.cuh), so the accumulators of many tiles would lose the next
// tile. P V of each tile is therefore computed in accumulators of its own, PIECE elements of the head at a time, and
// promoted to the item's float32 accumulators. With OVERLAP the first piece is issued together with S = Q K^T of the
// next tile, and the others overlap with the exponentials. Without, a warpgroup's softmax overlaps with the WGMMAs of
// the others, and the registers that this leaves free allow larger tiles or a third warpgroup.
//
// Constants
//     scalar_t       T: element type of out: half_t or bf16_t
//     cache_t        fp8_e4m3_t: element type of queries and caches
//     table_t, length_t, starts_t    element types of block_tables, seq_lens and cu_seqlens_q
//     HEAD_SIZE      64, 128 or 256
//     TOKENS         keys of a KV tile: a multiple of 32
//     OVERLAP        Q K^T of the next tile is in flight with P V of the current one; otherwise it follows, and P V
//                    takes the registers of S
//     PING_PONG      consumers alternate in issuing WGMMAs
//     VALUE_SIZE     HEAD_SIZE
//     BOX_TOKENS, WHOLE_HEADS, GROUP, STAGES, QUERY_STAGES, CODE_STAGES, CONSUMERS, CAUSAL    as in prefill_sm90.cu
//     HEAD_SCALES    each KV head has its own scales of keys and values
//     HAS_SPLITS     as in prefill_sm90.cu

#include "attention.cuh"

using product_t = cache_t;  // element type of both matmuls
constexpr bool HAS_SOFTCAP = false, HAS_ALIBI = false, HAS_STARTS = true, P_HI_LO = false;

#include "prefill_epilogue.cuh"
#include "prefill_softmax.cuh"
#include "prefill_loader.cuh"
#include "prefill_transpose.cuh"
#include "wgmma.cuh"

constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int DEPTH = 32;                                                   // K of one WGMMA
constexpr int PIECE = CONSUMERS == 3 || TOKENS % 64 || !OVERLAP ? 32 : 64;  // N of a piece of P V, limited by registers
constexpr int PIECES = HEAD_SIZE / PIECE;
constexpr int PIECES_IN_FLIGHT = OVERLAP || PIECES == 1 ? 1 : 2;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = CONSUMERS == 3 ? 152 : 224;
// Named barriers: TURNS + w orders the WGMMAs of consumer w (ping-pong), DIVISION the warps that divide the keys.
constexpr int TURNS = 1, DIVISION = 1 + CONSUMERS;
constexpr uint32_t FOUR_ONES = 0x38383838u;
static_assert(is_same<product_t, fp8_e4m3_t> && VALUE_SIZE == HEAD_SIZE && part_rows(TOKENS - DEPTH) % PIECE == 0);
static_assert(BOX_TOKENS % 8 == 0 && BLOCK_SIZE % BOX_TOKENS == 0 && TOKENS % BOX_TOKENS == 0 && BOXES <= WARP_SIZE);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
prefill_sm90_fp8(const __grid_constant__ TensorMap query_map,  // [num_tokens, num_heads, HEAD_SIZE]
                 const __grid_constant__ TensorMap key_map,    // boxes as in prefill_sm90.cu
                 const __grid_constant__ TensorMap value_map,
                 scalar_t* out,                               // [num_tokens, num_heads, HEAD_SIZE]
                 float* lse,                                  // [num_heads, num_tokens]
                 const table_t* block_tables,                 // [num_seqs, max_tokens / BLOCK_SIZE]
                 const length_t* seq_lens,                    // [num_seqs]
                 const starts_t* cu_seqlens_q,                // [num_seqs + 1]
                 const float* sinks,                          // [num_heads]
                 const float* q_scale,                        // [1] or [num_kv_heads], stride q_scale_step; null: 1
                 const float* k_scale, const float* v_scale,  // [1] or [num_kv_heads]
                 float* tmp_out,                              // partial results as in prefill_sm90.cu
                 float* max_logits, float* exp_sums, int* split_counts,
                 uint32_t* items_taken,  // [1], zero before and after
                 int64_t num_tokens, int64_t num_seqs, int64_t min_tokens, int64_t num_blocks, int64_t num_kv_heads,
                 int64_t key_head_pitch, int64_t value_head_pitch, int64_t section_heads, int64_t num_items,
                 int64_t max_tokens, int64_t sliding_window, int64_t max_splits, int64_t q_scale_step,
                 int64_t out_stride, int64_t table_stride, int64_t table_step, int64_t length_step, int64_t starts_step,
                 float scale) {
    // Until the previous kernel ends, the CTA prepares its shared memory.
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ Work works[QUERY_STAGES];
    __shared__ Codes kinds[CODE_STAGES];
    __shared__ uint32_t invalid_pages[STAGES];
    __shared__ Found found;
    __shared__ PartialTile partial_tile;
    __shared__ Division division;
    Tiles tiles(shared, works, invalid_pages, kinds, &found, &partial_tile);
    tiles.init<NUM_THREADS>();
    // An 8 x 16 core matrix of ones. It serves as both halves (along 32 keys) of a B operand of 8 columns.
    __shared__ __align__(128) uint32_t ones[ROW_SUMS_BY_WGMMA ? 32 : 1];
    if (ROW_SUMS_BY_WGMMA && threadIdx.x < 32) {
        ones[threadIdx.x] = FOUR_ONES;
        fence_proxy_async();
    }
    prefetch_tensor_maps(query_map, key_map, value_map);
    __syncthreads();
    await_previous_kernel();
    const Window window{int(sliding_window)};
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;

    if (warpgroup == CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        const Sequences sequences{cu_seqlens_q, seq_lens,   starts_step, length_step,  num_seqs,
                                  num_tokens,   min_tokens, max_tokens,  num_kv_heads, section_heads,
                                  max_splits,   num_items,  &division};
        if constexpr (HAS_SPLITS) sequences.divide<DIVISION>(window);
        if (warp == 0) {
            Finder finder{sequences, window, block_tables, table_stride, table_step, num_blocks, items_taken};
            Producer producer{
                tiles, finder,      window, &query_map, {&key_map, key_head_pitch}, {&value_map, value_head_pitch},
                lane,  lane % BOXES};
            producer.run();
        } else {
            transpose_tiles(tiles);
        }
        return;
    }

    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    Softmax softmax(window, scale, 0.0f, warpgroup);
    const auto release = [&](const auto& ring) {
        sync_warp();
        ring.release(ring.stage);
    };
    // Ping-pong: the consumers issue the WGMMAs of an iteration one after another.
    const auto await_turn = [&] {
        if (PING_PONG) named_barrier_sync(TURNS + warpgroup, 256);
    };
    const auto end_turn = [&] {
        if (PING_PONG) named_barrier_arrive(TURNS + (warpgroup + 1) % CONSUMERS, 256);
    };
    if (warpgroup == CONSUMERS - 1) end_turn();

    const Results results{out,   lse,     tmp_out,    max_logits, exp_sums,   split_counts,
                          sinks, v_scale, num_tokens, max_splits, out_stride, num_kv_heads * GROUP};
    float o[HEAD_SIZE / 2], pieces[PIECES_IN_FLIGHT][PIECE / 2];
    float tile_sums[4], row_sums[2];  // row sums of P by WGMMA, of a tile (elements 0 and 2) and of the item
    const auto start_logits = [&] {   // S = Q K^T
        const int first_row = warpgroup * 64;
        const uint64_t a = make_smem_desc(tiles.queries + tiles.query.stage * QUERY_BYTES + first_row * ROW_BYTES);
        const uint64_t b = make_smem_desc(tiles.keys + tiles.key.stage * KeyTile::BYTES, KeyTile::TOKEN_STRIDE);
        tiles.key.wait();
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < HEAD_SIZE / DEPTH; ++i) {
            wgmma<product_t, TOKENS>(softmax.s, advance_smem_desc(a, i / 4 * QUERY_PANEL + i % 4 * DEPTH),
                                     advance_smem_desc(b, i / 4 * PANEL_STRIDE + i % 4 * DEPTH), i > 0);
        }
        warpgroup_commit_batch();
    };
    // Issues P V of PIECE elements, and with the first piece the row sums of P.
    const auto start_piece = [&](int n) {
        const uint64_t b = make_smem_desc(tiles.values + tiles.value.stage * ValueTile::BYTES);
        if (n == 0) tiles.value.wait();
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < TOKENS / DEPTH; ++i) {
            wgmma<product_t, PIECE>(pieces[n % PIECES_IN_FLIGHT], softmax.p[i],
                                    advance_smem_desc(b, place_of_values(n * PIECE, i * DEPTH)), i > 0);
            if (ROW_SUMS_BY_WGMMA && n == 0) {
                wgmma<product_t, 8>(tile_sums, softmax.p[i], make_smem_desc<SWIZZLE_NONE>(ones, 128, 0), i > 0);
            }
        }
        warpgroup_commit_batch();
    };
    const auto start_pieces = [&] {
#pragma unroll
        for (int n = 0; n < PIECES_IN_FLIGHT; ++n) start_piece(n);
    };
    // Promotes P V of a tile to the item's accumulators. The first pieces are already in flight. beside(n) runs while
    // piece n + 1 is computed.
    const auto add_pieces = [&](auto beside) {
#pragma unroll
        for (int n = 0; n < PIECES; ++n) {
            auto& piece = pieces[n % PIECES_IN_FLIGHT];
            if (n + PIECES_IN_FLIGHT <= PIECES) warpgroup_wait<PIECES_IN_FLIGHT - 1>();
            else warpgroup_wait<0>();
            warpgroup_fence_operand(piece);
#pragma unroll
            for (int i = 0; i < PIECE / 2; ++i) o[n * (PIECE / 2) + i] += piece[i];
            if (ROW_SUMS_BY_WGMMA && n == 0) {
                warpgroup_fence_operand(tile_sums);
                row_sums[0] += tile_sums[0];
                row_sums[1] += tile_sums[2];
            }
            if (n + PIECES_IN_FLIGHT < PIECES) {
                start_piece(n + PIECES_IN_FLIGHT);
            } else if (n + 1 == PIECES) {
                release(tiles.value);
                tiles.value.advance();
            }
            beside(n);
        }
    };

    tiles.query.wait();
    start_logits();
    while (works[tiles.query.stage].tokens > 0) {
        const Work work = works[tiles.query.stage];
        const float query_scale = q_scale ? q_scale[work.kv_head * q_scale_step] : 1.0f;
        softmax.scale_log2 = logit_unit<false>(scale * (query_scale * k_scale[HEAD_SCALES ? work.kv_head : 0]), 0.0f);
        softmax.begin(work, nullptr);
        const auto release_keys = [&](int tile) {
            release(tiles.key);
            tiles.key.advance();
            if (EARLY_QUERIES && tile == work.first_tile) tiles.query.release(tiles.query.stage);
        };
#pragma unroll
        for (int i = 0; i < HEAD_SIZE / 2; ++i) o[i] = 0.0f;
        row_sums[0] = row_sums[1] = 0.0f;

        uint32_t invalid_boxes = invalid_pages[tiles.key.stage];
        warpgroup_wait<0>();
        warpgroup_fence_operand(softmax.s);
        release_keys(work.last_tile);
        softmax.begin_tile(work.last_tile, invalid_boxes);
        softmax.update_row_max<true>(work.last_tile, invalid_boxes);
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) softmax.p[i / 4][i % 4] = 0;
        softmax.each_visible_chunk([&](int c) {
            softmax.exponentials(c, c + FIRST_CHUNK / 2);
            softmax.round_probabilities(c, c + FIRST_CHUNK / 2);
        });

        for (int tile = work.last_tile - 1; tile >= work.first_tile; --tile) {
            await_turn();
            if constexpr (!OVERLAP) {
                start_pieces();
                add_pieces([](int) {});
                // ptxas otherwise sinks the last promotion into the softmax, and the piece's registers are those of S.
                hold_next_wait<HEAD_SIZE / 2 - PIECE / 2>(o);
            }
            start_logits();
            invalid_boxes = invalid_pages[tiles.key.stage];
            if constexpr (OVERLAP) start_pieces();
            end_turn();
            softmax.begin_tile(tile, invalid_boxes);
            warpgroup_wait<OVERLAP ? 1 : 0>();
            warpgroup_fence_operand(softmax.s);
            release_keys(tile);
            softmax.update_row_max<false>(tile, invalid_boxes);
            if constexpr (OVERLAP) {
                add_pieces([&](int n) {
                    if (n == 0) softmax.exponentials(0, TOKENS / 2);
                });
            } else {
                softmax.exponentials(0, TOKENS / 2);
            }
            if (softmax.needs_rescale) {
#pragma unroll
                for (int i = 0; i < HEAD_SIZE / 2; ++i) o[i] *= softmax.correction[i / 2 % 2];
                row_sums[0] *= softmax.correction[0];
                row_sums[1] *= softmax.correction[1];
            }
            softmax.round_probabilities(0, TOKENS / 2);
        }
        if (!EARLY_QUERIES) release(tiles.query);
        start_pieces();
        add_pieces([](int) {});
        if (ROW_SUMS_BY_WGMMA) {  // all four lanes of a row have the row sum; store() adds the lanes
            softmax.exp_sum[0] = 0.25f * row_sums[0];
            softmax.exp_sum[1] = 0.25f * row_sums[1];
        }

        results.store(work, o, softmax.row_max, softmax.exp_sum);
        // The store comes first: the next item's queries arrive later than this item's last WGMMA ends.
        tiles.query.advance();
        tiles.query.wait();
        start_logits();
    }
    warpgroup_wait<0>();
}
