// softmax: probabilities of tokens, or their logarithms, from logits.
//
//     d = (x - max x) / t,  z = sum exp(d),  out = exp(d) / z, or d - log(z)    t = temperature[row]
//
// A block holds NUM_THREADS * BATCH vectors of a row in registers. Longer rows take a block per piece and two launches:
// the first writes max and sum of each piece, the second combines them and writes out. The second processes the rows
// last to first, because the caches still hold the last ones.
//
// Constants:
//     in_t, out_t       element types of logits and out
//     VEC_SIZE          elements in one memory access; divides vocab_size
//     BATCH             vectors per thread
//     PART              0: a block has the whole row; 1: the first launch of two, 2: the second
//     LOGARITHM         true: out = d - log(z)
//     HAS_TEMPERATURE   false when temperature is null

#include "reduce.cuh"
#include "vec.cuh"

// (x - base) / t for the logits x of a row. `base` is max x, or 0 if every x is -inf, because -inf - -inf is NaN. Where
// t > 1, the operands are scaled down first, because FLOAT_MAX - -FLOAT_MAX would overflow.
struct Distance {
    float inverse = 1.0f, shrink = 1.0f;

    DEVICE Distance(const float* temperature, int64_t row) {
        if constexpr (HAS_TEMPERATURE) {
            constexpr float MIN_NORMAL = 0x1p-126f;
            const float t = temperature[row] < MIN_NORMAL ? MIN_NORMAL : temperature[row];
            if (t > 1.0f) shrink = 0x1p-28f;
            inverse = ieee_divide(1.0f, t * shrink);
            // The inverse of an infinite t would be 0, and 0 * -inf is NaN. The smallest normal number replaces it:
            // times that number, a finite difference is below the rounding error of exp(0).
            if (inverse < MIN_NORMAL) inverse = MIN_NORMAL;
        }
    }
    DEVICE float base_of(float largest) const { return largest == minus_infinity() ? 0.0f : largest * shrink; }
    DEVICE float operator()(float x, float base) const { return (x * shrink - base) * inverse; }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 2)
softmax(out_t* out,                // [num_rows, vocab_size]
        const in_t* logits,        // [num_rows, vocab_size]
        const float* temperature,  // [num_rows]
        float* maxima,             // [num_rows, pieces]
        float* sums,               // [num_rows, pieces]
        int64_t vocab_size, int64_t pieces, int64_t out_stride, int64_t logits_stride) {
    await_previous_kernel();
    __shared__ float partial[2][NUM_THREADS / WARP_SIZE];
    const unsigned block = PART == 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int64_t row = block / unsigned(pieces);
    const int piece = int(block - unsigned(row) * unsigned(pieces));
    const Distance distance(temperature, row);
    logits += row * logits_stride;
    out += row * out_stride;
    const auto column = [&](int b) {
        return (int64_t(piece) * (NUM_THREADS * BATCH) + b * NUM_THREADS + threadIdx.x) * VEC_SIZE;
    };

    Vec<in_t, VEC_SIZE> x[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        if (column(b) < vocab_size) x[b] = Vec<in_t, VEC_SIZE>::load(logits + column(b));
        else x[b] = Vec<in_t, VEC_SIZE>::full(minus_infinity());
    }
    float largest = minus_infinity(), sum = 0.0f;
    if constexpr (PART == 2) {
        maxima += row * pieces;
        sums += row * pieces;
        for (int64_t i = threadIdx.x % WARP_SIZE; i < pieces; i += WARP_SIZE) largest = ieee_max(largest, maxima[i]);
        largest = lane_reduce<Max, WARP_SIZE>(largest);
        for (int64_t i = threadIdx.x % WARP_SIZE; i < pieces; i += WARP_SIZE) {
            sum += sums[i] * expf(distance(maxima[i], distance.base_of(largest)));
        }
        sum = lane_reduce<Sum, WARP_SIZE>(sum);
    } else {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) largest = ieee_max(largest, x[b][j]);
        }
        largest = row_reduce<Max, NUM_THREADS>(largest, partial[0]);
        const float base = distance.base_of(largest);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) sum += expf(distance(x[b][j], base));
        }
        sum = row_reduce<Sum, NUM_THREADS>(sum, partial[1]);
        if (PART == 1) {
            if (threadIdx.x == 0) {
                maxima[row * pieces + piece] = largest;
                sums[row * pieces + piece] = sum;
            }
            return;
        }
    }
    const float base = distance.base_of(largest);
    const float inverse_sum = 1.0f / sum, log_sum = logf(sum);
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        float y[VEC_SIZE];
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            const float d = distance(x[b][j], base);
            y[j] = LOGARITHM ? d - log_sum : expf(d) * inverse_sum;
        }
        if (column(b) < vocab_size) Vec<out_t, VEC_SIZE>::from_floats(y).store(out + column(b));
    }
}
