// product_table.cuh: W4A8: signed 4-bit quants select e4m3 values from lookup tables.
//
// A column has a table per group: the e4m3 products of its scale with -8 ... -1. A positive quant takes the entry of
// the negative one with the sign flipped; quant 0 gives 0. One byte permutation, with four quants as its selector,
// takes four bytes from the eight of a table.
#pragma once
#include "arith.cuh"

// The products of a scale with -8 ... -1, and with 0 ... 7.
struct ProductTable {
    uint32_t negative[2], positive[2];

    DEVICE void set(uint32_t low, uint32_t high) {
        negative[0] = low;
        negative[1] = high;
        // Byte q of `positive` is the entry of -q with the sign flipped, byte 0 is 0.
        positive[0] = byte_perm(high, 0, 0x1234) ^ 0x80808000u;
        positive[1] = byte_perm(low, high, 0x1234) ^ 0x80808080u;
    }
    // The values of the four quants in half q of a word.
    DEVICE uint32_t four(uint32_t word, int q) const {
        const uint32_t selector = (word & 0x77777777u) >> 16 * q;
        // One byte per quant: all ones if it is negative, else zeros.
        const uint32_t is_negative =
            q == 0 ? signs_of_bytes<0x5140>(word << 4, word) : signs_of_bytes<0x7362>(word << 4, word);
        return (byte_perm(negative[0], negative[1], selector) & is_negative) |
               (byte_perm(positive[0], positive[1], selector) & ~is_negative);
    }
};
