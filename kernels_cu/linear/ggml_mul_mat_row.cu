// ggml_mul_mat_row: a GEMV with a GGUF-quantized weight by int8 mma.sync, one row of X per block: sm_80 and later.
//
//     out[m, n] = T(sum over groups g of K of
//                   scale[n, g] * (sum over k in g of (quant[n, k] - OFFSET) * X[m, k])
//                   - minimum[n, g] * (sum over k in g of X[m, k]))                      T: dtype of X and out
//
// The MMA operands are the quants and the int8 digits of X (int8_split.cuh). Accumulators over a group are int32,
// exact; sums over groups are float32.
//
// Blocks: a block takes 16 rows of W (columns of out) and one row of X. A k-tile is K_WARPS units of 256 elements, and
// each warp takes one unit. The GGUF blocks come to shared memory unchanged, STAGES k-tiles at a time. Each thread
// splits eight elements of X per k-tile into digits: for the first two k-tiles while the weight is in flight, then for
// the next k-tile before the MMAs of the current one. While the previous kernel still runs, the block prefetches the
// GGUF blocks of its first k-tile to L2.
//
// Fragments: K of an MMA is 16 elements of the first half of a unit and 16 of the second half; lane t of a row holds
// four adjacent elements of each. Columns 0, 1 and 3 of B are digits 0, 1 and 2 of X in the first half, and zeros in
// the second half; columns 4, 5 and 7 are the digits in the second half. So lanes 0 and 1 accumulate a group of the
// first half, and lanes 2 and 3 a group of the second half, for rows g and g + 8: the even lane the upper two digits,
// the odd lane the last digit. The two lanes exchange one row each: lane t ends up with row g + t % 2 * 8 alone, and
// loads only the scales of that row.
//
// ggml_rows.cuh maps blocks to rows of X, out and W.
//
// Constants
//     CHOICES       how rows map to experts (ggml_rows.cuh): 0 or 1
//     index_t       element type of ids
//     FORMAT        the GGUF type, a struct of ggml.cuh
//     WHOLE         whether K is a multiple of a unit
//     TOKENS        rows of X of a block: 1
//     K_WARPS       warps, along K
//     STAGES        k-tiles of the weight in shared memory
//     ACCESS        bytes of one access to W
//     X_ACCESS      elements of one access to X

#include "int8_split.cuh"
#include "ggml_rows.cuh"
#include "ggml_tile.cuh"
#include "mma.cuh"

constexpr int NUM_THREADS = K_WARPS * 32, ROWS = 16, STEP = K_WARPS * UNIT;
constexpr int GRID_BYTES = bytes_of_grid(FORMAT::GRID_SIZE), GROUP = FORMAT::GROUP, LENGTH = FORMAT::LENGTH;
constexpr int GROUPS = UNIT / GROUP, SETS = GROUPS / 2;  // groups of a unit; set i is groups i and SETS + i
// Quants of up to 255 become signed bytes when their OFFSET, 128, is subtracted.
constexpr bool IS_SIGNED = FORMAT::OFFSET == 128;
constexpr int OFFSET = IS_SIGNED ? 0 : FORMAT::OFFSET;
using quant_t = conditional_t<IS_SIGNED, int8_t, uint8_t>;
template <typename FORMAT_T>
DEVICE uint32_t bytes_of_quants(const uint8_t* block, uint32_t q, const uint16_t* grid) {
    if constexpr (FORMAT_T::ODD_FACTOR > 1) return FORMAT_T::quants_in_place(block, q, grid);
    else return FORMAT_T::quants(block, q, grid) ^ (IS_SIGNED ? 128 * ONES : 0);
}
using tile_t = RowTile<FORMAT, ROWS, K_WARPS, ACCESS>;
constexpr bool HAS_SUMS = FORMAT::HAS_MINIMUM || OFFSET != 0;
using digits_t = Digits<STEP, GROUP, HAS_SUMS>;
static_assert(TOKENS == 1);
constexpr int DIGIT_STAGES = 2, ZERO_BYTES = 128;

DEVICE void prefetch_weight(const uint8_t* W, int64_t n, int64_t row_bytes) {
    if constexpr (CHOICES == 0) {
        prefetch_rows<NUM_THREADS, ROWS, tile_t::PART>(W, first_row_of_block<ROWS>(n), n, row_bytes, 0);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
ggml_mul_mat_row(scalar_t* out,       // [M, N]
                 const uint8_t* W,    // [num_experts, N, row_bytes]
                 const scalar_t* X,   // [M / top_k, K]
                 const index_t* ids,  // CHOICES 1: [M]
                 int64_t m, int64_t n, int64_t k, int64_t row_bytes, int64_t out_stride, int64_t x_stride,
                 int64_t num_experts, int64_t top_k) {
    prefetch_weight(W, n, row_bytes);
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ float partial[K_WARPS][ROWS];
    uint8_t* const shared = reinterpret_cast<uint8_t*>(memory);
    const uint16_t* grid = reinterpret_cast<const uint16_t*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t first_row = first_row_of_block<ROWS>(n);
    const TokenRows<CHOICES, TOKENS, index_t> rows{ids, nullptr, blockIdx.x / row_tiles<ROWS>(n), m, top_k};
    const int64_t expert = rows.expert(num_experts), choice = rows.choice(0);
    const int units = expert < 0 ? 0 : int((k + UNIT - 1) / UNIT), steps = ceil_div(units, K_WARPS);
    W += expert < 0 ? 0 : expert * n * row_bytes;
    X += rows.row_of(choice) * x_stride;

    constexpr int STAGES_AT = GRID_BYTES + ZERO_BYTES, DIGITS_AT = STAGES_AT + STAGES * tile_t::SIZE;
    const auto stage_of = [&](int step) { return shared + STAGES_AT + step % STAGES * tile_t::SIZE; };
    const auto digits_at = [&](int step) { return DIGITS_AT + step % DIGIT_STAGES * digits_t::SIZE; };
    const auto load = [&](int step) {
        if (step < steps) {
            const int64_t unit = int64_t(step) * K_WARPS;
            tile_t::at(stage_of(step), unit).copy<NUM_THREADS>(W, first_row, n, row_bytes, unit);
        }
        cp_async_commit();
    };
    // Loads this thread's elements of X in k-tile `step`, zeros past the end of the row; store_digits splits them.
    using vec_t = Vec<scalar_t, 8>;
    const auto load_vec = [&](vec_t& vec, int step) {
        const int64_t first = int64_t(step) * STEP + threadIdx.x * 8;
        const scalar_t* const elements = first < k ? X + first : X;
        if constexpr (X_ACCESS > 1) {
#pragma unroll
            for (int i = 0; i < 8; i += X_ACCESS) {
                hold<X_ACCESS * 2>(reinterpret_cast<uint32_t*>(vec.data + i), elements + i, first < k);
            }
        } else {
            vec = first < k ? vec_t::template load<1>(elements) : vec_t{};
        }
    };
    const auto store_digits = [&](const vec_t& vec, int step) {
        digits_t{shared + digits_at(step)}.store(vec, threadIdx.x * 8);
    };

    vec_t vecs[DIGIT_STAGES];
#pragma unroll
    for (int step = 0; step < DIGIT_STAGES; ++step) load_vec(vecs[step], step);
    keep_loads();
    copy_grid<FORMAT, NUM_THREADS>(shared);
    for (int step = 0; step < STAGES; ++step) load(step);
    if (threadIdx.x < ZERO_BYTES / 4) reinterpret_cast<uint32_t*>(shared + GRID_BYTES)[threadIdx.x] = 0;
#pragma unroll
    for (int step = 0; step < DIGIT_STAGES; ++step) store_digits(vecs[step], step);
    load_vec(vecs[0], DIGIT_STAGES);

    const int column = g % 4, digit = min(column, 2), row = g + t % 2 * 8;
    const bool has_first = column != 2 && g < 4, has_second = column != 2 && g >= 4;  // else the lane reads zeros
    const bool is_first = t % 2 == 0;  // the lane keeps one of the first eight rows, and has the upper digits
    float sum = 0.0f;
    for (int step = 0; step < steps; ++step) {
        if (step > 0) {
            if (step - 1 + STAGES < steps) __syncthreads();  // all warps have read the stage
            load(step - 1 + STAGES);
        }
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        if (step > 0 && step + 1 < steps) {  // after the barrier no warp reads the previous k-tile's digits
            store_digits(vecs[0], step + 1);
            load_vec(vecs[0], step + 2);
        }
        const int unit = step * K_WARPS + warp;
        if (unit >= units) continue;
        // Groups of the unit that lie within the row.
        const int groups = WHOLE ? GROUPS : int(min(int64_t(GROUPS), (k - int64_t(unit) * UNIT) / GROUP));
        const tile_t tile = tile_t::at(stage_of(step), unit - warp);
        const digits_t digits{shared + digits_at(step)};
        const int at = digits_at(step) + digit * digits_t::PITCH + warp * UNIT + 4 * t;  // the lane's column of B
        const int first_at = has_first ? at : GRID_BYTES, second_at = has_second ? at + UNIT / 2 : GRID_BYTES;
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            if (!WHOLE && set >= groups) break;
            if constexpr (!WHOLE) sync_warp();  // mma.sync needs all lanes; some skipped the end of the previous set
            int32_t products[4] = {};
#pragma unroll
            for (int element = set * GROUP; element < (set + 1) * GROUP; element += 16) {
                const uint32_t b[2] = {*reinterpret_cast<const uint32_t*>(shared + first_at + element),
                                       *reinterpret_cast<const uint32_t*>(shared + second_at + element)};
                uint32_t a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int from = element + i / 2 * (UNIT / 2);
                    const bool exists = WHOLE || set + i / 2 * SETS < groups;
                    const uint8_t* const block = tile.block(i % 2 * 8 + g, warp, from);
                    a[i] = exists ? bytes_of_quants<FORMAT>(block, from % LENGTH / 4 + t, grid) : 0;
                }
                mma_m16n8k32<int8_t, quant_t>(products, a, b);
            }
            const int of_first = products[0] * 256 + products[1], of_second = products[2] * 256 + products[3];  // rows
            const float kept = float(is_first ? of_first : of_second);
            const float received = shfl_xor(float(is_first ? of_second : of_first), 1);
            float product = kept * (is_first ? 256.0f : 1.0f) + received * (is_first ? 1.0f : 256.0f);
            const int group = set + t / 2 * SETS;
            if (!WHOLE && group >= groups) continue;
            constexpr float FACTORS[2] = {1.0f, 1.0f / FORMAT::ODD_FACTOR};
            product *= digits.units()[warp * GROUPS + group] * FACTORS[set % 2];
            const float of_elements = HAS_SUMS ? digits.sums()[warp * GROUPS + group] : 0.0f;
            if constexpr (OFFSET != 0) product = fmaf(float(-OFFSET), of_elements, product);
            const uint8_t* const block = tile.block(row, warp, group * GROUP);
            sum = fmaf(FORMAT::scale(block, group * GROUP % LENGTH / GROUP), product, sum);
            if constexpr (FORMAT::HAS_MINIMUM) {
                sum = fmaf(-FORMAT::minimum(block, group * GROUP % LENGTH / GROUP), of_elements, sum);
            }
        }
    }

    sum += shfl_xor(sum, 2);
    if (t < 2) partial[warp][row] = sum;
    cp_async_wait<0>();
    __syncthreads();
    if (threadIdx.x >= ROWS || first_row + threadIdx.x >= n) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < K_WARPS; ++i) total += partial[i][threadIdx.x];
    out[choice * out_stride + first_row + threadIdx.x] = from_float<scalar_t>(total);
}
