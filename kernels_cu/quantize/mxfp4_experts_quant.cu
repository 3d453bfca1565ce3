// mxfp4_experts_quant: quantises rows, grouped by expert, to MXFP4: blocks of 32 adjacent e2m1 values with one
// power-of-two scale per block. Each expert has its own scale tiles.
//
//     o = input_offset_by_experts, t = output_scale_offset_by_experts
//     expert e has the rows o[e] to o[e + 1] - 1, and scale tiles from row t[e] on
//     scale = the exponent's bits of max |x| * (1/6), NaN ignored
//     q = e2m1(x * r),   r = 2^(127 - scale), or 0 if scale is 0 or 255
//     GATED: x is T(silu(gate) * up), rounded once; gate, up = input[r, i], input[r, hidden_size + i]; T its dtype
//
// From the first invalid offset on (below 0, below the one before, or beyond the rows), experts are skipped. An expert
// is also skipped if its tiles do not all fit in output_scale.
//
// A CTA handles one scale tile, 128 rows and 4 columns: blockIdx.x numbers the row tiles through all experts,
// blockIdx.y is the tile column. A thread handles one column, in four rows of stride 32; four adjacent threads take the
// columns of a row.
//
// Constants:
//     GATED         input has two halves, gate and up
//     ACCESS        elements of input in one memory access, at most 8
//     CODE_ACCESS   bytes of output in one memory access, at most 8

#include "fp4_experts.cuh"
#include "fp4_input.cuh"
#include "mx_scales.cuh"

constexpr int MX_PARTS = 2;  // blocks of sixteen values per scale

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
mxfp4_experts_quant(uint8_t* output,                                // [num_rows, blocks * 16]
                    uint8_t* output_scale,                          // [scale_rows, columns], in tiles
                    const scalar_t* input,                          // [num_rows, (1 or 2) * blocks * 32]
                    const int32_t* input_offset_by_experts,         // [num_experts + 1]
                    const int32_t* output_scale_offset_by_experts,  // [num_experts + 1]
                    int64_t num_rows, int64_t scale_rows, int64_t output_stride, int64_t input_stride, int blocks,
                    int columns, int num_experts) {
    await_previous_kernel();
    const Expert expert(FollowingRows{input_offset_by_experts, num_rows}, output_scale_offset_by_experts, nullptr,
                        num_experts, blockIdx.x);
    const auto scale_at = [&](int64_t at, int column) {
        Fp4Block<scalar_t> parts[MX_PARTS];
        float largest = 0.0f;
#pragma unroll
        for (int part = 0; part < MX_PARTS; ++part) {
            Fp4Input<scalar_t, GATED, ACCESS> x;
            x.load(input + at * input_stride + (int64_t(column) * MX_PARTS + part) * FP4_BLOCK, blocks * MX_PARTS);
            parts[part] = x.block();
            largest = ieee_max(largest, parts[part].absmax());
        }
        const Mxfp4Scale of(largest);
#pragma unroll
        for (int part = 0; part < MX_PARTS; ++part) {
            parts[part].template quantized<false>(of.factor).template store<CODE_ACCESS>(
                output + at * output_stride + (int64_t(column) * MX_PARTS + part) * (FP4_BLOCK / 2));
        }
        return of.exponent;
    };
    write_scale_tile<NUM_THREADS>(output_scale, expert, scale_rows, blocks, columns, scale_at);
}
