// gather_cache: copies the entries of sequences from a paged cache to consecutive rows.
//
//     dst[t] = src_cache[block, offset]                      or codes * scale, in float32, rounded once
//     where b is the sequence of row t, p = t - cu_seq_lens[b] + seq_starts[b],
//           block = block_table[b, p / BLOCK_SIZE], offset = p % BLOCK_SIZE
//
// A row without a sequence, or whose entry does not exist, is left as it is.
//
// Threads: a block takes TOKENS rows. One thread per row finds the row's entry; then all threads share the vectors, and
// a thread loads BATCH vectors before it stores one (each_piece in cache.cuh).
//
// Constants
//     scalar_t        element type of dst
//     cache_t         element type of src_cache: scalar_t or an fp8 type
//     table_t         element type of block_table
//     lens_t          element type of cu_seq_lens
//     owner_t         element type of token_to_seq
//     starts_t        element type of seq_starts
//     ENTRY_SIZE      elements of an entry; a multiple of VEC_SIZE
//     HAS_OWNER       token_to_seq names the sequence of a row; else the sequence is searched in cu_seq_lens
//     TOKENS          rows of a thread block; at most NUM_THREADS

#include "cache.cuh"
#include "paged.cuh"

static_assert(ENTRY_SIZE % VEC_SIZE == 0 && TOKENS <= NUM_THREADS);

// Each block prefetches the line with its own number of each index array: the first blocks fetch what later blocks
// need. Three or four of these loads depend on each other before the first byte of an entry moves.
DEVICE void prefetch_indices(const table_t* block_table, const lens_t* cu_seq_lens, const owner_t* token_to_seq,
                             const starts_t* seq_starts, int64_t num_rows, int64_t num_seqs, int64_t max_blocks,
                             int64_t table_stride, int64_t table_entry_stride, int64_t lens_stride,
                             int64_t owner_stride, int64_t starts_stride) {
    constexpr int OWNER_LINES = ceil_div(TOKENS * int(sizeof(owner_t)), 128);  // of a block; together all lines
    if (HAS_OWNER && threadIdx.x < OWNER_LINES) {
        prefetch_part(token_to_seq, (num_rows - 1) * owner_stride, int64_t(blockIdx.x) * OWNER_LINES + threadIdx.x);
    }
    if (threadIdx.x) return;
    prefetch_part(cu_seq_lens, num_seqs * lens_stride, blockIdx.x);
    if (HAS_STARTS) prefetch_part(seq_starts, (num_seqs - 1) * starts_stride, blockIdx.x);
    prefetch_part(block_table, (num_seqs - 1) * table_stride + (max_blocks - 1) * table_entry_stride, blockIdx.x);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1024 / NUM_THREADS)
gather_cache(const cache_t* src_cache,     // [num_blocks, BLOCK_SIZE, ENTRY_SIZE]
             scalar_t* dst,                // [num_rows, ENTRY_SIZE]
             const table_t* block_table,   // [num_seqs, max_blocks]
             const lens_t* cu_seq_lens,    // [num_seqs + 1]
             const owner_t* token_to_seq,  // [num_rows]
             const float* scale,           // one element
             const starts_t* seq_starts,   // [num_seqs]
             int64_t num_rows, int64_t num_seqs, int64_t num_blocks, int64_t max_blocks, int64_t block_stride,
             int64_t slot_stride, int64_t dst_stride, int64_t table_stride, int64_t table_entry_stride,
             int64_t lens_stride, int64_t owner_stride, int64_t starts_stride) {
    prefetch_indices(block_table, cu_seq_lens, token_to_seq, seq_starts, num_rows, num_seqs, max_blocks, table_stride,
                     table_entry_stride, lens_stride, owner_stride, starts_stride);
    await_previous_kernel();
    __shared__ int64_t entries[TOKENS];
    const Pages<BLOCK_SIZE> pages{num_blocks, block_stride, slot_stride};
    const int64_t first = int64_t(blockIdx.x) * TOKENS;

    const auto entry_of = [&](int64_t row) {
        if (row >= num_rows) return NOWHERE;
        const int64_t sequence = HAS_OWNER ? int64_t(token_to_seq[row * owner_stride])
                                           : count_up_to(cu_seq_lens + lens_stride, num_seqs, lens_stride, row);
        if (sequence < 0 || sequence >= num_seqs) return NOWHERE;
        const int64_t begin = cu_seq_lens[sequence * lens_stride], end = cu_seq_lens[(sequence + 1) * lens_stride];
        const int64_t start = HAS_STARTS ? int64_t(seq_starts[sequence * starts_stride]) : 0;
        if (begin < 0 || row < begin || row >= end || start < 0 || start > max_blocks * BLOCK_SIZE) return NOWHERE;
        return pages.at_position(row - begin + start, block_table + sequence * table_stride, max_blocks,
                                 table_entry_stride);
    };
    if (threadIdx.x < TOKENS) entries[threadIdx.x] = entry_of(first + threadIdx.x);
    __syncthreads();

    constexpr int VEC_BYTES = VEC_SIZE * int(sizeof(cache_t));
    using words_t = Words<VEC_BYTES>;
    struct Piece {
        words_t words;
        bool exists;
    };
    const float factor = is_same<cache_t, scalar_t> ? 1.0f : *scale;
    each_piece<NUM_THREADS, TOKENS, ENTRY_SIZE / VEC_SIZE, BATCH>(
        [&](int row, int piece) {
            // A row without an entry loads an existing entry and does not use it.
            const int64_t entry = entries[row];
            return Piece{load_words<VEC_BYTES>(src_cache + max(entry, int64_t(0)) + piece * VEC_SIZE),
                         entry != NOWHERE};
        },
        [&](int row, int piece, const Piece& loaded) {
            scalar_t* to = dst + (first + row) * dst_stride + piece * VEC_SIZE;
            if constexpr (is_same<cache_t, scalar_t>) {
                if (loaded.exists) store_words<VEC_BYTES>(to, loaded.words);
            } else {
                Vec<cache_t, VEC_SIZE> codes;
                codes.template word<VEC_SIZE>(0) = loaded.words.template word<words_t::SIZE>(0);
                const auto numbers = decode<scalar_t>(codes, factor);
                if (loaded.exists) numbers.store(to);
            }
        });
}
