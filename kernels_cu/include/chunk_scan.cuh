// chunk_scan.cuh: what the kernels of the chunked state-space scan share: the chunks of sequences, time steps, and the
// segments that blocks take.
//
// A segment is a run of neighbouring chunks that one block walks, its state at hand. Where there are several, a launch
// finds what each makes of a state of zeros: its own state and the decay of what it began with. chunk_scan_pass.cu adds
// these up. In the last launch a block begins with the state that the segment before its own leaves behind.

#pragma once
#include "arith.cuh"
#include "number.cuh"

constexpr float LOG2_OF_E = 1.4426950408889634f;

// A chunk of one sequence.
struct ScanChunk {
    int begin, end;  // tokens; none if the arguments say what cannot be
    int seq;         // its sequence, or -1
    bool restarts;   // the chunk begins with the initial state of its sequence
};

template <typename index_t>
struct ScanChunks {
    const index_t *cu_seqlens, *cu_chunk_seqlens, *last_chunk_indices, *seq_idx;
    int num_tokens, num_chunks, num_seqs;
    int64_t chunk_size;

    DEVICE ScanChunk at(int number) const {
        const int64_t seq = seq_idx[number], begin = cu_chunk_seqlens[number], end = cu_chunk_seqlens[number + 1];
        ScanChunk chunk{0, 0, -1, number == 0 || seq_idx[number - 1] != seq};
        if (seq < 0 || seq >= num_seqs) return chunk;
        chunk.seq = int(seq);
        const bool inside = begin >= 0 && begin < end && end <= num_tokens && end - begin <= chunk_size;
        if (inside && begin >= cu_seqlens[seq] && end <= cu_seqlens[seq + 1]) {
            chunk.begin = int(begin);
            chunk.end = int(end);
        }
        return chunk;
    }
    // Whether chunk `number` is the last one of sequence `seq`.
    DEVICE bool is_last(int seq, int number) const { return seq >= 0 && last_chunk_indices[seq] == number; }
    // Whether a sequence has a last chunk.
    DEVICE bool has_last(int seq) const {
        const int64_t last = last_chunk_indices[seq];
        return last >= 0 && last < num_chunks && seq_idx[last] == seq;
    }
    // The first chunk of a segment; of segment number `num_segments`, the number of chunks.
    DEVICE int first_of(int64_t segment, int64_t num_segments) const {
        return int(segment * num_chunks / num_segments);
    }
};

// The time step of a token, after bias, softplus and limits.
template <bool SOFTPLUS>
DEVICE float time_step(float dt, float bias, float dt_min, float dt_max) {
    dt += bias;
    if (SOFTPLUS && dt <= 20.0f) dt = log1pf(expf(dt));
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
