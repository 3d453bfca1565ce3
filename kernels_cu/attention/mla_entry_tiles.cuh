// mla_entry_tiles.cuh: loads tiles of latent entries to shared memory for mla_decode. Reads the constants of the kernel
// that includes it.
//
// A tile has a row of product_t for each of TOKENS entries. Each warp copies ROWS rows in chunks of 16 bytes. Entries
// of product_t are copied directly to one of two tiles. For an fp8 cache there is one tile, and memory for the fp8
// values of the next one, which are converted to product_t as soon as no warp reads the tile.
#pragma once
#include "async.cuh"
#include "mla_entry.cuh"
#include "paged.cuh"

constexpr bool IS_FP8 = !is_same<cache_t, product_t>;
constexpr int PITCH = ENTRY_SIZE + 8;  // padded by 16 bytes, so that adjacent rows begin on different banks
constexpr int ROWS = TOKENS / NUM_WARPS;
constexpr int CHUNK = 16 / sizeof(cache_t), CHUNKS = ENTRY_BYTES / 16;  // elements of a chunk; chunks of an entry
constexpr int COPIES = ceil_div(ROWS * CHUNKS, WARP_SIZE);              // chunks that a lane copies
static_assert(ROWS * NUM_WARPS == TOKENS && ROWS <= WARP_SIZE);

// A lane's chunks in flight to a tile, where copies are held.
using held_entries_t = uint32_t[HOLDS_COPIES ? COPIES : 1][4];

struct EntryTiles {
    static constexpr int TILE_BYTES = TOKENS * PITCH * 2, STAGES = IS_FP8 ? 1 : 2;
    static constexpr int BYTES = STAGES * TILE_BYTES + (IS_FP8 ? TOKENS * ENTRY_BYTES : 0);

    unsigned char* shared;  // [BYTES]: the tiles, then the fp8 values
    uint8_t* exists;        // [2, TOKENS]: whether a row of each of two tiles has an entry
    const cache_t* cache;

    DEVICE product_t* at(int stage) const {
        return reinterpret_cast<product_t*>(shared + (IS_FP8 ? 0 : stage) * TILE_BYTES);
    }
    // The row of a tile for which the lane computes the offset; lane `row` of a warp has the warp's row `row`.
    static DEVICE int row_of_lane() { return first_row() + lane() % ROWS; }

    // Copies a tile to shared memory or `held`. `place` is the cache offset of the lane's row; a row with NOWHERE is
    // filled with zeros.
    DEVICE void load(int stage, int64_t place, held_entries_t& held) const {
        each_chunk([&](int row, int chunk, bool is_own, int n) {
            const int64_t at = shfl<WARP_SIZE>(place, row);
            const cache_t* const from = cache + max(at, int64_t(0)) + chunk * CHUNK;
            if constexpr (HOLDS_COPIES) hold<16>(held[n], from, is_own && at != NOWHERE);
            else if (is_own) cp_async<16>(copy_at(stage, row, chunk), from, at != NOWHERE);
        });
        if (lane() < ROWS) exists[stage * TOKENS + row_of_lane()] = place != NOWHERE;
        cp_async_commit();
    }
    // Completes `load` where copies are held: stores `held` to shared memory.
    DEVICE void store(int stage, const held_entries_t& held) const {
        if constexpr (HOLDS_COPIES) {
            each_chunk([&](int row, int chunk, bool is_own, int n) {
                if (!is_own) return;
                Vec<uint32_t, 4> words;
#pragma unroll
                for (int i = 0; i < 4; ++i) words.data[i] = held[n][i];
                *static_cast<Vec<uint32_t, 4>*>(copy_at(stage, row, chunk)) = words;
            });
        }
    }
    // Converts the fp8 values that this lane has copied to elements of the tile.
    DEVICE void convert_codes() const {
        each_chunk([&](int row, int chunk, bool is_own, int) {
            if (!is_own) return;
            product_t* const to = at(0) + (first_row() + row) * PITCH + chunk * CHUNK;
            if constexpr (IS_DS_MLA) convert_scaled(to, row, chunk);
            else convert(to, code_at(row, chunk));
        });
    }

private:
    static DEVICE int lane() { return threadIdx.x % WARP_SIZE; }
    static DEVICE int first_row() { return int(threadIdx.x / WARP_SIZE) * ROWS; }
    // Calls f(row, chunk, is_own, n) for the n-th chunk of this lane, which belongs to row `row` of the warp's rows.
    // is_own is false if the lane has no n-th chunk. All lanes of the warp make the same number of calls.
    template <typename F>
    static DEVICE void each_chunk(F f) {
#pragma unroll
        for (int n = 0; n < COPIES; ++n) {
            const int i = lane() + n * WARP_SIZE;
            f(min(i / CHUNKS, ROWS - 1), i % CHUNKS, i < ROWS * CHUNKS, n);
        }
    }
    DEVICE unsigned char* code_at(int row, int chunk) const {
        return shared + STAGES * TILE_BYTES + ((first_row() + row) * CHUNKS + chunk) * 16;
    }
    DEVICE void* copy_at(int stage, int row, int chunk) const {
        if (IS_FP8) return code_at(row, chunk);
        return at(stage) + (first_row() + row) * PITCH + chunk * CHUNK;
    }

    // Converts a chunk of fp8 values.
    static DEVICE void convert(product_t* to, const unsigned char* from) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (IS_FP8 && is_same<product_t, half_t>) {
                const uint2 words = *reinterpret_cast<const uint2*>(from + half * 8);
                uint32_t low[2], high[2];
                fp8_to_half<cache_t>(words.x, low);
                fp8_to_half<cache_t>(words.y, high);
                *reinterpret_cast<uint4*>(to + half * 8) = uint4{low[0], low[1], high[0], high[1]};
            } else {
                float x[8];
                Vec<cache_t, 8>::load(reinterpret_cast<const cache_t*>(from) + half * 8).to_floats(x);
                *reinterpret_cast<uint4*>(to + half * 8) = Vec<product_t, 8>::from_floats(x).template word<8>(0);
            }
        }
    }
    // The same for an entry of "fp8_ds_mla": fp8 values times their scale, or unchanged elements of the rotated key,
    // which follows the scales in the cache.
    DEVICE void convert_scaled(product_t* to, int row, int chunk) const {
        constexpr int SCALES = SCALES_AT / 16, ROPE = ROPE_AT / 16;  // chunks
        const uint4 bytes = *reinterpret_cast<const uint4*>(code_at(row, chunk));
        if (chunk >= ROPE) {
            to += LATENT_SIZE - ROPE * CHUNK - (chunk - ROPE) * (CHUNK / 2);
            *reinterpret_cast<uint4*>(to) = bytes;
        } else if (chunk < SCALES) {
            const float* const scales = reinterpret_cast<const float*>(code_at(row, SCALES));
            uint4 elements[2];
            widen_scaled_fp8<product_t>(bytes, scales[chunk * CHUNK / SCALED_SIZE], elements);
            *reinterpret_cast<uint4*>(to) = elements[0];
            *reinterpret_cast<uint4*>(to + 8) = elements[1];
        }
    }
};
