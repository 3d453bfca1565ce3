// lora_simt: rows of x times the transposed weight of each row's LoRA adapter, without tensor cores.
//
//     out[t, n] = out_t(scale * sum_k T(x[t, k]) * weight[indices[t], n, k] + (ADDS ? out[t, n] : 0)), summed in float32
//
// A token with an index outside of [0, num_loras) has no adapter: its row becomes zeros if CLEARS, else it stays.
//
// A CTA has one token. ROW_THREADS adjacent threads share ROWS rows of the weight, so that a thread has several loads
// in flight even if rows are short. The kernel is for few tokens, which spread over more CTAs here than by lora_mma,
// and for element types that MMAs do not take.
//
// Constants:
//     input_t, out_t    element types of x and out
//     index_t           element type of indices
//     VEC_SIZE          elements of an access to weight
//     INPUT_VEC         elements of an access to x; divides VEC_SIZE
//     ROWS              rows of the weight that a thread takes part in
//     BATCH             vectors of a row that a thread loads at a time
//     ADDS              add to out
//     CLEARS            write zeros for tokens without an adapter

#include "reduce.cuh"
#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
lora_simt(out_t* out,              // [num_tokens, columns]
          const input_t* x,        // [num_tokens, size]
          const scalar_t* weight,  // [num_loras, columns, size]
          const index_t* indices,  // [num_tokens]
          int64_t num_loras, int columns, int size, int64_t out_stride, int64_t x_stride, int64_t lora_stride,
          int64_t weight_stride, float scale) {
    await_previous_kernel();
    constexpr int GROUPS = NUM_THREADS / ROW_THREADS, COLUMNS = GROUPS * ROWS;
    const int column_tiles = ceil_div(columns, COLUMNS), lane = int(threadIdx.x) % ROW_THREADS;
    const int64_t token = int64_t(blockIdx.x) / column_tiles;
    const int column = int(blockIdx.x % column_tiles) * COLUMNS + int(threadIdx.x) / ROW_THREADS;
    const int64_t index = int64_t(indices[token]);
    const bool has_lora = index >= 0 && index < num_loras;
    const auto writes = [&](int row) {
        return lane == row % ROW_THREADS && column + row * GROUPS < columns && (has_lora || CLEARS);
    };
    out_t* address = out + token * out_stride + column;
    float dots[ROWS] = {}, before[ROWS] = {};
    if constexpr (ADDS) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            if (writes(row)) before[row] = to_float(address[row * GROUPS]);
        }
    }
    const scalar_t* first = weight + (has_lora ? index : 0) * lora_stride + column * weight_stride;
    constexpr int STEP = ROW_THREADS * VEC_SIZE;
    for (int start = lane * VEC_SIZE; start < (has_lora ? size : 0); start += BATCH * STEP) {
        // Instead of a vector or a column that does not exist, the first one is read.
        vec_t w[BATCH][ROWS];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const int step = column + row * GROUPS < columns ? row * GROUPS : -column;
                w[b][row] =
                    vec_t::load(first + step * weight_stride + (start + b * STEP < size ? start + b * STEP : 0));
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (start + b * STEP >= size) continue;
            float given[VEC_SIZE];
            load_floats<INPUT_VEC>(x + token * x_stride + start + b * STEP, given);
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
                if constexpr (!is_same<input_t, scalar_t>) given[i] = round_to<scalar_t>(given[i]);
#pragma unroll
                for (int row = 0; row < ROWS; ++row) dots[row] = fmaf(w[b][row][i], given[i], dots[row]);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const float sum = lane_reduce<Sum, ROW_THREADS>(dots[row]) * scale + before[row];
        if (writes(row)) address[row * GROUPS] = from_float<out_t>(sum);
    }
}
