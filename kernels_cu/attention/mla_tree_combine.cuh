// mla_tree_combine.cuh: the combine of the pieces of a sequence (mla_schedule.cuh) inside an MLA decode kernel on
// Hopper, without another launch.
//
//     out = (w_l o_l + w_r o_r) / (w_l z_l + w_r z_r + 1e-6),   w_p = exp2(m_p - m),   m = max(m_l, m_r)
//
// The pieces of a sequence are the leaves of a binary tree. Two warps meet at a node: one has the pieces on its left,
// the other the pieces on its right, both for the same rows and columns. The first stores its accumulators o, row max m
// and row sum z, and is done with the sequence. The second adds both and goes on to the next node; no warp waits. The
// warp that has passed the root has the result of the sequence. The sum of two rounded products does not depend on
// their order, and so not on which warp comes first.
//
// A node is known by the share that its right pieces begin in. Each piece but the first of a sequence begins a share,
// and the right pieces of exactly one node begin with it.
#pragma once
#include "arith.cuh"
#include "attention.cuh"
#include "mla_schedule.cuh"

// NUM_ACCUMULATORS: accumulators of a lane, of ROWS rows: accumulator i belongs to row i / RUN % 2, or, of more than
// two rows, every four accumulators to the next two.
template <int NUM_ACCUMULATORS, int RUN, int ROWS = 2>
struct TreeCombine {
    static constexpr int OF_ROWS = NUM_ACCUMULATORS / 4;  // first float4 with row maxima and row sums, of two rows each
    static constexpr int VECS = OF_ROWS + ROWS / 2;       // float4 of a lane
    static constexpr int STEP = ROWS < 8 ? ROWS : 8;      // rows that are added at once
    float4* partials;                                     // [slots][warps][VECS][WARP_SIZE]
    uint32_t* nodes;  // [shares][warps]: 0, or 1 + the slot of the partial result that waits at the node
    int warps, warp;  // warps with the rows and columns of a sequence, over all CTAs; the rank of this warp

    // Adds the results of other pieces. Returns whether the warp has the result of the whole sequence. All lanes call.
    DEVICE bool
    combine(const MlaItem& item, float (&max_logit)[ROWS], float (&exp_sum)[ROWS], float (&o)[NUM_ACCUMULATORS]) const {
        for (int span = 1; span < item.pieces; span *= 2) {
            const int right = item.piece / (2 * span) * (2 * span) + span;
            if (right >= item.pieces) continue;
            uint32_t* const node = nodes + int64_t(item.first_share + right) * warps + warp;
            uint32_t waiting = from_first_lane([&] { return load_acquire(node); });
            if (!waiting) {
                store(item.slot, max_logit, exp_sum, o);
                sync_warp();
                waiting = from_first_lane([&] { return exchange_acq_rel(node, item.slot + 1); });
                if (!waiting) return false;
            }
            if (lane() == 0) store_relaxed(node, 0);  // for the next launch
            add(waiting - 1, max_logit, exp_sum, o);
        }
        return true;
    }

private:
    static DEVICE int lane() { return threadIdx.x % WARP_SIZE; }
    static DEVICE constexpr int row_of(int i) { return i / RUN % 2 + i / 4 * 2 % ROWS; }
    template <typename F>
    static DEVICE uint32_t from_first_lane(F value) {
        return shfl<WARP_SIZE>(lane() == 0 ? value() : 0u, 0);
    }
    DEVICE float4* partial(int slot) const {
        return partials + (int64_t(slot) * warps + warp) * VECS * WARP_SIZE + lane();
    }
    DEVICE void store(int slot, const float (&max_logit)[ROWS], const float (&exp_sum)[ROWS],
                      const float (&o)[NUM_ACCUMULATORS]) const {
        float4* const to = partial(slot);
#pragma unroll
        for (int i = 0; i < OF_ROWS; ++i) to[i * WARP_SIZE] = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
#pragma unroll
        for (int row = 0; row < ROWS; row += 2) {
            to[(OF_ROWS + row / 2) * WARP_SIZE] = {max_logit[row], max_logit[row + 1], exp_sum[row], exp_sum[row + 1]};
        }
    }
    DEVICE void add(int slot, float (&max_logit)[ROWS], float (&exp_sum)[ROWS], float (&o)[NUM_ACCUMULATORS]) const {
        sync_warp();  // the first lane has acquired it for all
#pragma unroll
        for (int first = 0; first < ROWS; first += STEP) add_rows(partial(slot), first, max_logit, exp_sum, o);
    }
    // Adds rows first to first + STEP - 1: the factors of more rows would spill.
    DEVICE void add_rows(const float4* from, int first, float (&max_logit)[ROWS], float (&exp_sum)[ROWS],
                         float (&o)[NUM_ACCUMULATORS]) const {
        float factor[STEP], other_factor[STEP];
        float4 two;
        bool scales = false;
#pragma unroll
        for (int i = 0; i < STEP; ++i) {
            const int row = first + i;
            if (i % 2 == 0) two = load_fresh(from + (OF_ROWS + row / 2) * WARP_SIZE);
            const float other_max = i % 2 ? two.y : two.x, other_sum = i % 2 ? two.w : two.z;
            const float larger = fmaxf(max_logit[row], other_max);
            factor[i] = relative_exp2(max_logit[row], larger);
            other_factor[i] = relative_exp2(other_max, larger);
            scales |= factor[i] != 1.0f;
            max_logit[row] = larger;
            exp_sum[row] = ieee_multiply(exp_sum[row], factor[i]) + ieee_multiply(other_sum, other_factor[i]);
        }
        // The branch keeps the products out of registers of their own, which would spill.
        if (any_lane(scales)) {
#pragma unroll
            for (int i = 0; i < NUM_ACCUMULATORS; ++i) {
                if (row_of(i) / STEP * STEP == first) o[i] = ieee_multiply(o[i], factor[row_of(i) % STEP]);
            }
        }
#pragma unroll
        for (int i = 0; i < NUM_ACCUMULATORS; i += 4) {
            if (row_of(i) / STEP * STEP != first) continue;
            const float4 x = load_fresh(from + i / 4 * WARP_SIZE);
            const float other[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) o[i + j] += ieee_multiply(other[j], other_factor[row_of(i + j) % STEP]);
        }
    }
};
