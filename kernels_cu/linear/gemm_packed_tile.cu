// gemm_packed_tile: a product with a weight of packed codes, which become numbers in shared memory: by product.cuh, on AMD.
//
//     w[k, n] = T(scale[g, n] * (number(code[k, n]) - zero[g, n]))    g: the group of row k    T: scalar_t
//     ADDED: w[k, n] = T(scale[g, n] * (number(code[k, n]) - ZERO_POINT) + zeros[g, n])
//     out[m, n] = what gemm_epilogue.cuh makes of sum_k a[m, k] * w[k, n], in float32
//
// Blocks: a block takes a tile of TILE_M x TILE_N sums. blockIdx.x counts tiles, those of the same columns one after
// another. SPLITS blocks along y share a tile, each with a part of K; the last block to arrive adds up their sums.
//
// GROUPED: rows of out belong to experts, each with a weight. Rows of a tile are places of lists that
// moe_align_block_size has written (grouped.cuh): row t of out is the product of row t / top_k of a and the weight of its
// block's expert, times topk_weights[t] if ROUTED. Rows whose expert does not exist are left as they are.
//
// Steps: the block goes through K in steps of 64. While the warps multiply a step, rows of a and codes of the next DEPTH ones
// are on their way to registers. Behind the products of a step each thread stores what it holds of the next one, codes as
// numbers (packed_tile.cuh), to the other of two stages. Loads return in their order, so rows of a are as far ahead as codes.
//
// Constants
//     scalar_t      element type of a: half_t or bf16_t
//     out_t, A_SCALES, B_SCALES, AZP, BIAS, ACTIVATION, GATED,
//     a_scale_t, b_scale_t, SCALE_EXPONENT, COLUMN_ORDER    of gemm_epilogue.cuh; BIAS is at most 1, GATED false
//     BITS, EXPONENT, LAYOUT, RECODED, HAS_SCALES, scale_t, SCALE, GROUP_SCALE_EXPONENT, SCALE_ORDER, ZERO_CODES,
//     ZERO_POINT, ZERO_FLOATS, ADDED, GROUP_SIZE, WHOLE_STEPS    of the weight: packed_tile.cuh
//     OUT_ACCESS    elements of one access to out: 1 or 2
//     TILE_M, TILE_N, WARPS_M, WARPS_N    the tile of a block, and its warps along both
//     DEPTH         steps that are on their way, an even number
//     SPLITS        blocks that share a tile
//     GROUPED, ROUTED    whether rows belong to experts, and have weights

#include "packed_tile.cuh"

static_assert(!GATED && BIAS <= 1 && AZP == 0 && DEPTH % 2 == 0 && (GROUPED || !ROUTED));
static_assert(HOLDS_COPIES, "copies wait in registers");

using epilogue_t = Epilogue<out_t, A_SCALES, B_SCALES, 0, BIAS, SCALE_EXPONENT>;
// An Epilogue whose values are multiplied by the weight of their row.
struct RoutedEpilogue : epilogue_t {
    const float* topk_weights;

    template <typename Sum>
    DEVICE float value(const typename epilogue_t::Row& row, const typename epilogue_t::Column& column, Sum sum) const {
        const float x = epilogue_t::value(row, column, sum);
        return ROUTED ? ieee_multiply(topk_weights[row.row], x) : x;
    }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemm_packed_tile(out_t* out,                 // [M, N]
                 const scalar_t* a,          // [M, K]
                 const uint32_t* codes,      // [K, N] by LAYOUT
                 const scale_t* scales,      // [groups, N] by SCALE_ORDER
                 const void* zeros,          // [groups, N BITS / 32] words; or [groups, N] scalar_t by SCALE_ORDER
                 const a_scale_t* a_scales,  // [M] or [1]
                 const b_scale_t* b_scales,  // [N] or [1]
                 const out_t* bias,          // [N]
                 const int32_t* sorted_token_ids,     // [M], of GROUPED; any numbers
                 const int32_t* expert_ids,           // [M / block_size]
                 const int32_t* num_tokens_post_pad,  // [1]
                 const float* topk_weights,           // [num_rows]
                 float* partial,                      // [tiles, SPLITS, SUMS / 4, NUM_THREADS, 4]
                 uint32_t* arrived,                   // [tiles]
                 int64_t m, int64_t n, int64_t k, int64_t groups, int64_t a_stride, int64_t out_stride,
                 int64_t a_scale_step, int64_t b_scale_step, int64_t num_rows, int64_t num_experts, int64_t block_size,
                 int64_t top_k) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ uint32_t is_last;
    __shared__ int row_ids[GROUPED ? TILE_M : 1];  // of out; -1 for none
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;
    const int64_t row_tiles = (m + TILE_M - 1) / TILE_M;
    const int64_t first_row = blockIdx.x % row_tiles * TILE_M, first_column = blockIdx.x / row_tiles * TILE_N;
    if constexpr (GROUPED) {
        if (first_row >= *num_tokens_post_pad) return;
        const int64_t expert = expert_ids[first_row / block_size];
        if (expert < 0 || expert >= num_experts) return;
        for (int i = threadIdx.x; i < TILE_M; i += NUM_THREADS) {
            const int id = sorted_token_ids[first_row + i];
            row_ids[i] = id >= 0 && id < num_rows ? id : -1;
        }
        __syncthreads();
        codes += expert * (k * n * BITS / 32);
        if constexpr (HAS_SCALES) scales += expert * groups * n;
        zeros = static_cast<const uint8_t*>(zeros) + expert * groups * n * (ZERO_CODES ? BITS : 16) / 8;
        // One scale of the whole weight, a scale of each column, a bias.
        if constexpr (A_SCALES) a_scales += expert;
        if constexpr (B_SCALES) b_scales += expert * n;
        if constexpr (BIAS > 0) bias += expert * n;
    }
    const auto row_of = [&](int local, int more) {
        return GROUPED ? int64_t(row_ids[GROUPED ? local + more : 0]) : first_row + local + more;
    };
    const auto exists = [&](int64_t row) { return GROUPED ? row >= 0 : row < m; };

    const int64_t all_steps = (k + STEP - 1) / STEP;
    const int64_t first_step = all_steps * blockIdx.y / SPLITS, end_step = all_steps * (blockIdx.y + 1) / SPLITS;
    const int steps = int(end_step - first_step);
    // The chunks of rows of a that the thread has in a step, and its pieces.
    using chunks_t = HeldChunks<TILE_M, NUM_THREADS>;
    const int thread = int(thread_of<NUM_THREADS>()), chunk = thread % 8;
    const auto each_chunk = [&](const auto& body) {
#pragma unroll
        for (int i = 0; i < chunks_t::COUNT; ++i) {
            const int local = thread / 8 + i * chunks_t::STRIDE;
            if (TILE_M % chunks_t::STRIDE == 0 || local < TILE_M) body(i, local);
        }
    };
    const auto each_piece = [&](const auto& body) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int piece = thread + i * NUM_THREADS;
            if (TILE_PIECES % NUM_THREADS == 0 || piece < TILE_PIECES) body(i, PiecePlace(piece));
        }
    };
    // Loads are issued whatever there is to load, from places that exist, so that those to wait for can be counted: rows and
    // columns that do not exist have sums that nobody stores, and elements of K that do not exist are 0 in a.
    const scalar_t* chunks_at[chunks_t::COUNT];
    each_chunk([&](int i, int local) {
        const int64_t row = row_of(local, 0);
        chunks_at[i] = a + (!exists(row) ? 0 : GROUPED ? row / top_k : row) * a_stride;
    });
    const auto has_chunk = [&](int64_t first_k) { return WHOLE_STEPS || first_k + chunk * CHUNK < k; };
    struct {
        chunks_t chunks;
        HeldPiece pieces[PIECES];
    } held[DEPTH];
    // Loads step number `step`, or the last one anew: its number modulo DEPTH is `slot`.
    const auto load = [&](int slot, int step) {
        const int64_t first_k = (first_step + min(step, steps - 1)) * STEP;
        each_piece([&](int i, const PiecePlace& place) {
            held[slot].pieces[i].load(codes, scales, zeros, place, first_k, uint32_t(first_column), n, k, groups);
        });
        each_chunk([&](int i, int) {
            hold<16>(held[slot].chunks.chunks[i], chunks_at[i] + (has_chunk(first_k) ? first_k + chunk * CHUNK : 0),
                     true);
        });
    };
    const auto stage_of = [&](int step) {
        return tile_t{reinterpret_cast<uint16_t*>(memory) + step % 2 * (STAGE_BYTES / 2)};
    };
    // Stores a step, and loads the one that takes its registers.
    const auto store = [&](int slot, int step) {
        chunks_t& chunks = held[slot].chunks;
        if (!has_chunk((first_step + step) * STEP)) {
            each_chunk([&](int i, int) {
#pragma unroll
                for (int j = 0; j < 4; ++j) chunks.chunks[i][j] = 0;
            });
        }
        chunks.store(stage_of(slot), 0);
        each_piece([&](int i, const PiecePlace& place) { held[slot].pieces[i].store(stage_of(slot), place); });
        load(slot, step + DEPTH);
    };

    sum_t sums[ROW_TILES][COLUMN_TILES][PRODUCT_SUMS] = {};
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        load(i, i);
        keep_loads_of_warp();  // in the order in which the loop waits for them
    }
    store(0, 0);
    for (int first = 0; first < steps; first += DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            if (first + i >= steps) break;
            sync_shared();
            multiply_step(sums, stage_of(i), warp_row, TILE_M + warp_column);
            store((i + 1) % DEPTH, first + i + 1);
        }
    }

    float result[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        result[i] = sums[i / (COLUMN_TILES * PRODUCT_SUMS)][i / PRODUCT_SUMS % COLUMN_TILES][i % PRODUCT_SUMS];
    }
    if (!add_splits(result, partial, arrived, &is_last)) return;
    RoutedEpilogue epilogue{{a_scales, b_scales, nullptr, nullptr, bias, a_scale_step, b_scale_step, 0}, topk_weights};
    const auto column_of = [&](int local) { return first_column + local; };
    write_tile(out, out_stride, n, epilogue, result, warp_row + lane_row(lane), warp_column + lane_column(lane), row_of,
               exists, column_of);
}
