// mla_decode_small_h_fp8: MLA decode attention for few heads, and for short sequences, over an fp8 cache: computes what
// mla_decode.cu does. Entries stay fp8 in shared memory.
//
//     l_i = scale * (q_nope . c_i + q_pe . r_i)                       0 <= i < length
//     out = sum_i exp(l_i - m) c_i / (sum_i exp(l_i - m) + 1e-6),     m = max_i l_i
//
// A latent entry of the cache is a latent vector c_i followed by a rotated key r_i (RoPE). The whole entry is the key
// of every head, and its latent vector is the value of every head: an entry is read once. With few heads the kernel is
// bound by memory bandwidth, so several CTAs share an SM, and fp8 values are converted to MMA operands in registers.
//
// Grid: blockIdx.x counts groups of HEADS heads, and blockIdx.y shares of the tokens of all sequences
// (mla_schedule.cuh) and, fastest, the CTAs of a cluster, which split each item (mla_cluster_combine.cuh). A CTA goes
// through each item of its share in tiles of TOKENS entries, and copies the next tile while it computes the current
// one. Loads that do not depend on each other are issued together, as in mla_decode_small_h.cu.
//
// Thread mapping, for each tile, with MMAs of 16 heads x 8 columns:
// 1. S = Q K^T: a warp has 16 entries, those that it has copied. Four adjacent lanes have 16 fp8 values each of a panel
//    of 64 elements of an entry; the elements of a query are in the same order.
// 2. Online softmax: the warps exchange their row maxima, and then the probabilities, through shared memory.
// 3. O += P V: a warp has WARP_DIMS elements of the latent vectors of all entries. ldmatrix transposes pairs of fp8
//    values; a word then holds two adjacent entries, and a byte permutation sorts them.
//
// A token with an invalid page or slot number contributes nothing. A slot after the end of the sequence is not read.
//
// Constants
//     query_t        element type of queries: half_t, bf16_t or fp8_e4m3_t
//     cache_t        element type of the cache: fp8_e4m3_t
//     out_t          element type of out
//     table_t, length_t    element types of page_table and seq_lens
//     PAGE_SIZE      slots of a page of the cache
//     LISTS_SLOTS    page_table lists the slot of each token (mla_tokens.cuh)
//     QUERY_TOKENS   query tokens of a sequence; its heads are those of each token (mla_tokens.cuh)
//     HAS_LENGTHS    seq_lens is given; otherwise every sequence has max_tokens tokens
//     IS_DS_MLA      false (mla_entry.cuh)
//     COMBINES       the CTAs combine the pieces of a sequence (mla_tree_combine.cuh); otherwise mla_combine.cu does
//     CLUSTER        CTAs of a cluster; if there are several, every item is a whole sequence

#include "async.cuh"
#include "attention.cuh"
#include "mla_cluster_combine.cuh"
#include "mla_entry.cuh"
#include "mla_tokens.cuh"
#include "mla_tree_combine.cuh"
#include "mma.cuh"

constexpr int HEADS = 16, TOKENS = 64, NUM_WARPS = 4, WARP_TOKENS = TOKENS / NUM_WARPS, STAGES = 2;
constexpr int PANEL_SIZE = 64, PANELS = ENTRY_SIZE / PANEL_SIZE;
constexpr int WARP_DIMS = LATENT_SIZE / NUM_WARPS;
static_assert(!IS_DS_MLA);
using product_t = half_t;  // represents every fp8 value
// Swizzle: an entry is stored in chunks of 16 bytes, and the two lower bits of a chunk's index are XORed with row / 2.
// The row stride is 64 bytes modulo 128. Eight lanes that read 2 rows, or 8 rows, then cover all banks.
constexpr int CHUNKS = ENTRY_BYTES / 16, PITCH = ceil_div(CHUNKS - 4, 8) * 128 + 64, TILE_BYTES = TOKENS * PITCH;
constexpr int QUERY_PITCH = ENTRY_SIZE * 2, QUERY_BYTES = HEADS * QUERY_PITCH;
constexpr int PROBABILITY_PITCH = TOKENS * 2 + 16;
constexpr int RESULT_PITCH = LATENT_SIZE + 16;  // in floats: eight lanes with results of two heads cover all banks
static_assert(CLUSTER == 1 || (!COMBINES && HEADS * RESULT_PITCH * 4 <= STAGES * TILE_BYTES));
static_assert(PITCH >= ENTRY_BYTES && PITCH % 128 == 64);

DEVICE int place_in_tile(int row, int chunk) { return row * PITCH + (chunk ^ row / 2 % 4) * 16; }
DEVICE int place_of_query(int head, int chunk) { return head * QUERY_PITCH + (chunk ^ head % 2) * 16; }

DEVICE uint4 load_16(const uint8_t* shared) { return *reinterpret_cast<const uint4*>(shared); }
DEVICE void split_words(uint4 x, uint32_t (&words)[4]) {
    words[0] = x.x;
    words[1] = x.y;
    words[2] = x.z;
    words[3] = x.w;
}

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_WARPS * 32, 2)
mla_decode_small_h_fp8(out_t* out,             // [num_seqs, num_heads, LATENT_SIZE]
                       float* lse,             // [num_seqs, num_heads]
                       float* tmp_out,         // [slots, num_heads, LATENT_SIZE]; COMBINES: partials of TreeCombine
                       float* max_logits,      // [slots, num_heads], in units of log 2
                       float* exp_sums,        // [slots, num_heads]
                       MlaPieces* pieces,      // [num_seqs]
                       uint32_t* nodes,        // [shares, head groups, NUM_WARPS], if COMBINES
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
    prefetch_indices(seq_lens, length_step, page_table, table_stride, table_step, num_seqs, max_tokens,
                     LISTS_SLOTS ? 1 : PAGE_SIZE, blockIdx.y / CLUSTER);
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ float units[HEADS];                // factor from a score of a head to its logit
    __shared__ float warp_max[NUM_WARPS][HEADS];  // row max of a tile, per warp
    __shared__ float warp_sums[NUM_WARPS][HEADS];
    uint8_t* const queries = reinterpret_cast<uint8_t*>(memory);
    uint8_t* const probabilities = queries + QUERY_BYTES;
    uint8_t* const tiles = probabilities + HEADS * PROBABILITY_PITCH;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int first_head = blockIdx.x * HEADS, block_heads = min(HEADS, int(num_heads) - first_head);
    MlaSchedule<TOKENS, length_t, HAS_LENGTHS> schedule(seq_lens, length_step, num_seqs, max_tokens, max_splits,
                                                        join_units, piece_units, level_units, item_units,
                                                        gridDim.y / CLUSTER, blockIdx.y / CLUSTER);
    for (; schedule.has_item(); schedule.next()) {
        const MlaItem item = piece_of_cta<TOKENS>(schedule.item());
        const int seq = item.seq, begin = item.begin, end = item.end;
        if (threadIdx.x == 0 && pieces && (begin | first_head) == 0) pieces[seq] = {item.slot, item.pieces};
        const TokenTable table{page_table + seq * table_stride, table_step, num_pages, page_stride, slot_stride};
        // Four lanes copy entries g and g + 8 of the warp's 16 entries; each copies every fourth chunk.
        const auto page_at = [&](int start, int i) {
            const int token = start + warp * WARP_TOKENS + i * 8 + g;
            return token < max_tokens ? table.at(token) : int64_t(-1);
        };
        uint32_t found[2];  // bit 4j: entry j of 8 exists
        const auto copy = [&](int stage, int start, const int64_t (&pages)[2]) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = warp * WARP_TOKENS + i * 8 + g;
                const bool exists = start + row < end && table.exists(pages[i]);
                const int64_t place = exists ? table.offset(pages[i], start + row) : 0;
                const cache_t* const from = kv_c_and_k_pe_cache + place + t * 16;
                uint8_t* const to = tiles + stage * TILE_BYTES + place_in_tile(row, t);
                found[i] = ballot(exists);
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; chunk += 4) {
                    if (chunk + t < CHUNKS) cp_async_of_line(to + chunk * 16, from + chunk * 16, exists);
                }
            }
            cp_async_commit();
        };
        int64_t pages[2] = {page_at(begin, 0), page_at(begin, 1)};
        // Queries: eight threads per head.
        using vec_t = Vec<query_t, 8>;
        const int own_head = threadIdx.x / 8, own_part = threadIdx.x % 8;
        vec_t x[ENTRY_SIZE / 64];
#pragma unroll
        for (int i = 0; i < ENTRY_SIZE / 64; ++i) {
            const int column = (i * 8 + own_part) * 8;
            const int64_t head = first_head + own_head;
            x[i] = vec_t::full(0.0f);
            if (own_head < block_heads) {
                x[i] = vec_t::load(column < LATENT_SIZE
                                       ? q_nope + seq * nope_stride + head * nope_head_stride + column
                                       : q_pe + seq * pe_stride + head * pe_head_stride + column - LATENT_SIZE);
            }
        }
        if (begin < end) copy(0, begin, pages);
        pages[0] = page_at(begin + TOKENS, 0);
        pages[1] = page_at(begin + TOKENS, 1);

        // Each query is divided by a power of two.
        {
            float absmax = 0.0f, element[8];
#pragma unroll
            for (int i = 0; i < ENTRY_SIZE / 64; ++i) {
                x[i].to_floats(element);
#pragma unroll
                for (int j = 0; j < 8; ++j) absmax = fmaxf(absmax, fabsf(element[j]));
            }
#pragma unroll
            for (int mask = 1; mask < 8; mask *= 2) absmax = fmaxf(absmax, shfl_xor(absmax, mask));
            const float factor = inverse_power_of_two(absmax);
#pragma unroll
            for (int i = 0; i < ENTRY_SIZE / 64; ++i) {
                x[i].to_floats(element);
#pragma unroll
                for (int j = 0; j < 8; ++j) element[j] *= factor;
                Vec<product_t, 8>::from_floats(element).store_shared(
                    reinterpret_cast<product_t*>(queries + place_of_query(own_head, i * 8 + own_part)));
            }
            if (own_part == 0) units[own_head] = scale * LOG2_E / factor;
            __syncthreads();
        }
        const float unit[2] = {units[g], units[g + 8]};
        const auto end_of = [&](int head) {
            return QUERY_TOKENS > 1 ? attended_tokens(schedule.length_of(seq), first_head + head, num_heads) : 0;
        };
        const int ends[2] = {end_of(g), end_of(g + 8)};
        float max_logit[2] = {minus_infinity(), minus_infinity()}, exp_sum[2] = {};
        float o[WARP_DIMS / 16][2][4] = {};  // per 16 elements: even ones, then odd ones

        int stage = 0;
        for (int start = begin; start < end; start += TOKENS, stage ^= 1) {
            const uint8_t* const tile = tiles + stage * TILE_BYTES;
            cp_async_wait<0>();
            sync_warp();

            // S = Q K^T of the warp's entries, 8 and 8. MMAs alternate between two accumulators.
            float s[2][2][4] = {};
            const int key_row = warp * WARP_TOKENS + g;
            const auto multiply = [&](int chunk, auto pair_of) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t low[4], high[4];
                    split_words(load_16(queries + place_of_query(g, chunk + 2 * t + half)), low);
                    split_words(load_16(queries + place_of_query(g + 8, chunk + 2 * t + half)), high);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const uint32_t a[4] = {low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1]};
#pragma unroll
                        for (int n = 0; n < 2; ++n) {
                            uint32_t b[2];
                            pair_of(n, 2 * half + i, b);
                            mma_m16n8k16<product_t>(s[i][n], a, b);
                        }
                    }
                }
            };
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel) {
                uint32_t codes[2][4];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    split_words(load_16(tile + place_in_tile(key_row + n * 8, panel * 4 + t)), codes[n]);
                }
                multiply(panel * 8,
                         [&](int n, int word, uint32_t (&b)[2]) { fp8_to_half<cache_t>(codes[n][word], b); });
            }
            float top[2] = {minus_infinity(), minus_infinity()}, logit[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int n = i / 4, half = i % 4 / 2, token = 2 * t + i % 2;
                const int at = start + warp * WARP_TOKENS + n * 8 + token;
                const bool exists = (QUERY_TOKENS == 1 || at < ends[half]) && found[n] >> 4 * token & 1;
                logit[n][i % 4] = exists ? (s[0][n][i % 4] + s[1][n][i % 4]) * unit[half] : minus_infinity();
                top[half] = fmaxf(top[half], logit[n][i % 4]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                top[half] = fmaxf(top[half], shfl_xor(top[half], 1));
                top[half] = fmaxf(top[half], shfl_xor(top[half], 2));
                if (t == 0) warp_max[warp][g + 8 * half] = top[half];
            }
            __syncthreads();
            // After this barrier no warp reads the other tile or the probabilities any more.
            if (start + TOKENS < end) {
                copy(stage ^ 1, start + TOKENS, pages);
                pages[0] = page_at(start + 2 * TOKENS, 0);
                pages[1] = page_at(start + 2 * TOKENS, 1);
            }
            float correction[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float larger = max_logit[half];
#pragma unroll
                for (int w = 0; w < NUM_WARPS; ++w) larger = fmaxf(larger, warp_max[w][g + 8 * half]);
                correction[half] = relative_exp2(max_logit[half], larger);
                max_logit[half] = larger;
                exp_sum[half] *= correction[half];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float low = probability_of<product_t>(logit[n][2 * half], larger);
                    const float high = probability_of<product_t>(logit[n][2 * half + 1], larger);
                    exp_sum[half] += low + high;
                    *reinterpret_cast<uint32_t*>(probabilities + (g + 8 * half) * PROBABILITY_PITCH +
                                                 (warp * WARP_TOKENS + n * 8 + 2 * t) * 2) =
                        pack_pair<product_t>(low, high);
                }
            }
            __syncthreads();

            // O += P V for the warp's elements.
            if (start > begin && any_lane(correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < WARP_DIMS / 2; ++i) o[i / 8][i / 4 % 2][i % 4] *= correction[i / 2 % 2];
            }
#pragma unroll
            for (int k = 0; k < TOKENS / 16; ++k) {
                uint32_t a[4];
                ldmatrix<4>(a, probabilities + lane % 16 * PROBABILITY_PITCH + k * 32 + lane / 16 * 16);
#pragma unroll
                for (int n = 0; n < WARP_DIMS / 16; n += 2) {
                    uint32_t
                        codes[4];  // 8 entries x 16 elements, the next 8 entries, then both for the next 16 elements
                    ldmatrix<4, true>(
                        codes, tile + place_in_tile(k * 16 + lane % 16, warp * (WARP_DIMS / 16) + n + lane / 16));
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        uint32_t pairs[2][2];
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            // Bytes of a word: an even and an odd element of an entry, then the same of the next entry.
                            const uint32_t sorted = byte_perm(codes[2 * i + j], 0, 0x3120);
                            fp8_to_half<cache_t>(sorted, pairs[j]);
                        }
#pragma unroll
                        for (int odd = 0; odd < 2; ++odd) {
                            const uint32_t b[2] = {pairs[0][odd], pairs[1][odd]};
                            mma_m16n8k16<product_t>(o[n + i][odd], a, b);
                        }
                    }
                }
            }
        }

#pragma unroll
        for (int half = 0; half < 2; ++half) {
            exp_sum[half] += shfl_xor(exp_sum[half], 1);
            exp_sum[half] += shfl_xor(exp_sum[half], 2);
            if (t == 0) warp_sums[warp][g + 8 * half] = exp_sum[half];
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            exp_sum[half] = 0.0f;
#pragma unroll
            for (int w = 0; w < NUM_WARPS; ++w) exp_sum[half] += warp_sums[w][g + 8 * half];
        }
        if constexpr (CLUSTER > 1) {
            float* const results = reinterpret_cast<float*>(tiles);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int head = g + 8 * half;
                if (warp == 0 && t == 0) {
                    warp_max[0][head] = max_logit[half];
                    warp_max[1][head] = exp_sum[half];
                }
                float* const to = results + head * RESULT_PITCH + warp * WARP_DIMS + 4 * t;
#pragma unroll
                for (int n = 0; n < WARP_DIMS / 16; ++n) {
                    *reinterpret_cast<float4*>(to + n * 16) = {o[n][0][2 * half], o[n][1][2 * half],
                                                               o[n][0][2 * half + 1], o[n][1][2 * half + 1]};
                }
            }
            const int64_t row = seq * num_heads + first_head;
            combine_cluster<product_t, NUM_WARPS>(results, RESULT_PITCH, warp_max[0], warp_max[1], block_heads,
                                                  out + seq * out_stride + first_head * LATENT_SIZE,
                                                  HAS_LSE ? lse + row : nullptr, [](int i) { return i; });
            start_cluster<CLUSTER>();  // the next item overwrites what other CTAs may still read
            continue;
        }
        bool direct = item.is_whole();
        if constexpr (COMBINES) {
            const TreeCombine<WARP_DIMS / 2, 2> tree{reinterpret_cast<float4*>(tmp_out), nodes,
                                                     int(gridDim.x) * NUM_WARPS, int(blockIdx.x) * NUM_WARPS + warp};
            direct = tree.combine(item, max_logit, exp_sum, reinterpret_cast<float (&)[WARP_DIMS / 2]>(o));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = first_head + g + 8 * half;
            if (head >= num_heads || (COMBINES && !direct)) continue;
            const int64_t row = int64_t(seq) * num_heads + head, part = int64_t(item.slot) * num_heads + head;
            const float factor = finish_row<product_t, HAS_LSE>(direct, warp == 0 && t == 0, max_logit[half],
                                                                exp_sum[half], lse, row, max_logits, exp_sums, part);
#pragma unroll
            for (int n = 0; n < WARP_DIMS / 16; ++n) {
                const float four[4] = {o[n][0][2 * half] * factor, o[n][1][2 * half] * factor,
                                       o[n][0][2 * half + 1] * factor, o[n][1][2 * half + 1] * factor};
                const int element = warp * WARP_DIMS + n * 16 + 4 * t;
                if (direct) {
                    Vec<out_t, 4>::from_floats(four).store(out + seq * out_stride + int64_t(head) * LATENT_SIZE +
                                                           element);
                } else {
                    Vec<float, 4>::from_floats(four).store(tmp_out + part * LATENT_SIZE + element);
                }
            }
        }
        __syncthreads();  // the next item overwrites what other warps may still read
    }
}
