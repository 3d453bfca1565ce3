// prefill_scheduler.cuh: the tile scheduler of prefill_sm90: its work items and how a CTA finds them. Reads the
// constants of the kernel that includes it. prefill_sm90_fp8 has the same constants and uses these headers
// (prefill_*.cuh), too.
//
// A work item is ITEM_TOKENS query tokens of a sequence and PACKED_HEADS query heads that share a KV head. Its rows are
// the tokens times these heads (GQA packing), heads first. PACKED_HEADS divides GROUP: if GROUP itself would leave many
// of the ITEM_ROWS rows unused, a KV head has several items for the same tokens. Items are numbered by sections of
// `section_heads` groups of PACKED_HEADS heads,
// chosen so that their keys and values fit in L2; within a section by tiles of query tokens, and then by heads. The
// tiles of sequence s begin at number cu_seqlens_q[s] / ITEM_TOKENS + s, so each sequence has at most one number
// without tokens. Sequences of fewer than `min_tokens` query tokens have no work. Without HAS_STARTS, sequence s has
// one query token, row s, and the tile with number s.
//
// HAS_SPLITS (split-KV): CTAs share the keys of an item. Only the device knows how long the sequences are, so each CTA
// computes from all lengths how many KV tiles a split has at most, so that splits are of about equal size and no more than
// the plan wants. Numbers then count splits: by sequences, by tiles of query tokens, by splits, and by heads. Splits that
// later items of a sequence have and the first one does not follow those that all items have. Under a sliding window a
// number may have no work, because an item has as many as one without a window, at most those of the last one.
#pragma once
#include "arith.cuh"
#include "barrier.cuh"
#include "ragged.cuh"
#include "reduce.cuh"
#include "sequence_search.cuh"
#include "tile_splits.cuh"
#include "vec.cuh"

constexpr int ITEM_ROWS = 64 * CONSUMERS, ITEM_TOKENS = ITEM_ROWS / PACKED_HEADS,
              USED_ROWS = ITEM_TOKENS * PACKED_HEADS;
static_assert(PACKED_HEADS <= ITEM_ROWS && GROUP % PACKED_HEADS == 0);

// A work item, or the end of all work.
struct alignas(8) Work {
    int token;   // row of the first query token in the query tensor
    int tokens;  // query tokens of the sequence from there on; 0: end of all work
    int limit;   // last key that the first query token sees
    int kv_head;
    int head;                   // first query head
    int first_tile, last_tile;  // KV tiles; one tile if no row sees a key
    int split, splits;          // index of this split, number of splits

    // The last key that a row sees. A row beyond the last token is treated as the last token.
    DEVICE int limit_of(int row) const { return CAUSAL ? limit + min(row / PACKED_HEADS, tokens - 1) : limit; }
};

// The sliding window: first_seen(limit) is the first key of a row that sees keys up to `limit`.
struct Window {
    int size;  // 2^31 - 1: no window

    DEVICE int first_seen(int limit) const { return limit < size ? 0 : limit - size + 1; }
};

// How the keys of all items are divided, in shared memory: the producer has no registers for it. Rounding up adds less
// than one split to each item, so TRIES lengths of a split are tested, one by each warp of the producer's warpgroup.
struct Division {
    static constexpr int TRIES = 4;
    int counts[TRIES];  // splits of all items for PACKED_HEADS heads, by each length
    int split_tiles;    // most KV tiles of a split, unless max_splits are longer
    int num_splits;     // splits of all items
};

// The sequences of a call. Members are the kernel's arguments of the same names.
struct Sequences {
    const starts_t* cu_seqlens_q;
    const length_t* seq_lens;
    int64_t starts_step, length_step, num_seqs, num_tokens, min_tokens, max_tokens, num_kv_heads, section_heads,
        max_splits, num_items;
    Division* division;  // HAS_SPLITS: set by divide()

    DEVICE int64_t start_of(int seq) const { return HAS_STARTS ? int64_t(cu_seqlens_q[seq * starts_step]) : seq; }
    DEVICE int64_t first_tile_of(int seq) const { return HAS_STARTS ? start_of(seq) / ITEM_TOKENS + seq : seq; }
    DEVICE RaggedKeys<length_t> ragged() const { return {seq_lens, length_step, max_tokens}; }
    DEVICE int length_of(int seq) const {
        return RAGGED ? ragged().length_of(seq)
                      : int(min(max(int64_t(seq_lens[seq * length_step]), int64_t(0)), max_tokens));
    }
    DEVICE int num_groups() const { return int(num_kv_heads) * (GROUP / PACKED_HEADS); }

    // The query tokens of a sequence with work.
    struct Tokens {
        int64_t begin, end;
        bool exist;
    };
    DEVICE Tokens tokens_of(int seq) const {
        const int64_t begin = start_of(seq), end = start_of(seq + 1);
        return {begin, end, begin >= 0 && end <= num_tokens && begin < end && end - begin >= min_tokens};
    }
    // Sets the keys of an item with its number of tokens.
    DEVICE void set_keys(Work& work, int length, const Window& window) const {
        work.limit = CAUSAL ? length - work.tokens : length - 1;
        work.first_tile = window.first_seen(work.limit) / TOKENS;
        work.last_tile = max(work.limit_of(ITEM_ROWS - 1), 0) / TOKENS;
    }

    // The items of a sequence for PACKED_HEADS heads: their number, their query tokens, the keys before these (CAUSAL;
    // else all keys), and the most KV tiles of the last item.
    struct Items {
        int count, tokens, keys, last;

        // The most KV tiles of an item. They do not descend.
        DEVICE int tiles(int item) const {
            const int seen = keys + (CAUSAL ? min((item + 1) * ITEM_TOKENS, tokens) : 0);
            return min(max(seen - 1, 0) / TOKENS + 1, last);
        }
        // The first item with so many KV tiles or more, if there is one.
        DEVICE int first_with(int tiles) const {
            const int missing = (tiles - 1) * TOKENS + 1 - keys;  // query tokens up to the end of the item
            return CAUSAL && missing > 0 ? min(ceil_div(missing, ITEM_TOKENS), count) - 1 : 0;
        }
    };
    DEVICE Items items_of(int seq, const Window& window) const {
        const Tokens own = tokens_of(seq);
        int tokens = int(own.end - own.begin), length = length_of(seq);  // without a branch, all loads are in flight
        tokens = own.exist ? tokens : 0;
        length = own.exist ? length : 0;
        Work last;
        last.tokens = max(tokens - 1, 0) % ITEM_TOKENS + own.exist;
        set_keys(last, length, window);
        return {ceil_div(tokens, ITEM_TOKENS), tokens, CAUSAL ? length - tokens : length,
                last.last_tile - last.first_tile + 1};
    }
    // The splits of an item with so many KV tiles, if a split has at most split_tiles.
    DEVICE int splits_of(int tiles, int split_tiles) const {
        return count_splits(tiles, min(ceil_div(tiles, split_tiles), int(max_splits)));
    }
    // Calls f(first item, number of items, split) for the items of a sequence that have a split, for each split that the
    // first item does not have, until f returns true.
    template <typename F>
    DEVICE void each_later_split(const Items& items, int split_tiles, const F& f) const {
        const int of_last = splits_of(items.tiles(items.count - 1), split_tiles);
        for (int split = splits_of(items.tiles(0), split_tiles); split < of_last; ++split) {
            const int first = items.first_with(max(split * split_tiles + 1, (split + 1) * MIN_SPLIT_TILES));
            if (f(first, items.count - first, split)) return;
        }
    }
    // The splits of all items of a sequence, for PACKED_HEADS heads.
    DEVICE int splits_of(const Items& items, int split_tiles) const {
        int splits = items.count * splits_of(items.tiles(0), split_tiles);
        each_later_split(items, split_tiles, [&](int, int count, int) {
            splits += count;
            return false;
        });
        return splits;
    }
    // Divides the keys of all items into as many splits as num_items admits: the first of the TRIES lengths is taken with
    // which all splits are num_items or less. Every thread of the producer's warpgroup must call.
    template <int BARRIER>
    DEVICE void divide(const Window& window) const {
        constexpr int TRIES = Division::TRIES;
        const int lane = threadIdx.x % WARP_SIZE, own_try = threadIdx.x % 128 / WARP_SIZE;
        float items = 0.0f, tiles = 0.0f;
        for (int seq = lane; seq < num_seqs; seq += WARP_SIZE) {
            const Items own = items_of(seq, window);
            items += float(own.count);
            tiles += float(own.count) * 0.5f * float(own.tiles(0) + own.tiles(own.count - 1));
        }
        items = lane_reduce<Sum, WARP_SIZE>(items);
        tiles = lane_reduce<Sum, WARP_SIZE>(tiles);
        const float wanted = float(num_items) / float(num_groups());
        const auto split_tiles = [&](int i) {
            const float splits = fmaxf(wanted - i * (1.0f / (TRIES - 1)) * items, 1.0f);
            return int(fminf(fmaxf(ceilf(tiles / splits), 1.0f), 0x1p30f));
        };
        int count = 0;
        for (int seq = lane; seq < num_seqs; seq += WARP_SIZE)
            count += splits_of(items_of(seq, window), split_tiles(own_try));
        count = lane_reduce<Sum, WARP_SIZE>(count);
        if (lane == 0) division->counts[own_try] = count;
        named_barrier_sync<BARRIER>(128);
        int found = 0;
        while (found < TRIES - 1 && float(division->counts[found]) > wanted) ++found;
        if (own_try > 0) return;
        if (lane == 0) {
            division->split_tiles = split_tiles(found);
            division->num_splits = division->counts[found] * num_groups();
        }
        sync_warp();
    }
    // The number of work items, with all their splits.
    DEVICE int count() const { return HAS_SPLITS ? division->num_splits : int(num_items); }

    // Finds the work of a number, and the `length` and `origin` of the keys of its sequence. `origin` is the index of
    // the sequence (its row of the block table), or, RAGGED, the first row of its keys. Returns false if the number has
    // no work. Every lane of the warp must call.
    DEVICE bool find(int number, const Window& window, Work& work, int& origin, int& length) const {
        int seq, group, splits = 1;
        int64_t tile;  // of the sequence
        work.split = 0;
        if constexpr (HAS_SPLITS) {
            seq = find_item(number, int(num_seqs), [&](int of) {
                return splits_of(items_of(of, window), division->split_tiles) * num_groups();
            });
            if (seq < 0) return false;
            const Items items = items_of(seq, window);
            const int of_all = splits_of(items.tiles(0), division->split_tiles);  // splits that all items have
            group = number % num_groups();
            int left = number / num_groups(), item = left / of_all;
            work.split = left % of_all;
            if (item >= items.count) {
                left -= items.count * of_all;
                each_later_split(items, division->split_tiles, [&](int first, int count, int split) {
                    item = first + left;
                    work.split = split;
                    left -= count;
                    return left < 0;
                });
            }
            splits = splits_of(items.tiles(item), division->split_tiles);
            tile = item;
        } else {
            const int section_tiles = int((HAS_STARTS ? num_tokens / ITEM_TOKENS : 0) + num_seqs),
                      heads = int(section_heads);
            const int first_group = number / (section_tiles * heads) * heads;
            const int in_section = number - first_group * section_tiles,
                      own_groups = min(heads, num_groups() - first_group);
            const int of_all = in_section / own_groups;
            group = first_group + in_section % own_groups;
            seq = HAS_STARTS ? find_sequence(of_all, int(num_seqs), [&](int of) { return first_tile_of(of); }) : of_all;
            if (seq < 0) return false;
            tile = of_all - first_tile_of(seq);
        }
        const Tokens own = tokens_of(seq);
        // If cu_seqlens_q does not ascend, the search may return a sequence that begins after the tile.
        const int64_t token = own.begin + tile * ITEM_TOKENS;
        if (!own.exist || token < own.begin || token >= own.end) return false;
        length = length_of(seq);
        origin = RAGGED ? int(ragged().first_row(seq)) : seq;
        work.head = group * PACKED_HEADS;
        work.kv_head = work.head / GROUP;
        work.token = int(token);
        work.tokens = int(own.end - token);
        set_keys(work, length, window);
        work.splits = 1;
        if constexpr (HAS_SPLITS) {
            const int tiles = work.last_tile - work.first_tile + 1;
            work.splits = take_split(work.split, min(splits, ceil_div(tiles, division->split_tiles)), work.first_tile,
                                     work.last_tile);
        }
        return work.split < work.splits;
    }
};

// The next item of a CTA (persistent scheduling). One counter serves all CTAs; items below gridDim.x are assigned
// statically. The last request resets the counter to zero for the next call. Every lane of the warp must call.
DEVICE int next_item(uint32_t* items_taken, int64_t num_items) {
    uint32_t taken = 0;
    if (threadIdx.x % WARP_SIZE == 0) {
        taken = atomicAdd(items_taken, 1u);
        if (taken == num_items - 1) atomicExch(items_taken, 0u);
    }
    return int(gridDim.x) + int(shfl<WARP_SIZE>(taken, 0));
}
