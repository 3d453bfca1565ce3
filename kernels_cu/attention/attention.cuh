// attention.cuh: code shared by the attention kernels: split-KV (splits.cuh), parts of the online softmax, and the
// combine of partial results.
//
// Split-KV: the tokens of a sequence are divided into splits, and one CTA computes one split. For every query head the
// CTA stores a partial result: the row max, the sum of the exponentials relative to it (row sum), and the mean of the
// values weighted by these exponentials. decode_combine.cu combines the partial results of a sequence.
//
// Logits are in units of log 2, so that the exponential of a logit is one instruction (ex2). A `probability` below is
// such an exponential relative to the running row max; the division by the row sum comes last.
#pragma once
#include "splits.cuh"

// 2^(x - max_logit) for a logit x <= max_logit. An x of -inf gives 0, also where max_logit is -inf.
DEVICE float relative_exp2(float x, float max_logit) {
    return estimate_exp2(x - (max_logit == minus_infinity() ? 0.0f : max_logit));
}

// Adds an attention sink, a logit without a value, to a row's max (in units of log 2) and its row sum. Returns the
// correction factor for what was accumulated relative to the old row max.
DEVICE float count_sink(float sink, float& max_logit, float& exp_sum) {
    const float logit = sink * LOG2_E, larger = fmaxf(max_logit, logit);
    const float factor = relative_exp2(max_logit, larger);
    exp_sum = exp_sum * factor + relative_exp2(logit, larger);
    max_logit = larger;
    return factor;
}

// The log-sum-exp of a row, from its row max (in units of log 2) and its row sum.
DEVICE float log_sum_exp(float max_logit, float exp_sum) {
    return exp_sum == 0.0f ? minus_infinity() : max_logit * LN_2 + logf(exp_sum);
}

// HEADROOM: values may be as large as floats are, so that their weighted sum could overflow although their mean is a
// float. Probabilities of type T, an operand of P V, are therefore scaled down by 2^HEADROOM<T>: a sequence has fewer
// than 2^32 tokens. float16 cannot represent such small probabilities, and has no values that need them. e4m3 (largest
// 448, smallest 2^-9) has probabilities scaled up by 2^8.
template <typename T> constexpr int HEADROOM = is_same<T, half_t> ? 0 : is_same<T, fp8_e4m3_t> ? -8 : 32;
// 2^HEADROOM<T>: the final factor of row sums and accumulators.
template <typename T> constexpr float FULL_SCALE = power_of_two(HEADROOM<T>);

// max_logit + HEADROOM<T>, which is subtracted from logits before the exponential. Floats next to a huge max_logit are
// more than HEADROOM apart. Rounded up, the base would make every probability 0; rounded down, it is max_logit itself:
// then probabilities are not scaled down, and only the largest logit has one.
template <typename T>
DEVICE float probability_base(float max_logit) {
    const float finite = max_logit == minus_infinity() ? 0.0f : max_logit;
    if constexpr (HEADROOM<T> == 0) return finite;
    return add_down(finite, HEADROOM<T>);
}

// The probability of a logit x <= max_logit, scaled down by 2^HEADROOM<T>.
template <typename T>
DEVICE float probability_of(float x, float max_logit) {
    return estimate_exp2(x - probability_base<T>(max_logit));
}

// tanh(z) with a relative error below 2^-20: near zero by its series, else 1 - 2 / (1 + exp(2z)). It takes fewer
// registers than tanhf; kernels with large heads are at their register limit.
DEVICE float hyperbolic_tangent(float z) {
    const float square = z * z;
    const float series = fmaf(fmaf(fmaf(62.0f / 2835, square, -17.0f / 315), square, 2.0f / 15), square, -1.0f / 3);
    const float share = estimate_reciprocal(1.0f + estimate_exp2(z * (2 * LOG2_E)));
    return fabsf(z) < 0.3f ? fmaf(z * square, series, z) : fmaf(-2.0f, share, 1.0f);
}

// The logit, in units of log 2, of a score q . k: logit_of(score, logit_unit(scale, softcap), softcap). The formula is
// score * scale, or with a soft cap softcap * tanh(score * scale / softcap).
template <bool HAS_SOFTCAP>
DEVICE float logit_unit(float scale, float softcap) {
    return HAS_SOFTCAP ? scale / softcap : scale * LOG2_E;
}
template <bool HAS_SOFTCAP>
DEVICE float logit_of(float product, float unit, float softcap) {
    return HAS_SOFTCAP ? softcap * LOG2_E * hyperbolic_tangent(product * unit) : product * unit;
}

// The logit under a soft cap by a polynomial of 2, 3 or 5 terms, for scores with a magnitude below `limit`. The
// relative error is below 2^-19 with 3 or 5 terms. With 2 terms the absolute error of the logit, and so the relative
// error of its probability, is at most MAX_LOGIT_ERROR: a 16th of the rounding error of bfloat16.
constexpr float MAX_LOGIT_ERROR = 0x1p-13f;

template <int TERMS>
struct CapSeries {
    static_assert(TERMS == 2 || TERMS == 3 || TERMS == 5);
    float terms[TERMS];  // the logit of x is x * (terms[0] + terms[1] * x^2 + terms[2] * x^4 + ...)
    float limit;         // 0 if a term is not a normal number

    DEVICE CapSeries(float scale, float softcap) {
        // tanh(z) / z in powers of z^2: the minimax polynomial (relative error) of this degree up to max_z.
        float of_z[] = {TERMS == 3 ? 0.9999983f : 0.9999990f, TERMS == 3 ? -0.33303373f : -0.33325372f,
                        TERMS == 3 ? 0.12541972f : 0.13230564f, -0.049180104f, 0.0121001f};
        float max_z = TERMS == 3 ? 0.32f : 0.8f;
        if constexpr (TERMS == 2) {
            // With q = z^2 <= Q: the line through the values at q = Q / 2 * (1 -+ sqrt(1 / 2)). It differs from tanh(z)
            // / z by at most Q^2 / 8 times half of the second derivative, which is 2 / 15 at 0 and less beyond: by Q^2
            // / 60. A logit up to softcap * sqrt(Q) then has an error of softcap * Q^2.5 / 60.
            max_z = fminf(exp2f(log2f(60.0f * MAX_LOGIT_ERROR / softcap) / 5.0f), 0.32f);
            const float q = max_z * max_z;
            of_z[0] = 1.0f - (2.0f / 15 - 17.0f / 315 * q) * (q * q / 8.0f);
            of_z[1] = -1.0f / 3 + (2.0f / 15 - 17.0f / 315 * 7 / 8 * q) * q;
        }
        const float ratio = scale / softcap;
        float power = scale * LOG2_E;
#pragma unroll
        for (int i = 0; i < TERMS; ++i) {
            terms[i] = of_z[i] * power;
            power *= ratio * ratio;
        }
        const float last = fabsf(terms[TERMS - 1]);
        limit = last > 0x1p-100f && last < 0x1p100f ? max_z / fabsf(ratio) : 0.0f;
        // ptxas keeps terms in uniform registers, and an instruction reads only one of these; the first instruction of
        // logit() reads two terms. Adding a zero that depends on the thread moves one term to an ordinary register.
        terms[TERMS - 1] = fmaf(float(threadIdx.x), 0.0f, terms[TERMS - 1]);
    }
    // The logit of a score, less `base`.
    DEVICE float logit(float x, float base = 0.0f) const {
        const float square = x * x;
        float sum = terms[TERMS - 1];
#pragma unroll
        for (int i = TERMS - 2; i >= 0; --i) sum = fmaf(sum, square, terms[i]);
        return fmaf(x, sum, -base);
    }
};

// 1 / 2^n for the largest power of two 2^n <= x, where x > 0 and both 2^n and 1 / 2^n are normal.
DEVICE float inverse_power_of_two(float x) {
    const int exponent = min(max(__float_as_int(x) >> 23, 1), 253);
    return __int_as_float((254 - exponent) << 23);
}

// The row of a sequence's only query token. Rows start[0] to start[step] - 1 belong to the sequence. Returns -1 if the
// sequence has another number of query tokens or its row lies outside the tensor.
template <typename S>
DEVICE int64_t row_of(const S* start, int64_t step, int64_t num_rows) {
    const int64_t row = start[0];
    return row >= 0 && row < num_rows && start[step] == row + 1 ? row : -1;
}

// Combines the results of WARPS warps for one head. Lanes of every warp hold elements o[i] of the head. f(i) is the
// index of o[i] in the head, or negative if o[i] is unused. On entry max_logit and exp_sum are those of the warp; on
// return they are those of the whole CTA, and `total` holds the elements. warp_max [WARPS], warp_sum [WARPS] and total
// are in shared memory. Every thread of the CTA must call.
template <int WARPS, int ROUNDS, typename F>
DEVICE void combine_warps(const float (&o)[ROUNDS], float& max_logit, float& exp_sum, float* warp_max, float* warp_sum,
                          float* total, F f) {
    const int warp = threadIdx.x / WARP_SIZE;
    if (threadIdx.x % WARP_SIZE == 0) {
        warp_max[warp] = max_logit;
        warp_sum[warp] = exp_sum;
    }
    __syncthreads();
    const float own_max = max_logit;
    max_logit = minus_infinity();
    exp_sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) max_logit = fmaxf(max_logit, warp_max[w]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) exp_sum += warp_sum[w] * relative_exp2(warp_max[w], max_logit);
    const float factor = relative_exp2(own_max, max_logit);
    for (int turn = 0; turn < WARPS; ++turn) {
        if (warp == turn) {
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) {
                if (f(i) >= 0) total[f(i)] = turn == 0 ? o[i] * factor : total[f(i)] + o[i] * factor;
            }
        }
        __syncthreads();
    }
}

// Combines N partial results of one head: part k has the row max max_of(k) and the row sum sum_of(k) relative to it. An
// element of the combined result is weighted_sum(part), where part(k) is the element of part k.
template <int N>
struct Combine {
    float max_logit = minus_infinity(), exp_sum = 0.0f;
    float factor[N];  // correction of part k: from its row max to the combined one

    template <typename M, typename S>
    DEVICE Combine(M max_of, S sum_of) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            factor[k] = max_of(k);
            max_logit = fmaxf(max_logit, factor[k]);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            factor[k] = relative_exp2(factor[k], max_logit);
            exp_sum += sum_of(k) * factor[k];
        }
    }
    template <typename F>
    DEVICE float weighted_sum(F part) const {
        float result = 0.0f;
#pragma unroll
        for (int k = 0; k < N; ++k) result = fmaf(factor[k], part(k), result);
        return result;
    }
};

// Writes the result of a CTA for one head, by THREADS threads: the final result to `out` and `lse` if `direct`, else
// the partial result of the split to partial_out, partial_max and partial_sum. total(i, e) is element i of the
// accumulator P V, and e counts the elements of the calling thread. Both `total` and exp_sum are scaled down by
// 2^HEADROOM<Q>. Only final results include a sink.
template <typename Q, int THREADS, int HEAD_SIZE, int PARTITION, bool HAS_SINKS, bool HAS_LSE, typename F, typename T,
          typename P>
DEVICE void write_result(F total, float max_logit, float exp_sum, float value_unit, bool direct, const float* sink,
                         T* out, float* lse, P* partial_out, float* partial_max, float* partial_sum) {
    const int thread = threadIdx.x % THREADS;
    const auto each_element = [&](auto f) {
#pragma unroll
        for (int e = 0; e < ceil_div(HEAD_SIZE, THREADS); ++e) {
            const int i = thread + e * THREADS;
            if (i < HEAD_SIZE) f(i, e);
        }
    };
    exp_sum *= FULL_SCALE<Q>;
    const float factor = HAS_SINKS && direct ? count_sink(*sink, max_logit, exp_sum) : 1.0f;
    // With PARTITION, partial results include the formula's epsilon of 1e-6, as final ones do. Otherwise the combine
    // adds it, and 1e-20 only guards against 0 / 0 here.
    const float scale = factor / (exp_sum + (direct || PARTITION ? 1e-6f : 1e-20f)) * (FULL_SCALE<Q> * value_unit);
    if (direct) {
        each_element([&](int i, int e) { out[i] = from_float<T>(total(i, e) * scale); });
        if (HAS_LSE && thread == 0) *lse = log_sum_exp(max_logit, exp_sum);
    } else {
        each_element([&](int i, int e) { partial_out[i] = from_float<P>(total(i, e) * scale); });
        if (thread == 0) {
            *partial_max = max_logit * LN_2;
            *partial_sum = exp_sum;
        }
    }
}
