// boxes.h: the bytes that one bulk copy moves: a box of a tensor, given by its tensor map, or a run of bytes.
#pragma once
#include "barriers.h"

namespace host {

constexpr uint32_t TENSOR_MAP_MAGIC = 0x70616d74;
// Bytes of a chunk: a swizzle keeps a chunk contiguous, and addresses and sizes are multiples of it.
constexpr unsigned CHUNK = 16;

// Returns the swizzled position of the chunk at this offset of shared memory.
inline size_t swizzled(size_t offset, Swizzle swizzle) {
    const size_t masks[] = {0, 1, 3, 7};
    return offset ^ (offset >> 7 & masks[uint32_t(swizzle)]) << 4;
}

struct Box {
    TensorMap map;
    int at[MAX_DIMENSIONS];

    unsigned pitch() const { return map.box[0] * map.element_bytes; }  // bytes of a row
    unsigned bytes() const {
        unsigned bytes = pitch();
        for (unsigned i = 1; i < map.rank; ++i) bytes *= map.box[i];
        return bytes;
    }

    // Calls f(offset of the row in shared memory, its address in the tensor, first byte and number of bytes of the row
    // inside the tensor) for each row of the box.
    template <typename F>
    void each_row(F f) const {
        const int64_t width = map.sizes[0] ? map.sizes[0] : int64_t(1) << 32;
        const int64_t first = at[0] < 0 ? -int64_t(at[0]) : 0;
        const int64_t end = width - at[0] < int64_t(map.box[0]) ? width - at[0] : map.box[0];
        const unsigned rows = bytes() / pitch();
        for (unsigned row = 0; row < rows; ++row) {
            bool inside = end > first;
            uint64_t address = map.address + int64_t(at[0]) * map.element_bytes;
            unsigned rest = row;
            for (unsigned i = 1; i < map.rank; ++i) {
                const int64_t index = at[i] + int64_t(rest % map.box[i]);
                rest /= map.box[i];
                inside = inside && index >= 0 && index < (map.sizes[i] ? map.sizes[i] : int64_t(1) << 32);
                address += index * map.strides[i - 1];
            }
            f(size_t(row) * pitch(), address, inside ? unsigned(first * map.element_bytes) : 0u,
              inside ? unsigned((end - first) * map.element_bytes) : 0u);
        }
    }
};

// Returns the box that a kernel asks for. Raises a fault if the request is invalid.
inline Box box_of(const void* map, const int* at, unsigned rank, size_t shared, const char* operation, const void* pc) {
    const Where where = {nullptr, 0, pc, nullptr};
    state.asked_pc = pc;
    Box box = {};
    memcpy(&box.map, map, sizeof box.map);
    if (box.map.magic != TENSOR_MAP_MAGIC) {
        raise_fault("bad tensor map", where, "%s by what is no tensor map", operation);
    }
    if (box.map.rank != rank) {
        raise_fault("bad tensor map", where, "%s with %u coordinates, of a tensor of %u dimensions", operation, rank,
                    box.map.rank);
    }
    if (shared % 128) {
        raise_fault("misaligned access", where, "%s at byte %zu of shared memory: expected a multiple of 128",
                    operation, shared);
    }
    memcpy(box.at, at, rank * sizeof *at);
    return box;
}

// Returns a run of bytes at `address`: in global memory, or in shared memory for a copy between blocks.
inline Box run_of(const void* address, unsigned bytes, size_t shared, const char* operation, const void* pc) {
    state.asked_pc = pc;
    if (bytes == 0 || (reinterpret_cast<uintptr_t>(address) | shared | bytes) % CHUNK) {
        raise_fault("misaligned access", {nullptr, 0, pc},
                    "%s of %u bytes, %p and byte %zu of shared memory: expected multiples of %u", operation, bytes,
                    address, shared, CHUNK);
    }
    Box box = {};
    box.map.address = reinterpret_cast<uint64_t>(address);
    box.map.rank = 1;
    box.map.element_bytes = CHUNK;
    box.map.sizes[0] = box.map.box[0] = bytes / CHUNK;
    return box;
}

}  // namespace host
