// cp_gather_and_upconvert_fp8_kv_cache: copies the quantized entries of sequences from a paged cache to rows of
// bfloat16.
//
//     dst[t, i] = bf16(x[i] * scale[i / 128])                i < 512: e4m3 values x, then four float32 scales
//     dst[t, 512 + i] = rope[i]                              i < 64: bfloat16, unchanged
//     NVFP4: x are e2m1 values, two in a byte, the scales are e4m3, of 16 elements each, and rope is e4m3: an entry has
//     256 bytes of x, 64 of rope and 32 of scales, where that of group g is at 8 * (g % 4) + g / 4
//     from the entry src_cache[block_table[b, p / BLOCK_SIZE], p % BLOCK_SIZE], where t = workspace_starts[b] + j,
//     0 <= j < seq_lens[b] and p = seq_starts[b] + j
//
// Without HAS_LENS a sequence ends where the next begins, the last at num_rows. A row without a sequence or without an
// existing entry is not changed.
//
// Thread mapping: a group of 32 threads takes ROWS adjacent rows of dst.
// 1. All lanes search for the sequences of these rows, then one lane per row finds the row's entry.
// 2. Each lane loads, for each row, two vectors of 8 values with a stride of 256: each store of the group covers
//    one contiguous piece of the row. Eight lanes per row load the rope.
// 3. Stores begin when all loads have been issued.
//
// Constants
//     table_t       element type of block_table
//     lens_t        element type of seq_lens
//     starts_t      element type of workspace_starts
//     first_t       element type of seq_starts
//     HAS_LENS      false when seq_lens is null
//     NVFP4         the format of entries
//     HAS_FIRST     false when seq_starts is null: all sequences are gathered from position 0
//     ACCESS_SIZE   bytes of an entry in one memory access
//     DST_ACCESS    elements of dst in one memory access
//     ROWS          rows of a group: 1, 2 or 4

#include "cache.cuh"
#include "packed.cuh"
#include "paged.cuh"

constexpr int LANES = 32;
constexpr int LATENT_SIZE = 512;
constexpr int TILE_SIZE = NVFP4 ? 16 : 128;                                  // elements under one scale
constexpr int ROPE = NVFP4 ? 256 : 528, SCALES = NVFP4 ? 320 : LATENT_SIZE;  // bytes from the entry's start
constexpr int ENTRY_BYTES = NVFP4 ? 352 : 656;
constexpr int HALF = LATENT_SIZE / 2;  // elements between the two vectors of a lane
constexpr int VEC_SIZE = HALF / LANES;
constexpr int ROPE_LANES = 8;  // lanes that copy 8 elements of the rope each
constexpr int CODE_BYTES = NVFP4 ? VEC_SIZE / 2 : VEC_SIZE, ROPE_BYTES = NVFP4 ? VEC_SIZE : 2 * VEC_SIZE;  // of a lane
constexpr int CODE_ACCESS = ACCESS_SIZE < CODE_BYTES ? ACCESS_SIZE : CODE_BYTES;
constexpr int ROPE_ACCESS = ACCESS_SIZE < ROPE_BYTES ? ACCESS_SIZE : ROPE_BYTES;
constexpr int SCALE_ACCESS = ACCESS_SIZE < 4 ? ACCESS_SIZE : 4;
static_assert(ROWS * ROPE_LANES <= LANES);

using code_t = Vec<uint8_t, CODE_BYTES>;

// The scale of the elements of an entry from `element` on.
DEVICE float scale_of(const uint8_t* entry, int element) {
    const int group = element / TILE_SIZE;
    if constexpr (NVFP4) {
        Vec<fp8_e4m3_t, 1> scale;
        scale.word<1>(0) = entry[SCALES + 8 * (group % 4) + group / 4];
        return scale[0];
    }
    return load_float<SCALE_ACCESS>(entry + SCALES + group * 4);
}

// Eight values times their scale. With NVFP4 that is exact.
DEVICE Vec<bf16_t, VEC_SIZE> decoded(const code_t& quants, float scale) {
    if constexpr (NVFP4) {
        float x[VEC_SIZE];
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) x[i] = e2m1_to_float(quants.data[i / 2] >> (i % 2 * 4) & 15) * scale;
        return Vec<bf16_t, VEC_SIZE>::from_floats(x);
    } else {
        Vec<fp8_e4m3_t, VEC_SIZE> eight;
        eight.word<VEC_SIZE>(0) = quants.word<VEC_SIZE>(0);
        return decode<bf16_t>(eight, scale);
    }
}

// Eight elements of the rope.
DEVICE Vec<bf16_t, VEC_SIZE> rope_of(const Vec<uint8_t, ROPE_BYTES>& bytes) {
    Vec<bf16_t, VEC_SIZE> rope;
    if constexpr (NVFP4) {
        Vec<fp8_e4m3_t, VEC_SIZE> eight;
        eight.word<VEC_SIZE>(0) = bytes.word<VEC_SIZE>(0);
        float x[VEC_SIZE];
        eight.to_floats(x);
        rope = rope.from_floats(x);
    } else {
        rope = *reinterpret_cast<const Vec<bf16_t, VEC_SIZE>*>(bytes.data);
    }
    return rope;
}

// A bit for each lane of the caller's group: its predicate. Every lane of the warp takes part.
DEVICE uint32_t ballot_of_group(bool predicate) {
    return uint32_t(ballot(predicate) >> (threadIdx.x % WARP_SIZE / LANES * LANES));
}

// The first row of the caller's group.
DEVICE int64_t first_row() { return (int64_t(blockIdx.x) * (NUM_THREADS / LANES) + threadIdx.x / LANES) * ROWS; }

// The index tensors that give the entry of a row of dst.
struct Rows {
    const table_t* block_table;
    const lens_t* seq_lens;
    const starts_t* workspace_starts;
    const first_t* seq_starts;
    Pages<BLOCK_SIZE> pages;
    int64_t num_rows, batch_size, max_blocks, table_stride, table_entry_stride, lens_stride, starts_stride,
        first_stride;

    // The rows of a sequence that begins at row `start`.
    template <bool FRESH>
    DEVICE int64_t length_of(int64_t sequence, int64_t start) const {
        if constexpr (HAS_LENS) return load_index<FRESH>(seq_lens + sequence * lens_stride);
        const int64_t next = sequence + 1;
        const int64_t end = next < batch_size ? load_index<FRESH>(workspace_starts + next * starts_stride) : num_rows;
        return max(end, int64_t(0)) - max(start, int64_t(0));
    }

    // The first position of a sequence that is gathered; the end of the table if that is no position.
    template <bool FRESH>
    DEVICE int64_t first_position(int64_t sequence) const {
        if constexpr (!HAS_FIRST) return 0;
        const int64_t position = load_index<FRESH>(seq_starts + sequence * first_stride), end = max_blocks * BLOCK_SIZE;
        return position < 0 || position > end ? end : position;
    }

    // The position of a row's entry in the sequence, and the index in block_table of the position's block number;
    // NOWHERE for a row without a sequence.
    struct Lookup { int64_t position, in_table; };
    // The Lookup of row first + lane (lane < ROWS) in the first sequence that has the row. Every lane must call.
    template <bool FRESH>
    DEVICE Lookup lookup_of(int64_t first, int lane) const {
        const int64_t row = first + lane, end = min(first + ROWS, num_rows);
        int64_t sequence = batch_size, position = 0;
#pragma unroll 1
        for (int64_t from = 0; from < batch_size; from += LANES) {
            const int64_t candidate = min(from + lane, batch_size - 1);
            const int64_t start = load_index<FRESH>(workspace_starts + candidate * starts_stride);
            const int64_t length = length_of<FRESH>(candidate, start);
            keep_loads_of_warp();
            const bool meets = candidate == from + lane && start >= 0 && start < end && first - start < length;
            for (uint32_t met = ballot_of_group(meets); met; met &= met - 1) {
                const int64_t next = from + lowest_bit(met);
                const int64_t begin = load_index<FRESH>(workspace_starts + next * starts_stride);
                const int64_t count = length_of<FRESH>(next, begin);
                if (sequence == batch_size && begin <= row && row - begin < count) {
                    sequence = next;
                    position = row - begin + first_position<FRESH>(next);
                }
            }
        }
        if (row >= end || sequence == batch_size || position >= max_blocks * BLOCK_SIZE) return {0, NOWHERE};
        return {position, sequence * table_stride + pages.page_of(position) * table_entry_stride};
    }
};

// CTA i prefetches line i of the starts, of the lengths and of the table. The load of an entry depends on all three.
//
// The first `early_blocks` CTAs may start while the previous kernel runs (PDL). They also prefetch the entries that the
// indices name by then. If that kernel changes the indices, the prefetch is wasted but harmless: every index is read
// again.
struct Early {
    Rows rows;
    Rows::Lookup lookup;  // the Lookup of row first + lane
};
DEVICE Early prefetch_entries(const Rows& rows, const uint8_t* src_cache, int64_t early_blocks) {
    if (threadIdx.x == 0) {
        prefetch_part(rows.workspace_starts, (rows.batch_size - 1) * rows.starts_stride, blockIdx.x);
        if (HAS_LENS) prefetch_part(rows.seq_lens, (rows.batch_size - 1) * rows.lens_stride, blockIdx.x);
        if (HAS_FIRST) prefetch_part(rows.seq_starts, (rows.batch_size - 1) * rows.first_stride, blockIdx.x);
        prefetch_part(rows.block_table,
                      (rows.batch_size - 1) * rows.table_stride + (rows.max_blocks - 1) * rows.table_entry_stride,
                      blockIdx.x);
    }
    if (blockIdx.x >= early_blocks) return {rows, {0, NOWHERE}};
    const int lane = threadIdx.x % LANES;
    const Rows::Lookup lookup = rows.lookup_of<true>(first_row(), lane);
    int64_t at = NOWHERE;
    if (lookup.in_table != NOWHERE) {
        at = rows.pages.in_block(load_fresh(rows.block_table + lookup.in_table), lookup.position);
    }
    constexpr int ROW_LANES = LANES / ROWS, LINES = ceil_div(ENTRY_BYTES, 128) + 1;  // lines of an unaligned entry
    const int64_t entry = shfl<LANES>(at, lane / ROW_LANES);
    const int line = lane % ROW_LANES;
    if (entry != NOWHERE && line < LINES) prefetch_line(src_cache + entry + min(line * 128, ENTRY_BYTES - 1));
    return {rows, lookup};
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1024 / NUM_THREADS)
cp_gather_and_upconvert_fp8_kv_cache(const uint8_t* src_cache,          // [num_blocks, BLOCK_SIZE, 656]
                                     bf16_t* dst,                       // [num_rows, 576]
                                     const table_t* block_table,        // [batch_size, max_blocks]
                                     const lens_t* seq_lens,            // [batch_size]
                                     const starts_t* workspace_starts,  // [batch_size]
                                     const first_t* seq_starts,         // [batch_size]
                                     int64_t num_rows, int64_t batch_size, int64_t num_blocks, int64_t max_blocks,
                                     int64_t block_stride, int64_t slot_stride, int64_t dst_stride,
                                     int64_t table_stride, int64_t table_entry_stride, int64_t lens_stride,
                                     int64_t starts_stride, int64_t first_stride, int64_t early_blocks) {
    const Early early = prefetch_entries(Rows{block_table,
                                              seq_lens,
                                              workspace_starts,
                                              seq_starts,
                                              {num_blocks, block_stride, slot_stride},
                                              num_rows,
                                              batch_size,
                                              max_blocks,
                                              table_stride,
                                              table_entry_stride,
                                              lens_stride,
                                              starts_stride,
                                              first_stride},
                                         src_cache, early_blocks);
    await_previous_kernel();
    const int lane = threadIdx.x % LANES;
    const int64_t first = first_row();

    // The block number is loaded from the early Lookup while the Lookup is computed again.
    int64_t block = early.lookup.in_table == NOWHERE ? 0 : int64_t(block_table[early.lookup.in_table]);
    keep_loads_of_warp();
    const Rows::Lookup lookup = early.rows.lookup_of<false>(first, lane);
    if (lookup.in_table != early.lookup.in_table && lookup.in_table != NOWHERE) block = block_table[lookup.in_table];
    int64_t at = lookup.in_table == NOWHERE ? NOWHERE : early.rows.pages.in_block(block, lookup.position);

    // A row without an entry loads an existing entry and does not use it: a conditional load would be issued late.
    const uint32_t found = ballot_of_group(at != NOWHERE);
    at = max(at, int64_t(0));
    code_t quants[ROWS][2];
    float scales[ROWS][2];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const uint8_t* entry = src_cache + shfl<LANES>(at, i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int element = half * HALF + lane * VEC_SIZE;
            quants[i][half] = code_t::load<CODE_ACCESS>(entry + element / VEC_SIZE * CODE_BYTES);
            scales[i][half] = scale_of(entry, element);
        }
    }
    const int rope_row = lane / ROPE_LANES, rope_lane = lane % ROPE_LANES;
    const auto rope = Vec<uint8_t, ROPE_BYTES>::load<ROPE_ACCESS>(src_cache + shfl<LANES>(at, rope_row) + ROPE +
                                                                  rope_lane * ROPE_BYTES);
    keep_loads_of_warp();

    dst += first * dst_stride;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (!(found >> i & 1)) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto eight = decoded(quants[i][half], scales[i][half]);
            eight.store<DST_ACCESS>(dst + i * dst_stride + half * HALF + lane * VEC_SIZE);
        }
    }
    if (found >> rope_row & 1) {
        rope_of(rope).store<DST_ACCESS>(dst + rope_row * dst_stride + LATENT_SIZE + rope_lane * VEC_SIZE);
    }
}
