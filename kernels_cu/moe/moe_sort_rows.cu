// moe_sort_rows: the permutation of moe_permute, which sorts rows by expert.
//
//     inv_permuted_idx[t]           sorted index of row t: rows are sorted by bin
//     permuted_idx[index]           row t at this sorted index, or num_rows for a row of another device
//     expert_first_token_offset[e]  sorted index of the first row of expert e; the last element is the number of rows
//                                   of this device
//
// Bins in order: experts of this device by local id, other experts by global id, and one bin for rows with an invalid
// expert. The sort is stable.
//
// Threads: one cluster of CLUSTER blocks sorts all rows (expert_sort.cuh).
//
// Constants
//     id_t          element type of topk_ids
//     BIN_BITS      bits that hold the number of bins
//     CLUSTER       blocks that share the rows, one cluster
//     KEPT          most rows of a lane, kept in registers; 0: rows are read again (expert_sort.cuh)
//     HAS_MAP       expert_map gives the numbers of experts on this device

#include "expert_sort.cuh"

using sort_t = ExpertSort<id_t, NUM_THREADS, CLUSTER, BIN_BITS, KEPT>;

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, 1)
moe_sort_rows(const id_t* topk_ids,                 // [num_rows]
              const int32_t* token_expert_indices,  // [num_rows], not read
              const int32_t* expert_map,            // [num_experts]
              int64_t* expert_first_token_offset,   // [num_local + 1]
              int32_t* inv_permuted_idx,            // [num_rows]
              int32_t* permuted_idx,                // [num_rows]
              int64_t num_rows, int64_t num_experts, int64_t num_local, int64_t num_bins, int sort_warps,
              int warp_rows) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    const int local = int(num_local);
    sort_t sort(memory, topk_ids, int(num_bins), sort_warps, warp_rows, int(num_rows));
    const auto bin_of = [&](int, id_t id) {
        if (id < 0 || id >= num_experts) return int(num_bins) - 1;
        // Without a map, experts from num_local on belong to other devices, so that ids are bins already.
        const int elsewhere = (HAS_MAP ? local : 0) + int(id);
        return local_expert<HAS_MAP>(id, expert_map, num_experts, local, elsewhere);
    };
    sort.count(bin_of, [] {});
    sort.locate([](uint32_t rows) { return rows; });
    for (int i = sort.cluster_thread(); i <= local; i += sort.CLUSTER_THREADS) {
        expert_first_token_offset[i] = sort.begin[i];
    }
    sort.assign(bin_of, [&](int row, int bin, uint32_t slot) {
        inv_permuted_idx[row] = int32_t(slot);
        permuted_idx[slot] = bin < local ? row : int32_t(num_rows);
    });
    leave_cluster<CLUSTER>();
}
