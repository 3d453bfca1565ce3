// gated_delta_prepare: all that the tiles of gated_delta_sm90.cu need besides keys, queries and values, for every tile
// of 64 tokens and every value head: the matrices that relate tokens to each other, and the factors of tokens.
//
// Formula: that of gated_delta_chunk.cu. WGMMA multiplies keys and queries by keys. I + L is inverted in blocks of 16
// tokens: those on its diagonal, X_i, by forward substitution, and then block j of row i, below the diagonal, is
// -X_i (L_ij X_j + ... + L_i,i-1 X_i-1,j), with products of TF32 numbers. For half_t they are split, which is as exact
// as float32. For bf16_t one rounding to TF32 is a quarter of the rounding of the inverse that follows.
//
// Blocks: blockIdx.x counts slots of tiles and groups of HEADS value heads, which share dot products of tokens. A block
// is a warpgroup. Both matrices are lower triangular, so warp w has groups w and 7 - w of 8 tokens as rows: the tiles
// of keys and queries have rows in this order.
//
// Constants
//     scalar_t       T: element type of q, k and of the matrices: half_t or bf16_t
//     g_t, beta_t, starts_t    element types of g, beta and cu_seqlens
//     KEY_SIZE       elements of a head of k: 64 or 128
//     QK_NORM        q and k are divided by their norms
//     HEADS          value heads of a block, at most four: they have the same key head

#include "gated_delta_norm.cuh"
#include "gated_delta_sm90_tiles.cuh"
#include "memory.cuh"
#include "unit_triangular.cuh"
#include "wgmma.cuh"

constexpr int NUM_THREADS = 128, WARPS = 4, GROUPS = TOKENS / 8, SIDE = TOKENS / WARPS;  // tokens of a block of I + L
constexpr int LOWER_PITCH = TOKENS + 4, INVERSE_PITCH = SIDE + 4;  // in floats: columns begin on different banks
constexpr bool SPLITS = is_same<scalar_t, half_t>;                 // TF32 numbers of blocks of the inverse
static_assert(TOKENS == 64 && WARP_SIZE == 32 && HEADS <= WARPS);

// Column-major matrices of floats.
struct Lower {
    float elements[TOKENS * LOWER_PITCH];         // L
    float inverses[WARPS][SIDE * INVERSE_PITCH];  // of the blocks on the diagonal of I + L
};

// What a block has in shared memory.
struct Shared {
    union alignas(1024) {
        uint8_t rows[2][PANELS][TILE_BYTES];  // keys, then queries
        struct {                              // when both have been multiplied
            PreparedTile tile;
            Lower lower;
        } made;
    };
    float logs[HEADS][TOKENS];                   // a_l in units of log2
    float strengths[HEADS][TOKENS];              // b_l
    float squares[2][TOKENS], norms[2][TOKENS];  // |k|^2 and |q|^2; 1 / |k| and 1 / |q|
    uint32_t large_rows[4];                      // of TileFactors
    int seq;
};

// The group of tokens in group `position` of rows of a tile, and the reverse.
DEVICE constexpr int group_at(int position) { return position % 2 ? GROUPS - 1 - position / 2 : position / 2; }
DEVICE constexpr int position_of(int group) { return group < GROUPS / 2 ? 2 * group : 2 * (GROUPS - 1 - group) + 1; }

// Begins to copy the keys or queries of `count` tokens, from `from` on; other rows become zeros.
DEVICE void load_rows_of(uint8_t (&to)[PANELS][TILE_BYTES], const scalar_t* from, int64_t stride, int count) {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;  // in two groups; the second one's tokens descend
    const int first = row < 8 ? row : (GROUPS - 2) * 8 + row, step = row < 8 ? 8 : -8;
    from += first * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < GROUPS / 2; ++i, from += step * stride) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            cp_async<16>(tile_at(to[panel]).at(i * 16 + row, chunk), from + panel * WIDE, first + i * step < count);
        }
    }
}

// Writes the squared norms of the warp's rows, by tokens: the diagonal of their products with each other.
DEVICE void write_squares(float (&to)[TOKENS], uint8_t (&rows)[PANELS][TILE_BYTES]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    float low[4] = {}, high[4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        uint32_t a[4];
        load_rows(a, tile_at(rows[step / 4]), warp * 16, step % 4, lane);
        mma_m16n8k16<scalar_t>(low, a, {a[0], a[2]});
        mma_m16n8k16<scalar_t>(high, a, {a[1], a[3]});
    }
    if (lane % 4 != g / 2) return;
    to[group_at(2 * warp) * 8 + g] = g % 2 ? low[1] : low[0];
    to[group_at(2 * warp + 1) * 8 + g] = g % 2 ? high[3] : high[2];
}

// d += y m of matrices of SIDE x SIDE elements. The accumulators of one product are an operand of the next: a lane
// takes columns 2t and 2t + 1 of y as t and t + 4 in the order of K. Row k of m begins at m + k * PITCH.
template <int PITCH>
DEVICE void add_product(float (&d)[2][4], const float (&y)[2][4], const float* m) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        const float rows[4] = {y[step][0], y[step][2], y[step][1], y[step][3]};
        uint32_t high_rows[4], low_rows[4];
        if constexpr (SPLITS) split_tf32(rows, high_rows, low_rows);
        else round_tf32(rows, high_rows);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float* const from = m + (step * 8 + 2 * t) * PITCH + n * 8 + g;
            const float columns[2] = {from[0], from[PITCH]};
            uint32_t high[2], low[2];
            if constexpr (SPLITS) {
                split_tf32(columns, high, low);
                mma_m16n8k8(d[n], low_rows, high);
                mma_m16n8k8(d[n], high_rows, low);
            } else {
                round_tf32(columns, high);
            }
            mma_m16n8k8(d[n], high_rows, high);
        }
    }
}

// Makes the tile of head `number` of the block, which has `count` tokens, from their dot products. Rows are the warp's
// tokens, columns all tokens in the order of the tile's rows.
DEVICE void make_tile(Shared& shared, const float (&of_keys)[TOKENS / 2], const float (&of_queries)[TOKENS / 2],
                      int number, int count, float scale) {
    // Addresses of all iterations would not fit in registers.
    const int thread = made_anew(threadIdx.x) & NUM_THREADS - 1;
    const int warp = thread / 32, lane = thread % 32, r = lane / 4, t = lane % 4;
    PreparedTile& tile = shared.made.tile;
    Lower& lower = shared.made.lower;
    const float *const logs_of = shared.logs[number], *const strengths_of = shared.strengths[number];
    const int groups[2] = {group_at(2 * warp), group_at(2 * warp + 1)};  // of the lane's rows
    float row_logs[2], row_strengths[2], row_scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int l = groups[half] * 8 + r;
        row_logs[half] = logs_of[l];
        row_strengths[half] = strengths_of[l] * shared.norms[0][l];
        row_scales[half] = shared.norms[1][l] * scale;
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int m = group * 8 + 2 * t, first = position_of(group) * 4;
        const auto logs = Vec<float, 2>::load(logs_of + m), norms = Vec<float, 2>::load(shared.norms[0] + m);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == 0 && group >= GROUPS / 2) continue;  // all rows of this half are above the diagonal
            const int l = groups[half] * 8 + r;
            float two[2] = {};
            const auto relate = [&](bool is_on_diagonal) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int i = first + 2 * half + j;
                    const float factor = estimate_exp2(row_logs[half] - logs[j]) * norms[j];
                    const float of_key = factor * of_keys[i] * row_strengths[half];
                    const float of_query = factor * of_queries[i] * row_scales[half];
                    lower.elements[(m + j) * LOWER_PITCH + l] = is_on_diagonal && m + j >= l ? 0.0f : of_key;
                    two[j] = is_on_diagonal && m + j > l ? 0.0f : of_query;
                }
            };
            if (group < groups[half]) relate(false);
            else if (group == groups[half]) relate(true);
            if (groups[half] / 2 < group / 2) continue;  // above the blocks on the diagonal
            const Panel weights{tile.weights + Weights::offset(group / 2)};
            *reinterpret_cast<uint32_t*>(weights.at(groups[half] - group / 2 * 2, r, group % 2) + 2 * t) =
                pack_pair<scalar_t>(two[0], two[1]);
        }
    }
    __syncthreads();

    if (lane < SIDE) {
        float x[SIDE];
        invert_column<LOWER_PITCH>(x, lower.elements + warp * SIDE * (LOWER_PITCH + 1), lane);
#pragma unroll
        for (int l = 0; l < SIDE; l += 4) {
            const float four[4] = {x[l], x[l + 1], x[l + 2], x[l + 3]};
            Vec<float, 4>::from_floats(four).store_shared(lower.inverses[warp] + lane * INVERSE_PITCH + l);
        }
    }
    __syncthreads();

    // A warp has a column of blocks, transposed: y[i] is block i below that on the diagonal. Warps have different
    // numbers of blocks, and blocks of the grid other columns for the same warp.
    const int column = (warp + blockIdx.x) % WARPS;
    const float strengths[2] = {strengths_of[column * SIDE + r], strengths_of[column * SIDE + r + 8]};
    const auto store = [&](int row, const float (&d)[2][4]) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] =
                pack_pair<scalar_t>(d[i / 2][i % 2 * 2] * strengths[i % 2], d[i / 2][i % 2 * 2 + 1] * strengths[i % 2]);
        }
        const Panel inverse{tile.factors.inverse + Inverse::offset(row / Inverse::FIRST_PANELS, column)};
        stmatrix<4, true>(inverse.at(row % Inverse::FIRST_PANELS * 2 + lane / 16, lane % 8, lane / 8 % 2), words);
    };
    const float zeros[2][4] = {};
    if (column % 2) store(column - 1, zeros);  // next to the block on the diagonal, in the panel of 32 rows
    float y[WARPS][2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* const from = lower.inverses[column] + (r + i % 2 * 8) * INVERSE_PITCH + i / 2 * 8 + 2 * t;
        const auto two = Vec<float, 2>::load(from);
        y[0][i / 2][i % 2 * 2] = two[0];
        y[0][i / 2][i % 2 * 2 + 1] = two[1];
    }
    store(column, y[0]);
#pragma unroll
    for (int below = 1; below < WARPS; ++below) {
        const int row = column + below;
        if (row >= WARPS) continue;
        float sum[2][4] = {};
#pragma unroll
        for (int i = 0; i < below; ++i) {
            add_product<LOWER_PITCH>(sum, y[i], lower.elements + (column + i) * SIDE * LOWER_PITCH + row * SIDE);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[i / 4][i % 4] = -sum[i / 4][i % 4];
            y[below][i / 4][i % 4] = 0.0f;
        }
        add_product<INVERSE_PITCH>(y[below], sum, lower.inverses[row]);
        store(row, y[below]);
    }
    if (thread < TOKENS) {
        const int l = thread;
        const float log = logs_of[l], total = logs_of[TOKENS - 1], norm = shared.norms[0][l];
        tile.factors.of_keys[l] = estimate_exp2(log) * norm;
        tile.factors.of_queries[l] = estimate_exp2(log) * shared.norms[1][l] * scale;
        tile.factors.of_changes[l] = l < count ? estimate_exp2(total - log) * norm : 0.0f;
        if (l < 4) {
            tile.factors.kept[l] = estimate_exp2(total);
            tile.factors.large_rows[l] = shared.large_rows[l];
        }
    }
    fence_proxy_async();
    __syncthreads();
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
    const uint32_t groups_of_heads = uint32_t(value_heads) / HEADS, slot = blockIdx.x / groups_of_heads;
    const int64_t first_head = int64_t(blockIdx.x % groups_of_heads) * HEADS;
    const auto tiles_of = [&](int64_t seq) {
        return SequenceTiles(cu_seqlens, static_cast<const int*>(nullptr), seq, seq_tokens, num_tokens);
    };
    const int seq = sequence_of<NUM_THREADS>(slot, num_seqs, shared.seq, tiles_of);
    if (seq < 0) return;
    const SequenceTiles tiles = tiles_of(seq);
    // From the end of a sequence: its first tiles are walked first, and should be those that the L2 cache still has.
    const int index = tiles.count - 1 - int(slot - tiles.first_slot), count = tiles.tokens(index);
    const uint32_t own_slot = uint32_t(tiles.first_slot) + index;
    const int64_t first_token = tiles.token(index), key = uint32_t(first_head) / uint32_t(heads_per_key) * KEY_SIZE;

    load_rows_of(shared.rows[0], k + first_token * k_stride + key, k_stride, count);
    load_rows_of(shared.rows[1], q + first_token * q_stride + key, q_stride, count);
    cp_async_commit();
    if (warp < HEADS) {  // a warp has a head, a lane two adjacent tokens
        const int64_t head = first_head + warp;
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
            shared.strengths[warp][l] = is_given ? to_float(beta[token * beta_stride + head * beta_step]) : exists;
        }
        float sum = logs[0] + logs[1];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float before = shfl<32>(sum, lane - distance & 31);
            if (lane >= distance) sum += before;
        }
        shared.logs[warp][2 * lane] = sum - logs[1];
        shared.logs[warp][2 * lane + 1] = sum;
    }
    cp_async_wait<0>();
    fence_proxy_async();
    __syncthreads();

    const int of = threadIdx.x / TOKENS, own_token = threadIdx.x % TOKENS;  // of keys or queries; its norm
    const uint64_t keys = make_smem_desc(shared.rows[0]), queries = make_smem_desc(shared.rows[1]);
    // Dot products with keys: rows are the warp's tokens, columns all tokens in the order of the tile's rows.
    float of_keys[TOKENS / 2], of_queries[TOKENS / 2];
    for (bool is_scaled = false;; is_scaled = true) {
        const auto multiply = [&](float (&d)[TOKENS / 2], uint64_t rows) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int offset = step / 4 * TILE_BYTES + step % 4 * 32;
                wgmma<scalar_t, TOKENS>(d, advance_smem_desc(rows, offset), advance_smem_desc(keys, offset), step > 0);
            }
        };
        warpgroup_fence_operand(of_keys);
        warpgroup_fence_operand(of_queries);
        warpgroup_arrive();
        multiply(of_keys, keys);
        multiply(of_queries, queries);
        warpgroup_commit_batch();
        if constexpr (QK_NORM) {
            write_squares(shared.squares[0], shared.rows[0]);
            write_squares(shared.squares[1], shared.rows[1]);
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(of_keys);
        warpgroup_fence_operand(of_queries);
        if (QK_NORM) __syncthreads();
        const float squares = QK_NORM ? shared.squares[of][own_token] : 1.0f;
        const bool is_large = QK_NORM && CAN_BE_LARGE && !is_scaled && squares > LARGE;
        if (!is_scaled) {
            const uint32_t large = ballot(is_large);
            if (lane == 0) shared.large_rows[warp] = large;
        }
        const bool was_large = is_scaled && shared.large_rows[warp] >> lane & 1;
        shared.norms[of][own_token] = QK_NORM ? inverse_root(squares, was_large) : 1.0f;
        __syncthreads();
        if constexpr (!QK_NORM || !CAN_BE_LARGE) break;
        const auto large = Vec<uint32_t, 4>::load(shared.large_rows);
        if (is_scaled || !(large.data[0] | large.data[1] | large.data[2] | large.data[3])) break;
        // Dot products of such rows with others would overflow, too.
        const int row = position_of(own_token / 8) * 8 + own_token % 8;
        for (int i = 0; i < KEY_SIZE / 8 && is_large; ++i) {
            scalar_t* const at = tile_at(shared.rows[of][i / 8]).at(row, i % 8);
            map(Vec<scalar_t, 8>::load(at), [](float x) { return x * DOWN; }).store_shared(at);
        }
        fence_proxy_async();
        __syncthreads();
    }

#pragma unroll 1
    for (int number = 0; number < HEADS; ++number) {
        if (number > 0) __syncthreads();  // the tile of the previous head has been read
        make_tile(shared, of_keys, of_queries, number, count, scale);
        if (threadIdx.x == 0) {
            const int64_t to = (own_slot * value_heads + first_head + number) * int64_t(sizeof(PreparedTile));
            bulk_store(prepared + to, &shared.made.tile, sizeof(PreparedTile));
            tma_store_commit();
            tma_store_wait_read<0>();
        }
    }
}
