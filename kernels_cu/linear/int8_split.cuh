// int8_split.cuh: splits 16-bit floats into three int8 digits, for MMAs of bytes on tensor cores.
//
//     element = unit * (65536 * digit 0 + 256 * digit 1 + digit 2)
//
// Digits are signed bytes. A group of elements shares a unit, a power of two with which the largest magnitude of the
// group has 21 bits. Elements are thus rounded by at most 2^-22 of the power of two above the largest magnitude. The
// unit of a group with an infinity or NaN is NaN.
#pragma once
#include "vec.cuh"

// The digits of ELEMENTS adjacent elements in shared memory, the unit of each GROUP of them, and with HAS_SUMS the sum
// of each group.
template <int ELEMENTS, int GROUP, bool HAS_SUMS>
struct Digits {
    static constexpr int PITCH = ELEMENTS + 16;  // bytes from one digit of an element to the next, on different banks
    static constexpr int SIZE = 3 * PITCH + ELEMENTS / 16 * 8;
    static_assert(ELEMENTS % 128 == 0 && (GROUP == 16 || GROUP == 32));
    uint8_t* data;

    DEVICE uint8_t* at(int digit, int element) const { return data + digit * PITCH + element; }
    DEVICE float* units() const { return reinterpret_cast<float*>(data + 3 * PITCH); }
    DEVICE float* sums() const { return units() + ELEMENTS / GROUP; }

    // Splits elements `first` to `first` + 7. All lanes of the warp call; adjacent lanes have adjacent elements.
    template <typename T>
    DEVICE void store(const Vec<T, 8>& elements, int first) const {
        Vec<T, 2> most = Vec<T, 2>::full(0.0f);
#pragma unroll
        for (int i = 0; i < 8; i += 2) absmax_pair<true>(most.data, elements.data + i);
#pragma unroll
        for (int mask = 1; mask < GROUP / 8; mask *= 2) {
            Vec<T, 2> other;
            other.template word<2>(0) = shfl_xor(most.template word<2>(0), mask);
            absmax_pair<true>(most.data, other.data);
        }
        Vec<T, 2> largest;  // the larger magnitude of the two, as integers: NaN is the largest
        const uint32_t bits = most.template word<2>(0) & 0x7fff7fff;
        largest.template word<2>(0) = max(bits >> 16, bits & 0xffff);
        const uint32_t exponent = __float_as_uint(largest[0]) >> 23, least = max(exponent, uint32_t(21));
        const float scale = __uint_as_float((274 - least) << 23);
        const float unit = __uint_as_float(exponent == 255 ? 0x7fffffff : (least - 20) << 23);

        // 1.5 * 2^23 has an ulp of 1, so that the low bits of a sum with it are an integer. 0x8080 raises the two lower
        // digits, between -128 and 127, to 0 ... 255.
        constexpr uint32_t ZERO = 0x4b400000 + 0x8080;
        float x[8];
        elements.to_floats(x);
        uint32_t integers[8], sum = 0u - 8 * ZERO, words[3][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            integers[i] = __float_as_uint(fmaf(x[i], scale, __uint_as_float(ZERO)));
            sum += integers[i];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t* const four = integers + 4 * i;
            const uint32_t low = byte_perm(four[0], four[1], 0x5140), high = byte_perm(four[2], four[3], 0x5140);
            const uint32_t top =
                byte_perm(byte_perm(four[0], four[1], 0x0062), byte_perm(four[2], four[3], 0x0062), 0x5410);
            // Bytes of `top` are digits + 64: subtracts the 64 and extends the sign from bit 6 to bit 7.
            const uint32_t digits = top ^ 0x40404040;
            words[0][i] = digits + (digits & 0x40404040) * 2;
            words[1][i] = byte_perm(low, high, 0x7632) ^ 0x80808080;
            words[2][i] = byte_perm(low, high, 0x5410) ^ 0x80808080;
        }
#pragma unroll
        for (int digit = 0; digit < 3; ++digit) {
            *reinterpret_cast<uint2*>(at(digit, first)) = uint2{words[digit][0], words[digit][1]};
        }
#pragma unroll
        for (int mask = 1; mask < GROUP / 8 && HAS_SUMS; mask *= 2) sum += shfl_xor(sum, mask);
        if (first % GROUP == 0) {
            units()[first / GROUP] = unit;
            if constexpr (HAS_SUMS) sums()[first / GROUP] = float(int32_t(sum)) * unit;
        }
    }
};
