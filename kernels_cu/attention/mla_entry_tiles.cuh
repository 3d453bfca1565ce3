// mla_entry_tiles.cuh: loads tiles of latent entries to shared memory for mla_decode and mla_decode_sm80. Reads the
// constants of the kernel that includes it.
//
// A tile has a row of product_t for each of TOKENS entries. Each warp copies ROWS rows in chunks of 16 bytes, and
// LANES_OF_ROW adjacent lanes copy a row. Entries of product_t are copied directly to one of STAGES tiles. The fp8 values
// of a tile are copied to one of CODE_STAGES buffers, and converted to product_t as soon as no warp reads the tile that
// they replace.
#pragma once
#include "async.cuh"
#include "mla_entry.cuh"
#include "paged.cuh"

constexpr bool IS_FP8 = !is_same<cache_t, product_t>;
constexpr int PITCH = ENTRY_SIZE + 8;  // padded by 16 bytes, so that adjacent rows begin on different banks
constexpr int ROWS = TOKENS / NUM_WARPS, LANES_OF_ROW = WARP_SIZE / ROWS;
constexpr int CHUNK = 16 / sizeof(cache_t), CHUNKS = ENTRY_BYTES / 16;  // elements of a chunk; chunks of an entry
constexpr int COPIES = ceil_div(CHUNKS, LANES_OF_ROW);                  // chunks that a lane copies
static_assert(ROWS * NUM_WARPS == TOKENS && ROWS * LANES_OF_ROW == WARP_SIZE);

// A lane's chunks in flight to a tile, where copies are held.
using held_entries_t = uint32_t[HOLDS_COPIES ? COPIES : 1][4];

template <int STAGES, int CODE_STAGES>
struct EntryTiles {
    static constexpr int TILE_BYTES = TOKENS * PITCH * 2, CODE_BYTES = TOKENS * ENTRY_BYTES;
    static constexpr int BYTES = STAGES * TILE_BYTES + (IS_FP8 ? CODE_STAGES * CODE_BYTES : 0);

    unsigned char* shared;  // [BYTES]: the tiles, then the fp8 values
    const cache_t* cache;

    DEVICE product_t* at(int stage) const {
        return reinterpret_cast<product_t*>(shared + (STAGES == 1 ? 0 : stage) * TILE_BYTES);
    }
    // The row of a tile that the lane helps to copy.
    static DEVICE int row_of_lane() {
        return int(threadIdx.x / WARP_SIZE) * ROWS + int(threadIdx.x % WARP_SIZE) / LANES_OF_ROW;
    }

    // Copies a tile to shared memory or `held`: to tile `stage`, or as fp8 values to buffer `stage`. `offset` is the cache
    // offset of the lane's row; a row with NOWHERE is filled with zeros. `exists` [TOKENS]: whether a row has an entry.
    DEVICE void load(int stage, int64_t offset, uint8_t* exists, held_entries_t& held) const {
        const auto* const from = reinterpret_cast<const unsigned char*>(cache + max(offset, int64_t(0))) + first_byte();
        unsigned char* const to = copy_of_row(stage) + first_byte();
#pragma unroll
        for (int n = 0; n < COPIES; ++n) {
            if constexpr (HOLDS_COPIES) {
                hold<16>(held[n], from + n * COPY_STEP, has_chunk(n) && offset != NOWHERE);
            } else {
                copy(to, from, n, offset != NOWHERE);
            }
        }
        if (first_byte() == 0) exists[row_of_lane()] = offset != NOWHERE;
    }
    // Copies the n-th chunk of the lane between rows that begin at the lane's first chunk; zeros if not `valid`.
    static DEVICE void copy(unsigned char* to, const unsigned char* from, int n, bool valid) {
        if (has_chunk(n)) cp_async<16>(to + n * COPY_STEP, from + n * COPY_STEP, valid);
    }
    // Completes `load` where copies are held: stores `held` to shared memory.
    DEVICE void store(int stage, const held_entries_t& held) const {
        if constexpr (HOLDS_COPIES) {
            unsigned char* const to = copy_of_row(stage) + first_byte();
#pragma unroll
            for (int n = 0; n < COPIES; ++n) {
                if (has_chunk(n)) store_held(to + n * COPY_STEP, held[n]);
            }
        }
    }
    // Converts the fp8 values of buffer `code_stage` that this lane has copied to elements of tile `stage`.
    DEVICE void convert_codes(int stage, int code_stage) const {
        product_t* const row = at(stage) + row_of_lane() * PITCH;
        const unsigned char* const quants = copy_of_row(code_stage);
#pragma unroll
        for (int n = 0; n < COPIES; ++n) {
            if (!has_chunk(n)) continue;
            const int chunk = first_byte() / 16 + n * LANES_OF_ROW;
            if constexpr (IS_DS_MLA) convert_scaled(row + chunk * CHUNK, quants, chunk);
            else convert(row + chunk * CHUNK, quants + chunk * 16);
        }
    }
    // Where the lane's first chunk of its row begins.
    static DEVICE int first_byte() { return threadIdx.x % LANES_OF_ROW * 16; }
    // The lane's row as copied: of tile `stage`, or of the fp8 values of buffer `stage`.
    DEVICE unsigned char* copy_of_row(int stage) const {
        unsigned char* const quants = shared + STAGES * TILE_BYTES + (CODE_STAGES == 1 ? 0 : stage) * CODE_BYTES;
        if (IS_FP8) return quants + row_of_lane() * ENTRY_BYTES;
        return shared + stage * TILE_BYTES + row_of_lane() * (PITCH * 2);
    }

private:
    static constexpr int COPY_STEP = LANES_OF_ROW * 16;  // bytes between chunks of a lane
    // Whether the lane has an n-th chunk.
    static DEVICE bool has_chunk(int n) {
        return (n + 1) * LANES_OF_ROW <= CHUNKS || int(threadIdx.x % LANES_OF_ROW) < CHUNKS - n * LANES_OF_ROW;
    }
    // Converts a chunk of fp8 values.
    static DEVICE void convert(product_t* to, const unsigned char* from) {
        if constexpr (IS_FP8) {
            const uint4 quants = *reinterpret_cast<const uint4*>(from);
            const uint32_t words[4] = {quants.x, quants.y, quants.z, quants.w};
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                uint32_t low[2], high[2];
                fp8_to_pairs<product_t, cache_t>(words[i], low);
                fp8_to_pairs<product_t, cache_t>(words[i + 1], high);
                *reinterpret_cast<uint4*>(to + i * 4) = uint4{low[0], low[1], high[0], high[1]};
            }
        }
    }
    // The same for an entry of "fp8_ds_mla": fp8 values times their scale, or unchanged elements of the rotated key,
    // which follows the scales in the cache.
    static DEVICE void convert_scaled(product_t* to, const unsigned char* row, int chunk) {
        constexpr int SCALES = SCALES_AT / 16, ROPE = ROPE_AT / 16;  // chunks
        const uint4 bytes = *reinterpret_cast<const uint4*>(row + chunk * 16);
        if (chunk >= ROPE) {
            to += LATENT_SIZE - ROPE * CHUNK - (chunk - ROPE) * (CHUNK / 2);
            *reinterpret_cast<uint4*>(to) = bytes;
        } else if (chunk < SCALES) {
            const float* const scales = reinterpret_cast<const float*>(row + SCALES_AT);
            uint4 elements[2];
            widen_scaled_fp8<product_t>(bytes, scales[chunk * CHUNK / SCALED_SIZE], elements);
            *reinterpret_cast<uint4*>(to) = elements[0];
            *reinterpret_cast<uint4*>(to + 8) = elements[1];
        }
    }
};
