// gather_cache: copies the entries of sequences from a paged cache to consecutive rows.
//
//     dst[t] = src_cache[block, offset]                      or fp8 value * scale, in float32, rounded once
//     where b is the sequence of row t, p = t - cu_seq_lens[b] + seq_starts[b],
//           block = block_table[b, p / BLOCK_SIZE], offset = p % BLOCK_SIZE
//
// A row without a sequence or without an existing entry is not changed.
//
// Thread mapping: a CTA takes TOKENS rows. One thread per row finds the row's entry. With fewer than LANES sequences,
// each lane loads the start of one sequence, and the search uses shuffles. Then all threads share the vectors, and a
// thread loads BATCH vectors before it stores one (each_piece in cache.cuh).
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
//     TOKENS          rows of a CTA; at most NUM_THREADS

#include "cache.cuh"
#include "paged.cuh"

constexpr int LANES = 32;                                         // lanes that search together
constexpr int FINDERS = ceil_div(TOKENS, WARP_SIZE) * WARP_SIZE;  // threads that find rows, in whole warps
static_assert(ENTRY_SIZE % VEC_SIZE == 0 && TOKENS <= NUM_THREADS && NUM_THREADS % LANES == 0);

// The index tensors that give the entry of a row.
struct Rows {
    const table_t* block_table;
    const lens_t* cu_seq_lens;
    const owner_t* token_to_seq;
    const starts_t* seq_starts;
    Pages<BLOCK_SIZE> pages;
    int64_t num_rows, num_seqs, max_blocks, table_stride, table_entry_stride, lens_stride, owner_stride, starts_stride;

    // The sequence of a row, and the rows from `begin` to `end` that are the sequence's.
    struct Owner { int64_t sequence, begin, end; };
    template <bool FRESH>
    DEVICE Owner owner_of(int64_t row) const {
        const auto bound = [&](int64_t sequence) {
            return int64_t(load_index<FRESH>(cu_seq_lens + sequence * lens_stride));
        };
        if (HAS_OWNER || num_seqs >= LANES) {
            const int64_t sequence =
                HAS_OWNER ? int64_t(load_index<FRESH>(token_to_seq + min(row, num_rows - 1) * owner_stride))
                          : count_up_to(cu_seq_lens + lens_stride, num_seqs, lens_stride, row);
            if (sequence < 0 || sequence >= num_seqs) return {NOWHERE, 0, 0};
            return {sequence, bound(sequence), bound(sequence + 1)};
        }
        // The number of sequences that end at the row or before. The steps are those of count_up_to, so that the answer
        // is the same for numbers that do not ascend, too. Lanes after the last sequence hold its end.
        const int64_t begin = bound(min(int64_t(threadIdx.x % LANES), num_seqs));
        int sequence = 0, end = int(num_seqs);
#pragma unroll
        for (int step = LANES; step > 1; step /= 2) {
            const int middle = (sequence + end) / 2;
            const bool above = shfl<LANES>(begin, min(middle + 1, LANES - 1)) <= row;
            if (sequence == end) continue;
            if (above) sequence = middle + 1;
            else end = middle;
        }
        const int next = min(sequence + 1, LANES - 1);
        const Owner owner{sequence, shfl<LANES>(begin, sequence), shfl<LANES>(begin, next)};
        return owner.sequence < num_seqs ? owner : Owner{NOWHERE, 0, 0};
    }

    // The position of a row's entry in the sequence, and the index in block_table of the position's block number;
    // NOWHERE for a row without a sequence. Every lane of the warp must call.
    struct Lookup { int64_t position, in_table; };
    template <bool FRESH>
    DEVICE Lookup lookup_of(int64_t row) const {
        const Lookup nowhere{0, NOWHERE};
        const Owner owner = owner_of<FRESH>(row);
        if (row >= num_rows || owner.sequence == NOWHERE) return nowhere;
        const int64_t start = HAS_STARTS ? int64_t(load_index<FRESH>(seq_starts + owner.sequence * starts_stride)) : 0;
        const int64_t capacity = max_blocks * BLOCK_SIZE;
        if (owner.begin < 0 || row < owner.begin || row >= owner.end || start < 0 || start > capacity) return nowhere;
        const int64_t position = row - owner.begin + start;
        if (position >= capacity) return nowhere;
        return {position, owner.sequence * table_stride + pages.page_of(position) * table_entry_stride};
    }
};

// CTA i prefetches line i of each index array, so that the first CTAs fetch what later CTAs need. The load of an entry
// depends on a chain of three or four index loads.
//
// The first `early_blocks` CTAs may start while the previous kernel runs (PDL). They also prefetch the entries that the
// indices name by then. If that kernel changes the indices, the prefetch is wasted but harmless: every index is read
// again.
struct Early {
    Rows rows;
    Rows::Lookup lookup;  // the Lookup of the thread's row
};
DEVICE Early prefetch_entries(const Rows& rows, const cache_t* src_cache, int64_t early_blocks) {
    constexpr int OWNER_LINES = ceil_div(TOKENS * int(sizeof(owner_t)), 128);  // cache lines of a CTA's share
    if (HAS_OWNER && threadIdx.x < OWNER_LINES) {
        prefetch_part(rows.token_to_seq, (rows.num_rows - 1) * rows.owner_stride,
                      int64_t(blockIdx.x) * OWNER_LINES + threadIdx.x);
    }
    if (threadIdx.x == 0) {
        prefetch_part(rows.cu_seq_lens, rows.num_seqs * rows.lens_stride, blockIdx.x);
        if (HAS_STARTS) prefetch_part(rows.seq_starts, (rows.num_seqs - 1) * rows.starts_stride, blockIdx.x);
        prefetch_part(rows.block_table,
                      (rows.num_seqs - 1) * rows.table_stride + (rows.max_blocks - 1) * rows.table_entry_stride,
                      blockIdx.x);
    }
    if (blockIdx.x >= early_blocks || threadIdx.x >= FINDERS) return {rows, {0, NOWHERE}};
    const Rows::Lookup lookup = rows.lookup_of<true>(int64_t(blockIdx.x) * TOKENS + threadIdx.x);
    if (lookup.in_table == NOWHERE) return {rows, lookup};
    if (threadIdx.x >= TOKENS) return {rows, lookup};
    const int64_t entry = rows.pages.in_block(load_fresh(rows.block_table + lookup.in_table), lookup.position);
    if (entry != NOWHERE) {
        for (int i = 0; i < ENTRY_SIZE; i += 128 / int(sizeof(cache_t))) prefetch_line(src_cache + entry + i);
    }
    return {rows, lookup};
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
             int64_t lens_stride, int64_t owner_stride, int64_t starts_stride, int64_t early_blocks) {
    const Early early = prefetch_entries(Rows{block_table,
                                              cu_seq_lens,
                                              token_to_seq,
                                              seq_starts,
                                              {num_blocks, block_stride, slot_stride},
                                              num_rows,
                                              num_seqs,
                                              max_blocks,
                                              table_stride,
                                              table_entry_stride,
                                              lens_stride,
                                              owner_stride,
                                              starts_stride},
                                         src_cache, early_blocks);
    await_previous_kernel();
    __shared__ int64_t entries[TOKENS];
    const int64_t first = int64_t(blockIdx.x) * TOKENS;
    if (threadIdx.x < FINDERS) {
        // The block number is loaded from the early Lookup while the Lookup is computed again.
        int64_t block = early.lookup.in_table == NOWHERE ? 0 : int64_t(block_table[early.lookup.in_table]);
        keep_loads();
        const Rows::Lookup lookup = early.rows.lookup_of<false>(first + threadIdx.x);
        if (lookup.in_table != early.lookup.in_table && lookup.in_table != NOWHERE)
            block = block_table[lookup.in_table];
        if (threadIdx.x < TOKENS)
            entries[threadIdx.x] =
                lookup.in_table == NOWHERE ? NOWHERE : early.rows.pages.in_block(block, lookup.position);
    }
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
