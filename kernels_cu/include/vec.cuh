// vec.cuh: Vec<T, N>: N adjacent elements. A memory access moves ACCESS elements, by default all N.
//
// An access of A elements of type T needs an address that is a multiple of A * sizeof(T), and moves at most 16 bytes.

#pragma once
#include "memory.cuh"
#include "number.cuh"

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
    static_assert(sizeof(T) * N <= 16 && (N & (N - 1)) == 0);
    static constexpr int SIZE = N;
    T data[N];

    template <int ACCESS> using word_t = typename word_of<int(sizeof(T)) * ACCESS>::type;

    template <int ACCESS = N>
    static DEVICE Vec load(const T* address) {
        Vec result;
#pragma unroll
        for (int i = 0; i < N; i += ACCESS)
            result.word<ACCESS>(i) = *reinterpret_cast<const word_t<ACCESS>*>(address + i);
        return result;
    }
    // Loads data of global memory that is read once, with an evict-first hint.
    template <int ACCESS = N>
    static DEVICE Vec load_once(const T* address) {
        Vec result;
#pragma unroll
        for (int i = 0; i < N; i += ACCESS)
            result.word<ACCESS>(i) = load_streaming(reinterpret_cast<const word_t<ACCESS>*>(address + i));
        return result;
    }
    template <int ACCESS = N>
    DEVICE void store(T* address) const {
#pragma unroll
        for (int i = 0; i < N; i += ACCESS)
            store_streaming(reinterpret_cast<word_t<ACCESS>*>(address + i), word<ACCESS>(i));
    }
    // Stores to shared memory, where streaming stores are not allowed.
    DEVICE void store_shared(T* address) const { *reinterpret_cast<word_t<N>*>(address) = word<N>(0); }

    template <int ACCESS>
    DEVICE word_t<ACCESS>& word(int i) {
        return *reinterpret_cast<word_t<ACCESS>*>(data + i);
    }
    template <int ACCESS>
    DEVICE word_t<ACCESS> word(int i) const {
        return *reinterpret_cast<const word_t<ACCESS>*>(data + i);
    }

    DEVICE float operator[](int i) const { return to_float(data[i]); }
    DEVICE void to_floats(float (&x)[N]) const {
        if constexpr (N == 1) {
            x[0] = to_float(data[0]);
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2) load_pair<T>(data + i, x[i], x[i + 1]);
        }
    }

    static DEVICE Vec from_floats(const float (&x)[N]) {
        Vec result;
        if constexpr (N == 1) {
            result.data[0] = from_float<T>(x[0]);
        } else if constexpr (N == 2) {
            store_pair<T>(result.data, x[0], x[1]);
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 4) store_four<T>(result.data + i, x + i);
        }
        return result;
    }

    // Integers as int8, saturating.
    static DEVICE Vec from_integers(const int32_t (&x)[N]) {
        Vec result;
        if constexpr (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N; i += 4) store_four_integers(result.data + i, x + i);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) result.data[i] = saturated(x[i]);
        }
        return result;
    }

    // One element, followed by zeros.
    static DEVICE Vec single(T x) {
        Vec result = full(0.0f);
        result.data[0] = x;
        return result;
    }

    // N copies of one value, rounded to T.
    static DEVICE Vec full(float x) {
        Vec result;
#pragma unroll
        for (int i = 0; i < N; ++i) result.data[i] = from_float<T>(x);
        return result;
    }

    // Elements skip ... skip + N - 1 of the concatenation of `low` and `high`; 0 <= skip < N.
    static DEVICE Vec join(const Vec& low, const Vec& high, int skip) {
        constexpr int PACKED = 4 / sizeof(T);  // elements of a word
        constexpr int WORDS = N / PACKED;
        uint32_t words[2 * WORDS];
#pragma unroll
        for (int k = 0; k < WORDS; ++k) {
            words[k] = low.template word<PACKED>(k * PACKED);
            words[WORDS + k] = high.template word<PACKED>(k * PACKED);
        }
        // Whole words are skipped first, one bit of their count at a time; the rest, less than a word, is skipped by a
        // funnel shift.
#pragma unroll
        for (int step = WORDS / 2; step > 0; step /= 2) {
#pragma unroll
            for (int k = 0; k < 2 * WORDS - step; ++k) words[k] = skip & step * PACKED ? words[k + step] : words[k];
        }
        const int bits = skip % PACKED * 8 * int(sizeof(T));
        Vec result;
#pragma unroll
        for (int k = 0; k < WORDS; ++k) {
            result.template word<PACKED>(k * PACKED) = (uint64_t(words[k + 1]) << 32 | words[k]) >> bits;
        }
        return result;
    }

    // T(f(x)) of every element.
    template <typename F>
    friend DEVICE Vec map(const Vec& x, F f) {
        float y[N];
        x.to_floats(y);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = f(y[i]);
        return from_floats(y);
    }

    // T(a * b), element by element.
    friend DEVICE Vec operator*(const Vec& a, const Vec& b) {
        Vec result;
        if constexpr (N == 1) {
            result.data[0] = from_float<T>(ieee_multiply(a[0], b[0]));
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2) multiply_pair<T>(result.data + i, a.data + i, b.data + i);
        }
        return result;
    }

    // T(a + b), element by element.
    friend DEVICE Vec operator+(const Vec& a, const Vec& b) {
        Vec result;
        if constexpr (N == 1) {
            result.data[0] = from_float<T>(ieee_add(a[0], b[0]));
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2) add_pair<T>(result.data + i, a.data + i, b.data + i);
        }
        return result;
    }

    // T(a - b), element by element.
    friend DEVICE Vec operator-(const Vec& a, const Vec& b) {
        Vec result;
        if constexpr (N == 1) {
            result.data[0] = from_float<T>(ieee_subtract(a[0], b[0]));
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2) subtract_pair<T>(result.data + i, a.data + i, b.data + i);
        }
        return result;
    }

    // The largest magnitude of the elements. NaN is ignored; the result is 0 if all elements are NaN.
    DEVICE float absmax() const {
        if constexpr (N == 1) {
            return ieee_max(0.0f, ieee_abs(to_float(data[0])));
        } else {
            T pair[2] = {T(0.0f), T(0.0f)};
#pragma unroll
            for (int i = 0; i < N; i += 2) absmax_pair<false>(pair, data + i);
            return ieee_max(ieee_abs(to_float(pair[0])), ieee_abs(to_float(pair[1])));
        }
    }
};

// Loads N adjacent elements as floats, ACCESS elements in one memory access.
template <int ACCESS, typename T, int N>
DEVICE void load_floats(const T* address, float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += ACCESS) {
        float part[ACCESS];
        Vec<T, ACCESS>::load(address + i).to_floats(part);
#pragma unroll
        for (int j = 0; j < ACCESS; ++j) x[i + j] = part[j];
    }
}
