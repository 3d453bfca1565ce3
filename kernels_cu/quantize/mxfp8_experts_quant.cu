// mxfp8_experts_quant: quantises rows, grouped by expert, to MXFP8: blocks of 32 adjacent e4m3 values with one
// power-of-two scale per block. Each expert has its own scale tiles.
//
//     expert e has the rows expert_offsets[e] + i, i < problem_sizes[e, 0], and scale tiles from row
//     blockscale_offsets[e] on
//     scale = the exponent, biased by 127, of the smallest power of two >= max |x| * (1/448), at most 254, NaN ignored
//     q = e4m3(x * 2^(127 - scale)), saturating; NaN stays NaN
//
// An expert is skipped if any of its rows does not exist, or if its tiles do not all fit in scale_factor.
//
// A CTA handles one scale tile, 128 rows and 4 columns: blockIdx.x numbers the row tiles through all experts,
// blockIdx.y is the tile column. A thread handles one column, in four rows of stride 32; four adjacent threads take the
// columns of a row.
//
// Constants:
//     ACCESS        elements of input in one memory access, at most 8
//     CODE_ACCESS   bytes of quant_output in one memory access, at most 16

#include "fp4_experts.cuh"
#include "fp4_input.cuh"
#include "mx_scales.cuh"

constexpr int MX_PARTS = 2;  // blocks of sixteen values per scale

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
mxfp8_experts_quant(const scalar_t* input,              // [num_rows, blocks * 32]
                    const int32_t* problem_sizes,       // [num_experts, 3]
                    const int32_t* expert_offsets,      // [num_experts]
                    const int32_t* blockscale_offsets,  // [num_experts]
                    fp8_e4m3_t* quant_output,           // [num_rows, blocks * 32]
                    uint8_t* scale_factor,              // [scale_rows, columns], in tiles
                    int64_t num_rows, int64_t scale_rows, int64_t output_stride, int64_t input_stride, int blocks,
                    int columns, int num_experts) {
    await_previous_kernel();
    const Expert expert(SizedRows{expert_offsets, problem_sizes, num_rows}, blockscale_offsets, nullptr, num_experts,
                        blockIdx.x);
    const auto scale_at = [&](int64_t at, int column) {
        const int64_t first = int64_t(column) * (MX_PARTS * FP4_BLOCK);
        Fp4Block<scalar_t> parts[MX_PARTS];
        float largest = 0.0f;
#pragma unroll
        for (int part = 0; part < MX_PARTS; ++part) {
            Fp4Input<scalar_t, false, ACCESS> x;
            x.load(input + at * input_stride + first + part * FP4_BLOCK, blocks * MX_PARTS);
            parts[part] = x.block();
            largest = ieee_max(largest, parts[part].absmax());
        }
        const Mxfp8Scale of(largest);
#pragma unroll
        for (int part = 0; part < MX_PARTS; ++part) {
            float x[FP4_BLOCK];
#pragma unroll
            for (int j = 0; j < FP4_BLOCK; j += 2) {
                pair_of<scalar_t>(parts[part].words[j / 2], x[j], x[j + 1]);
                x[j] = ieee_multiply(x[j], of.factor);
                x[j + 1] = ieee_multiply(x[j + 1], of.factor);
            }
            Vec<fp8_e4m3_t, FP4_BLOCK>::from_floats(x).template store<CODE_ACCESS>(quant_output + at * output_stride +
                                                                                   first + part * FP4_BLOCK);
        }
        return of.exponent;
    };
    write_scale_tile<NUM_THREADS>(scale_factor, expert, scale_rows, blocks, columns, scale_at);
}
