// layout_bytes.cuh: bytes [K, N]; only read one at a time.
//
//     byte k N + n: the quant of row k, column n
#pragma once
#include "packed_layout.cuh"

template <int BITS>
struct layout_bytes {
    static DEVICE uint32_t quant(const uint32_t* words, const PackedSize& size, uint32_t k, uint32_t n) {
        return reinterpret_cast<const uint8_t*>(words)[int64_t(k) * size.columns + n];
    }
};
