// fused_kda_decode: one token of Kimi Delta Attention for each sequence, from the projections to the norm of each head.
//
//     q, k, v = silu(bias + sum_w weight[w] * (conv_state, x)[w]),    conv_state <- the last WIDTH - 1 inputs
//     S <- exp(g) S;  S <- S + b (v - S k) (outer) k;  o = S q;  out = T(norm(o) * norm_weight * sigmoid(output_gate))
//
// with q and k divided by sqrt(their sum of squares + 1e-6), q times HEAD_SIZE^-0.5, and g and b by delta_gate.cuh.
// Everything is computed in float32 and rounded once (Kimi Team 2025, arXiv:2510.26692).
//
// Blocks: blockIdx.x counts sequences and heads. A block holds the state of a head in registers: LANES adjacent lanes
// share a row, and hold every LANES-th run of four columns of it. It loads the state before it convolves. A sequence
// with a slot out of range is skipped.
//
// Constants
//     scalar_t     T: element type of x, conv_state, output_gate and out
//     weight_t, g_t, beta_t, A_t, bias_t, norm_t, state_t, index_t    element types of weight and bias, raw_g, raw_beta,
//                  A_log, dt_bias, norm_weight, state and state_indices
//     HEAD_SIZE    elements of a head
//     WIDTH        taps of the convolution
//     LANES        lanes of a row, a power of two up to 32
//     STATE_VEC    columns of a state in one memory access: 4 or 1
//     HAS_NORM     output_gate and norm_weight are given; otherwise out = T(o)
//     HAS_GATE, BOUNDED, BETA_SIGMOID    of delta_gate.cuh

#include "delta_gate.cuh"
#include "gated_delta_norm.cuh"
#include "reduce.cuh"

constexpr int ROWS = NUM_THREADS / LANES, PASSES = ceil_div(HEAD_SIZE, ROWS);  // rows at a time, and their number
constexpr int RUNS = ceil_div(HEAD_SIZE, 4 * LANES);                           // runs of columns per lane
constexpr int COLUMNS = RUNS * 4 * LANES;  // columns, padded to whole runs of all lanes

// Divides a vector by the root of its sum of squares, and multiplies it by `factor`. A whole warp calls it.
DEVICE void normalize(float* vector, float factor) {
    const int lane = threadIdx.x % WARP_SIZE;
    float sum = 0.0f, scaled = 0.0f;
    for (int i = lane; i < HEAD_SIZE; i += WARP_SIZE) {
        sum = fmaf(vector[i], vector[i], sum);
        scaled = fmaf(vector[i] * DOWN, vector[i] * DOWN, scaled);
    }
    sum = lane_reduce<Sum, WARP_SIZE>(sum);
    scaled = lane_reduce<Sum, WARP_SIZE>(scaled);
    const bool is_large = sum > LARGE;
    factor *= inverse_root(is_large ? scaled : sum, is_large);
    for (int i = lane; i < HEAD_SIZE; i += WARP_SIZE) vector[i] = vector[i] * (is_large ? DOWN : 1.0f) * factor;
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
fused_kda_decode(scalar_t* out,                 // [num_seqs, num_heads, HEAD_SIZE]
                 state_t* state,                // [num_slots, num_heads, HEAD_SIZE, HEAD_SIZE], rows of v
                 scalar_t* conv_state,          // [num_slots, 3 * num_heads * HEAD_SIZE, WIDTH - 1]
                 const scalar_t* x,             // [num_seqs, 3, num_heads, HEAD_SIZE]
                 const weight_t* weight,        // [3, WIDTH, num_heads * HEAD_SIZE]
                 const weight_t* bias,          // [3 * num_heads * HEAD_SIZE]
                 const g_t* raw_g,              // [num_seqs, num_heads, HEAD_SIZE]
                 const beta_t* raw_beta,        // [num_seqs, num_heads]
                 const A_t* A_log,              // [num_heads]
                 const bias_t* dt_bias,         // [num_heads, HEAD_SIZE]
                 const index_t* state_indices,  // [num_seqs]
                 const scalar_t* output_gate,   // [num_seqs, num_heads, HEAD_SIZE]
                 const norm_t* norm_weight,     // [HEAD_SIZE]
                 int64_t num_heads, int64_t num_slots, int64_t x_stride, int64_t beta_stride, int64_t gate_stride,
                 int64_t state_stride, int64_t conv_stride, int64_t channel_stride, int64_t tap_stride, float scale,
                 float lower_bound, float norm_eps) {
    await_previous_kernel();
    __shared__ alignas(16) float vectors[3][COLUMNS];  // q, k and v
    __shared__ alignas(16) float kept[COLUMNS];
    __shared__ float outputs[HEAD_SIZE];
    const int lane = threadIdx.x % LANES, thread_row = threadIdx.x / LANES;
    const unsigned heads = unsigned(num_heads);
    const int seq = int(blockIdx.x / heads), head = int(blockIdx.x % heads);
    const int64_t slot = state_indices[seq], size = num_heads * HEAD_SIZE;
    if (slot < 0 || slot >= num_slots) return;

    float s[PASSES][RUNS][4] = {};
    // Calls `visit` with each run of STATE_VEC columns of the thread, and its address. A thread computes its addresses
    // again for loads and for stores, so that no registers hold them meanwhile.
    const auto each_of_state = [&](int pass, auto visit) {
        const int thread = made_anew(threadIdx.x), row = pass * ROWS + thread / LANES;
        state_t* const own_state =
            state + slot * state_stride + (int64_t(made_anew(head)) * HEAD_SIZE + row) * HEAD_SIZE + thread % LANES * 4;
#pragma unroll
        for (int i = 0; i < RUNS * 4; i += STATE_VEC) {
            const int column = (i / 4 * LANES + thread % LANES) * 4 + i % 4;
            if ((HEAD_SIZE % ROWS == 0 || row < HEAD_SIZE) && (HEAD_SIZE == COLUMNS || column < HEAD_SIZE)) {
                visit(*reinterpret_cast<float (*)[STATE_VEC]>(&s[pass][i / 4][i % 4]),
                      own_state + (i / 4 * LANES * 4 + i % 4));
            }
        }
    };
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        each_of_state(pass, [&](float (&run)[STATE_VEC], state_t* from) { load_floats<STATE_VEC>(from, run); });
    }

    const float logit = to_float(raw_beta[seq * beta_stride + head]);
#pragma unroll 1
    for (int i = threadIdx.x; i < 3 * COLUMNS; i += NUM_THREADS) {
        const int part = i / COLUMNS, column = i % COLUMNS;
        if (column >= HEAD_SIZE) {
            vectors[part][column] = 0.0f;
            continue;
        }
        const int64_t channel = int64_t(head) * HEAD_SIZE + column;
        scalar_t* const history = conv_state + slot * conv_stride + (part * size + channel) * channel_stride;
        const weight_t* const taps = weight + part * WIDTH * size + channel;
        float sum = bias ? to_float(bias[part * size + channel]) : 0.0f;
        scalar_t inputs[WIDTH];
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            inputs[w] = w + 1 < WIDTH ? history[w * tap_stride] : x[seq * x_stride + part * size + channel];
            sum = fmaf(to_float(inputs[w]), to_float(taps[w * size]), sum);
        }
#pragma unroll
        for (int w = 0; w + 1 < WIDTH; ++w) history[w * tap_stride] = inputs[w + 1];
        vectors[part][column] = sum / (1.0f + expf(-sum));
    }
    // The last threads begin: they have convolved the fewest channels.
    const DeltaGate gate{expf(to_float(A_log[head])), lower_bound};
#pragma unroll 1
    for (int i = NUM_THREADS - 1 - threadIdx.x; i < COLUMNS; i += NUM_THREADS) {
        const int64_t at = int64_t(head) * HEAD_SIZE + i;
        const bool exists = i < HEAD_SIZE;
        const float given = exists ? to_float(raw_g[seq * size + at]) : 0.0f;
        kept[i] = expf(gate.log_decay(given, exists ? to_float(dt_bias[at]) : 0.0f));
    }
    const float strength = update_strength(logit);
    __syncthreads();
    if (threadIdx.x / WARP_SIZE == 0) normalize(vectors[0], scale);
    if (threadIdx.x / WARP_SIZE == 1) normalize(vectors[1], 1.0f);
    __syncthreads();

#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        keep_loads_of_warp();  // otherwise vectors of later passes would take registers
        const int row = pass * ROWS + thread_row;
        float predicted = 0.0f, result = 0.0f;
#pragma unroll
        for (int i = 0; i < RUNS; ++i) {
            const int column = (i * LANES + lane) * 4;
            const auto key = Vec<float, 4>::load(vectors[1] + column), keep = Vec<float, 4>::load(kept + column);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                s[pass][i][j] *= keep[j];
                predicted = fmaf(s[pass][i][j], key[j], predicted);
            }
        }
        predicted = lane_reduce<Sum, LANES>(predicted);
        const float change = row < HEAD_SIZE ? strength * (vectors[2][row] - predicted) : 0.0f;
#pragma unroll
        for (int i = 0; i < RUNS; ++i) {
            const int column = (i * LANES + lane) * 4;
            const auto key = Vec<float, 4>::load(vectors[1] + column), query = Vec<float, 4>::load(vectors[0] + column);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                s[pass][i][j] = fmaf(change, key[j], s[pass][i][j]);
                result = fmaf(s[pass][i][j], query[j], result);
            }
        }
        result = lane_reduce<Sum, LANES>(result);
        if (lane == 0 && row < HEAD_SIZE) outputs[row] = result;
        each_of_state(
            pass, [&](float (&run)[STATE_VEC], state_t* to) { Vec<state_t, STATE_VEC>::from_floats(run).store(to); });
    }
    __syncthreads();

    float factor = 1.0f;
    if constexpr (HAS_NORM) {
        float sum = 0.0f;  // each warp adds the squares of all outputs
        for (int i = threadIdx.x % WARP_SIZE; i < HEAD_SIZE; i += WARP_SIZE) sum = fmaf(outputs[i], outputs[i], sum);
        factor = 1.0f / sqrtf(lane_reduce<Sum, WARP_SIZE>(sum) / HEAD_SIZE + norm_eps);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < HEAD_SIZE; i += NUM_THREADS) {
        const int64_t at = int64_t(head) * HEAD_SIZE + i;
        float result = outputs[i] * factor;
        if constexpr (HAS_NORM) {
            const float open = to_float(output_gate[seq * gate_stride + at]);
            result *= to_float(norm_weight[i]) / (1.0f + expf(-open));
        }
        out[seq * size + at] = from_float<scalar_t>(result);
    }
}
