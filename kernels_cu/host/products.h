// products.h: the wgmmas of a warpgroup that are in flight, and their arithmetic.
#pragma once
#include "operand.h"

namespace host {

constexpr unsigned MAX_PRODUCTS = 256;  // wgmmas in flight per warpgroup; a power of two
constexpr unsigned MAX_CHAINS = 8;
constexpr unsigned ALL_WARPS = 15;

// Consecutive wgmmas into the same accumulators.
struct Chain {
    bool used, integers;
    unsigned columns;
    unsigned warps;     // a bit for each warp that has not got its results back
    unsigned group[4];  // per warp: the group of its last wgmma so far
    void* d[WARPGROUP];
    float sums[64][256];  // accumulators: float32, or the bits of int32
};
struct IssuedProduct {
    Product product;
    unsigned warps;  // a bit for each warp that has issued the wgmma
    unsigned chain, group;
    const void* pc;
    uint32_t fragments[WARPGROUP][4];
};
struct TensorCores {
    bool used;  // the running block has used the tensor cores
    unsigned agent, num_computed;
    Chain chains[MAX_CHAINS];
    IssuedProduct products[MAX_PRODUCTS];
};
inline TensorCores tensor_cores[MAX_CLUSTER][MAX_THREADS / WARPGROUP];

inline void wgmma_begin_block(unsigned rank) {
    for (unsigned i = 0; i < num_threads() / WARPGROUP; ++i) {
        TensorCores& cores = tensor_cores[rank][i];
        if (!cores.used) continue;
        cores.used = false;
        cores.num_computed = 0;
        for (Chain& chain : cores.chains) chain.used = false;
        for (IssuedProduct& issued : cores.products) issued.warps = 0;
    }
}

inline TensorCores& cores_of(const Thread& thread) { return tensor_cores[state.rank][thread.number / WARPGROUP]; }

// Calls f(i, row, column) for each register d[i] of a thread of the warpgroup.
template <typename F>
inline void each_sum(unsigned thread, unsigned columns, F f) {
    const unsigned g = thread % 32 / 4, t = thread % 4;
    for (unsigned i = 0; i < columns / 2; ++i) {
        f(i, thread / 32 * 16 + g + i / 2 % 2 * 8, i / 4 * 8 + t * 2 + i % 2);
    }
}

inline void read_fragments(float (&a)[64][32], const IssuedProduct& issued) {
    const Element element = issued.product.element;
    const unsigned per_word = 4 / bytes_of(element);
    for (unsigned thread = 0; thread < WARPGROUP; ++thread) {
        for (unsigned i = 0; i < 4; ++i) {
            const char* word = reinterpret_cast<const char*>(&issued.fragments[thread][i]);
            const unsigned row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
            const unsigned k = (thread % 4 + i / 2 * 4) * per_word;
            for (unsigned j = 0; j < per_word; ++j) a[row][k + j] = decode(word + j * bytes_of(element), element);
        }
    }
}

// Adds fp8 products of a row of A to a row of accumulators, bit for bit as an H200 does. The terms are the products of
// two elements and the old accumulator. The largest exponent of the terms, e, is found first; for a product it is the
// sum of the elements' exponents, and a subnormal element has the exponent of the smallest normal number. Each term is
// truncated to a multiple of 2^(e - 13). The truncated terms are added exactly, and the first 14 bits of the result are
// kept.
constexpr int FP8_BITS = 13;

inline int exponent_of(float value) { return int(bits_as<uint32_t>(value) >> 23 & 255) - 127; }
inline double power_of_two(int exponent) { return bits_as<double>(uint64_t(exponent + 1023) << 52); }

inline int larger(int a, int b) { return a > b ? a : b; }
inline double whole(double value) { return double(int32_t(value)); }

// Columns that are summed at a time, in vectors of the compilers. It divides the columns of every wgmma.
constexpr unsigned LANES = 4;
using Floats = float __attribute__((vector_size(4 * LANES)));
using Doubles = double __attribute__((vector_size(8 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));

template <typename Vector, typename T>
inline Vector load(const T* from) {
    Vector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

struct Operands {
    float a[64][32], b[32][256];  // b by k, then by column
    // fp8: exponents, and the elements with zeros for infinity and NaN.
    int32_t powers_of_a[64][32], powers_of_b[32][256];
    float finite_a[64][32], finite_b[32][256];
    bool finite_rows[64], finite_columns[256];
};

inline void find_powers(int32_t* powers, float* finite, const float* values, unsigned count, Element element) {
    const int least = element == Element::E4M3 ? -6 : -14;
    for (unsigned i = 0; i < count; ++i) {
        powers[i] = values[i] == 0 ? exponent_of(0) : larger(exponent_of(values[i]), least);
        finite[i] = __builtin_isfinite(values[i]) ? values[i] : 0.0f;
    }
}

inline void find_powers(Operands& of, unsigned columns, Element element) {
    find_powers(of.powers_of_a[0], of.finite_a[0], of.a[0], 64 * 32, element);
    for (unsigned row = 0; row < 64; ++row) of.finite_rows[row] = memcmp(of.a[row], of.finite_a[row], 32 * 4) == 0;
    memset(of.finite_columns, true, sizeof of.finite_columns);
    for (unsigned k = 0; k < 32; ++k) {
        find_powers(of.powers_of_b[k], of.finite_b[k], of.b[k], columns, element);
        for (unsigned j = 0; j < columns; ++j) of.finite_columns[j] &= bool(__builtin_isfinite(of.b[k][j]));
    }
}

// Adds the products of a row of A with LANES columns to `exact`: products and results are exact in double.
inline Doubles add_products(Doubles exact, const Operands& of, unsigned row, unsigned first, unsigned depth) {
    for (unsigned k = 0; k < depth; ++k) {
        exact += double(of.a[row][k]) * __builtin_convertvector(load<Floats>(of.b[k] + first), Doubles);
    }
    return exact;
}

inline void add_fp8(float* sums, bool accumulate, const Operands& of, unsigned row, unsigned first) {
    const Floats before = accumulate ? load<Floats>(sums) : Floats{};
    Ints largest, cut = {};
    Floats units;
    for (unsigned j = 0; j < LANES; ++j) largest[j] = exponent_of(before[j]);
    for (unsigned k = 0; k < 32; ++k) {
        const Ints powers = of.powers_of_a[row][k] + load<Ints>(of.powers_of_b[k] + first);
        largest = powers > largest ? powers : largest;
    }
    // A product of two elements is exact in float32, and so is its multiple of a power of two, unless it is cut to 0
    // anyway. Where all products are 0, any power will do for them.
    for (unsigned j = 0; j < LANES; ++j) units[j] = float(power_of_two(FP8_BITS - larger(largest[j], -64)));
    for (unsigned k = 0; k < 32; ++k) {
        cut += __builtin_convertvector(of.finite_a[row][k] * load<Floats>(of.finite_b[k] + first) * units, Ints);
    }
    Doubles plain = {};
    bool has_plain = false;
    for (unsigned j = 0; j < LANES; ++j) {
        if (of.finite_rows[row] && of.finite_columns[first + j] && __builtin_isfinite(before[j])) {
            const double unit = power_of_two(FP8_BITS - largest[j]), total = cut[j] + whole(before[j] * unit);
            const double last = power_of_two(larger(exponent_of(float(total)) - FP8_BITS, 0));
            sums[j] = float(whole(total / last) * last / unit);
            continue;
        }
        if (!has_plain) plain = add_products(__builtin_convertvector(before, Doubles), of, row, first, 32);
        has_plain = true;
        sums[j] = float(plain[j]);
    }
}

// 16-bit formats: the dot products are exact in double and rounded once per wgmma, as in mma.h. Integers are exact, and
// wrap.
inline void compute(TensorCores& cores, IssuedProduct& issued) {
    const Product& product = issued.product;
    Chain& chain = cores.chains[issued.chain];
    static Operands operands;
    if (product.a_registers) {
        read_fragments(operands.a, issued);
    } else {
        const auto operand = operand_of(product.a_descriptor, product.a_transposed, product.element, "A", issued.pc);
        read_operand(operands.a[0], 32, 1, operand, 64);
    }
    const auto operand = operand_of(product.b_descriptor, product.b_transposed, product.element, "B", issued.pc);
    read_operand(operands.b[0], 1, 256, operand, product.columns);
    const bool fp8 = product.element == Element::E4M3 || product.element == Element::E5M2;
    if (fp8) find_powers(operands, product.columns, product.element);
    for (unsigned row = 0; row < 64; ++row) {
        for (unsigned first = 0; first < product.columns; first += LANES) {
            float* sums = chain.sums[row] + first;
            if (fp8) {
                add_fp8(sums, product.accumulate, operands, row, first);
                continue;
            }
            Doubles exact = {};
            for (unsigned j = 0; product.accumulate && j < LANES; ++j) {
                exact[j] = chain.integers ? double(bits_as<int32_t>(sums[j])) : double(sums[j]);
            }
            exact = add_products(exact, operands, row, first, depth_of(product.element));
            for (unsigned j = 0; j < LANES; ++j) {
                sums[j] = chain.integers ? bits_as<float>(uint32_t(int64_t(exact[j]))) : float(exact[j]);
            }
        }
    }
    issued.warps = 0;
    ++cores.num_computed;
}

}  // namespace host
