// mqa_logits.cuh: the rows of logits of sparse attention's indexer, and where its keys lie. Reads the constants of the
// kernel that includes it: PAGED, BLOCK_SIZE, HEAD_SIZE, SCALE_ACCESS, LENGTH_PER_ROW, COMPRESSED, CLEAN,
// length_t, table_t.
#pragma once
#include "cache.cuh"
#include "paged.cuh"

// The positions begin <= n < end have a logit in a row, in column n - shift.
struct LogitRow {
    int begin, end, shift;

    DEVICE bool overlaps(int first, int count) const { return begin < first + count && end > first; }
    DEVICE bool has(int n) const { return n >= begin && n < end; }
};

struct LogitRows {
    const int32_t* cu_seqlen_ks;     // [num_rows], unless PAGED
    const int32_t* cu_seqlen_ke;     // [num_rows], unless PAGED
    const length_t* context_lens;    // [num_seqs] or, with LENGTH_PER_ROW, [num_rows]; if PAGED
    int64_t seq, first_row, next_n;  // PAGED: a sequence, its first row, and its number of rows
    int64_t length_step, num_keys, columns;

    // `row` is counted from first_row.
    DEVICE LogitRow at(int row) const {
        const auto clamped = [&](int64_t n) { return int(min(max(n, int64_t(0)), num_keys)); };
        if constexpr (PAGED) {
            const int64_t length = context_lens[(LENGTH_PER_ROW ? first_row + row : seq) * length_step];
            const int64_t left_out = LENGTH_PER_ROW ? 0 : next_n - 1 - row;
            // The subtraction does not overflow: a length that is too small for it is empty in any case.
            return {0, length > left_out ? clamped(min(length, num_keys + left_out) - left_out) : 0, 0};
        } else {
            const int begin = clamped(cu_seqlen_ks[first_row + row]), end = clamped(cu_seqlen_ke[first_row + row]);
            if (!COMPRESSED) return {begin, end, 0};
            return {begin, int(min(int64_t(end), begin + columns)), begin};
        }
    }
    // Writes the logit of position n, or -inf where the row has none and is cleaned.
    DEVICE void write(float* logits, const LogitRow& row, int n, float logit) const {
        const bool exists = row.has(n);
        if (exists || (CLEAN && n < columns)) logits[n - row.shift] = exists ? logit : minus_infinity();
    }
};

// The key of a position: HEAD_SIZE fp8 values, and a float. Both are null if the key does not exist.
struct Key {
    const fp8_e4m3_t* values;
    const uint8_t* scale;

    DEVICE float load_scale() const { return scale ? load_float<PAGED ? SCALE_ACCESS : 4>(scale) : 0.0f; }
};

struct Keys {
    const fp8_e4m3_t* k;    // [num_keys, HEAD_SIZE], unless PAGED
    const float* k_scales;  // [num_keys], unless PAGED
    const uint8_t* cache;   // [num_blocks, BLOCK_SIZE, HEAD_SIZE + 4], if PAGED
    const table_t* blocks;  // [max_blocks], the row of the sequence, if PAGED
    int64_t num_keys, key_stride, num_blocks, block_stride, table_step;

    // The entry of the block table for a position before num_keys; 0 unless PAGED.
    DEVICE table_t entry_of(int n) const { return PAGED ? blocks[uint32_t(n) / BLOCK_SIZE * table_step] : table_t(0); }
    DEVICE bool has_block(int64_t block) const { return !PAGED || (block >= 0 && block < num_blocks); }
    DEVICE Key at(int n) const {
        if (n >= num_keys) return {nullptr, nullptr};
        const int64_t block = entry_of(n);
        return has_block(block) ? in_block(block, n) : Key{nullptr, nullptr};
    }
    DEVICE Key in_block(int64_t block, int n) const {
        if constexpr (!PAGED) return {k + n * key_stride, reinterpret_cast<const uint8_t*>(k_scales + n)};
        const uint8_t* const from = cache + block * block_stride;
        const int slot = uint32_t(n) % BLOCK_SIZE;
        return {reinterpret_cast<const fp8_e4m3_t*>(from + slot * HEAD_SIZE), from + BLOCK_SIZE * HEAD_SIZE + slot * 4};
    }
};
