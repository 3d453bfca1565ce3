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
// HAS_SPLITS (split-KV): each item has `max_splits` numbers, one for each part of its keys that a CTA may process
// alone. An item of few keys has fewer splits, and its other numbers have no work.
#pragma once
#include "arith.cuh"
#include "ragged.cuh"
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

// The sequences of a call. Members are the kernel's arguments of the same names.
struct Sequences {
    const starts_t* cu_seqlens_q;
    const length_t* seq_lens;
    int64_t starts_step, length_step, num_seqs, num_tokens, min_tokens, max_tokens, num_kv_heads, section_heads,
        max_splits;

    DEVICE int64_t start_of(int seq) const { return HAS_STARTS ? int64_t(cu_seqlens_q[seq * starts_step]) : seq; }
    DEVICE int64_t first_tile_of(int seq) const { return HAS_STARTS ? start_of(seq) / ITEM_TOKENS + seq : seq; }

    // Finds the work of a number, and the `length` and `origin` of the keys of its sequence. `origin` is the index of
    // the sequence (its row of the block table), or, RAGGED, the first row of its keys. Returns false if the number has
    // no work. Every lane of the warp must call.
    DEVICE bool find(int number, const Window& window, Work& work, int& origin, int& length) const {
        const int item = HAS_SPLITS ? number / int(max_splits) : number;
        const int section_tiles = int((HAS_STARTS ? num_tokens / ITEM_TOKENS : 0) + num_seqs),
                  heads = int(section_heads), num_groups = int(num_kv_heads) * (GROUP / PACKED_HEADS);
        const int first_group = item / (section_tiles * heads) * heads;
        const int in_section = item - first_group * section_tiles, own_groups = min(heads, num_groups - first_group);
        const int tile = in_section / own_groups;
        work.head = (first_group + in_section % own_groups) * PACKED_HEADS;
        work.kv_head = work.head / GROUP;
        const int seq =
            HAS_STARTS ? find_sequence(tile, int(num_seqs), [&](int of) { return first_tile_of(of); }) : tile;
        if (seq < 0) return false;
        const int64_t begin = start_of(seq), end = start_of(seq + 1);
        if (begin < 0 || end > num_tokens || begin >= end || end - begin < min_tokens) return false;
        // If cu_seqlens_q does not ascend, the search may return a sequence that begins after the tile.
        const int64_t token = begin + (tile - first_tile_of(seq)) * ITEM_TOKENS;
        if (token < begin || token >= end) return false;
        const RaggedKeys<length_t> ragged{seq_lens, length_step, max_tokens};
        length = RAGGED ? ragged.length_of(seq)
                        : int(min(max(int64_t(seq_lens[seq * length_step]), int64_t(0)), max_tokens));
        origin = RAGGED ? int(ragged.first_row(seq)) : seq;
        work.token = int(token);
        work.tokens = int(end - token);
        work.limit = CAUSAL ? length - work.tokens : length - 1;
        work.first_tile = window.first_seen(work.limit) / TOKENS;
        work.last_tile = max(work.limit_of(ITEM_ROWS - 1), 0) / TOKENS;
        work.split = 0;
        work.splits = 1;
        if constexpr (HAS_SPLITS) {
            work.split = number % int(max_splits);
            work.splits = take_split(work.split, int(max_splits), work.first_tile, work.last_tile);
            if (work.split >= work.splits) return false;
        }
        return true;
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
