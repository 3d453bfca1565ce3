// chunk_scan.cuh: what the kernels of the chunked state-space scan share: the chunks of sequences, time steps, and the
// segments that blocks take.
//
// Every chunk is split into the same number of parts, so that a few long chunks can be divided evenly: each part has
// part_tokens tokens, or the rest of the chunk, which may be empty. A segment is a run of consecutive parts that one
// block walks with its state in registers. With several segments the scan takes three launches: the first computes for
// each segment its final state from a state of zeros, and its total decay; chunk_scan_pass.cu chains these; in the last
// launch a block begins with the final state of the previous segment.

#pragma once
#include "selective.cuh"

// A part of a chunk of one sequence.
struct ScanPart {
    int begin, end;  // tokens; empty if the arguments are invalid
    int seq;         // its sequence, or -1
    int chunk;       // its chunk, if it is the last part of one; else -1
    int chunk_end;   // one past the last token of its chunk
    bool restarts;   // the part begins with the initial state of its sequence
};

// A tile of tokens in a part.
struct ScanTile {
    int number, token;  // the part's number, and the first token of the tile
    ScanPart part;

    DEVICE int count() const { return part.end - token; }  // tokens from the first on
};

template <typename index_t>
struct ScanChunks {
    const index_t *cu_seqlens, *cu_chunk_seqlens, *last_chunk_indices, *seq_idx;
    int num_tokens, num_chunks, num_seqs;
    int64_t chunk_size;
    int chunk_parts, part_tokens;

    DEVICE ScanPart at(int number) const {
        const int chunk = number / chunk_parts, part = number % chunk_parts;
        const int64_t seq = seq_idx[chunk], begin = cu_chunk_seqlens[chunk], end = cu_chunk_seqlens[chunk + 1];
        const bool restarts = part == 0 && (chunk == 0 || seq_idx[chunk - 1] != seq);
        ScanPart found{0, 0, -1, part == chunk_parts - 1 ? chunk : -1, 0, restarts};
        if (seq < 0 || seq >= num_seqs) return found;
        found.seq = int(seq);
        const bool inside = begin >= 0 && begin < end && end <= num_tokens && end - begin <= chunk_size;
        if (inside && begin >= cu_seqlens[seq] && end <= cu_seqlens[seq + 1]) {
            found.chunk_end = int(end);
            found.begin = int(min(begin + int64_t(part) * part_tokens, end));
            found.end = end_of(found);
        }
        return found;
    }
    // Part number `number`; `before` is the previous part. If both lie in one chunk, nothing is loaded.
    DEVICE ScanPart behind(const ScanPart& before, int number) const {
        const int part = number % chunk_parts;
        if (part == 0) return at(number);
        ScanPart found = before;
        found.restarts = false;
        found.chunk = part == chunk_parts - 1 ? number / chunk_parts : -1;
        found.begin = before.end;
        found.end = end_of(found);
        return found;
    }
    // The next tile; after the last tile, one with part number `end_part`.
    template <int TOKENS>
    DEVICE ScanTile tile_behind(const ScanTile& tile, int end_part) const {
        if (tile.count() > TOKENS) return {tile.number, tile.token + TOKENS, tile.part};
        if (tile.number + 1 == end_part) return {end_part, 0, {}};
        const ScanPart part = behind(tile.part, tile.number + 1);
        return {tile.number + 1, part.begin, part};
    }
    // The end of a part that begins at `part.begin`.
    DEVICE int end_of(const ScanPart& part) const {
        const bool is_last = part.chunk >= 0 || part.chunk_end - part.begin <= part_tokens;
        return is_last ? part.chunk_end : part.begin + part_tokens;
    }
    // Whether the state after the part is the final state of its sequence.
    DEVICE bool ends_sequence(const ScanPart& part) const {
        return part.seq >= 0 && part.chunk >= 0 && last_chunk_indices[part.seq] == part.chunk;
    }
    // Whether a sequence has a last chunk.
    DEVICE bool has_last(int seq) const {
        const int64_t last = last_chunk_indices[seq];
        return last >= 0 && last < num_chunks && seq_idx[last] == seq;
    }
    // The first part of a segment; for segment `num_segments`, the number of parts.
    DEVICE int first_of(int64_t segment, int64_t num_segments) const {
        return int(segment * num_chunks * chunk_parts / num_segments);
    }
};

// The time step of a token, after bias, softplus and limits.
template <bool SOFTPLUS>
DEVICE float time_step(float dt, float bias, float dt_min, float dt_max) {
    dt += bias;
    if (SOFTPLUS) dt = softplus(dt);
    return dt < dt_min ? dt_min : dt > dt_max ? dt_max : dt;  // NaN stays NaN
}

template <typename T>
DEVICE void store_float(T* address, float value) {
    *address = from_float<T>(value);
}

DEVICE float silu_of(float z) { return z / (1.0f + expf(-z)); }

// Writes the initial state of every sequence that has no last chunk: `count` elements of each state, from number
// `first` on. Warp `warp` of `num_warps` warps calls, with every lane.
template <typename state_t, typename initial_t, typename index_t>
DEVICE void
write_states_without_chunks(state_t* states, const initial_t* initial_states, const ScanChunks<index_t>& chunks,
                            int64_t state_size, int64_t first, int count, int warp, int num_warps) {
    const int lane = threadIdx.x % WARP_SIZE;
    for (int base = warp * WARP_SIZE; base < chunks.num_seqs; base += num_warps * WARP_SIZE) {
        lane_mask_t without = ballot(base + lane < chunks.num_seqs && !chunks.has_last(base + lane));
        for (int i = 0; without != 0; ++i, without >>= 1) {
            if (!(without & 1)) continue;
            const int64_t at = (base + i) * state_size + first;
            for (int j = lane; j < count; j += WARP_SIZE) {
                store_float(states + at + j, initial_states ? to_float(initial_states[at + j]) : 0.0f);
            }
        }
    }
}
