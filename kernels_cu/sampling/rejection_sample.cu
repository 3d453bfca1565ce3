// rejection_sample: accepts or rejects drafted tokens (speculative decoding), and appends one token to the accepted
// ones.
//
//     draft i of a request is accepted if q > 0 and u_i q < p
//         p, q: probability of the drafted token in its rows P of target_probs and Q of draft_probs
//     the first rejected draft is replaced by the first token t with sum_{j <= t} w_j > floor(r_i * sum w / 2^64)
//         w = floor(2^40 max(P - Q, 0)), the residual weights; if all are 0, w = floor(2^40 P), the target weights
//     if every draft is accepted, bonus_token_ids[request] is added
//     all entries after the added token are -1
//
// Launch 1: block (request, piece) sums both kinds of weights over one piece of the rejected draft's row. Launch 2: one
// block per request finds the piece that the random number selects, then the token in the piece.
//
// Constants:
//     VEC_SIZE          probabilities in one memory access; divides vocab_size
//     PART              1: the first launch, 2: the second
//     HAS_DRAFT_PROBS   false when draft_probs is null: then Q is 1 for the drafted token and 0 for all others
//     HAS_OFFSETS       false when offsets is null

#include "philox.cuh"
#include "radix_select.cuh"
#include "vec.cuh"

constexpr float WHOLE = float(uint64_t(1) << 40);  // weight of probability 1
using vec_t = Vec<float, VEC_SIZE>;

DEVICE int64_t clamped(int64_t x, int64_t low, int64_t high) { return x < low ? low : x < high ? x : high; }
DEVICE uint64_t weight_of(float probability) {
    return probability > 0.0f ? uint64_t(ieee_min(probability, 1.0f) * WHOLE) : 0;
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
rejection_sample(int32_t* output_token_ids,           // [batch, max_drafts + 1]
                 const int32_t* draft_token_ids,      // [num_tokens]
                 const int32_t* cu_num_draft_tokens,  // [batch]
                 const float* draft_probs,            // [num_tokens, vocab_size]
                 const float* target_probs,           // [num_tokens, vocab_size]
                 const int32_t* bonus_token_ids,      // [batch]
                 const int64_t* seeds,                // [batch]
                 const int64_t* offsets,              // [batch]
                 uint64_t* sums,                      // [batch, pieces, 2]: residual weights, target weights
                 int64_t num_tokens, int64_t vocab_size, int64_t max_drafts, int64_t pieces, int64_t piece_size,
                 int64_t draft_stride, int64_t target_stride) {
    await_previous_kernel();
    __shared__ uint64_t partial[2][NUM_THREADS / WARP_SIZE];
    const int64_t request = PART == 1 ? blockIdx.x / unsigned(pieces) : blockIdx.x;
    const int64_t begin = request ? clamped(cu_num_draft_tokens[request - 1], 0, num_tokens) : 0;
    const int64_t count = clamped(cu_num_draft_tokens[request] - begin, 0, min(max_drafts, num_tokens - begin));
    const uint64_t seed = seeds[request], offset = HAS_OFFSETS ? offsets[request] : 0;
    const auto is_accepted = [&](int64_t i) {
        const int32_t token = draft_token_ids[begin + i];
        if (token < 0 || token >= vocab_size) return false;
        const float p = target_probs[(begin + i) * target_stride + token];
        const float q = HAS_DRAFT_PROBS ? draft_probs[(begin + i) * draft_stride + token] : 1.0f;
        return q > 0.0f && double(philox(seed, offset, uint32_t(i), 1) >> 32) * 0x1p-32 * double(q) < double(p);
    };
    int64_t accepted = 0;
    while (accepted < count && is_accepted(accepted)) ++accepted;
    sums += request * pieces * 2;

    const int64_t row = begin + accepted;
    const int rejected_token = accepted < count ? draft_token_ids[row] : 0;
    // w = the target weights, or else residual weights, of vector i of a piece; 0 beyond the end of the row.
    const auto weigh = [&](int64_t piece, int i, bool use_target, uint64_t (&w)[VEC_SIZE]) {
        const int64_t column = piece * piece_size + int64_t(i) * VEC_SIZE;
        const bool exists = int64_t(i) * VEC_SIZE < piece_size && column < vocab_size;
        const vec_t p = exists ? vec_t::load(target_probs + row * target_stride + column) : vec_t::full(0.0f);
        vec_t q = vec_t::full(0.0f);
        if (HAS_DRAFT_PROBS && exists && !use_target) q = vec_t::load(draft_probs + row * draft_stride + column);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            const bool is_draft = !HAS_DRAFT_PROBS && !use_target && column + j == rejected_token;
            w[j] = is_draft ? 0 : weight_of(p[j] - q[j]);
        }
    };
    if constexpr (PART == 1) {
        if (accepted == count) return;
        const int piece = blockIdx.x % unsigned(pieces);
        uint64_t sum[2] = {0, 0}, total;
        for (int i = threadIdx.x; int64_t(i) * VEC_SIZE < piece_size; i += NUM_THREADS) {
            uint64_t w[VEC_SIZE];
#pragma unroll
            for (int use_target = 0; use_target < 2; ++use_target) {
                weigh(piece, i, use_target, w);
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) sum[use_target] += w[j];
            }
        }
#pragma unroll
        for (int use_target = 0; use_target < 2; ++use_target) {
            sum_before<NUM_THREADS>(sum[use_target], partial[use_target], total);
            if (threadIdx.x == 0) sums[piece * 2 + use_target] = total;
        }
    } else {
        output_token_ids += request * (max_drafts + 1);
        for (int64_t i = threadIdx.x; i <= max_drafts; i += NUM_THREADS) {
            if (i == accepted && i < count) continue;
            output_token_ids[i] = i < accepted    ? draft_token_ids[begin + i]
                                  : i == accepted ? bonus_token_ids[request]
                                                  : -1;
        }
        if (accepted == count) return;
        uint64_t total = 0, target_total = 0;
        for (int i = 0; i < pieces; ++i) {
            total += sums[i * 2];
            target_total += sums[i * 2 + 1];
        }
        const bool use_target = total == 0;
        if (use_target) total = target_total;
        if (total == 0) {
            if (threadIdx.x == 0) output_token_ids[accepted] = -1;
            return;
        }
        uint64_t rest = multiply_high(philox(seed, offset, uint32_t(accepted), 2), total);
        int64_t piece = 0;
        for (; rest >= sums[piece * 2 + use_target]; ++piece) rest -= sums[piece * 2 + use_target];
        const auto take = [&](int i, int j, uint64_t) {
            output_token_ids[accepted] = int32_t(piece * piece_size + int64_t(i) * VEC_SIZE + j);
        };
        find_by_weight<NUM_THREADS, VEC_SIZE>(
            rest, int(piece_size / VEC_SIZE), [&](int i, uint64_t (&w)[VEC_SIZE]) { weigh(piece, i, use_target, w); },
            take, partial);
    }
}
