// number.h: the narrow floating-point formats, exact to the bit.
//
// Decoding is exact; encoding rounds to nearest, ties to even. A value that is too large becomes infinite, or, in the
// 8-bit formats, the largest finite value. NaN stays NaN and loses its sign and payload, as on the device.
//
// FNUZ formats have an exponent bias one larger than IEEE's, and no negative zero: that bit pattern is NaN.
#pragma once
#include <stdint.h>
#include <string.h>

namespace host {

template <typename To, typename From>
inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

// A format of EXPONENT and MANTISSA bits. LARGEST and NOT_A_NUMBER are the bit patterns, without sign, of the largest
// finite value and of NaN. If another pattern lies between them, it is infinity.
template <typename Code, int EXPONENT, int MANTISSA, uint32_t LARGEST, uint32_t NOT_A_NUMBER, bool SATURATES>
struct Narrow {
    static constexpr bool FNUZ = NOT_A_NUMBER >> (EXPONENT + MANTISSA);
    static constexpr int MIN_EXPONENT = 2 - FNUZ - (1 << (EXPONENT - 1));  // exponent of the smallest normal number
    static constexpr int SIGN = EXPONENT + MANTISSA;                       // position of the sign bit
    static constexpr uint32_t OVERFLOW = SATURATES ? LARGEST : LARGEST + 1;
    static constexpr bool HAS_INFINITY = LARGEST + 1 != NOT_A_NUMBER;
    static constexpr bool CUT = EXPONENT == 8;  // a pattern of the format is the upper half of a float's

    Code code;

    Narrow() = default;
    explicit Narrow(float x) : code(encode(bits_as<uint32_t>(x))) {}
    explicit operator float() const { return decode(code); }

    static Code encode(uint32_t bits) {
        const uint32_t sign = bits >> 31 << SIGN, magnitude = bits & 0x7fffffffu;
        if (magnitude > 0x7f800000u) return NOT_A_NUMBER;
        if constexpr (CUT) return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
        if (magnitude == 0x7f800000u) return sign | OVERFLOW;
        const int field = magnitude >> 23;
        const int exponent = (field ? field : 1) - 127;
        const uint64_t significand = (magnitude & 0x7fffffu) | (field ? 0x800000u : 0u);
        const int scale = exponent > MIN_EXPONENT ? exponent : MIN_EXPONENT;
        const int dropped = 23 - MANTISSA + scale - exponent;  // low bits of the significand that rounding drops
        if (dropped > 25) return FNUZ ? 0 : sign;
        const uint64_t half = dropped ? uint64_t(1) << (dropped - 1) : 0;
        const uint64_t odd = significand >> dropped & 1;
        const uint64_t rounded = (significand + (dropped ? half - 1 + odd : 0)) >> dropped;
        // The leading bit of a normal significand lies in the exponent field and adds 1 to it.
        const uint64_t result = rounded + (uint64_t(scale - MIN_EXPONENT) << MANTISSA);
        if (FNUZ && result == 0) return 0;
        return sign | (result > LARGEST ? OVERFLOW : uint32_t(result));
    }

    static float decode(uint32_t code) {
        const uint32_t magnitude = code & ((1u << SIGN) - 1), sign = code >> SIGN << 31;
        if constexpr (CUT) return bits_as<float>(magnitude > LARGEST + 1 ? 0x7fffffffu : code << 16);
        if (magnitude > LARGEST || (FNUZ && code == NOT_A_NUMBER)) {
            const bool infinite = HAS_INFINITY && magnitude == LARGEST + 1;
            return bits_as<float>(infinite ? sign | 0x7f800000u : 0x7fffffffu);
        }
        const uint32_t field = magnitude >> MANTISSA, fraction = magnitude & ((1u << MANTISSA) - 1);
        const int exponent = (field ? int(field) - 1 : 0) + MIN_EXPONENT - MANTISSA;  // of the last fraction bit
        const double value =
            double(fraction | (field ? 1u << MANTISSA : 0u)) * bits_as<double>(uint64_t(exponent + 1023) << 52);
        return sign ? -float(value) : float(value);
    }
};

using half = Narrow<uint16_t, 5, 10, 0x7bff, 0x7fff, false>;
using bf16 = Narrow<uint16_t, 8, 7, 0x7f7f, 0x7fff, false>;
using fp8_e4m3 = Narrow<uint8_t, 4, 3, 0x7e, 0x7f, true>;
using fp8_e5m2 = Narrow<uint8_t, 5, 2, 0x7b, 0x7f, true>;
using fp8_e4m3fnuz = Narrow<uint8_t, 4, 3, 0x7f, 0x80, true>;
using fp4_e2m1 = Narrow<uint8_t, 2, 1, 0x7, 0x7, true>;  // every pattern is a number

}  // namespace host
