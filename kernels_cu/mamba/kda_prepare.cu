// kda_prepare: all that the tiles of kda_chunk.cu need of keys, queries and gates, for every tile and value head.
//
// Formula: that of gated_delta_chunk.cu, with a decay for each channel d of the key. With a_l the sum of the logarithms
// of decays up to token l of the tile, and k and q after their norms:
//
//     L_lm = b_l sum_d exp(a_l - a_m) k_l k_m for m < l,    weights_lm = scale sum_d exp(a_l - a_m) q_l k_m for m <= l
//
// exp(a_l - a_m) is at most 1, but exp(-a_m) may overflow, so the dot product is an MMA of pairs of tokens that have an
// anchor between them: exp(a_l - a_anchor) k_l times exp(a_anchor - a_m) k_m. Tokens l and m that differ in the bit of
// value h and agree in the higher bits have the last token without this bit as their anchor. So one tile of operands
// for each h of 16, 8, 4, 2 and 1 covers all pairs: a token with the bit is a row there, a token without it a column.
// No factor exceeds 1 whatever the gates are, unless a decay does. With ONE_ANCHOR, all pairs of 16 tokens have the
// last token of the first eight as their anchor: a factor is at most the inverse of the decays of eight tokens.
//
// Blocks: blockIdx.x counts slots of tiles and value heads. A warp has 16 channels of 32 tokens in registers. A lane
// has four adjacent channels of every eighth token: the fragments of mma.sync, as rows and as columns alike, with the
// channels in another order. Partial results of warps are added in shared memory, in order.
//
// Constants
//     scalar_t       T: element type of q, k and of the prepared tiles: half_t or bf16_t
//     g_t, beta_t, starts_t, offset_t    element types of g, beta, cu_seqlens and checkpoint_offsets
//     A_t, bias_t, HAS_GATE, BOUNDED, BETA_SIGMOID    of delta_gate.cuh; A_log and dt_bias have the types A_t and bias_t
//     KEY_SIZE       elements of a head of k; a multiple of 32
//     QK_NORM        q and k are divided by their norms
//     TOKENS         tokens of a tile: 32
//     ONE_ANCHOR     as above; the inverse of the decays of 16 tokens has to be finite in T
//     CHECKPOINTS    of sequence_tiles.cuh

#include "delta_gate.cuh"
#include "gated_delta_norm.cuh"
#include "kda_tiles.cuh"
#include "reduce.cuh"

constexpr int WARPS = KEY_SIZE / 16, NUM_THREADS = WARPS * WARP_SIZE;
constexpr int GROUPS = TOKENS / 8;  // groups of 8 tokens: a lane has one token of each
static_assert(TOKENS == 32 && WARP_SIZE == 32);

// Entries of L or of the weights in a lane: pairs of tokens of a group, of both groups of 16 tokens, of both halves of
// the tile. The last two kinds come again with the earlier token as the row: these entries are zero.
constexpr int IN_GROUP = 2 * GROUPS, IN_SIXTEEN = 4, IN_TILE = 8, ZEROS = IN_SIXTEEN + IN_TILE;
constexpr int ENTRIES = IN_GROUP + ZEROS;

struct TokenPair { int l, m; };

// The row and column of an entry.
DEVICE TokenPair tokens_of(int entry, int lane) {
    const int row = lane / 4, column = lane % 4 * 2 + entry % 2;
    if (entry < IN_GROUP) return {entry / 2 * 8 + row, entry / 2 * 8 + column};
    const bool is_zero = entry >= ENTRIES;
    entry -= is_zero ? ENTRIES : IN_GROUP;
    const int own = is_zero ? 0 : 1, other = 1 - own;  // which of two halves has the row
    if (entry < IN_SIXTEEN) return {entry / 2 * 16 + own * 8 + row, entry / 2 * 16 + other * 8 + column};
    entry -= IN_SIXTEEN;
    return {own * 16 + entry / 2 % 2 * 8 + row, other * 16 + entry / 4 * 8 + column};
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
kda_prepare(scalar_t* prepared,                  // [slots, value_heads, PreparedTile::SIZE]
            const scalar_t* q,                   // [num_tokens, key_heads, KEY_SIZE]
            const scalar_t* k,                   // likewise
            const g_t* g,                        // [num_tokens, value_heads, KEY_SIZE]
            const beta_t* beta,                  // [num_tokens, value_heads]
            const A_t* A_log,                    // [value_heads]
            const bias_t* dt_bias,               // [value_heads, KEY_SIZE]
            const starts_t* cu_seqlens,          // [num_seqs + 1]
            const offset_t* checkpoint_offsets,  // [num_seqs]
            int64_t num_tokens, int64_t seq_tokens, int64_t num_seqs, int64_t value_heads, int64_t heads_per_key,
            int64_t q_stride, int64_t k_stride, int64_t g_stride, int64_t g_step, int64_t beta_stride,
            int64_t beta_step, float scale, float lower_bound) {
    await_previous_kernel();
    __shared__ float partial[WARPS][2][ENTRIES][WARP_SIZE];
    __shared__ float norms[2][TOKENS];                     // 1 / |k| and 1 / |q|, of rows that may be scaled by DOWN
    __shared__ bool is_large[2][TOKENS];                   // these rows are scaled
    __shared__ alignas(16) float columns[TOKENS * PITCH];  // L, column-major
    __shared__ float strengths[TOKENS];
    __shared__ int seq_of_slot;
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, row = lane / 4, quad = lane % 4;
    const int64_t slot = blockIdx.x / value_heads, head = blockIdx.x % value_heads;

    const auto tiles_of = [&](int64_t seq) {
        return SequenceTiles(cu_seqlens, checkpoint_offsets, seq, seq_tokens, num_tokens);
    };
    const int seq = sequence_of<NUM_THREADS>(slot, num_seqs, seq_of_slot, tiles_of);
    if (seq < 0) return;
    const SequenceTiles tiles = tiles_of(seq);
    const int tile = int(slot - tiles.first_slot), count = tiles.tokens(tile);
    const int64_t first_token = tiles.token(tile);
    const PreparedTile out(prepared, slot, head, value_heads);

    // The lane's elements of keys and queries, in pairs, and logarithms of decays: channels from `channel` on of token
    // 8 * i + row.
    uint32_t x[2][GROUPS][2];
    float a[GROUPS][4];
    const auto unpack = [&](float (&elements)[4], int of, int i) {
        unpack_pair<scalar_t>(x[of][i][0], elements[0], elements[1]);
        unpack_pair<scalar_t>(x[of][i][1], elements[2], elements[3]);
    };
    const int channel = warp * 16 + quad * 4;
    const DeltaGate gate{HAS_GATE ? expf(to_float(A_log[head])) : 0.0f, lower_bound};
    float bias[4] = {};
    if (HAS_GATE && dt_bias) load_floats<1>(dt_bias + head * KEY_SIZE + channel, bias);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        const int64_t token = first_token + i * 8 + row, key = head / heads_per_key * KEY_SIZE + channel;
        const bool exists = i * 8 + row < count;
        hold<8>(x[0][i], k + token * k_stride + key, exists);
        hold<8>(x[1][i], q + token * q_stride + key, exists);
        float raw[4] = {};
        if (exists) load_floats<4>(g + token * g_stride + head * g_step + channel, raw);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            // A decay of 0 has the logarithm -inf, and -inf - -inf is NaN. -160 is as good: 2^-160 is 0 in float32.
            const float log = gate.log_decay(raw[j], bias[j]) * LOG2_E;
            a[i][j] = exists ? log < -160.0f ? -160.0f : log : 0.0f;
        }
    }
    if (threadIdx.x < TOKENS) {
        const int64_t token = first_token + threadIdx.x;
        const bool exists = int(threadIdx.x) < count;
        const float given = exists && beta ? to_float(beta[token * beta_stride + head * beta_step]) : 1.0f;
        strengths[threadIdx.x] = !exists ? 0.0f : beta ? update_strength(given) : 1.0f;
    }

    if constexpr (QK_NORM) {
        // Squares of the elements, and of the scaled elements, added over the channels of each warp.
        float (&squares)[2][2][WARPS][TOKENS] = reinterpret_cast<float (&)[2][2][WARPS][TOKENS]>(partial);
#pragma unroll
        for (int n = 0; n < 2 * GROUPS; ++n) {
            const int of = n / GROUPS, i = n % GROUPS;
            float elements[4], sum = 0.0f, scaled = 0.0f;
            unpack(elements, of, i);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sum = fmaf(elements[j], elements[j], sum);
                if (CAN_BE_LARGE) scaled = fmaf(elements[j] * DOWN, elements[j] * DOWN, scaled);
            }
            sum = lane_reduce<Sum, 4>(sum);
            if (CAN_BE_LARGE) scaled = lane_reduce<Sum, 4>(scaled);
            if (quad == 0) {
                squares[0][of][warp][i * 8 + row] = sum;
                squares[1][of][warp][i * 8 + row] = scaled;
            }
        }
        __syncthreads();
        for (int n = threadIdx.x; n < 2 * TOKENS; n += NUM_THREADS) {
            const int of = n / TOKENS, token = n % TOKENS;
            float sum = 0.0f, scaled = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                sum += squares[0][of][w][token];
                scaled += squares[1][of][w][token];
            }
            is_large[of][token] = CAN_BE_LARGE && sum > LARGE;
            norms[of][token] = CAN_BE_LARGE && sum > LARGE ? inverse_root(scaled, true) : inverse_root(sum, false);
        }
        __syncthreads();
        if constexpr (CAN_BE_LARGE) {
#pragma unroll
            for (int n = 0; n < 2 * GROUPS; ++n) {
                if (!is_large[n / GROUPS][n % GROUPS * 8 + row]) continue;
                float elements[4];
                unpack(elements, n / GROUPS, n % GROUPS);
#pragma unroll
                for (int w = 0; w < 2; ++w) {
                    x[n / GROUPS][n % GROUPS][w] =
                        pack_pair<scalar_t>(elements[w * 2] * DOWN, elements[w * 2 + 1] * DOWN);
                }
            }
        }
    }
    const auto norm = [&](int of, int token) { return QK_NORM ? norms[of][token] : 1.0f; };

    // The sum of logarithms up to each token.
    float end[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float before = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            float sum = a[i][j];
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2) {
                const float other = shfl<32>(sum, lane - 4 * distance & 31);
                if (row >= distance) sum += other;
            }
            a[i][j] = before + sum;
            before = shfl<32>(a[i][j], 28 + quad);
        }
        end[j] = before;
    }

    // Operands of MMAs for pairs of tokens that differ in the bit of value `bit`: two words for each token. anchor(i,
    // j) is the sum of logarithms of the anchor of token 8 * i + row. With a bit of 0 every token is a row and also, in
    // the third operand, a column.
    uint32_t words[3][GROUPS][2];
    const auto make_operands = [&](int bit, auto anchor) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            float scaled[3][4];
            unpack(scaled[0], 0, i);
            unpack(scaled[1], 1, i);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float difference = a[i][j] - anchor(i, j);
                const float factor = estimate_exp2(bit == 0 || (i * 8 + row) & bit ? difference : -difference);
                scaled[2][j] = bit == 0 ? scaled[0][j] * estimate_exp2(-difference) : 0.0f;
                scaled[0][j] *= factor;
                scaled[1][j] *= factor;
            }
#pragma unroll
            for (int w = 0; w < (bit == 0 ? 6 : 4); ++w) {
                words[w / 2][i][w % 2] = pack_pair<scalar_t>(scaled[w / 2][w % 2 * 2], scaled[w / 2][w % 2 * 2 + 1]);
            }
        }
    };
    // d += the dot products of 16 tokens as rows, from group 2 * rows on, and of the keys of a group as columns.
    const auto multiply = [&](float (&d)[4], int of, int rows, int group, int columns = 0) {
        const uint32_t a_words[4] = {words[of][2 * rows][0], words[of][2 * rows + 1][0], words[of][2 * rows][1],
                                     words[of][2 * rows + 1][1]};
        mma_m16n8k16<scalar_t>(d, a_words, words[columns][group]);
    };
    const auto store = [&](int of, int entry, float value) { partial[warp][of][entry][lane] = value; };

    make_operands(16, [&](int, int j) { return shfl<32>(a[1][j], 28 + quad); });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float d[4] = {};
        multiply(d, i / 2, 1, i % 2);
#pragma unroll
        for (int j = 0; j < 4; ++j) store(i / 2, IN_GROUP + IN_SIXTEEN + i % 2 * 4 + j, d[j]);
    }
    const auto middle = [&](int i, int j) { return shfl<32>(a[i / 2 * 2][j], 28 + quad); };
    if constexpr (ONE_ANCHOR) {
        make_operands(0, middle);
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; ++i) {
            const int of = i / GROUPS, group = i % GROUPS;
            float d[4] = {};
            multiply(d, of, group / 2, group, 2);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                store(of, group * 2 + j, d[group % 2 * 2 + j]);
                if (group % 2 == 0) store(of, IN_GROUP + group + j, d[2 + j]);
            }
        }
    } else {
        make_operands(8, middle);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float d[4] = {};
            multiply(d, i / 2, i % 2, i % 2 * 2);
#pragma unroll
            for (int j = 0; j < 2; ++j) store(i / 2, IN_GROUP + i % 2 * 2 + j, d[2 + j]);
        }
#pragma unroll 1
        for (int bit = 4; bit > 0; bit /= 2) {
            const int lane_of_anchor = ((row & ~(2 * bit - 1)) + bit - 1) * 4 + quad;
            make_operands(bit, [&](int i, int j) { return shfl<32>(a[i][j], lane_of_anchor); });
#pragma unroll
            for (int i = 0; i < 2 * GROUPS; ++i) {
                float d[4] = {};
                multiply(d, i / GROUPS, i % GROUPS / 2, i % GROUPS);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const bool is_pair = (row & bit) && ((row ^ (quad * 2 + j)) & ~(bit - 1)) == bit;
                    if (is_pair) store(i / GROUPS, i % GROUPS * 2 + j, d[i % 2 * 2 + j]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        float keys[4], queries[4], changes[4];
        unpack(keys, 0, i);
        unpack(queries, 1, i);
        if constexpr (!ONE_ANCHOR) {  // a query and the key of the same token
            float product = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j) product = fmaf(keys[j], queries[j], product);
            product = lane_reduce<Sum, 4>(product);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (row == quad * 2 + j) store(1, i * 2 + j, product);
            }
        }
        const float of_keys = norm(0, i * 8 + row), of_queries = norm(1, i * 8 + row);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float decay = estimate_exp2(a[i][j]);
            changes[j] = keys[j] * of_keys * estimate_exp2(end[j] - a[i][j]);
            keys[j] *= of_keys * decay;
            queries[j] *= of_queries * decay;
        }
        const int at = (i * 8 + row) * KEY_SIZE + channel;
        Vec<scalar_t, 4>::from_floats(keys).store(out.keys().data + at);
        Vec<scalar_t, 4>::from_floats(queries).store(out.queries().data + at);
        Vec<scalar_t, 4>::from_floats(changes).store(out.changes().data + at);
    }
    if (row == 0) {
        float kept[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) kept[j] = estimate_exp2(end[j]);
        Vec<float, 4>::from_floats(kept).store(out.kept() + channel);
    }

    __syncthreads();
    for (int i = threadIdx.x; i < 2 * (ENTRIES + ZEROS) * WARP_SIZE; i += NUM_THREADS) {
        const int of = i / ((ENTRIES + ZEROS) * WARP_SIZE), entry = i / WARP_SIZE % (ENTRIES + ZEROS);
        const TokenPair pair = tokens_of(entry, i % WARP_SIZE);
        float sum = 0.0f;
        if (pair.m < pair.l || (of && pair.m == pair.l)) {
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += partial[w][of][entry][i % WARP_SIZE];
        }
        sum *= norm(of, pair.l) * norm(0, pair.m);
        if (of) out.weights().at(pair.l, 0)[pair.m] = from_float<scalar_t>(sum * scale);
        else columns[pair.m * PITCH + pair.l] = sum * strengths[pair.l];
    }
    __syncthreads();
    if (warp == 0) solve(columns, strengths, out.inverse());
}
