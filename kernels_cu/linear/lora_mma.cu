// lora_mma: rows of x times the transposed weights of each row's LoRA adapter, by tensor cores: both products of LoRA.
//
//     out[t, n] = out_t(scale * sum_k T(x[t, k]) * weight[indices[t], n, k] + (ADDS ? out[t, n] : 0)), in float32
//
// for each slice, with a weight and columns of out of its own, and with x of its own unless x_slice_stride is 0. A
// token with an index outside of [0, num_loras) has no adapter: its row becomes zeros if CLEARS, else it stays.
//
// A CTA has TOKENS tokens that follow each other, in `order` if there is one, and a tile of N. Its warps find the
// distinct adapters of the tokens. For each adapter, the CTA multiplies the tokens that have it (other rows are zeros,
// and are not read) by the tile of the adapter's weight; tokens in order of their adapters have one or two. CTAs along
// blockIdx.y share the adapters of the same tokens: in a decode step, where each token may have an adapter of its own,
// they load the weights in parallel. K_WARPS warps split K in steps, and N_WARPS warps split N. Fragments come from
// global memory in 16-byte accesses: both operands permute K in the same way, so that the elements of a lane are
// adjacent. The rows of an adapter in shared memory are its own, so that warps meet once, before the rows are stored.
// Neither the other tokens nor the order of adapters enters into the sum of an element.
//
// Constants:
//     input_t, out_t    element types of x and out
//     index_t           element type of indices
//     VEC_SIZE          elements of an access to weight
//     INPUT_VEC         elements of an access to x
//     OUT_VEC           elements of an access to out; divides the columns of each slice
//     TILES_M, TILES_N  16-row tiles of the tokens, and of the weight for each warp along N
//     K_WARPS, N_WARPS  warps along K and N
//     BATCH             steps of K that a warp loads before it multiplies the first
//     NUM_SLICES        slices of the layer, 1 to 4
//     SLICE_STEP        padded columns of a slice are a multiple of it
//     HAS_ORDER         order and num_tokens_per_lora are given
//     ADDS              add to out
//     CLEARS            write zeros for tokens without an adapter
//
// lora_mma_experts: the same for pairs of a token and an expert, with a weight for each adapter and expert. Its rows
// come from lists (lora_experts.cuh), and the sum of a pair may have a factor. A tile of a sorted list has one expert.
//     SORTED            pairs come in blocks of one expert each
//     HAS_FACTORS       topk_weights is given, of type factor_t

#include "lora_experts.cuh"
#include "lora_slices.cuh"
#include "product.cuh"

constexpr int TOKENS = TILES_M * 16, WARP_COLUMNS = TILES_N * 16, COLUMNS = N_WARPS * WARP_COLUMNS;

// The fragment of a lane: RUN adjacent elements of K in each of OPERAND_ROWS rows, for MMAS MMAs.
constexpr int OPERAND_ROWS = ON_MATRIX_CORES ? 1 : 2, RUN_LANES = ON_MATRIX_CORES ? K_LANES : 4;
constexpr int RUN_WORDS = ON_MATRIX_CORES ? SHORT_WORDS : 4, RUN = 2 * RUN_WORDS, STEP = RUN * RUN_LANES;
constexpr int MMAS = RUN_WORDS * OPERAND_ROWS / SHORT_WORDS;
DEVICE int run_of(int lane) { return ON_MATRIX_CORES ? matrix_run(lane) : lane % 4; }
DEVICE int token_of(int lane) { return ON_MATRIX_CORES ? lane % 16 : lane / 4; }
DEVICE int column_of(int lane) { return ON_MATRIX_CORES ? matrix_row(lane) : lane / 4; }

struct Fragment {
    alignas(16) uint32_t rows[OPERAND_ROWS][RUN_WORDS];

    // Loads RUN elements of a row from `column` on; those from `size` on are zeros, as is a row that does not exist.
    template <int VEC, typename T>
    DEVICE void load(int i, const T* row, int column, int size, bool exists) {
        constexpr int ACCESS = VEC < RUN ? VEC : RUN;
#pragma unroll
        for (int j = 0; j < RUN; j += ACCESS) {
            const bool loads = exists && column + j < size;
            if constexpr (is_same<T, scalar_t>) {
                // Words, not elements: a load would wait until the elements of the one before are unpacked.
                using word_t = typename word_of<ACCESS* int(sizeof(T))>::type;
                word_t& words = *reinterpret_cast<word_t*>(reinterpret_cast<T*>(rows[i]) + j);
                words = word_t{};
                if (loads) words = *reinterpret_cast<const word_t*>(row + column + j);
            } else {
                float x[ACCESS] = {};
                Vec<T, ACCESS> given = Vec<T, ACCESS>::from_floats(x);
                if (loads) given = Vec<T, ACCESS>::load(row + column + j);
                given.to_floats(x);
#pragma unroll
                for (int k = 0; k < ACCESS; ++k) {
                    reinterpret_cast<scalar_t*>(rows[i])[j + k] = from_float<scalar_t>(x[k]);
                }
            }
        }
    }
    // The words of MMA number `mma` as operand a or b. With mma.sync, words of the rows alternate in a; in b, those of
    // a row are adjacent.
    DEVICE void operand(uint32_t (&words)[SHORT_WORDS], int mma, bool is_b) const {
#pragma unroll
        for (int i = 0; i < SHORT_WORDS; ++i) {
            if constexpr (ON_MATRIX_CORES) words[i] = rows[0][i];
            else words[i] = is_b ? rows[i / 2][2 * mma + i % 2] : rows[i % 2][2 * mma + i / 2];
        }
    }
};

// Multiplies the rows of a CTA and writes them. Lane i of every warp knows row i; `out_rows` and `x_rows` have the
// offsets of all of them in out and x. The sum of row i has the factor `factor(i)`. The CTA takes every
// column_blocks-th tile of columns, from `column_block` on.
template <typename Factor>
DEVICE void multiply_rows(const LoraRow& mine, const int64_t* out_rows, const int64_t* x_rows, const Slices& slices,
                          int column_block, int column_blocks, out_t* out, const input_t* x, int size,
                          int64_t out_slice_stride, int64_t x_slice_stride, const Factor& factor) {
    __shared__ alignas(16) float partial[K_WARPS][TOKENS][COLUMNS + 8];  // padded against bank conflicts
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int k_warp = warp % K_WARPS, n_warp = warp / K_WARPS;

    // The first lane with an adapter leads the others.
    const int lora = mine.weight;
    const bool has_lora = lora >= 0;
    int leader = lane;
#pragma unroll
    for (int i = TOKENS - 1; i >= 0; --i) {
        const int other = shfl<WARP_SIZE>(lora, i);
        if (i < lane && other == lora) leader = i;
    }
    const lane_mask_t leaders = ballot(has_lora && leader == lane);
    const auto is_mine = [&](int leader) {
        return uint32_t(count_bits(leaders & ((lane_mask_t(1) << leader) - 1))) % gridDim.y == blockIdx.y;
    };
    const lane_mask_t computed = ballot(has_lora && is_mine(leader));
    const lane_mask_t adapters = computed & leaders;  // the first lane of each adapter
    const lane_mask_t cleared = ballot(CLEARS && blockIdx.y == 0 && mine.exists && !has_lora);
    __syncthreads();
    if ((computed | cleared) == 0) return;

    // A tile of out in vectors. What is added comes to L2 while the tile before, or this one, is computed, for which
    // the registers are needed.
    using out_vec = Vec<out_t, OUT_VEC>;
    constexpr int ROW_VECS = COLUMNS / OUT_VEC, VECS = TOKENS * ROW_VECS;
    const lane_mask_t written = computed | cleared;
    // Whether vector i of a tile is written, and its address.
    const auto find = [&](int first_column, uint32_t i, out_t*& address) {
        const uint32_t row = min(i / ROW_VECS, uint32_t(TOKENS - 1));
        const Slices::Column at = slices.at(first_column + i % ROW_VECS * OUT_VEC);
        address = out + out_rows[row] + at.slice * out_slice_stride + at.before + at.column;
        return i < VECS && at.exists() && (written >> row & 1);
    };
    const auto prefetch = [&](int first_column) {
        constexpr int LINE = 128 / int(sizeof(out_vec)), LINE_VECS = LINE < ROW_VECS ? LINE : ROW_VECS;
#pragma unroll 1
        for (int i = threadIdx.x * LINE_VECS; i < VECS; i += NUM_THREADS * LINE_VECS) {
            out_t* line;
            if (find(first_column, i, line)) prefetch_line(line);
        }
    };
    if constexpr (ADDS) prefetch(column_block * COLUMNS);

    // Warps that split K have no registers for loops over tiles: the CTA has one.
    const int columns = K_WARPS > 1 ? 0 : slices.tiles<COLUMNS>() * COLUMNS, step = column_blocks * COLUMNS;
    int first_column = column_block * COLUMNS;
    do {
        if (ADDS && first_column + step < columns) prefetch(first_column + step);
        const input_t* const of_slice = x + slices.at(first_column).slice * x_slice_stride;
        const int warp_column = first_column + n_warp * WARP_COLUMNS;
        for (lane_mask_t left = adapters; left != 0; left &= left - 1) {
            const int adapter = shfl<WARP_SIZE>(lora, lowest_bit(left));
            const lane_mask_t tokens = ballot(lora == adapter);
            float d[TILES_M][TILES_N][16 / PRODUCT_COLUMNS][PRODUCT_SUMS] = {};
            for (int first = k_warp * STEP; first < size; first += K_WARPS * STEP * BATCH) {
                Fragment a[BATCH][TILES_M], b[BATCH][TILES_N];
#pragma unroll
                for (int i = 0; i < OPERAND_ROWS; ++i) {
#pragma unroll
                    for (int n = 0; n < TILES_N; ++n) {
                        const int here = made_anew(lane);  // otherwise the addresses of rows would take registers
                        const Slices::Column at = slices.at(made_anew(warp_column) + n * 16);
                        const int column = at.column + column_of(here) + i * 8;
                        const scalar_t* row = at.weight + (int64_t(adapter) * at.columns + column) * size;
#pragma unroll
                        for (int s = 0; s < BATCH; ++s) {
                            const int k = first + s * K_WARPS * STEP + run_of(here) * RUN;
                            b[s][n].load<VEC_SIZE>(i, row, k, size, column < at.columns);
                        }
                    }
#pragma unroll
                    for (int m = 0; m < TILES_M; ++m) {
                        const int here = made_anew(lane);
                        const int number = m * 16 + token_of(here) + i * 8;
                        const input_t* row = of_slice + x_rows[number];
#pragma unroll
                        for (int s = 0; s < BATCH; ++s) {
                            const int k = first + s * K_WARPS * STEP + run_of(here) * RUN;
                            a[s][m].load<INPUT_VEC>(i, row, k, size, tokens >> number & 1);
                        }
                    }
                }
#pragma unroll
                for (int s = 0; s < BATCH; ++s) {
#pragma unroll
                    for (int mma = 0; mma < MMAS; ++mma) {
#pragma unroll
                        for (int n = 0; n < TILES_N; ++n) {
                            uint32_t b_words[SHORT_WORDS];
                            b[s][n].operand(b_words, mma, true);
#pragma unroll
                            for (int m = 0; m < TILES_M; ++m) {
                                uint32_t a_words[SHORT_WORDS];
                                a[s][m].operand(a_words, mma, false);
#pragma unroll
                                for (int half = 0; half < 16 / PRODUCT_COLUMNS; ++half) {
                                    product<scalar_t>(d[m][n][half], a_words, b_words, half);
                                }
                            }
                        }
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
                for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
                    for (int i = 0; i < 16 / PRODUCT_COLUMNS * PRODUCT_SUMS; ++i) {
                        const int half = i / PRODUCT_SUMS, sum = i % PRODUCT_SUMS;
                        const int row = m * 16 + lane_row(lane) + sum / ROW_SUMS * ROW_STEP;
                        const int column = n * 16 + half * PRODUCT_COLUMNS + lane_column(lane) + sum % ROW_SUMS;
                        if (tokens >> row & 1)
                            partial[k_warp][row][n_warp * WARP_COLUMNS + column] = d[m][n][half][sum];
                    }
                }
            }
        }
        __syncthreads();

        // A thread loads what it adds to several vectors before it stores the first: as words, not elements, because a
        // load would wait until the elements of the one before are unpacked.
        using word_t = typename out_vec::template word_t<OUT_VEC>;
        constexpr int AT_A_TIME = 4, SUM_VEC = OUT_VEC < 4 ? OUT_VEC : 4;
        for (int first = threadIdx.x; first < VECS; first += AT_A_TIME * NUM_THREADS) {
            out_t* addresses[AT_A_TIME];
            bool writes[AT_A_TIME];
            word_t words[AT_A_TIME];
#pragma unroll
            for (int v = 0; v < AT_A_TIME; ++v) {
                writes[v] = find(first_column, first + v * NUM_THREADS, addresses[v]);
                words[v] = word_t{};
                if (ADDS && writes[v]) words[v] = *reinterpret_cast<const word_t*>(addresses[v]);
            }
#pragma unroll
            for (int v = 0; v < AT_A_TIME; ++v) {
                if (!writes[v]) continue;
                const uint32_t i = first + v * NUM_THREADS, row = i / ROW_VECS;
                float total[OUT_VEC] = {}, y[OUT_VEC];
                if (!CLEARS || (computed >> row & 1)) {
#pragma unroll
                    for (int k = 0; k < K_WARPS; ++k) {
                        float part[OUT_VEC];
                        load_floats<SUM_VEC>(&partial[k][row][i % ROW_VECS * OUT_VEC], part);
#pragma unroll
                        for (int j = 0; j < OUT_VEC; ++j) total[j] = k == 0 ? part[j] : total[j] + part[j];
                    }
                }
                out_vec added;
                added.template word<OUT_VEC>(0) = words[v];
                added.to_floats(y);
#pragma unroll
                for (int j = 0; j < OUT_VEC; ++j) y[j] += total[j] * factor(row);
                out_vec::from_floats(y).store(addresses[v]);
            }
        }
        if (first_column + step < columns) __syncthreads();  // `partial` has been read
        first_column += step;
    } while (first_column < columns);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
lora_mma(out_t* out,                          // [num_tokens, columns] of each slice
         const input_t* x,                    // [num_tokens, size], of each slice if x_slice_stride is not 0
         const scalar_t* weight,              // [num_loras, columns, size]
         const scalar_t* weight1,             // [num_loras, columns1, size]
         const scalar_t* weight2,             // [num_loras, columns2, size]
         const scalar_t* weight3,             // [num_loras, columns3, size]
         const index_t* indices,              // [num_tokens]
         const index_t* order,                // [num_tokens]
         const index_t* num_tokens_per_lora,  // [num_counts]
         int64_t num_tokens, int num_loras, int num_counts, int columns, int columns1, int columns2, int columns3,
         int column_blocks, int size, int64_t out_stride, int64_t out_slice_stride, int64_t x_stride,
         int64_t x_slice_stride, float scale) {
    await_previous_kernel();
    __shared__ int64_t out_rows[TOKENS];
    __shared__ int64_t x_rows[TOKENS];
    const int lane = threadIdx.x % WARP_SIZE;
    const Slices slices = {{weight, weight1, weight2, weight3}, {columns, columns1, columns2, columns3}};
    const int64_t first_token = int64_t(blockIdx.x) / column_blocks * TOKENS;

    // Lane i of every warp has token i and its adapter.
    int64_t token = first_token + lane;
    bool may_have_lora = lane < TOKENS && token < num_tokens;
    if constexpr (HAS_ORDER) {
        const int64_t ordered = may_have_lora ? int64_t(order[token]) : 0;  // in flight with the counts
        may_have_lora &= token < num_ordered(num_tokens_per_lora, num_counts, num_tokens);
        if (may_have_lora) token = ordered;
    }
    const bool has_token = lane < TOKENS && token >= 0 && token < num_tokens;
    const int64_t index = may_have_lora && has_token ? int64_t(indices[token]) : -1;
    const bool has_lora = index >= 0 && index < num_loras;
    if (threadIdx.x < TOKENS) {
        out_rows[lane] = token * out_stride;
        x_rows[lane] = token * x_stride;
    }
    multiply_rows({token, has_lora ? int(index) : -1, has_token}, out_rows, x_rows, slices,
                  int(blockIdx.x) % column_blocks, column_blocks, out, x, size, out_slice_stride, x_slice_stride,
                  [=](int) { return scale; });
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
lora_mma_experts(out_t* out,                             // [num_pairs, columns] of each slice
                 const input_t* x,                       // [num_pairs / x_top_k, size], likewise if x_slice_stride != 0
                 const scalar_t* weight,                 // [max_loras * num_experts, columns, size]
                 const scalar_t* weight1,                // [max_loras * num_experts, columns1, size]
                 const scalar_t* weight2,                // [max_loras * num_experts, columns2, size]
                 const scalar_t* weight3,                // [max_loras * num_experts, columns3, size]
                 const index_t* expert_ids,              // [max_loras, num_blocks]; [num_pairs] unless SORTED
                 const int32_t* adapter_enabled,         // [max_loras]
                 const int32_t* token_lora_mapping,      // [num_pairs / top_k]
                 const int32_t* sorted_token_ids,        // [max_loras, num_slots]
                 const int32_t* num_tokens_post_padded,  // [max_loras]
                 const int32_t* lora_ids,                // [num_lora_ids]
                 const factor_t* topk_weights,           // [num_pairs]
                 int64_t num_pairs, int top_k, int x_top_k, int max_loras, int num_experts, int num_slots,
                 int num_blocks, int block_size, int num_lora_ids, int columns, int columns1, int columns2,
                 int columns3, int column_blocks, int size, int64_t out_stride, int64_t out_slice_stride,
                 int64_t x_stride, int64_t x_slice_stride) {
    await_previous_kernel();
    __shared__ int64_t out_rows[TOKENS];
    __shared__ int64_t x_rows[TOKENS];
    __shared__ float factors[TOKENS];
    const int lane = threadIdx.x % WARP_SIZE;
    const Slices slices = {{weight, weight1, weight2, weight3}, {columns, columns1, columns2, columns3}};
    const ExpertLists<SORTED, index_t> lists = {expert_ids,
                                                adapter_enabled,
                                                token_lora_mapping,
                                                sorted_token_ids,
                                                num_tokens_post_padded,
                                                lora_ids,
                                                num_pairs,
                                                top_k,
                                                max_loras,
                                                num_experts,
                                                num_slots,
                                                num_blocks,
                                                block_size,
                                                num_lora_ids};
    for (int item = blockIdx.x;; item += gridDim.x) {
        const auto tile = lists.template tile<TOKENS>(item / column_blocks);
        if (item / column_blocks >= tile.count) return;
        if (item != blockIdx.x) __syncthreads();  // the rows of the tile before have been read
        const LoraRow mine = lists.template row<TOKENS>(tile, lane);
        if (threadIdx.x < TOKENS) {
            out_rows[lane] = mine.row * out_stride;
            x_rows[lane] = mine.row / x_top_k * x_stride;
            factors[lane] = HAS_FACTORS && mine.weight >= 0 ? to_float(topk_weights[mine.row]) : 1.0f;
        }
        multiply_rows(mine, out_rows, x_rows, slices, item % column_blocks, column_blocks, out, x, size,
                      out_slice_stride, x_slice_stride, [&](int row) { return factors[row]; });
        if (K_WARPS > 1) return;
    }
}
