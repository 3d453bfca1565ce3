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
// Thread mapping: a CTA of compress_kv has SPAN adjacent tokens, and compresses the windows that end there, one after
// another. A thread has a vector of a head for every GROUPS-th token of the window; the groups meet in shared memory. A
// CTA of compress_kv_states has a row of the states of a sequence. It is launched after compress_kv, which reads the
// states.
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
//     BIAS_SIZE     elements of position_bias in one memory access; divides VEC_SIZE
//     SPAN          tokens of a CTA; at most RATIO, so that it has one window unless sequences meet there

#include "paged.cuh"
#include "reduce.cuh"
#include "rotary.cuh"

constexpr int LENGTH = HEADS * RATIO, ROW = HEADS * HEAD_SIZE, HEAD_THREADS = HEAD_SIZE / VEC_SIZE;
constexpr int ELEMENTS = ceil_div(HEAD_SIZE, NUM_THREADS);           // elements of a key that a thread finishes
constexpr int BATCH = 4;                                             // tokens that a thread loads at once
constexpr int MIN_CTAS = NUM_THREADS > 384 ? 1 : 384 / NUM_THREADS;  // CTAs on an SM, with 168 registers for a thread
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

// 2^(x - largest), where the largest of nothing is -inf.
DEVICE float power(float x, float largest) { return exp2f(x - (largest == minus_infinity() ? 0.0f : largest)); }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_CTAS)
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
    __shared__ float exchanged[3][GROUPS][HEAD_SIZE];
    auto &maxima = exchanged[0], &totals = exchanged[1], &weighted = exchanged[2];
    const int group = threadIdx.x / HEAD_THREADS, element = threadIdx.x % HEAD_THREADS * VEC_SIZE;
    const int64_t span_end = min((blockIdx.x + int64_t(1)) * SPAN, num_tokens);
    for (int64_t token = blockIdx.x * int64_t(SPAN); token < span_end; ++token) {
        // The next token that is the last of a window. Positions below 0 and windows outside the table have none.
        const int64_t sequence = count_up_to(query_start_loc + start_stride, num_seqs, start_stride, token);
        if (sequence >= num_seqs) return;
        const Newest newest = Newest::of(sequence, query_start_loc, start_stride, seq_lens, length_stride, num_tokens);
        if (token < newest.begin || token >= newest.end) continue;
        const int64_t position = newest.start + (token - newest.begin);
        if (position < 0) continue;
        const int64_t first = position - position % RATIO, last = first + RATIO - 1;
        const int64_t next = token + (last - position);
        if (next >= min(newest.end, span_end)) {
            token = min(newest.end, span_end) - 1;
            continue;
        }
        token = next;
        if (first >= max_position) continue;

        // Token j of the window, at position first_kept + j, does not exist, is in states, or is new.
        const int64_t given = state_slots[sequence * state_slots_stride], first_kept = last + 1 - LENGTH;
        const bool has_states = given >= 0 && given < num_slots;
        const int first_new = int(max(int64_t(0), min(newest.start - first_kept, int64_t(LENGTH))));
        const int first_existing = has_states ? int(max(int64_t(0), -first_kept)) : first_new;
        const int first_row = int((last + 1) % LENGTH);  // the row of states that holds token 0
        const scalar_t* state = states + (has_states ? given : 0) * slot_stride;
        const scalar_t* values_0 = kv + (token + 1 - LENGTH) * kv_stride;
        const scalar_t* gates_0 = gate + (token + 1 - LENGTH) * gate_stride;
        if (group < GROUPS) {
            float largest[VEC_SIZE], total[VEC_SIZE], sum[VEC_SIZE];
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) largest[i] = minus_infinity(), total[i] = 0.0f, sum[i] = 0.0f;
            for (int begin = group; begin < LENGTH; begin += BATCH * GROUPS) {
                vec_t values[BATCH], gates[BATCH];
                float powers[BATCH][VEC_SIZE];  // first the bias, then gates in units of log 2, then powers
#pragma unroll
                for (int k = 0; k < BATCH; ++k) {
                    const int j = begin + k * GROUPS;
                    const int column = (HEADS == 2 && j >= RATIO ? HEAD_SIZE : 0) + element;
                    values[k] = vec_t::full(0.0f);
                    gates[k] = vec_t::full(minus_infinity());
#pragma unroll
                    for (int i = 0; i < VEC_SIZE; ++i) powers[k][i] = 0.0f;
                    if (j >= first_existing && j < LENGTH) {
                        const bool is_new = j >= first_new;
                        const int row = first_row + j < LENGTH ? first_row + j : first_row + j - LENGTH;
                        const scalar_t* kept = state + row * (2 * ROW) + column;
                        values[k] = vec_t::load(is_new ? values_0 + j * kv_stride + column : kept);
                        gates[k] = vec_t::load(is_new ? gates_0 + j * gate_stride + column : kept + ROW);
                        const float* bias = position_bias + j % RATIO * ROW + column;
#pragma unroll
                        for (int i = 0; i < VEC_SIZE; i += BIAS_SIZE) {
                            float part[BIAS_SIZE];
                            Vec<float, BIAS_SIZE>::load(bias + i).to_floats(part);
#pragma unroll
                            for (int n = 0; n < BIAS_SIZE; ++n) powers[k][i + n] = part[n];
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < VEC_SIZE; ++i) {
                    const float before = largest[i];
#pragma unroll
                    for (int k = 0; k < BATCH; ++k) {
                        powers[k][i] = (gates[k][i] + powers[k][i]) * LOG2_E;
                        largest[i] = fmaxf(largest[i], powers[k][i]);
                    }
                    const float kept = power(before, largest[i]);
                    total[i] *= kept;
                    sum[i] *= kept;
#pragma unroll
                    for (int k = 0; k < BATCH; ++k) {
                        const float factor = power(powers[k][i], largest[i]);
                        total[i] += factor;
                        sum[i] = fmaf(values[k][i], factor, sum[i]);
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
        __syncthreads();  // maxima and totals hold partial sums of squares from here on
        const float inverse_rms = rsqrtf(row_reduce<Sum, NUM_THREADS>(squares, exchanged[0][0]) / HEAD_SIZE + eps);
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
        __syncthreads();  // before the next window writes to shared memory
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
