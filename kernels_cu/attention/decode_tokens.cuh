// decode_tokens.cuh: the query tokens of a CTA of attention_decode with HAS_TOKENS.
//
// The columns of the CTA's MMAs are its query tokens times the heads of a KV head, token by token. The query tokens of
// a sequence are its last ones, and lie in tiles of QUERY_TOKENS. The first CTAs of the grid take the first tile of
// each sequence, as if it had one token. The last CTAs take the other tiles, without splits: tile k + 1 of sequence s
// has number first_number(s) + k. So the grid depends on the number of all query tokens alone, and sequences may have
// any number of them.
//
// The constants in capitals that are not defined here are those of attention_decode.cu.
#pragma once
#include "decode_operand.cuh"
#include "sequence_search.cuh"

static_assert(HAS_TOKENS || QUERY_TOKENS == 1);
static_assert(!HAS_TOKENS || (HAS_STARTS && DIRECT && PARTITION == 0 && GROUP * QUERY_TOKENS <= HEADS));
constexpr int ALL_COLUMNS = NUM_KV_HEADS * GROUP * QUERY_TOKENS;  // columns of all CTAs of a first tile
// The query token, counted from the first one of the CTA, and the head of the KV head, of a column.
DEVICE int token_of_column(int column) { return HAS_TOKENS ? column / GROUP : 0; }
DEVICE int head_of_column(int column) { return HAS_TOKENS ? column % GROUP : column; }

// Numbers of tiles that are not the first one of their sequence, at most, if there are num_rows query tokens.
DEVICE int64_t other_tiles(int64_t num_rows) { return max(num_rows - 1, int64_t(0)) / QUERY_TOKENS; }

// A tile of query tokens.
struct QueryTile {
    int64_t seq = -1, row = 0;  // the sequence, or -1 if there is no such tile; the row of the first token
    int count = 0;              // tokens of the tile
    int64_t newer = 0;          // tokens of the sequence after the first one of the tile

    // Number `number` of the other tiles. Every lane of the warp must call.
    static DEVICE QueryTile other(const starts_t* starts, int64_t number, int64_t num_seqs, int64_t num_rows) {
        const auto first_number = [&](int64_t seq) { return int64_t(starts[seq * STARTS_STEP]) / QUERY_TOKENS; };
        const int64_t seq = find_sequence(number, int(num_seqs), first_number);
        return seq < 0 ? QueryTile{} : of(starts, seq, number - first_number(seq) + 1, num_rows);
    }
    static DEVICE QueryTile of(const starts_t* starts, int64_t seq, int64_t tile, int64_t num_rows) {
        const int64_t begin = starts[seq * STARTS_STEP], end = starts[(seq + 1) * STARTS_STEP];
        if (begin < 0 || begin >= num_rows || end > num_rows) return {};
        const int64_t row = begin + tile * QUERY_TOKENS;
        if (row < begin || row >= end) return {};
        return {seq, row, int(min(end - row, int64_t(QUERY_TOKENS))), end - 1 - row};
    }
    // The length of the sequence up to the first token of the tile; 0 or less: the token attends to nothing.
    DEVICE int first_length(int64_t seq_len, int64_t max_tokens) const {
        return int(max(min(max(seq_len, int64_t(0)), max_tokens) - newer, int64_t(-QUERY_TOKENS)));
    }
};

// Which keys a column attends to: `window` of them, up to its own token. Column 0 has the length first_length.
struct ColumnMask {
    int first_length, window;

    // Whether all columns attend to all keys of the step at `start`, if the last token's length is `length`.
    DEVICE bool all_attend(int start, int length) const {
        return start + TILE_TOKENS * TILES <= first_length && length - start <= window;
    }
    // Bit c * TILES * SUM_ROWS for each column c of the lane that attends to the key.
    DEVICE unsigned attending(int key, int lane) const {
        unsigned bits = 0;
#pragma unroll
        for (int c = 0; c < HEADS / TILE_HEADS * LANE_HEADS; ++c) {
            const int column = c / LANE_HEADS * TILE_HEADS + sum_head(lane, c % LANE_HEADS);
            const unsigned newer = unsigned(first_length + token_of_column(column) - 1 - key);  // keys after it
            bits |= unsigned(newer < unsigned(window)) << c * TILES * SUM_ROWS;
        }
        return bits;
    }
};
