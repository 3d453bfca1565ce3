// expert_rows.cuh: expert parallelism: the dispatch of token rows to the ranks of their experts, and the combine.
//
// Rank r holds experts r * E / W to (r + 1) * E / W - 1 of the E experts on W ranks. In memory that all ranks access,
// every rank has a row for each token of each rank, with an id and a weight for each of the token's choices. Token t of
// rank r has row t * W + r on every rank, for any number of tokens: no slots are allocated, and no counts cross the
// links.
//
// A call is a dispatch, the grouped GEMMs of the experts in place, and a combine. Dispatch and combine have one meeting
// each (rank_barrier.cuh), and this is enough. A dispatch writes rows to rank p before it meets p: it has met p in the
// previous combine, which p began after its GEMMs, and it has read its own results there. The GEMMs of a rank overwrite
// a row after its owner has read the previous result, in the combine before this dispatch. No other kernel uses these
// rows.
//
// Constants
//     WORLD_SIZE     W, ranks
//     SIGNAL_BYTES   offset of a rank's rows from its signals
//     TOP_K          choices of a token
//     NUM_EXPERTS    E, on all ranks; a multiple of W
//     UNROLL         vectors of a thread in a round, each with a load or a store for every rank
//     id_t           element type of topk_ids
//     CODES          whether dispatch quantizes the rows; results are never quantized
//     code_t         element type of quantized rows

#pragma once
#include "quant.cuh"
#include "reduce.cuh"
#include "rank_barrier.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

struct ExpertRows {
    static constexpr int ROW_VECS = HIDDEN_SIZE / VEC_SIZE, RANK_EXPERTS = NUM_EXPERTS / WORLD_SIZE;
    static constexpr int GROUP_SIZE = 128, GROUPS = HIDDEN_SIZE / GROUP_SIZE;  // quantization groups of a row

    World<WORLD_SIZE>& world;
    int first, step;  // this thread takes vectors first, first + step, ...

    DEVICE ExpertRows(World<WORLD_SIZE>& world) : world(world) {
        first = int(blockIdx.x * NUM_THREADS + threadIdx.x);
        step = int(gridDim.x) * NUM_THREADS;
    }
    template <typename T>
    DEVICE T* memory(int other, int64_t offset) const {
        return reinterpret_cast<T*>(reinterpret_cast<char*>(world.of(other)) + offset);
    }
    // The row of vector i of this rank's tokens, which is the same on every rank, and the offset of the vector in the
    // rows.
    DEVICE int64_t row_of(int i) const { return int64_t(i / ROW_VECS) * WORLD_SIZE + world.rank; }
    DEVICE int64_t place(int i) const { return row_of(i) * HIDDEN_SIZE + i % ROW_VECS * VEC_SIZE; }
    // For the vectors base, base + step, ...: sets ranks[b] to a bit mask of the ranks that hold an expert of the
    // token. Out-of-range ids are ignored.
    DEVICE void find_ranks(uint32_t (&ranks)[UNROLL], int base, const id_t* topk_ids, int num_vecs) const {
#pragma unroll
        for (int b = 0; b < UNROLL; ++b) {
            const int i = base + b * step;
            ranks[b] = 0;
            if (i >= num_vecs) continue;
#pragma unroll
            for (int k = 0; k < TOP_K; ++k) {
                const id_t id = topk_ids[i / ROW_VECS * TOP_K + k];
                if (id >= 0 && id < NUM_EXPERTS) ranks[b] |= 1u << int(id) / RANK_EXPERTS;
            }
        }
    }
    // Stores a vector to the ranks in the mask.
    DEVICE void send(const vec_t& vec, uint32_t ranks, int i, scalar_t* const (&rows)[WORLD_SIZE]) const {
#pragma unroll
        for (int other = 0; other < WORLD_SIZE; ++other) {
            if (ranks >> other & 1) vec.store(rows[other] + place(i));
        }
    }
    // Quantizes the vector as group_quant.cu does, and stores it and the scale of its group to the ranks in the mask.
    // The quantized row begins at the offset of the unquantized row. The threads of a group are adjacent. Every lane of
    // the warp calls.
    DEVICE void send_codes(const vec_t& vec, uint32_t ranks, int i, scalar_t* const (&rows)[WORLD_SIZE],
                           int64_t scales_offset) const {
        constexpr float LARGEST = Codes<code_t>::largest;
        float x[VEC_SIZE];
        vec.to_floats(x);
        const float max_abs = lane_reduce<Max, GROUP_SIZE / VEC_SIZE>(vec.absmax());
        const float scale = ieee_divide(fmaxf(max_abs, 1e-10f), LARGEST);
        Quotient(scale).of_each(x, max_abs);
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) x[j] = fminf(fmaxf(x[j], -LARGEST), LARGEST);
        const auto codes = Vec<code_t, VEC_SIZE>::from_floats(x);
        const int column = i % ROW_VECS * VEC_SIZE;
#pragma unroll
        for (int other = 0; other < WORLD_SIZE; ++other) {
            if (!(ranks >> other & 1)) continue;
            codes.store(reinterpret_cast<code_t*>(rows[other] + row_of(i) * HIDDEN_SIZE) + column);
            if (column % GROUP_SIZE) continue;
            memory<float>(other, scales_offset)[row_of(i) * GROUPS + column / GROUP_SIZE] = scale;
        }
    }
    // Writes every token's row to the ranks of its experts, and meets. The ids that a rank receives are local expert
    // indices, or -1 for experts of other ranks and for tokens from `num_tokens` to `most_tokens` - 1. The offsets of
    // ids, weights and scales are in bytes from a rank's signals.
    DEVICE void dispatch(const scalar_t* x, const id_t* topk_ids, const float* topk_weights, int num_tokens,
                         int most_tokens, int64_t ids_offset, int64_t weights_offset, int64_t scales_offset) {
        const int num_vecs = num_tokens * ROW_VECS;
        scalar_t* rows[WORLD_SIZE];
#pragma unroll
        for (int other = 0; other < WORLD_SIZE; ++other) rows[other] = memory<scalar_t>(other, SIGNAL_BYTES);
        const int lane = threadIdx.x % WARP_SIZE;  // a warp loops while its first lane has a vector
        for (int base = first; base - lane < num_vecs; base += UNROLL * step) {
            vec_t vecs[UNROLL];
            uint32_t ranks[UNROLL];
#pragma unroll
            for (int b = 0; b < UNROLL; ++b) {
                const int i = base + b * step;
                vecs[b] = i < num_vecs ? vec_t::load(x + int64_t(i) * VEC_SIZE) : vec_t::full(0.0f);
            }
            find_ranks(ranks, base, topk_ids, num_vecs);
#pragma unroll
            for (int b = 0; b < UNROLL; ++b) {
                const int i = base + b * step;
                if constexpr (CODES) {
                    send_codes(vecs[b], ranks[b], i, rows, scales_offset);
                } else {
                    send(vecs[b], ranks[b], i, rows);
                }
            }
        }
        for (int i = first; i < most_tokens * (WORLD_SIZE * TOP_K); i += step) {
            const int token = i / (WORLD_SIZE * TOP_K), choice = token * TOP_K + i % TOP_K;
            const int other = i / TOP_K % WORLD_SIZE;
            const int64_t id = token < num_tokens ? int64_t(topk_ids[choice]) : -1;
            const uint64_t local = uint64_t(id) - uint64_t(other * RANK_EXPERTS);
            const bool is_there = local < RANK_EXPERTS;
            const int at = (token * WORLD_SIZE + world.rank) * TOP_K + i % TOP_K;
            memory<int32_t>(other, ids_offset)[at] = is_there ? int32_t(local) : -1;
            memory<float>(other, weights_offset)[at] = is_there ? topk_weights[choice] : 0.0f;
        }
        world.meet<Flagged::ALL>();
    }
    // Meets, and sums the results of every token over its ranks in float32, in the order of ranks.
    DEVICE void combine(scalar_t* out, const id_t* topk_ids, int num_tokens) {
        const int num_vecs = num_tokens * ROW_VECS;
        uint32_t ranks[UNROLL];
        find_ranks(ranks, first, topk_ids, num_vecs);
        const scalar_t* rows[WORLD_SIZE];
#pragma unroll
        for (int other = 0; other < WORLD_SIZE; ++other) rows[other] = memory<scalar_t>(other, SIGNAL_BYTES);
        world.meet<Flagged::START>();  // earlier kernels wrote the results
        for (int base = first; base < num_vecs; base += UNROLL * step) {
            vec_t vecs[UNROLL][WORLD_SIZE];
#pragma unroll
            for (int b = 0; b < UNROLL; ++b) {
#pragma unroll
                for (int other = 0; other < WORLD_SIZE; ++other) {
                    vecs[b][other] = vec_t::full(0.0f);
                    if (ranks[b] >> other & 1) vecs[b][other] = vec_t::load(rows[other] + place(base + b * step));
                }
            }
            find_ranks(ranks, base + UNROLL * step, topk_ids, num_vecs);
#pragma unroll
            for (int b = 0; b < UNROLL; ++b) {
                float sum[VEC_SIZE];
                sum_in_order(sum, vecs[b]);
                if (const int i = base + b * step; i < num_vecs) {
                    vec_t::from_floats(sum).store(out + int64_t(i) * VEC_SIZE);
                }
            }
        }
    }
};
