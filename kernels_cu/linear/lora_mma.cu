// lora_mma: rows of x times the transposed weight of each row's LoRA adapter, by tensor cores: both products of LoRA.
//
//     out[t, n] = out_t(scale * sum_k T(x[t, k]) * weight[indices[t], n, k] + (ADDS ? out[t, n] : 0)), summed in float32
//
// A token with an index outside of [0, num_loras) has no adapter: its row becomes zeros if CLEARS, else it stays.
//
// A CTA has TOKENS adjacent tokens and a tile of N. Its warps find the distinct adapters of the tokens, so tokens need
// no order. For each adapter, the CTA multiplies the tokens that have it (other rows are zeros, and are not read) by
// the tile of the adapter's weight. CTAs along blockIdx.y share the adapters of the same tokens: in a decode step,
// where each token may have an adapter of its own, they load the weights in parallel. K_WARPS warps split K in steps,
// and N_WARPS warps split N. Fragments come from global memory in 16-byte accesses: both operands permute K in the same
// way, so that the elements of a lane are adjacent. Neither the other tokens nor the order of adapters enters into the
// sum of an element.
//
// Constants:
//     input_t, out_t    element types of x and out
//     index_t           element type of indices
//     VEC_SIZE          elements of an access to weight
//     INPUT_VEC         elements of an access to x
//     OUT_VEC           elements of an access to out; divides columns
//     TILES_M, TILES_N  16-row tiles of the tokens, and of the weight for each warp along N
//     K_WARPS, N_WARPS  warps along K and N
//     BATCH             steps of K that a warp loads before it multiplies the first
//     ADDS              add to out
//     CLEARS            write zeros for tokens without an adapter

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
    uint32_t rows[OPERAND_ROWS][RUN_WORDS];

    // Loads RUN elements of a row from `column` on; those from `size` on are zeros, as is a row that does not exist.
    template <int VEC, typename T>
    DEVICE void load(int i, const T* row, int column, int size, bool exists) {
        constexpr int ACCESS = VEC < RUN ? VEC : RUN;
#pragma unroll
        for (int j = 0; j < RUN; j += ACCESS) {
            float x[ACCESS] = {};
            Vec<T, ACCESS> given = Vec<T, ACCESS>::from_floats(x);
            if (exists && column + j < size) given = Vec<T, ACCESS>::load(row + column + j);
            if constexpr (is_same<T, scalar_t>) {
#pragma unroll
                for (int k = 0; k < ACCESS; ++k) reinterpret_cast<scalar_t*>(rows[i])[j + k] = given.data[k];
            } else {
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

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
lora_mma(out_t* out,              // [num_tokens, columns]
         const input_t* x,        // [num_tokens, size]
         const scalar_t* weight,  // [num_loras, columns, size]
         const index_t* indices,  // [num_tokens]
         int64_t num_tokens, int64_t num_loras, int columns, int size, int64_t out_stride, int64_t x_stride,
         int64_t lora_stride, int64_t weight_stride, float scale) {
    await_previous_kernel();
    __shared__ float partial[K_WARPS][TOKENS][COLUMNS + 8];  // padded against bank conflicts
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int k_warp = warp % K_WARPS, n_warp = warp / K_WARPS;
    const int column_tiles = ceil_div(columns, COLUMNS);
    const int64_t first_token = int64_t(blockIdx.x) / column_tiles * TOKENS;
    const int first_column = int(blockIdx.x % column_tiles) * COLUMNS, column0 = first_column + n_warp * WARP_COLUMNS;
    const int tile_columns = min(COLUMNS, columns - first_column);

    // Lane i of every warp has the adapter of token i; -1 is none. A lane leads if it is the first with its adapter.
    const bool has_token = lane < TOKENS && first_token + lane < num_tokens;
    const int64_t index = has_token ? int64_t(indices[first_token + lane]) : -1;
    const bool has_lora = index >= 0 && index < num_loras;
    bool leads = has_lora;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const int64_t other = shfl<WARP_SIZE>(index, i);
        if (i < lane && other == index) leads = false;
    }
    lane_mask_t leaders = ballot(leads);

    // Writes rows of the tile. A thread loads what it adds to several vectors before it stores the first.
    const auto write = [&](lane_mask_t tokens, auto value) {
        constexpr int VECS = TOKENS * COLUMNS / OUT_VEC, AT_A_TIME = 4;
        for (int first = threadIdx.x; first < VECS; first += AT_A_TIME * NUM_THREADS) {
            out_t* addresses[AT_A_TIME];
            float results[AT_A_TIME][OUT_VEC] = {};
#pragma unroll
            for (int v = 0; v < AT_A_TIME; ++v) {
                const int i = first + v * NUM_THREADS, token = i / (COLUMNS / OUT_VEC);
                const int column = i % (COLUMNS / OUT_VEC) * OUT_VEC;
                const bool exists = i < VECS && column < tile_columns && tokens >> token % TOKENS & 1;
                addresses[v] = exists ? out + (first_token + token) * out_stride + first_column + column : nullptr;
                if (ADDS && exists) Vec<out_t, OUT_VEC>::load(addresses[v]).to_floats(results[v]);
            }
#pragma unroll
            for (int v = 0; v < AT_A_TIME; ++v) {
                if (addresses[v] == nullptr) continue;
                const int i = first + v * NUM_THREADS;
#pragma unroll
                for (int j = 0; j < OUT_VEC; ++j) {
                    results[v][j] += value(i / (COLUMNS / OUT_VEC), i % (COLUMNS / OUT_VEC) * OUT_VEC + j);
                }
                Vec<out_t, OUT_VEC>::from_floats(results[v]).store(addresses[v]);
            }
        }
    };
    if constexpr (CLEARS) {
        const lane_mask_t without = ballot(has_token && !has_lora);
        if (blockIdx.y == 0) write(without, [](int, int) { return 0.0f; });
    }
    for (uint32_t ordinal = 0; leaders != 0; ++ordinal, leaders &= leaders - 1) {
        if (ordinal % gridDim.y != blockIdx.y) continue;
        const int64_t adapter = shfl<WARP_SIZE>(index, lowest_bit(leaders));
        const lane_mask_t tokens = ballot(has_lora && index == adapter);
        const scalar_t* tile = weight + adapter * lora_stride;
        float d[TILES_M][TILES_N][16 / PRODUCT_COLUMNS][PRODUCT_SUMS] = {};
        for (int first = k_warp * STEP; first < size; first += K_WARPS * STEP * BATCH) {
            Fragment a[BATCH][TILES_M], b[BATCH][TILES_N];
#pragma unroll
            for (int s = 0; s < BATCH; ++s) {
                const int k = first + s * K_WARPS * STEP + run_of(lane) * RUN;
#pragma unroll
                for (int i = 0; i < OPERAND_ROWS; ++i) {
#pragma unroll
                    for (int n = 0; n < TILES_N; ++n) {
                        const int column = column0 + n * 16 + column_of(lane) + i * 8;
                        b[s][n].load<VEC_SIZE>(i, tile + column * weight_stride, k, size, column < columns);
                    }
#pragma unroll
                    for (int m = 0; m < TILES_M; ++m) {
                        const int token = m * 16 + token_of(lane) + i * 8;
                        a[s][m].load<INPUT_VEC>(i, x + (first_token + token) * x_stride, k, size, tokens >> token & 1);
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
        __syncthreads();  // the accumulators of the previous adapter have been read
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
            for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
                for (int i = 0; i < 16 / PRODUCT_COLUMNS * PRODUCT_SUMS; ++i) {
                    const int half = i / PRODUCT_SUMS, sum = i % PRODUCT_SUMS;
                    const int token = m * 16 + lane_row(lane) + sum / ROW_SUMS * ROW_STEP;
                    const int column = n * 16 + half * PRODUCT_COLUMNS + lane_column(lane) + sum % ROW_SUMS;
                    partial[k_warp][token][n_warp * WARP_COLUMNS + column] = d[m][n][half][sum];
                }
            }
        }
        __syncthreads();
        write(tokens, [&](int token, int column) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < K_WARPS; ++i) sum += partial[i][token][column];
            return sum * scale;
        });
    }
}
