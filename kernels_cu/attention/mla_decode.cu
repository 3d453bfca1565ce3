// mla_decode: MLA decode attention (one query token per sequence) over a paged cache of latent entries.
//
//     l_i = scale * (q_nope . c_i + q_pe . r_i)                       0 <= i < length
//     out = sum_i exp(l_i - m) c_i / (sum_i exp(l_i - m) + 1e-6),     m = max_i l_i
//
// A latent entry of the cache is a latent vector c_i followed by a rotated key r_i (RoPE). The whole entry is the key
// of every head, and its latent vector is the value of every head: an entry is read once.
//
// Grid: blockIdx.x counts sequences and groups of HEADS heads; blockIdx.y counts splits (split-KV, attention.cuh). A
// CTA goes through its split in tiles of TOKENS entries. While it computes a tile, it copies the next one to shared
// memory (or to registers, where copies are held: async.cuh). Entries of an fp8 cache are converted to product_t in
// shared memory.
//
// Thread mapping, for each tile, with the MMAs of product.cuh (M: heads):
// 1. S = Q K^T: groups of PARTS warps share the scores of up to 32 heads. Each warp of a group handles a part of K, and
//    the partial sums are added in shared memory.
// 2. Online softmax: ROW_THREADS threads convert the logits of one head to probabilities, rounded to product_t.
// 3. O += P V: each warp has WARP_DIMS elements of the latent vector, for all heads.
//
// A token with an invalid page or slot number contributes nothing. A slot after the end of the sequence is not read.
//
// Constants
//     query_t        element type of the queries: half_t, bf16_t or fp8_e4m3_t
//     product_t      element type of MMA operands; represents queries and entries exactly: half_t or bf16_t
//     cache_t        element type of the cache: product_t or fp8_e4m3_t
//     out_t          element type of out
//     table_t, length_t    element types of page_table and seq_lens
//     PAGE_SIZE      slots of a page of the cache
//     LISTS_SLOTS    page_table lists the slot of each token (mla_tokens.cuh)
//     QUERY_TOKENS   query tokens of a sequence; its heads are those of each token (mla_tokens.cuh)
//     HAS_LENGTHS    seq_lens is given; otherwise every sequence has max_tokens tokens
//     HEADS          heads of a CTA: 16, 32 or 64
//     TOKENS         entries of a tile
//     NUM_WARPS      warps of a CTA: 4 or 8
//     IS_DS_MLA      the cache has the format "fp8_ds_mla" (mla_entry.cuh)
//     QUERY_ACCESS   elements of the queries in one memory access
//     OUT_ACCESS     elements of out in one memory access: 1 or 2

#include "attention.cuh"
#include "mla_entry_tiles.cuh"
#include "mla_tokens.cuh"
#include "product.cuh"

constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;

// Shared memory holds the queries, the tiles of entries, partial scores, and probabilities.
constexpr int PROBABILITY_PITCH = TOKENS + 8, LOGIT_PITCH = TOKENS + 8;
constexpr int PARTS = 4;  // split of K, the elements of an entry
constexpr int QUERY_BYTES = HEADS * PITCH * 2;
constexpr int LOGIT_BYTES = PARTS * HEADS * LOGIT_PITCH * 4;

// S = Q K^T: the heads, tokens and k-blocks of a warp.
constexpr int WARP_HEADS = HEADS < 32 ? HEADS : 32;
constexpr int WARP_TOKENS = HEADS / WARP_HEADS * TOKENS * PARTS / NUM_WARPS;
constexpr int HEAD_GROUPS = HEADS / WARP_HEADS;
constexpr int STEPS = ENTRY_SIZE / 16 / PARTS;                   // k-blocks of 16 elements per warp
constexpr int STEP_UNROLL = MATRIX_CORE == WMMA_11 ? 1 : STEPS;  // gfx11: operands of more k-blocks would spill
// Softmax: threads that share a head. Each has at least one pair of tokens; the CTA may have idle threads.
constexpr int ROW_THREADS = NUM_THREADS / HEADS < TOKENS / 2 ? NUM_THREADS / HEADS : TOKENS / 2;
constexpr bool ALL_HAVE_HEADS = ROW_THREADS * HEADS == NUM_THREADS;
constexpr int PAIRS = TOKENS / 2 / ROW_THREADS;  // pairs of adjacent tokens of a thread
// O += P V: the elements of the latent vector of a warp, in MMAs of 16 heads.
constexpr int WARP_DIMS = LATENT_SIZE / NUM_WARPS;
constexpr int HEAD_TILES = HEADS / 16, DIM_TILES = WARP_DIMS / PRODUCT_COLUMNS;
constexpr int COLUMN_TILES = 16 / PRODUCT_COLUMNS;  // MMAs per 16 columns
constexpr int LOGITS = WARP_TOKENS / PRODUCT_COLUMNS * PRODUCT_SUMS,
              OUT_SUMS = DIM_TILES * PRODUCT_SUMS;  // accumulators per 16 heads
using entries_t = PitchedTile<product_t, PITCH>;
using entry_tiles_t = EntryTiles<IS_FP8 ? 1 : 2, 1>;
using probabilities_t = PitchedTile<product_t, PROBABILITY_PITCH>;
static_assert(WARP_TOKENS % 16 == 0 && PAIRS * ROW_THREADS * 2 == TOKENS);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
mla_decode(out_t* out,                          // [num_seqs, num_heads, LATENT_SIZE]
           float* lse,                          // [num_seqs, num_heads]
           float* tmp_out,                      // [num_seqs, num_heads, max_splits, LATENT_SIZE]
           float* max_logits,                   // [num_seqs, num_heads, max_splits]
           float* exp_sums,                     // [num_seqs, num_heads, max_splits]
           const query_t* q_nope,               // [num_seqs, num_heads, LATENT_SIZE]
           const query_t* q_pe,                 // [num_seqs, num_heads, ROPE_SIZE]
           const cache_t* kv_c_and_k_pe_cache,  // [num_pages, PAGE_SIZE, an entry]
           const length_t* seq_lens,            // [num_seqs]
           const table_t* page_table,           // [num_seqs, max_pages]
           int64_t num_heads, int64_t num_pages, int64_t max_tokens, int64_t max_splits, int64_t min_split,
           int64_t out_stride, int64_t nope_stride, int64_t nope_head_stride, int64_t pe_stride, int64_t pe_head_stride,
           int64_t page_stride, int64_t slot_stride, int64_t table_stride, int64_t table_step, int64_t length_step,
           float scale) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    unsigned char* const shared = reinterpret_cast<unsigned char*>(memory);
    __shared__ float factors[HEADS];        // correction factor of each head's accumulators
    __shared__ uint8_t exists[2 * TOKENS];  // whether each token of the two tiles has an entry
    const int head_blocks = ceil_div(int(num_heads), HEADS);
    const int first_head = blockIdx.x % head_blocks * HEADS, block_heads = min(HEADS, int(num_heads) - first_head);
    const int64_t seq = blockIdx.x / head_blocks;
    const int split = blockIdx.y, warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int g = lane_row(lane), t = lane_column(lane);
    const int64_t length = HAS_LENGTHS ? int64_t(seq_lens[seq * length_step]) : max_tokens;
    const Splits splits(length, max_tokens, 0, 0, int(max_splits), int(min_split));
    const bool direct = splits.count <= 1;
    if (!splits.exists(split) && !(direct && split == 0)) return;
    const int end = splits.end(split);

    product_t* const queries = reinterpret_cast<product_t*>(shared);
    const entry_tiles_t tiles{shared + QUERY_BYTES, kv_c_and_k_pe_cache};
    unsigned char* const behind = shared + QUERY_BYTES + entry_tiles_t::BYTES;
    float* const logit_parts = reinterpret_cast<float*>(behind);
    product_t* const probabilities = reinterpret_cast<product_t*>(behind + LOGIT_BYTES);

    // The offset in the cache of the lane's entry of the tile at `start`.
    const TokenTable table{page_table + seq * table_stride, table_step, num_pages, page_stride, slot_stride};
    const auto place_at = [&](int start) {
        const int token = start + entry_tiles_t::row_of_lane();
        return token < end ? table.find(table.at(token), token) : NOWHERE;
    };
    held_entries_t held;

    // The copies of the first tile are in flight while the queries are prepared.
    int start = splits.begin(split);
    if (start < end) {
        tiles.load(0, place_at(start), exists, held);
        cp_async_commit();
        tiles.store(0, held);
    }
    int64_t next_place = place_at(start + TOKENS);
    for (int i = threadIdx.x; i < HEADS * (ENTRY_SIZE / QUERY_ACCESS); i += NUM_THREADS) {
        const int head = i / (ENTRY_SIZE / QUERY_ACCESS), element = i % (ENTRY_SIZE / QUERY_ACCESS) * QUERY_ACCESS;
        float x[QUERY_ACCESS] = {};
        if (head < block_heads) {
            const query_t* from =
                element < LATENT_SIZE
                    ? q_nope + seq * nope_stride + (first_head + head) * nope_head_stride + element
                    : q_pe + seq * pe_stride + (first_head + head) * pe_head_stride + element - LATENT_SIZE;
            Vec<query_t, QUERY_ACCESS>::load(from).to_floats(x);
        }
        using vec_t = Vec<product_t, QUERY_ACCESS>;
        *reinterpret_cast<vec_t*>(queries + head * PITCH + element) = vec_t::from_floats(x);
    }

    const float unit = scale * LOG2_E;
    // Positions of the warp's scores and of the thread's probabilities.
    const int part = warp % PARTS, first_row = warp / PARTS % HEAD_GROUPS * WARP_HEADS;
    const int first_token = warp / PARTS / HEAD_GROUPS * WARP_TOKENS;
    // A thread without a head reads the logits of the last one.
    const bool has_head = ALL_HAVE_HEADS || threadIdx.x < ROW_THREADS * HEADS;
    const int own_head = ALL_HAVE_HEADS ? threadIdx.x / ROW_THREADS : min(int(threadIdx.x) / ROW_THREADS, HEADS - 1);
    const int own_pair = threadIdx.x % ROW_THREADS;
    const int own_end = QUERY_TOKENS > 1 ? attended_tokens(splits.length, first_head + own_head, num_heads) : 0;
    float max_logit = minus_infinity(), exp_sum = 0.0f, o[HEAD_TILES][DIM_TILES][PRODUCT_SUMS];
#pragma unroll
    for (int i = 0; i < HEAD_TILES * OUT_SUMS; ++i) {
        o[i / OUT_SUMS][i / PRODUCT_SUMS % DIM_TILES][i % PRODUCT_SUMS] = 0.0f;
    }

    for (int stage = 0; start < end; start += TOKENS, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads();
        if (IS_FP8) {
            tiles.convert_codes(0, 0);
            __syncthreads();
        }
        if (start + TOKENS < end) {
            tiles.load(stage ^ 1, next_place, exists + (stage ^ 1) * TOKENS, held);
            cp_async_commit();
        }
        next_place = place_at(start + 2 * TOKENS);
        product_t* const tile = tiles.at(stage);

        // S = Q K^T, the warp's part of K. M: heads, N: tokens.
        float s[WARP_HEADS / 16][WARP_TOKENS / PRODUCT_COLUMNS][PRODUCT_SUMS];
#pragma unroll
        for (int i = 0; i < WARP_HEADS / 16 * LOGITS; ++i) {
            s[i / LOGITS][i / PRODUCT_SUMS % (WARP_TOKENS / PRODUCT_COLUMNS)][i % PRODUCT_SUMS] = 0.0f;
        }
#pragma unroll STEP_UNROLL
        for (int step = 0; step < STEPS; ++step) {
            uint32_t a[WARP_HEADS / 16][SHORT_WORDS];
#pragma unroll
            for (int m = 0; m < WARP_HEADS / 16; ++m) {
                load_rows(a[m], entries_t{queries}, first_row + m * 16, part * STEPS + step, lane);
            }
#pragma unroll
            for (int n = 0; n < WARP_TOKENS / 16; ++n) {
                uint32_t b[SHORT_WORDS];
                load_columns(b, entries_t{tile}, first_token + n * 16, part * STEPS + step, lane);
#pragma unroll
                for (int m = 0; m < WARP_HEADS / 16; ++m) {
                    product<product_t>(s[m][COLUMN_TILES * n], a[m], b, 0);
                    if constexpr (COLUMN_TILES == 2) product<product_t>(s[m][2 * n + 1], a[m], b, 1);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < WARP_HEADS / 16; ++m) {
#pragma unroll
            for (int i = 0; i < LOGITS / 2; ++i) {
                const int n = i / (PRODUCT_SUMS / 2), pair = i % (PRODUCT_SUMS / 2), half = pair / (ROW_SUMS / 2);
                const int row = part * HEADS + first_row + m * 16 + g + half * 8;
                const int column = first_token + n * PRODUCT_COLUMNS + t + pair % (ROW_SUMS / 2) * 2;
                *reinterpret_cast<float2*>(logit_parts + row * LOGIT_PITCH + column) =
                    float2{s[m][n][2 * pair], s[m][n][2 * pair + 1]};
            }
        }
        __syncthreads();

        // The online softmax of one head.
        float logits[PAIRS * 2], larger = max_logit;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int token = 2 * (i * ROW_THREADS + own_pair);
            float2 logit{};
#pragma unroll
            for (int k = 0; k < PARTS; ++k) {
                const float2 partial =
                    *reinterpret_cast<const float2*>(logit_parts + (k * HEADS + own_head) * LOGIT_PITCH + token);
                logit.x += partial.x;
                logit.y += partial.y;
            }
            logits[2 * i] = exists[stage * TOKENS + token] ? logit.x * unit : minus_infinity();
            logits[2 * i + 1] = exists[stage * TOKENS + token + 1] ? logit.y * unit : minus_infinity();
            if (QUERY_TOKENS > 1 && start + token >= own_end) logits[2 * i] = minus_infinity();
            if (QUERY_TOKENS > 1 && start + token + 1 >= own_end) logits[2 * i + 1] = minus_infinity();
            larger = fmaxf(larger, fmaxf(logits[2 * i], logits[2 * i + 1]));
        }
#pragma unroll
        for (int mask = 1; mask < ROW_THREADS; mask *= 2) larger = fmaxf(larger, shfl_xor(larger, mask));
        const float correction = relative_exp2(max_logit, larger);
        max_logit = larger;
        exp_sum *= correction;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const float low = probability_of<product_t>(logits[2 * i], max_logit);
            const float high = probability_of<product_t>(logits[2 * i + 1], max_logit);
            exp_sum += low + high;
            const uint32_t pair = pack_pair<product_t>(low, high);
            product_t* const to = probabilities + own_head * PROBABILITY_PITCH + 2 * (i * ROW_THREADS + own_pair);
            if (has_head) *reinterpret_cast<uint32_t*>(to) = pair;
        }
        if (has_head && own_pair == 0) factors[own_head] = correction;
        __syncthreads();

        // O += P V. M: heads, N: elements of the latent vector.
#pragma unroll
        for (int m = 0; m < HEAD_TILES; ++m) {
            float factor[LANE_ROWS];
            bool shrinks = false;
#pragma unroll
            for (int half = 0; half < LANE_ROWS; ++half) {
                factor[half] = factors[m * 16 + g + half * 8];
                shrinks |= factor[half] != 1.0f;
            }
            if (any_lane(shrinks)) {
#pragma unroll
                for (int i = 0; i < OUT_SUMS; ++i) {
                    o[m][i / PRODUCT_SUMS][i % PRODUCT_SUMS] *= factor[i / ROW_SUMS % LANE_ROWS];
                }
            }
        }
#pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) {
            uint32_t a[HEAD_TILES][SHORT_WORDS];
#pragma unroll
            for (int m = 0; m < HEAD_TILES; ++m) load_rows(a[m], probabilities_t{probabilities}, m * 16, k, lane);
#pragma unroll
            for (int n = 0; n < WARP_DIMS / 16; ++n) {
                uint32_t b[SHORT_WORDS];
                load_transposed(b, entries_t{tile}, k * 16, warp * (WARP_DIMS / 16) + n, lane);
#pragma unroll
                for (int m = 0; m < HEAD_TILES; ++m) {
                    product<product_t>(o[m][COLUMN_TILES * n], a[m], b, 0);
                    if constexpr (COLUMN_TILES == 2) product<product_t>(o[m][2 * n + 1], a[m], b, 1);
                }
            }
        }
        if (start + TOKENS < end) tiles.store(stage ^ 1, held);
    }
    cp_async_wait<0>();
    __syncthreads();

    // The combine adds the formula's epsilon of 1e-6 to partial results; 1e-20 only guards against 0 / 0.
#pragma unroll
    for (int mask = 1; mask < ROW_THREADS; mask *= 2) exp_sum += shfl_xor(exp_sum, mask);
    exp_sum *= FULL_SCALE<product_t>;
    if (has_head && own_pair == 0) {
        factors[own_head] = 1.0f / (exp_sum + (direct ? 1e-6f : 1e-20f)) * FULL_SCALE<product_t>;
        const int64_t row = seq * num_heads + first_head + own_head;
        if (own_head < block_heads && !direct) {
            max_logits[row * max_splits + split] = max_logit * LN_2;
            exp_sums[row * max_splits + split] = exp_sum;
        } else if (HAS_LSE && own_head < block_heads) {
            lse[row] = exp_sum == 0.0f ? minus_infinity() : max_logit * LN_2 + logf(exp_sum);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HEAD_TILES * LANE_ROWS; ++i) {
        const int m = i / LANE_ROWS, half = i % LANE_ROWS, head = m * 16 + g + half * 8;
        if (head >= block_heads) continue;
        const float factor = factors[head];
        const int element = warp * WARP_DIMS + t;
        const int64_t row = (seq * num_heads + first_head + head) * max_splits + split;
#pragma unroll
        for (int n = 0; n < DIM_TILES; ++n) {
#pragma unroll
            for (int l = 0; l < ROW_SUMS; l += 2) {
                const int at = half * ROW_SUMS + l, column = n * PRODUCT_COLUMNS + l;
                const float pair[2] = {o[m][n][at] * factor, o[m][n][at + 1] * factor};
                if (direct) {
                    Vec<out_t, 2>::from_floats(pair).template store<OUT_ACCESS>(
                        out + seq * out_stride + int64_t(first_head + head) * LATENT_SIZE + element + column);
                } else {
                    Vec<float, 2>::from_floats(pair).store(tmp_out + row * LATENT_SIZE + element + column);
                }
            }
        }
    }
}
