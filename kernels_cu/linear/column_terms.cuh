// column_terms.cuh: the scale and the zero point of a column of a packed weight in a group, each in both halves of a
// pair, for kernels with MMAs that take weights: quants minus zero points, times scales, rounded to T.
//
// The kernel defines before the include: the constants of the weight in packed_weight.cuh.
#pragma once
#include "dequant.cuh"
#include "group_scale.cuh"

static_assert(!ZERO_FLOATS || !(HAS_SCALES || ZERO_CODES || ADDED || EXPONENT > 0));

template <typename T>
struct ColumnTerms {
    using quants_t = Quants<T, BITS, EXPONENT>;
    using pair_t = Vec<T, 2>;
    pair_t scale, added;
    typename quants_t::Zero zero;

    // `scale` from a stored scale, and `added` from a stored zero point.
    template <typename S>
    static DEVICE pair_t twice(S x) {
        if constexpr (is_same<S, T>) {
            pair_t pair;
            pair.data[0] = pair.data[1] = x;
            return pair;
        } else {
            return pair_t::full(SCALE<S>(&x, 0));
        }
    }
    static DEVICE pair_t added_of(T x) {
        const pair_t pair = twice(x);
        if constexpr (quants_t::SUM_FACTOR == 1.0f) return pair;
        else return pair * pair_t::full(1.0f / quants_t::SUM_FACTOR);
    }

    // The weights of a pair of quants minus the zero point.
    DEVICE uint32_t scaled(pair_t pair) const {
        // The two factors are separate only to stay in range; together they often cancel to 1.
        constexpr float FACTOR = quants_t::FACTOR * power_of_two(GROUP_SCALE_EXPONENT);
        if constexpr (FACTOR != 1.0f) pair = pair * pair_t::full(FACTOR);
        if constexpr (ZERO_FLOATS) pair = pair - added;
        if constexpr (ADDED) multiply_add_pair<T>(pair.data, pair.data, scale.data, added.data);
        else if constexpr (HAS_SCALES) pair = pair * scale;
        return pair.template word<2>(0);
    }
};
