// attention_varlen_hopper: what attention_varlen.cu computes, on Hopper's tensor cores: prompts.
//
//     l_ij = softcap(scale * q_i . k_j) + slope * (j - limit_i)       limit_i - window < j <= limit_i
//     out_i = sum_j exp(l_ij - m_i) v_j / (sum_j exp(l_ij - m_i) + 1e-6),   m_i = max_j l_ij
//
// with limit_i = length - num_queries + i if CAUSAL, else length - 1. After FlashAttention-3 (Shah et al. 2024,
// arXiv:2407.08608).
//
// Rows: a row is a query token and one of the GROUP query heads of a key-value head, heads first. A work item is
// ITEM_TOKENS tokens of a sequence, which are at most 64 rows to each of CONSUMERS warpgroups, and one key-value head.
//
// Blocks: as many as the device has multiprocessors, each with work items one after another, from a counter. Items are
// numbered by tiles of tokens, then by key-value heads. The tiles of sequence s begin at number cu_seqlens_q[s] /
// ITEM_TOKENS + s, and at most one number of each sequence has no tokens. Items are taken from the last to the first:
// under CAUSAL the later ones of a sequence take longer, and should not be the tail.
//
// Warpgroups: one warp of the last warpgroup produces: it finds work, and loads queries, keys and values by TMA. The
// others consume: each goes through the keys in tiles of TOKENS, from the last tile, where the causal limits are, to the
// first. It starts S = Q K^T of a tile and O += P V of the tile before together, and computes the probabilities P of
// the new tile while the product with V goes on. Consumers take turns at starting products, so that the softmax of
// one runs beside the products of the others. The first S of the next item runs while results are stored.
//
// Cache blocks: a tile is loaded in boxes of BOX_TOKENS tokens, which never lie in two blocks. A block number that is
// out of range becomes num_blocks, of which TMA makes zeros, and a bit of `holes`. Values of tokens that no row of the
// item attends to, in the first and last tile, may be NaN: the producer overwrites them with zeros.
//
// Codes of an fp8 cache become T on their way: they are loaded to tiles of their own, and the other warps of the last
// warpgroup widen them.
//
// Constants
//     scalar_t       T: element type of queries and out: half_t or bf16_t
//     cache_t        element type of the caches: T or fp8_e4m3_t
//     table_t, length_t, starts_t    element types of block_tables, seq_lens and cu_seqlens_q
//     HEAD_SIZE      a multiple of 16, at most 256
//     BOX_TOKENS     a multiple of 8 that divides BLOCK_SIZE and TOKENS
//     WHOLE_HEADS    a box has all panels of its tokens, else one panel; codes: false, and a box has whole heads of codes
//     GROUP          query heads of one key-value head, at most ITEM_ROWS
//     TOKENS         keys of a tile; a multiple of 16
//     STAGES         tiles of keys, and of values, in shared memory
//     QUERY_STAGES   work items whose queries are in shared memory
//     CONSUMERS      warpgroups with rows: 2 or 3
//     CAUSAL         a query token sees the keys up to its own position, else all keys

#include "attention.cuh"
#include "gemm_pipeline.cuh"
#include "wgmma.cuh"

constexpr bool IS_FP8 = !is_same<cache_t, scalar_t>;
static_assert(!IS_FP8 || (is_same<cache_t, fp8_e4m3_t> && !WHOLE_HEADS));
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int ITEM_ROWS = 64 * CONSUMERS, ITEM_TOKENS = ITEM_ROWS / GROUP, USED_ROWS = ITEM_TOKENS * GROUP;
constexpr int BOXES = TOKENS / BOX_TOKENS;
constexpr int ROW_BYTES = 128, PANEL_SIZE = ROW_BYTES / sizeof(scalar_t);  // a panel: rows of 128 bytes, swizzled
constexpr int PANELS = ceil_div(HEAD_SIZE, PANEL_SIZE), STEPS = HEAD_SIZE / 16;
constexpr int QUERY_PANEL = ITEM_ROWS * ROW_BYTES, QUERY_BYTES = PANELS * QUERY_PANEL;
// Keys and values lie in atoms: 8 tokens of a panel. The next atom is that of the next panel, or of the next 8 tokens.
constexpr int ATOM = 8 * ROW_BYTES, TILE_BYTES = PANELS * TOKENS * ROW_BYTES;
constexpr int TOKEN_STRIDE = WHOLE_HEADS ? PANELS * ATOM : ATOM;  // from 8 tokens to the next
constexpr int PANEL_STRIDE = WHOLE_HEADS ? ATOM : TOKENS * ROW_BYTES;
constexpr int QUERY_BOX_BYTES = PANELS * USED_ROWS * ROW_BYTES;
constexpr int CODE_BYTES = IS_FP8 ? TOKENS * HEAD_SIZE : 0, CODE_STAGES = 2, WIDENERS = 3;  // warps
// A thread's registers: what the producer gives up, the consumers take.
constexpr int PRODUCER_REGISTERS = HEAD_SIZE <= 192 ? 56 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 152 : HEAD_SIZE <= 192 ? 224 : 232;
constexpr int TURNS = 1;  // the named barrier of the first consumer's turns; the others follow
constexpr int64_t MAX_WINDOW = 0x7fffffff;
static_assert(HEAD_SIZE % 16 == 0 && TOKENS % 16 == 0 && TOKENS % BOX_TOKENS == 0 && BOX_TOKENS % 8 == 0);
static_assert(BLOCK_SIZE % BOX_TOKENS == 0 && BOXES <= 32 && GROUP <= ITEM_ROWS);

// Query tokens of a sequence, and a key-value head.
struct alignas(8) Work {
    int token;    // the first of them, as a row of the query tensor
    int tokens;   // of the sequence, from there on; 0: there is no more work
    int limit;    // the last key that the first of them sees
    int kv_head;
    int first_tile, last_tile;  // of keys; one tile if no row has a key

    // The last key that a row sees. A row that does not exist is taken for the last row.
    DEVICE int limit_of(int row) const { return CAUSAL ? limit + min(row / GROUP, tokens - 1) : limit; }
};

// A tile of codes: of keys, of values, or none, because there is no more work.
struct Codes {
    enum Kind { KEYS, VALUES, NONE } kind;
    uint32_t missing;   // of keys: `holes`
    int before, inside; // of values: tokens of the tile that are not 0 lie from `before` on and before `inside`
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
attention_varlen_hopper(const __grid_constant__ TensorMap query_map,  // [num_tokens, num_heads, HEAD_SIZE]; boxes of
                                                                      // ITEM_TOKENS x GROUP x a panel
                        const __grid_constant__ TensorMap key_map,    // [num_blocks, BLOCK_SIZE, num_kv_heads,
                                                                      // HEAD_SIZE]; 1 x BOX_TOKENS x 1 x a panel.
                                                                      // WHOLE_HEADS: [num_blocks, BLOCK_SIZE / 8,
                                                                      // num_kv_heads * PANELS, 8, a panel]; 1 x
                                                                      // BOX_TOKENS / 8 x PANELS x 8 x a panel
                        const __grid_constant__ TensorMap value_map,  // likewise
                        scalar_t* out,                                // [num_tokens, num_heads, HEAD_SIZE]
                        float* lse,                                   // [num_heads, num_tokens]
                        const table_t* block_tables,                  // [num_seqs, max_tokens / BLOCK_SIZE]
                        const length_t* seq_lens,                     // [num_seqs]
                        const starts_t* cu_seqlens_q,                 // [num_seqs + 1]
                        const float* alibi_slopes,                    // [num_heads]
                        const float* sinks,                           // [num_heads]
                        const float* k_scale, const float* v_scale,   // [1]
                        uint32_t* items_taken,                        // [1], zero before and after
                        int64_t num_tokens, int64_t num_seqs, int64_t num_blocks, int64_t num_kv_heads,
                        int64_t num_items, int64_t max_tokens, int64_t sliding_window, int64_t out_stride,
                        int64_t table_stride, int64_t table_step, int64_t length_step, int64_t starts_step, float scale,
                        float logits_soft_cap) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ Work works[QUERY_STAGES];
    __shared__ Codes kinds[CODE_STAGES];
    __shared__ uint32_t holes[STAGES];  // of the keys of a stage, a bit for each box
    uint8_t* const queries = shared;
    uint8_t* const keys = queries + QUERY_STAGES * QUERY_BYTES;
    uint8_t* const values = keys + STAGES * TILE_BYTES;
    uint8_t* const codes = values + STAGES * TILE_BYTES;
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(codes + CODE_STAGES * CODE_BYTES);
    Ring<QUERY_STAGES> query(barriers);
    Ring<STAGES> key(barriers + 2 * QUERY_STAGES), value(barriers + 2 * (QUERY_STAGES + STAGES));
    Ring<CODE_STAGES> code(barriers + 2 * (QUERY_STAGES + 2 * STAGES));
    uint64_t* const landed = code.barriers + 2 * CODE_STAGES;  // values that are to be overwritten
    if (threadIdx.x == 0) {
        mbarrier_init(landed, 1);
        query.init(4 * CONSUMERS);
        key.init(4 * CONSUMERS, IS_FP8 ? WIDENERS : 1);
        value.init(4 * CONSUMERS, IS_FP8 ? WIDENERS : 1);
        code.init(WIDENERS);
    }
    // Rows that no box reaches.
    if constexpr (USED_ROWS < ITEM_ROWS) {
        for (int i = threadIdx.x; i < QUERY_STAGES * PANELS * (ITEM_ROWS - USED_ROWS) * 8; i += NUM_THREADS) {
            const int panel = i / ((ITEM_ROWS - USED_ROWS) * 8), chunk = i % ((ITEM_ROWS - USED_ROWS) * 8);
            *reinterpret_cast<uint4*>(queries + panel * QUERY_PANEL + USED_ROWS * ROW_BYTES + chunk * 16) = {};
        }
        fence_proxy_async();
    }
    __syncthreads();
    // The first key that a row sees whose last one is `limit`.
    const int window = int(min(sliding_window > 0 ? sliding_window : MAX_WINDOW, MAX_WINDOW));
    const auto first_seen = [&](int limit) { return limit < window ? 0 : limit - window + 1; };
    const int warpgroup = shfl<WARP_SIZE>(int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;

    if (warpgroup == CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (warp != 0) {
            if constexpr (!IS_FP8) return;
            const auto widen = [&](auto& ring, uint8_t* tiles, const Codes& kind) {
                ring.acquire();
                if (kind.kind == Codes::KEYS && warp == 1 && lane == 0) holes[ring.stage] = kind.missing;
                const uint8_t* const from = codes + code.stage * CODE_BYTES;
                uint8_t* const to = tiles + ring.stage * TILE_BYTES;
                constexpr int CHUNKS = HEAD_SIZE / 16, PANEL_CHUNKS = PANEL_SIZE / 16;  // of 16 codes
#pragma unroll 4
                for (int i = threadIdx.x % 128 - WARP_SIZE; i < PANELS * TOKENS * PANEL_CHUNKS; i += WIDENERS * WARP_SIZE) {
                    const int token = i / PANEL_CHUNKS % TOKENS, panel = i / PANEL_CHUNKS / TOKENS;
                    const int chunk = panel * PANEL_CHUNKS + i % PANEL_CHUNKS;
                    if (HEAD_SIZE % PANEL_SIZE != 0 && chunk >= CHUNKS) continue;
                    uint4 elements[2];
                    widen_fp8<scalar_t>(*reinterpret_cast<const uint4*>(from + token * HEAD_SIZE + chunk * 16), elements);
                    const bool exists = token >= kind.before && token < kind.inside;
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int at = swizzle_128b(token, i % PANEL_CHUNKS * 32 + j * 16);
                        *reinterpret_cast<uint4*>(to + panel * PANEL_STRIDE + at) =
                            exists ? elements[j] : make_uint4(0, 0, 0, 0);
                    }
                }
                fence_proxy_async();
                sync_warp();
                if (lane == 0) mbarrier_arrive(ring.full());
                code.release(code.stage);
                ring.advance();
            };
            for (;; code.advance()) {
                code.wait();
                if (kinds[code.stage].kind == Codes::NONE) return;
                const Codes kind = kinds[code.stage];
                if (kind.kind == Codes::KEYS) widen(key, keys, kind);
                else widen(value, values, kind);
            }
        }
        int seq, length;
        // Finds the work of an item; false if the item has none.
        const auto find = [&](int item, Work& work) {
            // Binary search for the sequence: the last one that begins at this tile or before it.
            const int64_t tile = item / int(num_kv_heads);
            const auto start_of = [&](int s) { return int64_t(cu_seqlens_q[s * starts_step]); };
            const auto first_tile = [&](int s) { return start_of(s) / ITEM_TOKENS + s; };
            int low = 0, high = int(num_seqs);
            while (low < high) {
                const int middle = (low + high) / 2;
                if (first_tile(middle) <= tile) low = middle + 1;
                else high = middle;
            }
            seq = low - 1;
            if (seq < 0) return false;
            const int64_t begin = start_of(seq), end = start_of(seq + 1);
            if (begin < 0 || end > num_tokens || begin >= end) return false;
            const int64_t token = begin + (tile - first_tile(seq)) * ITEM_TOKENS;
            if (token >= end) return false;
            length = int(min(max(int64_t(seq_lens[seq * length_step]), int64_t(0)), max_tokens));
            work.token = int(token);
            work.tokens = int(end - token);
            work.limit = CAUSAL ? length - work.tokens : length - 1;
            work.kv_head = item % int(num_kv_heads);
            work.first_tile = first_seen(work.limit) / TOKENS;
            work.last_tile = max(work.limit_of(ITEM_ROWS - 1), 0) / TOKENS;
            return true;
        };
        // The lane loads the box of a tile.
        const int box = lane % BOXES;
        constexpr int LOADERS = WARP_SIZE / BOXES * BOXES;
        uint32_t landings = 0;
        int item = blockIdx.x;
        for (bool more = true; more;) {
            more = item < num_items;
            Work work{int(num_tokens), 0, -1, 0, 0, 0};  // no more: zeros are loaded
            if (more) {
                const bool found = find(int(num_items) - 1 - item, work);
                uint32_t taken = 0;
                if (lane == 0) {
                    taken = atomicAdd(items_taken, 1u);
                    if (taken == num_items - 1) atomicExch(items_taken, 0u);
                }
                item = int(gridDim.x) + int(shfl<WARP_SIZE>(taken, 0));
                if (!found) continue;
            }

            query.acquire();
            if (lane == 0) {
                works[query.stage] = work;
                mbarrier_arrive_expect_tx(query.full(), QUERY_BOX_BYTES);
                for (int panel = 0; panel < PANELS; ++panel) {
                    tma_load(queries + query.stage * QUERY_BYTES + panel * QUERY_PANEL, &query_map, query.full(),
                             panel * PANEL_SIZE, work.kv_head * GROUP, work.token);
                }
            }
            query.advance();

            // The block of the lane's box; num_blocks if the box is behind the last key, negative if there is none.
            const int last = work.limit_of(ITEM_ROWS - 1);
            const auto block_of = [&](int tile) {
                const int token = tile * TOKENS + box * BOX_TOKENS;
                if (tile < work.first_tile || token > last) return int(num_blocks);
                const int64_t block = block_tables[seq * table_stride + token / BLOCK_SIZE * table_step];
                return block < 0 || block >= num_blocks ? -1 : int(block);
            };
            const auto load = [&](uint8_t* to, const TensorMap* map, uint64_t* full, int tile, int block) {
                if (lane == 0) mbarrier_arrive_expect_tx(full, IS_FP8 ? CODE_BYTES : TILE_BYTES);
                sync_warp();
                const int slot = (tile * TOKENS + box * BOX_TOKENS) % BLOCK_SIZE;
                const int from = block < 0 ? int(num_blocks) : block;
                uint8_t* const to_box = to + box * (BOX_TOKENS / 8) * TOKEN_STRIDE;
                if constexpr (IS_FP8) {
                    uint8_t* const to_codes = to + box * (BOX_TOKENS * HEAD_SIZE);
                    if (lane < BOXES) tma_load(to_codes, map, full, 0, work.kv_head, slot, from);
                } else if constexpr (WHOLE_HEADS) {
                    if (lane < BOXES) tma_load(to_box, map, full, 0, 0, work.kv_head * PANELS, slot / 8, from);
                } else {
                    for (int i = lane; i < PANELS * BOXES && lane < LOADERS; i += LOADERS) {
                        const int panel = i / BOXES;
                        tma_load(to_box + panel * PANEL_STRIDE, map, full, panel * PANEL_SIZE, work.kv_head, slot, from);
                    }
                }
            };
            const auto load_codes = [&](const TensorMap* map, const Codes& kind, int tile, int block) {
                code.acquire();
                if (lane == 0) kinds[code.stage] = kind;
                load(codes + code.stage * CODE_BYTES, map, code.full(), tile, block);
                code.advance();
            };
            // The keys of a tile, and then the values of the tile before.
            int block = block_of(work.last_tile), values_block = 0;
            for (int tile = work.last_tile; tile >= work.first_tile - 1; --tile) {
                const int next_block = block_of(tile - 1);
                if (tile >= work.first_tile) {
                    const uint32_t missing = ballot(block < 0 && lane < BOXES);
                    if constexpr (IS_FP8) {
                        load_codes(&key_map, {Codes::KEYS, missing, 0, TOKENS}, tile, block);
                    } else {
                        key.acquire();
                        if (lane == 0) holes[key.stage] = missing;
                        load(keys + key.stage * TILE_BYTES, &key_map, key.full(), tile, block);
                        key.advance();
                    }
                }
                const int start = (tile + 1) * TOKENS, before = first_seen(work.limit) - start;
                if (tile == work.last_tile || !more) {
                } else if constexpr (IS_FP8) {
                    load_codes(&value_map, {Codes::VALUES, 0, before, length - start}, tile + 1, values_block);
                } else {
                    value.acquire();
                    uint8_t* const to = values + value.stage * TILE_BYTES;
                    const bool whole = before <= 0 && length - start >= TOKENS;
                    load(to, &value_map, whole ? value.full() : landed, tile + 1, values_block);
                    if (!whole) {
                        mbarrier_wait(landed, landings++ & 1);
                        for (int i = lane; i < PANELS * TOKENS * 8; i += WARP_SIZE) {
                            const int atom = i / 64, token = (WHOLE_HEADS ? atom / PANELS : atom % (TOKENS / 8)) * 8 + i / 8 % 8;
                            if (token >= before && token < length - start) continue;
                            *reinterpret_cast<uint4*>(to + i * 16) = make_uint4(0, 0, 0, 0);
                        }
                        fence_proxy_async();
                        sync_warp();
                        if (lane == 0) mbarrier_arrive(value.full());
                    }
                    value.advance();
                }
                values_block = block;
                block = next_block;
            }
        }
        if constexpr (IS_FP8) {
            code.acquire();
            if (lane == 0) {
                kinds[code.stage].kind = Codes::NONE;
                mbarrier_arrive(code.full());
            }
        }
        return;
    }

    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    const int g = lane / 4, t = lane % 4;
    const int first_row = warpgroup * 64, own_row = first_row + warp * 16 + g;  // own_row and own_row + 8
    const float unit = logit_unit<HAS_SOFTCAP>(scale * (IS_FP8 ? *k_scale : 1.0f), logits_soft_cap);
    const auto release = [&](const auto& ring, int stage) {
        sync_warp();
        ring.release(stage);
    };
    // Turns: products are started by one consumer after another.
    const auto await_turn = [&] { named_barrier_sync(TURNS + warpgroup, 256); };
    const auto end_turn = [&] { named_barrier_arrive(TURNS + (warpgroup + 1) % CONSUMERS, 256); };
    if (warpgroup == CONSUMERS - 1) end_turn();

    float s[TOKENS / 2], o[HEAD_SIZE / 2];
    uint32_t p[TOKENS / 16][4];
    const auto start_logits = [&] {  // S = Q K^T
        const uint64_t a = make_smem_desc(queries + query.stage * QUERY_BYTES + first_row * ROW_BYTES);
        const uint64_t b = make_smem_desc(keys + key.stage * TILE_BYTES, TOKEN_STRIDE);
        key.wait();
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            wgmma<scalar_t, TOKENS>(s, advance_smem_desc(a, i / 4 * QUERY_PANEL + i % 4 * 32),
                                    advance_smem_desc(b, i / 4 * PANEL_STRIDE + i % 4 * 32), i > 0);
        }
        warpgroup_commit_batch();
    };
    const auto start_output = [&](bool accumulate) {  // O += P V
        const uint64_t b = make_smem_desc(values + value.stage * TILE_BYTES, TOKEN_STRIDE, PANEL_STRIDE);
        value.wait();
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < TOKENS / 16; ++i) {
            wgmma<scalar_t, HEAD_SIZE, true>(o, p[i], advance_smem_desc(b, i * 2 * TOKEN_STRIDE), accumulate || i > 0);
        }
        warpgroup_commit_batch();
    };

    query.wait();
    start_logits();
    while (works[query.stage].tokens > 0) {
        const Work work = works[query.stage];
        const int limits[2] = {work.limit_of(own_row), work.limit_of(own_row + 8)};
        int firsts[2];
        float slopes[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = work.kv_head * GROUP + (own_row + half * 8) % GROUP;
            firsts[half] = first_seen(limits[half]);
            slopes[half] = HAS_ALIBI ? alibi_slopes[head] * LOG2_E : 0.0f;
        }
        // Keys that all rows of the warpgroup see.
        const int whole_end = work.limit_of(first_row), whole_begin = first_seen(work.limit_of(first_row + 63));
        float max_logit[2] = {minus_infinity(), minus_infinity()}, exp_sum[2] = {0.0f, 0.0f}, shrink[2];
        // Products of a tile become probabilities, relative to the largest logit so far. What was computed relative to
        // another one is to be multiplied by `shrink`.
        const auto softmax = [&](int tile, uint32_t missing) {
            const int start = tile * TOKENS;
            const bool whole = start + TOKENS - 1 <= whole_end && start >= whole_begin && !missing;
            // In the plain case products take the place of logits, up to the factor `unit`.
            const bool plain = !HAS_SOFTCAP && !HAS_ALIBI && whole && unit > 0.0f;
            if (!plain) {
#pragma unroll
                for (int i = 0; i < TOKENS / 2; ++i) {
                    const int column = i / 4 * 8 + i % 2, half = i / 2 % 2;  // 2t columns before its own
                    s[i] = logit_of<HAS_SOFTCAP>(s[i], unit, logits_soft_cap);
                    if (HAS_ALIBI) {
                        const float distance = float(start + 2 * t - limits[half]);
                        s[i] = fmaf(slopes[half], distance + float(column), s[i]);
                    }
                }
            }
            if (!whole) {
#pragma unroll
                for (int i = 0; i < TOKENS / 2; ++i) {
                    const int column = i / 4 * 8 + i % 2, half = i / 2 % 2, before = start + 2 * t;
                    const bool seen = (column <= limits[half] - before) & (column >= firsts[half] - before) &
                                      !(missing >> column / BOX_TOKENS & 1);
                    if (!seen) s[i] = minus_infinity();
                }
            }
            const float factor = plain ? unit : 1.0f;
            float base[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float larger = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
                for (int i = 4; i < TOKENS / 2; i += 4) {
                    larger = fmaxf(larger, fmaxf(s[i + 2 * half], s[i + 2 * half + 1]));
                }
                larger = fmaxf(larger, shfl_xor(larger, 1));
                larger = fmaxf(larger, shfl_xor(larger, 2));
                larger = fmaxf(max_logit[half], larger * factor);
                base[half] = probability_base<scalar_t>(larger);
                shrink[half] = relative_exp2(max_logit[half], larger);
                max_logit[half] = larger;
            }
            // An exact product differs from the base by the rounding error of the base, too. All probabilities of a row
            // have that factor; but beyond 2^24 the factor may be 0 or infinite, and products are rounded first.
            float exact_factor = factor;
            if (any_lane(fmaxf(fabsf(base[0]), fabsf(base[1])) > 0x1p24f)) {
#pragma unroll
                for (int i = 0; i < TOKENS / 2; ++i) s[i] *= factor;
                exact_factor = 1.0f;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < TOKENS / 4; ++i) {
                    float& x = s[i / 2 * 4 + 2 * half + i % 2];
                    x = estimate_exp2(fmaf(x, exact_factor, -base[half]));
                    sum += x;
                }
                exp_sum[half] = fmaf(exp_sum[half], shrink[half], sum);
            }
        };
        const auto round_probabilities = [&] {
#pragma unroll
            for (int i = 0; i < TOKENS / 4; ++i) p[i / 4][i % 4] = pack_pair<scalar_t>(s[2 * i], s[2 * i + 1]);
        };

        uint32_t missing = holes[key.stage];
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
        release(key, key.stage);
        key.advance();
        softmax(work.last_tile, missing);
        round_probabilities();
        bool accumulate = false;
        for (int tile = work.last_tile - 1; tile >= work.first_tile; --tile) {
            await_turn();
            start_logits();
            missing = holes[key.stage];
            start_output(accumulate);
            accumulate = true;
            end_turn();
            warpgroup_wait<1>();
            warpgroup_fence_operand(s);
            release(key, key.stage);
            key.advance();
            softmax(tile, missing);
            warpgroup_fence_operand(s);
            hold_next_wait(fminf(exp_sum[0], exp_sum[1]));
            warpgroup_wait<0>();
            warpgroup_fence_operand(o);
            release(value, value.stage);
            value.advance();
            if (any_lane(shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < HEAD_SIZE / 2; ++i) o[i] *= shrink[i / 2 % 2];
            }
            round_probabilities();
        }
        release(query, query.stage);
        start_output(accumulate);
        // The first logits of the next item are computed while this one's results are stored.
        query.advance();
        query.wait();
        start_logits();
        warpgroup_wait<1>();
        warpgroup_fence_operand(o);
        release(value, value.stage);
        value.advance();

        // Four threads have four neighbouring pairs of each 8 elements of a row. They exchange pairs, so that each
        // stores 16 bytes.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float row_max = max_logit[half], row_sum = exp_sum[half];
            row_sum += shfl_xor(row_sum, 1);
            row_sum += shfl_xor(row_sum, 2);
            row_sum *= FULL_SCALE<scalar_t>;
            const int row = own_row + half * 8;
            const bool exists = row < USED_ROWS && row / GROUP < work.tokens;
            const int64_t token = int64_t(work.token) + row / GROUP, head = work.kv_head * GROUP + row % GROUP;
            float sink_shrink = 1.0f;
            if (HAS_SINKS) {
                const float sink = sinks[head] * LOG2_E, larger = fmaxf(row_max, sink);
                sink_shrink = relative_exp2(row_max, larger);
                row_sum = row_sum * sink_shrink + relative_exp2(sink, larger);
                row_max = larger;
            }
            if (HAS_LSE && exists && t == 0) {
                lse[head * num_tokens + token] = row_sum == 0.0f ? minus_infinity() : row_max * LN_2 + logf(row_sum);
            }
            const float share = sink_shrink / (row_sum + 1e-6f) * (FULL_SCALE<scalar_t> * (IS_FP8 ? *v_scale : 1.0f));
            scalar_t* const to = out + token * out_stride + head * HEAD_SIZE;
#pragma unroll
            for (int i = 0; i < HEAD_SIZE / 8; i += 4) {
                uint32_t pairs[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = (i + j) * 4 + 2 * half;
                    pairs[j] = at < HEAD_SIZE / 2 ? pack_pair<scalar_t>(o[at] * share, o[at + 1] * share) : 0;
                }
                transpose_4x4(pairs);
                if (exists && i + t < HEAD_SIZE / 8) {
                    *reinterpret_cast<uint4*>(to + (i + t) * 8) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
                }
            }
        }
    }
    warpgroup_wait<0>();
}
