// attention_varlen: the query tokens of each sequence, any number of them, against its keys and values in a paged cache.
//
//     l_ij = softcap(scale * q_i . k_j) + slope * (j - limit_i)       limit_i - window < j <= limit_i
//     out_i = sum_j exp(l_ij - m_i) v_j / (sum_j exp(l_ij - m_i) + 1e-6),   m_i = max_j l_ij
//
// with limit_i = length - num_queries + i if CAUSAL, else length - 1. After FlashAttention-2 (Dao 2023, arXiv:2307.08691).
//
// A sequence's rows are its query tokens times the GROUP query heads that share a key-value head, heads first. A block takes
// TILE_ROWS rows, 16 to a warp, and goes through the keys in tiles of TOKENS, copied to shared memory while the tile before
// is computed. Products are those of mma.m16n8k16; a row's weights are rounded to T before they meet the values. Codes of an
// fp8 cache become T, which holds them all. blockIdx.x counts tiles over all sequences: sequence s has those from
// cu_seqlens_q[s] * GROUP / TILE_ROWS + s on, which leaves at most one in vain. blockIdx.y is the key-value head.
//
// A token whose block number is out of range contributes nothing. What lies in a slot beyond the sequence is not read.
//
// Constants
//     scalar_t       T: type of the queries and of out: half_t or bf16_t
//     cache_t        type of the caches: T, fp8_e4m3_t or fp8_e5m2_t
//     table_t, length_t, starts_t    types of block_tables, seq_lens and cu_seqlens_q
//     HEAD_SIZE      a multiple of 16
//     BLOCK_SIZE     slots of a block of the cache; PACKED: a multiple of 8
//     PACKED, X      the caches' layout, and the innermost elements of packed keys
//     GROUP          query heads to a key-value head
//     TOKENS         of a tile of keys: a multiple of 16
//     NUM_WARPS      warps of the block; TILE_ROWS is 16 times that
//     MIN_BLOCKS     blocks a multiprocessor should hold: bounds the registers
//     OUT_ACCESS     elements of out in one memory access: 1 or 2
//     CAUSAL, HAS_ALIBI, HAS_SOFTCAP, HAS_SINKS, HAS_LSE    which of the options are there

#include "async.cuh"
#include "attention.cuh"
#include "mma.cuh"

constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int TILE_ROWS = NUM_WARPS * 16;
constexpr bool IS_FP8 = !is_same<scalar_t, cache_t>;
constexpr int CHUNKS = HEAD_SIZE / 8;  // of 8 elements, 16 bytes, in a row of a head
constexpr int STEPS = HEAD_SIZE / 16;

// A matrix in shared memory, rows of chunks of 8 elements. Chunks change places within their eight by the row's number, so
// that the same chunk of neighbouring rows, which a fragment takes, lies on different banks.
template <int ROW_CHUNKS>
struct Tile {
    static constexpr int PITCH = (ROW_CHUNKS + 7) / 8 * 8;
    static constexpr int bytes(int rows) { return rows * PITCH * 16; }
    scalar_t* data;

    DEVICE scalar_t* at(int row, int chunk) const { return data + (row * PITCH + (chunk ^ row % 8)) * 8; }
};

using rows_tile = Tile<CHUNKS>;                                // of queries, keys, and values by tokens
using dims_tile = Tile<TOKENS / 8>;                            // PACKED: of values by head dimensions
constexpr int QUERY_BYTES = rows_tile::bytes(TILE_ROWS);
constexpr int KEY_BYTES = rows_tile::bytes(TOKENS);
constexpr int VALUE_BYTES = PACKED ? dims_tile::bytes(HEAD_SIZE) : KEY_BYTES;
static_assert(HEAD_SIZE % 16 == 0 && TOKENS % 16 == 0 && (!PACKED || BLOCK_SIZE % 8 == 0));

// 8 elements of a cache to shared memory, as T.
DEVICE void copy_chunk(scalar_t* to, const cache_t* from, bool there) {
    if constexpr (IS_FP8) {
        Vec<scalar_t, 8> chunk = Vec<scalar_t, 8>::full(0.0f);
        if (there) {
            float x[8];
            Vec<cache_t, 8>::load(from).to_floats(x);
            chunk = Vec<scalar_t, 8>::from_floats(x);
        }
        *reinterpret_cast<uint4*>(to) = chunk.template word<8>(0);
    } else {
        cp_async<16>(to, from, there);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
attention_varlen(scalar_t* out,              // [num_tokens, num_heads, HEAD_SIZE]
                 float* lse,                 // [num_heads, num_tokens]
                 const scalar_t* query,      // [num_tokens, num_heads, HEAD_SIZE]
                 const cache_t* key_cache,   // [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE], or PACKED
                 const cache_t* value_cache,
                 const table_t* block_tables,    // [num_seqs, most_tokens / BLOCK_SIZE]
                 const length_t* seq_lens,       // [num_seqs]
                 const starts_t* cu_seqlens_q,   // [num_seqs + 1]
                 const float* alibi_slopes,      // [num_heads]
                 const float* sinks,             // [num_heads]
                 const float* k_scale, const float* v_scale,  // [1]
                 int64_t num_tokens, int64_t num_seqs, int64_t num_blocks, int64_t most_tokens, int64_t sliding_window,
                 int64_t out_stride, int64_t query_stride, int64_t table_stride, int64_t table_step,
                 int64_t length_step, int64_t starts_step, int64_t key_block_stride, int64_t key_token_stride,
                 int64_t key_head_stride, int64_t value_block_stride, int64_t value_token_stride,
                 int64_t value_head_stride, float scale, float logits_soft_cap) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    unsigned char* const shared = reinterpret_cast<unsigned char*>(memory);
    __shared__ uint8_t there[2 * TOKENS];  // which tokens of the two tiles of keys lie in a block
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    // The last sequence that begins at this tile or before it. Long rows of tiles come first: they take the longest.
    const int64_t number = int64_t(gridDim.x) - 1 - blockIdx.x;
    const auto first_tile = [&](int64_t seq) { return int64_t(cu_seqlens_q[seq * starts_step]) * GROUP / TILE_ROWS + seq; };
    int64_t low = 0, high = num_seqs;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (first_tile(middle) <= number) low = middle + 1;
        else high = middle;
    }
    const int64_t seq = low - 1;
    if (seq < 0) return;
    const int64_t begin = cu_seqlens_q[seq * starts_step], finish = cu_seqlens_q[(seq + 1) * starts_step];
    if (begin < 0 || finish > num_tokens || begin >= finish) return;
    const int64_t tile_row = (number - first_tile(seq)) * TILE_ROWS, num_rows = (finish - begin) * GROUP;
    if (tile_row >= num_rows) return;

    const int length = int(min(max(int64_t(seq_lens[seq * length_step]), int64_t(0)), most_tokens));
    const int64_t context = CAUSAL ? length - (finish - begin) : int64_t(length) - 1;
    const int kv_head = blockIdx.y;
    // The last key of a row. (Of a row behind the last, that of the last.)
    const auto limit_of = [&](int64_t row) {
        return int(CAUSAL ? context + min(row, num_rows - 1) / GROUP : context);
    };
    const int last = limit_of(tile_row + TILE_ROWS - 1);
    const int64_t window = sliding_window > 0 ? sliding_window : int64_t(1) << 31;
    const int first = int(max(limit_of(tile_row) - window + 1, int64_t(0)));

    const rows_tile queries{reinterpret_cast<scalar_t*>(shared)};
    const auto keys_at = [&](int stage) { return rows_tile{reinterpret_cast<scalar_t*>(shared + QUERY_BYTES + stage * KEY_BYTES)}; };
    unsigned char* const values_from = shared + QUERY_BYTES + 2 * KEY_BYTES;

    // Queries.
    for (int i = threadIdx.x; i < TILE_ROWS * CHUNKS; i += NUM_THREADS) {
        const int64_t row = tile_row + i / CHUNKS;
        const bool inside = row < num_rows;
        const int64_t token = inside ? begin + row / GROUP : 0;
        const int64_t head = inside ? kv_head * GROUP + row % GROUP : 0;
        Vec<scalar_t, 8> chunk = Vec<scalar_t, 8>::full(0.0f);
        if (inside) chunk = Vec<scalar_t, 8>::load(query + token * query_stride + head * HEAD_SIZE + i % CHUNKS * 8);
        *reinterpret_cast<uint4*>(queries.at(i / CHUNKS, i % CHUNKS)) = chunk.template word<8>(0);
    }

    const auto number_of = [&](int token) {
        if (token > last || token < first) return int64_t(-1);
        const int64_t block = block_tables[seq * table_stride + token / BLOCK_SIZE * table_step];
        return block >= 0 && block < num_blocks ? block : int64_t(-1);
    };
    const auto load_keys = [&](int stage, int start) {
        const rows_tile keys = keys_at(stage);
#pragma unroll 4
        for (int i = threadIdx.x; i < TOKENS * CHUNKS; i += NUM_THREADS) {
            const int row = i / CHUNKS, chunk = i % CHUNKS, token = start + row, dim = chunk * 8;
            const int64_t block = number_of(token);
            const int64_t at = PACKED ? int64_t(dim / X) * (BLOCK_SIZE * X) + token % BLOCK_SIZE * X + dim % X
                                      : token % BLOCK_SIZE * key_token_stride + dim;
            copy_chunk(keys.at(row, chunk), key_cache + block * key_block_stride + kv_head * key_head_stride + at, block >= 0);
            if (chunk == 0) there[stage * TOKENS + row] = block >= 0;
        }
        cp_async_commit();
    };
    const auto load_values = [&](int stage, int start) {
        const cache_t* from = value_cache + kv_head * value_head_stride;
        scalar_t* const to = reinterpret_cast<scalar_t*>(values_from + stage * VALUE_BYTES);
        if constexpr (PACKED) {
            for (int i = threadIdx.x; i < HEAD_SIZE * (TOKENS / 8); i += NUM_THREADS) {
                const int dim = i / (TOKENS / 8), chunk = i % (TOKENS / 8), token = start + chunk * 8;
                scalar_t* const place = dims_tile{to}.at(dim, chunk);
                const int edge = token < first ? first : token;
                const int64_t block = number_of(edge);
                const cache_t* run = from + block * value_block_stride + int64_t(dim) * BLOCK_SIZE + token % BLOCK_SIZE;
                if (block < 0 || (token >= first && token + 7 <= last)) {
                    copy_chunk(place, run, block >= 0 && edge < token + 8);
                } else {  // what lies outside may be NaN, which no weight of zero takes away
                    for (int k = 0; k < 8; ++k) {
                        const bool inside = token + k >= first && token + k <= last;
                        place[k] = from_float<scalar_t>(inside ? to_float(run[k]) : 0.0f);
                    }
                }
            }
        } else {
#pragma unroll 4
            for (int i = threadIdx.x; i < TOKENS * CHUNKS; i += NUM_THREADS) {
                const int row = i / CHUNKS, chunk = i % CHUNKS, token = start + row;
                const int64_t block = number_of(token);
                const cache_t* row_from = from + block * value_block_stride + token % BLOCK_SIZE * value_token_stride;
                copy_chunk(rows_tile{to}.at(row, chunk), row_from + chunk * 8, block >= 0);
            }
        }
        cp_async_commit();
    };

    const int row_of_warp = warp * 16;
    int limit[2];
    float slope[2], most[2], sum[2], o[STEPS * 2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t row = tile_row + row_of_warp + g + half * 8;
        limit[half] = limit_of(row);
        slope[half] = HAS_ALIBI ? alibi_slopes[kv_head * GROUP + row % GROUP] * LOG2_E : 0.0f;
        most[half] = minus_infinity();
        sum[half] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < STEPS * 8; ++i) o[i / 4][i % 4] = 0.0f;
    const float unit = logit_unit<HAS_SOFTCAP>(scale * (IS_FP8 ? *k_scale : 1.0f), logits_soft_cap);

    int start = first / TOKENS * TOKENS, stage = 0;
    if (start <= last) {
        load_keys(0, start);
        load_values(0, start);
    }
    for (; start <= last; start += TOKENS, stage ^= 1) {
        const bool more = start + TOKENS <= last;
        cp_async_wait<1>();
        __syncthreads();
        if (more) load_keys(stage ^ 1, start + TOKENS);
        else cp_async_commit();

        // S = Q K^T: a tile of 16 rows, and TOKENS columns.
        const rows_tile keys = keys_at(stage);
        float s[TOKENS / 8][4];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) s[i / 4][i % 4] = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            uint32_t a[4];
            ldmatrix<4>(a, queries.at(row_of_warp + lane % 16, 2 * step + lane / 16));
#pragma unroll
            for (int n = 0; n < TOKENS / 16; ++n) {
                uint32_t b[4];
                ldmatrix<4>(b, keys.at(n * 16 + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
                mma_m16n8k16<scalar_t>(s[2 * n], a, {b[0], b[1]});
                mma_m16n8k16<scalar_t>(s[2 * n + 1], a, {b[2], b[3]});
            }
        }

        const bool inner = start + TOKENS - 1 <= limit_of(tile_row) && start > last - window;
        float larger[2] = {most[0], most[1]};
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = n * 8 + 2 * t + i % 2, token = start + column, half = i / 2;
                float& logit = s[n][i];
                logit = logit_of<HAS_SOFTCAP>(logit, unit, logits_soft_cap);
                if (HAS_ALIBI) logit = fmaf(slope[half], float(token - limit[half]), logit);
                const bool seen = inner || (token <= limit[half] && token > limit[half] - window);
                if (!seen || !there[stage * TOKENS + column]) logit = minus_infinity();
                larger[half] = fmaxf(larger[half], logit);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            larger[half] = fmaxf(larger[half], shfl_xor(larger[half], 1));
            larger[half] = fmaxf(larger[half], shfl_xor(larger[half], 2));
            const float shrink = relative_exp2(most[half], larger[half]);
            sum[half] *= shrink;
            most[half] = larger[half];
#pragma unroll
            for (int m = 0; m < STEPS * 2; ++m) {
                o[m][2 * half] *= shrink;
                o[m][2 * half + 1] *= shrink;
            }
        }
        uint32_t weights[TOKENS / 8][2];  // of n columns: rows g, rows g + 8
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float low = relative_exp2(s[n][2 * half], most[half]), high = relative_exp2(s[n][2 * half + 1], most[half]);
                sum[half] += low + high;
                weights[n][half] = pack_pair<scalar_t>(low, high);
            }
        }

        cp_async_wait<1>();
        __syncthreads();
        if (more) load_values(stage ^ 1, start + TOKENS);
        else cp_async_commit();

        // O += P V.
        scalar_t* const values = reinterpret_cast<scalar_t*>(values_from + stage * VALUE_BYTES);
#pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) {
            const uint32_t a[4] = {weights[2 * k][0], weights[2 * k][1], weights[2 * k + 1][0], weights[2 * k + 1][1]};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                uint32_t b[4];
                if constexpr (PACKED) {
                    ldmatrix<4>(b, dims_tile{values}.at(step * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
                } else {
                    ldmatrix<4, true>(b, rows_tile{values}.at(k * 16 + lane % 16, 2 * step + lane / 16));
                }
                mma_m16n8k16<scalar_t>(o[2 * step], a, {b[0], b[1]});
                mma_m16n8k16<scalar_t>(o[2 * step + 1], a, {b[2], b[3]});
            }
        }
    }
    cp_async_wait<0>();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] += shfl_xor(sum[half], 1);
        sum[half] += shfl_xor(sum[half], 2);
        const int64_t row = tile_row + row_of_warp + g + half * 8;
        if (row >= num_rows) continue;
        const int64_t token = begin + row / GROUP, head = kv_head * GROUP + row % GROUP;
        float weight = 1.0f;
        if (HAS_SINKS) {
            const float sink = sinks[head] * LOG2_E, largest = fmaxf(most[half], sink);
            weight = relative_exp2(most[half], largest);
            sum[half] = sum[half] * weight + relative_exp2(sink, largest);
            most[half] = largest;
        }
        const float share = weight / (sum[half] + 1e-6f) * (IS_FP8 ? *v_scale : 1.0f);
        scalar_t* const to = out + token * out_stride + head * HEAD_SIZE + 2 * t;
#pragma unroll
        for (int m = 0; m < STEPS * 2; ++m) {
            Vec<scalar_t, 2> pair;
            store_pair<scalar_t>(pair.data, o[m][2 * half] * share, o[m][2 * half + 1] * share);
            pair.template store<OUT_ACCESS>(to + m * 8);
        }
        if (HAS_LSE && t == 0) {
            lse[head * num_tokens + token] = sum[half] == 0.0f ? minus_infinity() : most[half] * LN_2 + logf(sum[half]);
        }
    }
}
