// mla_schedule.cuh: the work items of a CTA of the MLA decode kernels on Hopper: sequences of any lengths, in equal
// shares (split-KV).
//
// A sequence has units of UNIT tokens, at least one. The units of all sequences, one sequence after another, are cut
// into shares of equal size, one for each CTA of a head group: all CTAs end at about the same time, whatever the
// lengths. A share covers a piece of each of some adjacent sequences. Every item of a CTA but its first one takes the
// time of some units: KV tiles, results and partial results follow one another. So a sequence begins with a gap of as
// many units without a token, and a share with many short sequences has fewer tokens. There are two other schedules:
// - Aligned shares: each sequence begins a share, and a CTA has one item, a piece of one sequence. The last share of a
//   sequence may be shorter. Taken where shares are not longer than equal ones with gaps.
// - Whole sequences, where one share per sequence takes hardly longer than a cut: nothing is combined.
//
// At most the first and the last item of a share are pieces of longer sequences, so a share has two slots for partial
// results: the even one for its first item, the odd one for an item that begins within the share.
#pragma once
#include "attention.cuh"
#include "memory.cuh"
#include "reduce.cuh"
#include "vec.cuh"

// A CTA's tokens of a sequence.
struct MlaItem {
    int seq, begin, end;  // tokens begin to end - 1
    int slot;             // of the partial results
    int pieces;           // pieces of the sequence: the item is the whole sequence if there is one
    int first_share;      // the share that has the first piece; the next shares have the others
    int piece;            // which piece the item is

    DEVICE bool is_whole() const { return pieces == 1; }
};

// The pieces of a sequence. mla_combine reads it.
struct alignas(8) MlaPieces {
    int first_slot, count;

    DEVICE int slot(int piece) const { return piece ? (first_slot / 2 + piece) * 2 : first_slot; }
};

// Prefetches to L2 what all shares read first, before await_previous_kernel(): the lengths, and by share `rank` the page
// numbers of sequence `rank`. page_tokens: tokens of an element of the page table. All threads call.
template <typename L, typename T>
DEVICE void prefetch_indices(const L* seq_lens, int64_t length_step, const T* page_table, int64_t table_stride,
                             int64_t table_step, int64_t num_seqs, int64_t max_tokens, int page_tokens, int rank) {
    constexpr int LINE = 128 / sizeof(L), PAGES = 128 / sizeof(T);
    for (int s = threadIdx.x * LINE; seq_lens && s < num_seqs; s += blockDim.x * LINE) {
        prefetch_line(seq_lens + s * length_step);
    }
    const int64_t page = threadIdx.x * PAGES;  // by one warp: most tokens of the longest tables have no sequence
    if (threadIdx.x < WARP_SIZE && rank < num_seqs && page * page_tokens < max_tokens) {
        prefetch_line(page_table + rank * table_stride + page * table_step);
    }
}

// HAS_LENGTHS: seq_lens is given; otherwise every sequence has max_tokens tokens.
template <int UNIT, typename L, bool HAS_LENGTHS>
struct MlaSchedule {
    const L* seq_lens;
    int64_t length_step;
    int num_seqs, max_tokens, num_shares, rank;
    int item_units;      // units of the gap before a sequence in equal shares
    int share = 0;       // units of a share; 0: sequence s goes to CTA s % num_shares
    int seq, start = 0;  // the sequence of the current item, and its first unit, counted over all sequences and gaps
    int end = 0;         // the end of the share, likewise

    // max_splits: most pieces of a sequence; 1 if there is no workspace for partial results.
    // Times in units: join_units of a combine, whatever its size, piece_units of each partial result, level_units of each
    // level of the longest sequence's tree (mla_tree_combine.cuh), item_units of each item of a CTA but its first one.
    // All lanes of a warp call. The caller bounds the sum of all units and gaps: it is an int.
    DEVICE
    MlaSchedule(const L* seq_lens, int64_t length_step, int64_t num_seqs, int64_t max_tokens, int64_t max_splits,
                float join_units, float piece_units, float level_units, int64_t item_units, int num_shares, int rank)
        : seq_lens(seq_lens),
          length_step(length_step),
          num_seqs(int(num_seqs)),
          max_tokens(int(max_tokens)),
          num_shares(num_shares),
          rank(rank),
          item_units(int(item_units)),
          seq(rank) {
        if (max_splits == 1) return;
        const int lane = threadIdx.x % WARP_SIZE;
        uint32_t all = 0, most = HAS_LENGTHS ? 0 : units_of(max_tokens);
        if constexpr (HAS_LENGTHS) {
#pragma unroll 1
            for (int s = lane; s < num_seqs; s += WARP_SIZE) {
                const uint32_t units = units_of(length_of(s));
                all += units;
                most = max(most, units);
            }
            most = lane_reduce<Max, WARP_SIZE>(most);
            all = lane_reduce<Sum, WARP_SIZE>(all);
        } else {
            all = most * uint32_t(num_seqs);
        }
        const int longest = most;
        int gap = int(item_units), total = int(all) + int(num_seqs) * gap;
        // Shares of `least` units cut a sequence into at most max_splits pieces, wherever it begins in a share. Equal
        // shares cut it into at most num_shares + 1.
        const uint32_t cuts_of_one = uint32_t(max_splits) - 1;
        const int least = max_splits > num_shares ? 0 : int((longest + cuts_of_one - 2) / cuts_of_one);
        int units = max(ceil_div(total, num_shares), least), alignment = 1, cuts = ceil_div(total, units) - 1;
        // A signed division: one that shares the reciprocal of num_shares makes fp8 kernels spill.
        const int rounds = num_seqs <= num_shares ? 1 : (int(num_seqs) + num_shares - 1) / num_shares;
        // Where a size needs too many shares, so does every smaller one.
        for (int size = units; rounds == 1 && size >= max(least, 1); --size) {
            const int pieces = pieces_of_all(size);
            if (pieces > num_shares) break;
            units = alignment = size;
            total = pieces * size;
            cuts = pieces - int(num_seqs);
            gap = 0;
        }
        float combine_units = join_units;
        if (level_units > 0.0f) {
            // A sequence that begins within a share may have one more piece than one that begins a share.
            for (int span = 1; (span - (alignment < units)) * units < longest; span *= 2) combine_units += level_units;
        }
        combine_units += piece_units * float(cuts + min(cuts, int(num_seqs)));
        const float whole = float(rounds * longest + int(item_units) * (rounds - 1));
        if (whole <= float(units) + combine_units) return;

        share = units;
        const int begin = int(min(int64_t(rank) * share, int64_t(total)));
        end = min(total - begin, share) + begin;
        if constexpr (HAS_LENGTHS) {
            for (seq = 0; seq < num_seqs; seq += WARP_SIZE) {
                int sum = seq + lane < num_seqs ? units_of(length_of(seq + lane)) + gap : 0;
                if (alignment > 1) sum = ceil_div(sum, alignment) * alignment;
#pragma unroll
                for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
                    const int before = shfl<WARP_SIZE>(sum, max(lane - distance, 0));
                    if (lane >= distance) sum += before;
                }
                const int ended =
                    count_bits(ballot(start + sum <= begin));  // sequences that end before the share begins
                const int of_ended = shfl<WARP_SIZE>(sum, max(ended - 1, 0));
                if (ended > 0) start += of_ended;
                if (ended < WARP_SIZE) {
                    seq += ended;
                    break;
                }
            }
        } else {  // a prompt has thousands of equal sequences, which the last share would count in 10 us
            const int sum = ceil_div(longest + gap, alignment) * alignment;
            seq = uint32_t(begin) / uint32_t(sum);
            start = seq * sum;
        }
        start += gap;
        if (alignment > 1 && start < end) end = min(end, start + units_of(length_of(seq)));
    }
    DEVICE int length_of(int s) const {
        if (!HAS_LENGTHS) return max_tokens;
        const L length = seq_lens[s * length_step];
        return length < 0 ? 0 : length < max_tokens ? int(length) : max_tokens;
    }
    static DEVICE int units_of(int length) { return max(int((uint32_t(length) + UNIT - 1) / UNIT), 1); }
    // Of a >= 0 and b > 0, with a sum that fits: unsigned division takes half of the instructions of a signed one.
    static DEVICE int ceil_div(int a, int b) { return int(uint32_t(a + b - 1) / uint32_t(b)); }
    // Pieces of all sequences, each in as few pieces of at most `size` units as possible.
    DEVICE int pieces_of_all(int size) const {
        uint32_t pieces = 0;
#pragma unroll 1
        for (int s = threadIdx.x % WARP_SIZE; s < num_seqs; s += WARP_SIZE) {
            pieces += ceil_div(units_of(length_of(s)), size);
        }
        return lane_reduce<Sum, WARP_SIZE>(pieces);
    }

    // Whether there is a current item.
    DEVICE bool has_item() const { return share ? start < end : seq < num_seqs; }
    DEVICE MlaItem item() const {
        const int length = length_of(seq);
        if (!share) return {seq, 0, length, 0, 1, rank, 0};
        const int units = units_of(length), share_begin = rank * share;
        const int from = max(share_begin - start, 0), to = min(end - start, units);
        const int first_share = uint32_t(start) / uint32_t(share);
        const int pieces = uint32_t(start + units - 1) / uint32_t(share) - first_share + 1;
        const int slot = 2 * rank + (start > share_begin);
        return {seq, from * UNIT, to < units ? to * UNIT : length, slot, pieces, first_share, rank - first_share};
    }
    DEVICE void next() {
        if (share) start += units_of(length_of(seq++)) + item_units;  // aligned shares have no next item
        else seq += num_shares;
    }
};

// Returns the factor of a head's results, which were added up with probabilities of type P. The thread that `stores`
// also stores the log-sum-exp at `row`, or the row max and the row sum of a partial result at `part`.
template <typename P, bool HAS_LSE>
DEVICE float finish_row(bool direct, bool stores, float max_logit, float exp_sum, float* lse, int64_t row,
                        float* max_logits, float* exp_sums, int64_t part) {
    const float sum = exp_sum * FULL_SCALE<P>;
    if (stores) {
        if (!direct) {
            max_logits[part] = max_logit;
            exp_sums[part] = sum;
        } else if (HAS_LSE) {
            lse[row] = log_sum_exp(max_logit, sum);
        }
    }
    // The combine adds the formula's epsilon to partial results; 1e-20 only guards against 0 / 0.
    return 1.0f / (sum + (direct ? 1e-6f : 1e-20f)) * FULL_SCALE<P>;
}
