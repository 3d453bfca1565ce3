// cache.cuh: what the cache kernels share: how an element is kept, and rows moved piece by piece.
#pragma once
#include "quant.cuh"
#include "vec.cuh"

// What a cache of cache_t keeps of x: x itself, or the codes of x / scale.
template <typename cache_t, typename scalar_t, int N>
DEVICE Vec<cache_t, N> encode(const Vec<scalar_t, N>& x, const Quotient& over_scale) {
    if constexpr (is_same<cache_t, scalar_t>) {
        return x;
    } else {
        float y[N];
        x.to_floats(y);
        over_scale.of_each(y, x.absmax());
        return Vec<cache_t, N>::from_floats(y);
    }
}

// T(code * scale).
template <typename scalar_t, typename code_t, int N>
DEVICE Vec<scalar_t, N> decode(const Vec<code_t, N>& x, float scale) {
    float y[N];
    x.to_floats(y);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = ieee_multiply(y[i], scale);
    return Vec<scalar_t, N>::from_floats(y);
}

// BYTES neighbouring bytes on their way from one place to another, in whole words: a compiler keeps bytes apart.
template <int BYTES>
using Words = Vec<typename word_of<(BYTES < 4 ? BYTES : 4)>::type, (BYTES < 4 ? 1 : BYTES / 4)>;

template <int BYTES, typename T>
DEVICE Words<BYTES> load_words(const T* address) {
    return Words<BYTES>::load(reinterpret_cast<const typename word_of<(BYTES < 4 ? BYTES : 4)>::type*>(address));
}
template <int BYTES, typename T>
DEVICE void store_words(T* address, const Words<BYTES>& words) {
    words.store(reinterpret_cast<typename word_of<(BYTES < 4 ? BYTES : 4)>::type*>(address));
}

// Four bytes of a float, at an address that is a multiple of ACCESS.
template <int ACCESS>
DEVICE void store_float(uint8_t* address, float x) {
    Vec<uint8_t, 4> bytes;
    bytes.word<4>(0) = __float_as_uint(x);
    bytes.store<ACCESS>(address);
}
template <int ACCESS>
DEVICE float load_float(const uint8_t* address) {
    return __uint_as_float(Vec<uint8_t, 4>::template load<ACCESS>(address).template word<4>(0));
}

// The pieces of ROWS rows of ROW_PIECES each, shared by the threads of a block, all of which call: BATCH calls of
// load(row, piece), then as many of store(row, piece, what load gave). A load under a condition waits for what it depends on,
// and those behind it as well: a thread that is left without a piece loads the last one, and so should `load` read something
// that exists, whatever comes of it.
template <int NUM_THREADS, int ROWS, int ROW_PIECES, int BATCH, typename Load, typename Store>
DEVICE void each_piece(Load load, Store store) {
    constexpr uint32_t PIECES = ROWS * ROW_PIECES;
    const uint32_t thread = thread_of<NUM_THREADS>();
    // (The compiler does not see that of one row no piece is in the next.)
    const auto row_of = [](uint32_t at) { return ROWS == 1 ? 0 : int(at / ROW_PIECES); };
    const auto piece_of = [](uint32_t at) { return ROWS == 1 ? int(at) : int(at % ROW_PIECES); };
    for (uint32_t first = 0; first < PIECES; first += BATCH * NUM_THREADS) {
        decltype(load(0, 0)) held[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const uint32_t at = min(first + i * NUM_THREADS + thread, PIECES - 1);
            held[i] = load(row_of(at), piece_of(at));
        }
        keep_loads_of_warp();
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const uint32_t at = first + i * NUM_THREADS + thread;
            if (at < PIECES) store(row_of(at), piece_of(at), held[i]);
        }
    }
}
