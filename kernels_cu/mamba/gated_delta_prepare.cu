// gated_delta_prepare: all that the tiles of gated_delta_sm90.cu need besides keys, queries and values, for every tile
// of 64 tokens and every value head: the matrices that relate tokens to each other, and the factors of tokens.
//
// Formula: that of gated_delta_chunk.cu. I + L is inverted in halves of 32 tokens, by forward substitution; the block
// below them is -(I + L_22)^-1 L_21 (I + L_11)^-1, with products of TF32 numbers that are as exact as float32.
//
// Blocks: blockIdx.x counts slots of tiles and value heads. Warps 0 and 1 relate keys to keys, warps 2 and 3 queries to
// keys: two rows of 16 x 16 blocks each, one of the first half and one of the second.
//
// Constants
//     scalar_t       T: element type of q, k and of the matrices: half_t or bf16_t
//     g_t, beta_t, starts_t    element types of g, beta and cu_seqlens
//     KEY_SIZE       elements of a head of k; a multiple of 16
//     QK_NORM        q and k are divided by their norms

#include "gated_delta_row_norm.cuh"
#include "gated_delta_sm90_tiles.cuh"
#include "tma.cuh"
#include "unit_triangular.cuh"

constexpr int NUM_THREADS = 128, HALF = TOKENS / 2;
constexpr int PITCH = HALF + 4;  // stride between columns of half of L, in floats: columns begin on different banks
constexpr int HALF_FLOATS = HALF * PITCH;
static_assert(TOKENS == 64 && WARP_SIZE == 32);

using key_tile = SwizzledTile<scalar_t, KEY_SIZE / 8>;
constexpr int KEY_BYTES = key_tile::bytes(TOKENS);
constexpr int LOWER_BYTES = 3 * HALF_FLOATS * 4, INVERSE_BYTES = 4 * HALF_FLOATS * 4;

// What a block has in shared memory. Matrices of half of the tokens are column-major floats with stride PITCH.
struct Shared {
    PreparedTile tile;
    // L_11, L_22 and L_21 begin at tile.inverse and end here. What they cover is written when they have been read.
    uint8_t end_of_lower[LOWER_BYTES - (sizeof(PreparedTile) - SQUARE_BYTES)];
    // Keys, then queries; when they have been read, the inverses of both halves, the block below them, and a product.
    uint8_t rows[2 * KEY_BYTES > INVERSE_BYTES ? 2 * KEY_BYTES : INVERSE_BYTES];
    float logs[TOKENS];       // a_l in units of log2
    float strengths[TOKENS];  // b_l
    float norms[2][TOKENS];   // 1 / |k| and 1 / |q|
    int seq;
};

// d += a b^T of a warp's 16 rows and 16 columns of products of HALF x HALF matrices. `a` points to the first row, and
// `b` to the first column.
DEVICE void multiply_halves(float (&d)[2][4], const float* a, const float* b) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < HALF; k += 8) {
        float rows[4];
        uint32_t high_rows[4], low_rows[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i] = a[(k + t + i / 2 * 4) * PITCH + g + i % 2 * 8];
        split_tf32(rows, high_rows, low_rows);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float columns[2] = {b[(n * 8 + g) * PITCH + k + t], b[(n * 8 + g) * PITCH + k + t + 4]};
            uint32_t high[2], low[2];
            split_tf32(columns, high, low);
            mma_m16n8k8(d[n], low_rows, high);
            mma_m16n8k8(d[n], high_rows, low);
            mma_m16n8k8(d[n], high_rows, high);
        }
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gated_delta_prepare(uint8_t* prepared,           // [slots, value_heads, sizeof(PreparedTile)]
                    const scalar_t* q,           // [num_tokens, key_heads, KEY_SIZE]
                    const scalar_t* k,           // likewise
                    const g_t* g,                // [num_tokens, value_heads]
                    const beta_t* beta,          // likewise
                    const starts_t* cu_seqlens,  // [num_seqs + 1]
                    int64_t num_tokens, int64_t seq_tokens, int64_t num_seqs, int64_t value_heads,
                    int64_t heads_per_key, int64_t q_stride, int64_t k_stride, int64_t g_stride, int64_t g_step,
                    int64_t beta_stride, int64_t beta_step, float scale) {
    await_previous_kernel();
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t slot = blockIdx.x / value_heads, head = blockIdx.x % value_heads;
    const auto tiles_of = [&](int64_t seq) {
        return SequenceTiles(cu_seqlens, static_cast<const int*>(nullptr), seq, seq_tokens, num_tokens);
    };
    const int seq = sequence_of<NUM_THREADS>(slot, num_seqs, shared.seq, tiles_of);
    if (seq < 0) return;
    const SequenceTiles tiles = tiles_of(seq);
    const int number = int(slot - tiles.first_slot), count = tiles.tokens(number);
    const int64_t first_token = tiles.token(number), key = head / heads_per_key * KEY_SIZE;

    PreparedTile& tile = shared.tile;
    const key_tile keys{reinterpret_cast<scalar_t*>(shared.rows)};
    const key_tile queries{reinterpret_cast<scalar_t*>(shared.rows + KEY_BYTES)};
    const square_tile weights{reinterpret_cast<scalar_t*>(tile.weights)};
    const square_tile inverse{reinterpret_cast<scalar_t*>(tile.inverse)};
    float* const lower = reinterpret_cast<float*>(tile.inverse);
    float* const inverses = reinterpret_cast<float*>(shared.rows);
    TokenCopy<KEY_SIZE / 8, TOKENS, NUM_THREADS> copy;
    copy.load(keys, k + first_token * k_stride + key, k_stride, count);
    copy.load(queries, q + first_token * q_stride + key, q_stride, count);
    cp_async_commit();
    if (warp == 0) {  // a lane has two adjacent tokens
        float logs[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int l = 2 * lane + j;
            const int64_t token = first_token + l;
            const bool exists = l < count;
            // A decay of 0 has the logarithm -inf, and -inf - -inf is NaN. -160 is as good: 2^-160 is 0 in float32.
            const float log = exists ? to_float(g[token * g_stride + head * g_step]) * LOG2_E : 0.0f;
            logs[j] = log < -160.0f ? -160.0f : log;
            const bool is_given = exists && beta;
            shared.strengths[l] = is_given ? to_float(beta[token * beta_stride + head * beta_step]) : exists;
        }
        float sum = logs[0] + logs[1];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float before = shfl<32>(sum, lane - distance & 31);
            if (lane >= distance) sum += before;
        }
        shared.logs[2 * lane] = sum - logs[1];
        shared.logs[2 * lane + 1] = sum;
    }
    // The block of weights above the diagonal that no warp computes.
    *reinterpret_cast<uint4*>(weights.at(threadIdx.x % HALF, HALF / 8 + threadIdx.x / HALF)) = {0, 0, 0, 0};
    const int of = warp / 2;
    const key_tile rows{of ? queries.data : keys.data};
    cp_async_wait<0>();
    __syncthreads();
    const RowNorm norm = norm_of(rows, threadIdx.x % TOKENS, true);
    shared.norms[of][threadIdx.x % TOKENS] = norm.inverse;
    const uint32_t large = ballot(norm.is_large);
    __syncthreads();

    const auto decay = [&](int l, int m) { return estimate_exp2(shared.logs[l] - shared.logs[m]); };
    const int low_row = warp % 2, high_row = 3 - low_row;  // rows of blocks
    Block low[2] = {}, high[4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        uint32_t low_words[SHORT_WORDS], high_words[SHORT_WORDS], columns[SHORT_WORDS];
        load_rows(low_words, rows, low_row * 16, step, lane);
        load_rows(high_words, rows, high_row * 16, step, lane);
#pragma unroll
        for (int column = 0; column < 4; ++column) {
            load_columns(columns, keys, column * 16, step, lane);
            if (column < 2) low[column % 2].add_product<scalar_t>(low_words, columns);
            high[column].add_product<scalar_t>(high_words, columns);
        }
    }
    // Calls visit(l, m, product of token l with key m and its next).
    const auto each_pair = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < 6 * BLOCK_PAIRS; ++i) {
            const int block = i / BLOCK_PAIRS, pair = i % BLOCK_PAIRS;
            const int row = block < 2 ? low_row : high_row, column = block < 2 ? block : block - 2;
            const int l = row * 16 + pair_row(pair) + lane_row(lane);
            const int m = column * 16 + pair_column(pair) + lane_column(lane);
            const Block& from = block < 2 ? low[block % 2] : high[block < 2 ? 0 : block - 2];
            visit(l, m, from.at(pair, 0), from.at(pair, 1));
        }
    };
    if (of) {
        each_pair([&](int l, int m, float first, float second) {
            const float norm = shared.norms[1][l] * scale;
            first = m <= l ? decay(l, m) * norm * (shared.norms[0][m] * first) : 0.0f;
            second = m + 1 <= l ? decay(l, m + 1) * norm * (shared.norms[0][m + 1] * second) : 0.0f;
            *reinterpret_cast<uint32_t*>(weights.at(l, m / 8) + m % 8) = pack_pair<scalar_t>(first, second);
        });
    } else {
        each_pair([&](int l, int m, float first, float second) {
            const float strength = shared.strengths[l] * shared.norms[0][l];
            const int half = l / HALF == m / HALF ? l / HALF : 2;
            float* const to = lower + half * HALF_FLOATS + m % HALF * PITCH + l % HALF;
            if (m / HALF > l / HALF) return;
            to[0] = m < l ? decay(l, m) * strength * (shared.norms[0][m] * first) : 0.0f;
            to[PITCH] = m + 1 < l ? decay(l, m + 1) * strength * (shared.norms[0][m + 1] * second) : 0.0f;
        });
    }
    __syncthreads();

    if (warp < 2) {
        float x[HALF];
        invert_column<PITCH>(x, lower + warp * HALF_FLOATS, lane);
#pragma unroll
        for (int l = 0; l < HALF; l += 4) {
            const float four[4] = {x[l], x[l + 1], x[l + 2], x[l + 3]};
            Vec<float, 4>::from_floats(four).store_shared(inverses + warp * HALF_FLOATS + lane * PITCH + l);
        }
    }
    __syncthreads();
    // A warp has a quarter of a product: `to` = a b, negated if `sign` is -1.
    const auto multiply = [&](float* to, const float* a, const float* b, float sign) {
        const int first_row = warp / 2 * 16, first_column = warp % 2 * 16;
        float d[2][4] = {};
        multiply_halves(d, a + first_row, b + first_column * PITCH);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = first_row + lane / 4 + i % 4 / 2 * 8;
            const int column = first_column + i / 4 * 8 + lane % 4 * 2 + i % 2;
            to[column * PITCH + row] = sign * d[i / 4][i % 4];
        }
    };
    float *const below = inverses + 2 * HALF_FLOATS, *const product = inverses + 3 * HALF_FLOATS;
    multiply(product, lower + 2 * HALF_FLOATS, inverses, 1.0f);
    __syncthreads();
    multiply(below, inverses + HALF_FLOATS, product, -1.0f);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TOKENS / 8 * TOKENS / NUM_THREADS; ++i) {
        const int row = threadIdx.x % TOKENS, chunk = threadIdx.x / TOKENS + i * (NUM_THREADS / TOKENS);
        const int half = row / HALF == chunk * 8 / HALF ? row / HALF : 2;
        const float* const from = inverses + half * HALF_FLOATS + chunk * 8 % HALF * PITCH + row % HALF;
        float eight[8] = {};
        if (row / HALF >= chunk * 8 / HALF) {
#pragma unroll
            for (int j = 0; j < 8; ++j) eight[j] = from[j * PITCH] * shared.strengths[chunk * 8 + j];
        }
        Vec<scalar_t, 8>::from_floats(eight).store_shared(inverse.at(row, chunk));
    }
    if (lane == 0) tile.large_rows[warp] = large;
    if (threadIdx.x < TOKENS) {
        const int l = threadIdx.x;
        const float log = shared.logs[l], total = shared.logs[TOKENS - 1], norm = shared.norms[0][l];
        tile.of_keys[l] = estimate_exp2(log) * norm;
        tile.of_queries[l] = estimate_exp2(log) * shared.norms[1][l] * scale;
        tile.of_changes[l] = l < count ? estimate_exp2(total - log) * norm : 0.0f;
        if (l < 4) tile.kept[l] = estimate_exp2(total);
    }
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(prepared + (slot * value_heads + head) * int64_t(sizeof(PreparedTile)), &tile, sizeof(PreparedTile));
        tma_store_commit();
        tma_store_wait_read<0>();
    }
}
