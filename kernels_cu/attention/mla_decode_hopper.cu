// mla_decode_hopper: what mla_decode.cu computes, on Hopper's tensor cores: one query token of each sequence against
// the latent entries of its tokens in a paged cache (MLA).
//
//     l_i = scale * (q_nope . c_i + q_pe . r_i)                       0 <= i < length
//     out = sum_i exp(l_i - m) c_i / (sum_i exp(l_i - m) + 1e-6),     m = max_i l_i
//
// An entry of the cache is a latent vector c_i followed by a rotated key r_i. The whole entry is the key of every head,
// and its latent vector is the value of every head: an entry is read once.
//
// Blocks: blockIdx.x counts sequences and groups of CLUSTER * HEADS heads; blockIdx.y counts splits (split-KV,
// attention.cuh) and, fastest, the blocks of a cluster. A block has HEADS heads; the blocks of a cluster go through the
// same entries, and each loads a part of them for all.
//
// Tiles: TOKENS entries in nine panels of 64 elements, whose rows of 128 bytes are swizzled. Tiles come in pairs; the
// even one of a pair lies in stage 0, the odd one in stage 1.
//
// Warpgroups: one warp of the last loads. Each of the other two computes the logits of one tile of a pair, and one half
// of the results' columns, left or right, for which it needs the probabilities of both tiles:
//
//     warpgroup 0                                         warpgroup 1
//     S0 = Q K0^T,  m0 = max(m, S0)           -- m0 -->   S1 = Q K1^T
//     P0 = exp(S0 - m0)                                   m1 = max(m0, S1),  P1 = exp(S1 - m1)
//     L = L exp(m - m0) + P0 V0[left]       <- m1, P1 --  R = R exp(m - m1) + P1 V1[right]
//     P0 = P0 exp(m0 - m1)                    -- P0 -->
//     L = L exp(m0 - m1) + P1 V1[left]                    R = R + P0 V0[right]
//
// A warpgroup's own probabilities are operands in registers. The other warpgroup gets them in shared memory, where the
// last panel of the tile was that they belong to: the rotated keys, which no product needs any more. Each half of a
// tile is loaded anew as soon as the warpgroup that reads that half last has done so.
//
// Codes of an fp8 cache become product_t on their way: all warps of the last warpgroup load codes to registers, and store
// what they hold to shared memory, as TMA would. While a warp converts what it has, what it needs next is in flight.
//
// A token whose page number is out of range contributes nothing; a slot behind the end of the sequence neither.
//
// Constants
//     product_t      element type of queries: half_t or bf16_t
//     cache_t        element type of the cache: product_t or fp8_e4m3_t
//     out_t          element type of out
//     table_t, length_t    element types of page_table and seq_lens
//     PAGE_SIZE      slots of a page of the cache
//     BOX_TOKENS     a multiple of 8 that divides TOKENS / CLUSTER and, unless the cache is of fp8, PAGE_SIZE
//     CLUSTER        blocks of a cluster: 1 or 2; of an fp8 cache 1

#include "attention.cuh"
#include "cluster.cuh"
#include "paged.cuh"
#include "wgmma.cuh"

constexpr int HEADS = 64, TOKENS = 64, LATENT_SIZE = 512, PANEL_SIZE = 64, ROW_BYTES = 128;
constexpr int PANELS = 9, ROPE_PANEL = 8, HALF_PANELS = 4;
constexpr int PANEL_BYTES = TOKENS * ROW_BYTES, TILE_BYTES = PANELS * PANEL_BYTES, STAGES = 2;
constexpr int BOXES = TOKENS / BOX_TOKENS, OWN_BOXES = BOXES / CLUSTER;  // of a panel, and those that this block loads
constexpr int LEFT = 0, RIGHT = 1;
// Named barriers: what has been written to shared memory.
constexpr int EVEN_MAX = 1, ODD_PROBABILITIES = 2, EVEN_PROBABILITIES = 3, OWN_TILE = 4, EXP_SUMS = 6, PLACES = 7;
// A thread's registers: what the loader gives up, the others take.
constexpr bool IS_FP8 = !is_same<cache_t, product_t>;
constexpr int LOADER_REGISTERS = IS_FP8 ? 88 : 24, REGISTERS = IS_FP8 ? 208 : 240;
static_assert(!IS_FP8 || (is_same<cache_t, fp8_e4m3_t> && CLUSTER == 1));
static_assert((IS_FP8 || PAGE_SIZE % BOX_TOKENS == 0) && TOKENS % (BOX_TOKENS * CLUSTER) == 0 && BOX_TOKENS % 8 == 0);

// Pairs of tiles whose places are kept: one that is written while warps may be up to a pair behind, and ahead.
constexpr int PLACES_OF = 3;

// What the loading warpgroup does with an fp8 cache. The order of the halves of a pair is that in which they are given
// back.
struct CodeLoader {
    static constexpr int CHUNK = 16, CHUNKS = 10;  // codes that a lane loads at once; chunks of a lane, with rope or less
    static constexpr int HALVES = 4;               // of a pair of tiles
    const cache_t* cache;
    uint8_t* tiles;
    uint64_t *full, *empty;
    const int64_t* places;  // [PLACES_OF][2 * TOKENS], by pair and token
    uint4 codes[CHUNKS];

    static constexpr DEVICE int stage_of(int step) { return step % 2; }
    static constexpr DEVICE bool is_right(int step) { return step == 1 || step == 2; }
    static constexpr DEVICE bool has_rope(int step) { return is_right(step) != (stage_of(step) == 1); }
    static DEVICE int row_of(int chunk) {  // a lane has two rows of a tile
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int upper = chunk < 2 * HALF_PANELS ? chunk / HALF_PANELS : chunk % 2;
        return upper * 32 + warp * 8 + lane / 4;
    }
    static DEVICE int panel_of(int step, int chunk) {
        return chunk < 2 * HALF_PANELS ? is_right(step) * HALF_PANELS + chunk % HALF_PANELS : ROPE_PANEL;
    }
    static constexpr DEVICE int chunks_of(int step) { return has_rope(step) ? CHUNKS : CHUNKS - 2; }

    DEVICE void load(int pair, int step, int chunk) {
        const int64_t place = places[pair % PLACES_OF * (2 * TOKENS) + stage_of(step) * TOKENS + row_of(chunk)];
        codes[chunk] = make_uint4(0, 0, 0, 0);
        if (place == NOWHERE) return;
        const int element = panel_of(step, chunk) * PANEL_SIZE + threadIdx.x % 4 * CHUNK;
        codes[chunk] = *reinterpret_cast<const uint4*>(cache + place + element);
    }
    DEVICE void store(int step, int chunk) const {
        uint4 elements[2];
        widen_fp8<product_t>(codes[chunk], elements);
        uint8_t* const panel = tiles + stage_of(step) * TILE_BYTES + panel_of(step, chunk) * PANEL_BYTES;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = swizzle_128b(row_of(chunk), threadIdx.x % 4 * 32 + i * 16);
            *reinterpret_cast<uint4*>(panel + at) = elements[i];
        }
    }
    // Stores what has been loaded for a step of a pair, and loads for the next step.
    template <int STEP>
    DEVICE void pass(int pair, bool is_last) {
        constexpr int NEXT = (STEP + 1) % HALVES;
        const bool more = NEXT > 0 || !is_last;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            if (chunk < chunks_of(STEP)) store(STEP, chunk);
            if (chunk < chunks_of(NEXT) && more) load(pair + (NEXT == 0), NEXT, chunk);
        }
        fence_proxy_async();
        sync_warp();
        if (threadIdx.x % 32 == 0) {
            for (int panel = 0; panel < HALF_PANELS; ++panel) {
                mbarrier_arrive(full + stage_of(STEP) * PANELS + is_right(STEP) * HALF_PANELS + panel);
            }
            if (has_rope(STEP)) mbarrier_arrive(full + stage_of(STEP) * PANELS + ROPE_PANEL);
        }
    }
};

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(384, 1)
mla_decode_hopper(const __grid_constant__ TensorMap nope_map,   // [num_seqs, num_heads, LATENT_SIZE]; boxes of 1 x HEADS
                                                                // x a panel, swizzled
                  const __grid_constant__ TensorMap pe_map,     // [num_seqs, num_heads, 64]; likewise
                  const __grid_constant__ TensorMap cache_map,  // [num_pages, PAGE_SIZE, 576]; 1 x BOX_TOKENS x a panel
                  out_t* out,                                   // [num_seqs, num_heads, LATENT_SIZE]
                  float* lse,                                   // [num_seqs, num_heads]
                  const cache_t* kv_c_and_k_pe_cache,           // [num_pages, PAGE_SIZE, 576]; of codes, without a map
                  float* tmp_out,               // [num_seqs, num_heads, max_splits, LATENT_SIZE]
                  float* max_logits,            // [num_seqs, num_heads, max_splits]
                  float* exp_sums,              // [num_seqs, num_heads, max_splits]
                  const length_t* seq_lens,     // [num_seqs]
                  const table_t* page_table,    // [num_seqs, max_pages]
                  int64_t num_heads, int64_t num_pages, int64_t max_tokens, int64_t max_splits, int64_t min_split,
                  int64_t out_stride, int64_t page_stride, int64_t slot_stride, int64_t table_stride,
                  int64_t table_step, int64_t length_step, float scale) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t queries_full;
    __shared__ uint64_t full[STAGES * PANELS];  // [stage][panel]
    __shared__ uint64_t empty[STAGES * 2];      // [stage][half]
    __shared__ uint64_t exists[STAGES];         // a bit for each token of the tile that has an entry
    __shared__ int64_t places[IS_FP8 ? PLACES_OF * 2 * TOKENS : 1];
    __shared__ float even_max[HEADS];
    __shared__ float odd_max[HEADS];
    __shared__ float own_sums[2 * HEADS];  // [warpgroup][head]
    uint8_t* const queries = shared;
    uint8_t* const tiles = shared + TILE_BYTES;

    const int rank = CLUSTER > 1 ? blockIdx.y % CLUSTER : 0, split = blockIdx.y / CLUSTER;
    const int groups = ceil_div(int(num_heads), HEADS * CLUSTER);
    const int seq = blockIdx.x / groups, first_head = (int(blockIdx.x) % groups * CLUSTER + rank) * HEADS;
    const Splits splits(seq_lens[seq * length_step], max_tokens, 0, 0, int(max_splits), int(min_split), TOKENS);
    const bool direct = splits.count <= 1;
    if (!splits.exists(split) && !(direct && split == 0)) return;
    const int begin = splits.begin(split), end = splits.end(split);
    const int pairs = ceil_div(end - begin, 2 * TOKENS);

    if (threadIdx.x == 0) {
        mbarrier_init(&queries_full, 1);
        for (int i = 0; i < STAGES * PANELS; ++i) mbarrier_init(full + i, IS_FP8 ? 4 : 1);
        // The warps of one warpgroup of each block.
        for (int i = 0; i < STAGES * 2; ++i) mbarrier_init(empty + i, 4 * CLUSTER);
        fence_mbarrier_init();
    }
    sync_cluster<CLUSTER>();
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0);

    if (warpgroup == 2) {
        warpgroup_reg_dealloc<LOADER_REGISTERS>();
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        if (!IS_FP8 && warp != 0) return leave_cluster<CLUSTER>();
        if (warp == 0 && lane == 0 && pairs > 0) {
            mbarrier_arrive_expect_tx(&queries_full, TILE_BYTES);
            for (int panel = 0; panel < PANELS; ++panel) {
                const bool is_rope = panel == ROPE_PANEL;
                tma_load(queries + panel * PANEL_BYTES, is_rope ? &pe_map : &nope_map, &queries_full,
                         is_rope ? 0 : panel * PANEL_SIZE, first_head, seq);
            }
        }
        if constexpr (IS_FP8) {
            // Each thread finds the place of one token of a pair, a pair ahead.
            const Pages<PAGE_SIZE> pages{num_pages, page_stride, slot_stride};
            const auto place_at = [&](int pair) {
                const int token = begin + pair * 2 * TOKENS + threadIdx.x % 128;
                const table_t* const own = page_table + seq * table_stride;
                return token < end ? pages.at_position(token, own, max_tokens / PAGE_SIZE, table_step) : NOWHERE;
            };
            CodeLoader loader{kv_c_and_k_pe_cache, tiles, full, empty, places, {}};
            int64_t place = place_at(0);
            places[threadIdx.x % 128] = place;
            named_barrier_sync<PLACES>(128);
            if (pairs > 0) {
#pragma unroll
                for (int chunk = 0; chunk < loader.chunks_of(0); ++chunk) loader.load(0, 0, chunk);
            }
            for (int pair = 0; pair < pairs; ++pair) {
                const uint32_t found = ballot(place != NOWHERE);
                place = place_at(pair + 1);
                places[(pair + 1) % PLACES_OF * (2 * TOKENS) + threadIdx.x % 128] = place;
                named_barrier_sync<PLACES>(128);
                // Warps 2i and 2i + 1 have the tokens of stage i. The half that says so is the stage's own.
                const auto tell = [&](int stage) {
                    if (warp / 2 == stage && lane == 0) reinterpret_cast<uint32_t*>(exists + stage)[warp % 2] = found;
                };
                const bool is_last = pair + 1 == pairs;
                const auto await = [&](int stage, int half) {
                    mbarrier_wait(empty + stage * 2 + half, (pair & 1) ^ 1);
                };
                await(0, LEFT);
                tell(0);
                loader.pass<0>(pair, is_last);
                await(1, RIGHT);
                tell(1);
                loader.pass<1>(pair, is_last);
                await(0, RIGHT);
                loader.pass<2>(pair, is_last);
                await(1, LEFT);
                loader.pass<3>(pair, is_last);
            }
            return leave_cluster<CLUSTER>();
        }
        // Lane i has the page of box i of a pair, -1 where there is none: what is loaded from there are zeros.
        const table_t* const pages = page_table + seq * table_stride;
        const auto page_at = [&](int pair) {
            const int token = begin + pair * 2 * TOKENS + lane % (2 * BOXES) * BOX_TOKENS;
            if (token >= end) return -1;
            const int64_t page = pages[token / PAGE_SIZE * table_step];
            return page >= 0 && page < num_pages ? int(page) : -1;
        };
        int next_page = page_at(0);
        for (int pair = 0; pair < pairs; ++pair) {
            const int page = next_page;
            next_page = page_at(pair + 1);
            const uint32_t found = ballot(page >= 0);
            const auto load = [&](int stage, int half) {
                const int start = begin + (pair * 2 + stage) * TOKENS, box = rank * OWN_BOXES + lane % OWN_BOXES;
                const int box_page = shfl<WARP_SIZE>(page, stage * BOXES + box);
                if (lane >= OWN_BOXES) return;
                mbarrier_wait<(CLUSTER > 1)>(empty + stage * 2 + half, (pair & 1) ^ 1);
                if (lane == 0 && half == stage) {  // read by the warpgroup that gives this half back
                    uint64_t bits = 0;
                    for (int b = 0; b < BOXES; ++b) {
                        if (found >> (stage * BOXES + b) & 1) bits |= ~uint64_t(0) >> (64 - BOX_TOKENS) << b * BOX_TOKENS;
                    }
                    const int left = end - start;
                    exists[stage] = left >= TOKENS ? bits : left > 0 ? bits & ~(~uint64_t(0) << left) : 0;
                }
                const int slot = (start + box * BOX_TOKENS) % PAGE_SIZE;
                const auto load_panel = [&](int panel) {
                    uint64_t* const barrier = full + stage * PANELS + panel;
                    if (lane == 0) mbarrier_arrive_expect_tx(barrier, PANEL_BYTES);
                    uint8_t* const to = tiles + stage * TILE_BYTES + panel * PANEL_BYTES + box * BOX_TOKENS * ROW_BYTES;
                    const int x = panel * PANEL_SIZE;
                    if constexpr (CLUSTER == 1) tma_load(to, &cache_map, barrier, x, slot, box_page);
                    else tma_load_multicast(to, &cache_map, barrier, (1 << CLUSTER) - 1, x, slot, box_page);
                };
                for (int panel = 0; panel < HALF_PANELS; ++panel) load_panel(half * HALF_PANELS + panel);
                if (half != stage) load_panel(ROPE_PANEL);
            };
            // In the order in which they are given back.
            load(0, LEFT);
            load(1, RIGHT);
            load(0, RIGHT);
            load(1, LEFT);
        }
        sync_warp();
        return leave_cluster<CLUSTER>();
    }

    warpgroup_reg_alloc<REGISTERS>();
    const int thread = threadIdx.x % 128, lane = thread % 32, g = lane / 4, t = lane % 4, row = thread / 32 * 16 + g;
    const float unit = scale * LOG2_E;
    uint8_t* const own_tile = tiles + warpgroup * TILE_BYTES;
    uint8_t* const own_probabilities = own_tile + ROPE_PANEL * PANEL_BYTES;
    float max_logit[2] = {minus_infinity(), minus_infinity()}, exp_sum[2] = {}, s[TOKENS / 2], o[LATENT_SIZE / 4];
#pragma unroll
    for (int i = 0; i < LATENT_SIZE / 4; ++i) o[i] = 0.0f;

    // s = Q K^T of the warpgroup's tile, in units of log 2, -inf where there is no entry. `top`: the largest of a row.
    const auto multiply = [&](int pair, float (&top)[2]) {
#pragma unroll
        for (int i = 0; i < PANELS; ++i) {
            const int panel = i == ROPE_PANEL ? i : (i + HALF_PANELS * warpgroup) % 8;  // in the order of the loads
            mbarrier_wait<(CLUSTER > 1)>(full + warpgroup * PANELS + panel, pair & 1);
            const uint64_t a = make_smem_desc(queries + panel * PANEL_BYTES);
            const uint64_t b = make_smem_desc(own_tile + panel * PANEL_BYTES);
            if (i == 0) {
                warpgroup_fence_operand(s);
                warpgroup_arrive();
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                wgmma<product_t, TOKENS>(s, advance_smem_desc(a, 32 * k), advance_smem_desc(b, 32 * k), i > 0 || k > 0);
            }
        }
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) s[i] *= unit;
        const uint64_t bits = exists[warpgroup];
        if (~bits) {
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) {
                if (!(bits >> (i / 4 * 8 + 2 * t + i % 2) & 1)) s[i] = minus_infinity();
            }
            // Zeros for what lies in slots behind the end of the sequence, which may be NaN.
            named_barrier_sync(OWN_TILE + warpgroup, 128);
            for (int i = thread; i < TOKENS * 8 * 8; i += 128) {
                const int token = i / 8 % TOKENS;
                if (bits >> token & 1) continue;
                *reinterpret_cast<uint4*>(own_tile + i / (TOKENS * 8) * PANEL_BYTES + token * ROW_BYTES + i % 8 * 16) =
                    make_uint4(0, 0, 0, 0);
            }
            fence_proxy_async();
            named_barrier_sync(OWN_TILE + warpgroup, 128);
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
    // Logits become probabilities; `first` and `second` bring the sums of the rows to `top`.
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
    // The warpgroup's half of the latent vectors of tokens 16k and on.
    const auto values_at = [&](int stage, int k) {
        const uint8_t* half = tiles + stage * TILE_BYTES + warpgroup * HALF_PANELS * PANEL_BYTES;
        return make_smem_desc(half + k * 16 * ROW_BYTES, 8 * ROW_BYTES, PANEL_BYTES);
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
    const auto add_other = [&](int pair) {
        const int stage = warpgroup ^ 1;
        for (int i = 0; i < HALF_PANELS; ++i) {
            mbarrier_wait<(CLUSTER > 1)>(full + stage * PANELS + warpgroup * HALF_PANELS + i, pair & 1);
        }
        const uint64_t probabilities = make_smem_desc(tiles + stage * TILE_BYTES + ROPE_PANEL * PANEL_BYTES);
        warpgroup_fence_operand(o);
        warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) {
            wgmma<product_t, LATENT_SIZE / 2, false, true>(o, advance_smem_desc(probabilities, 32 * k),
                                                           values_at(stage, k));
        }
        warpgroup_commit_batch();
    };
    const auto release = [&](int stage) {  // this warpgroup's half
        if (lane >= CLUSTER) return;
        if constexpr (CLUSTER == 1) mbarrier_arrive(empty + stage * 2 + warpgroup);
        else mbarrier_arrive_cluster(empty + stage * 2 + warpgroup, lane);
    };

    if (pairs > 0) mbarrier_wait(&queries_full, 0);
    if (warpgroup == 0) {
        for (int pair = 0; pair < pairs; ++pair) {
            float top[2];
            multiply(pair, top);
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
            warpgroup_wait<0>();
            warpgroup_fence_operand(o);
            release(0);
            shrink_results(first, second);
            add_other(pair);
            warpgroup_wait<0>();
            warpgroup_fence_operand(o);
            release(1);
        }
    } else {
        for (int pair = 0; pair < pairs; ++pair) {
            float top[2];
            multiply(pair, top);
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
            add_other(pair);
            warpgroup_wait<1>();
            release(1);
            warpgroup_wait<0>();
            warpgroup_fence_operand(o);
            release(0);
        }
    }

    // The sums of both warpgroups meet. A partial result gets the formula's epsilon of 1e-6 when it is joined; 1e-20
    // only guards against 0 / 0.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        exp_sum[half] += shfl_xor(exp_sum[half], 1);
        exp_sum[half] += shfl_xor(exp_sum[half], 2);
        if (t == 0) own_sums[warpgroup * HEADS + row + 8 * half] = exp_sum[half];
    }
    named_barrier_sync<EXP_SUMS>(256);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = row + 8 * half;
        const bool is_head = first_head + head < num_heads;
        const float sum = (own_sums[head] + own_sums[HEADS + head]) * FULL_SCALE<product_t>;
        const float factor = 1.0f / (sum + (direct ? 1e-6f : 1e-20f)) * FULL_SCALE<product_t>;
        const int64_t at = int64_t(seq) * num_heads + first_head + head, part = at * max_splits + split;
        if (is_head && warpgroup == 0 && t == 0) {
            if (!direct) {
                max_logits[part] = max_logit[half] * LN_2;
                exp_sums[part] = sum;
            } else if (HAS_LSE) {
                lse[at] = sum == 0.0f ? minus_infinity() : max_logit[half] * LN_2 + logf(sum);
            }
        }
        if (!direct) {
            float* const to = tmp_out + part * LATENT_SIZE + warpgroup * (LATENT_SIZE / 2) + 2 * t;
#pragma unroll
            for (int i = 0; i < LATENT_SIZE / 16; ++i) {
                const float2 pair{o[4 * i + 2 * half] * factor, o[4 * i + 2 * half + 1] * factor};
                if (is_head) *reinterpret_cast<float2*>(to + i * 8) = pair;
            }
            continue;
        }
        // Four threads have four neighbouring pairs of each 8 elements. They exchange pairs: each stores 16 bytes.
        out_t* const to = out + seq * out_stride + int64_t(first_head + head) * LATENT_SIZE;
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
    leave_cluster<CLUSTER>();
}
