// decode_combine.cuh: the combine of a sequence's splits inside attention_decode: the last CTA to finish computes what
// decode_combine.cu does, without another launch.
//
//     out = sum_s w_s o_s / (sum_s w_s + 1e-6),   w_s = z_s exp2(m_s - m),   m = max_s m_s
//
// Split s has stored its row max m_s in units of log 2, the row sum z_s relative to m_s, and the mean of values o_s.
//
// No fence orders the results and the count of arrivals: memory for results holds zeros, and no float of a result is
// stored as zero, so a warp that reads a nonzero word has the float. The count only says which warp combines, and a
// warp loads results while its arrival is counted.
//
// The constants in capitals that are not defined here are those of attention_decode.cu.
#pragma once
#include "decode_tile.cuh"

// Number of splits that a warp loads at once, of all of its heads.
constexpr int JOIN_BATCH = HEAD_SIZE <= 128 ? 4 : HEAD_SIZE * MAX_HEADS <= 2048 ? 3 : 2;
constexpr int LANE_ELEMENTS = ceil_div(HEAD_SIZE, WARP_SIZE);  // elements of a head per lane: every WARP_SIZE-th
// RESULT_PAIRS: pairs of floats in a split's result. Pair p * WARP_SIZE + lane holds elements 2p and 2p + 1 of the
// lane; the last pair holds the row max and the row sum.
constexpr int LANE_PAIRS = ceil_div(LANE_ELEMENTS, 2), RESULT_PAIRS = LANE_PAIRS * WARP_SIZE + 1;

// The results of the `count` splits of one query head. A warp of the last CTA combines them in the order of the splits,
// so the result does not depend on which CTA is last. `results` points to the RESULT_PAIRS pairs of the first split;
// the stride between splits is `stride` pairs. All results and `counter` are zero before the first split arrives, and
// again after the combine.
//
// A warp calls leave, arrive and combines for one head after the other, so that what it waits for under `combines` is
// in flight for all heads.
struct SplitCombine {
    PassedPair* results = nullptr;
    int64_t stride = 0;
    int count = 0;
    // The arguments of write_result, after all splits are combined.
    float max_logit = minus_infinity(), exp_sum = 0.0f, sum[LANE_ELEMENTS] = {};

    // Stores the result of a split. The arguments are those of write_result.
    template <typename F>
    DEVICE void leave(int split, F total, float max_logit, float exp_sum, float value_unit) {
        const int lane = threadIdx.x % WARP_SIZE;
        exp_sum *= FULL_SCALE<product_t>;
        const float scale =
            1.0f / (exp_sum + 1e-20f) * (FULL_SCALE<product_t> * value_unit);  // 1e-20 guards against 0 / 0
        const auto element = [&](int e) {
            const int i = lane + e * WARP_SIZE;
            return i < HEAD_SIZE ? total(i, e) * scale : 0.0f;
        };
        PassedPair* to = results + split * stride;
#pragma unroll
        for (int p = 0; p < LANE_PAIRS; ++p) to[p * WARP_SIZE + lane].store(element(2 * p), element(2 * p + 1));
        if (lane == 0) to[RESULT_PAIRS - 1].store(max_logit, exp_sum);
    }

    // Counts a split as finished. Every lane must have left its part of the result.
    DEVICE void arrive(uint32_t* counter) {
        if (threadIdx.x % WARP_SIZE == 0) before = atomicAdd(counter, 1u);
        if (speculates(results, 1)) load(0);  // speculative: before the count says which warp combines
    }

    // Whether the split was the last; this warp has then combined all splits.
    DEVICE bool combines(uint32_t* counter) {
        if (shfl<WARP_SIZE>(before, 0) != uint32_t(count - 1)) return false;
        if (threadIdx.x % WARP_SIZE == 0) atomicExch(counter, 0u);
        for (int first = 0; first < count; first += JOIN_BATCH) {
            if (first > 0 || !speculates(results, 1)) load(first);
            while (any_lane(!has_arrived()) && !PASSES_AT_ONCE) load(first);
            sync_warp();  // lane 0 clears what all lanes have loaded
            combine(first);
        }
        return true;
    }

    // The lane's words of JOIN_BATCH splits: those of its elements, of the row max and of the row sum. Lane 0: the
    // arrivals before this one.
    uint32_t words[JOIN_BATCH][2 * LANE_PAIRS + 2], before = 0;

    // Split first + i, or the last split: a conditional load would be issued late.
    DEVICE PassedPair* result(int first, int i) const { return results + min(first + i, count - 1) * stride; }

    // Loads JOIN_BATCH splits. The words are not looked at here, so that all loads are in flight together.
    DEVICE void load(int first) {
        const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
        for (int i = 0; i < JOIN_BATCH * (LANE_PAIRS + 1); ++i) {
            const int split = i / (LANE_PAIRS + 1), p = i % (LANE_PAIRS + 1);
            const PassedPair* const from = result(first, split);
            from[p < LANE_PAIRS ? p * WARP_SIZE + lane : RESULT_PAIRS - 1].load(words[split][2 * p],
                                                                                words[split][2 * p + 1]);
        }
    }

    // Whether all words of the lane are nonzero.
    DEVICE bool has_arrived() const {
        uint32_t least = ~0u;
#pragma unroll
        for (int i = 0; i < JOIN_BATCH * (2 * LANE_PAIRS + 2); ++i) {
            least = min(least, words[i / (2 * LANE_PAIRS + 2)][i % (2 * LANE_PAIRS + 2)]);
        }
        return least > 0;
    }

    DEVICE void combine(int first) {
        const int lane = threadIdx.x % WARP_SIZE;
        const auto float_at = [&](int split, int i) { return PassedPair::float_of(words[split][i]); };
        float larger = max_logit;
#pragma unroll
        for (int i = 0; i < JOIN_BATCH; ++i) larger = fmaxf(larger, float_at(i, 2 * LANE_PAIRS));
        const float correction = relative_exp2(max_logit, larger);
        max_logit = larger;
        exp_sum *= correction;
#pragma unroll
        for (int e = 0; e < LANE_ELEMENTS; ++e) sum[e] *= correction;
#pragma unroll
        for (int i = 0; i < JOIN_BATCH; ++i) {
            if (first + i >= count) continue;
            const float factor = float_at(i, 2 * LANE_PAIRS + 1) *
                                 (1.0f / FULL_SCALE<float>)*relative_exp2(float_at(i, 2 * LANE_PAIRS), larger);
            exp_sum += factor;
#pragma unroll
            for (int e = 0; e < LANE_ELEMENTS; ++e) sum[e] = fmaf(factor, float_at(i, e), sum[e]);
            PassedPair* const from = result(first, i);
#pragma unroll
            for (int p = 0; p < LANE_PAIRS; ++p) from[p * WARP_SIZE + lane] = {};
            if (lane == 0) from[RESULT_PAIRS - 1] = {};
        }
    }
};
