// attention.cuh: what the kernels of decode attention share: whose tokens a block takes, and how partial results meet.
//
// A sequence of `length` tokens is cut into splits, and the block of one split leaves, for every query head, the largest
// logit, the sum of the exponentials relative to it, and the weighted mean of the values; attention_combine.cu joins them.
// Logits are kept in units of log 2, where an exponential is one instruction.
#pragma once
#include "vec.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr int TILE_TOKENS = 16;  // splits begin at multiples of it

// The tokens first <= i < length are attended; split s of count has those of origin + [s, s + 1) * size among them.
struct Splits {
    int first, length, origin, size, count;

    // `most_tokens` bounds the length: what the block table has room for. `window` of 0 is none. A `partition` fixes the size
    // of the splits and starts them at token 0; else they are made as equal as `most_splits` allows, no smaller than `least`.
    DEVICE Splits(int64_t given, int64_t most_tokens, int64_t window, int partition, int most_splits, int least) {
        length = int(min(max(given, int64_t(0)), most_tokens));
        first = window > 0 && length > window ? int(length - window) : 0;
        origin = partition ? 0 : first / TILE_TOKENS * TILE_TOKENS;
        const int tokens = length - origin;
        const int even = ceil_div(ceil_div(tokens, most_splits), TILE_TOKENS) * TILE_TOKENS;
        size = partition ? partition : max(even, least);
        count = tokens / size + (tokens % size > 0);
    }
    DEVICE int begin(int split) const { return origin + split * size; }
    DEVICE int end(int split) const { return min(length - begin(split), size) + begin(split); }
    DEVICE bool exists(int split) const { return split < count && end(split) > first; }
};

// Into how many splits sequences are cut so that all take about as long, where `slots` splits run at the same time: if sequences
// are alike, no more than run together (or, of long ones, in two rounds), else some more, so that no long one is left at the
// end. All lanes of a warp call.
constexpr float LONG_TOKENS = 4096.0f;

template <typename L>
struct Balance {
    const L* seq_lens;
    int64_t step, num_seqs, most;
    float share, most_splits;  // share: of the slots, for a token
    int equal;                 // splits of each of sequences that are alike, 0 if they are not

    DEVICE Balance(const L* seq_lens, int64_t step, int64_t num_seqs, int64_t most_tokens, int64_t window, float slots, int64_t most_splits)
        : seq_lens(seq_lens), step(step), num_seqs(num_seqs), most(window > 0 ? min(window, most_tokens) : most_tokens),
          most_splits(float(most_splits)) {
        float total = 0.0f, longest = 0.0f;
        for (int64_t seq = threadIdx.x % WARP_SIZE; seq < num_seqs; seq += WARP_SIZE) {
            const float tokens = tokens_of(seq);
            total += tokens;
            longest = fmaxf(longest, tokens);
        }
#pragma unroll
        for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) {
            total += shfl_xor(total, mask);
            longest = fmaxf(longest, shfl_xor(longest, mask));
        }
        const bool alike = longest * float(num_seqs) <= 1.25f * total;
        const float rounds = total > LONG_TOKENS * float(num_seqs) ? 2.0f : 1.0f;
        equal = alike ? int(fminf(fmaxf(floorf(rounds * slots / float(num_seqs)), 1.0f), this->most_splits)) : 0;
        share = slots / fmaxf(total, 1.0f);
    }
    DEVICE float tokens_of(int64_t seq) const {
        return float(int(min(max(int64_t(seq_lens[seq * step]), int64_t(0)), most)));
    }
    DEVICE int splits_of(int64_t seq) const {
        return equal ? equal : int(fminf(fmaxf(ceilf(2.0f * tokens_of(seq) * share), 1.0f), most_splits));
    }
    // Split `number`, counted over all sequences: becomes its number within the sequence `seq`, which is negative if there is
    // no such split.
    DEVICE int find(int& number) const {
        if (equal) {
            const int seq = number / equal;
            number -= seq * equal;
            return seq < num_seqs ? seq : -1;
        }
        const int lane = threadIdx.x % WARP_SIZE;
        for (int first = 0; first < num_seqs; first += WARP_SIZE) {
            const int own = first + lane < num_seqs ? splits_of(first + lane) : 0;
            int up_to = own;
#pragma unroll
            for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
                const int before = shfl<WARP_SIZE>(up_to, max(lane - distance, 0));
                if (lane >= distance) up_to += before;
            }
            const int all = shfl<WARP_SIZE>(up_to, WARP_SIZE - 1);
            if (number < all) {
                int hit = number < up_to ? lane : WARP_SIZE;  // the first such lane
#pragma unroll
                for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) hit = min(hit, shfl_xor(hit, mask));
                number -= shfl<WARP_SIZE>(up_to - own, hit);
                return first + hit;
            }
            number -= all;
        }
        return -1;
    }
};

// 2^(x - most), where `most` is the largest of the logits: 0 for -inf, also if there is nothing but -inf.
DEVICE float relative_exp2(float x, float most) { return estimate_exp2(x - (most == minus_infinity() ? 0.0f : most)); }

// tanh(z), off by less than 2^-20 of itself: near zero by its series, else 1 - 2 / (1 + exp(2z)). It takes fewer registers
// than tanhf, of which the kernels for large heads have none left.
DEVICE float hyperbolic_tangent(float z) {
    const float square = z * z;
    const float series = fmaf(fmaf(fmaf(62.0f / 2835, square, -17.0f / 315), square, 2.0f / 15), square, -1.0f / 3);
    const float share = estimate_reciprocal(1.0f + estimate_exp2(z * (2 * LOG2_E)));
    return fabsf(z) < 0.3f ? fmaf(z * square, series, z) : fmaf(-2.0f, share, 1.0f);
}

// What turns a product of query and key into a logit in units of log 2, given the `scale` of the products: a factor, and
// softcap * tanh(x / softcap) if there is a softcap.
template <bool HAS_SOFTCAP>
DEVICE float logit_unit(float scale, float softcap) {
    return HAS_SOFTCAP ? scale / softcap : scale * LOG2_E;
}
template <bool HAS_SOFTCAP>
DEVICE float logit_of(float product, float unit, float softcap) {
    return HAS_SOFTCAP ? softcap * LOG2_E * hyperbolic_tangent(product * unit) : product * unit;
}

// 1 / 2^n for the largest power of two that is not above x > 0, where both are normal.
DEVICE float inverse_power_of_two(float x) {
    const int exponent = min(max(__float_as_int(x) >> 23, 1), 253);
    return __int_as_float((254 - exponent) << 23);
}

// The row of the one query token that starts here, and ends `step` further; -1 if there are more or fewer, or no such row.
template <typename S>
DEVICE int64_t row_of(const S* start, int64_t step, int64_t num_rows) {
    const int64_t row = start[0];
    return row >= 0 && row < num_rows && start[step] == row + 1 ? row : -1;
}

// The results of WARPS warps, one element `o[i]` of a head a lane and round, meet in `total`, one warp after another: of each
// the `largest` logit and the sum of weights, of all the largest and z. f(i) is the place of o[i], negative if there is none.
// `warp_most` and `warp_sum` are shared memory for it; every thread calls.
template <int WARPS, int ROUNDS, typename F>
DEVICE void join_warps(const float (&o)[ROUNDS], float& largest, float& z, float* warp_most, float* warp_sum, float* total, F f) {
    const int warp = threadIdx.x / WARP_SIZE;
    if (threadIdx.x % WARP_SIZE == 0) {
        warp_most[warp] = largest;
        warp_sum[warp] = z;
    }
    __syncthreads();
    const float most = largest;
    largest = minus_infinity();
    z = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, warp_most[w]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) z += warp_sum[w] * relative_exp2(warp_most[w], largest);
    const float share = relative_exp2(most, largest);
    for (int turn = 0; turn < WARPS; ++turn) {
        if (warp == turn) {
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) {
                if (f(i) >= 0) total[f(i)] = turn == 0 ? o[i] * share : total[f(i)] + o[i] * share;
            }
        }
        __syncthreads();
    }
}

// N parts of a head on their way to one: the largest of their largest logits most(k), the sum z of their sums of weights z_of(k)
// relative to it, and of each the factor that makes it so.
template <int N>
struct Shares {
    float largest = minus_infinity(), z = 0.0f, of[N];

    template <typename M, typename Z>
    DEVICE Shares(M most, Z z_of) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            of[k] = most(k);
            largest = fmaxf(largest, of[k]);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            of[k] = relative_exp2(of[k], largest);
            z += z_of(k) * of[k];
        }
    }
    template <typename F>
    DEVICE float sum(F part) const {
        float result = 0.0f;
#pragma unroll
        for (int k = 0; k < N; ++k) result = fmaf(of[k], part(k), result);
        return result;
    }
};

// What THREADS threads leave of a head: elements total(i), the sum of the values by their weights relative to the `largest` logit
// (in units of log 2), and the sum z of the weights. A `direct` result is final; a sink is one more logit without a value.
// total(i, e) is asked for by the thread whose element number e this is.
template <int THREADS, int HEAD_SIZE, int PARTITION, bool HAS_SINKS, bool HAS_LSE, typename F, typename T, typename P>
DEVICE void write_result(F total, float largest, float z, float value_unit, bool direct, const float* sink, T* out, float* lse,
                         P* partial_out, float* partial_max, float* partial_sum) {
    const int number = threadIdx.x % THREADS;
    const auto each_element = [&](auto f) {
#pragma unroll
        for (int e = 0; e < ceil_div(HEAD_SIZE, THREADS); ++e) {
            const int i = number + e * THREADS;
            if (i < HEAD_SIZE) f(i, e);
        }
    };
    float all = z, weight = 1.0f;
    if (HAS_SINKS && direct) {
        const float extra = *sink * LOG2_E, larger = fmaxf(largest, extra);
        weight = relative_exp2(largest, larger);
        all = z * weight + relative_exp2(extra, larger);
        largest = larger;
    }
    // Splits that are joined get their epsilon then; the other is no more than a guard against 0 / 0.
    const float share = weight / (all + (direct || PARTITION ? 1e-6f : 1e-30f)) * value_unit;
    if (direct) {
        each_element([&](int i, int e) { out[i] = from_float<T>(total(i, e) * share); });
        if (HAS_LSE && number == 0) *lse = all == 0.0f ? minus_infinity() : largest * LN_2 + logf(all);
    } else {
        each_element([&](int i, int e) { partial_out[i] = from_float<P>(total(i, e) * share); });
        if (number == 0) {
            *partial_max = largest * LN_2;
            *partial_sum = z;
        }
    }
}
