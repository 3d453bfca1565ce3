// moe_mm_data: problem sizes, offsets and permutations of a grouped GEMM over the rows of each expert.
//
//     problem_sizes1[e]      (rows of e, first_n, k), or (first_n, rows of e, k) with SWAP
//     problem_sizes2[e]      (rows of e, k, n), or (k, rows of e, n) with SWAP
//     expert_offsets[e]      rows of the experts before e; the last element counts all rows
//     blockscale_offsets[e]  the same, with each expert's rows rounded up to a multiple of 128
//     output_permutation[t]  index of row t among all rows, sorted by their experts
//     input_permutation[p]   token of the row at sorted index p; 0 after the last row
//
// A row is not sorted if its expert does not exist: its output_permutation is the number of sorted rows.
//
// Threads: one cluster of CLUSTER blocks sorts all rows (expert_sort.cuh).
//
// Constants
//     id_t            element type of topk_ids
//     BIN_BITS        bits that hold the number of experts
//     CLUSTER         blocks that share the rows, one cluster
//     KEPT            most rows of a lane, kept in registers; 0: rows are read again (expert_sort.cuh)
//     SORTS           the kernel writes offsets and permutations; otherwise sizes alone
//     SWAP            rows are the second size
//     HAS_BLOCKSCALE  the kernel writes blockscale_offsets

#include "expert_sort.cuh"
#include "moe_sizes.cuh"

using sort_t = ExpertSort<id_t, NUM_THREADS, CLUSTER, BIN_BITS, KEPT>;

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, 1)
moe_mm_data(const id_t* topk_ids,         // [num_rows]
            int32_t* expert_offsets,      // [num_experts + 1]
            int32_t* problem_sizes1,      // [num_experts, 3]
            int32_t* problem_sizes2,      // [num_experts, 3]
            int32_t* input_permutation,   // [num_rows]
            int32_t* output_permutation,  // [num_rows]
            int32_t* blockscale_offsets,  // [num_experts + 1]
            int64_t num_rows, int64_t num_experts, int64_t topk, int first_n, int n, int k, int sort_warps,
            int warp_rows) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    sort_t sort(memory, topk_ids, int(num_experts), sort_warps, warp_rows, int(num_rows));
    const auto expert_of = [&](int, id_t id) {
        return local_expert<false>(id, nullptr, num_experts, sort.bins, NO_BIN);
    };
    sort.count(expert_of, [] {});
    const bool leads = blockIdx.y == 0;  // this block writes the results that every block of the cluster knows
    if constexpr (SORTS && HAS_BLOCKSCALE) {
        const auto rounded = [](uint32_t rows) { return (rows + 127) / 128 * 128; };
        const uint32_t all = sort.scan(rounded, [&](int expert, uint32_t slot, uint32_t, uint32_t) {
            if (leads) blockscale_offsets[expert] = int32_t(slot);
        });
        if (sort.cluster_thread() == 0) blockscale_offsets[sort.bins] = int32_t(all);
    }
    const int32_t slots = int32_t(sort.locate([](uint32_t rows) { return rows; }));
    for (int expert = sort.cluster_thread(); expert < sort.bins; expert += sort.CLUSTER_THREADS) {
        const int rows = int(sort.rows_of[expert]);
        write_sizes<SWAP>(problem_sizes1 + 3 * expert, rows, first_n, k);
        write_sizes<SWAP>(problem_sizes2 + 3 * expert, rows, k, n);
        if (SORTS) expert_offsets[expert] = int32_t(sort.begin[expert]);
    }
    if constexpr (SORTS) {
        if (sort.cluster_thread() == 0) expert_offsets[sort.bins] = slots;
        sort.assign(expert_of, [&](int row, int expert, uint32_t slot) {
            output_permutation[row] = expert == NO_BIN ? slots : int32_t(slot);
            if (expert != NO_BIN) input_permutation[slot] = row / int(topk);
        });
        for (int64_t i = slots + sort.cluster_thread(); i < num_rows; i += sort.CLUSTER_THREADS) {
            input_permutation[i] = 0;
        }
    }
    leave_cluster<CLUSTER>();
}
