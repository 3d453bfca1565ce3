// state_tiles.cuh: what kernels share that hold a state in the fragments of mma.cuh: a warp has matrix tiles of 16 rows
// of the state, and products whose rows are those of the state and whose columns are the tokens of a tile.

#pragma once
#include "async.cuh"
#include "mma.cuh"
#include "swizzle.cuh"

// Copies `count` rows of CHUNKS chunks of 8 elements to a tile of TOKENS rows, and zeros behind them. All NUM_THREADS
// threads call; a thread copies a chunk of several rows.
template <int CHUNKS, int TOKENS, int NUM_THREADS, typename T, typename Tile>
DEVICE void copy_tokens(const Tile& to, const T* from, int64_t stride, int count) {
    constexpr int STEP = NUM_THREADS / CHUNKS < TOKENS ? NUM_THREADS / CHUNKS : TOKENS;
    const int thread = thread_of<NUM_THREADS>(), first = thread / CHUNKS, chunk = thread % CHUNKS;
    from += first * stride + chunk * 8;
    const auto own = to.at(first, chunk);
#pragma unroll
    for (int origin = 0; origin < TOKENS; origin += STEP, from += STEP * stride) {
        const int row = origin + first;
        const auto at = STEP % 8 == 0 ? own + origin * Tile::PITCH * 8 : to.at(row, chunk);
        if (first < STEP && (TOKENS % STEP == 0 || row < TOKENS)) cp_async<16>(at, from, row < count);
    }
}

// The operand A of a product from the results of one: D of columns 0 to 7 and of columns 8 to 15.
template <typename T>
DEVICE void pack_operand(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
    a[0] = pack_pair<T>(low[0], low[1]);
    a[1] = pack_pair<T>(low[2], low[3]);
    a[2] = pack_pair<T>(high[0], high[1]);
    a[3] = pack_pair<T>(high[2], high[3]);
}

// The operand B of two products from 16 rows of a tile, from row `origin` on: its 16 columns of `step` are summed over.
template <typename Tile>
DEVICE void load_columns(uint32_t (&b)[4], const Tile& tile, int origin, int step) {
    const int lane = threadIdx.x % 32;
    ldmatrix<4>(b, tile.at(origin, lane / 16 * 8 + lane % 8, step, lane / 8 % 2));
}
// Likewise, but the 16 rows are summed over.
template <typename Tile>
DEVICE void load_rows(uint32_t (&b)[4], const Tile& tile, int origin, int step) {
    const int lane = threadIdx.x % 32;
    ldmatrix<4, true>(b, tile.at(origin, lane % 16, step, lane / 16));
}
// The operand A of a product, transposed: its rows are 16 columns of a tile, and its columns are 16 rows.
template <typename Tile>
DEVICE void load_transposed(uint32_t (&a)[4], const Tile& tile, int origin, int step) {
    const int lane = threadIdx.x % 32;
    ldmatrix<4, true>(a, tile.at(origin, lane / 16 * 8 + lane % 8, step, lane / 8 % 2));
}
// The operand A of a product: 16 rows of a tile.
template <typename Tile>
DEVICE void load_operand(uint32_t (&a)[4], const Tile& tile, int origin, int step) {
    const int lane = threadIdx.x % 32;
    ldmatrix<4>(a, tile.at(origin, lane % 16, step, lane / 16));
}

// d0, d1 += a * b for the two halves of b.
template <typename T>
DEVICE void multiply_add(float (&d0)[4], float (&d1)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    mma_m16n8k16<T>(d0, a, {b[0], b[1]});
    mma_m16n8k16<T>(d1, a, {b[2], b[3]});
}

// Stores a result of 16 rows by 8 tokens, transposed, to the tokens `token` ... and the chunks `chunk`, `chunk` + 1 of a
// tile in shared memory that has a row for each token; `token` is a multiple of 8.
template <typename T, typename Tile>
DEVICE void store_to_tile(const Tile& tile, int token, int chunk, const float (&d)[4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t word = transpose_8x8(pack_pair<T>(d[2 * half], d[2 * half + 1]));
        *reinterpret_cast<uint32_t*>(tile.at(token + g, chunk + half) + 2 * t) = word;
    }
}

// Stores a result of 16 rows by 8 tokens to `out`, the place of the first row of the first token; `count` tokens exist.
// A lane holds a row's neighbouring tokens and stores a token's neighbouring rows: four of them, after an exchange with
// the next lane.
template <typename T>
DEVICE void store_transposed(T* out, int64_t stride, const float (&d)[4], int count) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint32_t upper = transpose_8x8(pack_pair<T>(d[0], d[1])), lower = transpose_8x8(pack_pair<T>(d[2], d[3]));
    const bool odd = t % 2;
    const uint32_t received = shfl_xor(odd ? upper : lower, 1);
    Vec<T, 4> four;
    four.template word<4>(0) = odd ? uint2{received, lower} : uint2{upper, received};
    if (g < count) four.store(out + g * stride + (odd ? 8 + 2 * (t - 1) : 2 * t));
}
