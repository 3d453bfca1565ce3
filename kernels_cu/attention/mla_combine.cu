// mla_combine: combines the partial results of the sequences that mla_schedule.cuh has cut into pieces.
//
//     out = sum_p w_p o_p / (sum_p w_p + 1e-6),   w_p = z_p exp2(m_p - m),   m = max_p m_p
//
// Piece p has stored its row max m_p in units of log 2, the row sum z_p relative to m_p, and the mean of values o_p.
// Sequences of one piece are complete.
//
// Thread mapping: a task is a part of PART_SIZE elements of one head of a cut sequence. CTAs take tasks round-robin. If
// there are few tasks, several warps of a CTA share one: each takes every `sharers`-th piece.
//
// Constants
//     out_t    element type of out

#include "attention.cuh"
#include "mla_schedule.cuh"

constexpr int NUM_WARPS = 8, VEC_SIZE = 4, PART_SIZE = 32 * VEC_SIZE, LATENT_SIZE = 512,
              PARTS = LATENT_SIZE / PART_SIZE;
constexpr int BATCH = 4;  // pieces that a warp loads at once

extern "C" __global__ void LAUNCH_BOUNDS(NUM_WARPS * 32, 4)
mla_combine(out_t* out,               // [num_seqs, num_heads, LATENT_SIZE]
            float* lse,               // [num_seqs, num_heads]
            const float* tmp_out,     // [slots, num_heads, LATENT_SIZE]
            const float* max_logits,  // [slots, num_heads]
            const float* exp_sums,    // [slots, num_heads]
            const MlaPieces* pieces,  // [num_seqs]
            int64_t num_seqs, int64_t num_heads, int64_t out_stride) {
    __shared__ float sums[NUM_WARPS][VEC_SIZE][32];
    await_previous_kernel();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto cut_sequences = [&](int first) {  // a bit for each of 32 sequences
        return ballot(first + lane < num_seqs && pieces[first + lane].count > 1);
    };
    int num_cut = 0;
    for (int first = 0; first < num_seqs; first += 32) num_cut += count_bits(cut_sequences(first));
    const int64_t tasks = num_cut * num_heads * PARTS;
    int sharers = 1;
    while (sharers < NUM_WARPS && tasks * sharers * 2 <= int64_t(gridDim.x) * NUM_WARPS) sharers *= 2;
    const int member = warp % sharers, block_tasks = NUM_WARPS / sharers;

    for (int64_t block = int64_t(blockIdx.x) * block_tasks; block < tasks; block += int64_t(gridDim.x) * block_tasks) {
        const int64_t task = block + warp / sharers;
        const bool is_task = task < tasks;
        const int64_t head = task / PARTS % num_heads, column = task % PARTS * PART_SIZE + lane * VEC_SIZE;
        int64_t seq = 0;
        float total[VEC_SIZE] = {};
        if (is_task) {
            int before = int(task / PARTS / num_heads);  // cut sequences before that of the task
            for (int first = 0;; first += 32) {
                uint32_t cut = cut_sequences(first);
                const int found = count_bits(cut);
                if (before >= found) {
                    before -= found;
                    continue;
                }
                for (; before > 0; --before) cut &= cut - 1;
                seq = first + lowest_bit(cut);
                break;
            }
            const MlaPieces own = pieces[seq];
            const auto row = [&](int piece) { return own.slot(piece) * num_heads + head; };
            using vec_t = Vec<float, VEC_SIZE>;
            const auto load = [&](int first, vec_t(&x)[BATCH]) {
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int piece = first + i * sharers;
                    x[i] = vec_t::full(0.0f);
                    if (piece < own.count) x[i] = vec_t::load(tmp_out + row(piece) * LATENT_SIZE + column);
                }
            };
            vec_t x[BATCH];
            load(member, x);  // in flight while the row max is found
            float own_max = minus_infinity(), own_sum = 0.0f;
            for (int i = lane; i < own.count; i += 32) {
                const float of_piece = max_logits[row(i)], larger = fmaxf(own_max, of_piece);
                own_sum = own_sum * relative_exp2(own_max, larger) + exp_sums[row(i)] * relative_exp2(of_piece, larger);
                own_max = larger;
            }
            const float max_logit = lane_reduce<Max, 32>(own_max);
            const float exp_sum = lane_reduce<Sum, 32>(own_sum * relative_exp2(own_max, max_logit));
            const float scale = 1.0f / (exp_sum + 1e-6f);
            for (int first = member; first < own.count; first += sharers * BATCH) {
                if (first > member) load(first, x);
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int piece = first + i * sharers;
                    if (piece >= own.count) continue;
                    // At most 1, so that its product with a value does not overflow.
                    const float factor =
                        exp_sums[row(piece)] * scale * relative_exp2(max_logits[row(piece)], max_logit);
#pragma unroll
                    for (int j = 0; j < VEC_SIZE; ++j) total[j] = fmaf(factor, x[i][j], total[j]);
                }
            }
            if (HAS_LSE && member == 0 && column == 0) lse[seq * num_heads + head] = log_sum_exp(max_logit, exp_sum);
        }
        if (sharers > 1) {
            __syncthreads();  // the sums of the task before have been read
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) sums[warp][j][lane] = total[j];
            __syncthreads();
            for (int other = 1; other < sharers && member == 0; ++other) {
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) total[j] += sums[warp + other][j][lane];
            }
        }
        if (is_task && member == 0) {
            Vec<out_t, VEC_SIZE>::from_floats(total).store(out + seq * out_stride + head * LATENT_SIZE + column);
        }
    }
}
