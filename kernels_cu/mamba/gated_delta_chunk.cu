// gated_delta_chunk: the gated delta rule for prefill, by MMAs on tiles of tokens.
//
// Formula: the recurrence of gated_delta_recurrent.cu. For a tile of tokens, with a_l the sum of g up to token l of the
// tile, b_l the elements of beta, k and q after their norms, and S the state before the tile:
//
//     r_l = v_l - exp(a_l) S k_l,    u = (I + L)^-1 (b r),    L_lm = b_l exp(a_l - a_m) k_l . k_m for m < l, else 0
//     o_l = scale (exp(a_l) S q_l + sum_{m <= l} exp(a_l - a_m) (q_l . k_m) u_m)
//     S  <- exp(a_end) S + sum_m exp(a_end - a_m) u_m (outer) k_m
//
// (Yang et al. 2024, arXiv:2412.06464.) States stay in registers from tile to tile, in float32. MMA operands are
// rounded to T: S, r, u, (I + L)^-1 b and the weights of u. Keys and queries are used unnormalised; their inverse norms
// are applied to the accumulators and the other operands. MMAs are those of product.cuh.
//
// Blocks: blockIdx.x counts sequences, value heads and tiles of ROWS rows of the state; a row is an element of v. A
// block walks its sequence in tiles of TOKENS tokens.
//
// Warps are specialised. The first WARPS warps hold 16 rows of the state each and consume one tile at a time. Four
// producer warps prepare later tiles: KEYS and NORMS are two tiles ahead (decays, norms of k and q, and L); SOLVE and
// WEIGH are one tile ahead (SOLVE inverts I + L, WEIGH computes the weights of u in o). Copies to shared memory (or to
// registers, where async.cuh holds copies) are three tiles ahead.
//
// Constants
//     scalar_t       T: element type of q, k, v and o: half_t or bf16_t
//     g_t, beta_t, initial_t, state_t, starts_t    element types of g, beta, initial_state, final_state and cu_seqlens
//     KEY_SIZE       elements of a head of k; a multiple of 16
//     VALUE_SIZE     elements of a head of v
//     QK_NORM        q and k are divided by their norms
//     TOKENS         tokens of a tile: 32, or 16 where shared memory is small
//     STAGES         tiles in shared memory: 4; or 3, only where registers hold copies (async.cuh)
//     WARPS          warps with state rows; ROWS = 16 * WARPS divides VALUE_SIZE

#include "gated_delta_state.cuh"
#include "gated_delta_tokens.cuh"

constexpr int NUM_THREADS = (WARPS + 4) * WARP_SIZE;
constexpr int KEYS = WARPS, NORMS = WARPS + 1, SOLVE = WARPS + 2, WEIGH = WARPS + 3;
static_assert(STAGES == 4 || HOLDS_COPIES);

constexpr int SUMMED_BYTES = ON_MATRIX_CORES ? summed_tile::BYTES : 0;  // 0: the tile of keys serves both uses
constexpr int STAGE_BYTES = 2 * KEY_BYTES + VALUE_BYTES + SUMMED_BYTES;

// The factors of a tile, for StateRows. All columns of the state share a decay.
struct HeadFactors {
    const Factors& of;
    DEVICE float of_key(int l) const { return of.of_keys[l]; }
    DEVICE float of_query(int l) const { return of.of_queries[l]; }
    DEVICE float of_change(int l) const { return of.of_changes[l]; }
    DEVICE float kept(int) const { return of.kept; }
};

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
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
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
    const auto summed_of = [&](int tile) {
        unsigned char* const at = stage_at(tile) + (ON_MATRIX_CORES ? 2 * KEY_BYTES + VALUE_BYTES : 0);
        return summed_tile{{reinterpret_cast<scalar_t*>(at)}};
    };
    // The square matrices (I + L)^-1 b and the weights of u in o: row l, column m.
    const auto inverse_of = [&](int tile) {
        return square_tile{reinterpret_cast<scalar_t*>(shared + STAGES * STAGE_BYTES + tile % 2 * 2 * SQUARE_BYTES)};
    };
    const auto weights_of = [&](int tile) {
        return square_tile{
            reinterpret_cast<scalar_t*>(shared + STAGES * STAGE_BYTES + (tile % 2 * 2 + 1) * SQUARE_BYTES)};
    };
    const auto count_of = [&](int tile) { return int(min(end - begin - int64_t(tile) * TOKENS, int64_t(TOKENS))); };
    TokenCopy<KEY_SIZE / 8, TOKENS, NUM_THREADS> copy_k, copy_q;
    TokenCopy<ROWS / 8, TOKENS, NUM_THREADS> copy_v;
    typename summed_tile::copy_t<NUM_THREADS> copy_summed;
    // Each call commits one cp.async group, which is empty after the last tile.
    const auto load = [&](int tile) {
        if (tile < num_tiles) {
            const int64_t token = begin + int64_t(tile) * TOKENS, key = key_head * KEY_SIZE;
            const int64_t value = int64_t(head) * VALUE_SIZE + first_row;
            const int count = count_of(tile);
            copy_k.load(keys_of(tile), k + token * k_stride + key, k_stride, count);
            copy_q.load(queries_of(tile), q + token * q_stride + key, q_stride, count);
            copy_v.load(values_of(tile), v + token * v_stride + value, v_stride, count);
            if (ON_MATRIX_CORES) copy_summed.load(summed_of(tile).tile, k + token * k_stride + key, k_stride, count);
        }
        cp_async_commit();
    };
    const auto store_held = [&](int tile) {
        if (tile >= num_tiles) return;
        copy_k.store(keys_of(tile));
        copy_q.store(queries_of(tile));
        copy_v.store(values_of(tile));
        if (ON_MATRIX_CORES) copy_summed.store(summed_of(tile).tile);
    };

    // Warp KEYS only: g and beta of the lane's token, loaded one tile ahead.
    float log_decay = 0.0f, strength = 0.0f;
    const auto load_decay = [&](int tile) {
        log_decay = strength = 0.0f;
        if (tile >= num_tiles || lane >= count_of(tile)) return;
        const int64_t token = begin + int64_t(tile) * TOKENS + lane;
        log_decay = to_float(g[token * g_stride + head * g_step]) * LOG2_E;
        strength = beta ? to_float(beta[token * beta_stride + head * beta_step]) : 1.0f;
    };
    const auto prepare_keys = [&](int tile) {
        prepare_decays(prepared[tile % 2], factors[tile % 3], log_decay, strength, keys_of(tile), count_of(tile));
        load_decay(tile + 1);
        sync_warp();
        relate_keys(prepared[tile % 2], keys_of(tile));
    };

    StateRows rows{head, first_row};
    const auto advance = [&](int tile) {
        const StateTile tokens{keys_of(tile),   queries_of(tile), summed_of(tile),
                               values_of(tile), inverse_of(tile), weights_of(tile)};
        rows.advance(tokens, HeadFactors{factors[tile % 3]}, o + (begin + int64_t(tile) * TOKENS) * o_stride, o_stride,
                     count_of(tile));
    };

    const bool has_rows = warp < WARPS;
    if (has_rows && initial_state) {
        rows.load(initial_state + seq * state_stride, state_row_stride, state_column_stride);
    }
    if (warp == KEYS) load_decay(0);
    load(0);
    store_held(0);
    for (int tile = -2; tile < num_tiles; ++tile) {
        cp_async_wait<0>();
        __syncthreads();
        load(tile + 3);
        if (has_rows && tile >= 0) advance(tile);
        if (tile + 1 >= 0 && tile + 1 < num_tiles) {
            if (warp == SOLVE) {
                const Prepared& from = prepared[(tile + 1) % 2];
                solve(from.columns, from.strengths, inverse_of(tile + 1));
            }
            if (warp == WEIGH) {
                weigh(prepared[(tile + 1) % 2], queries_of(tile + 1), keys_of(tile + 1), weights_of(tile + 1),
                      factors[(tile + 1) % 3]);
            }
        }
        if (tile + 2 < num_tiles) {
            if (warp == KEYS) prepare_keys(tile + 2);
            if (warp == NORMS) {
                const float norm = token_norm(queries_of(tile + 2)) * scale;
                if (lane < TOKENS) prepared[(tile + 2) % 2].queries[lane] = norm;
            }
        }
        if (STAGES == 3) __syncthreads();
        store_held(tile + 3);
    }
    if (has_rows && final_state) {
        rows.store(final_state + seq * state_stride, state_row_stride, state_column_stride);
    }
}
