// compress_kv: compresses the tokens of a window to one key, and keeps the last tokens of each sequence for windows
// that end later (DeepSeek-V4).
//
//     x[d] = sum_t softmax_t(gate[t, d] + position_bias[t % RATIO, d]) * kv[t, d]
//     out[last token of the window] = T(rope(x / sqrt(mean(x^2) + eps) * weight))
//
// Window w holds positions w * RATIO to w * RATIO + RATIO - 1, and rope rotates adjacent pairs of the last ROPE_SIZE
// elements by the angles of position w * RATIO. With HEADS = 2, a row of kv and gate has two heads: t runs over the
// first heads of the tokens of the window before, and over the second heads of the tokens of this window. LENGTH tokens
// stay in states: the token at position p in row p % LENGTH.
//
// Thread mapping: a CTA of compress_kv has a token, and ends at once unless the token is the last of a window. A thread
// has a vector of a head for every GROUPS-th token of the window; the groups meet in shared memory. A CTA of
// compress_kv_states has a row of the states of a sequence. It is launched after compress_kv, which reads the states.
//
// Constants
//     scalar_t      T: element type of out, states, kv, gate and weight
//     start_t       element type of query_start_loc
//     length_t      element type of seq_lens
//     slot_t        element type of state_slots
//     HEAD_SIZE     elements of a key
//     ROPE_SIZE     elements of a key that are rotated
//     RATIO         tokens of a window
//     HEADS         heads of a row of kv and gate: 1, or 2 for windows that overlap
//     GROUPS        groups of threads that share the tokens of a window

#include "paged.cuh"
#include "reduce.cuh"
#include "rotary.cuh"

constexpr int LENGTH = HEADS * RATIO, ROW = HEADS * HEAD_SIZE, HEAD_THREADS = HEAD_SIZE / VEC_SIZE;
constexpr int ELEMENTS = ceil_div(HEAD_SIZE, NUM_THREADS);  // elements of a key that a thread finishes
constexpr int BATCH = 4;                                    // tokens that a thread loads at once
using vec_t = Vec<scalar_t, VEC_SIZE>;

// The newest tokens of a sequence: rows `begin` to `end` of kv and gate, from position `start` on.
struct Newest {
    int64_t begin, end, start;

    static DEVICE Newest of(int64_t sequence, const start_t* query_start_loc, int64_t start_stride,
                            const length_t* seq_lens, int64_t length_stride, int64_t num_tokens) {
        Newest newest;
        newest.begin = max(int64_t(0), min(int64_t(query_start_loc[sequence * start_stride]), num_tokens));
        newest.end = max(int64_t(0), min(int64_t(query_start_loc[(sequence + 1) * start_stride]), num_tokens));
        newest.start = int64_t(seq_lens[sequence * length_stride]) - (newest.end - newest.begin);
        return newest;
    }
};

// exp(x - largest), where the largest of nothing is -inf.
DEVICE float power(float x, float largest) { return expf(x - (largest == minus_infinity() ? 0.0f : largest)); }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
compress_kv(scalar_t* out,                   // [num_tokens, HEAD_SIZE]
            const scalar_t* states,          // [num_slots, LENGTH, 2 * ROW]
            const scalar_t* kv,              // [num_tokens, ROW]
            const scalar_t* gate,            // [num_tokens, ROW]
            const float* position_bias,      // [RATIO, ROW]
            const scalar_t* weight,          // [HEAD_SIZE]
            const float* cos_sin_cache,      // [max_position, ROPE_SIZE]
            const start_t* query_start_loc,  // [num_seqs + 1]
            const length_t* seq_lens,        // [num_seqs]
            const slot_t* state_slots,       // [num_seqs]
            int64_t num_seqs, int64_t num_slots, int64_t num_tokens, int64_t max_position, int64_t out_stride,
            int64_t kv_stride, int64_t gate_stride, int64_t slot_stride, int64_t start_stride, int64_t length_stride,
            int64_t state_slots_stride, float eps) {
    await_previous_kernel();
    __shared__ float maxima[GROUPS][HEAD_SIZE];
    __shared__ float totals[GROUPS][HEAD_SIZE];
    __shared__ float weighted[GROUPS][HEAD_SIZE];
    __shared__ float partial[32];
    const int64_t token = blockIdx.x;
    const int64_t sequence = count_up_to(query_start_loc + start_stride, num_seqs, start_stride, token);
    if (sequence >= num_seqs) return;
    const Newest newest = Newest::of(sequence, query_start_loc, start_stride, seq_lens, length_stride, num_tokens);
    const int64_t last = newest.start + (token - newest.begin), first = last + 1 - RATIO;
    if (token < newest.begin || token >= newest.end || last < 0) return;
    if ((last + 1) % RATIO != 0 || first >= max_position) return;

    const int64_t given = state_slots[sequence * state_slots_stride];
    const bool has_states = given >= 0 && given < num_slots;
    const int64_t slot = has_states ? given : 0;
    const int group = threadIdx.x / HEAD_THREADS, element = threadIdx.x % HEAD_THREADS * VEC_SIZE;
    if (group < GROUPS) {
        float largest[VEC_SIZE], total[VEC_SIZE], sum[VEC_SIZE];
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) largest[i] = minus_infinity(), total[i] = 0.0f, sum[i] = 0.0f;
        for (int begin = group; begin < LENGTH; begin += BATCH * GROUPS) {
            vec_t values[BATCH], gates[BATCH];
            bool exists[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const int j = begin + k * GROUPS;
                const int64_t position = last + 1 - LENGTH + j;
                const bool is_new = position >= newest.start;
                exists[k] = j < LENGTH && position >= 0 && (is_new || has_states);
                const int column = (HEADS == 2 && j >= RATIO ? HEAD_SIZE : 0) + element;
                values[k] = gates[k] = vec_t::full(0.0f);
                if (!exists[k]) continue;
                const int64_t row = token - (last - position);
                const scalar_t* state = states + slot * slot_stride + position % LENGTH * (2 * ROW) + column;
                values[k] = vec_t::load(is_new ? kv + row * kv_stride + column : state);
                gates[k] = vec_t::load(is_new ? gate + row * gate_stride + column : state + ROW);
            }
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                if (!exists[k]) continue;
                const int j = begin + k * GROUPS;
                const float* bias = position_bias + j % RATIO * ROW + (HEADS == 2 && j >= RATIO ? HEAD_SIZE : 0);
#pragma unroll
                for (int i = 0; i < VEC_SIZE; ++i) {
                    const float x = gates[k][i] + bias[element + i], before = largest[i];
                    largest[i] = fmaxf(before, x);
                    const float kept = power(before, largest[i]), factor = power(x, largest[i]);
                    total[i] = total[i] * kept + factor;
                    sum[i] = sum[i] * kept + values[k][i] * factor;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
            maxima[group][element + i] = largest[i];
            totals[group][element + i] = total[i];
            weighted[group][element + i] = sum[i];
        }
    }
    __syncthreads();

    // A thread finishes the elements threadIdx.x, threadIdx.x + NUM_THREADS, and so on.
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < ELEMENTS; ++n) {
        const int d = n * NUM_THREADS + threadIdx.x;
        if (d >= HEAD_SIZE) break;
        float largest = minus_infinity(), total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) largest = fmaxf(largest, maxima[g][d]);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const float factor = power(maxima[g][d], largest);
            total += totals[g][d] * factor;
            sum += weighted[g][d] * factor;
        }
        const float x = sum / total;
        squares += x * x;
        weighted[0][d] = x;
    }
    const float inverse_rms = rsqrtf(row_reduce<Sum, NUM_THREADS>(squares, partial) / HEAD_SIZE + eps);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < ELEMENTS; ++n) {
        const int d = n * NUM_THREADS + threadIdx.x;
        if (d >= HEAD_SIZE) break;
        float x = weighted[0][d] * inverse_rms * to_float(weight[d]);
        const int rope = d - (HEAD_SIZE - ROPE_SIZE);
        if (rope >= 0) {
            const int other = rope % 2 == 0 ? d + 1 : d - 1;
            float y = weighted[0][other] * inverse_rms * to_float(weight[other]);
            const float* angle = cos_sin_cache + first * ROPE_SIZE + rope / 2;
            const float sine = angle[ROPE_SIZE / 2];
            rotate(x, y, angle[0], rope % 2 == 0 ? sine : -sine);
        }
        out[token * out_stride + d] = from_float<scalar_t>(x);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
compress_kv_states(scalar_t* states,                // [num_slots, LENGTH, 2 * ROW]
                   const scalar_t* kv,              // [num_tokens, ROW]
                   const scalar_t* gate,            // [num_tokens, ROW]
                   const start_t* query_start_loc,  // [num_seqs + 1]
                   const length_t* seq_lens,        // [num_seqs]
                   const slot_t* state_slots,       // [num_seqs]
                   int64_t num_slots, int64_t num_tokens, int64_t kv_stride, int64_t gate_stride, int64_t slot_stride,
                   int64_t start_stride, int64_t length_stride, int64_t state_slots_stride) {
    await_previous_kernel();
    const int64_t sequence = blockIdx.x;
    const int row = blockIdx.y;
    const Newest newest = Newest::of(sequence, query_start_loc, start_stride, seq_lens, length_stride, num_tokens);
    const int64_t last = newest.start + (newest.end - newest.begin) - 1;
    const int64_t slot = state_slots[sequence * state_slots_stride];
    if (last < row || newest.end <= newest.begin || slot < 0 || slot >= num_slots) return;
    const int64_t position = last - (last - row) % LENGTH;  // the last one in this row
    if (position < newest.start) return;
    const int64_t token = newest.begin + (position - newest.start);
    scalar_t* state = states + slot * slot_stride + row * (2 * ROW);
    for (int i = threadIdx.x; i < 2 * ROW / VEC_SIZE; i += NUM_THREADS) {
        const int d = i * VEC_SIZE;
        vec_t::load(d < ROW ? kv + token * kv_stride + d : gate + token * gate_stride + d - ROW).store(state + d);
    }
}
