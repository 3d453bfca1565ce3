// expert_rows.cuh: rows of tokens go to the ranks that hold their experts, and results are fetched from there.
//
// Rank r holds the experts r * E / W to (r + 1) * E / W - 1, of E on W ranks. In memory that all ranks access, every rank
// has a row for each token of each rank, and beside it an id and a weight for each of the token's choices. Token t of rank
// r has row t * W + r on every rank, whatever the number of tokens: no place is claimed, and no count crosses the links.
//
// A call is a dispatch, the experts' products in place, and a combine. Each of the two kernels has one meeting, and the
// other one orders what it leaves open. A rank writes its rows to rank p before it meets p in a dispatch: it has met p in
// the combine before, which p began when its products were done, and it has fetched its own results. Products write rows
// that their rank has fetched in the combine before that dispatch. Nobody else uses the rows of a rank.
//
// Constants
//     WORLD_SIZE     W, ranks
//     SIGNAL_BYTES   from a rank's signals to its rows
//     TOP_K          choices of a token
//     NUM_EXPERTS    E, on all ranks; a multiple of W
//     id_t           element type of topk_ids
//     CODES          rows cross the links as codes; results do not
//     code_t         element type of codes

#pragma once
#include "quant.cuh"
#include "reduce.cuh"
#include "signals.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;

struct ExpertRows {
    static constexpr int ROW_VECS = HIDDEN_SIZE / VEC_SIZE, RANK_EXPERTS = NUM_EXPERTS / WORLD_SIZE;
    static constexpr int BATCH = WORLD_SIZE > 4 ? 1 : 8 / WORLD_SIZE;  // vectors of a thread: up to 8 loads in flight
    static constexpr int GROUP_SIZE = 128, GROUPS = HIDDEN_SIZE / GROUP_SIZE;  // of a row's codes, under one scale each

    World<WORLD_SIZE>& world;
    int first, step;  // vectors of this thread

    DEVICE ExpertRows(World<WORLD_SIZE>& world) : world(world) {
        first = int(blockIdx.x * NUM_THREADS + threadIdx.x);
        step = int(gridDim.x) * NUM_THREADS;
    }
    template <typename T>
    DEVICE T* memory(int other, int64_t offset) const {
        return reinterpret_cast<T*>(reinterpret_cast<char*>(world.of(other)) + offset);
    }
    // The row of vector i of this rank's tokens, on every rank, and where the vector lies in the rows.
    DEVICE int64_t row_of(int i) const { return int64_t(i / ROW_VECS) * WORLD_SIZE + world.rank; }
    DEVICE int64_t place(int i) const { return row_of(i) * HIDDEN_SIZE + i % ROW_VECS * VEC_SIZE; }
    // Of the vectors at `base` and every `step` behind it, a bit for each rank with an expert of the token. Ids that name no
    // expert name no rank.
    DEVICE void find_ranks(uint32_t (&ranks)[BATCH], int base, const id_t* topk_ids, int num_vecs) const {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
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
    // Stores a vector to the ranks that have a bit.
    DEVICE void send(const vec_t& vec, uint32_t ranks, int i, scalar_t* const (&rows)[WORLD_SIZE]) const {
#pragma unroll
        for (int other = 0; other < WORLD_SIZE; ++other) {
            if (ranks >> other & 1) vec.store(rows[other] + place(i));
        }
    }
    // Stores the vector's codes where its row begins, and the scale of its group, which is that of group_quant.cu. Threads
    // of a group are neighbours. Every lane of the warp takes part.
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
    // Writes every token's row to the ranks of its experts, and meets. The ids of a row are numbers of experts of the rank
    // that gets them, or -1 for experts of others; those of tokens from `num_tokens` to `most_tokens` are -1. Ids, weights
    // and scales lie at these offsets from a rank's signals, in bytes.
    DEVICE void dispatch(const scalar_t* x, const id_t* topk_ids, const float* topk_weights, int num_tokens,
                         int most_tokens, int64_t ids_offset, int64_t weights_offset, int64_t scales_offset) {
        const int num_vecs = num_tokens * ROW_VECS;
        scalar_t* rows[WORLD_SIZE];
#pragma unroll
        for (int other = 0; other < WORLD_SIZE; ++other) rows[other] = memory<scalar_t>(other, SIGNAL_BYTES);
        const int lane = threadIdx.x % WARP_SIZE;  // a warp goes on while its first lane has a vector
        for (int base = first; base - lane < num_vecs; base += BATCH * step) {
            vec_t vecs[BATCH];
            uint32_t ranks[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int i = base + b * step;
                vecs[b] = i < num_vecs ? vec_t::load(x + int64_t(i) * VEC_SIZE) : vec_t::full(0.0f);
            }
            find_ranks(ranks, base, topk_ids, num_vecs);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
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
    // Meets, and sums the results of every token in float32, in the order of ranks.
    DEVICE void combine(scalar_t* out, const id_t* topk_ids, int num_tokens) {
        const int num_vecs = num_tokens * ROW_VECS;
        uint32_t ranks[BATCH];
        find_ranks(ranks, first, topk_ids, num_vecs);
        const scalar_t* rows[WORLD_SIZE];
#pragma unroll
        for (int other = 0; other < WORLD_SIZE; ++other) rows[other] = memory<scalar_t>(other, SIGNAL_BYTES);
        world.meet<Flagged::START>();  // results were written by the kernels before
        for (int base = first; base < num_vecs; base += BATCH * step) {
            vec_t vecs[BATCH][WORLD_SIZE];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
#pragma unroll
                for (int other = 0; other < WORLD_SIZE; ++other) {
                    vecs[b][other] = vec_t::full(0.0f);
                    if (ranks[b] >> other & 1) vecs[b][other] = vec_t::load(rows[other] + place(base + b * step));
                }
            }
            find_ranks(ranks, base + BATCH * step, topk_ids, num_vecs);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                float sum[VEC_SIZE];
                sum_in_order(sum, vecs[b]);
                if (const int i = base + b * step; i < num_vecs) {
                    vec_t::from_floats(sum).store(out + int64_t(i) * VEC_SIZE);
                }
            }
        }
    }
};
