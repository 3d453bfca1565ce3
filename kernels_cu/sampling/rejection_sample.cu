// rejection_sample: which of the tokens that a smaller model has drafted stand, and the one that follows.
//
//     draft i of a request stands if q > 0 and u_i q < p    p, q: target_probs and draft_probs (or 1) of its token
//     the first that does not is replaced by the first t with sum_{j <= t} w_j > floor(r_i * sum w / 2^64)
//     where w = floor(2^40 max(P - Q, 0)), or floor(2^40 P) if that is 0 everywhere, P and Q the rows of all tokens' p and q
//     if all stand, bonus_token_ids follows; then -1
//
// Two launches: blocks for the pieces of a request's row leave sums of both kinds of weights; then a block for each request
// finds the piece, and in it the token.
//
// Constants
//     VEC_SIZE          probabilities in one memory access; divides vocab_size
//     PART              1: the first launch, 2: the second
//     HAS_DRAFT_PROBS   false when draft_probs is null: the draft's token has all of Q
//     HAS_OFFSETS       false when offsets is null
//     NUM_THREADS       threads in the block

#include "philox.cuh"
#include "select.cuh"
#include "vec.cuh"

constexpr float WHOLE = float(uint64_t(1) << 40);
using vec_t = Vec<float, VEC_SIZE>;

DEVICE int64_t clamped(int64_t x, int64_t low, int64_t high) { return x < low ? low : x < high ? x : high; }
DEVICE uint64_t weight_of(float probability) { return probability > 0.0f ? uint64_t(ieee_min(probability, 1.0f) * WHOLE) : 0; }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
rejection_sample(int32_t* output_token_ids,            // [batch, most_drafts + 1]
                 const int32_t* draft_token_ids,       // [num_tokens]
                 const int32_t* cu_num_draft_tokens,   // [batch]
                 const float* draft_probs,             // [num_tokens, vocab_size]
                 const float* target_probs,            // [num_tokens, vocab_size]
                 const int32_t* bonus_token_ids,       // [batch]
                 const int64_t* seeds,                 // [batch]
                 const int64_t* offsets,               // [batch]
                 uint64_t* sums,                       // [batch, pieces, 2]
                 int64_t num_tokens, int64_t vocab_size, int64_t most_drafts, int64_t pieces, int64_t piece_size,
                 int64_t draft_stride, int64_t target_stride) {
    await_previous_kernel();
    __shared__ uint64_t partial[2][NUM_THREADS / WARP_SIZE];
    const int64_t request = PART == 1 ? blockIdx.x / unsigned(pieces) : blockIdx.x;
    const int64_t begin = request ? clamped(cu_num_draft_tokens[request - 1], 0, num_tokens) : 0;
    const int64_t count = clamped(cu_num_draft_tokens[request] - begin, 0, min(most_drafts, num_tokens - begin));
    const uint64_t seed = seeds[request], offset = HAS_OFFSETS ? offsets[request] : 0;
    const auto stands = [&](int64_t i) {
        const int32_t token = draft_token_ids[begin + i];
        if (token < 0 || token >= vocab_size) return false;
        const float p = target_probs[(begin + i) * target_stride + token];
        const float q = HAS_DRAFT_PROBS ? draft_probs[(begin + i) * draft_stride + token] : 1.0f;
        return q > 0.0f && double(philox(seed, offset, uint32_t(i), 1) >> 32) * 0x1p-32 * double(q) < double(p);
    };
    int64_t accepted = 0;
    while (accepted < count && stands(accepted)) ++accepted;
    sums += request * pieces * 2;

    const int64_t row = begin + accepted;
    const int replaced = accepted < count ? draft_token_ids[row] : 0;
    // Of vector i of a piece, the weights max(P - Q, 0), or of P alone.
    const auto weigh = [&](int64_t piece, int i, bool alone, uint64_t (&w)[VEC_SIZE]) {
        const int64_t column = piece * piece_size + int64_t(i) * VEC_SIZE;
        const bool exists = int64_t(i) * VEC_SIZE < piece_size && column < vocab_size;
        const vec_t p = exists ? vec_t::load(target_probs + row * target_stride + column) : vec_t::full(0.0f);
        vec_t q = vec_t::full(0.0f);
        if (HAS_DRAFT_PROBS && exists && !alone) q = vec_t::load(draft_probs + row * draft_stride + column);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) {
            const bool is_draft = !HAS_DRAFT_PROBS && !alone && column + j == replaced;
            w[j] = is_draft ? 0 : weight_of(p[j] - q[j]);
        }
    };
    if constexpr (PART == 1) {
        if (accepted == count) return;
        const int piece = blockIdx.x % unsigned(pieces);
        uint64_t left[2] = {0, 0}, all;
        for (int i = threadIdx.x; int64_t(i) * VEC_SIZE < piece_size; i += NUM_THREADS) {
            uint64_t w[VEC_SIZE];
#pragma unroll
            for (int alone = 0; alone < 2; ++alone) {
                weigh(piece, i, alone, w);
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) left[alone] += w[j];
            }
        }
#pragma unroll
        for (int alone = 0; alone < 2; ++alone) {
            sum_before<NUM_THREADS>(left[alone], partial[alone], all);
            if (threadIdx.x == 0) sums[piece * 2 + alone] = all;
        }
    } else {
        output_token_ids += request * (most_drafts + 1);
        for (int64_t i = threadIdx.x; i <= most_drafts; i += NUM_THREADS) {
            if (i == accepted && i < count) continue;
            output_token_ids[i] = i < accepted ? draft_token_ids[begin + i] : i == accepted ? bonus_token_ids[request] : -1;
        }
        if (accepted == count) return;
        uint64_t total = 0, total_alone = 0;
        for (int i = 0; i < pieces; ++i) {
            total += sums[i * 2];
            total_alone += sums[i * 2 + 1];
        }
        const bool alone = total == 0;
        if (alone) total = total_alone;
        if (total == 0) {
            if (threadIdx.x == 0) output_token_ids[accepted] = -1;
            return;
        }
        uint64_t left = multiply_high(philox(seed, offset, uint32_t(accepted), 2), total);
        int64_t piece = 0;
        for (; left >= sums[piece * 2 + alone]; ++piece) left -= sums[piece * 2 + alone];
        const auto take = [&](int i, int j, uint64_t) {
            output_token_ids[accepted] = int32_t(piece * piece_size + int64_t(i) * VEC_SIZE + j);
        };
        find_by_weight<NUM_THREADS, VEC_SIZE>(
            left, int(piece_size / VEC_SIZE), [&](int i, uint64_t (&w)[VEC_SIZE]) { weigh(piece, i, alone, w); }, take,
            partial);
    }
}
