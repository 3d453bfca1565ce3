// decode_combine.cuh: the combine of a sequence's splits inside attention_decode: the last CTA to finish computes what
// decode_combine.cu does, without another launch.
//
//     out = sum_s w_s o_s / (sum_s w_s + 1e-6),   w_s = z_s exp2(m_s - m),   m = max_s m_s
//
// Split s has stored its row max m_s in units of log 2, the row sum z_s relative to m_s, and the mean of values o_s.
//
// No fence orders the results and the count of arrivals: memory for results holds zeros, and no word of a result is
// zero, so a warp that reads a nonzero word has the float. The count only says which warp combines, and a
// warp loads results while its arrival is counted.
//
// The constants in capitals that are not defined here are those of attention_decode.cu.
#pragma once
#include "decode_tile.cuh"

constexpr int LANE_ELEMENTS = ceil_div(HEAD_SIZE, WARP_SIZE);  // elements of a head per lane: every WARP_SIZE-th
// A split's result: LANE_PARTS parts of each lane with RESULT_ACCESS of its elements each, then the row max and the row
// sum. RESULT_PARTS is the size of a result.
constexpr int RESULT_ACCESS = LANE_ELEMENTS <= 2 ? 2 : 4, LANE_PARTS = ceil_div(LANE_ELEMENTS, RESULT_ACCESS);
constexpr int RESULT_PARTS = LANE_PARTS * WARP_SIZE + 1;
using result_t = Passed<RESULT_ACCESS>;
// Splits that a warp loads at once: of each of its heads while its arrival is counted, and of a head with more splits.
// Their words are in registers that the main loop no longer needs.
constexpr int FEW_SPLITS = HEAD_SIZE <= 128 ? 4 : HEAD_SIZE * MAX_HEADS <= 2048 ? 3 : 2;
constexpr int SPLIT_WORDS = LANE_PARTS * RESULT_ACCESS + 2, MANY_SPLITS = SPLIT_WORDS <= 6 ? 16 : 96 / SPLIT_WORDS;

// The results of splits first ... first + SPLITS - 1 of one query head, as a lane loads them.
template <int SPLITS>
struct SplitBatch {
    static constexpr int64_t STRIDE = ALL_COLUMNS * RESULT_PARTS;  // from a split to the next
    uint32_t elements[SPLITS][LANE_PARTS][RESULT_ACCESS], states[SPLITS][2];

    // The row max and the row sum of a result.
    static DEVICE Passed<2>* state_of(result_t* result) {
        return reinterpret_cast<Passed<2>*>(result + LANE_PARTS * WARP_SIZE);
    }
    // Loads the batch from `from`, its first split. `count` splits exist; others have no weight. The words are not looked
    // at here, so that all loads are in flight together.
    DEVICE void load(result_t* from, int count) {
        constexpr uint32_t ZERO = 0x80000000u, MINUS_INFINITY = 0xff800000u;
#pragma unroll
        for (int i = 0; i < SPLITS; ++i, from += STRIDE) {
#pragma unroll
            for (int e = 0; e < LANE_PARTS * RESULT_ACCESS; ++e) word(i, e) = ZERO;
            states[i][0] = MINUS_INFINITY;
            states[i][1] = ZERO;
            if (i >= count) continue;
#pragma unroll
            for (int p = 0; p < LANE_PARTS; ++p) from[p * WARP_SIZE + threadIdx.x % WARP_SIZE].load(elements[i][p]);
            state_of(from)->load(states[i]);
        }
    }
    // Leaves zeros.
    static DEVICE void clear(result_t* from, int count) {
        const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
        for (int i = 0; i < SPLITS; ++i, from += STRIDE) {
            if (i >= count) continue;
#pragma unroll
            for (int p = 0; p < LANE_PARTS; ++p) from[p * WARP_SIZE + lane] = {};
            if (lane == 0) *state_of(from) = {};
        }
    }
    // Whether all words of the lane are nonzero.
    DEVICE bool has_arrived() {
        uint32_t least = ~0u;
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) {
            least = min(least, min(states[i][0], states[i][1]));
#pragma unroll
            for (int e = 0; e < LANE_PARTS * RESULT_ACCESS; ++e) least = min(least, word(i, e));
        }
        return least > 0;
    }
    DEVICE uint32_t& word(int split, int e) { return elements[split][e / RESULT_ACCESS][e % RESULT_ACCESS]; }
};

// The results of the `count` splits of one query head. A warp of the last CTA combines them in the order of the splits,
// so the result does not depend on which CTA is last. `results` points to the first split. All results and `arrived`,
// the counter of arrivals, are zero before the first split arrives, and again after the combine.
struct SplitCombine {
    result_t* results;
    uint32_t* arrived;
    int count;
    // The arguments of write_result, after all splits are combined.
    float max_logit = minus_infinity(), exp_sum = 0.0f, sum[LANE_ELEMENTS] = {};

    // Stores the result of a split. The arguments are those of write_result.
    template <typename F>
    DEVICE void leave(int split, F total, float max_logit, float exp_sum, float value_unit) const {
        const int lane = threadIdx.x % WARP_SIZE;
        exp_sum *= FULL_SCALE<product_t>;
        const float scale =
            1.0f / (exp_sum + 1e-20f) * (FULL_SCALE<product_t> * value_unit);  // 1e-20 guards against 0 / 0
        result_t* const to = results + split * SplitBatch<1>::STRIDE;
#pragma unroll
        for (int p = 0; p < LANE_PARTS; ++p) {
            float part[RESULT_ACCESS];
#pragma unroll
            for (int j = 0; j < RESULT_ACCESS; ++j) {
                const int e = p * RESULT_ACCESS + j, i = lane + e * WARP_SIZE;
                part[j] = e < LANE_ELEMENTS && i < HEAD_SIZE ? total(i, e) * scale : 0.0f;
            }
            to[p * WARP_SIZE + lane].store(part);
        }
        if (lane == 0) SplitBatch<1>::state_of(to)->store({max_logit, exp_sum});
    }

    // Counts a split as finished. Every lane must have left its part of the result. Lane 0 gets the arrivals before
    // this one.
    DEVICE void arrive(uint32_t& before, SplitBatch<FEW_SPLITS>& batch) const {
        before = threadIdx.x % WARP_SIZE == 0 ? atomicAdd(arrived, 1u) : 0;
        if (speculates(results, 1)) batch.load(results, count);  // before the count says which warp combines
    }
    // Whether all other splits had arrived before.
    DEVICE bool is_last(uint32_t before) const {
        if (shfl<WARP_SIZE>(before, 0) != uint32_t(count - 1)) return false;
        if (threadIdx.x % WARP_SIZE == 0) atomicExch(arrived, 0u);
        return true;
    }
    // Combines up to FEW_SPLITS splits, which `arrive` has loaded, or more.
    DEVICE void combine_few(SplitBatch<FEW_SPLITS>& batch) {
        if (!speculates(results, 1)) batch.load(results, count);
        add(batch, 0);
    }
    DEVICE void combine_many() {
        for (int first = 0; first < count; first += MANY_SPLITS) {
            SplitBatch<MANY_SPLITS> batch;
            batch.load(results + first * batch.STRIDE, count - first);
            add(batch, first);
        }
    }

private:
    // Adds a batch as soon as all of it has arrived.
    template <int BATCH>
    DEVICE void add(SplitBatch<BATCH>& batch, int first) {
        result_t* const from = results + first * batch.STRIDE;
        while (any_lane(!batch.has_arrived()) && !PASSES_AT_ONCE) batch.load(from, count - first);
        sync_warp();  // lane 0 clears what all lanes have loaded
        batch.clear(from, count - first);
        float larger = max_logit;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) larger = fmaxf(larger, result_t::float_of(batch.states[i][0]));
        const float correction = relative_exp2(max_logit, larger);
        max_logit = larger;
        exp_sum *= correction;
#pragma unroll
        for (int e = 0; e < LANE_ELEMENTS; ++e) sum[e] *= correction;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const float factor =
                result_t::float_of(batch.states[i][1]) *
                (1.0f / FULL_SCALE<float>)*relative_exp2(result_t::float_of(batch.states[i][0]), larger);
            exp_sum += factor;
#pragma unroll
            for (int e = 0; e < LANE_ELEMENTS; ++e) sum[e] = fmaf(factor, result_t::float_of(batch.word(i, e)), sum[e]);
        }
    }
};
