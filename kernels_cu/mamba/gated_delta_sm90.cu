// gated_delta_sm90: the gated delta rule for prefill on Hopper, by WGMMA on tiles of 64 tokens.
//
// Formula: that of gated_delta_chunk.cu. gated_delta_prepare.cu has written (I + L)^-1 b, the weights of u in o, and
// the factors of tokens: all that a tile needs and that does not depend on the state. What is left is the chain of three
// dependent products from the state before a tile to the state after it.
//
// Blocks: blockIdx.x counts sequences, value heads, segments and tiles of ROWS rows of the state; a row is an element
// of v. A block walks a segment of its sequence in tiles of TOKENS tokens.
//
// Segments of a sequence are independent chains, which keep SMs busy if there are few heads. Without OUTPUTS a block
// finds the state that its segment adds or, since the rule is linear in the state, the transition M of its segment: the
// state after it is the state before it times M, plus what it adds. The rows of M are rows of a state that begins with
// the identity and sees values of zero. gated_delta_segments.cu makes of both the states before all segments, and with
// OUTPUTS a block begins with such a state. The first segment begins with the initial state in either launch, and needs
// no transition; the last one is walked with OUTPUTS alone.
//
// Warps are specialised. The first warpgroup, the producer, copies tiles to shared memory. The others hold 64 rows of
// the state each, from tile to tile, in WGMMA accumulators: operand A, the state, r or u, is in registers, and operand
// B in shared memory.
//
// Constants
//     scalar_t       T: element type of q, k, v and o: half_t or bf16_t
//     initial_t, state_t, starts_t    element types of initial_state, final_state and cu_seqlens
//     KEY_SIZE       elements of a head of k: 64 or 128
//     VALUE_SIZE     elements of a head of v
//     QK_NORM        q and k are divided by their norms
//     ROWS           rows of the state of a block: 64 or 128; divides VALUE_SIZE and, without OUTPUTS, KEY_SIZE
//     OUTPUTS        whether the launch writes o and final_state, or what segments do to the state
//     STAGES         tiles in shared memory
//     STATE_V_FIRST  states are [VALUE_SIZE, KEY_SIZE], else the other order
//     STATE_ACCESS   elements of a state in one memory access: 1, or 2 where keys are adjacent

#include "gated_delta_norm.cuh"
#include "gated_delta_sm90_tiles.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

constexpr int WARPGROUPS = ROWS / 64, TILES = VALUE_SIZE / ROWS, KEY_TILES = KEY_SIZE / ROWS, PRODUCERS = 128;
constexpr int NUM_THREADS = PRODUCERS + WARPGROUPS * 128;
// Registers of a thread where warpgroups have different numbers: two warpgroups with rows need more than an equal
// share.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int ROW_STRIDE = STATE_V_FIRST ? KEY_SIZE : 1, COLUMN_STRIDE = STATE_V_FIRST ? 1 : VALUE_SIZE;  // of a state
constexpr int PREPARED_BYTES = OUTPUTS ? sizeof(PreparedTile) : sizeof(TileFactors);
static_assert(VALUE_SIZE % ROWS == 0 && ROWS % 64 == 0 && (OUTPUTS || KEY_SIZE % ROWS == 0));
static_assert(STATE_ACCESS == 1 || STATE_V_FIRST);

struct alignas(1024) Stage {
    uint8_t rows[PANELS][2][TILE_BYTES];  // keys, then queries
    uint8_t values[WARPGROUPS][TILE_BYTES];
    uint8_t weights[Weights::BYTES];
    TileFactors factors;
};

// Multiplies the rows of a tile that have a bit in `rows` by DOWN: the chunks that TokenCopy has the thread copy.
DEVICE void scale_rows(const tile_t& tile, uint64_t rows) {
    constexpr int STEP = PRODUCERS * 8 / WIDE;
    for (int i = 0; i < TOKENS; i += STEP) {
        const int row = i + threadIdx.x / 8;
        if (!(rows >> row & 1)) continue;
        scalar_t* const at = tile.at(row, threadIdx.x % 8);
        map(Vec<scalar_t, 8>::load(at), [](float x) { return x * DOWN; }).store_shared(at);
    }
}

// Elements of a state in adjacent columns. They are loaded before the wait for gated_delta_prepare.cu, so the load
// bypasses the L1 cache, which may hold values from before the last call.
template <int N>
DEVICE Vec<initial_t, N> load_state_of(const initial_t* from) {
    Vec<initial_t, N> x;
    using word_t = typename word_of<int(sizeof(x))>::type;
    x.template word<N>(0) = load_fresh(reinterpret_cast<const word_t*>(from));
    return x;
}

DEVICE Vec<float, 2> load_two(const initial_t* from) {
    Vec<float, 2> two;
    if constexpr (STATE_ACCESS == 2) load_state_of<2>(from).to_floats(two.data);
    else
        for (int i = 0; i < 2; ++i) two.data[i] = to_float(load_state_of<1>(from + i * COLUMN_STRIDE).data[0]);
    return two;
}

DEVICE void store_two(state_t* to, const float (&two)[2]) {
    if constexpr (STATE_ACCESS == 2) Vec<state_t, 2>::from_floats(two).store(to);
    else to[0] = from_float<state_t>(two[0]), to[COLUMN_STRIDE] = from_float<state_t>(two[1]);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
gated_delta_sm90(scalar_t* o,              // [num_tokens, value_heads, VALUE_SIZE]
                 state_t* final_state,     // [num_seqs, value_heads, VALUE_SIZE, KEY_SIZE], or the last two in
                                           // the other order
                 float* added,             // [num_seqs, value_heads, segments - 1, VALUE_SIZE, KEY_SIZE]: without
                                           // OUTPUTS what a segment adds, then the state before the next one
                 Transition* transitions,  // [num_seqs, value_heads, segments - 2]
                 const initial_t* initial_state,  // likewise
                 const uint8_t* prepared,         // [slots, value_heads, sizeof(PreparedTile)]
                 const scalar_t* q,               // [num_tokens, key_heads, KEY_SIZE]
                 const scalar_t* k,               // likewise
                 const scalar_t* v,               // [num_tokens, value_heads, VALUE_SIZE]
                 const starts_t* cu_seqlens,      // [num_seqs + 1]
                 int64_t num_tokens, int64_t seq_tokens, int64_t value_heads, int64_t heads_per_key, int64_t segments,
                 int64_t o_stride, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t state_stride) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Stage* const stages = reinterpret_cast<Stage*>(memory);
    __shared__ uint64_t barriers[2 * STAGES];
    Ring<STAGES> ring(barriers);
    if (threadIdx.x == 0) ring.init(4 * WARPGROUPS, PRODUCERS / 32 + 1);
    __syncthreads();
    const int warpgroup = shfl<32>(int(threadIdx.x) / 128, 0) - 1;  // the compiler sees that a warp has one warpgroup
    const int adding = TILES * int(OUTPUTS ? segments : segments - 1);  // blocks of a head that begin with a state
    const int of_head = adding + (OUTPUTS || segments < 3 ? 0 : KEY_TILES * int(segments - 2));
    const uint32_t block_chain = blockIdx.x / uint32_t(of_head), block_seq = block_chain / uint32_t(value_heads);
    const int index = int(blockIdx.x - block_chain * of_head);
    const bool is_transition = !OUTPUTS && index >= adding;
    const int64_t chain = block_chain, seq = block_seq, head = chain - seq * value_heads;
    const int segment = is_transition ? 1 + (index - adding) / max(KEY_TILES, 1) : index / TILES;
    const int first_row = (is_transition ? (index - adding) % max(KEY_TILES, 1) : index % TILES) * ROWS;
    const SequenceTiles tiles(cu_seqlens, static_cast<const int*>(nullptr), seq, seq_tokens, num_tokens);
    const int of_segment = ceil_div(tiles.count, int(segments));
    const int first_tile = min(segment * of_segment, tiles.count), end_tile = min(first_tile + of_segment, tiles.count);

    if (warpgroup < 0) {
        if constexpr (WARPGROUPS > 1) warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        const int64_t key = uint32_t(head) / uint32_t(heads_per_key) * KEY_SIZE, value = head * VALUE_SIZE + first_row;
        TokenCopy<WIDE / 8, TOKENS, PRODUCERS> copy;
        constexpr bool HAS_LARGE = QK_NORM && CAN_BE_LARGE;
        if constexpr (OUTPUTS) {
            for (Stage* to = stages; to < stages + STAGES; ++to) {
#pragma unroll
                for (int step = 1; step < TOKEN_STEPS; ++step) {
                    if (int(threadIdx.x) * 16 >= Weights::zeros(step)) continue;
                    Vec<uint32_t, 4>{}.store_shared(
                        reinterpret_cast<uint32_t*>(to->weights + step * Weights::PANEL_BYTES + threadIdx.x * 16));
                }
            }
        }
        uint64_t large_keys = 0, large_queries = 0;  // of the tile that is in flight
        Ring<STAGES> landing = ring;                 // the stage of that tile
        for (int tile = first_tile; tile <= end_tile; ++tile, ring.advance()) {
            if (tile < end_tile) {
                ring.acquire();
                Stage& to = stages[ring.stage];
                const int64_t token = tiles.token(tile);
                const int count = tiles.tokens(tile);
#pragma unroll
                for (int part = 0; part < PANELS; ++part) {
                    copy.load(tile_at(to.rows[part][0]), k + token * k_stride + key + part * WIDE, k_stride, count);
                    if constexpr (OUTPUTS) {
                        copy.load(tile_at(to.rows[part][1]), q + token * q_stride + key + part * WIDE, q_stride, count);
                    }
                }
#pragma unroll
                for (int part = 0; part < WARPGROUPS; ++part) {
                    copy.load(tile_at(to.values[part]), v + token * v_stride + value + part * WIDE, v_stride,
                              is_transition ? 0 : count);
                }
            }
            cp_async_commit();
            // States and the first tile are on their way while gated_delta_prepare.cu still runs.
            if (tile == first_tile) await_previous_of_call();
            const auto* const from =
                reinterpret_cast<const PreparedTile*>(prepared) + (tiles.first_slot + tile) * value_heads + head;
            if (tile < end_tile && threadIdx.x == 0) {
                Stage& to = stages[ring.stage];
                mbarrier_arrive_expect_tx(ring.full(), PREPARED_BYTES);
                bulk_load(&to.factors, &from->factors, sizeof(TileFactors), ring.full());
#pragma unroll
                for (int step = 0; step < (OUTPUTS ? TOKEN_STEPS : 0); ++step) {
                    bulk_load(to.weights + step * Weights::PANEL_BYTES + Weights::zeros(step),
                              from->weights + Weights::offset(step), Weights::packed(step), ring.full());
                }
            }
            if (tile > first_tile) {  // the tile before has landed
                cp_async_wait<1>();
                if (HAS_LARGE && (large_keys | large_queries)) {
                    for (int part = 0; part < PANELS; ++part) {
                        scale_rows(tile_at(stages[landing.stage].rows[part][0]), large_keys);
                        if (OUTPUTS) scale_rows(tile_at(stages[landing.stage].rows[part][1]), large_queries);
                    }
                }
                fence_proxy_async();
                sync_warp();
                if (threadIdx.x % 32 == 0) mbarrier_arrive(landing.full());
                landing.advance();
            }
            if (HAS_LARGE && tile < end_tile) {
                const auto rows = Vec<uint32_t, 4>::load(from->factors.large_rows);
                large_keys = uint64_t(rows.data[1]) << 32 | rows.data[0];
                large_queries = uint64_t(rows.data[3]) << 32 | rows.data[2];
            }
        }
        return;
    }

    if constexpr (WARPGROUPS > 1) warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    const int lane = threadIdx.x % 32, quarter = threadIdx.x / 32 % 4, t = lane % 4;
    float s[KEY_SIZE / 2];
    const int own_row = first_row + warpgroup * 64 + quarter * 16 + lane / 4, own_column = 2 * t;
    // Calls visit(i, row, column) for each pair of accumulators of the lane: i and i + 1, in adjacent columns. Rows and
    // columns count from the lane's own.
    const auto each_of_state = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < KEY_SIZE / 2; i += 2) visit(i, i / 2 % 2 * 8, i / 4 * 8);
    };
    const int64_t own_of_state =
        seq * state_stride + head * (VALUE_SIZE * KEY_SIZE) + own_row * ROW_STRIDE + own_column * COLUMN_STRIDE;
    // The lane's own elements of what segment `of` adds.
    const auto added_at = [&](int of) {
        return added + ((chain * (segments - 1) + of) * VALUE_SIZE + own_row) * KEY_SIZE + own_column;
    };
    // A branch for each pair would keep loads of others from being in flight.
    const auto load_state = [&](auto load) {
        each_of_state([&](int i, int row, int column) {
            const Vec<float, 2> two = load(row, column);
            s[i] = two[0];
            s[i + 1] = two[1];
        });
    };
    if (is_transition) {
        const int diagonal = own_row - own_column;
        load_state([&](int row, int column) {
            const float two[2] = {float(diagonal + row == column), float(diagonal + row == column + 1)};
            return Vec<float, 2>::from_floats(two);
        });
    } else if (segment == 0 && initial_state) {
        const initial_t* const from = initial_state + own_of_state;
        load_state([&](int row, int column) { return load_two(from + row * ROW_STRIDE + column * COLUMN_STRIDE); });
    } else if (OUTPUTS && segment > 0) {
        await_previous_of_call();
        const float* const from = added_at(segment - 1);
        load_state([&](int row, int column) { return Vec<float, 2>::load(from + row * KEY_SIZE + column); });
    } else {
        load_state([&](int row, int column) { return Vec<float, 2>::full(0.0f); });
    }

    // The lane stores 8 elements of every sixteenth token.
    scalar_t* const own_outputs =
        o + lane / 2 * o_stride + head * VALUE_SIZE + first_row + warpgroup * 64 + quarter * 16 + lane % 2 * 8;
    // Ping-pong: both warpgroups multiply their states one after the other, so that one has MMAs while the other
    // rounds. Lets the other warpgroup multiply, if it still has a tile: warpgroup 1 has `more`, or only this one.
    const auto let_other = [&](bool more) {
        if (WARPGROUPS > 1 && (warpgroup == 0 || more)) named_barrier_arrive(2 - warpgroup, 256);
    };
    if (warpgroup == 1) let_other(first_tile < end_tile);
    for (int tile = first_tile; tile < end_tile; ++tile, ring.advance()) {
        uint32_t state[STEPS][4];
#pragma unroll
        for (int i = 0; i < STEPS * 4; ++i) {
            const int at = (i / 4 * 2 + i % 4 / 2) * 4 + i % 2 * 2;
            state[i / 4][i % 4] = pack_pair<scalar_t>(s[at], s[at + 1]);
        }
        ring.wait();
        Stage& from = stages[ring.stage];
        const TileFactors& factors_of = from.factors;
        const tile_t values = tile_at(from.values[warpgroup]);
        // Columns: tokens. The chain of S k, u and the update waits for nothing else: S q and the outputs have products
        // of their own, which the tensor cores execute while r and u are rounded.
        float of_keys[TOKENS / 2], u[TOKENS / 2], outputs[TOKENS / 2];  // S k; u; S q, then the outputs
        const auto multiply_state = [&](float (&d)[TOKENS / 2], int offset) {
            const uint64_t rows = advance_smem_desc(make_smem_desc(from.rows), offset);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const uint64_t columns = advance_smem_desc(rows, step / 4 * 2 * TILE_BYTES + step % 4 * 32);
                wgmma<scalar_t, TOKENS>(d, state[step], columns, step > 0);
            }
            warpgroup_commit_batch();
        };
#pragma unroll
        for (int step = 0; step < STEPS; ++step) warpgroup_fence_operand(state[step]);
        warpgroup_fence_operand(of_keys);
        if constexpr (OUTPUTS) warpgroup_fence_operand(outputs);
        if constexpr (WARPGROUPS > 1) named_barrier_sync(1 + warpgroup, 256);
        warpgroup_arrive();
        multiply_state(of_keys, 0);
        if constexpr (OUTPUTS) multiply_state(outputs, TILE_BYTES);
        let_other(tile + 1 < end_tile);

        // Calls visit(i, first, second) for each pair of adjacent tokens of the lane: i is that of the first in an
        // accumulator, and first and second are their elements of `factors`.
        const auto each_pair = [&](const float* factors, auto visit) {
#pragma unroll
            for (int i = 0; i < TOKENS / 2; i += 4) {
                const auto two = Vec<float, 2>::load(factors + i * 2 + 2 * t);
                visit(i, two[0], two[1]);
                visit(i + 2, two[0], two[1]);
            }
        };
        uint32_t errors[TOKEN_STEPS][4], changes[TOKEN_STEPS][4];  // r, then u; u times its factor
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; ++step) load_block(errors[step], values, step * 16, quarter, lane);
        constexpr int OTHERS = OUTPUTS ? 1 : 0;  // products in flight that the chain does not wait for
        warpgroup_wait<OTHERS>();
        warpgroup_fence_operand(of_keys);
        each_pair(factors_of.of_keys, [&](int i, float first, float second) {
            uint32_t& word = errors[i / 8][i % 8 / 2];
            float low, high;
            unpack_pair<scalar_t>(word, low, high);
            word = pack_pair<scalar_t>(fmaf(-first, of_keys[i], low), fmaf(-second, of_keys[i + 1], high));
        });
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; ++step) warpgroup_fence_operand(errors[step]);
        warpgroup_fence_operand(u);
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; ++step) {
#pragma unroll
            for (int half = step < Inverse::FIRST_PANELS ? 0 : 1; half < 2; ++half) {
                wgmma<scalar_t, Inverse::ROWS>(
                    reinterpret_cast<float (&)[Inverse::ROWS / 2]>(u[half * Inverse::ROWS / 2]), errors[step],
                    Panel::desc(factors_of.inverse + Inverse::offset(half, step)), step > 0);
            }
        }
        warpgroup_commit_batch();
        if constexpr (OUTPUTS) {
            warpgroup_wait<1>();
            warpgroup_fence_operand(outputs);
            each_pair(factors_of.of_queries, [&](int i, float first, float second) {
                outputs[i] *= first;
                outputs[i + 1] *= second;
            });
        }
        // Before the wait for S k, ptxas would insert another wait before this.
        const float kept = factors_of.kept[0];
#pragma unroll
        for (int i = 0; i < KEY_SIZE / 2; ++i) s[i] *= kept;
        warpgroup_wait<0>();
        warpgroup_fence_operand(u);
        each_pair(factors_of.of_changes, [&](int i, float first, float second) {
            errors[i / 8][i % 8 / 2] = pack_pair<scalar_t>(u[i], u[i + 1]);
            changes[i / 8][i % 8 / 2] = pack_pair<scalar_t>(u[i] * first, u[i + 1] * second);
        });
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; ++step) {
            warpgroup_fence_operand(errors[step]);
            warpgroup_fence_operand(changes[step]);
        }
        if constexpr (OUTPUTS) warpgroup_fence_operand(outputs);
        warpgroup_fence_operand(s);
        warpgroup_arrive();
        if constexpr (OUTPUTS) {
#pragma unroll
            for (int step = 0; step < TOKEN_STEPS; ++step) {
                wgmma<scalar_t, TOKENS>(outputs, errors[step], Panel::desc(from.weights + step * Weights::PANEL_BYTES));
            }
            warpgroup_commit_batch();
        }
        const uint64_t summed = make_smem_desc(from.rows, 1024, 2 * TILE_BYTES);
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; ++step) {
            wgmma<scalar_t, KEY_SIZE, true>(s, changes[step], advance_smem_desc(summed, step * 16 * WIDE * 2));
        }
        warpgroup_commit_batch();
        if constexpr (OUTPUTS) {
            warpgroup_wait<1>();
            warpgroup_fence_operand(outputs);
            // The outputs of a warp overwrite its values, and leave as whole vectors.
#pragma unroll
            for (int step = 0; step < TOKEN_STEPS; ++step) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    words[i] = pack_pair<scalar_t>(outputs[step * 8 + i * 2], outputs[step * 8 + i * 2 + 1]);
                }
                stmatrix<4, true>(values.at(step * 16 + lane / 16 * 8 + lane % 8, quarter * 2 + lane / 8 % 2), words);
            }
            sync_warp();
            const int count = tiles.tokens(tile);
            scalar_t* to = own_outputs + tiles.token(tile) * o_stride;
            const scalar_t* const from_own = values.at(lane / 2, quarter * 2 + lane % 2);
#pragma unroll
            for (int i = 0; i < TOKENS; i += 16, to += 16 * o_stride) {
                const auto eight = Vec<scalar_t, 8>::load(from_own + i * WIDE);
                if (i + lane / 2 < count) eight.store(to);
            }
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
        sync_warp();  // all lanes have read the stage
        ring.release(ring.stage);
    }
    if constexpr (OUTPUTS) {
        if (!final_state || segment != segments - 1) return;
        state_t* const to = final_state + own_of_state;
        each_of_state([&](int i, int row, int column) {
            store_two(to + row * ROW_STRIDE + column * COLUMN_STRIDE, {s[i], s[i + 1]});
        });
    } else if (is_transition) {
        Transition& to = transitions[chain * (segments - 2) + segment - 1];
        each_of_state([&](int i, int row, int column) {
            float rest[2];
            const uint32_t rounded = pack_pair<bf16_t>(s[i], s[i + 1]);
            unpack_pair<bf16_t>(rounded, rest[0], rest[1]);
            *to.pair_at(0, own_row + row, own_column + column) = rounded;
            *to.pair_at(1, own_row + row, own_column + column) = pack_pair<bf16_t>(s[i] - rest[0], s[i + 1] - rest[1]);
        });
    } else {
        float* const to = added_at(segment);
        each_of_state([&](int i, int row, int column) {
            Vec<float, 2>::from_floats({s[i], s[i + 1]}).store(to + row * KEY_SIZE + column);
        });
    }
}
