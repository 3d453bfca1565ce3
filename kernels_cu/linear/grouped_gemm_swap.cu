// grouped_gemm_swap: products of rows with the weights of their experts under scales of blocks, on Hopper's tensor cores,
// for as many rows of an expert as fit into one tile.
//
//     sum[t, n] = sum_j a_scales[t / top_k, j] * b_scales[e, n / 128, j] * (sum over the j-th 128 elements of K of
//                 a[t / top_k, k] * b[e, n, k]), in float32; e is the expert of row t
//     out[t, n] = what grouped.cuh makes of sum[t, n], and of the gate or up that belongs to it
//
// Operands are swapped: rows of b[e] are the 64 rows of a wgmma and rows of a its columns, of which a tile has TOKENS:
// rows of an expert need not be padded to 64, and weights come to shared memory once for all of them. A tile has 128 rows of
// b[e], 64 for each of two warpgroups that multiply. Tiles are taken by as many blocks as the device holds, one after
// another. A step is 128 bytes of each row of a and of b, all under one scale. The threads of the third warpgroup load,
// ahead by STAGES steps: one of them a box of b, all of them the rows of a that exist, by asynchronous copies of 16 bytes,
// and what a step's sums are multiplied by: a_scales * b_scales, one factor for each token, or one for its gates and one for
// its ups.
//
// A warpgroup multiplies the tokens of a step in two parts: sums of one part are added up while those of the other are
// multiplied. Of b's rows, eight gates and the eight ups that belong to them lie by turns in shared memory, so that a thread
// has the sum of a gate and of its up. A warpgroup stores 16 tokens at a time by way of shared memory.
//
// Constants
//     scalar_t      element type of a and b: 8 bits
//     out_t, A_SCALES, B_SCALES, BIAS, COLUMN_ORDER, ROUTED, ACTIVATION, GATED    what there is of the epilogue, and its
//                   functions; A_SCALES and B_SCALES are false
//     SCALE_BLOCK   elements under one scale: 128
//     TOKENS        rows of a in a tile: a multiple of 16 from 32 to 256
//     STAGES        steps of K in shared memory
//     GROUP         tiles of one expert that are counted down together
//     ALIGNED_OUT   rows of out begin at multiples of 16 bytes

#include "async.cuh"
#include "gemm_pipeline.cuh"
#include "grouped.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2, NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int TILE_K = 128, STEP_K = 32, CHUNK = 16, ROW_CHUNKS = TILE_K / CHUNK;  // elements, which are bytes
constexpr int B_ROWS = 64 * CONSUMERS, B_BYTES = B_ROWS * TILE_K, STAGE_BYTES = B_BYTES + TOKENS * TILE_K;
constexpr int PASS_ROWS = 128 / ROW_CHUNKS, OWN_ROWS = TOKENS / PASS_ROWS;  // of a thread that loads
constexpr int OWN_FACTORS = ceil_div(TOKENS, 128);                          // tokens of such a thread
constexpr int HALVES = GATED ? 2 : 1;                                       // factors of a token: of gates and of ups
constexpr int FACTORS = TOKENS * HALVES;                                    // of a step
constexpr int FIRST = ceil_div(TOKENS, 32) * 16, SECOND = TOKENS - FIRST;   // tokens of the two parts
constexpr int OUT_N = B_ROWS / HALVES, PART_N = OUT_N / CONSUMERS, WARP_N = PART_N / 4;  // columns of out
constexpr int STORE_TOKENS = 16, STORE_PITCH = PART_N + 8, STORES = 2;  // tiles of a warpgroup on their way to out
constexpr int OUT_CHUNK = 16 / sizeof(out_t), OUT_CHUNKS = PART_N / OUT_CHUNK;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;
constexpr int OWN_BARRIER = 1;  // the first named barrier, of a warpgroup alone

static_assert(sizeof(scalar_t) == 1 && SCALE_BLOCK == TILE_K && !A_SCALES && !B_SCALES);
static_assert(TOKENS % 16 == 0 && TOKENS >= 32 && TOKENS <= 256);

using epilogue_t = ExpertEpilogue<out_t, A_SCALES, B_SCALES, BIAS, ROUTED>;

// What a warpgroup keeps of its tile's tokens until it stores them, and 16 tokens that it stores.
struct Kept {
    int rows[TOKENS];
    typename epilogue_t::Row terms[TOKENS];
    alignas(16) out_t stores[STORES][STORE_TOKENS * STORE_PITCH];
};

// Starts the products of a step: 64 rows of b and COLUMNS tokens.
template <int COLUMNS>
DEVICE void start_products(float (&sums)[COLUMNS / 2], const uint8_t* b, const uint8_t* a) {
    const uint64_t rows_of_b = make_smem_desc(b), rows_of_a = make_smem_desc(a);
    warpgroup_fence_operand(sums);
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < TILE_K / STEP_K; ++i) {
        wgmma<scalar_t, COLUMNS>(sums, advance_smem_desc(rows_of_b, i * STEP_K),
                                 advance_smem_desc(rows_of_a, i * STEP_K), i > 0);
    }
    warpgroup_commit_batch();
    warpgroup_fence_operand(sums);
}

// Adds sums of tokens from `first` on, times their factors, to the tile's.
template <int COLUMNS>
DEVICE void add_sums(float (&total)[TOKENS / 2], float (&sums)[COLUMNS / 2], const float* factors, int first) {
    warpgroup_fence_operand(sums);
    const float* own = factors + (first + threadIdx.x % 4 * 2) * HALVES;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i) {
        const auto of_pair = Vec<float, 2 * HALVES>::load(own + i * 8 * HALVES);
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // rows g and g + 8 of b, of either token
            const float factor = of_pair.data[GATED ? j % 2 * 2 + j / 2 : j % 2];
            float& to = total[first / 2 + i * 4 + j];
            to = fmaf(factor, sums[i * 4 + j], to);
        }
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
grouped_gemm_swap(const __grid_constant__ TensorMap b_map,  // [E, B_ROWS, K], boxes of 128 rows; GATED: [E, N / 8, 2, 8, K]
                  out_t* out,                               // [num_rows, N]
                  const scalar_t* a,                        // [num_rows / top_k, K]
                  const int32_t* sorted_token_ids,          // [max_tiles * TOKENS] at least
                  const int32_t* expert_ids,                // [max_tiles / block_tiles] at least
                  const int32_t* num_tokens_post_pad,       // one element
                  const float* topk_weights,                // [num_rows]
                  const float* a_scales,                    // [num_rows / top_k, K / SCALE_BLOCK]
                  const float* b_scales,                    // [E, B_ROWS / SCALE_BLOCK, K / SCALE_BLOCK]
                  const out_t* bias,                        // [E, B_ROWS]
                  int64_t num_rows, int64_t n, int64_t k, int64_t top_k, int64_t num_experts, int64_t block_tiles,
                  int64_t max_tiles, int64_t a_stride, int64_t out_stride, int64_t a_scale_step,
                  int64_t a_scale_block_step, int64_t b_scale_expert_step, int64_t b_scale_step,
                  int64_t b_scale_block_step) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    float* factors = reinterpret_cast<float*>(shared + STAGES * STAGE_BYTES);  // [STAGES, FACTORS]
    Kept* kept = reinterpret_cast<Kept*>(factors + STAGES * FACTORS);
    Ring<STAGES> ring(kept + CONSUMERS);
    if (threadIdx.x == 0) ring.init(4 * CONSUMERS, 1 + 128 + 4);
    // Rows that do not exist are never loaded.
    for (int i = threadIdx.x; i < STAGES * TOKENS * ROW_CHUNKS; i += NUM_THREADS) {
        uint8_t* stage = shared + i / (TOKENS * ROW_CHUNKS) * STAGE_BYTES + B_BYTES;
        reinterpret_cast<uint4*>(stage)[i % (TOKENS * ROW_CHUNKS)] = {0, 0, 0, 0};
    }
    fence_proxy_async();
    __syncthreads();

    const ExpertTiles<TOKENS> rows(sorted_token_ids, expert_ids, num_tokens_post_pad, num_rows, num_experts,
                                   block_tiles, max_tiles);
    const int columns = int((n + OUT_N - 1) / OUT_N), steps = int((k + TILE_K - 1) / TILE_K);
    const int tiles = rows.tiles * columns, b_rows = int(GATED ? 2 * n : n);
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32, own = threadIdx.x % 128;
    int tile_row, tile_column;

    if (warpgroup == CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        const int own_row = own / ROW_CHUNKS, chunk = own % ROW_CHUNKS;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int expert = rows.template locate<GROUP>(tile, columns, int(gridDim.x), tile_row, tile_column);
            if (expert < 0) continue;
            const scalar_t* from[OWN_ROWS];
#pragma unroll
            for (int i = 0; i < OWN_ROWS; ++i) {
                const int row = rows.row(tile_row * TOKENS + own_row + i * PASS_ROWS);
                from[i] = row < 0 ? nullptr : a + int64_t(row / int(top_k)) * a_stride + chunk * CHUNK;
            }
            // Scales of the thread's tokens, and of the tile's rows of b: gates and ups, or all.
            const float* token_scales[OWN_FACTORS];
#pragma unroll
            for (int i = 0; i < OWN_FACTORS; ++i) {
                const int place = own + i * 128, row = place < TOKENS ? rows.row(tile_row * TOKENS + place) : -1;
                token_scales[i] = a_scales + (max(row, 0) / int(top_k)) * a_scale_step;
            }
            const float* weight_scales[HALVES];
#pragma unroll
            for (int i = 0; i < HALVES; ++i) {
                const int column = tile_column * OUT_N;
                const int64_t block = (GATED == 2 ? 2 * column : column + i * int(n)) / SCALE_BLOCK;
                weight_scales[i] = b_scales + expert * b_scale_expert_step + block * b_scale_step;
            }
            float of_tokens[OWN_FACTORS], of_weights[HALVES];
            const auto load_scales = [&](int step) {
#pragma unroll
                for (int i = 0; i < OWN_FACTORS; ++i) of_tokens[i] = token_scales[i][step * a_scale_block_step];
#pragma unroll
                for (int i = 0; i < HALVES; ++i) of_weights[i] = weight_scales[i][step * b_scale_block_step];
            };
            load_scales(0);
            for (int step = 0; step < steps; ++step, ring.advance()) {
                ring.acquire();
                uint8_t* to = shared + ring.stage * STAGE_BYTES;
                if (warp == 0 && elect_one()) {
                    mbarrier_arrive_expect_tx(ring.full(), B_BYTES);
                    if constexpr (GATED != 0) {
                        tma_load(to, &b_map, ring.full(), step * TILE_K, 0, 0, tile_column * OUT_N / 8, expert);
                    } else {
                        tma_load(to, &b_map, ring.full(), step * TILE_K, tile_column * OUT_N, expert);
                    }
                }
                const bool exists = step * TILE_K + chunk * CHUNK < k;
#pragma unroll
                for (int i = 0; i < OWN_ROWS; ++i) {
                    if (from[i] == nullptr) continue;
                    cp_async<16>(to + B_BYTES + swizzle_128b(own_row + i * PASS_ROWS, chunk * CHUNK),
                                 from[i] + step * TILE_K, exists);
                }
                cp_async_mbarrier_arrive_noinc(ring.full());
#pragma unroll
                for (int i = 0; i < OWN_FACTORS; ++i) {
                    if (own + i * 128 >= TOKENS) continue;
#pragma unroll
                    for (int j = 0; j < HALVES; ++j) {
                        factors[ring.stage * FACTORS + (own + i * 128) * HALVES + j] = of_tokens[i] * of_weights[j];
                    }
                }
                sync_warp();
                if (lane == 0) mbarrier_arrive(ring.full());
                load_scales(min(step + 1, steps - 1));
            }
        }
        ring.drain();
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        Kept& own_kept = kept[warpgroup];
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int expert = rows.template locate<GROUP>(tile, columns, int(gridDim.x), tile_row, tile_column);
            if (expert < 0) continue;
            const epilogue_t epilogue{topk_weights, a_scales, b_scales, bias + int64_t(expert) * b_rows,
                                      int(top_k),   0,        0};
            // Rows of out, and their terms, that the thread hands to the others.
            int own_rows[OWN_FACTORS];
            typename epilogue_t::Row own_terms[OWN_FACTORS];
#pragma unroll
            for (int i = 0; i < OWN_FACTORS; ++i) {
                const int place = own + i * 128;
                own_rows[i] = place < TOKENS ? rows.row(tile_row * TOKENS + place) : -1;
                own_terms[i] = epilogue.row(max(own_rows[i], 0));
            }

            float total[TOKENS / 2], first_sums[FIRST / 2], second_sums[SECOND / 2];
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) total[i] = 0.0f;
            const auto start_first = [&] {
                const uint8_t* stage = shared + ring.stage * STAGE_BYTES;
                ring.wait();
                fence_proxy_async();  // what cp_async has written
                start_products<FIRST>(first_sums, stage + warpgroup * 64 * TILE_K, stage + B_BYTES);
            };
            const auto start_second = [&] {
                const uint8_t* stage = shared + ring.stage * STAGE_BYTES;
                start_products<SECOND>(second_sums, stage + warpgroup * 64 * TILE_K, stage + B_BYTES + FIRST * TILE_K);
            };
            // Parts of all steps follow each other: while one is multiplied, sums of the part before are added up.
            const auto add_first = [&](int stage) { add_sums<FIRST>(total, first_sums, factors + stage * FACTORS, 0); };
            const auto add_second = [&](int stage) {
                add_sums<SECOND>(total, second_sums, factors + stage * FACTORS, FIRST);
            };
            start_first();
            int part = 1;
            for (; part + 1 < 2 * steps; part += 2) {
                const int now = ring.stage;
                start_second();
                warpgroup_wait<1>();
                add_first(now);
                ring.advance();
                start_first();
                warpgroup_wait<1>();
                add_second(now);
                sync_warp();  // a lane that gave the stage back for others would leave their reads of factors behind
                ring.release(now);
            }
            if (part < 2 * steps) {
                start_second();
                warpgroup_wait<1>();
                add_first(ring.stage);
                warpgroup_wait<0>();
                add_second(ring.stage);
            } else {  // never: but else the assembler takes products in flight for those that are read, and serialises all
                warpgroup_wait<0>();
                add_first(ring.stage);
            }
            sync_warp();
            ring.release(ring.stage);
            ring.advance();

            named_barrier_sync(OWN_BARRIER + warpgroup, 128);  // the last tile has been stored
#pragma unroll
            for (int i = 0; i < OWN_FACTORS; ++i) {
                if (own + i * 128 >= TOKENS) continue;
                own_kept.rows[own + i * 128] = own_rows[i];
                own_kept.terms[own + i * 128] = own_terms[i];
            }
            named_barrier_sync(OWN_BARRIER + warpgroup, 128);
            // The thread's columns of out: of a gate and of its up, or of rows g and g + 8 of b.
            const int first_column = tile_column * OUT_N + warpgroup * PART_N;
            typename epilogue_t::Column column_terms[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int64_t column = first_column + warp * WARP_N + lane / 4;
                const int64_t at = min(GATED ? column : column + i * 8, n - 1);
                column_terms[i] = epilogue.column(GATED == 2 ? 2 * at + i : GATED == 1 ? at + i * n : at);
            }
#pragma unroll
            for (int first = 0; first < TOKENS; first += STORE_TOKENS) {
                out_t* to = own_kept.stores[first / STORE_TOKENS % STORES];
                uint32_t pairs[4 / HALVES];  // of tokens: eight columns of out, the next eight tokens, the next columns
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float x[2][2];  // of a gate and its up, or of two columns; of two tokens
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const auto row_term = own_kept.terms[first + i * 8 + lane % 4 * 2 + j];
#pragma unroll
                        for (int l = 0; l < 2; ++l) {
                            const float sum = total[(first / 8 + i) * 4 + l * 2 + j];
                            x[l][j] = epilogue.value(row_term, column_terms[l], sum);
                        }
                    }
#pragma unroll
                    for (int l = 0; l < 2 / HALVES; ++l) {
                        float y[2];
#pragma unroll
                        for (int j = 0; j < 2; ++j) y[j] = ACTIVATION<out_t>(x[l][j], GATED ? x[1][j] : x[l][j]);
                        pairs[l * 2 + i] = pack_pair<out_t>(y[0], y[1]);
                    }
                }
                stmatrix<4 / HALVES, true>(to + lane % 16 * STORE_PITCH + warp * WARP_N + (GATED ? 0 : lane / 16 * 8),
                                           pairs);
                named_barrier_sync(OWN_BARRIER + warpgroup, 128);
                const int token = own / OUT_CHUNKS, column = own % OUT_CHUNKS * OUT_CHUNK;
                const int row = token < STORE_TOKENS ? own_kept.rows[first + token] : -1;
                const int64_t n_at = first_column + column;
                if (row >= 0 && n_at < n) {
                    const out_t* stored = to + token * STORE_PITCH + column;
                    out_t* at = out + row * out_stride + n_at;
                    if (ALIGNED_OUT && n_at + OUT_CHUNK <= n) {
                        Vec<out_t, OUT_CHUNK>::load(stored).store(at);
                    } else {
                        for (int j = 0; j < OUT_CHUNK && n_at + j < n; ++j) at[j] = stored[j];
                    }
                }
                sync_warp();
            }
        }
    }
}
