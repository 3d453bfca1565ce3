// splits.cuh: split-KV: the number of splits of a sequence, and the tokens of each split.
#pragma once
#include "sequence_search.cuh"
#include "vec.cuh"

constexpr int TILE_TOKENS = 16;  // alignment of a split's first token, unless a plan passes another unit

// The splits of one sequence. The tokens first <= i < length are attended. Of these, split s takes the tokens
// origin + s * size <= i < origin + (s + 1) * size, for 0 <= s < count.
struct Splits {
    int first, length, origin, size, count;

    // max_tokens: capacity of the block table in tokens; a longer sequence is truncated.
    // window: number of tokens at the end of the sequence that are attended; 0: all tokens.
    // partition: tokens of every split, counted from token 0. 0: at most max_splits splits of equal size, min_split
    // tokens or more.
    // unit: every split begins at a multiple of `unit`; min_split is a multiple of it, too.
    DEVICE Splits(int64_t seq_len, int64_t max_tokens, int64_t window, int partition, int max_splits, int min_split,
                  int unit = TILE_TOKENS) {
        length = int(min(max(seq_len, int64_t(0)), max_tokens));
        first = window > 0 && length > window ? int(length - window) : 0;
        origin = partition ? 0 : first / unit * unit;
        const int tokens = length - origin;
        const int even = ceil_div(ceil_div(tokens, max_splits), unit) * unit;
        size = partition ? partition : max(even, min_split);
        count = tokens / size + (tokens % size > 0);
    }
    DEVICE int begin(int split) const { return origin + split * size; }
    DEVICE int end(int split) const { return min(length - begin(split), size) + begin(split); }
    DEVICE bool exists(int split) const { return split < count && end(split) > first; }
};

// The waves of splits that take the least time, by the mean length of the sequences: two from `two` tokens on, three
// from `three` on. decode_waves.py computes them.
struct WavesFrom {
    float two, three;
    DEVICE float waves(float tokens) const { return tokens < two ? 1.0f : tokens < three ? 2.0f : 3.0f; }
};

// Waves: of all sequences, `splits` run at once.
struct Waves {
    float splits;
    WavesFrom equal, mixed;
};

// Balance: the number of splits of each sequence, chosen so that all CTAs of a launch end at about the same time.
//
// Sequences of equal length get as many splits as fit in whole waves (`equal`). Sequences of mixed lengths get splits in
// proportion to their length, and at most whole waves of them (`mixed`): a last wave with few CTAs leaves memory
// bandwidth idle. Where whole sequences of equal length would leave less than MIN_TAIL of a wave, the last ones are split
// so that they fill it. More than two waves of sequences of mixed lengths need no whole waves. All lanes of a warp must
// call every function.
constexpr int MIN_WHOLE_HEAD = 128;  // head size from which whole waves are faster
// With more sequences than splits in a wave, the last sequences of the batch, one of LATE_PART, have LATE_WEIGHT times
// the splits per token: their CTAs start last, and are to end together. docs/performance/decode.md, "Short splits last"
constexpr int LATE_PART = 3;
constexpr float LATE_WEIGHT = 3.0f;
// Sequences of equal length: of a last wave that is less than MIN_TAIL of a wave, two or more splits of a sequence run
// at once, at most MOST_TAIL_SPLITS. docs/performance/decode.md, "Splits fill the last wave"
constexpr float MIN_TAIL = 0.5f, MOST_TAIL_SPLITS = 8.0f;

template <typename L>
struct Balance {
    const L* seq_lens;
    int64_t step, num_seqs, max_attended;
    float max_splits;
    float splits_per_token;           // unless equal_splits; splits_of multiplies by the weighted length and rounds up
    int equal_splits;                 // splits of every sequence if all have about one length and no tail, else 0
    int64_t first_late;               // the first sequence with late_weight
    float late_weight = LATE_WEIGHT;  // the others have a weight of one

    DEVICE Balance(const L* seq_lens, int64_t step, int64_t num_seqs, int64_t max_tokens, int64_t window,
                   const Waves& wave, int64_t max_splits, int head_size)
        : seq_lens(seq_lens),
          step(step),
          num_seqs(num_seqs),
          max_attended(window > 0 ? min(window, max_tokens) : max_tokens),
          max_splits(float(max_splits)) {
        const float seqs = float(num_seqs), wave_splits = wave.splits;
        first_late = seqs > wave_splits ? num_seqs - num_seqs / LATE_PART : num_seqs;
        float total = 0.0f, weighted = 0.0f, longest = 0.0f;
        for (int64_t seq = threadIdx.x % WARP_SIZE; seq < num_seqs; seq += WARP_SIZE) {
            const float tokens = tokens_of(seq);
            total += tokens;
            weighted += tokens * weight_of(seq);
            longest = fmaxf(longest, tokens);
        }
#pragma unroll
        for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) {
            total += shfl_xor(total, mask);
            weighted += shfl_xor(weighted, mask);
            longest = fmaxf(longest, shfl_xor(longest, mask));
        }
        const bool alike = longest * seqs <= 1.25f * total;
        const float tail = seqs / wave_splits - floorf(seqs / wave_splits);  // a thousandth may be a rounding error
        equal_splits = 0;
        if (alike && head_size >= MIN_WHOLE_HEAD && seqs > wave_splits && tail > 0.001f && tail < MIN_TAIL) {
            fill_last_wave(wave_splits, tail, longest);
            return;
        }
        const float mean = total / seqs;
        if (alike) {
            const float whole =
                floorf(wave.equal.waves(mean) * wave_splits / seqs + 1e-4f);  // less is a rounding error
            equal_splits = int(fminf(fmaxf(whole, 1.0f), this->max_splits));
        }
        splits_per_token = 2.0f * wave_splits / fmaxf(weighted, 1.0f);
        if (!alike && seqs <= 2.0f * wave_splits) {
            fill_waves(wave_splits, weighted, wave.mixed.waves(mean), head_size >= MIN_WHOLE_HEAD);
        }
    }
    DEVICE float weight_of(int64_t seq) const { return seq < first_late ? 1.0f : late_weight; }
    DEVICE float tokens_of(int64_t seq) const {
        return float(int(min(max(int64_t(seq_lens[seq * step]), int64_t(0)), max_attended)));
    }
    DEVICE int splits_of(int64_t seq) const {
        return equal_splits ? equal_splits : mixed_splits(tokens_of(seq) * weight_of(seq), splits_per_token);
    }
    DEVICE int mixed_splits(float weighted_tokens, float per_token) const {
        return int(fminf(fmaxf(ceilf(weighted_tokens * per_token), 1.0f), max_splits));
    }
    // Sequences of about one length get one split, and the last ones as many as fit in `tail` of a wave, 1 / tail. There
    // are as many last ones as make whole waves.
    DEVICE void fill_last_wave(float wave_splits, float tail, float longest) {
        const float seqs = float(num_seqs);
        late_weight = fminf(fminf(floorf(1.0f / tail), MOST_TAIL_SPLITS), max_splits);
        const float idle = (1.0f - tail) * wave_splits;  // splits of the last wave without others
        first_late = num_seqs - int64_t(fminf(floorf(idle / (late_weight - 1.0f)), seqs));
        splits_per_token = 0.9999f / fmaxf(longest, 1.0f);  // rounding up must not make a second split
    }
    // Sets splits_per_token for whole waves; unless may_be_several, only for one wave. Rounding up adds less than one
    // split per sequence, so TRIES values are tested; the first one with a total that fits in the waves is taken.
    DEVICE void fill_waves(float wave_splits, float weighted, float waves, bool may_be_several) {
        if (waves > 1.0f && !may_be_several) return;
        constexpr int TRIES = 4;
        const float seqs = float(num_seqs), most = waves * wave_splits;
        const auto per_token = [&](int i) { return fmaxf(most - (i + 1) * (1.0f / TRIES) * seqs, 0.0f) / weighted; };
        int counts[TRIES] = {};
        for (int64_t seq = threadIdx.x % WARP_SIZE; seq < num_seqs; seq += WARP_SIZE) {
            const float tokens = tokens_of(seq) * weight_of(seq);
#pragma unroll
            for (int i = 0; i < TRIES - 1; ++i) counts[i] += mixed_splits(tokens, per_token(i));
        }
        splits_per_token = per_token(TRIES - 1);
#pragma unroll
        for (int i = TRIES - 2; i >= 0; --i) {
#pragma unroll
            for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) counts[i] += shfl_xor(counts[i], mask);
            if (float(counts[i]) <= most) splits_per_token = per_token(i);
        }
    }
    // The sequence of a split. `split` counts the splits of all sequences, and becomes the number of the split within
    // its sequence. Returns -1 if there is no such split.
    DEVICE int find(int& split) const {
        if (equal_splits) {
            const int seq = split / equal_splits;
            split -= seq * equal_splits;
            return seq < num_seqs ? seq : -1;
        }
        return find_item(split, int(num_seqs), [&](int seq) { return splits_of(seq); });
    }
};
