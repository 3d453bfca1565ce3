// cp_gather_and_upconvert_fp8_kv_cache: copy the 656-byte entries of sequences from a paged cache as bfloat16 rows.
//
//     dst[t, i] = bf16(code[i] * scale[i / 128])             i < 512: e4m3 codes, then four float32 scales
//     dst[t, 512 + i] = rope[i]                              i < 64: bfloat16 as it is
//     of the entry src_cache[block_table[b, j / BLOCK_SIZE], j % BLOCK_SIZE], where t = workspace_starts[b] + j and
//     0 <= j < seq_lens[b]
//
// One warp's width of threads for each row of dst: they look at all sequences for the first that has the row, then each
// converts 16 codes, and the first eight copy the rope. A row without a sequence, or whose entry does not exist, is left.
//
// Constants
//     table_t       element type of block_table
//     lens_t        element type of seq_lens
//     starts_t      element type of workspace_starts
//     BLOCK_SIZE    slots of a cache block
//     ACCESS_SIZE   bytes of an entry in one memory access
//     DST_ACCESS    elements of dst in one memory access
//     NUM_THREADS   threads in the block

#include "cache.cuh"
#include "paged.cuh"
#include "reduce.cuh"

constexpr int LANES = 32;
constexpr int LATENT_SIZE = 512;
constexpr int TILE_SIZE = 128;  // elements under one scale
constexpr int SCALES = LATENT_SIZE, ROPE = LATENT_SIZE + 4 * (LATENT_SIZE / TILE_SIZE);  // bytes from the entry's start

struct First {
    static DEVICE int64_t apply(int64_t a, int64_t b) { return a < b ? a : b; }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
cp_gather_and_upconvert_fp8_kv_cache(const uint8_t* src_cache,           // [num_blocks, BLOCK_SIZE, 656]
                                     bf16_t* dst,                        // [num_rows, 576]
                                     const table_t* block_table,         // [batch_size, max_blocks]
                                     const lens_t* seq_lens,             // [batch_size]
                                     const starts_t* workspace_starts,   // [batch_size]
                                     int64_t num_rows, int64_t batch_size, int64_t num_blocks, int64_t max_blocks,
                                     int64_t block_stride, int64_t slot_stride, int64_t dst_stride,
                                     int64_t table_stride, int64_t table_entry_stride,
                                     int64_t lens_stride, int64_t starts_stride) {
    await_previous_kernel();
    const int64_t row = int64_t(blockIdx.x) * (NUM_THREADS / LANES) + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    int64_t sequence = batch_size;
    for (int64_t i = lane; i < batch_size; i += LANES) {
        const int64_t start = workspace_starts[i * starts_stride];
        const bool has = start >= 0 && start <= row && row - start < int64_t(seq_lens[i * lens_stride]);
        if (has && i < sequence) sequence = i;
    }
    sequence = lane_reduce<First, LANES>(sequence);
    if (row >= num_rows || sequence == batch_size) return;
    const Pages<BLOCK_SIZE> pages{num_blocks, block_stride, slot_stride};
    const int64_t position = row - int64_t(workspace_starts[sequence * starts_stride]);
    const int64_t at = pages.at_position(position, block_table + sequence * table_stride, max_blocks, table_entry_stride);
    if (at == NOWHERE) return;

    const uint8_t* entry = src_cache + at;
    dst += row * dst_stride;
    const int element = lane * 16;
    const auto codes = Vec<uint8_t, 16>::load<ACCESS_SIZE>(entry + element);
    const float scale = load_float<ACCESS_SIZE < 4 ? ACCESS_SIZE : 4>(entry + SCALES + element / TILE_SIZE * 4);
    if (lane < 8) {
        const auto rope = Vec<uint8_t, 16>::load<ACCESS_SIZE>(entry + ROPE + lane * 16);
        Vec<bf16_t, 8> kept;
        kept.word<8>(0) = rope.word<16>(0);
        kept.store<DST_ACCESS>(dst + LATENT_SIZE + lane * 8);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Vec<fp8_e4m3_t, 8> eight;
        eight.word<8>(0) = codes.word<8>(half * 8);
        decode<bf16_t>(eight, scale).store<DST_ACCESS>(dst + element + half * 8);
    }
}
