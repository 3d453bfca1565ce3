// prefill_sm90: attention prefill on Hopper, after FlashAttention-3 (arXiv:2407.08608). Computes what prefill_mma.cu
// does.
//
//     l_ij = softcap(scale * q_i . k_j) + slope * (j - limit_i)       limit_i - window < j <= limit_i
//     out_i = sum_j exp(l_ij - m_i) v_j / (sum_j exp(l_ij - m_i) + 1e-6),   m_i = max_j l_ij
//
// with limit_i = length - num_queries + i if CAUSAL, else length - 1.
//
// Scheduling (prefill_scheduler.cuh): a work item is some query tokens and a KV head. The kernel is persistent: one CTA
// per SM takes items from a counter, the last item first. Under CAUSAL the later items of a sequence take longer and
// should not be the tail.
//
// Warp specialisation: one warp of the last warpgroup is the producer, which loads queries, keys and values by TMA;
// another one finds work (prefill_loader.cuh). The other warpgroups are consumers with 64 rows each. A consumer goes
// through KV tiles of TOKENS keys from the last tile, which has the causal mask, to the first. It issues S = Q K^T of a
// tile together with O += P V of the previous tile. While P V runs, it updates the row max with the new tile, or
// computes some of its probabilities P. Consumers issue WGMMAs in ping-pong order, so that the softmax of one overlaps
// with the WGMMAs of the others.
//
// FP8 cache: both matmuls run in float16. The producer warpgroup's other warps convert fp8 values
// (prefill_fp8_to_half.cuh). Each consumer converts its rows of queries to float16, each row divided by a power of two.
// If registers allow, it keeps them as A fragments, which saves shared memory bandwidth.
//
// Constants
//     scalar_t       T: element type of queries and out: half_t or bf16_t
//     cache_t        element type of the caches: T or fp8_e4m3_t
//     table_t, length_t, starts_t    element types of block_tables, seq_lens and cu_seqlens_q
//     HEAD_SIZE      elements of a query or key of a head: a multiple of 8 (fp8 cache: 16), at most 256
//     VALUE_SIZE     elements of a value of a head: likewise, at most HEAD_SIZE
//     RAGGED         keys and values are ragged tensors (ragged.cuh), read as blocks of one slot; else a paged cache
//     BOX_TOKENS     tokens of a TMA box: a multiple of 8 that divides BLOCK_SIZE and TOKENS; RAGGED: TOKENS
//     WHOLE_HEADS    a box has all panels of its tokens, else one panel; fp8 cache: false, and a box has whole heads
//     GROUP          query heads per KV head
//     PACKED_HEADS   query heads of a work item: a divisor of GROUP, at most ITEM_ROWS
//     TOKENS         keys of a KV tile; a multiple of 16
//     STAGES         stages of the key ring, and of the value ring
//     QUERY_STAGES   stages of the query ring: work items with queries in shared memory
//     CODE_STAGES    stages of the ring of fp8 tiles
//     CONSUMERS      consumer warpgroups: 1 to 3
//     MIN_BLOCKS     CTAs of an SM: 1, or 2 with one consumer warpgroup
//     CAUSAL         a query token sees the keys up to its own position, else all keys
//     HEAD_SCALES    each KV head of an fp8 cache has its own scales; needs logits that are linear in the scores
//     HAS_SPLITS     split-KV: an item may have several splits, which prefill_combine.cu combines
//     HAS_STARTS     cu_seqlens_q is given; else each sequence has one query token
//     P_HI_LO        probabilities are split into hi + lo of T, as in attention_decode.cu, and added up unrounded; needs
//                    HAS_SPLITS

#include "attention.cuh"

// Element type of both matmuls. For an fp8 cache it is float16, which represents every fp8 value and takes one
// instruction for two of them; bfloat16 takes four.
using product_t = conditional_t<is_same<cache_t, scalar_t>, scalar_t, half_t>;

#include "prefill_fp8_to_half.cuh"
#include "prefill_epilogue.cuh"
#include "prefill_softmax.cuh"
#include "prefill_loader.cuh"
#include "query_rows.cuh"
#include "wgmma.cuh"

constexpr int NUM_THREADS = 128 * (CONSUMERS + 1), STEPS = ceil_div(HEAD_SIZE, 16);
// Registers per thread. The producer releases what the consumers take (setmaxnreg).
constexpr int PRODUCER_REGISTERS = VALUE_SIZE <= 192 || IS_FP8 || !WHOLE_HEADS || HAS_SPLITS ? 56 : 40;
constexpr bool MOVES_REGISTERS = NUM_THREADS * MIN_BLOCKS > 256;  // otherwise a thread has 255 anyway
constexpr int CONSUMER_REGISTERS = CONSUMERS == 1   ? 256 - PRODUCER_REGISTERS
                                   : CONSUMERS == 3 ? 152
                                                    : (PRODUCER_REGISTERS == 56 ? 224 : 232);
// A thread computes the exponentials of this many elements before it waits for P V of the previous tile:
// docs/performance/prefill.md, "The wait for P V".
constexpr int BEFORE_WAIT = ROW_SUMS_BY_WGMMA ? 0 : HAS_SOFTCAP ? TOKENS / 2 : HAS_REGISTERS ? 0 : TOKENS / 4;
// Named barriers: TURNS + w orders the WGMMAs of consumer w (ping-pong), QUERIES + w synchronises its converted
// queries, DIVISION the warps that divide the keys.
constexpr int TURNS = 1, QUERIES = TURNS + CONSUMERS, DIVISION = QUERIES + CONSUMERS;
// docs/performance/prefill.md, "Queries as operands in registers".
constexpr bool QUERIES_IN_REGISTERS = IS_FP8 && HEAD_SIZE <= 128 && CONSUMERS == 2 && !HAS_SOFTCAP && !HAS_ALIBI;
static_assert(HEAD_SIZE % 8 == 0 && VALUE_SIZE % 8 == 0 && TOKENS % 16 == 0 && TOKENS % BOX_TOKENS == 0);
static_assert(!IS_FP8 || (HEAD_SIZE % 16 == 0 && VALUE_SIZE % 16 == 0));
static_assert(BOX_TOKENS % 8 == 0 && (RAGGED || BLOCK_SIZE % BOX_TOKENS == 0) && BOXES <= WARP_SIZE);
static_assert(!IS_FP8 || (is_same<cache_t, fp8_e4m3_t> && !WHOLE_HEADS));
static_assert(!HEAD_SCALES || !(HAS_SOFTCAP || HAS_ALIBI));
static_assert(!P_HI_LO || (HAS_SPLITS && !IS_FP8));

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
prefill_sm90(const __grid_constant__ TensorMap query_map,  // [num_tokens, num_heads, HEAD_SIZE]; boxes of
                                                           // ITEM_TOKENS x PACKED_HEADS x a panel
             const __grid_constant__ TensorMap key_map,    // [num_blocks, BLOCK_SIZE, num_kv_heads,
                                                           // HEAD_SIZE]; 1 x BOX_TOKENS x 1 x a panel.
                                                           // WHOLE_HEADS: [num_blocks, BLOCK_SIZE / 8,
                                                           // panels of a token, 8, a panel]; 1 x
                                                           // BOX_TOKENS / 8 x PANELS x 8 x a panel.
                                                           // RAGGED: [num_blocks, num_kv_heads,
                                                           // HEAD_SIZE]; BOX_TOKENS x 1 x a panel
             const __grid_constant__ TensorMap value_map,  // likewise, with VALUE_SIZE
             scalar_t* out,                                // [num_tokens, num_heads, VALUE_SIZE]
             float* lse,                                   // [num_heads, num_tokens]
             const table_t* block_tables,                  // [num_seqs, max_tokens / BLOCK_SIZE]
             const length_t* seq_lens,                     // [num_seqs]; RAGGED: cu_seqlens_k
             const starts_t* cu_seqlens_q,                 // [num_seqs + 1]
             const float* alibi_slopes,                    // [num_heads]
             const float* sinks,                           // [num_heads]
             const float* k_scale, const float* v_scale,   // [1] or [num_kv_heads]
             float* tmp_out,                               // [num_tokens, num_heads, max_splits, VALUE_SIZE]
             float* max_logits,                            // [num_tokens, num_heads, max_splits]
             float* exp_sums,                              // [num_tokens, num_heads, max_splits]
             int* split_counts,                            // [num_tokens, num_heads] zeros: of rows with several splits
             uint32_t* items_taken,                        // [1], zero before and after
             int64_t num_tokens, int64_t num_seqs, int64_t min_tokens, int64_t num_blocks, int64_t num_kv_heads,
             int64_t key_head_pitch, int64_t value_head_pitch, int64_t section_heads, int64_t num_items,
             int64_t max_tokens, int64_t sliding_window, int64_t max_splits, int64_t out_stride, int64_t table_stride,
             int64_t table_step, int64_t length_step, int64_t starts_step, float scale, float logits_soft_cap) {
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
    // An 8 x 8 core matrix of ones. It serves as both halves (along 16 keys) of a B operand of 8 columns.
    __shared__ __align__(128) uint32_t ones[ROW_SUMS_BY_WGMMA ? 32 : 1];
    if (ROW_SUMS_BY_WGMMA && threadIdx.x < 32) {
        ones[threadIdx.x] = PAIR_OF_ONES<product_t>;
        fence_proxy_async();
    }
    prefetch_tensor_maps(query_map, key_map, value_map);
    __syncthreads();
    await_previous_kernel();
    const Window window{int(sliding_window)};
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;

    if (warpgroup == CONSUMERS) {
        if constexpr (MOVES_REGISTERS) warpgroup_reg_dealloc<PRODUCER_REGISTERS, MIN_BLOCKS>();
        const Sequences sequences{cu_seqlens_q, seq_lens,   starts_step, length_step,  num_seqs,
                                  num_tokens,   min_tokens, max_tokens,  num_kv_heads, section_heads,
                                  max_splits,   num_items,  &division};
        if constexpr (HAS_SPLITS) sequences.divide<DIVISION>(window);
        if (warp <= HAS_FINDER) {
            Finder finder{sequences, window, block_tables, table_stride, table_step, num_blocks, items_taken};
            if (warp == 1) return finder.run(tiles);
            Producer producer{
                tiles, finder,      window, &query_map, {&key_map, key_head_pitch}, {&value_map, value_head_pitch},
                lane,  lane % BOXES};
            producer.run();
        } else if constexpr (IS_FP8) {
            widen_tiles(tiles);
        } else if (warp == 2) {
            clear_partial_tiles(tiles);
        }
        return;
    }

    if constexpr (MOVES_REGISTERS) warpgroup_reg_alloc<CONSUMER_REGISTERS, MIN_BLOCKS>();
    Softmax softmax(window, scale * (IS_FP8 ? *k_scale : 1.0f), logits_soft_cap, warpgroup);
    float (&s)[TOKENS / 2] = softmax.s;
    const auto release = [&](const auto& ring) {
        sync_warp();
        ring.release(ring.stage);
    };
    // Ping-pong: the consumers issue WGMMAs one after another.
    const auto await_turn = [&] {
        if constexpr (CONSUMERS > 1) named_barrier_sync(TURNS + warpgroup, 256);
    };
    const auto end_turn = [&] {
        if constexpr (CONSUMERS > 1) named_barrier_arrive(TURNS + (warpgroup + 1) % CONSUMERS, 256);
    };
    if (warpgroup == CONSUMERS - 1) end_turn();

    const Results results{out,   lse,     tmp_out,    max_logits, exp_sums,   split_counts,
                          sinks, v_scale, num_tokens, max_splits, out_stride, num_kv_heads * GROUP};
    float o[VALUE_COLUMNS / 2];
    uint32_t q[QUERIES_IN_REGISTERS ? STEPS : 1][4];
    float row_sums[4];               // row sums by WGMMA: elements 0 and 2 for the lane's two rows
    const auto start_logits = [&] {  // S = Q K^T
        const uint64_t a = make_smem_desc<PANEL_SWIZZLE>(tiles.queries + tiles.query.stage * QUERY_BYTES +
                                                         softmax.first_row * ROW_BYTES);
        const uint64_t b =
            make_smem_desc<PANEL_SWIZZLE>(tiles.keys + tiles.key.stage * KeyTile::BYTES, KeyTile::TOKEN_STRIDE);
        tiles.key.wait();
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const int of_queries = i / PANEL_SLICES * QUERY_PANEL + i % PANEL_SLICES * 32;
            const uint64_t of_keys = advance_smem_desc(b, KeyTile::slice(i));
            if constexpr (QUERIES_IN_REGISTERS) wgmma<product_t, TOKENS>(s, q[i], of_keys, i > 0);
            else wgmma<product_t, TOKENS>(s, advance_smem_desc(a, of_queries), of_keys, i > 0);
        }
        warpgroup_commit_batch();
    };
    const auto start_output = [&](bool accumulate) {  // O += P V, and the row sums of P
        const uint64_t b = make_smem_desc<PANEL_SWIZZLE>(tiles.values + tiles.value.stage * ValueTile::BYTES,
                                                         ValueTile::TOKEN_STRIDE, PANEL_STRIDE);
        tiles.value.wait();
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < TOKENS / 16; ++i) {
            const uint64_t of_values = advance_smem_desc(b, i * 2 * ValueTile::TOKEN_STRIDE);
            wgmma<product_t, VALUE_COLUMNS, true>(o, softmax.p[i], of_values, accumulate || i > 0);
            if constexpr (P_HI_LO) wgmma<product_t, VALUE_COLUMNS, true>(o, softmax.p_lo[i], of_values, true);
            if constexpr (ROW_SUMS_BY_WGMMA) {
                wgmma<product_t, 8>(row_sums, softmax.p[i], make_smem_desc<SWIZZLE_NONE>(ones, 128, 0),
                                    accumulate || i > 0);
            }
        }
        warpgroup_commit_batch();
    };
    const auto end_output = [&] {
        warpgroup_wait<0>();
        warpgroup_fence_operand(o);
        if constexpr (ROW_SUMS_BY_WGMMA) warpgroup_fence_operand(row_sums);
        release(tiles.value);
        tiles.value.advance();
    };

    const auto await_queries = [&] {
        tiles.query.wait();
        uint8_t* const queries = tiles.queries + tiles.query.stage * QUERY_BYTES;
        if constexpr (QUERIES_IN_REGISTERS) {
            const uint8_t* const rows = queries + (softmax.first_row + warp * 16) * ROW_BYTES;
            load_query_rows<scalar_t, QUERY_PANEL>(q, softmax.q_descale, rows);
        } else if constexpr (CONVERTS_QUERIES) {
            // Recomputed for each item: the main loop has no registers for addresses and the number of the barrier.
            const int thread = made_anew(threadIdx.x), row = thread / 32 * 16 + thread % 32 / 4;
            uint8_t* const first = queries + row * ROW_BYTES;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint8_t* const own = first + half * 8 * ROW_BYTES;
                softmax.q_descale[half] = convert_query_row<scalar_t, PANELS, QUERY_PANEL>(own, row, thread % 4);
            }
            fence_proxy_async();
            named_barrier_sync(QUERIES + thread / 128, 128);
        }
    };
    await_queries();
    start_logits();
    while (works[tiles.query.stage].tokens > 0) {
        const Work work = works[tiles.query.stage];
        if (QUERIES_IN_REGISTERS) release(tiles.query);
        if (IS_FP8 && HEAD_SCALES) softmax.scale_log2 = logit_unit<false>(scale * k_scale[work.kv_head], 0.0f);
        softmax.begin(work, alibi_slopes);
        const auto release_keys = [&](int tile) {
            release(tiles.key);
            tiles.key.advance();
            if (!QUERIES_IN_REGISTERS && EARLY_QUERIES && tile == work.first_tile)
                tiles.query.release(tiles.query.stage);
        };

        uint32_t invalid_boxes = HAS_INVALID_PAGES ? invalid_pages[tiles.key.stage] : 0;
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
        release_keys(work.last_tile);
        softmax.begin_tile(work.last_tile, invalid_boxes);
        softmax.update_row_max<true>(work.last_tile, invalid_boxes);
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i) {
            softmax.p[i / 4][i % 4] = 0;
            if (P_HI_LO) softmax.p_lo[i / 4][i % 4] = 0;
        }
        softmax.each_visible_chunk([&](int c) {
            softmax.exponentials(c, c + FIRST_CHUNK / 2);
            softmax.round_probabilities(c, c + FIRST_CHUNK / 2);
        });

        bool accumulate = false;
        for (int tile = work.last_tile - 1; tile >= work.first_tile; --tile) {
            await_turn();
            start_logits();
            invalid_boxes = HAS_INVALID_PAGES ? invalid_pages[tiles.key.stage] : 0;
            start_output(accumulate);
            accumulate = true;
            end_turn();
            softmax.begin_tile(tile, invalid_boxes);
            warpgroup_wait<1>();
            warpgroup_fence_operand(s);
            release_keys(tile);
            const auto finish = [&](auto become_probabilities) {
                if constexpr (BEFORE_WAIT > 0) {
                    become_probabilities(0, BEFORE_WAIT);
                    warpgroup_fence_operand(s);
                    hold_next_wait(fminf(softmax.exp_sum[0], softmax.exp_sum[1]));
                }
                end_output();
                if (softmax.needs_rescale) {
                    softmax.rescale(o);
                    softmax.rescale(row_sums);
                }
                // Rounding overlaps with the exponentials after the wait.
                become_probabilities(BEFORE_WAIT, TOKENS / 2);
                softmax.round_probabilities(0, TOKENS / 2);
            };
            if (HAS_FAST_PATH && softmax.takes_fast_path()) {
                softmax.needs_rescale = false;
                finish([&](int begin, int end) { softmax.fast_path_exponentials(begin, end); });
            } else {
                softmax.update_row_max<false>(tile, invalid_boxes);
                finish([&](int begin, int end) { softmax.exponentials(begin, end); });
            }
        }
        if (!QUERIES_IN_REGISTERS && !EARLY_QUERIES) release(tiles.query);
        start_output(accumulate);
        end_output();
        if (ROW_SUMS_BY_WGMMA) {  // all four lanes of a row have the row sum; store() adds the lanes
            softmax.exp_sum[0] = 0.25f * row_sums[0];
            softmax.exp_sum[1] = 0.25f * row_sums[2];
        }

        results.store(work, o, softmax.row_max, softmax.exp_sum);
        // The store comes first: the next item's queries arrive later than this item's last WGMMA ends.
        tiles.query.advance();
        await_queries();
        start_logits();
    }
    warpgroup_wait<0>();
}
