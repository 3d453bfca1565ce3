// operand.h: a matrix in shared memory, as a wgmma descriptor describes it.
#pragma once
#include "registers.h"
#include "number.h"

namespace host {

inline unsigned bytes_of(Element element) { return element <= Element::BF16 ? 2 : 1; }
inline unsigned depth_of(Element element) { return 32 / bytes_of(element); }  // K of one wgmma

inline float decode(const void* at, Element element) {
    switch (element) {
        case Element::HALF:
            return half::decode(*static_cast<const uint16_t*>(at));
        case Element::BF16:
            return bf16::decode(*static_cast<const uint16_t*>(at));
        case Element::E4M3:
            return fp8_e4m3::decode(*static_cast<const uint8_t*>(at));
        case Element::E5M2:
            return fp8_e5m2::decode(*static_cast<const uint8_t*>(at));
        default:
            return *static_cast<const int8_t*>(at);
    }
}

struct Operand {
    size_t start, leading, stride;
    Swizzle swizzle;
    unsigned pitch;  // bytes of a row
    bool transposed;
    Element element;

    // Returns the offset in shared memory of element k of row `row`.
    size_t at(unsigned row, unsigned k) const {
        const unsigned bytes = bytes_of(element), wide = pitch / bytes;
        if (swizzle == Swizzle::NONE) {
            if (transposed) {
                return start + row / wide * stride + k / 8 * leading + k % 8 * pitch + row % wide * bytes;
            }
            return start + row / 8 * stride + k * bytes / 16 * leading + row % 8 * 16 + k * bytes % 16;
        }
        if (transposed) {
            return swizzled(start + row / wide * leading + k / 8 * stride + k % 8 * pitch + row % wide * bytes,
                            swizzle);
        }
        return swizzled(start + row / 8 * stride + row % 8 * pitch + k * bytes, swizzle);
    }

    // Calls f(offset) for each chunk of these rows, over the K of one wgmma.
    template <typename F>
    void each_chunk(unsigned first, unsigned rows, F f) const {
        const unsigned step = CHUNK / bytes_of(element), depth = depth_of(element);
        for (unsigned row = first; row < first + rows; row += transposed ? step : 1) {
            for (unsigned k = 0; k < depth; k += transposed ? 1 : step) f(at(row, k));
        }
    }
};

// Decodes the descriptor of the matrix that messages call `name`. Raises a fault if it is invalid.
inline Operand operand_of(uint64_t descriptor, bool transposed, Element element, const char* name, const void* pc) {
    const Where where = {nullptr, 0, pc, nullptr};
    const Swizzle swizzles[] = {Swizzle::NONE, Swizzle::BYTES128, Swizzle::BYTES64, Swizzle::BYTES32};
    const unsigned pitches[] = {16, 32, 64, 128};
    const Swizzle swizzle = swizzles[descriptor >> 62];
    const unsigned pitch = pitches[uint32_t(swizzle)];
    const auto field = [=](int shift) { return size_t(descriptor >> shift & 0x3fff) << 4; };
    const Operand operand = {
        size_t(descriptor & 0x7fff) << 4, field(16), field(32), swizzle, pitch, transposed, element};
    if (descriptor >> 49 & 7) raise_fault("bad wgmma descriptor", where, "a base offset, of %s: not emulated", name);
    const size_t pattern = swizzle == Swizzle::NONE ? CHUNK : 8 * pitch;
    if (operand.stride % pattern) {
        raise_fault("bad wgmma descriptor", where, "stride of %zu bytes of %s: expected a multiple of %zu",
                    operand.stride, name, pattern);
    }
    return operand;
}

// Checks and records that a wgmma reads these rows of the operand.
inline void check_operand(const Operand& operand, unsigned first, unsigned rows, const Accessor& by, const void* pc) {
    const unsigned bytes[] = {0, 32, 64, 128};
    operand.each_chunk(first, rows, [&](size_t offset) {
        check_cells(state.rank, offset, CHUNK, Access::READ, by, pc);
        const unsigned loaded = cells.swizzles[state.rank][offset / CHUNK];
        if (loaded == 0 || loaded == 1 + unsigned(operand.swizzle)) return;
        raise_fault("bad wgmma descriptor", {nullptr, 0, pc, cell_at(state.rank, offset).write_pc},
                    "a matrix swizzled by %u bytes, where a TMA load has written with a swizzle of %u",
                    bytes[unsigned(operand.swizzle)], bytes[loaded - 1]);
    });
}

// Element k of row `row` goes to `to[row * row_pitch + k * k_pitch]`.
inline void read_operand(float* to, unsigned row_pitch, unsigned k_pitch, const Operand& operand, unsigned rows) {
    for (unsigned row = 0; row < rows; ++row) {
        for (unsigned k = 0; k < depth_of(operand.element); ++k) {
            to[row * row_pitch + k * k_pitch] = decode(memory.shared + operand.at(row, k), operand.element);
        }
    }
}

__attribute__((noinline)) uint64_t shared_offset(const void* address) {
    const size_t offset = offset_of(address);
    if (offset >= SHARED_BYTES) {
        raise_fault("bad wgmma descriptor", {nullptr, 0, __builtin_return_address(0)},
                    "of memory that is not the block's shared memory");
    }
    return offset;
}

}  // namespace host
