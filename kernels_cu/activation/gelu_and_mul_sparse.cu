// gelu_and_mul_sparse: GELU of the part of each gate that exceeds a quantile of its row, times the other half.
//
//     c = T(T(mean(g)) + T(T(std(g)) * multiplier))    over the row, std of the population; T: dtype of out and input
//     out[r, i] = T(T(ACT(max(T(g - c), 0))) * u)      g, u = input[r, i], input[r, HIDDEN_SIZE + i]
//
// ROW_THREADS threads share a row and hold it in registers. mean and std are summed in double: a float32 sum depends on
// its order, so that rounding to T could go either way, and with it every result just above c.
//
// Constants:
//     ACT           activation of math.cuh: gelu or gelu_tanh

#include "math.cuh"
#include "reduce.cuh"
#include "row.cuh"

// Registers per thread for the gate half, or for the other half. A half that takes too many is read again at every use.
constexpr int REGISTERS = ceil_div(HIDDEN_SIZE / VEC_SIZE, ROW_THREADS) * ceil_div(VEC_SIZE * int(sizeof(scalar_t)), 4);
using gate_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, REGISTERS <= 32>;
using up_t = Row<scalar_t, HIDDEN_SIZE, VEC_SIZE, ROW_THREADS, REGISTERS <= 16 && NUM_THREADS <= 256>;
using vec_t = gate_t::vec_t;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
gelu_and_mul_sparse(scalar_t* out,          // [num_rows, HIDDEN_SIZE]
                    const scalar_t* input,  // [num_rows, 2 * HIDDEN_SIZE]
                    int64_t num_rows, int64_t out_stride, int64_t input_stride, float multiplier) {
    await_previous_kernel();
    __shared__ double partial[2][NUM_THREADS / WARP_SIZE];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows);
    const scalar_t* gate = input + at.row * input_stride;
    const scalar_t* up = gate + HIDDEN_SIZE;
    const gate_t g = gate_t::load_once(gate, at.active);
    const up_t u = up_t::load_once(up, at.active);

    double sum = 0.0, squares = 0.0;
    g.for_each([&](int i, int column) {
        float x[VEC_SIZE];
        g.get(i, column).to_floats(x);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            const double value = x[j];
            sum += value;
            squares += value * value;
        }
    });
    const double mean = row_reduce<Sum, ROW_THREADS>(sum, partial[0]) / HIDDEN_SIZE;
    const double variance = row_reduce<Sum, ROW_THREADS>(squares, partial[1]) / HIDDEN_SIZE - mean * mean;
    const double deviation = sqrt(variance < 0.0 ? 0.0 : variance);
    const float offset = round_to<scalar_t>(ieee_multiply(round_to<scalar_t>(float(deviation)), multiplier));
    const float cutoff = round_to<scalar_t>(round_to<scalar_t>(float(mean)) + offset);
    if (!at.active) return;

    out += at.row * out_stride;
    g.for_each([&](int i, int column) {
        const vec_t above_cutoff = relu(g.get(i, column) + vec_t::full(-cutoff));
        (ACT(above_cutoff) * u.get(i, column)).store(out + column);
    });
}
