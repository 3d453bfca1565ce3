// gemv: a linear layer for decode (small M), bound by the bandwidth of reading the weight.
//
//     out[t, n] = T(f(sum_k x[t, k] * weight[n, k] + bias[n])), summed in float32    T: dtype of all tensors but input
//     GATED: out[t, n] = T(f(gate) * up), with row n of the weight for the gate and row output_size + n for the up
//     x = input; NORMALISED: x[t, k] = T(T(input[t, k] / sqrt(mean_k(input[t, k]^2) + epsilon)) * norm_weight[k])
//
// Warps multiply as gemv_rows.cuh says. blockIdx.y counts groups of TOKENS tokens; blocks along x stride over the rows
// of out together. While the previous kernel still runs, each warp prefetches its first chunk: to L2, or to registers
// if the caller promises that no kernel before this one writes the weight. Each block normalises its token itself.
//
// Constants:
//     TOKENS, SPLIT, BATCH    of gemv_rows.cuh
//     input_t       element type of input
//     HAS_BIAS      false when bias is null
//     ACTIVATION    f, a function of gemm_activation.cuh
//     GATED         whether the weight has two rows for each column of out
//     NORMALISED    whether the input is normalised; TOKENS is 1 then

#include "gemm_activation.cuh"
#include "gemv_norm.cuh"

constexpr int OUT_ROWS = GATED ? 2 : 1;  // rows of the weight for each column of out

// The row of the weight that is row i of the warp. Rows out of range are clamped; their results are not used.
DEVICE int64_t weight_row(int i, int64_t output_size) {
    return loaded_column<OUT_ROWS>(i, output_size) + i % OUT_ROWS * output_size;
}

// The first chunk, before the previous kernel has ended: in `w` if the weight is constant, else in L2.
DEVICE void prefetch_chunk(raw_t (&w)[BATCH], const scalar_t* weight, int64_t output_size, int64_t stride) {
    const scalar_t* row = weight + weight_row(0, output_size) * stride;
    if constexpr (CONSTANT_WEIGHT) {
        load_chunk(w, row, 0);
    } else {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (exists(0, b)) prefetch_line(row + int64_t(vector_of(0, b)) * VEC_SIZE);
        }
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gemv(scalar_t* out,                // [num_tokens, output_size]
     const input_t* input,         // [num_tokens, HIDDEN_SIZE]
     const scalar_t* weight,       // [output_size, HIDDEN_SIZE], or [2 * output_size, HIDDEN_SIZE]
     const scalar_t* bias,         // an element for each row of weight
     const scalar_t* norm_weight,  // [HIDDEN_SIZE]
     const scalar_t* prefetched,   // [rows, columns], read by a later kernel
     int64_t num_tokens, int64_t output_size, int64_t out_stride, int64_t input_stride, int64_t weight_stride,
     int num_lines, int row_lines, int64_t prefetched_stride, float epsilon) {
    raw_t next[BATCH];
    prefetch_chunk(next, weight, output_size, weight_stride);
    prefetch_rows(prefetched, num_lines, row_lines, prefetched_stride);
    if constexpr (NORMALISED) prefetch_part(norm_weight, HIDDEN_SIZE - 1, threadIdx.x);
    const int num_rows = count_rows<OUT_ROWS>(output_size);
    await_previous_kernel();
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int64_t first_token = int64_t(blockIdx.y) * TOKENS;
    if (num_rows == 0) return;

    const auto row = [&](int i) { return weight + weight_row(i, output_size) * weight_stride; };
    const auto term = [&](int i) {
        return HAS_BIAS && i < num_rows ? bias[weight_row(i, output_size)] : from_float<scalar_t>(0.0f);
    };
    if constexpr (!CONSTANT_WEIGHT) load_chunk(next, row(0), 0);
    scalar_t next_term = term(0);  // loaded a row ahead, as the weight is, and not waited for: it is no float yet
    float gates[TOKENS];
    const auto done = [&](int i, float (&acc)[TOKENS]) {
        if constexpr (HAS_BIAS) {
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) acc[t] += to_float(next_term);
            next_term = term(i + 1);
        }
        if (GATED && i % OUT_ROWS == 0) {
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) gates[t] = acc[t];
            return;
        }
        const int64_t column = column_of<OUT_ROWS>(i);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            if (lane == t && warp % SPLIT == 0 && column < output_size && first_token + t < num_tokens) {
                float x = ACTIVATION<scalar_t>(GATED ? gates[t] : acc[t]);
                if constexpr (GATED) x *= acc[t];
                out[(first_token + t) * out_stride + column] = from_float<scalar_t>(x);
            }
        }
    };
    if constexpr (NORMALISED) {
        __shared__ vec_t normalised[VECS];
        scalar_t* x = reinterpret_cast<scalar_t*>(normalised);
        const auto* given = reinterpret_cast<const scalar_t*>(input + first_token * input_stride);  // of that type
        normalise(x, given, norm_weight, epsilon);
        multiply_rows(next, num_rows, row, [&](int, int) { return x; }, done);
    } else {
        const auto token = [&](int, int t) {
            const int64_t given = TOKENS == 1 || first_token + t < num_tokens ? first_token + t : num_tokens - 1;
            return input + given * input_stride;
        };
        multiply_rows(next, num_rows, row, token, done);
    }
}
