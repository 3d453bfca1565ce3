// mla_decode_sm80: MLA decode attention of many heads by mma.sync: computes what mla_decode.cu does, bound by tensor
// cores and shared memory.
//
//     l_i = scale * (q_nope . c_i + q_pe . r_i)                       0 <= i < length
//     out = sum_i exp(l_i - m) c_i / (sum_i exp(l_i - m) + 1e-6),     m = max_i l_i
//
// Grid: blockIdx.x counts groups of HEADS heads, and blockIdx.y shares of the tokens of all sequences
// (mla_schedule.cuh). A CTA goes through each item of its share in tiles of TOKENS entries. The registers of its warps
// hold the queries, as A operands, and all accumulators of O, so a tile is all that MMAs read from shared memory but for
// probabilities: one tile is multiplied by Q, one by P, and AHEAD more are being loaded.
//
// For each tile, each part after a barrier:
// 1. S = Q K^T. Four warps share the scores of 32 heads; each warp has a fourth of K. It stores its partial scores of 24
//    heads, and keeps those of the 8 heads that it owns.
// 2. The warp adds the partial scores of its heads and converts them to probabilities: the online softmax.
//    O += P V of the tile before: each warp has WARP_DIMS elements of the latent vector, for all heads. The warps of
//    one half of the heads begin with the softmax, the others with P V, so that tensor cores have work meanwhile.
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
//     HEADS          heads of a CTA: 64
//     TOKENS         entries of a tile: 16 or 32
//     NUM_WARPS      warps of a CTA: HEADS / 8
//     AHEAD          tiles that are being loaded; for an fp8 cache a power of two
//     HELD           A operands of the queries in registers of a warp, of 18; the others are in shared memory
//     IS_DS_MLA      the cache has the format "fp8_ds_mla" (mla_entry.cuh)
//     QUERY_ACCESS   elements of the queries in one memory access
//     OUT_ACCESS     elements of out in one memory access: 1 or 2

#include "attention.cuh"
#include "mla_entry_tiles.cuh"
#include "mla_schedule.cuh"
#include "mla_tokens.cuh"
#include "product.cuh"

constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE, UNIT = 128;  // UNIT: tokens; shares are cut at multiples of it
constexpr int STAGES = IS_FP8 ? 3 : AHEAD + 2, NEWEST = IS_FP8 ? AHEAD + 1 : AHEAD;  // newest tile: Q's + NEWEST
constexpr int PARTS = 4, STEPS = ENTRY_SIZE / 16 / PARTS;                  // parts of K; k-blocks of 16 of a part
constexpr int WARP_HEADS = 32, OWN_HEADS = WARP_HEADS / PARTS;             // heads of four warps; heads of a warp
constexpr int OPERANDS = STEPS * WARP_HEADS / 16, K_BLOCKS = TOKENS / 16;  // A operands of a warp: of queries
constexpr int WARP_DIMS = LATENT_SIZE / NUM_WARPS, HEAD_TILES = HEADS / 16, DIM_TILES = WARP_DIMS / 8;
constexpr int OPERAND_BYTES = WARP_SIZE * 16, SLOT_BYTES = K_BLOCKS * OPERAND_BYTES;
constexpr int SCORE_BYTES = NUM_WARPS * (PARTS - 1) * SLOT_BYTES;
constexpr int PASS_HEADS = HEADS < 2 * TOKENS ? HEADS : 2 * TOKENS;  // heads with queries that fit into two tiles
constexpr int ACCESSES = ENTRY_SIZE / QUERY_ACCESS, BATCH = 9;       // of queries: of a head; of a thread at once
constexpr int BLOCK_TOKENS = 128;  // tokens of a block: as many threads find their entries at once
using entries_t = PitchedTile<product_t, PITCH>;
using probabilities_t = PitchedTile<product_t, TOKENS + 8>;
constexpr int PROBABILITY_BYTES = probabilities_t::bytes(HEADS);
using entry_tiles_t = EntryTiles<STAGES, AHEAD>;
static_assert(NUM_WARPS * OWN_HEADS == HEADS && HEADS % PASS_HEADS == 0);
static_assert(PASS_HEADS * ACCESSES % (BATCH * NUM_THREADS) == 0);
static_assert(WARP_SIZE == 32 && !HOLDS_COPIES && !ON_MATRIX_CORES);
static_assert(NEWEST * TOKENS < BLOCK_TOKENS && BLOCK_TOKENS % TOKENS == 0);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
mla_decode_sm80(out_t* out,                          // [num_seqs, num_heads, LATENT_SIZE]
                float* lse,                          // [num_seqs, num_heads]
                float* tmp_out,                      // [slots, num_heads, LATENT_SIZE]
                float* max_logits,                   // [slots, num_heads], in units of log 2
                float* exp_sums,                     // [slots, num_heads]
                MlaPieces* pieces,                   // [num_seqs]
                const query_t* q_nope,               // [num_seqs, num_heads, LATENT_SIZE]
                const query_t* q_pe,                 // [num_seqs, num_heads, ROPE_SIZE]
                const cache_t* kv_c_and_k_pe_cache,  // [num_pages, PAGE_SIZE, an entry]
                const length_t* seq_lens,            // [num_seqs]
                const table_t* page_table,           // [num_seqs, max_pages]
                int64_t num_seqs, int64_t num_heads, int64_t num_pages, int64_t max_tokens, int64_t max_splits,
                int64_t out_stride, int64_t nope_stride, int64_t nope_head_stride, int64_t pe_stride,
                int64_t pe_head_stride, int64_t page_stride, int64_t slot_stride, int64_t table_stride,
                int64_t table_step, int64_t length_step, float join_units, float piece_units, float level_units,
                int64_t item_units, float scale) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ float factors[2][HEADS];                 // of two tiles: correction factors of the accumulators
    __shared__ float last_factors[HEADS];               // factors of the results
    __shared__ uint2 changes[2];                        // a byte of each warp: whether a factor of its heads is not 1
    __shared__ int row_ends[HEADS];                     // attended_tokens, if QUERY_TOKENS > 1
    __shared__ uint64_t sources[2 * BLOCK_TOKENS];      // of two blocks: addresses of entries; + 1: there is no entry
    __shared__ uint32_t exists[2 * BLOCK_TOKENS / 32];  // a bit for each token: whether it has an entry
    __shared__ int4 progress;                           // of the schedule: the main loop needs its registers
    __shared__ int2 bounds;                             // likewise: the first token of the item, and its end
    unsigned char* const shared = reinterpret_cast<unsigned char*>(memory);
    const entry_tiles_t tiles{shared, kv_c_and_k_pe_cache};
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int part = warp % PARTS, group = warp / PARTS;
    const int first_head = blockIdx.x * HEADS, block_heads = min(HEADS, int(num_heads) - first_head);
    const int own_head = warp * OWN_HEADS + g;  // head of the lane's scores, counted from first_head
    const float unit = scale * LOG2_E;
    // After the tiles: partial scores, pairs of each lane; probabilities; A operands that are not in registers.
    unsigned char* const after_tiles = shared + entry_tiles_t::BYTES;
    const auto probabilities = [&](int parity) {
        return probabilities_t{reinterpret_cast<product_t*>(after_tiles + SCORE_BYTES + parity * PROBABILITY_BYTES)};
    };
    const auto scores_of = [&](int from, int i) {  // what part `from` has computed for the heads of part from ^ i
        return reinterpret_cast<float2*>(after_tiles + ((i - 1) * NUM_WARPS + group * PARTS + from) * SLOT_BYTES) +
               lane;
    };
    const auto query_operand = [&](int i) {
        unsigned char* const operands = after_tiles + SCORE_BYTES + 2 * PROBABILITY_BYTES + lane * 16;
        return operands + ((i - HELD) * NUM_WARPS + warp) * OPERAND_BYTES;
    };

    MlaSchedule<UNIT, length_t, HAS_LENGTHS> schedule(seq_lens, length_step, num_seqs, max_tokens, max_splits,
                                                      join_units, piece_units, level_units, item_units, gridDim.y,
                                                      blockIdx.y);
    for (; schedule.has_item(); schedule.next()) {
        const MlaItem own_item = schedule.item();
        const int begin = own_item.begin, end = own_item.end;
        if (threadIdx.x == 0) {
            progress = {schedule.share, schedule.seq, schedule.start, schedule.end};
            bounds = {begin, end};
            if (pieces && (begin | int(blockIdx.x)) == 0) pieces[own_item.seq] = {own_item.slot, own_item.pieces};
        }
        if (QUERY_TOKENS > 1 && t == 0) {
            const int length = schedule.length_of(schedule.seq);
            row_ends[own_head] = attended_tokens(length, first_head + own_head, num_heads) - begin;
        }
        __syncthreads();
        // The page, or slot, of the thread's token of a block; -1 after the end.
        const auto page_of = [&](int block) {
            const int token = bounds.x + block * BLOCK_TOKENS + threadIdx.x;
            const table_t* const row = page_table + int64_t(progress.y) * table_stride;
            return threadIdx.x < BLOCK_TOKENS && token < bounds.y
                       ? row[LISTS_SLOTS ? token : token / PAGE_SIZE * table_step]
                       : table_t(-1);
        };
        const auto store_sources = [&](int block, table_t page) {
            if (threadIdx.x >= BLOCK_TOKENS) return;
            const TokenTable table{nullptr, table_step, num_pages, page_stride, slot_stride};
            const int64_t offset = table.find(page, bounds.x + block * BLOCK_TOKENS + threadIdx.x);
            const auto* const entry = kv_c_and_k_pe_cache + max(offset, int64_t(0));
            sources[block % 2 * BLOCK_TOKENS + threadIdx.x] = reinterpret_cast<uint64_t>(entry) + (offset == NOWHERE);
            const uint32_t found = ballot(offset != NOWHERE);
            if (lane == 0) exists[block % 2 * (BLOCK_TOKENS / 32) + warp] = found;
        };
        table_t next_page = page_of(1);
        store_sources(0, page_of(0));
        __syncthreads();
        // Calls f(to, from, valid) for the lane's row of tile number i of the item, where it is loaded to `stage`.
        const auto load = [&](int stage, int i, auto f) {
            const uint64_t source = sources[i * TOKENS % (2 * BLOCK_TOKENS) + entry_tiles_t::row_of_lane()];
            const auto* const from = reinterpret_cast<const unsigned char*>(source & ~uint64_t(1));
            f(tiles.copy_of_row(stage) + entry_tiles_t::first_byte(), from + entry_tiles_t::first_byte(),
              !(source & 1));
        };
        const auto load_all = [&](int stage, int i) {
            load(stage, i, [](unsigned char* to, const unsigned char* from, bool valid) {
#pragma unroll
                for (int n = 0; n < COPIES; ++n) entry_tiles_t::copy(to, from, n, valid);
            });
            cp_async_commit();
        };
        // Converts the fp8 values of tile number i, and loads the tile that is AHEAD tiles later.
        const auto convert_and_load = [&](int stage, int i) {
            tiles.convert_codes(stage, i % AHEAD);
            sync_warp();  // the lanes of a row read its scales
            load_all(i % AHEAD, i + AHEAD);
        };

        // The first tiles are loaded while queries pass through the other two.
#pragma unroll 1
        for (int i = 0; i < AHEAD; ++i) load_all(i, i);
        uint32_t q[HELD][4];
#pragma unroll 1
        for (int pass = 0; pass < HEADS; pass += PASS_HEADS) {
            product_t* const queries = tiles.at(STAGES - 2);
            if (pass > 0) __syncthreads();
            for (int access = threadIdx.x; access < PASS_HEADS * ACCESSES; access += BATCH * NUM_THREADS) {
                Vec<query_t, QUERY_ACCESS> x[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int at = access + i * NUM_THREADS, element = at % ACCESSES * QUERY_ACCESS;
                    const int64_t seq = progress.y, head = min(first_head + pass + at / ACCESSES, int(num_heads) - 1);
                    x[i] = Vec<query_t, QUERY_ACCESS>::load(
                        element < LATENT_SIZE ? q_nope + seq * nope_stride + head * nope_head_stride + element
                                              : q_pe + seq * pe_stride + head * pe_head_stride + element - LATENT_SIZE);
                }
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int at = access + i * NUM_THREADS, row = at / ACCESSES;
                    float elements[QUERY_ACCESS];
                    x[i].to_floats(elements);
                    const bool exists = pass + row < block_heads;
#pragma unroll
                    for (int j = 0; j < QUERY_ACCESS; ++j) elements[j] = exists ? elements[j] : 0.0f;
                    using vec_t = Vec<product_t, QUERY_ACCESS>;
                    *reinterpret_cast<vec_t*>(queries + row * PITCH + at % ACCESSES * QUERY_ACCESS) =
                        vec_t::from_floats(elements);
                }
            }
            if (IS_FP8) cp_async_wait<AHEAD - 1>();
            __syncthreads();
            const int first_row = group * WARP_HEADS - pass;
            if (first_row < 0 || first_row >= PASS_HEADS) continue;
#pragma unroll
            for (int i = 0; i < OPERANDS; ++i) {
                // Part `part` has head j ^ part * OWN_HEADS of the 32 heads in row j: the heads that it owns come first.
                const int row = i % 2 * 16 + lane % 16 ^ part * OWN_HEADS;
                uint32_t a[4];
                ldmatrix<4>(a, entries_t{queries}.at(first_row, row, part * STEPS + i / 2, lane / 16));
                if (i < HELD) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) q[i % HELD][j] = a[j];
                } else {
                    store_held(query_operand(i), a);
                }
            }
        }
        if (IS_FP8) convert_and_load(0, 0);

        float max_logit = minus_infinity(), exp_sum = 0.0f, o[HEAD_TILES][DIM_TILES][4];
#pragma unroll
        for (int i = 0; i < HEAD_TILES * DIM_TILES * 4; ++i) o[i / 4 / DIM_TILES][i / 4 % DIM_TILES][i % 4] = 0.0f;

        // Tile number i is multiplied by Q, the one before by P.
        const int num_tiles = ceil_div(end - begin, TOKENS);
        for (int i = 0, stage = 0; i <= num_tiles && num_tiles > 0; ++i) {
            const int last_stage = stage == 0 ? STAGES - 1 : stage - 1;
            const int next_stage = stage == STAGES - 1 ? 0 : stage + 1;
            const int parity = i % 2;
            cp_async_wait<AHEAD - 1>();
            __syncthreads();
            if (i * TOKENS % BLOCK_TOKENS == 0) {
                const int block = i * TOKENS / BLOCK_TOKENS;
                store_sources(block + 1, next_page);
                next_page = page_of(block + 2);
            }
            float own[K_BLOCKS * 4];  // scores of the lane's head
            if (i < num_tiles) {
                // S = Q K^T, the warp's part of K. M: heads, N: tokens. Loads are issued while MMAs run.
                unsigned char* to;
                const unsigned char* from;
                bool valid;
                if (!IS_FP8) {
                    const int free_stage = last_stage == 0 ? STAGES - 1 : last_stage - 1;
                    load(free_stage, i + AHEAD, [&](auto of_row, auto source, bool has_entry) {
                        to = of_row, from = source, valid = has_entry;
                    });
                }
                const product_t* const keys =
                    entries_t{tiles.at(stage)}.at(lane / 16 * 8 + lane % 8, part * STEPS * 2 + lane / 8 % 2);
#pragma unroll
                for (int k = 0; k < K_BLOCKS; ++k) {
                    float s[WARP_HEADS / 16][2][4] = {};
                    uint32_t b[2][4];
                    ldmatrix<4>(b[0], keys + k * 16 * PITCH);
#pragma unroll
                    for (int step = 0; step < STEPS; ++step) {
                        if (step + 1 < STEPS) ldmatrix<4>(b[(step + 1) % 2], keys + k * 16 * PITCH + (step + 1) * 16);
                        const int copy = k * STEPS + step - 1;
                        if (!IS_FP8 && copy >= 0 && copy < COPIES) entry_tiles_t::copy(to, from, copy, valid);
#pragma unroll
                        for (int m = 0; m < 2; ++m) {
                            const int operand = step * 2 + m;
                            uint32_t a[4];
                            if (operand < HELD) {
#pragma unroll
                                for (int j = 0; j < 4; ++j) a[j] = q[operand % HELD][j];
                            } else {
                                const uint4 x = *reinterpret_cast<const uint4*>(query_operand(operand));
                                a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
                            }
                            product<product_t>(s[m][0], a, b[step % 2], 0);
                            product<product_t>(s[m][1], a, b[step % 2], 1);
                        }
                    }
#pragma unroll
                    for (int j = 0; j < 4; ++j) own[k * 4 + j] = s[0][j / 2][j % 2];
#pragma unroll
                    for (int j = 1; j < PARTS; ++j) {
#pragma unroll
                        for (int n = 0; n < 2; ++n) {
                            const float* const pair = s[j / 2][n] + j % 2 * 2;
                            scores_of(part, j)[(k * 2 + n) * WARP_SIZE] = {pair[0], pair[1]};
                        }
                    }
                }
                if (!IS_FP8) cp_async_commit();
                __syncthreads();
                if (IS_FP8) convert_and_load(next_stage, i + 1);
            }
#pragma unroll 1
            for (int phase = 0; phase < 2; ++phase) {
                if ((phase + group) % 2 == 0) {
                    if (i == num_tiles) continue;
                    // The online softmax of the lane's head.
#pragma unroll
                    for (int j = 1; j < PARTS; ++j) {
#pragma unroll
                        for (int n = 0; n < K_BLOCKS * 2; ++n) {
                            const float2 pair = scores_of(part ^ j, j)[n * WARP_SIZE];
                            own[n * 2] += pair.x;
                            own[n * 2 + 1] += pair.y;
                        }
                    }
                    const int first = i * TOKENS % (2 * BLOCK_TOKENS);
                    const uint32_t found = exists[first / 32] >> (first % 32 + 2 * t);
                    float larger = max_logit;
#pragma unroll
                    for (int j = 0; j < K_BLOCKS * 4; ++j) {
                        const int token = j / 2 * 8 + j % 2;
                        const bool attended = QUERY_TOKENS == 1 || i * TOKENS + token + 2 * t < row_ends[own_head];
                        own[j] = attended && found >> token & 1 ? own[j] * unit : minus_infinity();
                        larger = fmaxf(larger, own[j]);
                    }
                    larger = fmaxf(larger, shfl_xor(larger, 1));
                    larger = fmaxf(larger, shfl_xor(larger, 2));
                    const float factor = relative_exp2(max_logit, larger);
                    max_logit = larger;
                    exp_sum *= factor;
                    product_t* const to = probabilities(parity).at(own_head, 0) + 2 * t;
#pragma unroll
                    for (int j = 0; j < K_BLOCKS * 4; j += 2) {
                        const float low = probability_of<product_t>(own[j], max_logit);
                        const float high = probability_of<product_t>(own[j + 1], max_logit);
                        exp_sum += low + high;
                        *reinterpret_cast<uint32_t*>(to + j * 4) = pack_pair<product_t>(low, high);
                    }
                    if (t == 0) factors[parity][own_head] = factor;
                    const bool changed = any_lane(factor != 1.0f);
                    if (lane == 0) reinterpret_cast<uint8_t*>(changes + parity)[warp] = changed;
                } else {
                    if (i == 0) continue;
                    // O += P V of the tile before. M: heads, N: elements of the latent vector.
                    const uint2 changed = changes[parity ^ 1];
#pragma unroll
                    for (int m = 0; m < HEAD_TILES; ++m) {
                        if (!((m < 2 ? changed.x : changed.y) >> m % 2 * 16 & 0xffff)) continue;
                        const float* const own_factors = factors[parity ^ 1] + m * 16 + g;
                        const float first = own_factors[0], second = own_factors[8];
#pragma unroll
                        for (int j = 0; j < DIM_TILES * 4; ++j) o[m][j / 4][j % 4] *= j / 2 % 2 ? second : first;
                    }
                    const product_t* const weights = probabilities(parity ^ 1).at(lane % 16, lane / 16);
                    const product_t* const values =
                        entries_t{tiles.at(last_stage)}.at(lane % 16, warp * (WARP_DIMS / 8) + lane / 16);
#pragma unroll
                    for (int k = 0; k < K_BLOCKS; ++k) {
                        uint32_t a[HEAD_TILES][4], b[2][4];
#pragma unroll
                        for (int m = 0; m < HEAD_TILES; ++m) {
                            ldmatrix<4>(a[m], weights + m * 16 * (TOKENS + 8) + k * 16);
                        }
                        ldmatrix<4, true>(b[0], values + k * 16 * PITCH);
#pragma unroll
                        for (int n = 0; n < WARP_DIMS / 16; ++n) {
                            if (n + 1 < WARP_DIMS / 16) {
                                ldmatrix<4, true>(b[(n + 1) % 2], values + k * 16 * PITCH + (n + 1) * 16);
                            }
#pragma unroll
                            for (int m = 0; m < HEAD_TILES; ++m) {
                                product<product_t>(o[m][2 * n], a[m], b[n % 2], 0);
                                product<product_t>(o[m][2 * n + 1], a[m], b[n % 2], 1);
                            }
                        }
                    }
                }
            }
            stage = next_stage;
        }

        const int4 at = progress;
        schedule.share = at.x, schedule.seq = at.y, schedule.start = at.z, schedule.end = at.w;
        const MlaItem item = schedule.item();
        const bool direct = item.is_whole();
        const int64_t first_row = int64_t(direct ? item.seq : item.slot) * num_heads + first_head;
        exp_sum += shfl_xor(exp_sum, 1);
        exp_sum += shfl_xor(exp_sum, 2);
        if (t == 0) {
            const int64_t row = first_row + own_head;
            last_factors[own_head] = finish_row<product_t, HAS_LSE>(direct, own_head < block_heads, max_logit, exp_sum,
                                                                    lse, row, max_logits, exp_sums, row);
        }
        cp_async_wait<0>();
        __syncthreads();  // the tiles, and `progress`, have been read
#pragma unroll
        for (int i = 0; i < HEAD_TILES * 2; ++i) {
            const int m = i / 2, half = i % 2, head = m * 16 + half * 8 + g;
            if (head >= block_heads) continue;
            const float factor = last_factors[head];
            const int element = warp * WARP_DIMS + 2 * t;
#pragma unroll
            for (int n = 0; n < DIM_TILES; ++n) {
                const float pair[2] = {o[m][n][2 * half] * factor, o[m][n][2 * half + 1] * factor};
                if (direct) {
                    Vec<out_t, 2>::from_floats(pair).template store<OUT_ACCESS>(
                        out + int64_t(item.seq) * out_stride + int64_t(first_head + head) * LATENT_SIZE + element +
                        n * 8);
                } else {
                    Vec<float, 2>::from_floats(pair).store(tmp_out + (first_row + head) * LATENT_SIZE + element +
                                                           n * 8);
                }
            }
        }
    }
}
