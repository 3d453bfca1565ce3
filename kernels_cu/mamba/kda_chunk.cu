// kda_chunk: the gated delta rule with a decay for each channel of the key (Kimi Delta Attention) for prefill.
//
// Formula: that of gated_delta_chunk.cu, with exp(a_l), exp(a_end) and exp(a_end - a_m) for each column of the state:
// columns of S are multiplied by them, or equally the channels of k and q (Kimi Team 2025, arXiv:2510.26692).
// kda_prepare.cu has applied them to keys and queries, and has written (I + L)^-1 b and the weights of u.
//
// Blocks: blockIdx.x counts sequences, value heads and tiles of ROWS rows of the state. A warp holds 16 rows. A block
// walks its sequence in tiles of TOKENS tokens, with STAGES tiles in shared memory, all but one of them in flight.
//
// Constants
//     scalar_t       T: element type of v, o and of the prepared tiles: half_t or bf16_t
//     initial_t, state_t, checkpoint_t, starts_t, offset_t    element types of initial_state, final_state,
//                    checkpoint_state, cu_seqlens and checkpoint_offsets
//     KEY_SIZE       elements of a head of k; a multiple of 32
//     VALUE_SIZE     elements of a head of v
//     TOKENS         tokens of a tile: 32
//     STAGES         tiles in shared memory, at least 2
//     WARPS          warps; ROWS = 16 * WARPS divides VALUE_SIZE
//     CHECKPOINTS    the state after the first checkpoint_offsets[i] tokens of sequence i goes to checkpoint_state[i]

#include "gated_delta_state.cuh"
#include "kda_tiles.cuh"

constexpr int NUM_THREADS = WARPS * WARP_SIZE;
constexpr int KEPT_BYTES = (KEY_SIZE * 4 + 127) / 128 * 128;
constexpr int STAGE_BYTES = 3 * KEY_BYTES + VALUE_BYTES + 2 * SQUARE_BYTES + KEPT_BYTES;

// What the tile's keys and queries do not include, for StateRows.
struct ColumnFactors {
    const float* decays;  // of the columns of the state
    float scale;
    DEVICE float of_key(int) const { return 1.0f; }
    DEVICE float of_query(int) const { return scale; }
    DEVICE float of_change(int) const { return 1.0f; }
    DEVICE float kept(int column) const { return decays[column]; }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
kda_chunk(scalar_t* o,                         // [num_tokens, value_heads, VALUE_SIZE]
          state_t* final_state,                // [num_seqs, value_heads, VALUE_SIZE, KEY_SIZE], or the last two in the
                                               // other order
          const initial_t* initial_state,      // likewise
          checkpoint_t* checkpoint_state,      // likewise
          scalar_t* prepared,                  // [slots, value_heads, PreparedTile::SIZE]
          const scalar_t* v,                   // [num_tokens, value_heads, VALUE_SIZE]
          const starts_t* cu_seqlens,          // [num_seqs + 1]
          const offset_t* checkpoint_offsets,  // [num_seqs]
          int64_t num_tokens, int64_t seq_tokens, int64_t value_heads, int64_t o_stride, int64_t v_stride,
          int64_t state_stride, int64_t state_row_stride, int64_t state_column_stride, float scale) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    unsigned char* const shared = reinterpret_cast<unsigned char*>(memory);
    const int64_t head = blockIdx.x / TILES % value_heads, seq = blockIdx.x / (TILES * value_heads);
    const int first_row = int(blockIdx.x % TILES) * ROWS;
    const SequenceTiles tiles(cu_seqlens, checkpoint_offsets, seq, seq_tokens, num_tokens);

    const auto at = [&](int tile, int offset) {
        return reinterpret_cast<scalar_t*>(shared + tile % STAGES * STAGE_BYTES + offset);
    };
    const auto tile_of = [&](int tile) {
        constexpr int VALUES = 3 * KEY_BYTES, SQUARES = VALUES + VALUE_BYTES;
        return StateTile{{at(tile, 0)},      {at(tile, KEY_BYTES)}, {{at(tile, 2 * KEY_BYTES)}},
                         {at(tile, VALUES)}, {at(tile, SQUARES)},   {at(tile, SQUARES + SQUARE_BYTES)}};
    };
    const auto kept_of = [&](int tile) { return reinterpret_cast<float*>(at(tile, STAGE_BYTES - KEPT_BYTES)); };
    TokenCopy<KEY_SIZE / 8, TOKENS, NUM_THREADS> copy_key;
    TokenCopy<TOKENS / 8, TOKENS, NUM_THREADS> copy_square;
    TokenCopy<ROWS / 8, TOKENS, NUM_THREADS> copy_value;
    // Each call commits one cp.async group, which is empty after the last tile.
    const auto load = [&](int tile) {
        if (tile < tiles.count) {
            const PreparedTile from(prepared, tiles.first_slot + tile, head, value_heads);
            const StateTile to = tile_of(tile);
            copy_key.load(to.keys, from.keys().data, KEY_SIZE, TOKENS);
            copy_key.load(to.queries, from.queries().data, KEY_SIZE, TOKENS);
            copy_key.load(to.summed.tile, from.changes().data, KEY_SIZE, TOKENS);
            copy_square.load(to.inverse, from.inverse().data, TOKENS, TOKENS);
            copy_square.load(to.weights, from.weights().data, TOKENS, TOKENS);
            copy_value.load(to.values, v + tiles.token(tile) * v_stride + head * VALUE_SIZE + first_row, v_stride,
                            tiles.tokens(tile));
            for (int i = threadIdx.x * 4; i < KEY_SIZE; i += NUM_THREADS * 4) {
                cp_async<16>(kept_of(tile) + i, from.kept() + i);
            }
        }
        cp_async_commit();
    };

    StateRows rows{head, first_row};
    const auto store_state = [&](auto* to) {
        rows.store(to + seq * state_stride, state_row_stride, state_column_stride);
    };
    if (initial_state) rows.load(initial_state + seq * state_stride, state_row_stride, state_column_stride);
    for (int tile = 0; tile < STAGES - 1; ++tile) load(tile);
    for (int tile = 0; tile < tiles.count; ++tile) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load(tile + STAGES - 1);
        rows.advance(tile_of(tile), ColumnFactors{kept_of(tile), scale}, o + tiles.token(tile) * o_stride, o_stride,
                     tiles.tokens(tile));
        if (tiles.ends_at_cut(tile)) store_state(checkpoint_state);
    }
    if (final_state) store_state(final_state);
}
