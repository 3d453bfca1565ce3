// prefill_scheduler.cuh: the work items of prefill_sm90, whose constants it reads, and how a block finds them.
//
// prefill_sm90_fp8 has the same constants and uses these headers (prefill_*.cuh), too.
//
// A work item is ITEM_TOKENS query tokens of a sequence and one key-value head; its rows are the tokens times the GROUP
// query heads that share the head, heads first. Items are numbered by sections of `section_heads` key-value heads, whose
// keys and values the L2 cache has room for, in a section by tiles of tokens, and then by heads. The tiles of sequence s
// begin at number cu_seqlens_q[s] / ITEM_TOKENS + s, and at most one number of each sequence has no tokens. With
// HAS_SPLITS each of these items has `max_splits` numbers, one for each part of its keys that a block may take alone
// (split-KV); an item of few keys has fewer splits, and its other numbers have no work. Nor do sequences of fewer than
// `min_tokens` query tokens have any.
#pragma once
#include "arith.cuh"
#include "ragged.cuh"
#include "vec.cuh"

constexpr int ITEM_ROWS = 64 * CONSUMERS, ITEM_TOKENS = ITEM_ROWS / GROUP, USED_ROWS = ITEM_TOKENS * GROUP;
// Tiles of keys of a split, at least: an item costs two tiles beside its own, and a join as much.
constexpr int MIN_SPLIT_TILES = 4;
static_assert(GROUP <= ITEM_ROWS);

// A work item, or the end of all work.
struct alignas(8) Work {
    int token;   // the first of the query tokens, as a row of the query tensor
    int tokens;  // query tokens of the sequence from there on; 0: there is no more work
    int limit;   // the last key that the first query token sees
    int kv_head;
    int first_tile, last_tile;  // of keys; one tile if no row has a key
    int split, splits;          // which of how many parts of the keys these tiles are

    // The last key that a row sees. A row that does not exist is taken for the last row.
    DEVICE int limit_of(int row) const { return CAUSAL ? limit + min(row / GROUP, tokens - 1) : limit; }
};

// The first key that a row sees whose last one is `limit`.
struct Window {
    int size;  // 2^31 - 1: no window

    DEVICE int first_seen(int limit) const { return limit < size ? 0 : limit - size + 1; }
};

// The sequences of a call, with the arguments of the kernel by their names.
struct Sequences {
    const starts_t* cu_seqlens_q;
    const length_t* seq_lens;
    int64_t starts_step, length_step, num_seqs, num_tokens, min_tokens, max_tokens, num_kv_heads, section_heads,
        max_splits;

    DEVICE int64_t start_of(int seq) const { return cu_seqlens_q[seq * starts_step]; }
    DEVICE int64_t first_tile_of(int seq) const { return start_of(seq) / ITEM_TOKENS + seq; }

    // Finds the work of a number, and the `length` and the `origin` of the keys of its sequence: the number of the sequence,
    // which is its row of the block table, or, RAGGED, the first row of its keys. False if the number has no work. Every
    // lane of the warp calls.
    DEVICE bool find(int number, const Window& window, Work& work, int& origin, int& length) const {
        const int item = HAS_SPLITS ? number / int(max_splits) : number;
        const int section_tiles = int(num_tokens / ITEM_TOKENS + num_seqs), heads = int(section_heads);
        const int first_head = item / (section_tiles * heads) * heads;
        const int in_section = item - first_head * section_tiles,
                  own_heads = min(heads, int(num_kv_heads) - first_head);
        // A search for the sequence, the last one that begins at this tile or before it, with a probe of each lane: one
        // load for 32 sequences. `low` to `high` of them begin so.
        const int tile = in_section / own_heads;
        work.kv_head = first_head + in_section % own_heads;
        int low = 0, high = int(num_seqs);
        while (low < high) {
            const int step = ceil_div(high - low, WARP_SIZE);
            const int probe = min(low + (int(threadIdx.x % WARP_SIZE) + 1) * step, high);
            const int steps = count_bits(ballot(first_tile_of(probe - 1) <= tile));
            high = min(low + (steps + 1) * step - 1, high);
            low = min(low + steps * step, high);
        }
        const int seq = low - 1;
        if (seq < 0) return false;
        const int64_t begin = start_of(seq), end = start_of(seq + 1);
        if (begin < 0 || end > num_tokens || begin >= end || end - begin < min_tokens) return false;
        // Where the starts do not ascend, the probes may count another sequence than one that begins before the tile.
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
            const int tiles = work.last_tile - work.first_tile + 1;
            work.split = number % int(max_splits);
            work.splits = max(1, min(int(max_splits), tiles / MIN_SPLIT_TILES));
            if (work.split >= work.splits) return false;
            // The first splits have one tile more where splits have not equally many.
            const int even = tiles / work.splits, longer = tiles % work.splits;
            work.first_tile += work.split * even + min(work.split, longer);
            work.last_tile = work.first_tile + even + (work.split < longer) - 1;
        }
        return true;
    }
};

// The next item of a block: items are counted by all blocks, from the number of blocks on. The last block that asks
// leaves a zero for the next call. Every lane of the warp calls.
DEVICE int next_item(uint32_t* items_taken, int64_t num_items) {
    uint32_t taken = 0;
    if (threadIdx.x % WARP_SIZE == 0) {
        taken = atomicAdd(items_taken, 1u);
        if (taken == num_items - 1) atomicExch(items_taken, 0u);
    }
    return int(gridDim.x) + int(shfl<WARP_SIZE>(taken, 0));
}
