// mla_decode_sm90: MLA decode attention on Hopper: computes what mla_decode.cu does, with WGMMA and TMA.
//
//     l_i = scale * (q_nope . c_i + q_pe . r_i)                       0 <= i < length
//     out = sum_i exp(l_i - m) c_i / (sum_i exp(l_i - m) + 1e-6),     m = max_i l_i
//
// An entry of the cache is a latent vector c_i and a rotated key r_i (RoPE): the key of every head. c_i is the value.
//
// Grid: blockIdx.x counts groups of CLUSTER * HEADS heads; blockIdx.y counts shares of the tokens of all sequences
// (mla_schedule.cuh) and, fastest, the CTAs of a cluster. A CTA has HEADS heads. The CTAs of a cluster go through the
// same entries, and each converts a part of them for all.
//
// Warp specialisation: the last warpgroup loads pairs of tiles of TOKENS entries (mla_tiles.cuh). Each of the other two
// computes the scores of one tile of a pair, and half of the output columns from the probabilities of both tiles:
//
//     warpgroup 0                                         warpgroup 1
//     S0 = Q K0^T,  m0 = max(m, S0)           -- m0 -->   S1 = Q K1^T
//     P0 = exp(S0 - m0)                                   m1 = max(m0, S1),  P1 = exp(S1 - m1)
//     L = L exp(m - m0) + P0 V0[left]       <- m1, P1 --  R = R exp(m - m1) + P1 V1[right]
//     P0 = P0 exp(m0 - m1)                    -- P0 -->
//     L = L exp(m0 - m1) + P1 V1[left]                    R = R + P0 V0[right]
//
// A warpgroup has its own probabilities as A fragments in registers. The other warpgroup reads them from shared memory:
// they overwrite the last panel of their tile, the rotated keys, which no MMA needs any more.
//
// A token with an invalid page or slot number contributes nothing, and neither does a slot after the end of the
// sequence.
//
// Constants
//     query_t        element type of queries: half_t or bf16_t
//     cache_t        element type of the cache: query_t or fp8_e4m3_t
//     out_t, table_t, length_t    element types of out, page_table and seq_lens
//     PAGE_SIZE      slots of a page of the cache
//     LISTS_SLOTS    page_table lists the slot of each token (mla_tokens.cuh)
//     QUERY_TOKENS   query tokens of a sequence; its heads are those of each token (mla_tokens.cuh)
//     HAS_LENGTHS    seq_lens is given; otherwise every sequence has max_tokens tokens
//     BOX_TOKENS     entries of a TMA box: a multiple of 8 that divides TOKENS and PAGE_SIZE; 1: no boxes, a warpgroup
//                    loads entry after entry, as lists of slots and an fp8 cache need
//     HALF_BOXES     a box has the four panels of a half (rotated keys: one panel); else one panel
//     CLUSTER        CTAs of a cluster: 1, or, with IS_DS_MLA, 2
//     IS_DS_MLA      the cache has the format "fp8_ds_mla" (mla_entry.cuh)
//     COMBINES       the CTAs combine the pieces of a sequence (mla_tree_combine.cuh); otherwise mla_combine.cu does

#include "attention.cuh"
#include "mla_code_loader.cuh"
#include "mla_row_loader.cuh"
#include "mla_tree_combine.cuh"
#include "wgmma.cuh"

constexpr int HEADS = 64;
// Named barriers: each signals that its data is in shared memory.
constexpr int EVEN_MAX = 1, ODD_PROBABILITIES = 2, EVEN_PROBABILITIES = 3, OWN_TILE = 4, EXP_SUMS = 6, QUERIES = 8;
// Registers per thread. The loaders release the registers that the consumers take (setmaxnreg).
constexpr int LOADER_REGISTERS = IS_FP8 ? 88 : COPIES_ROWS ? 56 : 40, REGISTERS = (3 * 168 - LOADER_REGISTERS) / 2;
// The last pairs of an item may have tokens to which not all query tokens attend.
constexpr int MASKED_PAIRS = ceil_div(QUERY_TOKENS - 1, 2 * TOKENS) + 1;
// EARLY_SCORES: warpgroup 0 starts the scores of its next tile before the MMAs with the odd tile's values end.
constexpr bool EARLY_SCORES = COPIES_ROWS;
// Bytes from a staged row of partial results, half of a head's, to the next one: eight rows are in different banks.
constexpr int STAGED_PITCH = LATENT_SIZE / 2 * 4 + 32;
static_assert(2 * HEADS * STAGED_PITCH <= STAGES * TILE_BYTES);
static_assert(IS_FP8 || !IS_DS_MLA);
static_assert(TOKENS % BOX_TOKENS == 0 && PAGE_SIZE % BOX_TOKENS == 0);
static_assert(!HAS_BOXES || (!LISTS_SLOTS && BOX_TOKENS % 8 == 0));

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(384, 1) mla_decode_sm90(
    const __grid_constant__ TensorMap nope_map,   // [num_seqs, num_heads, LATENT_SIZE]; 1 x HEADS x a panel
    const __grid_constant__ TensorMap pe_map,     // [num_seqs, num_heads, 64]; likewise
    const __grid_constant__ TensorMap cache_map,  // [num_pages, PAGE_SIZE, 576]; 1 x BOX_TOKENS x a panel
    const __grid_constant__ TensorMap half_map,   // [num_pages, PAGE_SIZE / 8, 9, 8, 64]; boxes of 1 x
                                                  // BOX_TOKENS / 8 x 4 x 8 x 64, if HALF_BOXES
    out_t* out,                                   // [num_seqs, num_heads, LATENT_SIZE]
    float* lse,                                   // [num_seqs, num_heads]
    const cache_t* kv_c_and_k_pe_cache,  // [num_pages, PAGE_SIZE, an entry]; without boxes: loaded without a tensor map
    float* tmp_out,                      // [slots, num_heads, LATENT_SIZE]; COMBINES: partials of TreeCombine
    float* max_logits,                   // [slots, num_heads], in units of log 2
    float* exp_sums,                     // [slots, num_heads]
    MlaPieces* pieces,                   // [num_seqs]
    uint32_t* nodes,                     // [shares, head groups, 8], if COMBINES
    const length_t* seq_lens,            // [num_seqs]
    const table_t* page_table,           // [num_seqs, max_pages]
    int64_t num_seqs, int64_t num_heads, int64_t num_pages, int64_t max_tokens, int64_t max_splits, int64_t out_stride,
    int64_t page_stride, int64_t slot_stride, int64_t table_stride, int64_t table_step, int64_t length_step,
    float join_units, float piece_units, float level_units, int64_t item_units, float scale) {
    // Until the previous kernel ends, the CTA prepares its shared memory.
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t queries_full;
    __shared__ uint64_t full[STAGES * PANELS];
    __shared__ uint64_t empty[STAGES * 2];
    __shared__ uint64_t exists[STAGES];
    __shared__ float4 scales[SCALES];
    __shared__ float even_max[HEADS];
    __shared__ float odd_max[HEADS];
    __shared__ float own_sums[2 * HEADS];  // [warpgroup][head]: row sums; fp8 cache: at first the descale of query rows
    // QUERY_TOKENS > 1, [warpgroup][head]: attended_tokens, counted from the warpgroup's tile of a pair number 0
    __shared__ int row_ends[QUERY_TOKENS > 1 ? 2 * HEADS : 1];
    uint8_t* const queries = shared;
    const EntryTiles tiles{shared + TILE_BYTES, full, empty, exists};
    if (threadIdx.x == 0) {
        mbarrier_init(&queries_full, 1);
        tiles.init();
    }
    prefetch_indices(seq_lens, length_step, page_table, table_stride, table_step, num_seqs, max_tokens,
                     LISTS_SLOTS ? 1 : PAGE_SIZE, blockIdx.y / CLUSTER);
    prefetch_tensor_maps(nope_map, pe_map, cache_map, half_map);
    start_cluster<CLUSTER>();
    await_previous_kernel();

    const int rank = CLUSTER > 1 ? blockIdx.y % CLUSTER : 0, first_head = (blockIdx.x * CLUSTER + rank) * HEADS;
    MlaSchedule<2 * TOKENS, length_t, HAS_LENGTHS> schedule(seq_lens, length_step, num_seqs, max_tokens, max_splits,
                                                            join_units, piece_units, level_units, item_units,
                                                            gridDim.y / CLUSTER, blockIdx.y / CLUSTER);
    int first_pair = 0;  // number of an item's first pair of tiles, 0 or 1: the phase of the pair's mbarriers

    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0);

    if (warpgroup == 2) {
        warpgroup_reg_dealloc<LOADER_REGISTERS>();
        for (; schedule.has_item(); schedule.next()) {
            const MlaItem item = schedule.item();
            if (!HAS_BOXES && item.begin == item.end) continue;
            const Split own{{page_table + item.seq * table_stride, table_step, num_pages, page_stride, slot_stride},
                            item.begin - first_pair * 2 * TOKENS,
                            item.end,
                            first_pair};
            if constexpr (IS_FP8) {
                CodeLoader loader{tiles, own, kv_c_and_k_pe_cache, scales, rank, {}};
                first_pair = loader.run(schedule.max_tokens) % 2;
            } else if constexpr (COPIES_ROWS) {
                first_pair = RowLoader{tiles, own, kv_c_and_k_pe_cache}.run() % 2;
            } else {
                first_pair = load_boxes(tiles, own, schedule.max_tokens, &cache_map, &half_map) % 2;
            }
        }
        return leave_cluster<CLUSTER>();
    }

    warpgroup_reg_alloc<REGISTERS>();
    const int thread = threadIdx.x % 128, lane = thread % 32, g = lane / 4, t = lane % 4, row = thread / 32 * 16 + g;
    float units[2], max_logit[2], exp_sum[2], s[TOKENS / 2], o[LATENT_SIZE / 4];
    uint8_t* const own_probabilities = tiles.panel(warpgroup, ROPE_PANEL);
    const auto await_full = [&](int stage, int panel, int pair) {
        mbarrier_wait(tiles.full_of(stage, panel), pair & 1);
        if (!HAS_BOXES) fence_proxy_async();  // on behalf of the warps that have stored the panel, or queries
    };
    const auto pairs_of = [](const MlaItem& item) { return ceil_div(item.end - item.begin, 2 * TOKENS); };
    // Starts s = Q K^T of the warpgroup's tile: the MMAs of some panels, in the order of the loads.
    const auto start_scores = [&](int pair, int begin, int end) {
#pragma unroll
        for (int i = begin; i < end; ++i) {
            const int panel = i == ROPE_PANEL ? i : (i + HALF_PANELS * warpgroup) % 8;
            const bool waits = !HALF_BARRIERS || (i % HALF_PANELS == 0 && (HAS_BOXES || panel != ROPE_PANEL));
            if (waits) await_full(warpgroup, panel, pair);
            const uint64_t a = make_smem_desc(queries + panel * PANEL_BYTES);
            const uint64_t b = make_smem_desc(tiles.panel(warpgroup, panel), panel == ROPE_PANEL ? ATOM : TOKEN_STRIDE);
            if (i == 0) warpgroup_fence_operand(s);
            if (waits) warpgroup_arrive();  // the wait loop ends the WGMMA group, so arrive again
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                wgmma<product_t, TOKENS>(s, advance_smem_desc(a, 32 * k), advance_smem_desc(b, 32 * k), i > 0 || k > 0);
            }
        }
        warpgroup_commit_batch();
    };
    const auto await_scores = [&] {
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
    };
    // Ends the scores, in units of log 2; -inf for a token without an entry, or after the row's own. `top`: the row max.
    // The item's last pair is end_pair - 1.
    const auto end_scores = [&](int pair, int end_pair, float (&top)[2]) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) s[i] *= units[i / 2 % 2];
        const uint64_t bits = exists[warpgroup];
        if (~bits) {
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) {
                if (!(bits >> (i / 4 * 8 + 2 * t + i % 2) & 1)) s[i] = minus_infinity();
            }
            if (!COPIES_ROWS) {  // zeroes values in slots after the end of the sequence, which may be NaN
                named_barrier_sync(OWN_TILE + warpgroup, 128);
#pragma unroll
                for (int i = 0; i < TOKENS; i += 16) {
                    const int token = i + made_anew(thread) / 8;
                    if (bits >> token & 1) continue;
#pragma unroll
                    for (int panel = 0; panel < 2 * HALF_PANELS; ++panel) {
                        *reinterpret_cast<uint4*>(tiles.row(warpgroup, panel, token) + thread % 8 * 16) =
                            make_uint4(0, 0, 0, 0);
                    }
                }
                fence_proxy_async();
                named_barrier_sync(OWN_TILE + warpgroup, 128);
            }
        }
        if (QUERY_TOKENS > 1 && pair >= end_pair - MASKED_PAIRS) {
            const int start = pair * 2 * TOKENS;
            const int* const own_ends = row_ends + warpgroup * HEADS + row;
            const int ends[2] = {own_ends[0], own_ends[8]};
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) {
                if (start + i / 4 * 8 + 2 * t + i % 2 >= ends[i / 2 % 2]) s[i] = minus_infinity();
            }
        }
        top[0] = top[1] = minus_infinity();
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) {
            top[0] = fmaxf(top[0], shfl_xor(top[0], mask));
            top[1] = fmaxf(top[1], shfl_xor(top[1], mask));
        }
    };
    const auto shrink_results = [&](float first, float second) {
        if (!any_lane(first != 1.0f || second != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < LATENT_SIZE / 4; ++i) o[i] *= i / 2 % 2 ? second : first;
    };
    // Converts logits to probabilities. `first` and `second` are the correction factors of the two rows' sums.
    const auto softmax = [&](const float (&top)[2], float first, float second) {
        exp_sum[0] *= first;
        exp_sum[1] *= second;
        const float base[2] = {probability_base<product_t>(top[0]), probability_base<product_t>(top[1])};
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) {
            s[i] = estimate_exp2(s[i] - base[i / 2 % 2]);
            exp_sum[i / 2 % 2] += s[i];
        }
    };
    const auto leave_probabilities = [&](float first, float second) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i += 2) {
            const float factor = i / 2 % 2 ? second : first;
            *reinterpret_cast<uint32_t*>(own_probabilities + swizzle_128b(row + i / 2 % 2 * 8, i / 4 * 16 + 4 * t)) =
                pack_pair<product_t>(s[i] * factor, s[i + 1] * factor);
        }
    };
    uint32_t a[TOKENS / 16][4];
    // The warpgroup's half of the latent vectors: B operand of tokens 16k to 16k + 15.
    const auto values_at = [&](int stage, int k) {
        const uint8_t* const half = tiles.panel(stage, warpgroup * HALF_PANELS);
        return make_smem_desc(half + k * 2 * TOKEN_STRIDE, TOKEN_STRIDE, PANEL_STRIDE);
    };
    const auto add_own = [&] {
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i) a[i / 4][i % 4] = pack_pair<product_t>(s[2 * i], s[2 * i + 1]);
        warpgroup_fence_operand(o);
        warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) wgmma<product_t, LATENT_SIZE / 2, true>(o, a[k], values_at(warpgroup, k));
        warpgroup_commit_batch();
    };
    // No wait and fence: the other warpgroup did both for this tile before it stored its probabilities.
    const auto add_other = [&] {
        const int stage = warpgroup ^ 1;
        const uint64_t probabilities = make_smem_desc(tiles.panel(stage, ROPE_PANEL));
        warpgroup_fence_operand(o);
        warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) {
            wgmma<product_t, LATENT_SIZE / 2, false, true>(o, advance_smem_desc(probabilities, 32 * k),
                                                           values_at(stage, k));
        }
        warpgroup_commit_batch();
    };
    const auto release = [&](int stage) {  // releases this warpgroup's half
        sync_warp();                       // every lane must have read which entries exist
        if (lane >= CLUSTER) return;
        if constexpr (CLUSTER == 1) mbarrier_arrive(empty + stage * 2 + warpgroup);
        else mbarrier_arrive_cluster(empty + stage * 2 + warpgroup, lane);
    };

    // Queries of the next item are loaded as soon as both warpgroups have multiplied by those of the last one. They do
    // not wait for its length, so an item without tokens has them, too; with conversion, registers would spill.
    const auto has_queries = [&](int pairs) { return !CONVERTS_QUERIES || pairs > 0; };
    const auto load_item_queries = [&] {
        if (threadIdx.x > 0 || !schedule.has_item() || !has_queries(pairs_of(schedule.item()))) return;
        load_queries(queries, &queries_full, &nope_map, &pe_map, first_head, schedule.seq);
    };
    uint32_t queries_phase = 0;
    load_item_queries();
    while (schedule.has_item()) {
        const int pairs = pairs_of(schedule.item()), end_pair = first_pair + pairs;
        units[0] = units[1] = scale * LOG2_E;
        if (has_queries(pairs)) {
            mbarrier_wait(&queries_full, queries_phase);
            queries_phase ^= 1;
            if (CONVERTS_QUERIES) {
                convert_queries<query_t>(queries, own_sums);
                named_barrier_sync<QUERIES>(256);
                units[0] *= own_sums[row];
                units[1] *= own_sums[row + 8];
            }
        }
        if constexpr (QUERY_TOKENS > 1) {
            const MlaItem own = schedule.item();
            const int length = schedule.length_of(own.seq);
            const int origin = own.begin + (warpgroup - 2 * first_pair) * TOKENS;
            if (t < 2) {
                const int of = row + t * 8;
                row_ends[warpgroup * HEADS + of] = attended_tokens(length, first_head + of, num_heads) - origin;
            }
            sync_warp();
        }
        max_logit[0] = max_logit[1] = minus_infinity();
        exp_sum[0] = exp_sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < LATENT_SIZE / 4; ++i) o[i] = 0.0f;
        if (warpgroup == 0) {
            const auto end_own = [&] {
                warpgroup_wait<0>();
                warpgroup_fence_operand(o);
                release(0);
            };
            for (int pair = first_pair; pair < end_pair; ++pair) {
                float top[2];
                if (!EARLY_SCORES || pair == first_pair) {
                    start_scores(pair, 0, PANELS);
                    await_scores();
                }
                end_scores(pair, end_pair, top);
                top[0] = fmaxf(top[0], max_logit[0]);
                top[1] = fmaxf(top[1], max_logit[1]);
                if (t == 0) {
                    even_max[row] = top[0];
                    even_max[row + 8] = top[1];
                }
                named_barrier_arrive<EVEN_MAX>(256);
                float first = relative_exp2(max_logit[0], top[0]), second = relative_exp2(max_logit[1], top[1]);
                shrink_results(first, second);
                softmax(top, first, second);
                add_own();
                if (!HAS_BOXES) end_own();  // the loading warps need this half first, and the odd tile comes later
                named_barrier_sync<ODD_PROBABILITIES>(256);
                max_logit[0] = odd_max[row];
                max_logit[1] = odd_max[row + 8];
                first = relative_exp2(top[0], max_logit[0]);
                second = relative_exp2(top[1], max_logit[1]);
                leave_probabilities(first, second);
                fence_proxy_async();
                named_barrier_arrive<EVEN_PROBABILITIES>(256);
                exp_sum[0] *= first;
                exp_sum[1] *= second;
                if (HAS_BOXES) end_own();
                shrink_results(first, second);
                add_other();
                if (EARLY_SCORES && pair + 1 < end_pair) {
                    start_scores(pair + 1, 0, HALF_PANELS);
                    warpgroup_wait<1>();
                    warpgroup_fence_operand(o);
                    release(1);
                    start_scores(pair + 1, HALF_PANELS, PANELS);
                    await_scores();
                } else {
                    warpgroup_wait<0>();
                    warpgroup_fence_operand(o);
                    release(1);
                }
            }
        } else {
            for (int pair = first_pair; pair < end_pair; ++pair) {
                float top[2];
                start_scores(pair, 0, PANELS);
                await_scores();
                end_scores(pair, end_pair, top);
                named_barrier_sync<EVEN_MAX>(256);
                top[0] = fmaxf(top[0], even_max[row]);
                top[1] = fmaxf(top[1], even_max[row + 8]);
                const float first = relative_exp2(max_logit[0], top[0]), second = relative_exp2(max_logit[1], top[1]);
                max_logit[0] = top[0];
                max_logit[1] = top[1];
                softmax(top, first, second);
                leave_probabilities(1.0f, 1.0f);
                if (t == 0) {
                    odd_max[row] = top[0];
                    odd_max[row + 8] = top[1];
                }
                fence_proxy_async();
                named_barrier_arrive<ODD_PROBABILITIES>(256);
                shrink_results(first, second);
                add_own();
                named_barrier_sync<EVEN_PROBABILITIES>(256);
                add_other();
                warpgroup_wait<1>();
                release(1);
                warpgroup_wait<0>();
                warpgroup_fence_operand(o);
                release(0);
            }
        }

        // Adds the row sums of both warpgroups.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            exp_sum[half] += shfl_xor(exp_sum[half], 1);
            exp_sum[half] += shfl_xor(exp_sum[half], 2);
            if (t == 0) own_sums[warpgroup * HEADS + row + 8 * half] = exp_sum[half];
        }
        named_barrier_sync<EXP_SUMS>(256);
        const MlaItem item = schedule.item();
        schedule.next();
        first_pair = end_pair % 2;
        load_item_queries();
#pragma unroll
        for (int half = 0; half < 2; ++half)
            exp_sum[half] = own_sums[row + 8 * half] + own_sums[HEADS + row + 8 * half];
        bool direct = item.is_whole();
        if constexpr (COMBINES) {
            const int groups = gridDim.x * CLUSTER, warp = threadIdx.x / 32;
            const TreeCombine<LATENT_SIZE / 4, 2> tree{reinterpret_cast<float4*>(tmp_out), nodes, groups * 8,
                                                       first_head / HEADS * 8 + warp};
            direct = tree.combine(item, max_logit, exp_sum, o);
        } else if (threadIdx.x == 0 && pieces && item.begin == 0 && first_head == 0) {
            pieces[item.seq] = {item.slot, item.pieces};
        }
        // Partial results of the last item go through the tiles, which no warp needs any more: a warp has runs of 32 bytes
        // of eight heads, and L2 takes runs of 1 KB in less time.
        const bool staged = !COMBINES && !direct && !schedule.has_item();
        const int first_column = warpgroup * (LATENT_SIZE / 2);
        const auto staged_row = [&](int i) {  // of the warp's 16 heads
            return reinterpret_cast<float*>(tiles.memory + (threadIdx.x / 32 * 16 + i) * STAGED_PITCH);
        };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (COMBINES && !direct) continue;
            const int head = row + 8 * half;
            const bool is_head = first_head + head < num_heads;
            const int64_t at = int64_t(item.seq) * num_heads + first_head + head;
            const int64_t part = int64_t(item.slot) * num_heads + first_head + head;
            const bool stores = is_head && warpgroup == 0 && t == 0;
            const float factor = finish_row<product_t, HAS_LSE>(direct, stores, max_logit[half], exp_sum[half], lse, at,
                                                                max_logits, exp_sums, part);
            if (!direct) {
                float* const to =
                    (staged ? staged_row(row % 16 + 8 * half) : tmp_out + part * LATENT_SIZE + first_column) + 2 * t;
#pragma unroll
                for (int i = 0; i < LATENT_SIZE / 16; ++i) {
                    const float2 pair{o[4 * i + 2 * half] * factor, o[4 * i + 2 * half + 1] * factor};
                    if (is_head) *reinterpret_cast<float2*>(to + i * 8) = pair;
                }
                continue;
            }
            // Four threads hold four adjacent pairs of each 8 elements. They exchange pairs, so that each stores 16
            // bytes.
            out_t* const to = out + item.seq * out_stride + int64_t(first_head + head) * LATENT_SIZE;
#pragma unroll
            for (int i = 0; i < LATENT_SIZE / 16; i += 4) {
                uint32_t words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int of = (i + j) * 4 + 2 * half;
                    words[j] = pack_pair<out_t>(o[of] * factor, o[of + 1] * factor);
                }
                transpose_4x4(words);
                if (is_head) {
                    *reinterpret_cast<uint4*>(to + warpgroup * (LATENT_SIZE / 2) + (i + t) * 8) =
                        make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
        }
        if (staged) {
            fence_proxy_async();
            sync_warp();
            const int head = first_head + row / 16 * 16 + lane;
            if (lane < 16 && head < num_heads) {
                const int64_t part = int64_t(item.slot) * num_heads + head;
                bulk_store(tmp_out + part * LATENT_SIZE + first_column, staged_row(lane), LATENT_SIZE / 2 * 4);
                tma_store_commit();
                tma_store_wait<0>();
            }
        }
        named_barrier_sync<EXP_SUMS>(256);  // row sums have been read
    }
    leave_cluster<CLUSTER>();
}
