// convert_vertical_slash_indexes: converts vertical lines and diagonals of sparse attention to blocks and columns of
// each row.
//
// A row is block_size_M queries. A slash (a diagonal) adds a range of block_size_M keys to each row. Ranges that touch
// are merged, and merged ranges are divided into blocks of block_size_N keys. A vertical (one key) becomes a column of
// a row unless a range of the row contains it.
//
// Thread mapping: one thread per row walks along both lists, which are sorted from the left end of the row to the
// right. Then the threads of the CTA write zeros after the entries of each row.
//
// Bad input: whatever the lists hold, every step of a walk consumes an entry of a list, so the walk ends. A range has
// at most one block per slash, because block_size_M <= block_size_N, and no vertical is stored twice: nothing is
// written after the end of a row.
//
// Constants: none but NUM_THREADS.

#include "platform.cuh"

// The list of a row: `count` entries from `to` on.
struct Found {
    int32_t* to;
    int count;
    DEVICE void add(int64_t entry) { to[count++] = int32_t(entry); }
};

// The pattern of one row. `start` is its first query.
struct Pattern {
    const int32_t* verticals;
    const int32_t* slashes;
    int num_verticals, num_slashes;
    int64_t start, q_len, kv_len, block_size_M, block_size_N;

    // The next vertical that is a key of the sequence; after the last one, a number larger than any range.
    DEVICE int64_t next_vertical(int& at) const {
        while (at < num_verticals) {
            const int64_t column = verticals[at++];
            if (column >= 0 && column < kv_len) return column;
        }
        return int64_t(1) << 62;
    }
    // Whether a slash is left; skips negative ones.
    DEVICE bool has_slash(int& at) const {
        while (at < num_slashes && slashes[at] < 0) ++at;
        return at < num_slashes;
    }

    DEVICE void convert(bool causal, Found& blocks, Found& columns) const {
        const int64_t end = start + block_size_M;
        const int64_t base = end + kv_len - (causal ? q_len : 0);
        const auto range_end = [&](int64_t slash) { return base - slash > block_size_M ? base - slash : block_size_M; };
        const auto cut = [&](int64_t low, int64_t high) {
            for (; low < high && low < kv_len; low += block_size_N) {
                if (low >= 0) blocks.add(low);  // with more queries than keys, a range may begin before key 0
            }
        };

        int next_slash = 0, next_column = 0;
        int64_t slash = base + 1;
        while (slash >= base && has_slash(next_slash)) slash = slashes[next_slash++];
        int64_t low = causal ? base : kv_len, high = low + block_size_N;
        if (slash <= base) {
            high = range_end(slash);
            low = high - block_size_M;
        }

        int64_t column = next_vertical(next_column);
        for (;;) {
            if (column < high) {
                if (column < low) columns.add(column);
                column = next_vertical(next_column);
            } else if (has_slash(next_slash)) {
                const int64_t range = range_end(slashes[next_slash++]);
                if (range > high + block_size_M) {
                    cut(low, high);
                    low = range - block_size_M;
                    high = range;
                } else if (range > high) {
                    high += block_size_M;
                }
            } else {
                break;
            }
        }
        cut(low, high);
        for (; !causal && column < kv_len; column = next_vertical(next_column)) columns.add(column);
    }
};

DEVICE int bounded(int count, int limit) { return count < 0 ? 0 : count < limit ? count : limit; }

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
convert_vertical_slash_indexes(int32_t* block_count,                   // [batch, num_heads, num_rows]
                               int32_t* block_offset,                  // [batch, num_heads, num_rows, num_slashes]
                               int32_t* column_count,                  // [batch, num_heads, num_rows]
                               int32_t* column_index,                  // [batch, num_heads, num_rows, num_verticals]
                               const int32_t* q_seqlens,               // [batch]
                               const int32_t* kv_seqlens,              // [batch]
                               const int32_t* vertical_indexes,        // [batch, num_heads, num_verticals]
                               const int32_t* slash_indexes,           // [batch, num_heads, num_slashes]
                               const int32_t* vertical_indices_count,  // [num_heads] or null
                               const int32_t* slash_indices_count,     // [num_heads] or null
                               int num_heads, int num_rows, int num_verticals, int num_slashes, int block_size_M,
                               int block_size_N, bool causal) {
    await_previous_kernel();
    __shared__ int found[2 * NUM_THREADS];
    const int batch = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
    const int first_row = blockIdx.y * NUM_THREADS;
    const int row = first_row + threadIdx.x;
    const int64_t rows = int64_t(blockIdx.x) * num_rows;  // rows of the heads before this one
    block_offset += rows * num_slashes;
    column_index += rows * num_verticals;

    if (row < num_rows) {
        Found blocks{block_offset + int64_t(row) * num_slashes, 0};
        Found columns{column_index + int64_t(row) * num_verticals, 0};
        const int q_len = q_seqlens[batch], kv_len = kv_seqlens[batch];
        const int64_t start = int64_t(row) * block_size_M;
        if (start < q_len) {
            const Pattern pattern{
                vertical_indexes + int64_t(blockIdx.x) * num_verticals,
                slash_indexes + int64_t(blockIdx.x) * num_slashes,
                vertical_indices_count ? bounded(vertical_indices_count[head], num_verticals) : num_verticals,
                slash_indices_count ? bounded(slash_indices_count[head], num_slashes) : num_slashes,
                start,
                q_len,
                kv_len,
                block_size_M,
                block_size_N};
            pattern.convert(causal, blocks, columns);
        }
        block_count[rows + row] = found[2 * threadIdx.x] = blocks.count;
        column_count[rows + row] = found[2 * threadIdx.x + 1] = columns.count;
    }
    __syncthreads();
    for (int i = 0; i < NUM_THREADS && first_row + i < num_rows; ++i) {
        const int64_t at = first_row + i;
        for (int j = found[2 * i] + threadIdx.x; j < num_slashes; j += NUM_THREADS)
            block_offset[at * num_slashes + j] = 0;
        for (int j = found[2 * i + 1] + threadIdx.x; j < num_verticals; j += NUM_THREADS)
            column_index[at * num_verticals + j] = 0;
    }
}
