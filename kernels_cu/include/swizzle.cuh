// swizzle.cuh: shared-memory tiles of 16-bit elements with conflict-free ldmatrix.
//
// A row consists of chunks of 8 elements, 16 bytes. Chunk c of row r is stored at chunk position c ^ (r % 8). One 8 x 8
// tile of ldmatrix reads chunk c of eight adjacent rows; the swizzle puts these chunks on different banks.
#pragma once
#include "number.cuh"

template <typename T, int ROW_CHUNKS>
struct SwizzledTile {
    static constexpr int PITCH = (ROW_CHUNKS + 7) / 8 * 8;  // row stride in chunks
    static constexpr int bytes(int rows) { return rows * PITCH * 16; }
    T* data;

    DEVICE T* at(int row, int chunk) const { return data + (row * PITCH + (chunk ^ row % 8)) * 8; }
    // at(origin + row, 2 * step + odd), where origin is a multiple of 8. The address is split into a part that depends
    // on the lane (row, odd) and a part that does not. The lane part takes only four values, one for each step % 4.
    DEVICE T* at(int origin, int row, int step, int odd) const {
        return data + (row * PITCH + (step % 4 * 2 ^ (odd ^ row % 8))) * 8 + origin * PITCH * 8 + step / 4 * 64;
    }
};

// A tile with a row stride of PITCH elements and the interface of SwizzledTile. PITCH is a multiple of 8, so rows begin
// at multiples of 16 bytes; it is chosen so that adjacent rows begin on different banks.
template <typename T, int PITCH>
struct PitchedTile {
    static_assert(PITCH % 8 == 0);
    static constexpr int bytes(int rows) { return rows * PITCH * int(sizeof(T)); }
    T* data;

    DEVICE T* at(int row, int chunk) const { return data + row * PITCH + chunk * 8; }
    DEVICE T* at(int origin, int row, int step, int odd) const {
        return data + (origin + row) * PITCH + step * 16 + odd * 8;
    }
};
