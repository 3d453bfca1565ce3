// cp_gather_and_upconvert_fp8_kv_cache: copies the 656-byte entries of sequences from a paged cache to rows of
// bfloat16.
//
//     dst[t, i] = bf16(code[i] * scale[i / 128])             i < 512: e4m3 codes, then four float32 scales
//     dst[t, 512 + i] = rope[i]                              i < 64: bfloat16, unchanged
//     from the entry src_cache[block_table[b, j / BLOCK_SIZE], j % BLOCK_SIZE], where t = workspace_starts[b] + j and
//     0 <= j < seq_lens[b]
//
// A row without a sequence, or whose entry does not exist, is left as it is.
//
// Threads: a group of 32 threads takes ROWS neighbouring rows of dst.
// 1. All lanes search for the sequences of these rows, then one lane per row finds the row's entry.
// 2. Each lane loads, for each row, two vectors of 8 codes that lie 256 codes apart: each store of the group covers one
//    contiguous piece of the row. Eight lanes per row load the rope.
// 3. Stores begin when all loads have been issued.
//
// Constants
//     table_t       element type of block_table
//     lens_t        element type of seq_lens
//     starts_t      element type of workspace_starts
//     ACCESS_SIZE   bytes of an entry in one memory access
//     DST_ACCESS    elements of dst in one memory access
//     ROWS          rows of a group: 1, 2 or 4

#include "cache.cuh"
#include "paged.cuh"

constexpr int LANES = 32;
constexpr int LATENT_SIZE = 512;
constexpr int TILE_SIZE = 128;                                                           // elements under one scale
constexpr int SCALES = LATENT_SIZE, ROPE = LATENT_SIZE + 4 * (LATENT_SIZE / TILE_SIZE);  // bytes from the entry's start
constexpr int HALF = LATENT_SIZE / 2;  // elements between the two vectors of a lane
constexpr int VEC_SIZE = HALF / LANES;
constexpr int ROPE_LANES = 8;  // lanes that copy 16 bytes of the rope each
constexpr int CODE_ACCESS = ACCESS_SIZE < VEC_SIZE ? ACCESS_SIZE : VEC_SIZE;
constexpr int SCALE_ACCESS = ACCESS_SIZE < 4 ? ACCESS_SIZE : 4;
static_assert(ROWS * ROPE_LANES <= LANES);

// Each block prefetches the line with its own number of the starts, the lengths and the table. The first byte of an
// entry waits for all three.
DEVICE void prefetch_indices(const table_t* block_table, const lens_t* seq_lens, const starts_t* workspace_starts,
                             int64_t batch_size, int64_t max_blocks, int64_t table_stride, int64_t table_entry_stride,
                             int64_t lens_stride, int64_t starts_stride) {
    if (threadIdx.x) return;
    prefetch_part(workspace_starts, (batch_size - 1) * starts_stride, blockIdx.x);
    prefetch_part(seq_lens, (batch_size - 1) * lens_stride, blockIdx.x);
    prefetch_part(block_table, (batch_size - 1) * table_stride + (max_blocks - 1) * table_entry_stride, blockIdx.x);
}

// A bit for each lane of the caller's group: its predicate. Every lane of the warp takes part.
DEVICE uint32_t ballot_of_group(bool predicate) {
    return uint32_t(ballot(predicate) >> (threadIdx.x % WARP_SIZE / LANES * LANES));
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1024 / NUM_THREADS)
cp_gather_and_upconvert_fp8_kv_cache(const uint8_t* src_cache,          // [num_blocks, BLOCK_SIZE, 656]
                                     bf16_t* dst,                       // [num_rows, 576]
                                     const table_t* block_table,        // [batch_size, max_blocks]
                                     const lens_t* seq_lens,            // [batch_size]
                                     const starts_t* workspace_starts,  // [batch_size]
                                     int64_t num_rows, int64_t batch_size, int64_t num_blocks, int64_t max_blocks,
                                     int64_t block_stride, int64_t slot_stride, int64_t dst_stride,
                                     int64_t table_stride, int64_t table_entry_stride, int64_t lens_stride,
                                     int64_t starts_stride) {
    prefetch_indices(block_table, seq_lens, workspace_starts, batch_size, max_blocks, table_stride, table_entry_stride,
                     lens_stride, starts_stride);
    await_previous_kernel();
    const int lane = threadIdx.x % LANES;
    const int64_t first = (int64_t(blockIdx.x) * (NUM_THREADS / LANES) + threadIdx.x / LANES) * ROWS;
    const int64_t end = min(first + ROWS, num_rows);

    // The first sequence that has row first + lane, and the position of the row in this sequence.
    const int64_t row = first + lane;
    int64_t sequence = batch_size, position = 0;
#pragma unroll 1
    for (int64_t from = 0; from < batch_size; from += LANES) {
        const int64_t candidate = min(from + lane, batch_size - 1);
        const int64_t start = workspace_starts[candidate * starts_stride], length = seq_lens[candidate * lens_stride];
        keep_loads_of_warp();
        const bool meets = candidate == from + lane && start >= 0 && start < end && first - start < length;
        for (uint32_t met = ballot_of_group(meets); met; met &= met - 1) {
            const int64_t next = from + lowest_bit(met);
            const int64_t begin = workspace_starts[next * starts_stride], count = seq_lens[next * lens_stride];
            if (sequence == batch_size && begin <= row && row - begin < count) {
                sequence = next;
                position = row - begin;
            }
        }
    }
    const Pages<BLOCK_SIZE> pages{num_blocks, block_stride, slot_stride};
    int64_t at = NOWHERE;
    if (row < end && sequence < batch_size) {
        at = pages.at_position(position, block_table + sequence * table_stride, max_blocks, table_entry_stride);
    }

    // A row without an entry loads an existing entry and does not use it: a load behind a condition would be issued
    // late.
    const uint32_t found = ballot_of_group(at != NOWHERE);
    at = max(at, int64_t(0));
    Vec<fp8_e4m3_t, VEC_SIZE> codes[ROWS][2];
    float scales[ROWS][2];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const uint8_t* entry = src_cache + shfl<LANES>(at, i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int element = half * HALF + lane * VEC_SIZE;
            codes[i][half].word<VEC_SIZE>(0) =
                Vec<uint8_t, VEC_SIZE>::load<CODE_ACCESS>(entry + element).word<VEC_SIZE>(0);
            scales[i][half] = load_float<SCALE_ACCESS>(entry + SCALES + element / TILE_SIZE * 4);
        }
    }
    const int rope_row = lane / ROPE_LANES, rope_lane = lane % ROPE_LANES;
    const auto rope =
        Vec<uint8_t, 16>::load<ACCESS_SIZE>(src_cache + shfl<LANES>(at, rope_row) + ROPE + rope_lane * 16);
    keep_loads_of_warp();

    dst += first * dst_stride;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (!(found >> i & 1)) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto eight = decode<bf16_t>(codes[i][half], scales[i][half]);
            eight.store<DST_ACCESS>(dst + i * dst_stride + half * HALF + lane * VEC_SIZE);
        }
    }
    if (found >> rope_row & 1) {
        Vec<bf16_t, 8> elements;
        elements.word<8>(0) = rope.word<16>(0);
        elements.store<DST_ACCESS>(dst + rope_row * dst_stride + LATENT_SIZE + rope_lane * 8);
    }
}
