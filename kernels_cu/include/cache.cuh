// cache.cuh: helpers of the KV cache kernels: conversion to and from the cache type, and copies of rows by all threads
// of a block.

#pragma once
#include "quant.cuh"
#include "vec.cuh"

// x converted to cache_t: unchanged if the types are equal, otherwise x / scale in fp8.
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

// Dequantizes: scalar_t(x * scale) for each element.
template <typename scalar_t, typename code_t, int N>
DEVICE Vec<scalar_t, N> decode(const Vec<code_t, N>& x, float scale) {
    float y[N];
    x.to_floats(y);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = ieee_multiply(y[i], scale);
    return Vec<scalar_t, N>::from_floats(y);
}

// BYTES adjacent bytes in registers, as words: a compiler would give each byte a register of its own.
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

// Stores and loads a float at an address that is a multiple of ACCESS bytes.
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

// Copies ROWS rows of ROW_PIECES pieces with all threads of a block; all of them call. A thread makes BATCH calls of
// load(row, piece), and then BATCH calls of store(row, piece, loaded).
//
// A thread without work loads the last piece again and stores nothing: a conditional load would be issued late, and so
// would the loads after it. `load` must therefore be safe for every row < ROWS and piece < ROW_PIECES, and should
// itself load unconditionally.
template <int NUM_THREADS, int ROWS, int ROW_PIECES, int BATCH, typename Load, typename Store>
DEVICE void each_piece(Load load, Store store) {
    constexpr uint32_t PIECES = ROWS * ROW_PIECES;
    const uint32_t thread = thread_of<NUM_THREADS>();
    // The compiler does not see that at / ROW_PIECES is 0 if there is one row.
    const auto row_of = [](uint32_t at) { return ROWS == 1 ? 0 : int(at / ROW_PIECES); };
    const auto piece_of = [](uint32_t at) { return ROWS == 1 ? int(at) : int(at % ROW_PIECES); };
    for (uint32_t first = 0; first < PIECES; first += BATCH * NUM_THREADS) {
        decltype(load(0, 0)) loaded[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const uint32_t at = min(first + i * NUM_THREADS + thread, PIECES - 1);
            loaded[i] = load(row_of(at), piece_of(at));
        }
        keep_loads_of_warp();
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const uint32_t at = first + i * NUM_THREADS + thread;
            if (at < PIECES) store(row_of(at), piece_of(at), loaded[i]);
        }
    }
}

// Fills rows first ... first + BATCH - 1 of `out`, as far as there are num_outputs rows, with rows of `from`: `sources`
// has their numbers, and a negative one means a row of zeros. The thread moves the vector at `column` of each row. Its
// loads are in flight together.
template <int VEC_SIZE, int BATCH, typename T, typename index_t>
DEVICE void gather_rows(T* out, const T* from, const index_t (&sources)[BATCH], int64_t first, int64_t num_outputs,
                        int64_t column, int64_t out_stride, int64_t from_stride) {
    Words<VEC_SIZE> words[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        words[i] = Words<VEC_SIZE>{};
        if (sources[i] >= 0) words[i] = load_words<VEC_SIZE>(from + sources[i] * from_stride + column);
    }
    keep_loads();
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        if (first + i < num_outputs) store_words<VEC_SIZE>(out + (first + i) * out_stride + column, words[i]);
    }
}
