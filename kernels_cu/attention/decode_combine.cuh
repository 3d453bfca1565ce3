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

// Number of splits that a warp loads at once.
constexpr int JOIN_BATCH = HEAD_SIZE > 128 ? 3 : 4;
constexpr int LANE_ELEMENTS = ceil_div(HEAD_SIZE, WARP_SIZE);  // elements of a head per lane: every WARP_SIZE-th
// RESULT_PAIRS: pairs of floats in a split's result. Pair p * WARP_SIZE + lane holds elements 2p and 2p + 1 of the
// lane; the last pair holds the row max and the row sum.
constexpr int LANE_PAIRS = ceil_div(LANE_ELEMENTS, 2), RESULT_PAIRS = LANE_PAIRS * WARP_SIZE + 1;

// The results of the `count` splits of one query head. A warp of the last CTA combines them in the order of the splits,
// so the result does not depend on which CTA is last. `results` points to the RESULT_PAIRS pairs of the first split;
// the stride between splits is `stride` pairs. All results and `counter` are zero before the first split arrives, and
// again after the combine.
struct SplitCombine {
    PassedPair* results;
    int64_t stride;
    int count;
    // The arguments of write_result, after all splits are combined.
    float max_logit = minus_infinity(), exp_sum = 0.0f, sum[LANE_ELEMENTS] = {};

    DEVICE SplitCombine(PassedPair* results, int64_t stride, int count)
        : results(results), stride(stride), count(count) {}

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

    // Counts a split as finished. Returns whether it was the last; this warp has then combined all splits.
    DEVICE bool arrive(uint32_t* counter) {
        const int lane = threadIdx.x % WARP_SIZE;
        sync_warp();
        uint32_t before = 0;
        if (lane == 0) before = atomicAdd(counter, 1u);
        Batch batch;
        bool complete =
            speculates(results, 1) && load(batch, 0);  // speculative: before the count says which warp combines
        if (shfl<WARP_SIZE>(before, 0) != uint32_t(count - 1)) return false;
        if (lane == 0) atomicExch(counter, 0u);
        for (int first = 0; first < count; first += JOIN_BATCH) {
            while (!complete) complete = load(batch, first) || PASSES_AT_ONCE;
            sync_warp();  // lane 0 clears what all lanes have loaded
            combine(batch, first);
            complete = false;
        }
        return true;
    }

private:
    struct Batch { float logit[JOIN_BATCH], weight[JOIN_BATCH], x[JOIN_BATCH][2 * LANE_PAIRS]; };

    // Split first + i, or the last split: a conditional load would be issued late.
    DEVICE PassedPair* result(int first, int i) const { return results + min(first + i, count - 1) * stride; }

    // Whether all lanes have read nonzero results of all splits of the batch.
    DEVICE bool load(Batch& batch, int first) const {
        const int lane = threadIdx.x % WARP_SIZE;
        bool found = true;
#pragma unroll
        for (int i = 0; i < JOIN_BATCH; ++i) {
            const PassedPair* from = result(first, i);
            found &= from[RESULT_PAIRS - 1].load(batch.logit[i], batch.weight[i]);
#pragma unroll
            for (int p = 0; p < LANE_PAIRS; ++p) {
                found &= from[p * WARP_SIZE + lane].load(batch.x[i][2 * p], batch.x[i][2 * p + 1]);
            }
        }
        return !any_lane(!found);
    }

    DEVICE void combine(const Batch& batch, int first) {
        const int lane = threadIdx.x % WARP_SIZE;
        float larger = max_logit;
#pragma unroll
        for (int i = 0; i < JOIN_BATCH; ++i) larger = fmaxf(larger, batch.logit[i]);
        const float correction = relative_exp2(max_logit, larger);
        max_logit = larger;
        exp_sum *= correction;
#pragma unroll
        for (int e = 0; e < LANE_ELEMENTS; ++e) sum[e] *= correction;
#pragma unroll
        for (int i = 0; i < JOIN_BATCH; ++i) {
            if (first + i >= count) continue;
            const float factor = batch.weight[i] * (1.0f / FULL_SCALE<float>)*relative_exp2(batch.logit[i], larger);
            exp_sum += factor;
#pragma unroll
            for (int e = 0; e < LANE_ELEMENTS; ++e) sum[e] = fmaf(factor, batch.x[i][e], sum[e]);
            PassedPair* const from = result(first, i);
#pragma unroll
            for (int p = 0; p < LANE_PAIRS; ++p) from[p * WARP_SIZE + lane] = {};
            if (lane == 0) from[RESULT_PAIRS - 1] = {};
        }
    }
};
