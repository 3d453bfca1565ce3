// mqa_logits_simt: mqa_logits without tensor cores. It serves any head size, keys of any alignment, and wavefronts of
// 64 lanes.
//
// Grid: as mqa_logits, with tiles of NUM_WARPS keys. A warp takes a key; its lanes share the elements of a head.
//
// Constants: as mqa_logits, and
//     NUM_WARPS    warps (of 32 lanes) of a CTA

#include "mqa_logits.cuh"
#include "reduce.cuh"

constexpr int WARPS = NUM_WARPS * 32 / WARP_SIZE, LANE_ELEMENTS = ceil_div(HEAD_SIZE, WARP_SIZE);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_WARPS * 32, 1)
mqa_logits_simt(float* logits,                 // [num_rows, columns]
                const fp8_e4m3_t* q,           // [num_rows, NUM_HEADS, HEAD_SIZE]
                const float* weights,          // [num_rows, NUM_HEADS]
                const fp8_e4m3_t* k,           // as in mqa_logits.cuh, and so are the others
                const float* k_scales,         //
                const uint8_t* kv_cache,       //
                const table_t* block_tables,   // [num_rows / group_rows, max_blocks]
                const int32_t* cu_seqlen_ks,   //
                const int32_t* cu_seqlen_ke,   //
                const length_t* context_lens,  //
                int64_t num_rows, int64_t group_rows, int64_t columns, int64_t num_keys, int64_t num_blocks,
                int64_t logits_stride, int64_t q_stride, int64_t weights_stride, int64_t key_stride,
                int64_t block_stride, int64_t table_stride, int64_t table_step, int64_t length_step) {
    await_previous_kernel();
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int64_t first_row = blockIdx.x * group_rows;
    const int end_row = int(min(group_rows, num_rows - first_row));
    const LogitRows rows{cu_seqlen_ks, cu_seqlen_ke, context_lens, blockIdx.x, first_row,
                         group_rows,   length_step,  num_keys,     columns};
    const Keys keys{k,          k_scales,     kv_cache,  block_tables + blockIdx.x * table_stride, num_keys, key_stride,
                    num_blocks, block_stride, table_step};
    const int positions = int(CLEAN ? max(columns, num_keys) : num_keys);
    for (int n = blockIdx.y * WARPS + warp; n < positions; n += gridDim.y * WARPS) {
        const Key key = keys.at(n);
        const float scale = key.load_scale();
        float x[LANE_ELEMENTS];
#pragma unroll
        for (int i = 0; i < LANE_ELEMENTS; ++i) {
            const int element = i * WARP_SIZE + lane;
            x[i] = key.values && element < HEAD_SIZE ? to_float(key.values[element]) : 0.0f;
        }
        for (int i = 0; i < end_row; ++i) {
            const LogitRow of_row = rows.at(i);
            const int64_t row = first_row + i;
            float total = 0.0f;
            for (int head = 0; head < NUM_HEADS && key.values && of_row.overlaps(n, 1); ++head) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < LANE_ELEMENTS; ++i) {
                    const int element = i * WARP_SIZE + lane;
                    if (element < HEAD_SIZE) {
                        sum = fmaf(x[i], to_float(q[row * q_stride + head * HEAD_SIZE + element]), sum);
                    }
                }
                sum = lane_reduce<Sum, WARP_SIZE>(sum);
                total = fmaf(weights[row * weights_stride + head], fmaxf(sum, 0.0f), total);
            }
            if (lane == 0) {
                rows.write(logits + row * logits_stride, of_row, n, key.values ? scale * total : minus_infinity());
            }
        }
    }
}
