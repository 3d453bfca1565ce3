// causal_conv1d.cuh: a depthwise causal convolution of channels, token after token.
//
//     y[t, d] = bias[d] + sum over k < WIDTH of weight[d, k] * x[t - (WIDTH - 1) + k, d]
//
// A thread has N adjacent channels and walks along the tokens. It holds the taps of its channels and their window,
// the last WIDTH - 1 inputs, the newest last. Between calls, a slot of a cache keeps the window of a sequence.

#pragma once
#include "math.cuh"

DEVICE int64_t clamp(int64_t value, int64_t highest) { return min(max(value, int64_t(0)), highest); }

// The slots of a sequence: a row of cache_indices, or without HAS_INDICES the number of the sequence.
template <typename Index, bool HAS_INDICES>
struct Slots {
    const Index* row;
    int64_t sequence, max_columns, num_slots, pad_slot_id;

    // The slot in a column; -1 if the column or the slot does not exist, or the slot is pad_slot_id.
    DEVICE int64_t at(int64_t column) const {
        if (column < 0 || column >= max_columns) return -1;
        const int64_t slot = HAS_INDICES ? int64_t(row[column]) : sequence;
        return slot < 0 || slot >= num_slots || slot == pad_slot_id ? -1 : slot;
    }
};

template <int WIDTH, int N>
struct Window {
    static constexpr int SIZE = WIDTH - 1;
    float inputs[SIZE][N] = {};

    // Appends an input; the oldest one leaves.
    DEVICE void push(const float (&x)[N]) {
#pragma unroll
        for (int k = 0; k < SIZE; ++k) {
#pragma unroll
            for (int j = 0; j < N; ++j) inputs[k][j] = k + 1 < SIZE ? inputs[k + 1][j] : x[j];
        }
    }

    // Loads the inputs k for which exists(k), from row k of `rows`, with row stride `stride` in elements.
    template <typename T, typename Exists>
    DEVICE void load(const T* rows, int64_t stride, Exists exists) {
#pragma unroll
        for (int k = 0; k < SIZE; ++k) {
            if (exists(k)) Vec<T, N>::load(rows + k * stride).to_floats(inputs[k]);
        }
    }

    // Stores the inputs from number `first` on to rows 0, 1, ... of `rows`.
    template <typename T>
    DEVICE void store(T* rows, int64_t stride, int first = 0) const {
#pragma unroll
        for (int k = 0; k < SIZE; ++k) {
            if (k >= first) Vec<T, N>::from_floats(inputs[k]).store(rows + (k - first) * stride);
        }
    }
};

// The taps of N channels. Weights are loaded ACCESS elements at a time.
template <int WIDTH, int N>
struct Taps {
    float weight[N * WIDTH];
    float bias[N] = {};

    template <int ACCESS, bool HAS_BIAS, typename W>
    static DEVICE Taps load(const W* weights, const W* biases, int64_t channel) {
        Taps taps;
        load_floats<ACCESS>(weights + channel * WIDTH, taps.weight);
        if constexpr (HAS_BIAS) {
#pragma unroll
            for (int j = 0; j < N; ++j) taps.bias[j] = to_float(biases[channel + j]);
        }
        return taps;
    }
    DEVICE float at(int channel, int tap) const { return weight[channel * WIDTH + tap]; }
};

// y or, with SILU, y * sigmoid(y), good enough for a result that is rounded to T.
template <bool SILU, typename T>
DEVICE float activated(float y) {
    return SILU ? logistic<T>(y, y) : y;
}

// Walks along `count` inputs of type T: load(i) loads input i, and done(i, input, y) takes its result, when the window
// ends with the input. Each is called for i = 0, 1, ... in order. BATCH inputs are loaded together, before the results
// of the batch before are computed.
template <int BATCH, bool SILU, typename T, int WIDTH, int N, typename Load, typename Done>
DEVICE void convolve(Window<WIDTH, N>& window, const Taps<WIDTH, N>& taps, int count, Load load, Done done) {
    using vec_t = Vec<T, N>;
    const auto load_batch = [&](vec_t(&batch)[BATCH], int first, int exist) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (b < exist) batch[b] = load(first + b);
        }
    };
    const auto convolve_batch = [&](const vec_t(&batch)[BATCH], int first, int exist) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (b >= exist) break;
            float x[N], y[N];
            batch[b].to_floats(x);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                float sum = taps.bias[j];
#pragma unroll
                for (int k = 0; k + 1 < WIDTH; ++k) sum = fmaf(taps.at(j, k), window.inputs[k][j], sum);
                y[j] = activated<SILU, T>(fmaf(taps.at(j, WIDTH - 1), x[j], sum));
            }
            window.push(x);
            done(first + b, batch[b], vec_t::from_floats(y));
        }
    };
    vec_t batch[BATCH];
    int first = 0;
    if (count >= BATCH) load_batch(batch, 0, BATCH);
    for (; first + BATCH <= count; first += BATCH) {  // whole batches: nothing is compared
        vec_t next[BATCH];
        if (first + 2 * BATCH <= count) load_batch(next, first + BATCH, BATCH);
        convolve_batch(batch, first, BATCH);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) batch[b] = next[b];
    }
    if (first == count) return;
    load_batch(batch, first, count - first);
    convolve_batch(batch, first, count - first);
}
