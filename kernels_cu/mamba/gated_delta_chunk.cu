// gated_delta_chunk: the gated delta rule over prompts, by matrix products on tiles of tokens.
//
// Formula: the recurrence of gated_delta_recurrent.cu. For a tile of tokens, with a_l the sum of g up to token l of the
// tile, b_l the elements of beta, k and q after their norms, and S the state before the tile:
//
//     r_l = v_l - exp(a_l) S k_l,    u = (I + L)^-1 (b r),    L_lm = b_l exp(a_l - a_m) k_l . k_m for m < l, else 0
//     o_l = scale (exp(a_l) S q_l + sum_{m <= l} exp(a_l - a_m) (q_l . k_m) u_m)
//     S  <- exp(a_end) S + sum_m exp(a_end - a_m) u_m (outer) k_m
//
// (Yang et al. 2024, arXiv:2412.06464.) States stay in registers from tile to tile, in float32. Rounded to T are the
// operands of products: S, r, u, (I + L)^-1 b and the weights of u. Keys and queries stay as they are: their norms are
// factors of what they are multiplied with.
//
// Blocks: blockIdx.x counts sequences, value heads and tiles of ROWS rows of the state; a row is an element of v. A block
// walks its sequence in tiles of 32 tokens.
//
// Warps: the first WARPS warps have 16 rows of the state each, and work on one tile. Four more warps prepare tiles. Two of
// them, KEYS and NORMS, are two tiles ahead: decays, the norms of k and q, and L. Two are a tile ahead: SOLVE inverts
// I + L, WEIGH weighs u for o. Copies to shared memory are three tiles ahead.
//
// Constants
//     scalar_t       T: element type of q, k, v and o: half_t or bf16_t
//     g_t, beta_t, initial_t, state_t, starts_t    of g, beta, initial_state, final_state and cu_seqlens
//     KEY_SIZE       elements of a head of k; a multiple of 16
//     VALUE_SIZE     elements of a head of v
//     QK_NORM        q and k are divided by their norms
//     WARPS          warps with rows; ROWS = 16 * WARPS divides VALUE_SIZE

#include "state_tiles.cuh"

constexpr int TOKENS = 32, ROWS = 16 * WARPS, NUM_THREADS = (WARPS + 4) * 32, TILES = VALUE_SIZE / ROWS;
constexpr int STEPS = KEY_SIZE / 16, STAGES = 4;
constexpr int KEYS = WARPS, NORMS = WARPS + 1, SOLVE = WARPS + 2, WEIGH = WARPS + 3;
constexpr float LOG2_OF_E = 1.4426950408889634f;
constexpr int PITCH = TOKENS + 4;  // of a column of L, in floats: columns begin on different banks

using key_tile = SwizzledTile<scalar_t, KEY_SIZE / 8>;  // keys or queries: a row for each token
using value_tile = SwizzledTile<scalar_t, ROWS / 8>;    // values: likewise
using square_tile = SwizzledTile<scalar_t, TOKENS / 8>;
constexpr int KEY_BYTES = key_tile::bytes(TOKENS), VALUE_BYTES = value_tile::bytes(TOKENS);
constexpr int STAGE_BYTES = 2 * KEY_BYTES + VALUE_BYTES, SQUARE_BYTES = square_tile::bytes(TOKENS);

// What the warps with rows multiply with, beside the two square matrices.
struct Factors {
    float of_keys[TOKENS];     // exp(a_l), and the norm of k
    float of_queries[TOKENS];  // exp(a_l), and the norm of q, and scale
    float of_changes[TOKENS];  // exp(a_end - a_m), and the norm of k
    float kept;                // exp(a_end)
};

// What the warps that prepare a tile hand to each other.
struct Prepared {
    float logs[TOKENS];             // a_l in units of log2
    float strengths[TOKENS];        // b_l
    float keys[TOKENS];             // the norm of k
    float queries[TOKENS];          // the norm of q, and scale
    float columns[TOKENS * PITCH];  // L by columns
    DEVICE float decay(int l, int m) const { return estimate_exp2(logs[l] - logs[m]); }
};

// 1 / sqrt(the sum of squares of a token's row + 1e-6), for the token of the lane; 1 without QK_NORM.
DEVICE float inverse_norm(const key_tile& tile) {
    if (!QK_NORM) return 1.0f;
    float sum = 0.0f;
#pragma unroll 4
    for (int chunk = 0; chunk < KEY_SIZE / 8; ++chunk) {
        const auto x = Vec<scalar_t, 8>::load(tile.at(threadIdx.x % 32, chunk));
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
    }
    return 1.0f / sqrtf(sum + 1e-6f);
}

// Products of the rows of two tiles with each other: the three tiles of 16 by 16 tokens on the diagonal and below it.
// Calls `visit` with row, column and product.
template <typename Visit>
DEVICE void multiply_tokens(const key_tile& rows, const key_tile& columns, Visit visit) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float products[3][2][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        uint32_t a[2][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            load_operand(a[i], rows, i * 16, step);
            load_columns(b[i], columns, i * 16, step);
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            multiply_add<scalar_t>(products[i][0], products[i][1], a[(i + 1) / 2], b[i / 2]);
        }
    }
#pragma unroll
    for (int i = 0; i < 24; ++i) {
        const int tile = i / 8, n = i / 4 % 2, j = i % 4;
        visit((tile + 1) / 2 * 16 + j / 2 * 8 + g, tile / 2 * 16 + n * 8 + 2 * t + j % 2, products[tile][n][j]);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gated_delta_chunk(scalar_t* o,                     // [num_tokens, value_heads, VALUE_SIZE]
                  state_t* final_state,            // [num_seqs, value_heads, VALUE_SIZE, KEY_SIZE], or the last two
                                                   // in the other order
                  const initial_t* initial_state,  // likewise
                  const scalar_t* q,               // [num_tokens, key_heads, KEY_SIZE]
                  const scalar_t* k,               // likewise
                  const scalar_t* v,               // [num_tokens, value_heads, VALUE_SIZE]
                  const g_t* g,                    // [num_tokens, value_heads]
                  const beta_t* beta,              // likewise
                  const starts_t* cu_seqlens,      // [num_seqs + 1]
                  int64_t num_tokens, int64_t seq_tokens, int64_t value_heads, int64_t heads_per_key, int64_t o_stride,
                  int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t g_stride, int64_t g_step,
                  int64_t beta_stride, int64_t beta_step, int64_t state_stride, int64_t state_row_stride,
                  int64_t state_column_stride, float scale) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    unsigned char* const shared = reinterpret_cast<unsigned char*>(memory);
    __shared__ Factors factors[3];
    __shared__ alignas(16) Prepared prepared[2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    const int head = int(blockIdx.x / TILES % value_heads), first_row = int(blockIdx.x % TILES) * ROWS;
    const int64_t seq = blockIdx.x / (TILES * value_heads), key_head = head / heads_per_key;
    int64_t begin = cu_seqlens ? int64_t(cu_seqlens[seq]) : seq * seq_tokens;
    int64_t end = cu_seqlens ? int64_t(cu_seqlens[seq + 1]) : begin + seq_tokens;
    if (begin < 0 || end > num_tokens || begin > end) begin = end = 0;
    const int num_tiles = int((end - begin + TOKENS - 1) / TOKENS);

    const auto stage_at = [&](int tile) { return shared + tile % STAGES * STAGE_BYTES; };
    const auto keys_of = [&](int tile) { return key_tile{reinterpret_cast<scalar_t*>(stage_at(tile))}; };
    const auto queries_of = [&](int tile) { return key_tile{reinterpret_cast<scalar_t*>(stage_at(tile) + KEY_BYTES)}; };
    const auto values_of = [&](int tile) {
        return value_tile{reinterpret_cast<scalar_t*>(stage_at(tile) + 2 * KEY_BYTES)};
    };
    // (I + L)^-1 b, and the weights of u in o: row l, column m.
    const auto inverse_of = [&](int tile) {
        return square_tile{reinterpret_cast<scalar_t*>(shared + STAGES * STAGE_BYTES + tile % 2 * 2 * SQUARE_BYTES)};
    };
    const auto weights_of = [&](int tile) {
        return square_tile{
            reinterpret_cast<scalar_t*>(shared + STAGES * STAGE_BYTES + (tile % 2 * 2 + 1) * SQUARE_BYTES)};
    };
    const auto count_of = [&](int tile) { return int(min(end - begin - int64_t(tile) * TOKENS, int64_t(TOKENS))); };
    // Each call adds one group of copies, which is empty behind the last tile.
    const auto load = [&](int tile) {
        if (tile < num_tiles) {
            const int64_t token = begin + int64_t(tile) * TOKENS, key = key_head * KEY_SIZE;
            const int64_t value = int64_t(head) * VALUE_SIZE + first_row;
            const int count = count_of(tile);
            copy_tokens<KEY_SIZE / 8, TOKENS, NUM_THREADS>(keys_of(tile), k + token * k_stride + key, k_stride, count);
            copy_tokens<KEY_SIZE / 8, TOKENS, NUM_THREADS>(queries_of(tile), q + token * q_stride + key, q_stride,
                                                           count);
            copy_tokens<ROWS / 8, TOKENS, NUM_THREADS>(values_of(tile), v + token * v_stride + value, v_stride, count);
        }
        cp_async_commit();
    };

    // The warp KEYS: g and beta of the lane's token of a tile, read a tile ahead.
    float log_decay = 0.0f, strength = 0.0f;
    const auto load_decay = [&](int tile) {
        log_decay = strength = 0.0f;
        if (tile >= num_tiles || lane >= count_of(tile)) return;
        const int64_t token = begin + int64_t(tile) * TOKENS + lane;
        log_decay = to_float(g[token * g_stride + head * g_step]) * LOG2_OF_E;
        strength = beta ? to_float(beta[token * beta_stride + head * beta_step]) : 1.0f;
    };
    const auto prepare_keys = [&](int tile) {
        float sum = log_decay;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float before = shfl<32>(sum, lane - distance & 31);
            if (lane >= distance) sum += before;
        }
        const float total = shfl<32>(sum, 31), norm = inverse_norm(keys_of(tile));
        Factors& factor = factors[tile % 3];
        Prepared& to = prepared[tile % 2];
        to.logs[lane] = sum;
        to.strengths[lane] = strength;
        to.keys[lane] = norm;
        factor.of_keys[lane] = estimate_exp2(sum) * norm;
        factor.of_changes[lane] = lane < count_of(tile) ? estimate_exp2(total - sum) * norm : 0.0f;
        if (lane == 0) factor.kept = estimate_exp2(total);
        load_decay(tile + 1);
        sync_warp();
        multiply_tokens(keys_of(tile), keys_of(tile), [&](int l, int m, float product) {
            const float element = to.decay(l, m) * to.strengths[l] * to.keys[l] * to.keys[m] * product;
            to.columns[m * PITCH + l] = m < l ? element : 0.0f;
        });
    };
    // A lane finds its column of the inverse by forward substitution.
    const auto solve = [&](int tile) {
        const Prepared& from = prepared[tile % 2];
        float x[TOKENS];
#pragma unroll
        for (int l = 0; l < TOKENS; ++l) x[l] = l == lane ? 1.0f : 0.0f;
#pragma unroll
        for (int m = 0; m < TOKENS - 1; ++m) {
#pragma unroll
            for (int l = (m + 1) / 4 * 4; l < TOKENS; l += 4) {
                const auto four = Vec<float, 4>::load(from.columns + m * PITCH + l);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (l + i > m) x[l + i] = fmaf(-four[i], x[m], x[l + i]);
                }
            }
        }
        const square_tile inverse = inverse_of(tile);
        const float strength_of_column = from.strengths[lane];
#pragma unroll
        for (int l = 0; l < TOKENS; ++l) {
            inverse.at(l, lane / 8)[lane % 8] = from_float<scalar_t>(x[l] * strength_of_column);
        }
    };
    const auto weigh = [&](int tile) {
        const Prepared& from = prepared[tile % 2];
        factors[tile % 3].of_queries[lane] = estimate_exp2(from.logs[lane]) * from.queries[lane];
        const square_tile weights = weights_of(tile);
        multiply_tokens(queries_of(tile), keys_of(tile), [&](int l, int m, float product) {
            const float weight = from.decay(l, m) * from.queries[l] * from.keys[m] * product;
            weights.at(l, m / 8)[m % 8] = from_float<scalar_t>(m <= l ? weight : 0.0f);
        });
    };

    float s[2 * STEPS][4] = {};
    // Calls `visit` with each element of the thread's state and its place in a state of all heads.
    const auto each_of_state = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < STEPS * 8; ++i) {
            const int64_t row = first_row + warp * 16 + i / 2 % 2 * 8 + lane / 4, column = i / 4 * 8 + 2 * t + i % 2;
            visit(s[i / 4][i % 4],
                  int64_t(head) * (VALUE_SIZE * KEY_SIZE) + row * state_row_stride + column * state_column_stride);
        }
    };
    const auto advance = [&](int tile) {
        const Factors& factor = factors[tile % 3];
        const key_tile keys = keys_of(tile), queries = queries_of(tile);
        float r[4][4] = {}, y[4][4] = {}, u[4][4] = {};  // rows by tokens: S k, then r; S q, then o; u
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            uint32_t a[4], b[4];
            pack_operand<scalar_t>(a, s[2 * step], s[2 * step + 1]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                load_columns(b, keys, n * 16, step);
                multiply_add<scalar_t>(r[2 * n], r[2 * n + 1], a, b);
                load_columns(b, queries, n * 16, step);
                multiply_add<scalar_t>(y[2 * n], y[2 * n + 1], a, b);
            }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            uint32_t values[4];
            load_transposed(values, values_of(tile), k * 16, warp);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = 2 * k + i / 2, half = i % 2, l = n * 8 + 2 * t;
                float low, high;
                unpack_pair<scalar_t>(values[i], low, high);
                r[n][2 * half] = fmaf(-factor.of_keys[l], r[n][2 * half], low);
                r[n][2 * half + 1] = fmaf(-factor.of_keys[l + 1], r[n][2 * half + 1], high);
            }
        }
        const auto times_square = [&](float (&d)[4][4], const float (&x)[4][4], const square_tile& square) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                uint32_t a[4], b[4];
                pack_operand<scalar_t>(a, x[2 * k], x[2 * k + 1]);
#pragma unroll
                for (int n = k; n < 2; ++n) {
                    load_columns(b, square, n * 16, k);
                    multiply_add<scalar_t>(d[2 * n], d[2 * n + 1], a, b);
                }
            }
        };
        times_square(u, r, inverse_of(tile));
#pragma unroll
        for (int i = 0; i < 16; ++i) y[i / 4][i % 4] *= factor.of_queries[i / 4 * 8 + 2 * t + i % 2];
        times_square(y, u, weights_of(tile));
        const int64_t token = begin + int64_t(tile) * TOKENS;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            scalar_t* const to = o + (token + n * 8) * o_stride + int64_t(head) * VALUE_SIZE + first_row + warp * 16;
            store_transposed(to, o_stride, y[n], count_of(tile) - n * 8);
        }
#pragma unroll
        for (int i = 0; i < STEPS * 8; ++i) s[i / 4][i % 4] *= factor.kept;
#pragma unroll
        for (int i = 0; i < 16; ++i) u[i / 4][i % 4] *= factor.of_changes[i / 4 * 8 + 2 * t + i % 2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            uint32_t a[4], b[4];
            pack_operand<scalar_t>(a, u[2 * k], u[2 * k + 1]);
#pragma unroll
            for (int n = 0; n < STEPS; ++n) {
                load_rows(b, keys, k * 16, n);
                multiply_add<scalar_t>(s[2 * n], s[2 * n + 1], a, b);
            }
        }
    };

    const bool has_rows = warp < WARPS;
    if (has_rows && initial_state) {
        each_of_state([&](float& value, int64_t at) { value = to_float(initial_state[seq * state_stride + at]); });
    }
    if (warp == KEYS) load_decay(0);
    load(0);
    for (int tile = -2; tile < num_tiles; ++tile) {
        cp_async_wait<0>();
        __syncthreads();
        load(tile + 3);
        if (has_rows && tile >= 0) advance(tile);
        if (tile + 1 >= 0 && tile + 1 < num_tiles) {
            if (warp == SOLVE) solve(tile + 1);
            if (warp == WEIGH) weigh(tile + 1);
        }
        if (tile + 2 < num_tiles) {
            if (warp == KEYS) prepare_keys(tile + 2);
            if (warp == NORMS) prepared[(tile + 2) % 2].queries[lane] = inverse_norm(queries_of(tile + 2)) * scale;
        }
    }
    if (has_rows && final_state) {
        each_of_state(
            [&](float& value, int64_t at) { final_state[seq * state_stride + at] = from_float<state_t>(value); });
    }
}
