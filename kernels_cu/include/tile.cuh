// tile.cuh: CUDA Tile C++. A kernel is a sequence of operations on tiles for a block as a whole. The compiler maps
// tiles to threads, shared memory and tensor memory, their loads to TMA, and products to the tensor cores of the
// architecture: tcgen05 on sm_100, mma.sync on sm_120. The host backend has the same operations as loops over arrays.
//
//     View<T, M, N>{data, rows, columns, row_stride}    a matrix in memory, in tiles of M x N
//     view.load(i, j)          tile (i, j); elements outside the matrix are 0
//     view.load_from(row, j)   the tile of column tile j that begins in this row
//     view.gather(rows, j)     of column tile j the rows with the numbers in a column tile of uint32_t
//     view.store(i, j, x)      stores the elements of x that are inside the matrix
//     view.scatter(rows, j, x) stores the rows of x to the rows with these numbers
//     multiply_nt(a, b, c)     c + a b^T; operands of 8 or 16 bits, c of float or int32_t
//     multiply_nn(a, b, c)     c + a b
//     multiply_scaled_nt<quant_t, scale_t>(a, a_scales, a_part, b, b_scales, b_part, c)
//                              c + a b^T with block scales. Bytes hold the quants, e4m3 or two of e2m1. The scales are
//                              a row of tiles of 128 rows and 4 scales (quantize/fp4.cuh); an operand of M rows has
//                              those from row part * M on
//     transpose(x), cast<T>(x), spread<M, N>(x): a row or a column repeated; row_numbers<M>(): 0 to M - 1, a column
//     x + y, x - y, x * y, x / y, exp_of(x), exp2_of(x), log2_of(x), tanh_of(x)
//     max_of(x, y), min_of(x, y): NaN where x is NaN; larger_of(x, y), max_of_rows(x): NaN is ignored; sum_of_rows(x)
//     x < y, x <= y, x >= y: tiles of bool; x & y; select_of(condition, x, y)
//
// M and N are powers of two. TMA loads and stores a view if its address, row stride and columns are multiples of 16
// bytes. The kernel says so by assume_aligned and assume_multiple, and its plan has checked it.
#pragma once

#if PYOPS_HOST
#include "mx_scales.cuh"
#include "packed.cuh"

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
    Tile<bool, M, N> operator<(const Tile& y) const {
        return Tile<bool, M, N>::of([&](int i, int j) { return at[i][j] < y.at[i][j]; });
    }
    Tile<bool, M, N> operator>(const Tile& y) const { return y < *this; }
    Tile<bool, M, N> operator<=(const Tile& y) const {
        return Tile<bool, M, N>::of([&](int i, int j) { return at[i][j] <= y.at[i][j]; });
    }
    Tile<bool, M, N> operator>=(const Tile& y) const { return y <= *this; }
};

template <int M, int N> Tile<bool, M, N> operator&(const Tile<bool, M, N>& x, const Tile<bool, M, N>& y) {
    return Tile<bool, M, N>::of([&](int i, int j) { return x.at[i][j] && y.at[i][j]; });
}

// Quants and scales of block formats: e2m1 values, the first in the lower half of a byte, and powers of two.
struct e2m1_t { uint8_t code; };
struct e8m0_t { uint8_t code; };
inline float to_float(e2m1_t x) { return e2m1_to_float(x.code); }
inline float to_float(e8m0_t x) { return e8m0_to_float(x.code); }

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
template <typename T, typename S, int M, int N> Tile<T, M, N> cast(const Tile<S, M, N>& x) {
    return Tile<T, M, N>::of([&](int i, int j) {
        if constexpr (is_same<S, int32_t> || is_same<S, int64_t>) return T(x.at[i][j]);
        else return converted<T>(to_float(x.at[i][j]));
    });
}
template <int M> Tile<int32_t, M, 1> row_numbers() {
    return Tile<int32_t, M, 1>::of([](int i, int) { return i; });
}
template <typename T, int M, int N>
Tile<T, M, N> select_of(const Tile<bool, M, N>& condition, const Tile<T, M, N>& x, const Tile<T, M, N>& y) {
    return Tile<T, M, N>::of([&](int i, int j) { return condition.at[i][j] ? x.at[i][j] : y.at[i][j]; });
}
template <int M, int N, typename T, int M_, int N_> Tile<T, M, N> spread(const Tile<T, M_, N_>& x) {
    static_assert((M_ == M || M_ == 1) && (N_ == N || N_ == 1));
    return Tile<T, M, N>::of([&](int i, int j) { return x.at[i % M_][j % N_]; });
}
template <int M, int N> Tile<float, M, N> exp_of(const Tile<float, M, N>& x) {
    return Tile<float, M, N>::of([&](int i, int j) { return expf(x.at[i][j]); });
}
template <int M, int N> Tile<float, M, N> exp2_of(const Tile<float, M, N>& x) {
    return Tile<float, M, N>::of([&](int i, int j) { return exp2f(x.at[i][j]); });
}
template <int M, int N> Tile<float, M, N> log2_of(const Tile<float, M, N>& x) {
    return Tile<float, M, N>::of([&](int i, int j) { return log2f(x.at[i][j]); });
}
template <int M, int N> Tile<float, M, N> tanh_of(const Tile<float, M, N>& x) {
    return Tile<float, M, N>::of([&](int i, int j) { return tanhf(x.at[i][j]); });
}
template <int M, int N> Tile<float, M, N> larger_of(const Tile<float, M, N>& x, const Tile<float, M, N>& y) {
    return Tile<float, M, N>::of([&](int i, int j) { return fmaxf(x.at[i][j], y.at[i][j]); });
}
template <int M, int N> Tile<float, M, 1> max_of_rows(const Tile<float, M, N>& x) {
    return Tile<float, M, 1>::of([&](int i, int) {
        float found = x.at[i][0];
        for (int j = 1; j < N; ++j) found = fmaxf(found, x.at[i][j]);
        return found;
    });
}
template <int M, int N> Tile<float, M, 1> sum_of_rows(const Tile<float, M, N>& x) {
    return Tile<float, M, 1>::of([&](int i, int) {
        float sum = 0.0f;
        for (int j = 0; j < N; ++j) sum += x.at[i][j];
        return sum;
    });
}
template <int M, int N> Tile<float, M, N> max_of(const Tile<float, M, N>& x, const Tile<float, M, N>& y) {
    return Tile<float, M, N>::of([&](int i, int j) { return x.at[i][j] < y.at[i][j] ? y.at[i][j] : x.at[i][j]; });
}
template <int M, int N> Tile<float, M, N> min_of(const Tile<float, M, N>& x, const Tile<float, M, N>& y) {
    return Tile<float, M, N>::of([&](int i, int j) { return x.at[i][j] > y.at[i][j] ? y.at[i][j] : x.at[i][j]; });
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
template <typename T, int M, int N, int K>
Tile<float, M, N> multiply_nn(const Tile<T, M, K>& a, const Tile<T, K, N>& b, const Tile<float, M, N>& c) {
    return multiply_nt(a, transpose(b), c);
}
// Elements of a byte, and element i of bytes: quants or scales.
template <typename T> constexpr int packed = 1;
template <> constexpr int packed<e2m1_t> = 2;
template <typename T> T packed_element(const uint8_t* bytes, int i) { return reinterpret_cast<const T&>(bytes[i]); }
template <> e2m1_t packed_element<e2m1_t>(const uint8_t* bytes, int i) {
    return {uint8_t(bytes[i / 2] >> i % 2 * 4 & 15)};
}
template <typename quant_t, typename scale_t, int M, int K, int S>
auto scaled(const Tile<uint8_t, M, K>& quants, const Tile<uint8_t, 1, S>& scales, uint32_t part) {
    constexpr int SIZE = packed<quant_t> * K, SCALES = S / 128;
    return Tile<float, M, SIZE>::of([&](int i, int k) {
        const int c = k / (SIZE / SCALES), row = part * M + i;
        const float scale =
            to_float(packed_element<scale_t>(scales.at[0], c / 4 * 512 + row % 32 * 16 + row / 32 * 4 + c % 4));
        return to_float(packed_element<quant_t>(quants.at[i], k)) * scale;
    });
}
template <typename quant_t, typename scale_t, typename A, typename AS, typename B, typename BS, typename C>
C multiply_scaled_nt(const A& a, const AS& a_scales, uint32_t a_part, const B& b, const BS& b_scales, uint32_t b_part,
                     const C& c) {
    return multiply_nt(scaled<quant_t, scale_t>(a, a_scales, a_part), scaled<quant_t, scale_t>(b, b_scales, b_part), c);
}
#else
#include <cuda_fp4.h>
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
template <typename X> TILE_FUNCTION auto max_of(X x, X y) { return ct::max(x, y, ct::propagate_nan_t{}); }
template <typename X> TILE_FUNCTION auto min_of(X x, X y) { return ct::min(x, y, ct::propagate_nan_t{}); }
template <typename X> TILE_FUNCTION auto transpose(X x) { return ct::transpose(x); }
template <typename A, typename B, typename C> TILE_FUNCTION C multiply_nt(A a, B b, C c) {
    return ct::mma(a, ct::transpose(b), c);
}

template <typename A, typename B, typename C> TILE_FUNCTION C multiply_nn(A a, B b, C c) { return ct::mma(a, b, c); }
template <int M> TILE_FUNCTION auto row_numbers() {
    return ct::reshape(ct::iota<ct::tile<int32_t, ct::shape<M> > >(), ct::shape<M, 1>{});
}
template <typename C, typename X> TILE_FUNCTION X select_of(C condition, X x, X y) {
    return ct::select(condition, x, y);
}
template <typename X> TILE_FUNCTION auto exp2_of(X x) { return ct::exp2(x); }
template <typename X> TILE_FUNCTION auto log2_of(X x) { return ct::log2(x); }
template <typename X> TILE_FUNCTION auto tanh_of(X x) { return ct::tanh(x); }
template <typename X> TILE_FUNCTION auto larger_of(X x, X y) { return ct::max(x, y); }
template <typename X> TILE_FUNCTION auto max_of_rows(X x) { return ct::reduce_max<1>(x); }
template <typename X> TILE_FUNCTION auto sum_of_rows(X x) { return ct::sum<1>(x); }

using e2m1_t = __nv_fp4_e2m1;
using e8m0_t = __nv_fp8_e8m0;
// The scales of M rows, from the bytes of tiles: the order in which tensor memory holds them.
template <typename scale_t, int M, typename X> TILE_FUNCTION auto scales_of(X bytes, uint32_t part) {
    constexpr int S = X::shape_type::static_extent(1) / 128;
    const auto tiles = ct::reshape(bytes, ct::shape<S / 4, 32, 4, 4>{});
    const auto rows = ct::reshape(ct::permute<ct::dimension_map<2, 1, 0, 3> >(tiles), ct::shape<128, S>{});
    if constexpr (M == 128) return ct::element_bitcast<scale_t>(rows);
    else return ct::element_bitcast<scale_t>(ct::extract(rows, ct::shape<M, S>{}, part, 0));
}
// The quants of b are unpacked after the transposition: the other way round they would move through registers.
template <typename quant_t, typename scale_t, typename A, typename AS, typename B, typename BS, typename C>
TILE_FUNCTION C multiply_scaled_nt(A a, AS a_scales, uint32_t a_part, B b, BS b_scales, uint32_t b_part, C c) {
    const auto x_scales = scales_of<scale_t, A::shape_type::static_extent(0)>(a_scales, a_part);
    const auto y_scales = scales_of<scale_t, B::shape_type::static_extent(0)>(b_scales, b_part);
    const auto x = ct::repack<quant_t, 1>(a);
    return ct::scaled_mma(x, x_scales, ct::repack<quant_t, 0>(ct::transpose(b)), ct::transpose(y_scales), c);
}
#endif

// STEP: elements from one element of a row to the next; 0: `step`, which TMA cannot load.
template <typename T, int M, int N, int STEP = 1>
struct View {
    T* data;
    uint32_t rows, columns;
    int64_t row_stride, step = STEP;

#if PYOPS_HOST
    using element_t = typename element_of<T>::type;
    using rows_t = Tile<uint32_t, M, 1>;

    auto load(uint32_t i, uint32_t j) const { return load_from(uint64_t(i) * M, j); }
    auto load_from(uint64_t first, uint32_t j) const {
        return Tile<element_t, M, N>::of([&](int r, int c) { return element(first + r, uint64_t(j) * N + c); });
    }
    auto gather(const rows_t& numbers, uint32_t j) const {
        return Tile<element_t, M, N>::of([&](int r, int c) { return element(numbers.at[r][0], uint64_t(j) * N + c); });
    }
    template <typename X> void store(uint32_t i, uint32_t j, const X& x) const {
        for (int r = 0; r < M; ++r) store_row(uint64_t(i) * M + r, j, x.at[r]);
    }
    template <typename X> void scatter(const rows_t& numbers, uint32_t j, const X& x) const {
        for (int r = 0; r < M; ++r) store_row(numbers.at[r][0], j, x.at[r]);
    }

private:
    element_t element(uint64_t row, uint64_t column) const {
        return row < rows && column < columns ? data[row * row_stride + column * step] : element_t();
    }
    void store_row(uint64_t row, uint32_t j, const element_t (&x)[N]) const {
        if (row >= rows) return;
        for (uint64_t c = 0, column = uint64_t(j) * N; c < N && column + c < columns; ++c) {
            data[row * row_stride + (column + c) * step] = x[c];
        }
    }
#else
    TILE_FUNCTION auto load(uint32_t i, uint32_t j) const { return partition().load_masked(i, j); }
    TILE_FUNCTION auto load_from(uint32_t row, uint32_t j) const {
        return ct::strided_view{span(), ct::shape<M, N>{}, ct::strides<uint32_t, 1, N>{}}.load_masked(row, j);
    }
    template <typename Rows> TILE_FUNCTION auto gather(Rows numbers, uint32_t j) const {
        return by_number().load_masked(ct::reshape(numbers, ct::shape<M>{}), j * N);
    }
    template <typename Rows, typename X> TILE_FUNCTION void scatter(Rows numbers, uint32_t j, X x) const {
        by_number().store_masked(x, ct::reshape(numbers, ct::shape<M>{}), j * N);
    }
    template <typename X> TILE_FUNCTION void store(uint32_t i, uint32_t j, X x) const {
        partition().store_masked(x, i, j);
    }

private:
    TILE_FUNCTION auto by_number() const {
        return ct::gather_scatter_view{span(), ct::shape<M, N>{}, ct::integral_constant<0>{}};
    }
    TILE_FUNCTION auto partition() const { return ct::partition_view{span(), ct::shape<M, N>{}}; }
    TILE_FUNCTION auto span() const {
        if constexpr (STEP == 0) return span_of(ct::extents{row_stride, step});
        else return span_of(ct::extents{row_stride, ct::integral_constant<STEP>{}});
    }
    template <typename Strides> TILE_FUNCTION auto span_of(Strides strides) const {
        const ct::extents<uint32_t, ct::dynamic_extent, ct::dynamic_extent> extents{rows, columns};
        return ct::tensor_span{data, ct::layout_strided_mapping{extents, strides}};
    }
#endif
};
