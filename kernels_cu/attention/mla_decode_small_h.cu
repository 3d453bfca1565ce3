// mla_decode_small_h: MLA decode attention for few heads, and for short sequences: computes what mla_decode.cu does,
// bound by the bandwidth of the cache, or by the latencies of a short sequence.
//
//     l_i = scale * (q_nope . c_i + q_pe . r_i)                       0 <= i < length
//     out = sum_i exp(l_i - m) c_i / (sum_i exp(l_i - m) + 1e-6),     m = max_i l_i
//
// A latent entry of the cache is a latent vector c_i followed by a rotated key r_i (RoPE). The whole entry is the key
// of every head, and its latent vector is the value of every head: an entry is read once, and converted to an MMA
// operand once.
//
// Grid: blockIdx.x counts groups of CTA_HEADS heads, and blockIdx.y shares of the tokens of all sequences
// (mla_schedule.cuh) and, fastest, the CTAs of a cluster, which split each item (mla_cluster_combine.cuh). A CTA goes
// through each item of its share in tiles of TOKENS entries.
//
// Thread mapping: a group of PARTS warps shares GROUP entries of each tile, and each of its warps has a part of their
// elements. One warp of a group issues bulk copies (whole rows) STAGES tiles ahead. Groups do not wait for each other:
// 1. S = Q K^T with MMAs of 16 heads x 8 entries (mla_operands.cuh). The warps of a group add their partial sums of S.
// 2. Online softmax of the group's entries: each of its warps computes all of them.
// 3. O += P V with MMAs of 16 heads x 8 elements of the warp's part. The B operands of S are transposed between lanes.
// At the end the results of the groups are combined.
//
// A token with an invalid page or slot number contributes nothing, and neither does a slot after the end of the
// sequence.
//
// Constants
//     query_t        element type of queries: half_t or bf16_t
//     cache_t        element type of the cache: query_t, or, with IS_DS_MLA, fp8_e4m3_t
//     out_t          element type of out
//     table_t, length_t    element types of page_table and seq_lens
//     PAGE_SIZE      slots of a page of the cache
//     LISTS_SLOTS    page_table lists the slot of each token (mla_tokens.cuh)
//     QUERY_TOKENS   query tokens of a sequence; its heads are those of each token (mla_tokens.cuh)
//     HAS_LENGTHS    seq_lens is given; otherwise every sequence has max_tokens tokens
//     GROUPS         groups of warps of a CTA: 1, 2 or 4; four groups fit on an SM
//     COPY_TOKENS    entries of a bulk copy: contiguous in a page
//     IS_DS_MLA      the cache has the format "fp8_ds_mla" (mla_entry.cuh)
//     COMBINES       the CTAs combine the pieces of a sequence (mla_tree_combine.cuh); otherwise mla_combine.cu does
//     CLUSTER        CTAs of a cluster; if there are several, every item is a whole sequence
//     CTA_HEADS      heads of a CTA: HEADS, the rows of its MMAs, or fewer in a cluster, so that CTAs exchange less

#include "attention.cuh"
#include "barrier.cuh"
#include "mla_cluster_combine.cuh"
#include "mla_operands.cuh"
#include "mla_tokens.cuh"
#include "mla_tree_combine.cuh"
#include "tma.cuh"

constexpr int GROUP = 16, TOKENS = GROUP * GROUPS, PARTS = 2;
// With one group, four CTAs on an SM load while others compute, and half of the tiles fit in shared memory.
constexpr int STAGES = (IS_DS_MLA ? 4 : 2) / (GROUPS == 1 ? 2 : 1);
constexpr int NUM_WARPS = GROUPS * PARTS, PANELS = LATENT_PANELS / PARTS;  // PANELS: panels of latent vectors in a part
constexpr int GROUP_BYTES = GROUP * ENTRY_BYTES, TILE_BYTES = GROUPS * GROUP_BYTES;
constexpr int LOGIT_BYTES = 2 * GROUPS * PARTS * 2 * RUN;
constexpr int ROPE_PLACE = IS_DS_MLA ? ROPE_AT : LATENT_SIZE * sizeof(cache_t), ROPE_BYTES = ENTRY_BYTES - ROPE_PLACE;
constexpr int RESULT_PITCH = LATENT_SIZE + 16;  // in floats
constexpr int UNIT = 64;                        // tokens; shares are cut at multiples of it
static_assert(LATENT_SIZE / PARTS / SCALED_SIZE == 2 && GROUP % COPY_TOKENS == 0 && PAGE_SIZE % COPY_TOKENS == 0);
static_assert(!LISTS_SLOTS || COPY_TOKENS == 1);
static_assert(CLUSTER == 1 || !COMBINES);
static_assert(CTA_HEADS == HEADS || (CTA_HEADS < HEADS && CTA_HEADS % 2 == 0 && CLUSTER > 1));
// IS_ALONE: a group has all tokens of the CTA's sequence, so that its warps store results as they have them.
constexpr bool IS_ALONE = GROUPS == 1 && CLUSTER == 1;
static_assert(GROUPS * HEADS * RESULT_PITCH * 4 <= QUERY_BYTES + LOGIT_BYTES + STAGES * TILE_BYTES);

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_WARPS * 32, 8 / NUM_WARPS)
mla_decode_small_h(out_t* out,             // [num_seqs, num_heads, LATENT_SIZE]
                   float* lse,             // [num_seqs, num_heads]
                   float* tmp_out,         // [slots, num_heads, LATENT_SIZE]; COMBINES: partials of TreeCombine
                   float* max_logits,      // [slots, num_heads], in units of log 2
                   float* exp_sums,        // [slots, num_heads]
                   MlaPieces* pieces,      // [num_seqs]
                   uint32_t* nodes,        // [shares, head groups, HEADS / 2 or, with one group, PARTS], if COMBINES
                   const query_t* q_nope,  // [num_seqs, num_heads, LATENT_SIZE]
                   const query_t* q_pe,    // [num_seqs, num_heads, ROPE_SIZE]
                   const cache_t* kv_c_and_k_pe_cache,  // [num_pages, PAGE_SIZE, an entry]
                   const length_t* seq_lens,            // [num_seqs]
                   const table_t* page_table,           // [num_seqs, max_pages]
                   int64_t num_seqs, int64_t num_heads, int64_t num_pages, int64_t max_tokens, int64_t max_splits,
                   int64_t out_stride, int64_t nope_stride, int64_t nope_head_stride, int64_t pe_stride,
                   int64_t pe_head_stride, int64_t page_stride, int64_t slot_stride, int64_t table_stride,
                   int64_t table_step, int64_t length_step, float join_units, float piece_units, float level_units,
                   int64_t item_units, float scale) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ uint64_t full[STAGES][GROUPS];
    __shared__ uint32_t exists[STAGES][GROUPS];  // a bit for each entry
    __shared__ uint4 zeros[ENTRY_BYTES / 16];    // read instead of an entry that does not exist
    __shared__ float group_max[GROUPS][HEADS];
    __shared__ float group_sums[GROUPS][HEADS];
    uint8_t* const queries = memory;
    uint8_t* const logits = queries + QUERY_BYTES;  // [turn][group][part]
    uint8_t* const tiles = logits + LOGIT_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Groups and parts are spread so that the two warps on one SM sub-partition differ in both.
    const int g = lane / 4, t = lane % 4, group = warp / PARTS, part = (warp + warp / 4) % PARTS;
    const int first_head = blockIdx.x * CTA_HEADS, block_heads = min(CTA_HEADS, int(num_heads) - first_head);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES * GROUPS; ++i) mbarrier_init(&full[0][0] + i, 1);
        fence_mbarrier_init();
    }
    for (int i = threadIdx.x; i < ENTRY_BYTES / 16; i += NUM_WARPS * 32) zeros[i] = make_uint4(0, 0, 0, 0);
    prefetch_indices(seq_lens, length_step, page_table, table_stride, table_step, num_seqs, max_tokens,
                     LISTS_SLOTS ? 1 : PAGE_SIZE, blockIdx.y / CLUSTER);
    __syncthreads();
    await_previous_kernel();
    MlaSchedule<UNIT, length_t, HAS_LENGTHS> schedule(seq_lens, length_step, num_seqs, max_tokens, max_splits,
                                                      join_units, piece_units, level_units, item_units,
                                                      gridDim.y / CLUSTER, blockIdx.y / CLUSTER);
    int stage = 0, phase = 0;
    while (schedule.has_item()) {
        const MlaItem item = piece_of_cta<TOKENS>(schedule.item());
        schedule.next();
        const int seq = item.seq, begin = item.begin, end = item.end;
        if (threadIdx.x == 0 && pieces && (begin | first_head) == 0) pieces[seq] = {item.slot, item.pieces};
        const TokenTable table{page_table + seq * table_stride, table_step, num_pages, page_stride, slot_stride};
        // In the warp that copies a group's entries, lane i has the page number of entry i, or -1.
        const auto page_at = [&](int start, int loaded_end) {
            const int token = start + group * GROUP + lane;
            const int64_t page = lane < GROUP && token < loaded_end ? table.at(token) : int64_t(-1);
            return token < end ? page : int64_t(-1);
        };
        // The page number in the next tile to be copied. The page table has max_tokens tokens: the first page numbers
        // are loaded up to there, without a wait for the length.
        int64_t page = part == 0 ? page_at(begin, schedule.max_tokens) : int64_t(-1);
        const auto copy = [&](int stage, int start) {
            if (part > 0 || start >= end) return;
            const uint32_t found = ballot(table.exists(page));
            uint64_t* const barrier = &full[stage][group];
            if (lane == 0) {
                exists[stage][group] = found;
                mbarrier_arrive_expect_tx(barrier, count_bits(found) * ENTRY_BYTES);
            }
            sync_warp();
            const uint32_t run =
                found >> lane & ((1u << COPY_TOKENS) - 1);  // entries of one page; the last ones may not exist
            if (lane % COPY_TOKENS == 0 && run) {
                const int64_t offset = table.offset(page, start + group * GROUP + lane);
                bulk_load(tiles + stage * TILE_BYTES + group * GROUP_BYTES + lane * ENTRY_BYTES,
                          kv_c_and_k_pe_cache + offset, count_bits(run) * ENTRY_BYTES, barrier);
            }
            page = page_at(start + TOKENS, end);
        };
        for (int i = 0; i < STAGES; ++i) copy((stage + i) % STAGES, begin + i * TOKENS);

        store_queries<NUM_WARPS * 32>(queries, [&](int head, int element) {
            if (head >= block_heads) return Vec<query_t, 8>::full(0.0f);
            const int64_t of = first_head + head;
            return Vec<query_t, 8>::load(element < LATENT_SIZE
                                             ? q_nope + seq * nope_stride + of * nope_head_stride + element
                                             : q_pe + seq * pe_stride + of * pe_head_stride + element - LATENT_SIZE);
        });
        if (schedule.has_item()) {  // prefetches the queries and page numbers of the next item
            const int64_t next = schedule.seq;
            if (threadIdx.x == 0) prefetch_line(page_table + next * table_stride);
            for (int i = threadIdx.x; i < block_heads * 9; i += NUM_WARPS * 32) {
                const int64_t of = first_head + i / 9;
                const int line = i % 9;
                prefetch_line(line < 8 ? q_nope + next * nope_stride + of * nope_head_stride + line * 64
                                       : q_pe + next * pe_stride + of * pe_head_stride);
            }
        }
        __syncthreads();
        const float unit = scale * LOG2_E;
        const auto end_of = [&](int head) {
            return QUERY_TOKENS > 1 ? attended_tokens(schedule.length_of(seq), first_head + head, num_heads) : 0;
        };
        const int ends[2] = {end_of(g), end_of(g + 8)};
        float max_logit[2] = {minus_infinity(), minus_infinity()}, exp_sum[2] = {};
        float o[PANELS][8][4] = {};  // heads g and g + 8; elements 16t + 2i and 16t + 2i + 1 of a panel

        int turn = 0;
        for (int start = begin; start < end; start += TOKENS) {
            mbarrier_wait(&full[stage][group], phase);
            const uint32_t found = exists[stage][group];

            // S = Q K^T over the warp's part of K.
            float s[2][4] = {};
            const auto multiply = [&](int product, const uint32_t* keys, const uint32_t* next_keys) {
                uint32_t a[4];
                load_words(queries + product * RUN + lane * 16, a);
                const uint32_t b[2] = {keys[0], keys[1]}, next_b[2] = {next_keys[0], next_keys[1]};
                mma_m16n8k16<query_t>(s[0], a, b);
                mma_m16n8k16<query_t>(s[1], a, next_b);
            };
            uint32_t elements[PANELS][2][8];  // B operands of entries g and g + 8
            const uint8_t* entries[2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int row = n * 8 + g, place = stage * TILE_BYTES + group * GROUP_BYTES + row * ENTRY_BYTES;
                entries[n] = found >> row & 1 ? tiles + place : reinterpret_cast<const uint8_t*>(zeros);
            }
            float2 scales[2] = {};
            if constexpr (IS_DS_MLA) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    scales[n] = reinterpret_cast<const float2*>(entries[n] + SCALES_AT)[part];
                }
            }
            uint32_t rotated[2][4];  // each part takes 8 of the lane's 16 elements
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                load_elements<false>(entries[n] + ROPE_PLACE + (t * 2 + part) * (ROPE_BYTES / 8), 1.0f, rotated[n]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
                multiply(LATENT_PANELS * 4 + part * 2 + i, rotated[0] + 2 * i, rotated[1] + 2 * i);
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel) {
                const int element = (part * PANELS + panel) * PANEL_SIZE + t * 16;
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    load_elements<IS_DS_MLA>(entries[n] + element * sizeof(cache_t),
                                             panel * PANEL_SIZE < SCALED_SIZE ? scales[n].x : scales[n].y,
                                             elements[panel][n]);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    multiply((part * PANELS + panel) * 4 + i, elements[panel][0] + 2 * i, elements[panel][1] + 2 * i);
                }
            }

            // Adds the partial scores of the parts, in the same order in each warp of the group.
            uint8_t* const of_group = logits + (turn * GROUPS + group) * (PARTS * 2 * RUN) + lane * 16;
            turn ^= 1;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                *reinterpret_cast<float4*>(of_group + (part * 2 + n) * RUN) = {s[n][0], s[n][1], s[n][2], s[n][3]};
            }
            named_barrier_sync(1 + group, PARTS * 32);
            copy(stage, start + STAGES * TOKENS);  // refills the stage: the group has read this tile
            if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
            float x[2][4] = {}, top[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
            for (int i = 0; i < 2 * PARTS; ++i) {
                const float4 of_part = *reinterpret_cast<const float4*>(of_group + i * RUN);
                x[i % 2][0] += of_part.x;
                x[i % 2][1] += of_part.y;
                x[i % 2][2] += of_part.z;
                x[i % 2][3] += of_part.w;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int n = i / 4, upper = i % 4 / 2;
                const int row = 8 * n + 2 * t + i % 2;
                const bool attended = QUERY_TOKENS == 1 || start + group * GROUP + row < ends[upper];
                x[n][i % 4] = attended && found >> row & 1 ? x[n][i % 4] * unit : minus_infinity();
                top[upper] = fmaxf(top[upper], x[n][i % 4]);
            }
            float correction[2];
            uint32_t a[4];
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                top[upper] = fmaxf(top[upper], shfl_xor(top[upper], 1));
                top[upper] = fmaxf(top[upper], shfl_xor(top[upper], 2));
                const float larger = fmaxf(max_logit[upper], top[upper]);
                correction[upper] = relative_exp2(max_logit[upper], larger);
                max_logit[upper] = larger;
                exp_sum[upper] *= correction[upper];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float low = probability_of<query_t>(x[n][2 * upper], larger);
                    const float high = probability_of<query_t>(x[n][2 * upper + 1], larger);
                    exp_sum[upper] += low + high;
                    a[2 * n + upper] = pack_pair<query_t>(low, high);
                }
            }

            // O += P V for the warp's part of the elements.
            if (any_lane(correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < PANELS * 32; ++i) o[i / 32][i / 4 % 8][i % 4] *= correction[i / 2 % 2];
            }
#pragma unroll
            for (int i = 0; i < PANELS * 8; ++i) {
                const uint32_t b[2] = {transpose_8x8(elements[i / 8][0][i % 8]),
                                       transpose_8x8(elements[i / 8][1][i % 8])};
                mma_m16n8k16<query_t>(o[i / 8][i % 8], a, b);
            }
        }

        if constexpr (IS_ALONE) {
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                exp_sum[upper] += shfl_xor(exp_sum[upper], 1);
                exp_sum[upper] += shfl_xor(exp_sum[upper], 2);
            }
            bool direct = item.is_whole();
            if constexpr (COMBINES) {
                const TreeCombine<PANELS * 32, 2> tree{reinterpret_cast<float4*>(tmp_out), nodes,
                                                       int(gridDim.x) * PARTS, int(blockIdx.x) * PARTS + part};
                direct = tree.combine(item, max_logit, exp_sum, reinterpret_cast<float (&)[PANELS * 32]>(o));
            }
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const int head = first_head + g + 8 * upper;
                if (head >= num_heads || (COMBINES && !direct)) continue;
                const int64_t row = int64_t(seq) * num_heads + head, at = int64_t(item.slot) * num_heads + head;
                const float factor = finish_row<query_t, HAS_LSE>(direct, part == 0 && t == 0, max_logit[upper],
                                                                  exp_sum[upper], lse, row, max_logits, exp_sums, at);
#pragma unroll
                for (int i = 0; i < PANELS * 2; ++i) {  // eight of the lane's 16 elements of a panel
                    const int element = (part * PANELS + i / 2) * PANEL_SIZE + 16 * t + i % 2 * 8;
                    float eight[8];
#pragma unroll
                    for (int j = 0; j < 8; ++j) eight[j] = o[i / 2][i % 2 * 4 + j / 2][2 * upper + j % 2] * factor;
                    if (direct) {
                        Vec<out_t, 8>::from_floats(eight).store(out + seq * out_stride + int64_t(head) * LATENT_SIZE +
                                                                element);
                    } else {
                        float* const to = tmp_out + at * LATENT_SIZE + element;
                        Vec<float, 4>::from_floats(reinterpret_cast<float (&)[4]>(eight[0])).store(to);
                        Vec<float, 4>::from_floats(reinterpret_cast<float (&)[4]>(eight[4])).store(to + 4);
                    }
                }
            }
        } else {
            // Combines the results of the groups, relative to the row max of all groups.
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                exp_sum[upper] += shfl_xor(exp_sum[upper], 1);
                exp_sum[upper] += shfl_xor(exp_sum[upper], 2);
                if (part == 0 && t == 0) {
                    group_max[group][g + 8 * upper] = max_logit[upper];
                    group_sums[group][g + 8 * upper] = exp_sum[upper];
                }
            }
            __syncthreads();
            float* const results = reinterpret_cast<float*>(memory);  // [group][head]
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const int head = g + 8 * upper;
                if (CTA_HEADS < HEADS && head >= CTA_HEADS) continue;
                float larger = minus_infinity();
#pragma unroll
                for (int i = 0; i < GROUPS; ++i) larger = fmaxf(larger, group_max[i][head]);
                const float factor = relative_exp2(max_logit[upper], larger);
                float* const to = results + (group * HEADS + head) * RESULT_PITCH + part * PANELS * PANEL_SIZE + 4 * t;
#pragma unroll
                for (int i = 0; i < PANELS * 4; ++i) {  // 4 elements per lane; those of four lanes are contiguous
                    const float (&two)[4] = o[i / 4][i % 4 * 2], (&next)[4] = o[i / 4][i % 4 * 2 + 1];
                    *reinterpret_cast<float4*>(to + i * 16) = {two[2 * upper] * factor, two[2 * upper + 1] * factor,
                                                               next[2 * upper] * factor, next[2 * upper + 1] * factor};
                }
            }
            __syncthreads();
            const auto element_of = [](int at) {  // of four elements of a result
                return at / PANEL_SIZE * PANEL_SIZE + at / 4 % 4 * 16 + at / 16 % 4 * 4;
            };
            // Each warp writes two heads at a time.
            for (int pair = warp; 2 * pair < block_heads; pair += NUM_WARPS) {
                constexpr int LANE_ELEMENTS = LATENT_SIZE / 32;
                float larger[2] = {minus_infinity(), minus_infinity()}, sum[2] = {}, of_groups[2 * LANE_ELEMENTS] = {};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int head = 2 * pair + i;
#pragma unroll
                    for (int j = 0; j < GROUPS; ++j) larger[i] = fmaxf(larger[i], group_max[j][head]);
#pragma unroll
                    for (int j = 0; j < GROUPS; ++j) {
                        sum[i] += group_sums[j][head] * relative_exp2(group_max[j][head], larger[i]);
                        const float* const from = results + (j * HEADS + head) * RESULT_PITCH + lane * 4;
#pragma unroll
                        for (int k = 0; k < LANE_ELEMENTS; k += 4) {
                            const float4 x = *reinterpret_cast<const float4*>(from + k * 32);
                            float* const to = of_groups + i * LANE_ELEMENTS + k;
                            to[0] += x.x;
                            to[1] += x.y;
                            to[2] += x.z;
                            to[3] += x.w;
                        }
                    }
                }
                if constexpr (CLUSTER > 1) {  // the sum of all groups goes to the memory of the first one
                    sync_warp();              // every lane has read the row maxima
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int head = 2 * pair + i;
                        if (lane == 0) {
                            group_max[0][head] = larger[i];
                            group_sums[0][head] = sum[i];
                        }
#pragma unroll
                        for (int k = 0; k < LANE_ELEMENTS; k += 4) {
                            const float* const x = of_groups + i * LANE_ELEMENTS + k;
                            *reinterpret_cast<float4*>(results + head * RESULT_PITCH + lane * 4 + k * 32) = {
                                x[0], x[1], x[2], x[3]};
                        }
                    }
                    continue;
                }
                bool direct = item.is_whole();
                if constexpr (COMBINES) {
                    const TreeCombine<2 * LANE_ELEMENTS, LANE_ELEMENTS> tree{
                        reinterpret_cast<float4*>(tmp_out), nodes, int(gridDim.x) * HEADS / 2, first_head / 2 + pair};
                    direct = tree.combine(item, larger, sum, of_groups);
                    if (!direct) continue;
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int head = first_head + 2 * pair + i;
                    if (head >= num_heads) continue;
                    const int64_t row = int64_t(seq) * num_heads + head, at = int64_t(item.slot) * num_heads + head;
                    const float factor = finish_row<query_t, HAS_LSE>(direct, lane == 0, larger[i], sum[i], lse, row,
                                                                      max_logits, exp_sums, at);
#pragma unroll
                    for (int k = 0; k < LANE_ELEMENTS; k += 4) {
                        const int element = element_of(lane * 4 + k * 32);
                        float four[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) four[j] = of_groups[i * LANE_ELEMENTS + k + j] * factor;
                        if (direct) {
                            Vec<out_t, 4>::from_floats(four).store(out + seq * out_stride +
                                                                   int64_t(head) * LATENT_SIZE + element);
                        } else {
                            Vec<float, 4>::from_floats(four).store(tmp_out + at * LATENT_SIZE + element);
                        }
                    }
                }
            }
            if constexpr (CLUSTER > 1) {
                const int64_t row = seq * num_heads + first_head;
                combine_cluster<query_t, NUM_WARPS>(results, RESULT_PITCH, group_max[0], group_sums[0], block_heads,
                                                    out + seq * out_stride + first_head * LATENT_SIZE,
                                                    HAS_LSE ? lse + row : nullptr, element_of);
            }
        }
        // The next item's copies overwrite the results, which threads have written, and those of a cluster have read.
        fence_proxy_async();
        start_cluster<CLUSTER>();
    }
}
