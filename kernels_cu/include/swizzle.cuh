// swizzle.cuh: matrices of 16-bit elements in shared memory, laid out for ldmatrix without bank conflicts.
//
// A row is a sequence of chunks of 8 elements, 16 bytes. Chunk c of row r lies where chunk c ^ (r % 8) would lie in a
// plain layout. So the chunks c of eight neighbouring rows, which one fragment takes, lie on different banks.
#pragma once
#include "number.cuh"

template <typename T, int ROW_CHUNKS>
struct SwizzledTile {
    static constexpr int PITCH = (ROW_CHUNKS + 7) / 8 * 8;  // chunks from one row to the next
    static constexpr int bytes(int rows) { return rows * PITCH * 16; }
    T* data;

    DEVICE T* at(int row, int chunk) const { return data + (row * PITCH + (chunk ^ row % 8)) * 8; }
    // at(origin + row, 2 * step + odd), where origin is a multiple of 8. The address is a sum of what depends on the
    // lane (row, odd) and what does not; the former has four values, one for each step % 4.
    DEVICE T* at(int origin, int row, int step, int odd) const {
        return data + (row * PITCH + (step % 4 * 2 ^ (odd ^ row % 8))) * 8 + origin * PITCH * 8 + step / 4 * 64;
    }
};

// A matrix whose rows are PITCH elements apart, as operands are loaded from a SwizzledTile: rows begin at multiples of 16
// bytes, neighbours on different banks.
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
