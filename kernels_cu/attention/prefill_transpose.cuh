// prefill_transpose.cuh: transposes tiles of e4m3 values for prefill_sm90_fp8: an 8-bit WGMMA takes B only K-major, so
// the keys of one element of the head must be contiguous. Reads the constants of the kernel that includes it.
//
// A tile is split into parts of 128, 64 and 32 keys, at most one of each, from the first key on. A row of 128 bytes has
// the keys of a part for 1, 2 or 4 elements, part_rows() apart. Within each 16 keys, word t holds keys 2t, 2t + 1,
// 2t + 8 and 2t + 9: the keys that thread 4g + t of a warp holds in its accumulators, and so in its A fragment of
// rounded probabilities.
//
// Thread mapping: a warp takes 32 tokens of 16 elements at a time. Four transposing ldmatrix of 8 tokens give lane 4g +
// t words with elements 2g and 2g + 1 of tokens 2t and 2t + 1. Two words of adjacent groups of 8 tokens make one word
// of each element. The first four rows of a store are even elements and the last four odd ones, or the other way round:
// the eight swizzled rows then lie in different banks.
#pragma once
#include "prefill_loader.cuh"

static_assert(TOKENS % 32 == 0 && TOKENS < 2 * ROW_BYTES);

// Keys of the part that has a key, the first key of the part, and its rows.
DEVICE constexpr int part_keys(int key) { return key < (TOKENS & 128) ? 128 : key < (TOKENS & 192) ? 64 : 32; }
DEVICE constexpr int part_begin(int key) { return TOKENS & ~(2 * part_keys(key) - 1); }
DEVICE constexpr int part_rows(int key) { return HEAD_SIZE * part_keys(key) / ROW_BYTES; }

// Byte offset in a tile at which an element has its values of `key`, a multiple of 32, and of the next 31.
DEVICE constexpr int place_of_values(int element, int key) {
    return part_begin(key) * HEAD_SIZE + element % part_rows(key) * ROW_BYTES +
           element / part_rows(key) * part_keys(key) + key - part_begin(key);
}

// WHOLE: some row sees every token of the tile. Otherwise values of tokens that no row sees become zeros.
template <bool WHOLE>
DEVICE void transpose_codes(uint8_t* to, const uint8_t* from, const Codes& kind) {
    constexpr int GROUPS = TOKENS / 32, CHUNKS = HEAD_SIZE / 16;  // groups of 32 tokens, chunks of 16 elements
    const int lane = threadIdx.x % WARP_SIZE, warp = shfl<WARP_SIZE>(int(threadIdx.x % 128 / WARP_SIZE), 0) - 1;
    const int matrix = lane / 8, row = lane % 8;  // each lane passes the address of one matrix row to ldmatrix
    const int element = 2 * row + ((row >= 4) != (matrix % 2));
    const uint32_t first = lane < WARP_SIZE / 2 ? 0x6420 : 0x7531, second = first ^ (0x6420 ^ 0x7531);
    const int read_at = matrix * ValueTile::TOKEN_STRIDE + swizzle_128b(row, 0),
              write_at = swizzle_128b(element, matrix / 2 * 16);
#pragma unroll WHOLE ? 4 : 1
    for (int i = 0; i < ceil_div(CHUNKS, WIDENERS); ++i) {
        const int chunk = i * WIDENERS + warp;
        if (CHUNKS % WIDENERS != 0 && chunk >= CHUNKS) break;
        const uint8_t* const read = from + chunk / 8 * PANEL_STRIDE + (read_at ^ chunk % 8 * 16);
        uint32_t words[GROUPS][4];
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) ldmatrix<4, true>(words[n], read + n * 4 * ValueTile::TOKEN_STRIDE);
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
            if constexpr (!WHOLE) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int token = n * 32 + 8 * j + lane % 4 * 2;
                    if (token < kind.begin || token >= kind.end) words[n][j] &= 0xffff0000u;
                    if (token + 1 < kind.begin || token + 1 >= kind.end) words[n][j] &= 0x0000ffffu;
                }
            }
            uint32_t keys[4];
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                keys[j] = byte_perm(words[n][j], words[n][j + 1], first);
                keys[j + 1] = byte_perm(words[n][j], words[n][j + 1], second);
            }
            const int part_chunks = part_rows(n * 32) / 16, begin = part_begin(n * 32);
            uint8_t* const part = to + begin * HEAD_SIZE + chunk % part_chunks * (16 * ROW_BYTES);
            stmatrix<4>(part + (write_at ^ (chunk / part_chunks * part_keys(n * 32) + n * 32 - begin)), keys);
        }
    }
}

DEVICE void transpose_tile(Tiles& tiles, const Codes kind) {
    tiles.value.acquire();
    const uint8_t* const from = tiles.codes + tiles.code.stage * CODE_BYTES;
    uint8_t* const to = tiles.values + tiles.value.stage * ValueTile::BYTES;
    if (kind.begin <= 0 && kind.end >= TOKENS) transpose_codes<true>(to, from, kind);
    else transpose_codes<false>(to, from, kind);
    fence_proxy_async();
    sync_warp();
    if (threadIdx.x % WARP_SIZE == 0) mbarrier_arrive(tiles.value.full());
    tiles.code.release(tiles.code.stage);
    tiles.value.advance();
}

// Transposes all value tiles that the producer loads.
DEVICE void transpose_tiles(Tiles& tiles) {
    for (;; tiles.code.advance()) {
        tiles.code.wait();
        if (tiles.kinds[tiles.code.stage].kind == Codes::END) return;
        transpose_tile(tiles, tiles.kinds[tiles.code.stage]);
    }
}
