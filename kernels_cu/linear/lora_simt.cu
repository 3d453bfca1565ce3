// lora_simt: rows of x times the transposed weights of each row's LoRA adapter, without tensor cores.
//
//     out[t, n] = out_t(scale * sum_k T(x[t, k]) * weight[indices[t], n, k] + (ADDS ? out[t, n] : 0)), in float32
//
// for each slice, with a weight and columns of out of its own, and with x of its own unless x_slice_stride is 0. A
// token with an index outside of [0, num_loras) has no adapter: its row becomes zeros if CLEARS, else it stays.
//
// A CTA has one token and columns of one slice. ROW_THREADS adjacent threads share ROWS rows of the weight, so that a
// thread has several loads in flight even if rows are short. The kernel is for few tokens, which spread over more CTAs
// here than by lora_mma, and for element types that MMAs do not take.
//
// Constants:
//     input_t, out_t    element types of x and out
//     index_t           element type of indices
//     VEC_SIZE          elements of an access to weight
//     INPUT_VEC         elements of an access to x; divides VEC_SIZE
//     ROWS              rows of the weight that a thread takes part in
//     BATCH             vectors of a row, and of x, that a thread loads at a time
//     NUM_SLICES        slices of the layer, 1 to 4
//     SLICE_STEP        padded columns of a slice are a multiple of it
//     HAS_ORDER         order and num_tokens_per_lora are given
//     ADDS              add to out
//     CLEARS            write zeros for tokens without an adapter
//
// lora_simt_experts: the same for pairs of a token and an expert, a CTA for each slot of the lists; see lora_mma.cu.

#include "lora_experts.cuh"
#include "lora_slices.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int STEP = ROW_THREADS * VEC_SIZE, GROUPS = NUM_THREADS / ROW_THREADS, COLUMNS = GROUPS * ROWS;
static_assert(COLUMNS == SLICE_STEP);

// Multiplies row `x_row` of x by its weight and by `factor`, and writes it.
DEVICE void
multiply_row(const LoraRow& mine, int64_t x_row, float factor, const Slices::Column& at, out_t* out, const input_t* x,
             int size, int64_t out_stride, int64_t out_slice_stride, int64_t x_stride, int64_t x_slice_stride) {
    const int lane = int(threadIdx.x) % ROW_THREADS, column = at.column + int(threadIdx.x) / ROW_THREADS;
    const bool has_lora = mine.weight >= 0;
    const auto writes = [&](int row) {
        return lane == row % ROW_THREADS && column + row * GROUPS < at.columns && (has_lora || CLEARS);
    };
    out_t* address = out + mine.row * out_stride + at.slice * out_slice_stride + at.before + column;
    float dots[ROWS] = {}, before[ROWS] = {};
    if constexpr (ADDS) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            if (writes(row)) before[row] = to_float(address[row * GROUPS]);
        }
    }
    const scalar_t* first = at.weight + ((has_lora ? int64_t(mine.weight) : 0) * at.columns + column) * int64_t(size);
    const input_t* x_elements = x + x_row * x_stride + at.slice * x_slice_stride;
    for (int start = lane * VEC_SIZE; start < (has_lora ? size : 0); start += BATCH * STEP) {
        // Instead of a vector or a column that does not exist, the first one is read.
        vec_t w[BATCH][ROWS];
        Vec<input_t, INPUT_VEC> given[BATCH][VEC_SIZE / INPUT_VEC];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int k = start + b * STEP < size ? start + b * STEP : 0;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const int step = column + row * GROUPS < at.columns ? row * GROUPS : -column;
                w[b][row] = vec_t::load(first + int64_t(step) * size + k);
            }
#pragma unroll
            for (int v = 0; v < VEC_SIZE / INPUT_VEC; ++v) {
                given[b][v] = Vec<input_t, INPUT_VEC>::load(x_elements + k + v * INPUT_VEC);
            }
        }
        keep_loads();
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (start + b * STEP >= size) continue;
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
                float element = given[b][i / INPUT_VEC][i % INPUT_VEC];
                if constexpr (!is_same<input_t, scalar_t>) element = round_to<scalar_t>(element);
#pragma unroll
                for (int row = 0; row < ROWS; ++row) dots[row] = fmaf(w[b][row][i], element, dots[row]);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const float sum = lane_reduce<Sum, ROW_THREADS>(dots[row]) * factor + before[row];
        if (writes(row)) address[row * GROUPS] = from_float<out_t>(sum);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
lora_simt(out_t* out,                          // [num_tokens, columns] of each slice
          const input_t* x,                    // [num_tokens, size], of each slice if x_slice_stride is not 0
          const scalar_t* weight,              // [num_loras, columns, size]
          const scalar_t* weight1,             // [num_loras, columns1, size]
          const scalar_t* weight2,             // [num_loras, columns2, size]
          const scalar_t* weight3,             // [num_loras, columns3, size]
          const index_t* indices,              // [num_tokens]
          const index_t* num_tokens_per_lora,  // [num_counts]
          int64_t num_tokens, int num_loras, int num_counts, int columns, int columns1, int columns2, int columns3,
          int size, int64_t out_stride, int64_t out_slice_stride, int64_t x_stride, int64_t x_slice_stride,
          float scale) {
    await_previous_kernel();
    const Slices slices = {{weight, weight1, weight2, weight3}, {columns, columns1, columns2, columns3}};
    const int column_tiles = slices.tiles<COLUMNS>();
    const int64_t token = int64_t(blockIdx.x) / column_tiles;
    const Slices::Column at = slices.at(int(blockIdx.x % column_tiles) * COLUMNS);
    int64_t index = int64_t(indices[token]);
    if (HAS_ORDER && token >= num_ordered(num_tokens_per_lora, num_counts, num_tokens)) index = -1;
    const bool has_lora = index >= 0 && index < num_loras;
    multiply_row({token, has_lora ? int(index) : -1, true}, token, scale, at, out, x, size, out_stride,
                 out_slice_stride, x_stride, x_slice_stride);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
lora_simt_experts(out_t* out,                         // [num_pairs, columns] of each slice
                  const input_t* x,                   // [num_pairs / x_top_k, size], likewise if x_slice_stride != 0
                  const scalar_t* weight,             // [max_loras * num_experts, columns, size]
                  const scalar_t* weight1,            // [max_loras * num_experts, columns1, size]
                  const scalar_t* weight2,            // [max_loras * num_experts, columns2, size]
                  const scalar_t* weight3,            // [max_loras * num_experts, columns3, size]
                  const index_t* expert_ids,          // [max_loras, num_blocks]; [num_pairs] unless SORTED
                  const int32_t* adapter_enabled,     // [max_loras]
                  const int32_t* token_lora_mapping,  // [num_pairs / top_k]
                  const int32_t* sorted_token_ids,    // [max_loras, num_slots]
                  const int32_t* num_tokens_post_padded,  // [max_loras]
                  const int32_t* lora_ids,                // [num_lora_ids]
                  const factor_t* topk_weights,           // [num_pairs]
                  int64_t num_pairs, int top_k, int x_top_k, int max_loras, int num_experts, int num_slots,
                  int num_blocks, int block_size, int num_lora_ids, int columns, int columns1, int columns2,
                  int columns3, int size, int64_t out_stride, int64_t out_slice_stride, int64_t x_stride,
                  int64_t x_slice_stride) {
    await_previous_kernel();
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
    const int column_tiles = slices.tiles<COLUMNS>();
    const auto tile = lists.template tile<1>(int(blockIdx.x) / column_tiles);
    if (int(blockIdx.x) / column_tiles >= tile.count) return;
    const LoraRow mine = lists.template row<1>(tile, 0);
    if (mine.weight < 0) return;  // all threads of the CTA
    const float factor = HAS_FACTORS ? to_float(topk_weights[mine.row]) : 1.0f;
    const Slices::Column at = slices.at(int(blockIdx.x) % column_tiles * COLUMNS);
    multiply_row(mine, mine.row / x_top_k, factor, at, out, x, size, out_stride, out_slice_stride, x_stride,
                 x_slice_stride);
}
