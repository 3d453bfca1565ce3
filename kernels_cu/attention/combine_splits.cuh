// combine_splits.cuh: the combine of the partial results that prefill kernels leave with split-KV.
//
//     out = sum_s w_s o_s / (sum_s w_s + 1e-6),   w_s = z_s exp(m_s - m),   m = max_s m_s
//
// Split s has stored the row max m_s, the row sum z_s relative to m_s, and the mean of values o_s. A sink is one more
// logit without a value.
#pragma once
#include "attention.cuh"
#include "reduce.cuh"
#include "tile_splits.cuh"

// Partial results, and where a row's result goes. Members are the kernel's arguments of the same names. FRESH: other
// CTAs of this launch have written the partial results. SLICES: the slices of a head's values, each with its own row of
// partial results and VALUE_SIZE elements of out. num_heads and `head` count the slices of all heads.
template <bool FRESH, int SLICES = 1>
struct PartialRows {
    using pointer_t = conditional_t<FRESH, float*, const float*>;
    static constexpr int ACCESS = FRESH || VALUE_SIZE > 64 ? 4 : 2;  // elements of a row in one access of a lane
    static constexpr int BATCH = 8;                                  // splits of a row that a lane loads at once
    scalar_t* out;
    float* lse;
    pointer_t tmp_out, max_logits, exp_sums;
    const float* sinks;
    int64_t num_tokens, max_splits, out_stride, num_heads;

    static DEVICE float load(const float* address) { return FRESH ? load_fresh(address) : *address; }

    // The first slice of a head stores its log-sum-exp.
    DEVICE void store_lse(int64_t token, int64_t head, float log_sum) const {
        if (HAS_LSE && head % SLICES == 0) lse[head / SLICES * num_tokens + token] = log_sum;
    }

    // Combines the splits of a row. Every lane of the warp calls; a lane has ACCESS of each WARP_SIZE * ACCESS
    // elements.
    DEVICE void combine(int64_t token, int64_t head, int splits) const {
        const int lane = threadIdx.x % WARP_SIZE;
        const int64_t first_part = (token * num_heads + head) * max_splits;
        const float sink = HAS_SINKS ? sinks[head / SLICES] : minus_infinity();
        // A lane has each WARP_SIZE-th split. What it needs of the first ones is kept, and so are the first results: all
        // of their loads are in flight together.
        const auto max_of = [&](int split) {
            return split < splits ? load(max_logits + first_part + split) : minus_infinity();
        };
        const auto sum_of = [&](int split) { return split < splits ? load(exp_sums + first_part + split) : 0.0f; };
        const float own_max = max_of(lane), own_sum = sum_of(lane);
        float x[BATCH][ACCESS];  // BATCH splits of the lane's elements
        const auto load_batch = [&](int first, int column) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
#pragma unroll
                for (int k = 0; k < ACCESS; ++k) x[i][k] = 0.0f;
                if (first + i >= splits || column >= VALUE_SIZE) continue;
                load_values(x[i], tmp_out + (first_part + first + i) * VALUE_SIZE + column);
            }
        };
        load_batch(0, lane * ACCESS);

        float max_logit = fmaxf(sink, own_max);
        for (int split = lane + WARP_SIZE; split < splits; split += WARP_SIZE)
            max_logit = fmaxf(max_logit, max_of(split));
        max_logit = lane_reduce<Max, WARP_SIZE>(max_logit);
        // exp(x - max_logit); 0 for x = -inf, also where max_logit is -inf.
        const auto relative_exp = [&](float x) { return expf(x - (max_logit == minus_infinity() ? 0.0f : max_logit)); };
        const float own_weight = own_sum * relative_exp(own_max);
        const auto weight_of = [&](int split) {
            return split < WARP_SIZE ? own_weight : sum_of(split) * relative_exp(max_of(split));
        };
        float exp_sum = own_weight;
        for (int split = lane + WARP_SIZE; split < splits; split += WARP_SIZE) exp_sum += weight_of(split);
        exp_sum = lane_reduce<Sum, WARP_SIZE>(exp_sum);
        if (HAS_SINKS) exp_sum += relative_exp(sink);
        if (lane == 0) store_lse(token, head, exp_sum == 0.0f ? minus_infinity() : max_logit + logf(exp_sum));
        const float scale = 1.0f / (exp_sum + 1e-6f);
        for (int first = 0; first < VALUE_SIZE; first += WARP_SIZE * ACCESS) {
            const int column = first + lane * ACCESS;
            float sum[ACCESS] = {}, part_of_lane = 0.0f;
            for (int batch = 0; batch < splits; batch += BATCH) {
                if (first + batch > 0) load_batch(batch, column);
                // <= 1, so that products cannot overflow
                if (batch % WARP_SIZE == 0) part_of_lane = weight_of(batch + lane) * scale;
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const float part = shfl<WARP_SIZE>(part_of_lane, batch % WARP_SIZE + i);
#pragma unroll
                    for (int k = 0; k < ACCESS; ++k) sum[k] = fmaf(part, x[i][k], sum[k]);
                }
            }
            if (column < VALUE_SIZE)
                Vec<scalar_t, ACCESS>::from_floats(sum).store(out + token * out_stride + head * VALUE_SIZE + column);
        }
    }

private:
    static DEVICE void load_values(float (&x)[ACCESS], const float* from) {
        if constexpr (FRESH) {
            const float4 four = load_fresh(reinterpret_cast<const float4*>(from));
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        } else {
            Vec<float, ACCESS>::load(from).to_floats(x);
        }
    }
};
