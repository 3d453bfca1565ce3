// cp_gather_indexer_k_quant_cache: copies the quantised keys and scales of sequences from the indexer's paged cache.
//
//     dst_k[t] = K[offset], dst_scale[t] = S[offset]         of the cache block block_table[b, j / BLOCK_SIZE]
//     where b is the sequence of row t, j = t - cu_seq_lens[b], offset = j % BLOCK_SIZE
//
// A cache block holds the fp8 keys K of all its slots, then the scales S of all its slots. A row without a sequence or
// without an existing entry is not changed.
//
// Thread mapping: a CTA takes TOKENS rows. One thread per row finds the row's entry; then all threads share the
// vectors, and a thread loads BATCH vectors before it stores one (each_piece in cache.cuh).
//
// Constants
//     table_t         element type of block_table
//     lens_t          element type of cu_seq_lens
//     HEAD_SIZE       bytes of a key
//     SCALE_SIZE      bytes of a key's scales
//     VEC_SIZE        bytes of a key in one memory access; divides HEAD_SIZE
//     SCALE_VEC       bytes of scales in one memory access; divides SCALE_SIZE
//     TOKENS          rows of a CTA; at most NUM_THREADS

#include "cache.cuh"
#include "paged.cuh"

constexpr int HEAD_VECS = HEAD_SIZE / VEC_SIZE;
constexpr int SCALE_VECS = SCALE_SIZE / SCALE_VEC;
static_assert(HEAD_SIZE % VEC_SIZE == 0 && SCALE_SIZE % SCALE_VEC == 0 && TOKENS <= NUM_THREADS);

// CTA i prefetches line i of the lengths and of the table. The load of a key depends on both.
DEVICE void
prefetch_indices(const table_t* block_table, const lens_t* cu_seq_lens, int64_t num_seqs, int64_t max_blocks,
                 int64_t table_stride, int64_t table_entry_stride, int64_t lens_stride) {
    if (threadIdx.x) return;
    prefetch_part(cu_seq_lens, num_seqs * lens_stride, blockIdx.x);
    prefetch_part(block_table, (num_seqs - 1) * table_stride + (max_blocks - 1) * table_entry_stride, blockIdx.x);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1024 / NUM_THREADS)
cp_gather_indexer_k_quant_cache(const uint8_t* kv_cache,     // [num_blocks, BLOCK_SIZE, HEAD_SIZE + SCALE_SIZE]
                                uint8_t* dst_k,              // [num_rows, HEAD_SIZE]
                                uint8_t* dst_scale,          // [num_rows, SCALE_SIZE]
                                const table_t* block_table,  // [num_seqs, max_blocks]
                                const lens_t* cu_seq_lens,   // [num_seqs + 1]
                                int64_t num_rows, int64_t num_seqs, int64_t num_blocks, int64_t max_blocks,
                                int64_t block_stride, int64_t dst_k_stride, int64_t dst_scale_stride,
                                int64_t table_stride, int64_t table_entry_stride, int64_t lens_stride) {
    prefetch_indices(block_table, cu_seq_lens, num_seqs, max_blocks, table_stride, table_entry_stride, lens_stride);
    await_previous_kernel();
    __shared__ int64_t blocks[TOKENS];
    __shared__ int offsets[TOKENS];
    const int64_t first = int64_t(blockIdx.x) * TOKENS;

    if (threadIdx.x < TOKENS) {
        const int64_t row = first + threadIdx.x;
        int64_t block = NOWHERE, position = 0;
        if (row < num_rows) {
            const int64_t sequence = count_up_to(cu_seq_lens + lens_stride, num_seqs, lens_stride, row);
            const int64_t begin = sequence < num_seqs ? int64_t(cu_seq_lens[sequence * lens_stride]) : -1;
            if (begin >= 0 && begin <= row) {
                position = row - begin;
                // A slot stride of 0 gives the offset of the block: keys and scales have different slot strides.
                const Pages<BLOCK_SIZE> pages{num_blocks, block_stride, 0};
                block =
                    pages.at_position(position, block_table + sequence * table_stride, max_blocks, table_entry_stride);
            }
        }
        blocks[threadIdx.x] = block;
        offsets[threadIdx.x] = uint64_t(position) % BLOCK_SIZE;
    }
    __syncthreads();

    struct Piece {
        Words<VEC_SIZE> keys;
        Words<SCALE_VEC> scales;
    };
    each_piece<NUM_THREADS, TOKENS, HEAD_VECS + SCALE_VECS, BATCH>(
        [&](int row, int piece) {
            Piece loaded;
            // A row without an entry loads an existing entry and does not use it.
            const uint8_t* block = kv_cache + max(blocks[row], int64_t(0));
            if (piece < HEAD_VECS) {
                loaded.keys = load_words<VEC_SIZE>(block + offsets[row] * HEAD_SIZE + piece * VEC_SIZE);
            } else {
                const uint8_t* scales = block + BLOCK_SIZE * HEAD_SIZE + offsets[row] * SCALE_SIZE;
                loaded.scales = load_words<SCALE_VEC>(scales + (piece - HEAD_VECS) * SCALE_VEC);
            }
            return loaded;
        },
        [&](int row, int piece, const Piece& loaded) {
            if (blocks[row] == NOWHERE) return;
            if (piece < HEAD_VECS) {
                store_words<VEC_SIZE>(dst_k + (first + row) * dst_k_stride + piece * VEC_SIZE, loaded.keys);
            } else {
                uint8_t* scales = dst_scale + (first + row) * dst_scale_stride;
                store_words<SCALE_VEC>(scales + (piece - HEAD_VECS) * SCALE_VEC, loaded.scales);
            }
        });
}
