// tile.cuh: CUDA Tile C++. A kernel is a sequence of operations on tiles for a block as a whole. The compiler maps tiles to
// threads, shared memory and tensor memory, their loads to TMA, and products to the tensor cores of the architecture:
// tcgen05 on sm_100, mma.sync on sm_120. The host backend has the same operations as loops over arrays.
//
//     View<T, M, N>{data, rows, columns, row_stride}    a matrix in memory, in tiles of M x N
//     view.load(i, j)          tile (i, j); elements outside the matrix are 0
//     view.store(i, j, x)      stores the elements of x that are inside the matrix
//     multiply_nt(a, b, c)     c + a b^T; operands of 8 or 16 bits, c of float or int32_t
//     transpose(x), cast<T>(x), exp_of(x), spread<M, N>(x): a row or a column repeated; x + y, x - y, x * y, x / y
//
// M and N are powers of two. TMA loads and stores a view if its address, row stride and columns are multiples of 16 bytes.
// The kernel says so by assume_aligned and assume_multiple, and its plan has checked it.
#pragma once

#if PYOPS_HOST
#define __tile_global__
#define TILE_FUNCTION inline

template <typename T, int M, int N>
struct Tile {
    T at[M][N];

    // A tile of f(i, j).
    template <typename F>
    static Tile of(F f) {
        Tile made;
        for (int i = 0; i < M; ++i) {
            for (int j = 0; j < N; ++j) made.at[i][j] = f(i, j);
        }
        return made;
    }
    Tile operator+(const Tile& y) const {
        return of([&](int i, int j) { return at[i][j] + y.at[i][j]; });
    }
    Tile operator-(const Tile& y) const {
        return of([&](int i, int j) { return at[i][j] - y.at[i][j]; });
    }
    Tile operator*(const Tile& y) const {
        return of([&](int i, int j) { return at[i][j] * y.at[i][j]; });
    }
    Tile operator/(const Tile& y) const {
        return of([&](int i, int j) { return at[i][j] / y.at[i][j]; });
    }
};

template <typename T> struct element_of { using type = T; };
template <typename T> struct element_of<const T> { using type = T; };

inline auto block_index() { return blockIdx; }
template <int N, typename T> T assume_multiple(T x) { return x; }
template <typename T> T* assume_aligned(T* x) { return x; }
template <typename T, int M, int N> Tile<T, M, N> full_tile(T x) {
    return Tile<T, M, N>::of([&](int, int) { return x; });
}
template <typename T> T converted(float x) { return from_float<T>(x); }
template <> float converted<float>(float x) { return x; }
template <> int32_t converted<int32_t>(float x) { return int32_t(x); }
template <typename T, typename S, int M, int N> Tile<T, M, N> cast(const Tile<S, M, N>& x) {
    return Tile<T, M, N>::of([&](int i, int j) { return converted<T>(to_float(x.at[i][j])); });
}
template <int M, int N, typename T, int M_, int N_> Tile<T, M, N> spread(const Tile<T, M_, N_>& x) {
    static_assert((M_ == M || M_ == 1) && (N_ == N || N_ == 1));
    return Tile<T, M, N>::of([&](int i, int j) { return x.at[i % M_][j % N_]; });
}
template <int M, int N> Tile<float, M, N> exp_of(const Tile<float, M, N>& x) {
    return Tile<float, M, N>::of([&](int i, int j) { return expf(x.at[i][j]); });
}
template <typename T, int M, int N> Tile<T, N, M> transpose(const Tile<T, M, N>& x) {
    return Tile<T, N, M>::of([&](int i, int j) { return x.at[j][i]; });
}
template <typename T, typename C, int M, int N, int K>
Tile<C, M, N> multiply_nt(const Tile<T, M, K>& a, const Tile<T, N, K>& b, const Tile<C, M, N>& c) {
    return Tile<C, M, N>::of([&](int i, int j) {
        C sum = c.at[i][j];
        for (int k = 0; k < K; ++k) sum += C(to_float(a.at[i][k])) * C(to_float(b.at[j][k]));
        return sum;
    });
}
#else
#include <cuda_tile.h>
#define TILE_FUNCTION __tile__ inline

namespace ct = ::cuda::tiles;
template <typename T, int M, int N> using Tile = ct::tile<T, ct::shape<M, N> >;

TILE_FUNCTION uint3 block_index() { return ct::bid(); }
template <int N, typename T> TILE_FUNCTION T assume_multiple(T x) {
    return ct::assume_divisible(x, ct::integral_constant<N>{});
}
template <typename T> TILE_FUNCTION T* assume_aligned(T* x) {
    return ct::assume_aligned(x, ct::integral_constant<16>{});
}
template <typename T, int M, int N> TILE_FUNCTION auto full_tile(T x) { return ct::full<Tile<T, M, N> >(x); }
template <typename T, typename X> TILE_FUNCTION auto cast(X x) { return ct::element_cast<T>(x); }
template <int M, int N, typename X> TILE_FUNCTION auto spread(X x) { return ct::broadcast(x, ct::shape<M, N>{}); }
template <typename X> TILE_FUNCTION auto exp_of(X x) { return ct::exp(x); }
template <typename X> TILE_FUNCTION auto transpose(X x) { return ct::transpose(x); }
template <typename A, typename B, typename C> TILE_FUNCTION C multiply_nt(A a, B b, C c) {
    return ct::mma(a, ct::transpose(b), c);
}
#endif

// STEP: elements from one element of a row to the next; 0: `step`, which TMA cannot load.
template <typename T, int M, int N, int STEP = 1>
struct View {
    T* data;
    uint32_t rows, columns;
    int64_t row_stride, step = STEP;

#if PYOPS_HOST
    auto load(uint32_t i, uint32_t j) const {
        using element_t = typename element_of<T>::type;
        return Tile<element_t, M, N>::of([&](int r, int c) {
            const uint64_t row = uint64_t(i) * M + r, column = uint64_t(j) * N + c;
            return row < rows && column < columns ? data[row * row_stride + column * step] : element_t();
        });
    }
    template <typename X> void store(uint32_t i, uint32_t j, const X& x) const {
        for (int r = 0; r < M; ++r) {
            for (int c = 0; c < N; ++c) {
                const uint64_t row = uint64_t(i) * M + r, column = uint64_t(j) * N + c;
                if (row < rows && column < columns) data[row * row_stride + column * step] = x.at[r][c];
            }
        }
    }
#else
    TILE_FUNCTION auto load(uint32_t i, uint32_t j) const { return partition().load_masked(i, j); }
    template <typename X> TILE_FUNCTION void store(uint32_t i, uint32_t j, X x) const {
        partition().store_masked(x, i, j);
    }

private:
    TILE_FUNCTION auto partition() const {
        if constexpr (STEP == 0) return partitioned(ct::extents{row_stride, step});
        else return partitioned(ct::extents{row_stride, ct::integral_constant<STEP>{}});
    }
    template <typename Strides> TILE_FUNCTION auto partitioned(Strides strides) const {
        const ct::extents<uint32_t, ct::dynamic_extent, ct::dynamic_extent> extents{rows, columns};
        const ct::tensor_span span{data, ct::layout_strided_mapping{extents, strides}};
        return ct::partition_view{span, ct::shape<M, N>{}};
    }
#endif
};
