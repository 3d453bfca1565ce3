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
//     out_t     element type of out
//     BLOCKS    CTAs that an SM holds; bounds the registers

#include "attention.cuh"
#include "mla_schedule.cuh"

constexpr int NUM_WARPS = 8, VEC_SIZE = 4, PART_SIZE = 32 * VEC_SIZE, LATENT_SIZE = 512,
              PARTS = LATENT_SIZE / PART_SIZE;
// A round of loads takes a latency of L2, and one sequence may have a piece on each SM.
constexpr int BATCH = 8;      // pieces that a warp loads at once
constexpr int MAX_BATCH = 4;  // row maxima that a lane loads at once

extern "C" __global__ void LAUNCH_BOUNDS(NUM_WARPS * 32, BLOCKS)
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
            for (int first = lane; first < own.count; first += 32 * MAX_BATCH) {
                float of_pieces[MAX_BATCH], exp_of_pieces[MAX_BATCH], larger = own_max;
#pragma unroll
                for (int i = 0; i < MAX_BATCH; ++i) {
                    const bool is_piece = first + i * 32 < own.count;
                    const int64_t at = row(is_piece ? first + i * 32 : first);
                    of_pieces[i] = is_piece ? max_logits[at] : minus_infinity();
                    exp_of_pieces[i] = is_piece ? exp_sums[at] : 0.0f;
                }
#pragma unroll
                for (int i = 0; i < MAX_BATCH; ++i) larger = fmaxf(larger, of_pieces[i]);
                own_sum *= relative_exp2(own_max, larger);
                own_max = larger;
#pragma unroll
                for (int i = 0; i < MAX_BATCH; ++i) own_sum += exp_of_pieces[i] * relative_exp2(of_pieces[i], larger);
            }
            const float max_logit = lane_reduce<Max, 32>(own_max);
            const float exp_sum = lane_reduce<Sum, 32>(own_sum * relative_exp2(own_max, max_logit));
            const float scale = 1.0f / (exp_sum + 1e-6f);
            for (int first = member; first < own.count; first += 32 * sharers) {
                // The factor of piece first + lane * sharers. It is at most 1, so its product with a value does not
                // overflow.
                const int of_lane = first + lane * sharers;
                float factor = 0.0f;
                if (of_lane < own.count) {
                    factor = exp_sums[row(of_lane)] * scale * relative_exp2(max_logits[row(of_lane)], max_logit);
                }
                for (int i = 0; i < 32 && first + i * sharers < own.count; i += BATCH) {
                    if (first + i > member) load(first + i * sharers, x);
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) {
                        const float of_piece = shfl<32>(factor, i + j);
#pragma unroll
                        for (int k = 0; k < VEC_SIZE; ++k) total[k] = fmaf(of_piece, x[j][k], total[k]);
                    }
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
