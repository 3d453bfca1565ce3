// mla_decode_sm90_fp8: MLA decode attention on Hopper over an fp8 cache: computes what mla_decode.cu does, with WGMMA and
// TMA. Entries stay fp8 in shared memory, and are the A operand of both matmuls.
//
//     l_i = scale * (q_nope . c_i + q_pe . r_i)                       0 <= i < length
//     out = sum_i exp(l_i - m) c_i / (sum_i exp(l_i - m) + 1e-6),     m = max_i l_i
//
// An entry of the cache is a latent vector c_i and a rotated key r_i (RoPE): the key of every head. c_i is the value.
//
// The rows of an MMA are tokens, or elements of the latent vectors, and its columns are heads: S^T = K Q^T, O^T = V^T P^T.
// So few heads leave no rows empty, and the A operand may come from registers: a warp loads fp8 values of a tile and
// converts them to float16, which represents every fp8 value, one instruction for each pair.
//
// Grid: blockIdx.x counts groups of HEADS heads, and blockIdx.y shares of the tokens of all sequences
// (mla_schedule.cuh). A CTA goes through each item of its share in tiles of TOKENS entries.
//
// Warp specialisation: one warp loads tiles by TMA into a ring of STAGES. Two warpgroups compute: each of them takes every
// second tile of an item, and they add their results at its end. They share no barrier in the main loop. A warpgroup does
// for a tile:
// 1. S^T = K Q^T: a warp has 16 tokens. Four adjacent lanes load 16 fp8 values each of a panel of 64 elements of an
//    entry; the elements of queries are in the same order.
// 2. Online softmax: the warps exchange probabilities through shared memory. These are relative to the row maxima of
//    earlier tiles, until a logit is more than MAX_GROWTH larger: then the warps exchange row maxima, too, and rescale.
// 3. O^T += V^T P^T: an MMA has the 64 elements of a panel, 16 for each warp. ldmatrix transposes pairs of fp8 values; a
//    word then holds those of two adjacent tokens, and a byte permutation sorts them.
// Before it waits for the last MMAs of a tile, a warp loads and converts the first A operand of its next tile.
//
// Queries of fp8 are multiplied as they are (IS_JOINT): S^T = K Q^T has both operands in shared memory, with accumulators
// of 14 bits (wgmma.cuh), and only values are converted. The warpgroups take the two tiles of each pair: a warpgroup
// computes the scores of its own tile, and multiplies half of the elements of both tiles by the probabilities of both.
// So 64 heads have accumulators in registers, and nothing is added up at the end of an item. A pair has one barrier of
// both warpgroups, between the probabilities and the values; probabilities have as many buffers as tiles. An item has
// whole pairs: the producer fills a tile without a token with zeros.
//
// A token with an invalid page number contributes nothing, and neither does a slot after the end of the sequence.
//
// Constants
//     query_t        element type of queries: half_t, bf16_t, or fp8_e4m3_t
//     HEADS          query heads of a CTA: 32, or 64 for queries of fp8
//     cache_t        element type of the cache: fp8_e4m3_t
//     out_t, table_t, length_t    element types of out, page_table and seq_lens
//     PAGE_SIZE      slots of a page of the cache
//     LISTS_SLOTS    false (mla_tokens.cuh)
//     QUERY_TOKENS   query tokens of a sequence; its heads are those of each token (mla_tokens.cuh)
//     HAS_LENGTHS    seq_lens is given; otherwise every sequence has max_tokens tokens
//     BOX_TOKENS     entries of a TMA box: a multiple of 8 that divides TOKENS and PAGE_SIZE
//     IS_DS_MLA      false (mla_entry.cuh)
//     COMBINES       the CTAs combine the pieces of a sequence (mla_tree_combine.cuh); otherwise mla_combine.cu does

#include "async.cuh"
#include "attention.cuh"
#include "mla_entry.cuh"
#include "mla_tokens.cuh"
#include "mla_tree_combine.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

constexpr bool IS_JOINT = is_same<query_t, fp8_e4m3_t>;  // the warpgroups share each pair of tiles
constexpr int TOKENS = 64, PANEL_SIZE = 64, PANELS = ENTRY_SIZE / PANEL_SIZE, LATENT_PANELS = LATENT_SIZE / PANEL_SIZE;
constexpr int STAGES = 4, CONSUMERS = 256;
constexpr int QUERY_LANES = CONSUMERS / HEADS;  // threads that load a head
constexpr int ROWS = HEADS / 4;                 // heads of a thread: 2t and 2t + 1 of each eight
// Panels with accumulators in a warpgroup, and those with complete results there once the warpgroups have added theirs.
constexpr int OWN_PANELS = IS_JOINT ? LATENT_PANELS / 2 : LATENT_PANELS, RESULT_PANELS = LATENT_PANELS / 2;
// Shared memory: the queries, panels of HEADS rows, later the results that the warpgroups exchange; probabilities of each
// warpgroup, or of each tile [tokens, heads]; tiles.
constexpr int QUERY_PANEL_BYTES = HEADS * PANEL_SIZE * (IS_JOINT ? 1 : 2), QUERY_BYTES = PANELS * QUERY_PANEL_BYTES;
constexpr int EXCHANGED = IS_JOINT ? 0 : LATENT_PANELS / 2 * HEADS / 8;  // float4 of a thread
constexpr int EXCHANGED_BYTES = EXCHANGED * CONSUMERS * 16;
constexpr int PROBABILITIES_AT = QUERY_BYTES > EXCHANGED_BYTES ? QUERY_BYTES : EXCHANGED_BYTES;
constexpr int PROBABILITY_BYTES = TOKENS * HEADS * 2;
constexpr int TILES_AT = PROBABILITIES_AT + (IS_JOINT ? STAGES : 2) * PROBABILITY_BYTES;
constexpr int GROUP_BYTES = 8 * ENTRY_BYTES, GROUP_PANEL_BYTES = 8 * PANEL_SIZE;  // of eight tokens, and of a panel
constexpr int TILE_BYTES = TOKENS * ENTRY_BYTES;
constexpr SmemSwizzle PROBABILITY_SWIZZLE = HEADS == 64 ? SWIZZLE_128B : SWIZZLE_64B;
constexpr int BUFFERS = 3;  // A operands are in so many buffers in registers
// The buffer of a tile's first values: that of the last ones is then the last, and keys begin with the first.
constexpr int FIRST_BUFFER = BUFFERS - 1 - (2 * LATENT_PANELS - 1) % BUFFERS;
constexpr int WARPS_OF_SCORES = IS_JOINT ? 8 : 4;  // warps with the same row maxima
constexpr int ALL_WARPS = 1, OWN_WARPS = 2;        // named barriers: of both warpgroups; OWN_WARPS + i: of warpgroup i
constexpr int LOADER_REGISTERS = 24, REGISTERS = (3 * 168 - LOADER_REGISTERS) / 2;  // of a thread
// A probability is at most 2^MAX_GROWTH: float16 then has as many bits of it as of one up to 1.
constexpr float MAX_GROWTH = 8.0f;
constexpr float LOWEST_LOGIT = -0x1.fffffep127f;  // the first row max: the lowest float, so differences are no NaN
using product_t = half_t;                         // represents every fp8 value
static_assert(HEADS == 32 || (HEADS == 64 && IS_JOINT));
static_assert(!IS_DS_MLA && !LISTS_SLOTS && BOX_TOKENS % 8 == 0 && TOKENS % BOX_TOKENS == 0);
static_assert(PAGE_SIZE % BOX_TOKENS == 0 && TILES_AT % 1024 == 0);

// The offset of a chunk of 16 fp8 values of a panel. A box has nine panels of each eight tokens, rows of 64 bytes.
DEVICE int place_in_tile(int token, int panel, int chunk) {
    return token / 8 * GROUP_BYTES + panel * GROUP_PANEL_BYTES + swizzle_chunk<PANEL_SIZE>(token % 8, chunk);
}

DEVICE void load_words(const uint8_t* shared, uint32_t (&words)[4]) {
    const uint4 x = *reinterpret_cast<const uint4*>(shared);
    words[0] = x.x;
    words[1] = x.y;
    words[2] = x.z;
    words[3] = x.w;
}

// Reduces each x[n] over lanes g. Lane g then has the result of n = g * OWN_ROWS + i in x[i].
constexpr int OWN_ROWS = ROWS / 8;
template <int MASK = 16, typename F>
DEVICE void reduce_rows(float (&x)[ROWS], F f) {
    constexpr int KEPT = ROWS * MASK / 32;
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const float own = lane & MASK ? x[i + KEPT] : x[i], other = lane & MASK ? x[i] : x[i + KEPT];
        x[i] = f(own, shfl_xor(other, MASK));
    }
    if constexpr (MASK > 4) reduce_rows<MASK / 2>(x, f);
}

// The queries of a CTA: each head has QUERY_LANES threads. All threads of both warpgroups call.
struct Queries {
    static constexpr int WIDTH = 16 / sizeof(query_t), LANES = QUERY_LANES, CHUNKS = ENTRY_SIZE / WIDTH;
    static constexpr int LOADS = ceil_div(CHUNKS, LANES);
    Vec<query_t, WIDTH> x[LOADS];

    // Calls f(i, chunk, address) for chunk i of the thread. `nope` and `pe`: the query of its head.
    template <typename F>
    static DEVICE void each_chunk(const query_t* nope, const query_t* pe, F f) {
        const int part = threadIdx.x % LANES;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int chunk = i * LANES + part, at = chunk * WIDTH;
            if (chunk < CHUNKS) f(i, chunk, i * LANES * WIDTH < LATENT_SIZE ? nope + at : pe + at - LATENT_SIZE);
        }
    }
    // Loads them to registers.
    DEVICE void load(bool is_head, const query_t* nope, const query_t* pe) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) x[i] = Vec<query_t, WIDTH>::full(0.0f);
        each_chunk(nope, pe, [&](int i, int, const query_t* from) {
            if (is_head) x[i] = Vec<query_t, WIDTH>::load(from);
        });
    }
    // Copies queries of fp8 to shared memory; zeros for a head that does not exist.
    static DEVICE void copy(uint8_t* queries, bool is_head, const query_t* nope, const query_t* pe) {
        const int head = threadIdx.x / LANES;
        each_chunk(nope, pe, [&](int, int chunk, const query_t* from) {
            uint8_t* const panel = queries + chunk / 4 * QUERY_PANEL_BYTES;
            cp_async<16>(panel + swizzle_chunk<PANEL_SIZE>(head, chunk % 4), from, is_head);
        });
        cp_async_commit();
    }
    // Stores those in registers as float16, each divided by a power of two; `units`: the factors from a head's scores to
    // its logits.
    // An MMA takes elements 16t + 4i to 16t + 4i + 3 of a panel, for t = 0 ... 3: as 2t and 2t + 1, and 8 more.
    DEVICE void store(uint8_t* queries, float* units, float scale) const {
        const int head = threadIdx.x / LANES, part = threadIdx.x % LANES;
        float absmax = 0.0f, element[WIDTH];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            x[i].to_floats(element);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) absmax = fmaxf(absmax, fabsf(element[j]));
        }
#pragma unroll
        for (int mask = 1; mask < LANES; mask *= 2) absmax = fmaxf(absmax, shfl_xor(absmax, mask));
        const float factor = inverse_power_of_two(absmax);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int chunk = i * LANES + part, t = chunk / 2 % 4;
            if (chunk >= CHUNKS) continue;
            x[i].to_floats(element);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int product = chunk % 2 * 2 + j / 2;
                *reinterpret_cast<uint32_t*>(queries + chunk / 8 * QUERY_PANEL_BYTES +
                                             swizzle_128b(head, product * 32 + j % 2 * 16 + 4 * t)) =
                    pack_pair<product_t>(element[2 * j] * factor, element[2 * j + 1] * factor);
            }
        }
        if (part == 0) units[head] = scale * LOG2_E / factor;
    }
};

extern "C" __global__ void LAUNCH_BOUNDS(384, 1)
mla_decode_sm90_fp8(const __grid_constant__ TensorMap
                        cache_map,              // [num_pages, PAGE_SIZE / 8, 9, 8, 64]; 1 x BOX_TOKENS / 8 x 9 x 8 x 64
                    out_t* out,                 // [num_seqs, num_heads, LATENT_SIZE]
                    float* lse,                 // [num_seqs, num_heads]
                    float* tmp_out,             // [slots, num_heads, LATENT_SIZE]; COMBINES: partials of TreeCombine
                    float* max_logits,          // [slots, num_heads], in units of log 2
                    float* exp_sums,            // [slots, num_heads]
                    MlaPieces* pieces,          // [num_seqs]
                    uint32_t* nodes,            // [shares, head groups, 8], if COMBINES
                    const query_t* q_nope,      // [num_seqs, num_heads, LATENT_SIZE]
                    const query_t* q_pe,        // [num_seqs, num_heads, ROPE_SIZE]
                    const length_t* seq_lens,   // [num_seqs]
                    const table_t* page_table,  // [num_seqs, max_pages]
                    int64_t num_seqs, int64_t num_heads, int64_t num_pages, int64_t max_tokens, int64_t max_splits,
                    int64_t out_stride, int64_t nope_stride, int64_t nope_head_stride, int64_t pe_stride,
                    int64_t pe_head_stride, int64_t table_stride, int64_t table_step, int64_t length_step,
                    float join_units, float piece_units, float level_units, int64_t item_units, float scale) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ uint64_t barriers[2 * STAGES];
    __shared__ uint64_t exists[STAGES];                  // a bit for each token of a tile that has an entry
    __shared__ __align__(8) float units[HEADS];          // factors from scores to logits
    __shared__ int row_ends[HEADS];                      // attended_tokens of each head, if QUERY_TOKENS > 1
    __shared__ __align__(16) uint32_t grows[STAGES][4];  // whether a warp's logits of a tile exceed MAX_GROWTH
    __shared__ __align__(8) float warp_max[8][HEADS];    // row maxima of a tile, per warp
    __shared__ __align__(8) float warp_sums[8][HEADS];   // exp_sum of an item, per warp
    __shared__ __align__(8) float item_max[2][HEADS];    // row maxima of an item, per warpgroup
    uint8_t* const queries = memory;
    uint8_t* const tiles = memory + TILES_AT;
    Ring<STAGES> ring(barriers);
    if (threadIdx.x == 0) ring.init(IS_JOINT ? 8 : 4);
    prefetch_indices(seq_lens, length_step, page_table, table_stride, table_step, num_seqs, max_tokens, PAGE_SIZE,
                     blockIdx.y);
    prefetch_tensor_maps(cache_map);
    __syncthreads();
    await_previous_kernel();

    const int first_head = blockIdx.x * HEADS;
    MlaSchedule<2 * TOKENS, length_t, HAS_LENGTHS> schedule(seq_lens, length_step, num_seqs, max_tokens, max_splits,
                                                            join_units, piece_units, level_units, item_units, gridDim.y,
                                                            blockIdx.y);
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0), lane = threadIdx.x % 32;

    if (warpgroup == 2) {
        warpgroup_reg_dealloc<LOADER_REGISTERS>();
        if (threadIdx.x / 32 % 4 > 0) return;
        constexpr int BOXES = TOKENS / BOX_TOKENS;
        for (; schedule.has_item(); schedule.next()) {
            const MlaItem item = schedule.item();
            const TokenTable table{page_table + item.seq * table_stride, table_step, num_pages, 0, 0};
            // Lane i has the page of box i of a tile, or -1 if it is invalid: TMA then fills zeros.
            const auto page_at = [&](int start, int loaded_end) {
                const int token = start + lane % BOXES * BOX_TOKENS;
                const int64_t page = token < loaded_end ? table.at(token) : int64_t(-1);
                return token < item.end && table.exists(page) ? int(page) : -1;
            };
            int next_page = page_at(item.begin, schedule.max_tokens);
            const int tiles_end =
                IS_JOINT ? item.begin + ceil_div(item.end - item.begin, 2 * TOKENS) * 2 * TOKENS : item.end;
            for (int start = item.begin; start < tiles_end; start += TOKENS, ring.advance()) {
                const int page = next_page;
                next_page = page_at(start + TOKENS, item.end);
                const uint32_t found = ballot(page >= 0);
                ring.acquire();
                if (lane == 0) {
                    uint64_t bits = 0;
                    for (int box = 0; box < BOXES; ++box) {
                        if (found >> box & 1) bits |= ~uint64_t(0) >> (64 - BOX_TOKENS) << box * BOX_TOKENS;
                    }
                    const int left = max(item.end - start, 0);
                    exists[ring.stage] = left < TOKENS ? bits & ~(~uint64_t(0) << left) : bits;
                    mbarrier_arrive_expect_tx(ring.full(), TILE_BYTES);
                }
                sync_warp();
                if (lane < BOXES) {
                    tma_load(tiles + ring.stage * TILE_BYTES + lane * BOX_TOKENS * ENTRY_BYTES, &cache_map, ring.full(),
                             0, 0, 0, (start + lane * BOX_TOKENS) % PAGE_SIZE / 8, page);
                }
            }
        }
        return;
    }

    warpgroup_reg_alloc<REGISTERS>();
    const int thread = threadIdx.x % 128, warp = thread / 32, g = lane / 4, t = lane % 4, token = warp * 16 + g;
    const auto probabilities_of = [&](int stage) {
        return memory + PROBABILITIES_AT + (IS_JOINT ? stage : warpgroup) * PROBABILITY_BYTES;
    };
    const auto head_of = [&](int n) { return n / 2 * 8 + 2 * t + n % 2; };  // head n of the thread
    const auto sync_own = [&] { named_barrier_sync(OWN_WARPS + warpgroup, 128); };
    const auto sync_of_scores = [&] {
        if constexpr (IS_JOINT) named_barrier_sync<ALL_WARPS>(CONSUMERS);
        else sync_own();
    };
    const int first_of_scores = IS_JOINT ? 0 : warpgroup * 4;  // the first of the warps with the same row maxima
    // The panel of o[i]. The warpgroups begin with different halves, so that each keeps the results of its first panels.
    const auto panel_of = [&](int i) { return i ^ warpgroup * (LATENT_PANELS / 2); };
    float max_logit[ROWS], exp_sum[ROWS], o[OWN_PANELS][HEADS / 2];
    uint32_t a[BUFFERS][2][4];  // A operands of two MMAs, and of the next ones while the first read theirs
    uint32_t quants[2][4];      // fp8 values of A operands

    // IS_JOINT: the row maxima are in shared memory, since registers are not enough.
    const auto max_of = [&](int n) { return IS_JOINT ? item_max[warpgroup][head_of(n)] : max_logit[n]; };

    // Zeroes slots without a token, which may hold NaN.
    const auto clear_missing = [&](uint8_t* tile, uint64_t bits) {
        constexpr int CHUNKS = PANEL_SIZE / 16;  // of a row
        for (int i = made_anew(thread); i < TILE_BYTES / 16; i += 128) {
            const int of_tile = i / (8 * PANELS * CHUNKS) * 8 + i / CHUNKS % 8;
            if (!(bits >> of_tile & 1)) reinterpret_cast<uint4*>(tile)[i] = make_uint4(0, 0, 0, 0);
        }
        fence_proxy_async();  // before TMA fills the tile again
        sync_own();
    };
    // Keys of a panel, for two pairs of MMAs.
    const auto load_keys = [&](const uint8_t* tile, int panel) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            load_words(tile + place_in_tile(token, panel, t) + upper * 8 * ENTRY_BYTES, quants[upper]);
        }
    };
    // Makes the A operands of pair i of MMAs, and loads the next keys.
    const auto convert_keys = [&](const uint8_t* tile, int i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t halves[2];
            fp8_to_half<cache_t>(quants[j % 2][i % 2 * 2 + j / 2], halves);
            a[i % BUFFERS][j / 2][j % 2] = halves[0];
            a[i % BUFFERS][j / 2][j % 2 + 2] = halves[1];
        }
        if (i % 2 == 1 && i / 2 + 1 < PANELS) load_keys(tile, i / 2 + 1);
    };
    // Waits for the current tile and makes the first A operands of its scores.
    const auto begin_scores = [&](int start, int end) {
        uint8_t* const tile = tiles + ring.stage * TILE_BYTES;
        ring.wait();
        const uint64_t bits = exists[ring.stage];
        if (~bits && (!IS_JOINT || start < end)) clear_missing(tile, bits);
        if constexpr (!IS_JOINT) {
            load_keys(tile, 0);
            warpgroup_wait<BUFFERS - 1>();
            convert_keys(tile, 0);
        }
    };
    // Starts the scores of fp8 queries: both operands are in shared memory.
    const auto start_scores = [&](float (&s)[HEADS / 2]) {
        const uint8_t* const tile = tiles + ring.stage * TILE_BYTES;
        const uint64_t keys = make_smem_desc<SWIZZLE_64B>(tile, GROUP_BYTES);
        const uint64_t of_heads = make_smem_desc<SWIZZLE_64B>(queries);
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < 2 * PANELS; ++i) {
            wgmma<cache_t, HEADS>(s, advance_smem_desc(keys, i / 2 * GROUP_PANEL_BYTES + i % 2 * 32),
                                  advance_smem_desc(of_heads, i / 2 * QUERY_PANEL_BYTES + i % 2 * 32), i > 0);
        }
        warpgroup_commit_batch();
    };
    const auto add_scores = [&](const uint8_t* tile, float (&s)[HEADS / 2]) {
#pragma unroll
        for (int i = 0; i < 2 * PANELS; ++i) {
            if (i > 0) {
                warpgroup_wait<BUFFERS - 1>();
                convert_keys(tile, i);
            }
            const uint64_t of_heads = make_smem_desc(queries + i / 2 * QUERY_PANEL_BYTES);
            warpgroup_arrive();
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                wgmma<product_t, HEADS>(s, a[i % BUFFERS][k], advance_smem_desc(of_heads, 32 * (i % 2 * 2 + k)),
                                        i > 0 || k > 0);
            }
            warpgroup_commit_batch();
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
    };
    // Makes logits of scores. The logit of a token without an entry, or of one that a head does not attend to, is -inf.
    const auto scale_scores = [&](int start, uint64_t bits, float (&s)[HEADS / 2]) {
#pragma unroll
        for (int i = 0; i < HEADS / 2; ++i) s[i] *= IS_JOINT ? scale * LOG2_E : units[head_of(i / 4 * 2 + i % 2)];
        if (~bits || (QUERY_TOKENS > 1 && start + TOKENS > row_ends[0])) {  // later heads have no earlier end
#pragma unroll
            for (int i = 0; i < HEADS / 2; ++i) {
                const int of_tile = token + i / 2 % 2 * 8;
                const bool attends = QUERY_TOKENS == 1 || start + of_tile < row_ends[head_of(i / 4 * 2 + i % 2)];
                if (!(bits >> of_tile & 1) || !attends) s[i] = minus_infinity();
            }
        }
    };
    // Stores probabilities of logits relative to max_logit, and adds them up. Returns the largest one less max_logit.
    // The four warps execute an MMA together, so all of them have read the last tile's probabilities once one has scores.
    // IS_JOINT: the other warpgroup may still read those of the last pair, but no earlier ones.
    const auto store_probabilities = [&](const float (&s)[HEADS / 2], float (&row_sums)[ROWS]) {
        float largest = minus_infinity();
        uint8_t* const probabilities = probabilities_of(ring.stage);
        const int row =
            made_anew(warp * 16 + lane % 16);  // otherwise the addresses stay in registers, and others spill
#pragma unroll
        for (int k = 0; k < HEADS / 16; ++k) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float p[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int n = k * 4 + i / 2 * 2 + j;
                    const float x = s[k * 8 + i * 2 + j] - max_of(n);
                    largest = fmaxf(largest, x);
                    p[j] = estimate_exp2(x);
                    row_sums[n] = i % 2 ? row_sums[n] + p[j] : p[j];
                }
                words[i] = pack_pair<product_t>(p[0], p[1]);
            }
            stmatrix<4>(probabilities + swizzle_chunk<HEADS * 2>(row, k * 2 + lane / 16), words);
        }
        fence_proxy_async();
        return largest;
    };
    const auto store_maxima = [&] {
        if (warp > 0 || g > 0) return;
#pragma unroll
        for (int n = 0; n < ROWS; ++n) item_max[warpgroup][head_of(n)] = max_logit[n];
    };
    // Raises max_logit to the row maxima of the tile, and rescales what was added up before.
    const auto raise_maxima = [&](const float (&s)[HEADS / 2]) {
        float top[ROWS];
#pragma unroll
        for (int n = 0; n < ROWS; ++n) top[n] = fmaxf(s[n / 2 * 4 + n % 2], s[n / 2 * 4 + 2 + n % 2]);
        reduce_rows(top, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) warp_max[warpgroup * 4 + warp][head_of(g * OWN_ROWS + i)] = top[i];
        sync_of_scores();
        float correction[ROWS];
#pragma unroll
        for (int n = 0; n < ROWS; ++n) {
            const float before = max_of(n);
            float larger = before;
#pragma unroll
            for (int w = 0; w < WARPS_OF_SCORES; ++w) larger = fmaxf(larger, warp_max[first_of_scores + w][head_of(n)]);
            correction[n] = relative_exp2(before, larger);
            max_logit[n] = larger;
            exp_sum[n] *= correction[n];
        }
        if constexpr (IS_JOINT) {
            sync_own();  // all have read the last ones
            store_maxima();
            sync_own();
        }
#pragma unroll
        for (int i = 0; i < OWN_PANELS * HEADS / 2; ++i) {
            const int of_panel = i % (HEADS / 2);
            o[i / (HEADS / 2)][of_panel] *= correction[of_panel / 4 * 2 + of_panel % 2];
        }
    };
    const auto softmax = [&](int start, uint64_t bits, float (&s)[HEADS / 2]) {
        scale_scores(start, bits, s);
        float row_sums[ROWS];
        const bool is_large = any_lane(store_probabilities(s, row_sums) > MAX_GROWTH);
        if (lane == 0) grows[ring.stage][warp] = is_large;
        sync_of_scores();
        uint4 of_warps = *reinterpret_cast<const uint4*>(grows[ring.stage]);
        if constexpr (IS_JOINT) {
            const uint4 of_others = *reinterpret_cast<const uint4*>(grows[ring.stage ^ 1]);
            of_warps.x |= of_others.x | of_others.y | of_others.z | of_others.w;
        }
        if (of_warps.x | of_warps.y | of_warps.z | of_warps.w) {
            raise_maxima(s);
            store_probabilities(s, row_sums);
            sync_of_scores();
        }
#pragma unroll
        for (int n = 0; n < ROWS; ++n) exp_sum[n] += row_sums[n];
    };
    // The stage of pair i of MMAs: IS_JOINT: of the warpgroup's own tile, then of the other one.
    const auto stage_of = [&](int i) { return ring.stage ^ i / (2 * OWN_PANELS); };
    // Values of a panel and 32 tokens, for pair i of MMAs: 16 elements of eight tokens to a word.
    const auto load_values = [&](int i) {
        const int panel = panel_of(i / 2 % OWN_PANELS);
        ldmatrix<4, true>(
            quants[0], tiles + stage_of(i) * TILE_BYTES + place_in_tile(lane, panel, warp) + i % 2 * 32 * ENTRY_BYTES);
    };
    const auto convert_values = [&](int i) {
        const int buffer = (i + FIRST_BUFFER) % BUFFERS;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            // Bytes of a word: an even and an odd element of a token, then the same of the next token.
            uint32_t halves[2];
            fp8_to_half<cache_t>(byte_perm(quants[0][j], 0, 0x3120), halves);
            a[buffer][j / 2][j % 2 * 2] = halves[0];
            a[buffer][j / 2][j % 2 * 2 + 1] = halves[1];
        }
    };
    const auto begin_values = [&] {
        load_values(0);
        convert_values(0);
        load_values(1);
    };
    const auto add_values = [&] {
#pragma unroll
        for (int i = 0; i < 2 * LATENT_PANELS; ++i) {
            const int panel = i / 2 % OWN_PANELS, buffer = (i + FIRST_BUFFER) % BUFFERS;
            if (i > 0) {
                warpgroup_wait<BUFFERS - 1>();
                convert_values(i);
                if (i + 1 < 2 * LATENT_PANELS) load_values(i + 1);
            }
            const uint64_t rows = make_smem_desc<PROBABILITY_SWIZZLE>(probabilities_of(stage_of(i)));
            if (i % 2 == 0) warpgroup_fence_operand(o[panel]);
            warpgroup_arrive();
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int step = i % 2 * 2 + k;
                wgmma<product_t, HEADS, true>(o[panel], a[buffer][k], advance_smem_desc(rows, step * 16 * HEADS * 2));
            }
            warpgroup_commit_batch();
        }
    };

    // Queries of an item are loaded while the results of the one before are exchanged and stored.
    Queries next_queries;
    const auto load_queries = [&] {
        const int64_t seq = schedule.seq, of = first_head + made_anew(threadIdx.x / QUERY_LANES);
        const bool has_item = schedule.has_item(), is_head = has_item && of < num_heads;
        const query_t* const nope = q_nope + seq * nope_stride + of * nope_head_stride;
        const query_t* const pe = q_pe + seq * pe_stride + of * pe_head_stride;
        if constexpr (!IS_JOINT) next_queries.load(is_head, nope, pe);
        else if (has_item) Queries::copy(queries, is_head, nope, pe);
    };
    load_queries();
    while (schedule.has_item()) {
        if constexpr (IS_JOINT) cp_async_wait<0>();
        else next_queries.store(queries, units, scale);
        if (QUERY_TOKENS > 1 && threadIdx.x < HEADS) {
            const int length = schedule.length_of(schedule.seq);
            row_ends[threadIdx.x] = attended_tokens(length, first_head + threadIdx.x, num_heads);
        }
#pragma unroll
        for (int n = 0; n < ROWS; ++n) {
            max_logit[n] = LOWEST_LOGIT;
            exp_sum[n] = 0.0f;
        }
        if constexpr (IS_JOINT) store_maxima();
        fence_proxy_async();
        named_barrier_sync<ALL_WARPS>(CONSUMERS);
#pragma unroll
        for (int i = 0; i < OWN_PANELS * HEADS / 2; ++i) o[i / (HEADS / 2)][i % (HEADS / 2)] = 0.0f;

        const int begin = schedule.item().begin, end = schedule.item().end;
        const Ring<STAGES> ring_of_item = ring;
        ring.skip(warpgroup);
        // IS_JOINT: a warpgroup without a token in the last pair has a tile, too.
        const int tiles_end = IS_JOINT ? begin + ceil_div(end - begin, 2 * TOKENS) * 2 * TOKENS : end;
        const auto begin_tile = [&](int start, float (&s)[HEADS / 2]) {
            if (start >= tiles_end) return;
            begin_scores(start, end);
            if constexpr (IS_JOINT) start_scores(s);
        };
        float s[HEADS / 2];
        begin_tile(begin + warpgroup * TOKENS, s);
        if constexpr (IS_JOINT) warpgroup_wait<0>();
        for (int start = begin + warpgroup * TOKENS; start < tiles_end; start += 2 * TOKENS) {
            if constexpr (!IS_JOINT) add_scores(tiles + ring.stage * TILE_BYTES, s);
            warpgroup_fence_operand(s);
            begin_values();
            softmax(start, exists[ring.stage], s);
            if constexpr (IS_JOINT) {
                Ring<STAGES> of_other = ring;
                of_other.stage ^= 1;
                of_other.wait();
            }
            add_values();
            sync_warp();
            ring.release(ring.stage);
            if constexpr (IS_JOINT) ring.release(ring.stage ^ 1);
            ring.skip(2);
            begin_tile(start + 2 * TOKENS, s);
            warpgroup_wait<0>();
#pragma unroll
            for (int i = 0; i < OWN_PANELS; ++i) warpgroup_fence_operand(o[i]);
        }
        ring = ring_of_item;
        ring.skip((tiles_end - begin + TOKENS - 1) / TOKENS);
        reduce_rows(exp_sum, [](float x, float y) { return x + y; });
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) warp_sums[warpgroup * 4 + warp][head_of(g * OWN_ROWS + i)] = exp_sum[i];
        if constexpr (!IS_JOINT) store_maxima();
        named_barrier_sync<ALL_WARPS>(CONSUMERS);
        const auto sum_of = [&](int group, int n) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < 4; ++w) sum += warp_sums[group * 4 + w][head_of(n)];
            return sum;
        };
        float4* const exchange = reinterpret_cast<float4*>(memory) + thread;
        if constexpr (IS_JOINT) {
#pragma unroll
            for (int n = 0; n < ROWS; ++n) {
                exp_sum[n] = sum_of(0, n) + sum_of(1, n);
                max_logit[n] = max_of(n);
            }
        } else {
            float factor[ROWS];
#pragma unroll
            for (int n = 0; n < ROWS; ++n) {
                const float first = item_max[0][head_of(n)], second = item_max[1][head_of(n)];
                const float larger = fmaxf(first, second);
                factor[n] = relative_exp2(max_logit[n], larger);
                exp_sum[n] = sum_of(0, n) * relative_exp2(first, larger) + sum_of(1, n) * relative_exp2(second, larger);
                max_logit[n] = larger;
            }
            // Each warpgroup gives the results of its last panels to the other one.
#pragma unroll
            for (int i = 0; i < OWN_PANELS * HEADS / 2; ++i) {
                const int of_panel = i % (HEADS / 2);
                o[i / (HEADS / 2)][of_panel] *= factor[of_panel / 4 * 2 + of_panel % 2];
            }
#pragma unroll
            for (int i = 0; i < EXCHANGED; ++i) {
                const float* const of = &o[LATENT_PANELS / 2 + i / (HEADS / 8)][i % (HEADS / 8) * 4];
                exchange[(warpgroup * EXCHANGED + i) * 128] = {of[0], of[1], of[2], of[3]};
            }
        }
        const MlaItem item = schedule.item();
        schedule.next();
        load_queries();
        if constexpr (!IS_JOINT) {
            named_barrier_sync<ALL_WARPS>(CONSUMERS);
#pragma unroll
            for (int i = 0; i < EXCHANGED; ++i) {
                float* const of = &o[i / (HEADS / 8)][i % (HEADS / 8) * 4];
                const float4 x = exchange[((warpgroup ^ 1) * EXCHANGED + i) * 128];
                of[0] += x.x;
                of[1] += x.y;
                of[2] += x.z;
                of[3] += x.w;
            }
        }

        bool direct = item.is_whole();
        if constexpr (COMBINES) {
            constexpr int ACCUMULATORS = RESULT_PANELS * HEADS / 2;
            const TreeCombine<ACCUMULATORS, 1, ROWS> tree{reinterpret_cast<float4*>(tmp_out), nodes, int(gridDim.x) * 8,
                                                          int(blockIdx.x * 8 + threadIdx.x / 32)};
            direct = tree.combine(item, max_logit, exp_sum, reinterpret_cast<float (&)[ACCUMULATORS]>(o));
        } else if (threadIdx.x == 0 && pieces && (item.begin | first_head) == 0) {
            pieces[item.seq] = {item.slot, item.pieces};
        }
        const int first_element = warpgroup * (LATENT_SIZE / 2) + warp * 16 + 2 * g;
#pragma unroll
        for (int n = 0; n < ROWS; ++n) {
            const int head = first_head + head_of(n);
            if (head >= num_heads || (COMBINES && !direct)) continue;
            const int64_t row = int64_t(item.seq) * num_heads + head, part = int64_t(item.slot) * num_heads + head;
            const float inverse = finish_row<product_t, HAS_LSE>(direct, threadIdx.x < 4, max_logit[n], exp_sum[n], lse,
                                                                 row, max_logits, exp_sums, part);
#pragma unroll
            for (int i = 0; i < RESULT_PANELS; ++i) {
                // Two adjacent elements of a panel.
                const int element = first_element + i * PANEL_SIZE;
                const float* const of = &o[i][n / 2 * 4 + n % 2];
                const float two[2] = {of[0] * inverse, of[2] * inverse};
                if (direct) {
                    Vec<out_t, 2>::from_floats(two).store(out + item.seq * out_stride + int64_t(head) * LATENT_SIZE +
                                                          element);
                } else {
                    Vec<float, 2>::from_floats(two).store(tmp_out + part * LATENT_SIZE + element);
                }
            }
        }
        named_barrier_sync<ALL_WARPS>(CONSUMERS);  // the next item's queries overwrite what others may still read
    }
}
