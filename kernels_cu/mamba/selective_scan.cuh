// selective_scan.cuh: what the kernels of the selective scan share: the part of a sequence that is at hand, the rows of
// its channels, and the slots of its states.
//
// Before it, a kernel says TILE_TOKENS, the tokens of a tile, a multiple of UNIT.

#pragma once
#include "selective.cuh"
#include "vec.cuh"

constexpr int UNIT = VEC_SIZE > 4 ? VEC_SIZE : 4;  // adjacent tokens of a channel that a thread handles at a time
using unit_t = Vec<scalar_t, UNIT>;

// A unit in flight from memory, kept as words: the compiler would unpack elements, and so wait for the load, where the
// two ways to load a unit merge.
struct LoadedUnit {
    static constexpr int PACKED = 4 / int(sizeof(scalar_t)), ACCESS = VEC_SIZE / PACKED;  // elements, words
    uint32_t words[UNIT / PACKED] = {};

    template <typename Exists>
    static DEVICE LoadedUnit load_if(const scalar_t* row, Exists exists) {
        using bits_t = typename word_of<int(sizeof(scalar_t))>::type;
        LoadedUnit result;
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
            if (!exists(j)) continue;
            const uint32_t bits = *reinterpret_cast<const bits_t*>(row + j);
            result.words[j / PACKED] |= bits << 32 / PACKED * (j % PACKED);
        }
        return result;
    }
    static DEVICE LoadedUnit load(const scalar_t* row) {
        if constexpr (ACCESS == 0) {
            return load_if(row, [](int) { return true; });
        } else {
            LoadedUnit result;
            load_words<ACCESS>(reinterpret_cast<const uint32_t*>(row), result.words);
            return result;
        }
    }
    DEVICE unit_t unit() const {
        unit_t result;
#pragma unroll
        for (int k = 0; k < UNIT / PACKED; ++k) result.word<PACKED>(k * PACKED) = words[k];
        return result;
    }

private:
    template <int N, int COUNT>
    static DEVICE void load_words(const uint32_t* from, uint32_t (&to)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; i += N) {
            const auto vec = Vec<uint32_t, N>::load(from + i);
#pragma unroll
            for (int k = 0; k < N; ++k) to[i + k] = vec.data[k];
        }
    }
};

// Tokens origin + first ... origin + last - 1 of a row. Origins are multiples of TILE_TOKENS, as alignment asks.
struct Tile {
    int64_t origin;
    int64_t block_end;  // the state is stored before this token
    int first, last;

    DEVICE static Tile from(int64_t begin, int64_t block_end) {
        const int64_t origin = begin / TILE_TOKENS * TILE_TOKENS;
        return {origin, block_end, int(begin - origin), int(min(block_end - origin, int64_t(TILE_TOKENS)))};
    }
    DEVICE Tile next(int64_t end, int64_t block_size) const {
        const int64_t begin = origin + last;
        const bool same_block = begin < block_end;
        return from(begin, same_block ? block_end : end - begin <= block_size ? end : begin + block_size);
    }
    DEVICE bool empty() const { return first == last; }
    DEVICE bool ends_block() const { return origin + last == block_end; }
    DEVICE bool has(int column) const { return column >= first && column < last; }
    DEVICE bool has_all(int column, int count) const { return column >= first && column + count <= last; }
    DEVICE bool has_none(int column, int count) const { return max(column, first) >= min(column + count, last); }

    // The elements of a row that the unit at `column` has in the tile; 0 for others.
    DEVICE LoadedUnit load(const scalar_t* row, int column) const {
        row += origin + column;
        if (has_all(column, UNIT)) return LoadedUnit::load(row);
        return LoadedUnit::load_if(row, [&](int j) { return has(column + j); });
    }
    DEVICE void store(scalar_t* row, int column, const float (&x)[UNIT]) const {
        const unit_t unit = unit_t::from_floats(x);
        if (has_all(column, UNIT)) {
            unit.store<VEC_SIZE>(row + origin + column);
        } else {
#pragma unroll
            for (int j = 0; j < UNIT; ++j) {
                if (has(column + j)) row[origin + column + j] = unit.data[j];
            }
        }
    }
};

// The tensors at the block's sequence and first channel.
struct Rows {
    const scalar_t *u, *B, *C;
    scalar_t *delta, *z;
    const float *bias, *D;
    int64_t u_stride, delta_stride, z_stride, B_stride, C_stride;
    int channels;  // valid channels of the block
    bool softplus;
};

// The tokens of a sequence, and where its states lie.
struct Sequence {
    int64_t number, begin, end;  // sequence number and token range; empty or invalid if begin >= end
    int64_t slot;                // slot of the initial state; -1 if the slot does not exist
    int64_t block_size;          // tokens of a block; a state is stored after each block
    int64_t first_size;          // tokens of the first block
    Slots slots;
    const int32_t *of_first, *of_last;  // columns of the slots after the first block and after the last, or null

    DEVICE Sequence(int64_t number, const int32_t* query_start_loc, const int32_t* cache_indices,
                    const int32_t* of_first, const int32_t* of_last, const int32_t* of_initial, int64_t num_tokens,
                    int64_t num_slots, int64_t columns, int64_t pad_slot_id, int64_t size, int64_t slots_stride,
                    const int32_t* cu_chunk_seqlen, const int32_t* last_chunk_indices, int64_t num_chunks)
        : number(number),
          begin(0),
          end(num_tokens),
          slots{cache_indices + number * slots_stride, columns, num_slots, pad_slot_id},
          of_first(of_first),
          of_last(of_last) {
        if (query_start_loc) {
            begin = query_start_loc[number];
            end = query_start_loc[number + 1];
            if (begin < 0 || end > num_tokens) end = begin;
        }
        slot = columns < 0 ? number : slots.at(of_last ? of_initial[number] : 0);
        first_size = block_size = of_last ? size : end - begin;
        if (!last_chunk_indices) return;
        const int64_t chunk = number ? int64_t(last_chunk_indices[number - 1]) + 1 : 0;
        if (chunk < 0 || chunk >= num_chunks) return;
        const int64_t tokens = int64_t(cu_chunk_seqlen[chunk + 1]) - cu_chunk_seqlen[chunk];
        if (tokens >= 1 && tokens <= block_size) first_size = tokens;
    }

    DEVICE bool empty() const { return begin >= end || slot < 0; }
    DEVICE Tile first_tile() const { return Tile::from(begin, end - begin <= first_size ? end : begin + first_size); }
    // The slot of the state after block `block`, which ends with the tile's last token; -1 if it has no slot.
    DEVICE int64_t slot_behind(const Tile& tile, int64_t block) const {
        if (!of_last) return slot;
        return slots.at(tile.block_end == end ? of_last[number] : of_first[number] + block);
    }
};
